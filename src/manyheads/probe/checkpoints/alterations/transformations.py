r"""Transformations of a tensor by itself that explain its change: sign, shift, scale, transposition, order of rows.

Each candidate :math:`T` is judged by its residual, a share of the squared change,
:math:`\|x_1 - T(x_0)\|^2 / \|x_1 - x_0\|^2`. Orders of rows and columns are fitted on one half of the sampled entries
and judged on the other, so that no order explains a change by chance.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads._namespaces import Floats
from manyheads.models.checkpoints.checkpoint import Checkpoint
from manyheads.models.refusals import shorten
from manyheads.probe.checkpoints.alterations.changes import Change
from manyheads.probe.checkpoints.contents import blocks, matrix_shape

# Number of columns that are compared to find a permutation of the rows, and of blocks of rows that are searched for.
LINES, SOUGHT = 64, 512
RESIDUAL = 0.7  # largest residual of an explanation
# The same for vectors, which training negates and shifts too, and for a factor of a matrix, which may grow.
CLOSE, SCALED = 0.05, 0.15
LARGE = 0.15  # changes below this share of the norm are not explained
ONE = 0.15  # tolerance of a shift of gains by one, and its largest residual: some implementations multiply by 1 + w


class Explanation(NamedTuple):
    """A transformation and its residual, a share of the squared change."""

    what: str
    residual: float
    # Whether training may have the same effect at a small scale; the size of the change then decides.
    weak: bool = False
    factor: float = 1.0  # of a scaled matrix


def explain_moments(change: Change, matrix: bool) -> Iterator[Explanation]:
    """Yield negation, shift and scale, judged by sums over all entries."""
    if not change.moved:
        return
    negated = (change.before + change.after + 2 * change.product) / change.moved
    if negated < (RESIDUAL if matrix else CLOSE):
        yield Explanation("changes sign", negated, not matrix)
    step = change.shift / change.size
    shifted = max(change.moved - change.size * step**2, 0.0) / change.moved
    by_one = abs(abs(step) - 1) < ONE
    if shifted < (RESIDUAL if matrix else ONE if by_one else CLOSE) and change.size >= 8:
        yield Explanation(f"is shifted by {step:.3g}", shifted, not matrix and not by_one)
    factor = change.product / change.before if change.before else 0.0
    scaled = max(change.after - change.product * factor, 0.0) / change.moved
    if matrix and scaled < RESIDUAL and factor > 0 and not 0.7 < factor < 1.4:
        yield Explanation(f"is multiplied by {factor:.3g}", scaled, scaled > SCALED or 0.6 < factor < 1.7, factor)


def explain_orders(one: Checkpoint, other: Checkpoint, name: str) -> Iterator[Explanation]:
    """Yield transposition and permutations of rows and columns that explain the change of a matrix."""
    old, new = Strips(one, name), Strips(other, name)
    if old.shape[0] == old.shape[1]:
        moved = float(np.sum((new.columns - old.columns) ** 2))
        residual = float(np.sum((new.rows.T - old.columns) ** 2)) / moved if moved else 1.0
        if residual < RESIDUAL:
            yield Explanation("is transposed", residual)
    for side, before, after in (("rows", old.columns, new.columns), ("columns", old.rows.T, new.rows.T)):
        if after.shape[1] >= 4:
            yield from _orders(side, before, after)


class Strips:
    """Sampled columns of a matrix, (rows, `LINES`), and sampled rows, (`LINES`, columns), in float64."""

    def __init__(self, checkpoint: Checkpoint, name: str):
        entry = checkpoint.entry(name)
        width = matrix_shape(entry.shape)[2]
        self.shape = (entry.size // width, width)
        # equal where the extents are
        chosen = [np.sort(np.random.default_rng(0).permutation(extent)[:LINES]) for extent in self.shape]
        columns, rows, start = [], [], 0
        for block in blocks(checkpoint, name, entry):
            part = block.reshape(-1, width)
            columns.append(part[:, chosen[1]].astype(np.float64))
            inside = chosen[0][(chosen[0] >= start) & (chosen[0] < start + len(part))]
            rows.append(part[inside - start].astype(np.float64))
            start += len(part)
        self.columns, self.rows = np.concatenate(columns), np.concatenate(rows)


def _orders(side: str, before: Floats, after: Floats) -> Iterator[Explanation]:
    """Yield permutations of rows from some entries of each: permuted blocks, interleaved halves of blocks."""
    length = len(after)
    least = RESIDUAL if after[:, 1::2].size >= 256 else RESIDUAL / 2
    for block in (size for size in range(1, length // 2 + 1) if length % size == 0):
        old, new = (each.reshape(length // block, block, -1) for each in (before, after))
        if block % 2 == 0:
            for words, halves in (("interleaved", True), ("deinterleaved", False)):
                residual = _best_by_block(_transpose_blocks(new, halves), old, new)
                if residual < RESIDUAL:
                    what = f"has its {side} {words} in blocks of {block}, as by another rotary order"
                    yield Explanation(what, residual)
        yield from list(_moved_blocks(side, old, new, least)) or _moved_blocks(side, new, old, least)
        if (signs := _signs(side, old, new, least)) is not None:
            yield signs
    zero = np.logical_and(~after.any(axis=1), before.any(axis=1))
    if zero.any() and not zero.all():
        moved = np.sum((after - before) ** 2, axis=1)
        if (residual := float(moved[~zero].sum() / moved.sum())) < least:
            yield Explanation(f"{side} {name_lines(np.flatnonzero(zero))} are zero", residual, True)


def _signs(side: str, old: Floats, new: Floats, least: float) -> Explanation | None:
    """Explain the change by negated blocks, chosen on one half of the entries."""
    fit, test = slice(0, None, 2), slice(1, None, 2)
    as_is, turned = (
        [np.sum((new[:, :, half] + sign * old[:, :, half]) ** 2, axis=(1, 2)) for half in (fit, test)]
        for sign in (-1, 1)
    )
    chosen = (turned[0] < RESIDUAL / 2 * as_is[0]) & (turned[1] < RESIDUAL * as_is[1])
    if not chosen.any() or chosen.all():
        return None
    residual = float(np.where(chosen, turned[1], as_is[1]).sum() / as_is[1].sum())
    what = f"{side} {_name_blocks(chosen.nonzero()[0], old.shape[1])} change sign"
    return Explanation(what, residual) if residual < least else None


def _moved_blocks(side: str, old: Floats, new: Floats, least: float) -> Iterator[Explanation]:
    """Explain the change by permuted blocks, or by blocks that are copies of others."""
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
    residual = float(now.sum() / as_is.sum()) if as_is.sum() else 1.0
    moved = nearest != place
    if residual >= least or (now[moved] >= RESIDUAL * np.minimum(as_is, sizes)[moved]).any():
        return
    stays = _nearest(new[source][:, :, fit], old[:, :, fit]) == source
    if np.unique(source).size == source.size and not stays.any():
        block = old.shape[1]
        yield Explanation(f"has its {side} in another order, {at.size} of {len(place)} blocks of {block}", residual)
    elif stays.all() and len(new) <= SOUGHT and (now[moved] < RESIDUAL / 2 * np.minimum(as_is, sizes)[moved]).all():
        ours, theirs = (_name_blocks(each, old.shape[1]) for each in (at, np.unique(source)))
        yield Explanation(f"{side} {ours} are copies of {side} {theirs}", residual)


def _name_blocks(chosen: NDArray[np.int64], block: int) -> str:
    return name_lines((chosen[:, None] * block + np.arange(block)).reshape(-1))


def name_lines(numbers: NDArray[np.int64]) -> str:
    """Format ascending numbers, consecutive ones as "first to last"."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    said = shorten(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{said} and {len(runs) - 5} more" if len(runs) > 5 else said


def _transpose_blocks(blocks: Floats, halves: bool) -> Floats:
    """Turn (first half, second half) of each block into pairs, or pairs into halves."""
    count, size, width = blocks.shape
    inner = (2, size // 2) if halves else (size // 2, 2)
    return blocks.reshape(count, *inner, width).swapaxes(1, 2).reshape(blocks.shape)


def _best_by_block(candidate: Floats, before: Floats, after: Floats) -> float:
    """Return the residual where each block is taken unchanged or as the candidate, whichever is nearer."""
    as_is, changed = (np.sum((each - before) ** 2, axis=(1, 2)) for each in (after, candidate))
    return float(np.minimum(as_is, changed).sum() / as_is.sum()) if as_is.sum() else 1.0


def _nearest(new: Floats, old: Floats) -> NDArray[np.int64]:
    """Return for each block the nearest one of the checkpoint before."""
    a, b = new.reshape(len(new), -1), old.reshape(len(old), -1)
    parts = np.array_split(a, max(1, len(a) * len(b) // 2**22))
    return np.concatenate([np.argmin(np.sum(b**2, axis=1) - 2 * part @ b.T, axis=1) for part in parts])
