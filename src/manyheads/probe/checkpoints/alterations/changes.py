"""Changes of a tensor over training: distances over all entries, and outlying changes of single entries.

Tensors are read by blocks of rows, the same block of all checkpoints at a time; no tensor is held whole.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manyheads._namespaces import Floats
from manyheads.models.checkpoints.checkpoint import Checkpoint
from manyheads.probe.checkpoints.contents import blocks

TOP = 3  # candidates for outlying entries in each block


@dataclass(frozen=True)
class Jump:
    """Change of one entry, `times` the larger of the RMS changes of the others in its row and in its column."""

    place: tuple[int, ...]
    before: float
    after: float
    times: float


@dataclass
class Change:
    """Change of a tensor between two checkpoints."""

    size: int = 0  # number of entries
    spacing: float = 0.0  # relative spacing of their floating-point numbers
    before: float = 0.0  # squared norms of the tensor in both checkpoints
    after: float = 0.0
    product: float = 0.0  # their inner product
    shift: float = 0.0  # sum of the entries of the difference
    moved: float = 0.0  # squared norm of the difference
    jumps: list[Jump] = field(default_factory=list)  # candidates for entries whose change is an outlier

    @property
    def is_rounding(self) -> bool:
        """Whether rounding to the type explains the difference."""
        return self.moved <= (2 * self.spacing) ** 2 * max(self.before, self.after)

    @property
    def growth(self) -> float:
        """Absolute logarithm of the ratio of the norms; zero to or from a tensor of zeros."""
        both = self.before > 0 and self.after > 0
        return abs(float(np.log(self.after / self.before))) / 2 if both else 0.0

    @property
    def rms(self) -> float:
        """RMS of the difference."""
        return float(np.sqrt(self.moved / max(self.size, 1)))


def measure_changes(
    checkpoints: Sequence[Checkpoint], name: str, spacings: Sequence[float]
) -> tuple[list[Change], list[float]]:
    """Return the change of a tensor over every interval, and the distance between the neighbours of inner checkpoints.

    For n checkpoints in their order, all of which hold the tensor in one shape, n - 1 changes and n - 2 distances, from
    checkpoint t - 1 to t + 1. Changes of a few spacings of the floating-point numbers are no jumps.
    """
    entry = checkpoints[0].entry(name)
    changes = [Change(entry.size, max(pair)) for pair in itertools.pairwise(spacings)]
    past = np.zeros(max(len(checkpoints) - 2, 0))
    columns: list[Any] = [0.0] * len(changes)
    found: list[list[tuple[int, float, float, float]]] = [[] for _ in changes]
    start, rows = 0, entry.shape[0] if len(entry.shape) > 1 else 1  # a vector is one row
    readers = [blocks(checkpoint, name, checkpoint.entry(name)) for checkpoint in checkpoints]
    while (part := next(readers[0], None)) is not None:
        older, old = None, None
        for place, reader in enumerate(readers):
            block = (part if place == 0 else next(reader)).astype(np.float64)
            new = block.reshape(min(part.shape[0], rows) if part.ndim else 1, -1)
            if old is not None:
                squares = (new - old) ** 2
                change = changes[place - 1]
                change.before += float(np.sum(old**2))
                change.after += float(np.sum(new**2))
                change.product += float(np.sum(old * new))
                change.shift += float(np.sum(new) - np.sum(old))
                change.moved += float(np.sum(squares))
                columns[place - 1] = columns[place - 1] + (squares.sum(axis=0) if rows > 1 else 0.0)
                found[place - 1] += _select_candidates(squares, old, new, start)
            if older is not None:
                past[place - 2] += float(np.sum((new - older) ** 2))
            older, old = old, new
        start += part.size
    for change, sums, candidates in zip(changes, columns, found, strict=True):
        least = 8 * change.spacing * np.sqrt(min(change.before, change.after) / max(change.size, 1))
        jumps = [_measure_jump(candidate, sums, rows, entry.shape) for candidate in candidates]
        change.jumps = [jump for jump in jumps if abs(jump.after - jump.before) > least]
    return changes, list(np.sqrt(past))


def _select_candidates(squares: Floats, old: Floats, new: Floats, start: int) -> list[tuple[int, float, float, float]]:
    """Return place, values and RMS of the rest of the row for the entries with the largest ratio to that RMS."""
    sums = squares.sum(axis=1, keepdims=True)
    others = np.maximum(sums - squares, 0) / max(squares.shape[1] - 1, 1)
    scores = (squares / (others + 1e-300)).reshape(-1)
    best = np.argpartition(scores, -min(TOP, scores.size))[-TOP:].tolist() if scores.size else []
    best = [at for at in best if scores[at] > 0]
    return [(start + at, float(old.flat[at]), float(new.flat[at]), float(np.sqrt(others.flat[at]))) for at in best]


def _measure_jump(candidate: tuple[int, float, float, float], sums: Any, rows: int, shape: tuple[int, ...]) -> Jump:
    at, before, after, usual = candidate
    size = abs(after - before)
    if rows > 1:
        usual = max(usual, float(np.sqrt(max(sums[at % len(sums)] - size**2, 0.0) / (rows - 1))))
    place = np.unravel_index(at, shape) if shape else ()
    return Jump(tuple(map(int, place)), before, after, size / usual if usual else np.inf)
