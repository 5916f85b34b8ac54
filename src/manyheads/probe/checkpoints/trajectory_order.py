r"""Order of checkpoints by their distances: interchanged or misplaced ones, and those of another run.

Along a training run the distance between two checkpoints grows with the steps between them. The path through the
checkpoints in their stated order, :math:`\sum_t D_{t, t+1}`, is then shorter than in another one: interchanging two
neighbours at equal distances makes the two edges beside them twice as long on a straight trajectory, and sqrt(2) times
on one of independent updates. In a stationary phase all distances are equal and no order is the shorter one.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from manyheads._namespaces import Floats

# An order is wrong if another one makes the edges that it changes shorter than this share of what they are.
SHORTER = 0.9
# A checkpoint stands apart if going past it is shorter than this share of going through it (stationary: 0.5) ...
APART = 0.4
# ... and if it is farther than this from every other checkpoint, in distances between its neighbours.
FAR = 2.0


@dataclass(frozen=True)
class Misplaced:
    """A place where the order is wrong."""

    kind: str  # "interchanged", "misplaced" or "apart"
    # Places in the stated order, from 0: the two that are interchanged; the misplaced one, and the one that it follows
    # (-1: it comes first); the one that stands apart
    places: tuple[int, ...]
    before: float  # length of the edges concerned, in the stated order
    after: float  # and in the other


def find_misplaced(distances: Floats) -> list[Misplaced]:
    """Find checkpoints that are out of order, one change after another, the one that shortens the path most first.

    Distances (checkpoints, checkpoints) are symmetric; checkpoints of distance 0 to each other are to be left out. A
    checkpoint at either end cannot stand apart, and the direction of the whole series has no length.

    Examples
    --------
    >>> import numpy as np
    >>> steps = np.array([0.0, 1.0, 3.0, 2.0, 4.0])
    >>> [(each.kind, each.places) for each in find_misplaced(abs(steps[:, None] - steps))]
    [('interchanged', (2, 3))]
    """
    order = list(range(len(distances)))
    found = []
    for place in range(len(order) - 2, 0, -1):
        left, middle, right = order[place - 1 : place + 2]
        past, through = distances[left, right], distances[left, middle] + distances[middle, right]
        nearest = min(distances[middle, other] for other in range(len(distances)) if other != middle)
        if past < APART * through and nearest > FAR * past:
            found.append(Misplaced("apart", (middle,), float(through), float(past)))
            order.remove(middle)
    for _ in range(len(order)):
        best = min(_changes(order, distances), key=lambda change: change[0].after - change[0].before, default=None)
        if best is None:
            break
        change, order = best
        found.append(change)
    return found


def _changes(order: list[int], distances: Floats) -> Iterator[tuple[Misplaced, list[int]]]:
    """Yield every change of the order that shortens the edges it changes by enough, with the new order."""
    changes = []
    for first, second in itertools.combinations(range(len(order)), 2):
        swapped = list(order)
        swapped[first], swapped[second] = order[second], order[first]
        changes.append(("interchanged", (order[first], order[second]), swapped))
    for here, there in itertools.permutations(range(len(order)), 2):
        if abs(here - there) > 1:  # neighbours are interchanged above
            moved = order[:here] + order[here + 1 :]
            moved.insert(there, order[here])
            changes.append(("misplaced", (order[here], moved[there - 1] if there else -1), moved))
    edges = {frozenset(edge) for edge in itertools.pairwise(order)}
    for kind, places, other in changes:
        others = {frozenset(edge) for edge in itertools.pairwise(other)}
        before = sum(distances[tuple(edge)] for edge in edges - others)
        after = sum(distances[tuple(edge)] for edge in others - edges)
        if after < SHORTER * before:
            yield Misplaced(kind, places, float(before), float(after)), other
