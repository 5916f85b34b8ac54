"""`limits/learning-rate-transfer`: optimal learning rate against N, H and L (muTransfer)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.limits.axes import LETTERS, Axis
from manyheads.limits.checks.transfer_check import (
    ALLOWED_DECADES,
    PIECE,
    WIDENINGS,
    TransferCheck,
    decide_drift,
    final_losses,
    search_optimum,
)
from manyheads.limits.comparisons.curves import geometric_curve
from manyheads.limits.comparisons.parametrizations import CONSISTENT, LABELS, Plan, bordelon, choose_sizes, task_of
from manyheads.limits.systems.transformers import Recipe
from manyheads.statistics import Interval
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study
from manyheads.study.reporting.panels import Panel, spread_curve
from manyheads.transformer.shape import Shape

EPSILON = 1e-20  # Adam's, as the authors': so small that parametrizations which differ in it alone are one
DRIFTS = 0.6  # decades over a factor of eight: half way from what still is transfer to 0.90, a rate like 1/size
BATCHES = {"digits": 16, "text": 8}


@dataclass(frozen=True)
class LearningRateTransfer(Study):
    """Final loss against the learning rate, and the optimal one against N, H or L, for every parametrization.

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``.
    axes, parametrizations
        Which axes, and which of the parametrizations: limits, half-logit, half-depth, mup, standard.
    base
        N, H, L at which all parametrizations are one.
    key_dims, heads_counts, depths
        Sizes along each axis.
    steps
        Updates of Adam.
    lowest, ratio, points
        Grid of learning rates; it is widened where the least loss is at an end.
    """

    name: ClassVar[str] = "limits/learning-rate-transfer"
    claim: ClassVar[str] = "The optimal learning rate is independent of N, H, L; standard scaling shifts it"
    source: ClassVar[Source] = bordelon("figure 2a: transfer of the learning rate over N")
    unread_prediction: ClassVar[str] = (
        "drifts are tested against half of the predicted power, by parametrization and axis"
    )
    revision: ClassVar[int] = 2

    task: str = "digits"
    axes: tuple[str, ...] = ("key_dim",)
    parametrizations: tuple[str, ...] = ("limits", "half-logit", "mup", "standard")
    base: tuple[int, int, int] = (8, 4, 2)
    key_dims: tuple[int, ...] = (4, 8, 32)
    heads_counts: tuple[int, ...] = (2, 4, 16)
    depths: tuple[int, ...] = (2, 8, 16)
    steps: int = 100
    lowest: float = 4e-4
    ratio: float = 2.5
    points: int = 6

    def __post_init__(self) -> None:
        if not self.lowest > 0 or not self.ratio > 1 or self.points < 3:
            raise UsageError(
                f"lowest={self.lowest}, ratio={self.ratio}, points={self.points}: expected a positive learning rate, "
                "a ratio above 1, and three points or more"
            )
        if unknown := [name for name in self.parametrizations if name == "mup-half-logit"]:
            raise UsageError(
                f"parametrization {unknown[0]!r}: no law of its optimal learning rate is known; choose others"
            )
        Recipe(self.steps)
        task_of(self.task, 1)
        self.plan()

    @classmethod
    def full(cls) -> LearningRateTransfer:
        """Return the study along all three axes."""
        return cls(axes=("key_dim", "heads", "depth"), steps=200)

    @classmethod
    def small(cls) -> LearningRateTransfer:
        """Return the smallest configuration in which every claim can change."""
        return cls(
            parametrizations=("limits", "standard"),
            base=(4, 2, 2),
            key_dims=(4, 8),
            steps=8,
            lowest=0.01,
            ratio=4.0,
            points=3,
        )

    def plan(self) -> Plan:
        """Return the networks."""
        sizes = choose_sizes(self.axes, self.key_dims, self.heads_counts, self.depths)
        return Plan(Shape(*self.base), sizes, self.parametrizations, "adam", epsilon=False)

    def cells(self) -> tuple[Cell, ...]:
        """Return every network once."""
        return self.plan().cells()

    def learning_rates(self) -> np.ndarray:
        """Return all learning rates that a search may try, in rising order."""
        beyond = WIDENINGS * PIECE
        return self.lowest * self.ratio ** np.arange(-beyond, self.points + beyond)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the exponent of the size in the optimal learning rate: zero where a parametrization is consistent."""
        pairs = list(self.plan().pairs())
        powers = [0.0 if _stays(parametrization, axis) else -1.0 for parametrization, axis in pairs]
        attributes = {"long_name": "exponent of the size in the optimal learning rate", "units": "1"}
        names = [f"{parametrization} along {LETTERS[axis]}" for parametrization, axis in pairs]
        return xr.Dataset(
            {"power": ("parametrization", np.asarray(powers), attributes)}, coords={"parametrization": names}
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train a network for each learning rate, from the same init on the same batches, and find the optimum."""
        parametrization, shape = self.plan().train_with(cell)
        task, recipe = task_of(self.task, BATCHES[self.task]), Recipe(self.steps, EPSILON)
        grid = self.learning_rates()
        first = WIDENINGS * PIECE
        found = search_optimum(
            grid[first : first + self.points],
            lambda learning_rates: final_losses(task, parametrization, shape, recipe, learning_rates, key),
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

    def claims(self) -> tuple[Claim, ...]:
        """Test the optimal learning rate of every parametrization for a drift along every axis."""
        # Short runs of a shallow task: no law is known for a drift in depth; the table shows the figures.
        pairs = [(s, a) for s, a in self.plan().pairs() if _stays(s, a) or not (self.task == "text" and a == "depth")]
        return tuple(self._transfers(*pair) if _stays(*pair) else self._drifts(*pair) for pair in pairs)

    def _transfers(self, parametrization: str, axis: Axis) -> Claim:
        def measure(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval, int | None]:
            found = self.drift(trained, parametrization, axis)
            middle, low, high = found.decades
            interval = Interval(low, high, found.drift.fit.interval.level)
            inside = bool((self.plan().along(trained, "outcome", parametrization, axis) == "inside").all())
            if not inside:  # optima beyond the grid count as its end, and ends do not drift: no evidence of transfer
                return middle, interval.widened(math.inf), None
            return middle, interval, found.drift.replicates_needed

        return Claim(
            f"{LABELS[parametrization]} parametrization: the optimal learning rate changes by at most "
            f"{ALLOWED_DECADES:g} decades over a factor of eight in {LETTERS[axis]}",
            measure,
            target=0.0,
            tolerance=ALLOWED_DECADES,
            basis="half way from no drift to the root of the size, 0.45 decades, rounded up",
        )

    def _drifts(self, parametrization: str, axis: Axis) -> Claim:
        def measure(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval]:
            found = self.drift(trained, parametrization, axis)
            middle, low, high = found.decades
            return middle, Interval(low, high, found.drift.fit.interval.level)

        return Claim(
            f"{LABELS[parametrization]} parametrization: the optimal learning rate falls by at least {DRIFTS:g} "
            f"decades over a factor of eight in {LETTERS[axis]}",
            measure,
            target=-DRIFTS,
            tolerance=(math.inf, 0.0),
            basis=f"half way from {ALLOWED_DECADES:g} to a learning rate proportional to 1/size, 0.90 decades",
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the loss against the learning rate by size, the optimum against the size, and the drifts."""
        return _losses(self, trained), *_optima(self, trained), _drifts(self, trained)

    def drift(self, trained: xr.Dataset, parametrization: str, axis: Axis) -> TransferCheck:
        """Return the drift of the optimal learning rate of a parametrization along an axis.

        An optimum beyond the widest grid counts as its end, so that the drift comes out too small; no claim of transfer
        is decided by it.
        """
        plan = self.plan()
        return decide_drift(
            axis, dict(plan.sizes)[axis], plan.along(trained, "optimal_learning_rate", parametrization, axis)
        )


def _stays(parametrization: str, axis: Axis) -> bool:
    return parametrization in CONSISTENT or (parametrization == "mup" and axis != "depth")


def _losses(study: LearningRateTransfer, trained: xr.Dataset) -> Panel:
    plan, learning_rates = study.plan(), study.learning_rates()
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


def _optima(study: LearningRateTransfer, trained: xr.Dataset) -> tuple[Panel, ...]:
    plan = study.plan()
    panels = []
    for axis, sizes in plan.sizes:
        curves = []
        for parametrization in [name for name, other in plan.pairs() if other == axis]:
            values = plan.along(trained, "optimal_learning_rate", parametrization, axis)  # (replicates, sizes)
            curves.append(geometric_curve(sizes, values, LABELS[parametrization], list(LABELS).index(parametrization)))
        panels.append(
            Lines(
                f"Optimal learning rate along {LETTERS[axis]}",
                f"{LETTERS[axis]}",
                "optimal learning rate of the base shape",
                tuple(curves),
                log_x=True,
                log_y=True,
                note="Geometric means over replicates; bands range over all. A horizontal line is transfer.",
            )
        )
    return tuple(panels)


def _drifts(study: LearningRateTransfer, trained: xr.Dataset) -> Panel:
    plan = study.plan()
    rows = []
    for parametrization, axis in plan.pairs():
        found = study.drift(trained, parametrization, axis)
        middle, low, high = found.decades
        losses = plan.along(trained, "loss", parametrization, axis)  # (replicates, sizes, rates)
        best = np.nanmin(np.where(np.isfinite(losses), losses, np.nan), -1).mean(0)
        shown = ", ".join(f"{value:.3f}" for value in best)
        rows.append(
            (
                LABELS[parametrization],
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
