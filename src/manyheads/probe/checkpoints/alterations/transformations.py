r"""Transformations of a tensor by itself that explain its change: sign, shift, scale, transposition, order of rows.

Each candidate :math:`T` is judged by the share of the squared change that it leaves,
:math:`\|T(x_1) - x_0\|^2 / \|x_1 - x_0\|^2`. Orders of rows and columns are fitted on one half of the sampled entries
and judged on the other, so that no order explains a change by chance.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads.models.checkpoint import Checkpoint
from manyheads.models.refusals import shorten
from manyheads.probe.checkpoints.alterations.changes import Change
from manyheads.probe.checkpoints.contents import blocks, matrix_shape

Array = NDArray[np.float64]

# Columns whose entries are compared to find an order of the rows, and blocks of rows that are looked for.
LINES, SOUGHT = 64, 512
# Largest share of the squared change that an explanation leaves.
LEFT = 0.7
# The same for vectors, which training negates and shifts too, and for a factor of a matrix, which may grow.
CLOSE, SCALED = 0.05, 0.3
# Changes below this share of the norm are not explained.
LARGE = 0.15
# How far a shift of gains by one is from it, and what it leaves: some implementations multiply by 1 + w.
ONE = 0.15


class Explanation(NamedTuple):
    """A transformation, and the share of the squared change that it leaves."""

    what: str
    left: float
    # Whether training does such things too, if they are small: then the size of the change decides.
    weak: bool = False


def explain_moments(change: Change, matrix: bool) -> Iterator[Explanation]:
    """Go through the transformations that are judged by sums over all entries."""
    if not change.moved:
        return
    negated = (change.before + change.after + 2 * change.product) / change.moved
    if negated < (LEFT if matrix else CLOSE):
        yield Explanation("changes sign", negated, not matrix)
    step = change.shift / change.size
    shifted = max(change.moved - change.size * step**2, 0.0) / change.moved
    by_one = abs(abs(step) - 1) < ONE
    if shifted < (LEFT if matrix else ONE if by_one else CLOSE) and change.size >= 8:
        yield Explanation(f"is shifted by {step:.3g}", shifted, not matrix and not by_one)
    factor = change.product / change.before if change.before else 0.0
    scaled = max(change.after - change.product * factor, 0.0) / change.moved
    if matrix and scaled < SCALED and factor > 0 and not 0.7 < factor < 1.4:
        yield Explanation(f"is multiplied by {factor:.3g}", scaled, scaled > SCALED / 2 or 0.6 < factor < 1.7)


def explain_orders(one: Checkpoint, other: Checkpoint, name: str) -> Iterator[Explanation]:
    """Go through transposition and orders of rows and columns that explain the change of a matrix."""
    old, new = Strips(one, name), Strips(other, name)
    if old.shape[0] == old.shape[1]:
        before, after = (strips.columns for strips in (old, new))
        left = _share(new.rows.T, before, after)
        if left < LEFT:
            yield Explanation("is transposed", left)
    for side, before, after in (("rows", old.columns, new.columns), ("columns", old.rows.T, new.rows.T)):
        if after.shape[1] >= 4:
            yield from _orders(side, before, after)


def _share(candidate: Array, before: Array, after: Array) -> float:
    moved = float(np.sum((after - before) ** 2))
    return float(np.sum((candidate - before) ** 2)) / moved if moved else 1.0


class Strips:
    """Some columns of a matrix, (rows, `LINES`), and some of its rows, (`LINES`, columns), in float64."""

    def __init__(self, checkpoint: Checkpoint, name: str):
        entry = checkpoint.entry(name)
        width = matrix_shape(entry.shape)[2]
        self.shape = (entry.size // width, width)
        chosen = [
            np.sort(np.random.default_rng(0).permutation(extent)[:LINES]) for extent in self.shape
        ]  # equal where the extents are
        columns, rows, start = [], [], 0
        for block in blocks(checkpoint, name, entry):
            part = block.reshape(-1, width)
            columns.append(part[:, chosen[1]].astype(np.float64))
            inside = chosen[0][(chosen[0] >= start) & (chosen[0] < start + len(part))]
            rows.append(part[inside - start].astype(np.float64))
            start += len(part)
        self.columns, self.rows = np.concatenate(columns), np.concatenate(rows)


def _orders(side: str, before: Array, after: Array) -> Iterator[Explanation]:
    """Go through orders of rows, given some entries of each: blocks in another order, halves of blocks interleaved."""
    length = len(after)
    least = LEFT if after[:, 1::2].size >= 256 else LEFT / 2
    for block in (size for size in range(1, length // 2 + 1) if length % size == 0):
        old, new = (each.reshape(length // block, block, -1) for each in (before, after))
        if block % 2 == 0:
            for words, turned in (("interleaved", _interleave(new)), ("taken apart", _take_apart(new))):
                left = _best_by_block(turned, old, new)
                if left < LEFT:
                    yield Explanation(f"has its {side} {words} in blocks of {block}, as by another rotary order", left)
        yield from list(_moved_blocks(side, old, new, least)) or _moved_blocks(side, new, old, least)
        if (signs := _signs(side, old, new, least)) is not None:
            yield signs
    zero = np.logical_and(~after.any(axis=1), before.any(axis=1))
    if zero.any() and not zero.all():
        moved = np.sum((after - before) ** 2, axis=1)
        if (left := float(moved[~zero].sum() / moved.sum())) < least:
            yield Explanation(f"{side} {name_lines(np.flatnonzero(zero))} are zero", left, True)


def _signs(side: str, old: Array, new: Array, least: float) -> Explanation | None:
    """Explain the change by some blocks that are negated, chosen on one half of the entries."""
    fit, test = slice(0, None, 2), slice(1, None, 2)
    as_is, turned = (
        [np.sum((new[:, :, half] + sign * old[:, :, half]) ** 2, axis=(1, 2)) for half in (fit, test)]
        for sign in (-1, 1)
    )
    chosen = (turned[0] < LEFT / 2 * as_is[0]) & (turned[1] < LEFT * as_is[1])
    if not chosen.any() or chosen.all():
        return None
    left = float(np.where(chosen, turned[1], as_is[1]).sum() / as_is[1].sum())
    return (
        Explanation(f"{side} {_name_blocks(chosen.nonzero()[0], old.shape[1])} change sign", left)
        if left < least
        else None
    )


def _moved_blocks(side: str, old: Array, new: Array, least: float) -> Iterator[Explanation]:
    """Explain the change by blocks in another order, or by copies of some over others."""
    fit, test = slice(0, None, 2), slice(1, None, 2)
    place = np.unique(np.linspace(0, len(new) - 1, min(len(new), SOUGHT)).astype(int))
    filled = new[place].any(axis=(1, 2))
    if np.sum(~filled) > np.sum(~old[place].any(axis=(1, 2))) and len(place) == len(new):
        return
    place = place[filled]
    nearest = _nearest(new[place][:, :, fit], old[:, :, fit])
    at, source = place[nearest != place], nearest[nearest != place]
    if not at.size:
        return
    as_is = np.sum((new[place][:, :, test] - old[place][:, :, test]) ** 2, axis=(1, 2))
    now = np.sum((new[place][:, :, test] - old[nearest][:, :, test]) ** 2, axis=(1, 2))
    sizes = np.sum(new[place][:, :, test] ** 2, axis=(1, 2))
    left = float(now.sum() / as_is.sum()) if as_is.sum() else 1.0
    moved = nearest != place
    if left >= least or (now[moved] >= LEFT * np.minimum(as_is, sizes)[moved]).any():
        return
    stays = _nearest(new[source][:, :, fit], old[:, :, fit]) == source
    if np.unique(source).size == source.size and not stays.any():
        block = old.shape[1]
        yield Explanation(f"has its {side} in another order, {at.size} of {len(place)} blocks of {block}", left)
    elif stays.all() and len(new) <= SOUGHT and (now[moved] < LEFT / 2 * np.minimum(as_is, sizes)[moved]).all():
        ours, theirs = (_name_blocks(each, old.shape[1]) for each in (at, np.unique(source)))
        yield Explanation(f"{side} {ours} are copies of {side} {theirs}", left)


def _name_blocks(chosen: NDArray[np.int64], block: int) -> str:
    return name_lines((chosen[:, None] * block + np.arange(block)).reshape(-1))


def name_lines(numbers: NDArray[np.int64]) -> str:
    """Name numbers in ascending order, those that follow each other by the first and the last."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    said = shorten(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{said} and {len(runs) - 5} more" if len(runs) > 5 else said


def _interleave(blocks: Array) -> Array:
    """Turn (first half, second half) of each block into pairs."""
    count, size, width = blocks.shape
    return blocks.reshape(count, 2, size // 2, width).swapaxes(1, 2).reshape(blocks.shape)


def _take_apart(blocks: Array) -> Array:
    count, size, width = blocks.shape
    return blocks.reshape(count, size // 2, 2, width).swapaxes(1, 2).reshape(blocks.shape)


def _best_by_block(candidate: Array, before: Array, after: Array) -> float:
    """Return the share that is left where each block is taken as it is or as the candidate, whichever is nearer."""
    as_is, changed = (np.sum((each - before) ** 2, axis=(1, 2)) for each in (after, candidate))
    return float(np.minimum(as_is, changed).sum() / as_is.sum()) if as_is.sum() else 1.0


def _nearest(new: Array, old: Array) -> NDArray[np.int64]:
    """Return for each block the nearest one of the checkpoint before."""
    a, b = new.reshape(len(new), -1), old.reshape(len(old), -1)
    found = []
    for part in np.array_split(a, max(1, len(a) * len(b) // 2**22)):
        found.append(np.argmin(np.sum(b**2, axis=1) - 2 * part @ b.T, axis=1))
    return np.concatenate(found)
