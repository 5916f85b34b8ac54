"""Optimal learning rates of the networks of a plan: their search, claims about their drift, panels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.scaling.axes import LETTERS, WORDS, Axis
from manyheads.scaling.checks.transfer_check import (
    ALLOWED_DECADES,
    PIECE,
    WIDENINGS,
    TransferCheck,
    decide_drift,
    final_losses,
    search_optimum,
)
from manyheads.statistics import Interval
from manyheads.studies.scaling.shared.curves import geometric_curve
from manyheads.studies.scaling.shared.parametrizations import LABELS, MUON_LABELS, PLOT_GROUPS, Plan, task_of
from manyheads.study import Cell, Claim, Curve, Lines, Listing
from manyheads.study.panels import Panel, spread_curve

if TYPE_CHECKING:
    from manyheads.scaling.trained.transformers import Recipe

BATCHES = {"digits": 16, "text": 8}
NAMES = LABELS | MUON_LABELS


def check_grid(lowest: float, ratio: float, points: int) -> None:
    """Refuse anything but a geometric grid of learning rates."""
    if not lowest > 0 or not ratio > 1 or points < 3:
        raise UsageError(
            f"lowest={lowest}, ratio={ratio}, points={points}: expected a positive learning rate, a ratio above 1, and "
            "three points or more"
        )


def all_rates(lowest: float, ratio: float, points: int) -> np.ndarray:
    """Return all learning rates that a search may try, in rising order."""
    beyond = WIDENINGS * PIECE
    return lowest * ratio ** np.arange(-beyond, points + beyond)


def find_rate(plan: Plan, cell: Cell, task: str, recipe: Recipe, grid: np.ndarray, points: int, key: Any) -> xr.Dataset:
    """Train a network for each learning rate, from the same init on the same batches, and find the optimum."""
    parametrization, shape = plan.train_with(cell)
    batches = task_of(task, BATCHES[task])
    first = WIDENINGS * PIECE
    found = search_optimum(
        grid[first : first + points],
        lambda learning_rates: final_losses(batches, parametrization, shape, recipe, learning_rates, key),
    )
    losses = np.full(len(grid), np.nan)
    start = int(np.argmin(np.abs(np.log(grid / found.learning_rates[0]))))
    losses[start : start + len(found.learning_rates)] = found.losses
    return xr.Dataset(
        {
            "loss": ("learning_rate", losses, {"long_name": "final training loss", "units": "nat"}),
            "optimal_learning_rate": (
                (),
                found.best,
                {"long_name": "optimal learning rate of the base shape", "units": "1"},
            ),
            "outcome": ((), found.outcome, {"long_name": "where the optimum lies on the grid"}),
        },
        coords={
            "learning_rate": ("learning_rate", grid, {"long_name": "learning rate of the base shape", "units": "1"})
        },
    )


def drift_of(plan: Plan, trained: xr.Dataset, parametrization: str, axis: Axis) -> TransferCheck:
    """Return the drift of the optimal learning rate of a parametrization along an axis.

    An optimum beyond the widest grid counts as its end, so that the drift comes out too small; no claim of transfer is
    decided by it.
    """
    return decide_drift(
        axis, dict(plan.sizes)[axis], plan.along(trained, "optimal_learning_rate", parametrization, axis)
    )


def transfers_claim(plan: Plan, parametrization: str, axis: Axis) -> Claim:
    """Claim that the optimal learning rate stays along an axis."""

    def measure(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval, int | None]:
        found = drift_of(plan, trained, parametrization, axis)
        middle, low, high = found.decades
        interval = Interval(low, high, found.drift.fit.interval.level)
        inside = bool((plan.along(trained, "outcome", parametrization, axis) == "inside").all())
        if not inside:  # optima beyond the grid count as its end, and ends do not drift: no evidence of transfer
            return middle, interval.widened(math.inf), None
        return middle, interval, found.drift.replicates_needed

    return Claim(
        f"{NAMES[parametrization]} parametrization: the optimal learning rate changes by at most "
        f"{ALLOWED_DECADES:g} decades over a factor of eight in {LETTERS[axis]}",
        measure,
        quantity="drift of the optimal learning rate (decades)",
        target=0.0,
        tolerance=ALLOWED_DECADES,
        basis="half way from no drift to the root of the size, 0.45 decades, rounded up",
    )


def drifts_claim(plan: Plan, parametrization: str, axis: Axis, least: float, basis: str) -> Claim:
    """Claim that the optimal learning rate falls along an axis, by so many decades at least."""

    def measure(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval]:
        found = drift_of(plan, trained, parametrization, axis)
        middle, low, high = found.decades
        return middle, Interval(low, high, found.drift.fit.interval.level)

    return Claim(
        f"{NAMES[parametrization]} parametrization: the optimal learning rate falls by at least {least:g} "
        f"decades over a factor of eight in {LETTERS[axis]}",
        measure,
        quantity="drift of the optimal learning rate (decades)",
        target=-least,
        tolerance=(math.inf, 0.0),
        basis=basis,
    )


def rate_panels(plan: Plan, learning_rates: np.ndarray, trained: xr.Dataset) -> tuple[Panel, ...]:
    """Show the loss against the learning rate by size, the optimum against the size, and the drifts."""
    return _losses(plan, learning_rates, trained), *_optima(plan, trained), _drifts(plan, trained)


def _losses(plan: Plan, learning_rates: np.ndarray, trained: xr.Dataset) -> Panel:
    x = np.log10(learning_rates)

    def curve(parametrization: str, axis: Axis, place: int, size: int) -> Curve | None:
        losses = plan.along(trained, "loss", parametrization, axis)[:, place]  # (replicates, rates)
        seen = np.isfinite(losses).all(0)
        if not seen.any():
            return None
        label = f"{LETTERS[axis]} = {size}"
        if len(plan.sizes) > 1:
            label = f"size {place + 1} of {len(dict(plan.sizes)[axis])}"
        return spread_curve(x[seen], losses[:, seen], label, group=place)

    def plot(parametrization: str, axis: Axis) -> tuple[Curve, ...]:
        drawn = (curve(parametrization, axis, place, size) for place, size in enumerate(dict(plan.sizes)[axis]))
        return tuple(found for found in drawn if found is not None)

    return plan.multiples(
        "Final loss against the learning rate, by size",
        "log10 of the learning rate of the base shape",
        "final training loss [nat]",
        plot,
        "Means over replicates; bands range over all. The learning rate transfers where the minima coincide.",
        log_y=True,
    )


def _optima(plan: Plan, trained: xr.Dataset) -> tuple[Panel, ...]:
    panels = []
    for axis, sizes in plan.sizes:
        curves = []
        for parametrization in [name for name, other in plan.pairs() if other == axis]:
            values = plan.along(trained, "optimal_learning_rate", parametrization, axis)  # (replicates, sizes)
            curves.append(geometric_curve(sizes, values, NAMES[parametrization], PLOT_GROUPS[parametrization]))
        panels.append(
            Lines(
                f"Optimal learning rate along {LETTERS[axis]}",
                WORDS[axis],
                "optimal learning rate of the base shape",
                tuple(curves),
                log_x=True,
                log_y=True,
                note="Geometric means over replicates; bands range over all. A horizontal line is transfer.",
                shows=(f"factor of eight in {LETTERS[axis]}",),
            )
        )
    return tuple(panels)


def _drifts(plan: Plan, trained: xr.Dataset) -> Panel:
    rows = []
    for parametrization, axis in plan.pairs():
        found = drift_of(plan, trained, parametrization, axis)
        middle, low, high = found.decades
        losses = plan.along(trained, "loss", parametrization, axis)  # (replicates, sizes, rates)
        best = np.nanmin(np.where(np.isfinite(losses), losses, np.nan), -1).mean(0)
        shown = ", ".join(f"{value:.3f}" for value in best)
        rows.append(
            (
                NAMES[parametrization],
                LETTERS[axis],
                f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]",
                found.sentence(),
                shown,
            )
        )
    return Listing(
        "Drift of the optimal learning rate",
        ("scaling", "axis", "decades over a factor of eight", "reading", "least losses by size [nat]"),
        tuple(rows),
        note="Decades with their 99% interval.",
    )
