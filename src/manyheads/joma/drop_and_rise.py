"""Curves that fall and rise again: how deep, how far back, and whether that goes along with anything.

The theory of joint dynamics predicts such curves for the entropy of attention and the stable rank of the MLP above it.
Every curve that is not constant has a lowest point, and noise alone makes its ends lie above it. `find_valley` measures
one curve; `cross_valleys` removes that bias where there are several of one kind. What is defined here is not printed in
the paper, which shows curves.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from manyheads._arrays import as_native, takes_arrays, takes_labels
from manyheads.errors import ShapeError, UsageError

Array = NDArray[np.float64]


class Valley(NamedTuple):
    """The lowest point of curves (..., time) and their two ends above it, each of shape (...)."""

    drop: Array
    """From the first value down to the lowest."""
    rebound: Array
    """From the lowest value up to the last."""
    place: NDArray[np.intp]
    """Index of the lowest value along time, the first one where it is reached several times."""


@takes_arrays
def find_valley(curves: ArrayLike) -> Valley:
    r"""Measure drop and rebound of each curve by itself.

    .. math:: t^* = \arg\min_t v(t), \quad \text{drop} = v(0) - v(t^*), \quad \text{rebound} = v(T) - v(t^*)

    Neither is ever negative: on noise alone both are about its range. Use `cross_valleys` to test for one.

    Parameters
    ----------
    curves
        (..., time); a curve that holds NaN only gives NaN.

    Raises
    ------
    ShapeError
        No time.
    UsageError
        A curve is NaN in parts: see `hold_last`.

    Examples
    --------
    >>> valley = find_valley([[3.0, 1.0, 1.5, 2.0], [3.0, 2.0, 1.0, 0.5]])
    >>> valley.drop.tolist(), valley.rebound.tolist(), valley.place.tolist()
    ([2.0, 2.5], [1.0, 0.0], [1, 3])
    """
    values = _as_curves(curves)
    place = np.where(np.isnan(values), np.inf, values).argmin(-1)
    return Valley(*_ends(values, place), place)


@takes_arrays
def cross_valleys(curves: ArrayLike) -> Valley:
    """Measure drop and rebound of each replicate at the place where the mean of the *other* replicates is lowest.

    A place that is chosen without the replicate makes both differences unbiased at that place: where curves only
    fluctuate they are zero on average, whatever the noise's memory, and their spread over replicates gives an honest
    interval. Where there is a valley the others miss its lowest point by their noise, so that both are a little too
    small on average, never too large. They may be negative.

    Parameters
    ----------
    curves
        (replicates, ..., time) of at least two replicates of one system.

    Raises
    ------
    UsageError
        A single replicate has no others; or a curve is NaN in parts.

    Examples
    --------
    >>> valley = cross_valleys([[3.0, 1.0, 2.0], [3.0, 1.2, 1.1], [3.2, 1.0, 2.2]])
    >>> valley.place.tolist(), valley.rebound.round(6).tolist()
    ([1, 1, 1], [1.0, -0.1, 1.2])
    """
    values = _as_curves(curves)
    others = _mean_of_others(values)
    place = np.where(np.isnan(others), np.inf, others).argmin(-1)
    return Valley(*_ends(values, place), place)


@takes_arrays
def cross_rises(curves: ArrayLike) -> Array:
    """Measure by how much each replicate rises between the two moments between which the *others'* mean rises most.

    The first moment is one at which the others' mean is lower than ever before, the start apart: what is measured is a
    rise after a drop, and a second drop later on does not hide it, as it hides the rebound of `cross_valleys`. As there
    the moments know nothing of the replicate: on noise alone the mean is zero. Where the others never rise it is zero.

    Parameters
    ----------
    curves
        (replicates, ..., time) of at least two replicates of one system.

    Returns
    -------
    Array
        (replicates, ...).

    Raises
    ------
    UsageError
        A single replicate has no others; or a curve is NaN in parts.

    Examples
    --------
    Down, up, and down again:

    >>> curves = [[3.0, 1.0, 2.0, 0.5], [3.0, 1.2, 2.2, 0.4], [3.1, 1.0, 2.1, 0.6]]
    >>> cross_rises(curves).round(6).tolist(), cross_valleys(curves).rebound.tolist()
    ([1.0, 1.0, 1.1], [0.0, 0.0, 0.0])
    """
    values = _as_curves(curves)
    others = _mean_of_others(values)
    best, rises = np.zeros(values.shape[:-1]), np.zeros(values.shape[:-1])
    for low in range(1, values.shape[-1] - 1):
        lowest = others[..., low] < others[..., :low].min(-1)
        high = low + np.where(np.isnan(others[..., low:]), -np.inf, others[..., low:]).argmax(-1)
        rise, own = (
            np.take_along_axis(each, high[..., None], -1)[..., 0] - each[..., low] for each in (others, values)
        )
        better = lowest & (rise > best)
        best, rises = np.where(better, rise, best), np.where(better, own, rises)
    return np.where(np.isnan(values[..., 0]), np.nan, rises)


@takes_arrays
def hold_last(curves: ArrayLike) -> Array:
    """Continue a curve that becomes infinite or NaN with its last finite value: what a run that diverged had reached.

    A curve whose first value is not finite is that value throughout.

    Examples
    --------
    >>> hold_last([2.0, 1.0, float("nan"), 3.0]).tolist()
    [2.0, 1.0, 1.0, 1.0]
    """
    values = np.asarray(curves, np.float64)
    alive = np.logical_and.accumulate(np.isfinite(values), axis=-1)
    last = np.maximum(alive.sum(-1, keepdims=True) - 1, 0)
    return np.where(alive, values, np.take_along_axis(values, last, -1))


@takes_labels
def correlate_within(x: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> float:
    r"""Spearman's rank correlation within groups: ranks are taken, and centred, inside each of them.

    .. math::
        \rho = \frac{\sum_g \sum_{i \in g} (r_i - \bar r_g)(s_i - \bar s_g)}
                    {\sqrt{\sum_g \sum_{i \in g} (r_i - \bar r_g)^2 \, \sum_g \sum_{i \in g} (s_i - \bar s_g)^2}}

    What differs between groups has no part in it. With one group it is the usual coefficient; without ties and with
    groups of one size it is the mean of the groups' coefficients. It has no interval of its own here: compute it for
    each replicate.

    Parameters
    ----------
    x, y
        Pairs, shape (n,), finite.
    groups
        (n,) labels; `None` puts all pairs together.

    Returns
    -------
    float
        In [-1, 1]; 0 where x or y is constant within every group, for then no order is shared.

    Raises
    ------
    ShapeError
        Different lengths.
    UsageError
        NaN or infinite values, which have no rank.

    Examples
    --------
    Higher with x inside both groups, lower from one to the next:

    >>> x, y, groups = [1, 2, 3, 7, 8, 9], [7, 8, 9, 1, 2, 3], list("aaabbb")
    >>> correlate_within(x, y, groups), round(correlate_within(x, y), 3)
    (1.0, -0.543)
    """
    first, second = (np.asarray(as_native(value, name), np.float64) for name, value in (("x", x), ("y", y)))
    labels = np.zeros(first.shape) if groups is None else np.asarray(groups)
    if first.ndim != 1 or not first.shape == second.shape == labels.shape:
        raise ShapeError(f"pairs of shape {first.shape} and {second.shape} in groups {labels.shape}: give three (n,)")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise UsageError("NaN or infinite values have no rank: leave those pairs out, and say so")
    r, s = _centred_ranks(first, labels), _centred_ranks(second, labels)
    size = float(np.sqrt((r**2).sum() * (s**2).sum()))
    return float(np.clip((r * s).sum() / size, -1.0, 1.0)) if size > 0 else 0.0


def _centred_ranks(values: Array, labels: NDArray[Any]) -> Array:
    ranks = np.empty(values.shape)
    for label in np.unique(labels):
        inside = labels == label
        ranks[inside] = stats.rankdata(values[inside]) - (inside.sum() + 1) / 2
    return ranks


def _as_curves(curves: ArrayLike) -> Array:
    values = np.asarray(curves, np.float64)
    if values.ndim < 1 or not values.shape[-1]:
        raise ShapeError(f"curves of shape {values.shape}: time, the last axis, holds no value")
    absent = np.isnan(values)
    if (absent.any(-1) & ~absent.all(-1)).any():
        raise UsageError("some curves are NaN in parts: cut them, or continue them by hold_last")
    return values


def _mean_of_others(values: Array) -> Array:
    """Return for each replicate the mean of all but itself, of the same shape."""
    if values.ndim < 2 or len(values) < 2:
        raise UsageError(f"curves of shape {values.shape}: two replicates or more in front tell each other the place")
    return (values.sum(0) - values) / (len(values) - 1)


def _ends(values: Array, place: NDArray[np.intp]) -> tuple[Array, Array]:
    lowest = np.take_along_axis(values, place[..., None], -1)[..., 0]
    return values[..., 0] - lowest, values[..., -1] - lowest
