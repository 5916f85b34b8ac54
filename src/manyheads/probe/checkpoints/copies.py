r"""Detection of copied and interchanged checkpoints and tensors, rounded weights, and a wrong order of checkpoints.

Along a training run the distance between two checkpoints grows with the steps between them. The path through the
checkpoints in their stated order, :math:`\sum_t D_{t, t+1}`, is then shorter than in another one: interchanging two
neighbours at equal distances makes the two edges beside them twice as long on a straight trajectory, and sqrt(2) times
on one of independent updates. In a stationary phase all distances are equal and no order is the shorter one.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manyheads._namespaces import Floats
from manyheads.models.checkpoints.tensor_file import DTYPES
from manyheads.models.refusals import shorten
from manyheads.probe.checkpoints.contents import NARROW, Contents, Finding, Notes

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


CLOSER = 0.5  # A tensor holds what another one held if it is nearer to it than this share of the distance to itself
# ... and than this share of its norm: unrelated ones are farther.
ALIKE = 0.9
SMALL = 1e-3  # absolute values below which F16 has few digits
# Share of the sampled entries that have to change before a tensor that comes back is a copy, and how many.
CHANGED, ENTRIES = 0.25, 16
STANDS_OUT = 32.0  # the largest entry over the next one, beyond which it decides distances alone


def find_copies(contents: list[Contents]) -> list[Finding]:
    """Find checkpoints that hold the weights of another, also rounded; drop them from the list."""
    findings = []
    for later in list(contents):
        for earlier in contents[: contents.index(later)]:
            if later.entries.keys() != earlier.entries.keys() or not later.samples:
                continue
            if later.hashes == earlier.hashes:
                evidence = f"all {len(later.hashes)} tensors have the same sha256"
            elif dtype := _equal_when_rounded(later, earlier):
                evidence = f"{len(later.samples)} tensors agree when rounded to {dtype}"
            else:
                continue
            findings.append(Finding("duplicate", later.name, f"holds the weights of {earlier.name}", evidence))
            contents.remove(later)
            break
    return findings


def _equal_when_rounded(one: Contents, other: Contents) -> str:
    """Return the narrower type of one checkpoint if the other is equal when rounded to it; empty if there is none."""
    for dtype in NARROW:
        if any(_is_narrow(each, dtype) for each in (one, other)) and all(
            sample.shape == other.samples[name].shape
            and np.array_equal(_round(sample, dtype), _round(other.samples[name], dtype))
            for name, sample in one.samples.items()
        ):
            return dtype
    return ""


def _is_narrow(content: Contents, dtype: str) -> bool:
    """Tell whether all values of a checkpoint are those of a type, whatever it is held in."""
    names = _informative_tensors(content)
    return bool(names) and all(content.entries[name].dtype == dtype or dtype in content.narrow[name] for name in names)


def _informative_tensors(content: Contents) -> list[str]:
    """Return the tensors whose values identify a type; gains of one and biases near zero are exact in any type."""
    samples = {name: content.samples[name] for name in content.narrow}
    return [name for name, some in samples.items() if np.unique(some).size > 2 and np.median(np.abs(some)) > SMALL]


def _round(sample: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    return sample.astype(DTYPES[dtype]).astype(np.float32)


def find_rounded(contents: list[Contents], unchecked: Notes) -> list[Finding]:
    """Find tensors rounded to a narrower type than their own, or to integers, unless they are so at most steps."""
    found: dict[str, list[str]] = defaultdict(list)
    telling = {content.name: set(_informative_tensors(content)) for content in contents}
    for name in sorted(set().union(*telling.values())):
        held = [each for each in contents if name in telling[each.name]]
        rounded = [each for each in held if each.narrow[name]]
        if len(rounded) <= len(held) / 2:
            for each in rounded:
                found[each.name].append(name)
    rounded = [each for each in contents if _is_narrow(each, "BF16")]
    for each in rounded if len(rounded) <= len(contents) / 2 else ():  # in a series of values of F16
        if each.name not in found and all(each.entries[name].dtype != "BF16" for name in each.samples):
            found[each.name] += sorted(telling[each.name])
    findings = [
        Finding("rounded", where, f"{len(names)} tensors hold values of a narrower type than their own", shorten(names))
        for where, names in found.items()
    ]
    held_in = [each.narrow[name] for each in contents for name in telling[each.name]]
    throughout = [dtype for dtype in NARROW if held_in and all(dtype in narrow for narrow in held_in)]
    if throughout and len(contents) == 1:
        dtypes = sorted({contents[0].entries[name].dtype for name in contents[0].narrow})
        what = f"all tensors hold values of {throughout[-1]} in {', '.join(dtypes)}"
        findings.append(Finding("rounded", contents[0].name, what, f"{len(contents[0].narrow)} tensors"))
    elif throughout:
        unchecked["rounding", f"all values of all checkpoints are those of {throughout[-1]} in a wider type"] = []
    return findings + _find_quantized(contents, unchecked)


def _find_quantized(contents: list[Contents], unchecked: Notes) -> list[Finding]:
    """Find matrices of equidistant values, as of int8, unless they are so at most steps."""
    found: dict[str, list[str]] = defaultdict(list)
    throughout = []
    for name in sorted(set().union(*(each.grids for each in contents))):
        rounded = [each for each in contents if name in each.grids]
        if len(contents) > 1 and len(rounded) > sum(name in each.extremes for each in contents) / 2:
            throughout.append(name)
        else:
            for each in rounded:
                found[each.name].append(name)
    if throughout:
        why = f"{len(throughout)} matrices hold at most 256 equidistant values at most steps, as of int8"
        unchecked["rounding to integers", why] = []
    what = "matrices hold at most 256 equidistant values in a row, column or group, as of int8"
    return [Finding("rounded", where, f"{len(names)} {what}", shorten(names)) for where, names in found.items()]


def find_partial_copies(contents: list[Contents], altered: set[str] | None = None) -> tuple[list[Finding], set[str]]:
    """Find tensors that change and come back, or, but for altered ones, stand still between changes; with their names.

    A tensor that stands still up to some checkpoint, or from there on, is frozen. One that comes back at once is a copy
    if it moves before and after that; otherwise it was altered in between, and is no copy.
    """
    shared: dict[tuple[str, str], list[str]] = defaultdict(list)
    tensors = sorted(set().union(*(content.extremes for content in contents)))
    for name in tensors:
        holders = [each for each in contents if name in each.extremes and each.samples[name].size >= ENTRIES]
        pairs = itertools.pairwise(each.samples[name] for each in holders)
        inside = (a.shape != b.shape or float(np.mean(a != b)) > CHANGED for a, b in pairs)
        moved = [False, *inside, False]  # around each
        latest: dict[str, int] = {}
        for place, content in enumerate(holders):
            before = latest.get(content.hashes[name], place)
            latest[content.hashes[name]] = place
            back = any(moved[before + 1 : place + 1]) and (place - before > 2 or (moved[before] and moved[place + 1]))
            pause = before == place - 1 and moved[before] and moved[place + 1]
            if back if altered is None else pause and name not in altered:
                shared[content.name, holders[before].name].append(name)
    findings = []
    for (later, earlier), names in shared.items():
        what = f"{len(names)} of {len(tensors)} tensors are those of {earlier}"
        findings.append(Finding("copied tensors", later, what, shorten(names)))
    return findings, set().union(*shared.values())


def find_interchanged(contents: list[Contents]) -> tuple[set[str], list[Finding]]:
    """Find matrices of one shape that hold what another one held in the checkpoint before; return their names too."""
    findings, names = [], set()
    pending: frozenset[tuple[str, str]] = frozenset()
    for before, after in itertools.pairwise(contents):
        moved = frozenset(_find_moves(before, after))
        if moved and moved != pending:
            pairs = [f"{name} holds what {other} held" for name, other in sorted(moved)]
            what = f"{len(moved)} matrices hold what another one of their shape held"
            where = f"{before.name} to {after.name}"
            findings.append(Finding("interchanged tensors", where, what, shorten(pairs, length=300)))
            names |= {name for name, _ in moved}
            pending = frozenset((other, name) for name, other in moved)  # what undoes it is no second finding
        else:
            pending = frozenset()
    return names, findings


def _find_moves(before: Contents, after: Contents) -> Iterator[tuple[str, str]]:
    """Yield the matrices that are far nearer to what another one of their shape was than to themselves."""
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in before.samples:
        shape, peaks = before.entries[name].shape, [each.extremes.get(name) for each in (before, after)]
        if any(peak is None or peak.largest > STANDS_OUT * peak.second for peak in peaks):
            continue  # one entry decides distances
        if len(shape) >= 2 and shape == after.entries[name].shape:
            groups[shape].append(name)
    for names in groups.values():
        old = np.array([before.samples[name] for name in names], np.float64)
        sizes = np.linalg.norm(old, axis=1)
        for place, name in enumerate(names):
            new = after.samples[name].astype(np.float64)
            gaps = np.linalg.norm(old - new, axis=1)
            gaps[sizes < CLOSER * np.linalg.norm(new)] = np.inf  # zeros are near to everything that is small
            nearest = int(np.argmin(gaps))
            least = min(CLOSER * np.linalg.norm(old[place] - new), ALIKE * np.linalg.norm(new))
            if nearest != place and gaps[nearest] < least:
                yield name, names[nearest]
