"""Changes of every tensor along a checkpoint series: distances over all entries, and single entries that jump.

Checkpoints are read tensor by tensor and by blocks of rows, those of a block together; no tensor is ever held whole.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.models.checkpoint import Checkpoint
from manyheads.probe.checkpoints.contents import blocks

Array = NDArray[np.float64]

# Candidates for single entries that are kept of a block.
TOP = 3


@dataclass(frozen=True)
class Jump:
    """One entry whose change is `times` the RMS change of the others in its row and in its column, the larger one."""

    place: tuple[int, ...]
    before: float
    after: float
    times: float


@dataclass
class Change:
    """What a tensor did from one checkpoint to the next.

    Attributes
    ----------
    size, spacing
        Number of entries, and the spacing of the numbers that they are, relative to them.
    before, after, product
        Squared norms of the tensor in both checkpoints, and their inner product.
    shift
        Sum of the entries of the difference.
    moved
        Squared norm of the difference.
    jumps
        Entries that may have changed by themselves.
    """

    size: int = 0
    spacing: float = 0.0
    before: float = 0.0
    after: float = 0.0
    product: float = 0.0
    shift: float = 0.0
    moved: float = 0.0
    jumps: list[Jump] = field(default_factory=list)

    @property
    def is_rounding(self) -> bool:
        """Whether rounding to the type explains the difference."""
        return self.moved <= (2 * self.spacing) ** 2 * max(self.before, self.after)

    @property
    def rms(self) -> float:
        """RMS of the difference."""
        return float(np.sqrt(self.moved / max(self.size, 1)))


def measure_changes(
    checkpoints: Sequence[Checkpoint], name: str, spacings: Sequence[float]
) -> tuple[list[Change], list[float]]:
    """Return the change of a tensor over every interval, and its distance past every inner checkpoint.

    Parameters
    ----------
    checkpoints
        In their order; all hold the tensor in one shape.
    name
        The tensor.
    spacings
        Spacing of the numbers that each holds, relative to them: steps of the spacing are no jumps.

    Returns
    -------
    list[Change], list[float]
        Of one less than the checkpoints, and distances from checkpoint t - 1 to t + 1, of two less.
    """
    entry = checkpoints[0].entry(name)
    changes = [Change(entry.size, max(pair)) for pair in itertools.pairwise(spacings)]
    past = np.zeros(max(len(checkpoints) - 2, 0))
    columns: list[Any] = [0.0] * len(changes)
    found: list[list[tuple[int, int, float, float, float]]] = [[] for _ in changes]
    start = 0
    for parts in zip(*(blocks(checkpoint, name, checkpoint.entry(name)) for checkpoint in checkpoints), strict=True):
        older: Array | None = None
        old: Array | None = None
        for place, part in enumerate(parts):
            # A vector is one row.
            new = part.astype(np.float64).reshape((1, -1) if part.ndim < 2 else (part.shape[0], -1))
            if old is not None:
                _add(changes[place - 1], old, new)
                squares = (new - old) ** 2
                columns[place - 1] = columns[place - 1] + squares.sum(axis=0)
                found[place - 1] += _candidates(squares, old, new, start)
            if older is not None:
                past[place - 2] += float(np.sum((new - older) ** 2))
            older, old = old, new
        start += len(new)
    for change, sums, candidates in zip(changes, columns, found, strict=True):
        least = 8 * change.spacing * np.sqrt(min(change.before, change.after) / max(change.size, 1))
        jumps = [_judge(candidate, sums, start, entry.shape) for candidate in candidates]
        change.jumps = [jump for jump in jumps if abs(jump.after - jump.before) > least]
    return changes, list(np.sqrt(past))


def _add(change: Change, old: Array, new: Array) -> None:
    change.before += float(np.sum(old**2))
    change.after += float(np.sum(new**2))
    change.product += float(np.sum(old * new))
    change.shift += float(np.sum(new) - np.sum(old))
    change.moved += float(np.sum((new - old) ** 2))


def _candidates(squares: Array, old: Array, new: Array, start: int) -> list[tuple[int, int, float, float, float]]:
    """Return row, column, values and RMS of the others in the row for the entries that stand out most in theirs."""
    rows = squares.sum(axis=1, keepdims=True)
    others = np.maximum(rows - squares, 0) / max(squares.shape[1] - 1, 1)
    with np.errstate(over="ignore"):
        scores = (squares / (others + 1e-300)).reshape(-1)
    best = np.argpartition(scores, -min(TOP, scores.size))[-TOP:] if scores.size else []
    flat = [np.unravel_index(place, squares.shape) for place in best if scores[place] > 0]
    return [(start + int(i), int(j), float(old[i, j]), float(new[i, j]), float(np.sqrt(others[i, j]))) for i, j in flat]


def _judge(candidate: tuple[int, int, float, float, float], sums: Array, rows: int, shape: tuple[int, ...]) -> Jump:
    row, column, before, after, of_row = candidate
    size = abs(after - before)
    of_column = np.sqrt(max(sums[column] - size**2, 0.0) / (rows - 1)) if rows > 1 else 0.0
    usual = max(of_row, of_column)
    place = np.unravel_index(row * len(sums) + column, shape) if shape else ()
    return Jump(tuple(map(int, place)), before, after, size / usual if usual else np.inf)
