"""Alarms over recorded updates: gradients and updates that vanish, constant weights, rounded weights."""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from manyheads._namespaces import Floats
from manyheads._overview import distinct_texts
from manyheads.errors import UsageError
from manyheads.probe.alarms.figures import Alarm, Places, carry_forward, first_true

if TYPE_CHECKING:
    import xarray as xr

# Figure -> its name in an alarm, and the share of its usual size beside the median series below which it vanishes.
VANISHING = {"gradient_rms": ("gradient", 1e-3), "update_ratio": ("update", 1 / 30)}
SUCCESSIVE = 3  # measurements below that share
TOGETHER = 1 / 3  # median share of the usual gradients below which they shrink together, as on a repeated batch
USUAL = 16, 8  # most and fewest preceding measurements whose median is the usual size


class _Place(NamedTuple):
    matrix: str
    part: str  # of a head: "query", "key", "value" or "output"
    layer: int
    head: int  # -1: the whole matrix


def find_vanishing(updates: "xr.Dataset", silent: int = 0) -> Alarm | None:
    """Find the first matrix, or head of one, whose gradient or update vanishes, or whose weights do not change.

    From step `silent` on, gradients of most matrices that shrink together are an alarm, too.
    """
    _check_updates(updates)
    if not updates.sizes["matrix"]:
        return None
    found = [_find_common_fall(updates, silent), *(_find_first(updates, name) for name in (*VANISHING, "weight_rms"))]
    return min((alarm for alarm in found if alarm is not None), key=lambda alarm: alarm.step, default=None)


def find_rounding(updates: "xr.Dataset") -> Alarm | None:
    """Find the first matrix whose weights hold fewer bits than their type after an update."""
    _check_updates(updates)
    if "significand_bits" not in updates:
        return None
    bits, types = updates.significand_bits.values, updates.significand_bits_dtype.values
    moved, nonzero = updates.update_ratio.values > 0, updates.weight_rms.values > 0
    updated = np.zeros_like(moved)
    updated[1:] = np.logical_or.accumulate(moved, axis=0)[:-1]
    t, who = first_true((bits < types) & updated & nonzero)
    if not len(who):
        return None
    k = who[0]
    words = f"weights hold {bits[t, k]:.0f} of the {types[k]:.0f} bits of their type: they are rounded after updates"
    where = int(updates.step.values[t]), int(updates.layer.values[k]), -1
    figures = float(bits[t, k]), float(types[k]), len(who) - 1
    return Alarm("precision", "significand_bits", *where, *figures, None, words, str(updates.matrix.values[k]))


def _find_first(updates: "xr.Dataset", name: str) -> Alarm | None:
    """Find the first step at which some series of a figure vanish or stay constant, but not most of them."""
    values, places = _stack_series(updates, name)
    logs = _carry_forward_logs(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows of NaN, before the first measurement
        relative = logs - np.nanmedian(logs, axis=1, keepdims=True)
    stalled, usual = np.zeros(values.shape, bool), np.full(values.shape, np.nan)
    for k, recent, before in _split_windows(values):
        t = recent[-1]
        usual[t, k] = np.median(values[before, k])
        if name == "weight_rms":
            stalled[t, k] = len({values[before[-1], k], *values[recent, k]}) == 1 and values[t, k] > 0
        else:
            limit = np.median(relative[before, k]) + np.log(VANISHING[name][1])
            stalled[t, k] = usual[t, k] > 0 and (relative[recent, k] < limit).all()
    most = stalled.sum(axis=1) >= np.maximum(2, np.isfinite(values).sum(axis=1) / 2)  # there is no learning rate
    t, stuck = first_true(stalled & ~most[:, None])
    if not len(stuck):
        return None
    who = sorted(map(int, stuck), key=lambda k: places[k].head >= 0)  # whole matrices first
    others = sum((places[k].head >= 0) == (places[who[0]].head >= 0) for k in who) - 1
    figures = float(values[t, who[0]]), float(usual[t, who[0]])
    return _build_alarm(name, int(updates.step.values[t]), places[who[0]], *figures, others)


def _split_windows(values: Floats) -> Iterator[tuple[int, Places, Places]]:
    """Yield the series, the probes of its latest measurements, and the preceding probes of its usual size."""
    for k in range(values.shape[1]):
        own = np.flatnonzero(np.isfinite(values[:, k]))
        for count in range(USUAL[1] + SUCCESSIVE, len(own) + 1):
            yield k, own[count - SUCCESSIVE : count], own[: count - SUCCESSIVE][-USUAL[0] :]


def _build_alarm(name: str, step: int, place: _Place, value: float, reference: float, others: int) -> Alarm:
    weights = f"{place.part} weights" if place.part else "weights"
    words = ("its " if place.part else "") + f"{weights} do not change"
    if name in VANISHING:
        of = f" of its {weights}" if place.part else ""
        words = f"{VANISHING[name][0]}{of} vanishes, {' -> '.join(distinct_texts(reference, value))}"
    return Alarm("updates", name, step, place.layer, place.head, value, reference, others, None, words, place.matrix)


def _find_common_fall(updates: "xr.Dataset", silent: int) -> Alarm | None:
    """Find the first step at which the median share of the gradients in their usual sizes is small."""
    values = updates.gradient_rms.values
    usual, now = np.full(values.shape, np.nan), np.full(values.shape, np.nan)
    for k, recent, before in _split_windows(values):
        now[recent[-1], k], usual[recent[-1], k] = values[recent, k].max(), np.median(values[before, k])
    now, usual = _carry_forward_logs(now), _carry_forward_logs(usual)
    fall = np.nan_to_num(now - usual, nan=0.0)
    low = (np.median(fall, axis=1) < np.log(TOGETHER)) & (updates.step.values >= silent)
    if not low.any():
        return None
    t = int(np.argmax(low))
    k, number = int(np.argsort(fall[t])[(fall.shape[1] - 1) // 2]), int(np.sum(fall[t] < np.log(TOGETHER)))
    reference, value = float(np.exp(usual[t, k])), float(np.exp(now[t, k]))
    both = " -> ".join(distinct_texts(reference, value))
    words = f"{number} of {fall.shape[1]} gradients shrink together, this one {both}"
    where = int(updates.step.values[t]), int(updates.layer.values[k]), -1
    figures = value, reference, number - 1
    return Alarm("updates", "gradient_rms", *where, *figures, None, words, str(updates.matrix.values[k]))


def _carry_forward_logs(values: Floats) -> Floats:
    """Return logarithms of the latest measured figures, NaN before the first one."""
    return np.log(np.maximum(carry_forward(values), 1e-30))


def _stack_series(updates: "xr.Dataset", name: str) -> tuple[Floats, list[_Place]]:
    """Return the figures of all matrices and heads, (T, K), with their places."""
    columns = [updates[name].values]
    matrices = zip(updates.matrix.values, updates.layer.values, strict=True)
    places = [_Place(str(matrix), "", int(layer), -1) for matrix, layer in matrices]
    if f"head_{name}" in updates:
        heads = updates[f"head_{name}"]
        present = np.isfinite(heads.values).any(axis=0)
        columns.append(heads.values[:, present])
        parts = heads.head_matrix.values
        places += [_Place("", str(parts[part]), int(layer), int(head)) for part, layer, head in np.argwhere(present)]
    return np.concatenate(columns, axis=1), places


def _check_updates(updates: "xr.Dataset") -> None:
    variables = set(getattr(updates, "variables", ()))
    needed = {*VANISHING, "weight_rms", "step", "matrix", "layer"}
    needed |= {"significand_bits_dtype"} if "significand_bits" in variables else set()
    if missing := ", ".join(sorted(needed - variables)):
        kind = type(updates).__name__
        raise UsageError(f"updates of type {kind} without {missing}: give what UpdateRecorder.dataset() returned")
    if updates.weight_rms.dims != ("step", "matrix"):
        raise UsageError(f"updates over {updates.weight_rms.dims}: expected (step, matrix)")
