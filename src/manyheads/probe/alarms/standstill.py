"""Alarms over recorded updates: gradients and updates that vanish, weights that stand still, weights that were rounded."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from manyheads.errors import UsageError
from manyheads.probe.alarms.figures import Alarm

if TYPE_CHECKING:
    import xarray as xr

Array = np.ndarray

# Figure -> what vanishes, and the share of its usual size, beside that of all others, below which it has vanished.
VANISHING = {"gradient_rms": ("gradient", 1e-3), "update_ratio": ("update", 1 / 30)}
SUCCESSIVE = 3  # measurements in which it does
USUAL = 16, 8  # most and fewest measurements before them, of which the usual size is the median


class _Place(NamedTuple):
    matrix: str
    part: str  # of a head: "query", "key", "value" or "output"
    layer: int
    head: int  # -1: the whole matrix


def find_stalled(updates: "xr.Dataset") -> Alarm | None:
    """Find the first matrix, or head of one, whose gradient or update vanishes, or whose weights stand still."""
    _check(updates)
    hits = [(name, found) for name in (*VANISHING, "weight_rms") if (found := _first_stalled(updates, name))]
    if not hits:
        return None
    name, (t, table, usual, who) = min(hits, key=lambda hit: hit[1][0])
    who.sort(key=lambda k: table[1][k].head >= 0)  # whole matrices first
    place = table[1][who[0]]
    value, reference = float(table[0][t, who[0]]), float(usual[who[0]])
    subject = VANISHING.get(name, ("weights", 0))[0]
    of = f" of its {place.part} weights" if place.part and subject != "weights" else ""
    words = f"{subject}{of} vanishes, {reference:.3g} -> {value:.3g}"
    if subject == "weights":
        words = f"its {place.part} weights stand still" if place.part else "weights stand still"
    same = sum((table[1][k].head >= 0) == (place.head >= 0) for k in who) - 1
    where = int(updates.step.values[t]), place.layer, place.head
    return Alarm("updates", name, *where, value, reference, same, None, words, place.matrix)


def find_rounded(updates: "xr.Dataset") -> Alarm | None:
    """Find the first matrix that holds fewer bits than its type although it was updated before."""
    _check(updates)
    if "significand_bits" not in updates:
        return None
    bits, types = updates.significand_bits.values, updates.significand_bits_dtype.values
    moved, nonzero = updates.update_ratio.values > 0, updates.weight_rms.values > 0
    updated = np.zeros_like(moved)
    updated[1:] = np.logical_or.accumulate(moved, axis=0)[:-1]
    rounded = (bits < types) & updated & nonzero
    if not rounded.any():
        return None
    t = int(np.argmax(rounded.any(axis=1)))
    who = np.flatnonzero(rounded[t])
    k = who[0]
    words = f"weights hold {bits[t, k]:.0f} of the {types[k]:.0f} bits of their type: they are rounded after updates"
    where = int(updates.step.values[t]), int(updates.layer.values[k]), -1
    figures = float(bits[t, k]), float(types[k]), len(who) - 1
    return Alarm("precision", "significand_bits", *where, *figures, None, words, str(updates.matrix.values[k]))


def _first_stalled(updates: "xr.Dataset", name: str) -> "tuple[int, tuple[Array, list[_Place]], Array, list[int]] | None":
    """Return the first step at which series of a figure stall, all series, their usual size, and which ones do."""
    values, places = _series(updates, name)
    measured = np.isfinite(values)
    last = np.maximum.accumulate(np.where(measured, np.arange(len(values))[:, None], 0), axis=0)
    held = np.take_along_axis(values, last, axis=0)  # the last figure that was measured
    with np.errstate(divide="ignore"):
        logs = np.log(np.maximum(held, 1e-30))
    relative = logs - np.nanmedian(np.where(np.isfinite(held), logs, np.nan), axis=1, keepdims=True)
    for t in range(len(values)):
        found, usual = [], np.full(values.shape[1], np.nan)
        for k in np.flatnonzero(measured[t]):
            own = np.flatnonzero(measured[: t + 1, k])
            if len(own) < USUAL[1] + SUCCESSIVE:
                continue
            recent, before = own[-SUCCESSIVE:], own[:-SUCCESSIVE][-USUAL[0] :]
            usual[k] = np.median(values[before, k])
            if name == "weight_rms":
                stalled = len(set(values[own[-SUCCESSIVE - 1 :], k])) == 1 and values[t, k] > 0
            else:
                limit = np.median(relative[before, k]) + np.log(VANISHING[name][1])
                stalled = (relative[recent, k] < limit).all() and usual[k] > 0
            if stalled:
                found.append(int(k))
        if found and len(found) < max(2, measured[t].sum() / 2):  # all together: a learning rate of zero
            return t, (values, places), usual, found
    return None


def _series(updates: "xr.Dataset", name: str) -> tuple[Array, list[_Place]]:
    """Lay the figure of every matrix and of every head side by side, (T, K)."""
    columns = [updates[name].values]
    matrices = zip(updates.matrix.values, updates.layer.values, strict=True)
    places = [_Place(str(matrix), "", int(layer), -1) for matrix, layer in matrices]
    if f"head_{name}" in updates:
        heads = updates[f"head_{name}"]
        present = np.isfinite(heads.values).any(axis=0)
        columns.append(heads.values[:, present])
        places += [
            _Place("", str(heads.head_matrix.values[part]), int(layer), int(head))
            for part, layer, head in np.argwhere(present)
        ]
    return np.concatenate(columns, axis=1), places


def _check(updates: "xr.Dataset") -> None:
    missing = {*VANISHING, "weight_rms"} - set(getattr(updates, "data_vars", ()))
    if missing:
        raise UsageError(
            f"updates of type {type(updates).__name__} without {', '.join(sorted(missing))}: give what "
            "UpdateRecorder.dataset() returned"
        )
