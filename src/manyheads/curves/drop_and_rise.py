"""Drop and rise of curves, by themselves or cross-fitted over replicates.

Attention entropy and stable rank drop and rise during training. Both ends of any curve lie above its minimum, by noise
alone: `drop_and_rise` measures a curve with that bias, `replicated_drop_and_rise` without it, by locating the minimum
of each replicate on the mean of the others. The definitions are not from the paper, which shows curves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads._extras import ArrayLike, Float, Int
from manyheads._namespaces import Floats
from manyheads.errors import ShapeError, UsageError


class DropAndRise(NamedTuple):
    """Heights of both ends of curves above their minimum."""

    drop: Float[np.ndarray, ...]
    """First value minus minimum."""
    rise: Float[np.ndarray, ...]
    """Last value minus minimum."""
    argmin: Int[np.ndarray, ...]
    """Index of the minimum along time, the first one of several."""


@takes_arrays
def drop_and_rise(curves: Float[ArrayLike, "... time"]) -> DropAndRise:
    r"""Measure drop and rise of each curve by itself.

    .. math:: t^* = \arg\min_t v(t), \quad \text{drop} = v(0) - v(t^*), \quad \text{rise} = v(T) - v(t^*)

    Both are nonnegative and on noise alone about its range: test with `replicated_drop_and_rise`. A curve that holds
    NaN only gives NaN.

    Raises `ShapeError` or `UsageError`: the time axis is empty; or a curve is NaN in parts: see `forward_fill`.

    Examples
    --------
    >>> found = drop_and_rise([[3.0, 1.0, 1.5, 2.0], [3.0, 2.0, 1.0, 0.5]])
    >>> found.drop.tolist(), found.rise.tolist(), found.argmin.tolist()
    ([2.0, 2.5], [1.0, 0.0], [1, 3])
    """
    values = _as_curves(curves)
    return _at_minimum(values, values)


@takes_arrays
def cross_fitted_drop_and_rise(curves: Float[ArrayLike, "replicates ... time"]) -> DropAndRise:
    """Measure drop and rise of each replicate at the minimum of the mean of the *other* replicates.

    An index chosen without the replicate makes both differences unbiased at that index: on noise alone their mean is
    zero, for any autocorrelation, and their standard deviation over replicates gives a valid interval. Where there is a
    minimum, the noise of the others displaces it, so that both are slightly too small on average. They may be negative.

    Raises `UsageError`: a single replicate, or a curve that is NaN in parts.

    Examples
    --------
    >>> found = cross_fitted_drop_and_rise([[3.0, 1.0, 2.0], [3.0, 1.2, 1.1], [3.2, 1.0, 2.2]])
    >>> found.argmin.tolist(), found.rise.round(6).tolist()
    ([1, 1, 1], [1.0, -0.1, 1.2])
    """
    values = _as_curves(curves)
    return _at_minimum(values, _mean_of_others(values))


@takes_arrays
def replicated_drop_and_rise(curves: Float[ArrayLike, "replicates ... time"]) -> DropAndRise:
    """Measure the cross-fitted drop, and the largest cross-fitted rise after a drop, of each replicate.

    A rise that is followed by a second drop counts as well, see `cross_fitted_rise`. A single replicate is measured by
    itself, as `drop_and_rise` does.
    """
    if len(np.asarray(curves)) == 1:
        return drop_and_rise(curves)
    return cross_fitted_drop_and_rise(curves)._replace(rise=cross_fitted_rise(curves))


@takes_arrays
def cross_fitted_rise(curves: Float[ArrayLike, "replicates ... time"]) -> Float[np.ndarray, "replicates ..."]:
    """Measure the rise of each replicate between the two times between which the mean of the *others* rises most.

    The first time is a running minimum of the mean of the others, not the first value: the rise follows a drop, and a
    second drop does not hide it, as it does in `cross_fitted_drop_and_rise`. The times are independent of the
    replicate, so the mean is zero on noise alone. Where the others never rise it is zero.

    Raises `UsageError`: a single replicate, or a curve that is NaN in parts.

    Examples
    --------
    >>> curves = [[3.0, 1.0, 2.0, 0.5], [3.0, 1.2, 2.2, 0.4], [3.1, 1.0, 2.1, 0.6]]
    >>> cross_fitted_rise(curves).round(6).tolist(), cross_fitted_drop_and_rise(curves).rise.tolist()
    ([1.0, 1.0, 1.1], [0.0, 0.0, 0.0])
    """
    values = _as_curves(curves)
    others = _mean_of_others(values)
    best, rises = np.zeros(values.shape[:-1]), np.zeros(values.shape[:-1])
    for low in range(1, values.shape[-1] - 1):
        lowest = others[..., low] < others[..., :low].min(-1)
        high = low + np.where(np.isnan(others[..., low:]), -np.inf, others[..., low:]).argmax(-1)
        ends = (np.take_along_axis(each, high[..., None], -1)[..., 0] for each in (others, values))
        rise, own = (end - each[..., low] for end, each in zip(ends, (others, values), strict=True))
        better = lowest & (rise > best)
        best, rises = np.where(better, rise, best), np.where(better, own, rises)
    return np.where(np.isnan(values[..., 0]), np.nan, rises)


@takes_arrays
def forward_fill(curves: Float[ArrayLike, "... time"]) -> Float[np.ndarray, "... time"]:
    """Replace all values from the first one that is not finite by the last finite value, as for a run that diverged.

    A curve whose first value is not finite keeps that value.

    Examples
    --------
    >>> forward_fill([2.0, 1.0, float("nan"), 3.0]).tolist()
    [2.0, 1.0, 1.0, 1.0]
    """
    values = np.asarray(curves, np.float64)
    alive = np.logical_and.accumulate(np.isfinite(values), axis=-1)
    last = np.maximum(alive.sum(-1, keepdims=True) - 1, 0)
    return np.where(alive, values, np.take_along_axis(values, last, -1))


def _as_curves(curves: ArrayLike) -> Floats:
    values = np.asarray(curves, np.float64)
    if values.ndim < 1 or not values.shape[-1]:
        raise ShapeError(f"curves of shape {values.shape}: expected values along time, the last axis")
    absent = np.isnan(values)
    if (absent.any(-1) & ~absent.all(-1)).any():
        raise UsageError("some curves are NaN in parts: cut them, or fill them with forward_fill")
    return values


def _mean_of_others(values: Floats) -> Floats:
    """Average all replicates but one, for each of them, in the same shape."""
    if values.ndim < 2 or len(values) < 2:
        raise UsageError(f"curves of shape {values.shape}: expected two replicates or more along the first axis")
    return (values.sum(0) - values) / (len(values) - 1)


def _at_minimum(values: Floats, others: Floats) -> DropAndRise:
    """Return the heights of both ends above the values at the minimum of the others."""
    index = np.where(np.isnan(others), np.inf, others).argmin(-1)
    lowest = np.take_along_axis(values, index[..., None], -1)[..., 0]
    return DropAndRise(values[..., 0] - lowest, values[..., -1] - lowest, index)
