"""Optimal learning rates: their search, claims about their drift, losses by size."""

import math
from collections.abc import Callable

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.scaling.axes import LETTERS, Axis
from manyheads.scaling.checks import transfer_check as check
from manyheads.statistics import Interval
from manyheads.studies.scaling.shared.parametrizations import NAMES, Plan
from manyheads.study import claims, panels, verdicts

BATCHES = {"digits": 16, "text": 8}
EPSILON = 1e-20  # Adam's, as the authors': so small that the rates alone are compared
DRIFTS = 0.6  # decades over a factor of eight: half way from what still is transfer to 0.90, a rate like 1/size


def all_rates(lowest: float, ratio: float, points: int) -> np.ndarray:
    """Return all learning rates that a search may try, in rising order."""
    beyond = check.WIDENINGS * check.PIECE
    return lowest * ratio ** np.arange(-beyond, points + beyond)


def search_rates(grid: np.ndarray, points: int, losses: Callable[[np.ndarray], np.ndarray]) -> dict[str, tuple]:
    """Search all learning rates for the one of least loss, from `points` in their middle; record both."""
    tried = np.full(len(grid), np.nan)

    def train(learning_rates: np.ndarray) -> np.ndarray:
        found = losses(learning_rates)
        tried[places_of(learning_rates, grid)] = found
        return found

    first = (len(grid) - points) // 2
    found = check.search_optimum(grid[first : first + points], train)
    return {
        "loss": ("learning_rate", tried, "final training loss", "nat"),
        "optimal_learning_rate": ((), found.best, "optimal learning rate of the base shape"),
        "outcome": ((), found.outcome, "where the optimum lies on the grid", None),
        "learning_rate": ("learning_rate", grid, "learning rate of the base shape"),
    }


def predicted_powers(plan: Plan, power: Callable[[str, Axis], float], pairs: str) -> dict[str, tuple]:
    """Return the exponent of the size in the optimal learning rate for the pairs of a plan, a scaling and an axis."""
    names = [f"{name} along {LETTERS[axis]}" for name, axis in plan.pairs()]
    powers = np.asarray([power(*pair) for pair in plan.pairs()])
    return {
        "power": ("parametrization", powers, "exponent of the size in the optimal learning rate"),
        "parametrization": ("parametrization", names, pairs, None),
    }


def places_of(learning_rates: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return where learning rates stand on a grid."""
    return np.argmin(np.abs(np.log(learning_rates[:, None] / grid)), axis=1)


def drift_of(optima: xr.DataArray, axis: Axis) -> check.TransferCheck:
    """Return the drift of the optimal learning rate along an axis.

    An optimum beyond the widest grid counts as its end, so that the drift comes out too small; no claim of transfer is
    decided by it.
    """
    return check.decide_drift(axis, tuple(optima[axis].values.tolist()), optima.transpose("replicate", axis).values)


def drift(who: str, optima: xr.DataArray, axis: Axis, power: float, outcomes: xr.DataArray | None = None) -> st.Figure:
    """Return the drift in decades, drawn beside a predicted power.

    With `outcomes` it is undecided where an optimum is not inside the grid: ends do not drift.
    """
    found = drift_of(optima, axis)
    middle, low, high = found.decades
    interval, needed = Interval(low, high, found.drift.fit.interval.level), None
    if outcomes is not None:
        inside = bool((outcomes == "inside").all())
        interval, needed = (interval, found.drift.replicates_needed) if inside else (interval.widened(math.inf), None)
    start = optima.isel({axis: 0}, drop=True).mean("replicate")
    law = start * (optima[axis] / optima[axis][0].values) ** power
    drawn = claims.Series(axis, optima.rename(who), law)
    return st.Figure((middle, interval, needed), "drift of the optimal learning rate (decades)", drawn)


def transfers(who: str, axis: Axis, figure: st.Figure, expected: verdicts.Expected = "holds") -> st.Claim:
    """Claim that the optimal learning rate stays along an axis."""
    return st.Claim(
        f"{who}: the optimal learning rate changes by at most {check.ALLOWED_DECADES:g} decades over a factor of eight "
        f"in {LETTERS[axis]}",
        figure,
        st.near(0, check.ALLOWED_DECADES),
        "half way from no drift to the root of the size, 0.45 decades, rounded up",
        expected=expected,
    )


def falls(who: str, axis: Axis, figure: st.Figure, least: float, basis: str) -> st.Claim:
    """Claim that the optimal learning rate falls along an axis, by so many decades at least."""
    return st.Claim(
        f"{who}: the optimal learning rate falls by at least {least:g} decades over a factor of eight in "
        f"{LETTERS[axis]}",
        figure,
        st.below(-least),
        basis,
    )


def plan_drift(plan: Plan, trained: xr.Dataset, name: str, axis: Axis, power: float) -> st.Figure:
    """Return the drift of a parametrization; one that is predicted to stay needs optima inside the grid."""
    optima, outcomes = (plan.along(trained, each, name, axis) for each in ("optimal_learning_rate", "outcome"))
    return drift(NAMES[name], optima, axis, power, None if power else outcomes)


def losses_picture(plan: Plan, trained: xr.Dataset) -> st.Panel:
    """Draw the loss against the learning rate by size, for every parametrization and axis."""
    x = np.log10(trained["learning_rate"].values)

    def plot(parametrization: str, axis: Axis) -> tuple[st.Curve, ...]:
        sizes, curves = dict(plan.sizes)[axis], []
        for place, rows in enumerate(plan.along(trained, "loss", parametrization, axis).transpose(axis, ...).values):
            seen = np.isfinite(rows).all(0)
            label = f"{LETTERS[axis]} = {sizes[place]}" if len(plan.sizes) == 1 else f"size {place + 1} of {len(sizes)}"
            if seen.any():
                curves.append(panels.spread_curve(x[seen], rows[:, seen], label, group=place))
        return tuple(curves)

    return plan.multiples(
        "Final loss against the learning rate, by size",
        "log10 of the learning rate of the base shape",
        "final training loss [nat]",
        plot,
        "Means over replicates; bands range over all. The learning rate transfers where the minima coincide.",
        log_y=True,
    )
