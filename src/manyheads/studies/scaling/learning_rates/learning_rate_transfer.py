"""`limits/learning-rate-transfer`: optimal learning rate against N, H and L (muTransfer)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.scaling.axes import LETTERS, Axis
from manyheads.scaling.checks.transfer_check import ALLOWED_DECADES
from manyheads.scaling.trained.transformers import Recipe
from manyheads.studies.scaling.shared.optimal_rates import (
    all_rates,
    check_grid,
    drifts_claim,
    find_rate,
    rate_panels,
    transfers_claim,
)
from manyheads.studies.scaling.shared.parametrizations import CONSISTENT, Plan, bordelon, choose_sizes, task_of
from manyheads.study import Cell, Claim, Source, Study
from manyheads.study.panels import Panel
from manyheads.transformer.shape import Shape

EPSILON = 1e-20  # Adam's, as the authors': so small that parametrizations which differ in it alone are one
DRIFTS = 0.6  # decades over a factor of eight: half way from what still is transfer to 0.90, a rate like 1/size


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
        check_grid(self.lowest, self.ratio, self.points)
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
        return all_rates(self.lowest, self.ratio, self.points)

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
        recipe = Recipe(self.steps, EPSILON)
        return find_rate(self.plan(), cell, self.task, recipe, self.learning_rates(), self.points, key)

    def claims(self) -> tuple[Claim, ...]:
        """Test the optimal learning rate of every parametrization for a drift along every axis."""
        # Short runs of a shallow task: no law is known for a drift in depth; the table shows the figures.
        plan = self.plan()
        pairs = [(s, a) for s, a in plan.pairs() if _stays(s, a) or not (self.task == "text" and a == "depth")]
        basis = f"half way from {ALLOWED_DECADES:g} to a learning rate proportional to 1/size, 0.90 decades"
        return tuple(
            transfers_claim(plan, *pair) if _stays(*pair) else drifts_claim(plan, *pair, DRIFTS, basis)
            for pair in pairs
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the loss against the learning rate by size, the optimum against the size, and the drifts."""
        return rate_panels(self.plan(), self.learning_rates(), trained)


def _stays(parametrization: str, axis: Axis) -> bool:
    return parametrization in CONSISTENT or (parametrization == "mup" and axis != "depth")
