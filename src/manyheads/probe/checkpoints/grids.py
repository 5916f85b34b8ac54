"""Equidistant values: weights that were rounded to at most 256 levels, such as those of int8, and stored as floats.

Whatever shares a scale, the tensor, a row, a column or a group, so do `LENGTH` neighbours along a row or a column. They
are on a grid if their differences are integer multiples of one step, up to the rounding of the type, and span at most
255 steps.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Neighbours that share a scale, half as many in small matrices; segments of a block that are tested along either side,
# how many of a tensor at least, and the share of them on grids. Of clean ones of 32 values in BF16 fewer than .001 are,
# of 16 up to .02, of rounded ones more than .9.
LENGTH, TRIED, LEAST, SHARE = 32, 16, 8, 0.75
# Least number of different values of a segment, and most steps that it spans.
VALUES, STEPS = 9, 255
# Moments m4 / m2^2, 9/5 of uniform numbers, below which values of BF16 may be torch's, which draws 256 in that type.
UNIFORM = 2.1
# Numbers of steps from the value of least size up to which the step is fitted, one fit after the other.
WINDOWS = (4.5, 9.5, 20.5, 45.5, 100.5, 255.5)


class GridTest:
    """Test of one matrix, fed by blocks of rows."""

    def __init__(self, spacing: float):
        self.spacing = spacing
        self.counts = {"rows": [0, 0], "columns": [0, 0]}  # segments on grids, and all; without a side that is clean
        self.moments = np.zeros(3)

    def add(self, block: NDArray[Any]) -> None:
        """Test segments of a block, (rows, columns)."""
        for side, count in list(self.counts.items()):
            segments = _draw_segments(block if side == "rows" else block.T)
            segments = segments[np.count_nonzero(np.diff(np.sort(segments)), axis=1) >= VALUES - 1]
            if len(segments):
                count[0] += int(_are_on_grids(segments, self.spacing).sum())
                count[1] += len(segments)
                self.moments += [np.mean(segments**power) * len(segments) for power in (0, 2, 4)]
            if count[1] >= LEAST and count[0] < SHARE * count[1]:
                del self.counts[side]

    @property
    def passed(self) -> bool:
        """Whether the matrix is on grids."""
        count, second, fourth = self.moments
        uniform = self.spacing > 2**-8 and fourth * count < UNIFORM * second**2
        return any(each[1] >= LEAST for each in self.counts.values()) and not uniform


def _draw_segments(lines: NDArray[Any]) -> NDArray[np.float64]:
    """Return segments of lines, (segments, values), that start at multiples of their length."""
    count, width = lines.shape
    length = LENGTH if count * (width // LENGTH) >= LEAST else LENGTH // 2
    places = width // length
    chosen = np.random.default_rng(0).choice(count * places, min(count * places, TRIED), replace=False)
    line, place = np.divmod(chosen, max(places, 1))
    return lines[line[:, None], length * place[:, None] + np.arange(length)].astype(np.float64)


def _are_on_grids(segments: NDArray[np.float64], spacing: float) -> NDArray[np.bool_]:
    """Return which segments, (segments, values), are on grids; several steps are tried for each."""
    ordered, largest = np.sort(segments, axis=1), np.abs(segments).max(axis=1)
    gaps = np.diff(ordered, axis=1)
    inner = np.abs(ordered[:, 1:]) <= largest[:, None] / 4  # the others are rounded too coarsely in BF16
    least = [np.where((gaps > 0) & where, gaps, np.inf).min(axis=1) for where in (inner, gaps > 0)]
    candidates = [each / part for each in least for part in (1, 2, 3)]
    candidates += [largest / 127, largest / 128, (ordered[:, -1] - ordered[:, 0]) / STEPS]
    steps = np.stack(candidates, 1)[:, :, None]
    steps = np.where(np.isfinite(steps), steps, largest[:, None, None])
    apart = (segments - np.take_along_axis(segments, np.abs(segments).argmin(axis=1)[:, None], 1))[:, None, :]
    for window in WINDOWS:
        numbers = np.where(np.abs(apart) <= window * steps, np.rint(apart / steps), 0.0)
        squares = np.sum(numbers**2, axis=2, keepdims=True)
        steps = np.where(squares > 0, np.sum(numbers * apart, axis=2, keepdims=True) / np.maximum(squares, 1), steps)
    numbers = np.rint(apart / steps)
    rounded = 0.75 * spacing * np.abs(segments)[:, None, :]
    rounded = rounded + np.minimum(spacing * largest[:, None, None] / 2, 0.02 * steps)
    fits = (np.abs(apart - numbers * steps) <= rounded).all(axis=2)
    return (fits & (np.ptp(numbers, axis=2) <= STEPS)).any(axis=1)
