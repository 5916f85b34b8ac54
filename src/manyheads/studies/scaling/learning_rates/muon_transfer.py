"""`limits/muon-transfer`: optimal learning rate of Muon against N, H and L, beside common recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.scaling.axes import LETTERS, Axis
from manyheads.scaling.checks.transfer_check import ALLOWED_DECADES, TransferCheck
from manyheads.scaling.trained.transformers import Recipe
from manyheads.studies.scaling.muon_coordinates import EPSILON, MuonCoordinates
from manyheads.studies.scaling.shared.optimal_rates import (
    all_rates,
    check_grid,
    drift_of,
    drifts_claim,
    find_rate,
    rate_panels,
    transfers_claim,
)
from manyheads.studies.scaling.shared.parametrizations import RECIPES, Plan, choose_sizes, task_of
from manyheads.study import Cell, Claim, Source, Study
from manyheads.study.panels import Panel
from manyheads.transformer.shape import Shape

DRIFTS: dict[tuple[str, Axis], float] = {
    ("moonlight", "key_dim"): -0.5,
    ("moonlight", "heads"): -0.5,
    ("keller", "depth"): -1.0,
    ("heads-none", "heads"): -0.5,
    ("heads-keller", "heads"): -0.5,
    ("mup", "depth"): -1.0,
    ("standard", "key_dim"): -1.0,
    ("standard", "heads"): -1.0,
}
"""Recipe and axis → the power of the size in the optimal learning rate of its groups: that of what the table gives over
what the recipe gives. W_O of Keller Jordan's factor per head asks for H^-1, the other head blocks for H^-1/2."""


@dataclass(frozen=True)
class MuonTransfer(Study):
    """Final loss against the learning rate of Muon, and the optimal one against N, H or L, beside common recipes.

    AdamW's part keeps one consistent rate; only Muon's is swept.

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``.
    axes, parametrizations
        Which axes, and which recipes of `MUON_LABELS`; ``"mup"`` and ``"standard"`` train all weights by AdamW, whose
        learning rate is then the one that is swept.
    base
        N, H, L at which recipes of one split are one.
    key_dims, heads_counts, depths
        Sizes along each axis.
    steps
        Updates.
    lowest, ratio, points
        Grid of Muon's learning rates; it is widened where the least loss is at an end.
    adam_learning_rate
        AdamW's at the base.
    """

    name: ClassVar[str] = "limits/muon-transfer"
    claim: ClassVar[str] = "Muon's optimal learning rate is independent of N, H, L; common recipes shift it"
    source: ClassVar[Source] = MuonCoordinates.source
    unread_prediction: ClassVar[str] = "drifts are tested against what still counts as transfer, by recipe and axis"

    task: str = "digits"
    axes: tuple[str, ...] = ("key_dim", "heads", "depth")
    parametrizations: tuple[str, ...] = (
        "muon",
        "muon-half-logit",
        "muon-half-depth",
        "muon-heads",
        "moonlight",
        "keller",
        "heads-none",
        "heads-keller",
    )
    base: tuple[int, int, int] = (8, 4, 2)
    key_dims: tuple[int, ...] = (4, 8, 32)
    heads_counts: tuple[int, ...] = (2, 4, 16)
    depths: tuple[int, ...] = (2, 4, 16)
    steps: int = 50
    lowest: float = 2.5e-3
    ratio: float = 2.0
    points: int = 7
    adam_learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        check_grid(self.lowest, self.ratio, self.points)
        Recipe(self.steps, adam_learning_rate=self.adam_learning_rate)
        task_of(self.task, 1)
        self.plan()

    @classmethod
    def full(cls) -> MuonTransfer:
        """Return the study at four times the number of steps."""
        return cls(steps=200)

    @classmethod
    def small(cls) -> MuonTransfer:
        """Return the smallest configuration in which every claim can change."""
        return cls(
            axes=("heads",),
            parametrizations=("muon", "moonlight"),
            base=(4, 2, 2),
            heads_counts=(2, 4),
            steps=8,
            lowest=0.01,
            ratio=4.0,
            points=3,
        )

    def plan(self) -> Plan:
        """Return the networks."""
        sizes = choose_sizes(self.axes, self.key_dims, self.heads_counts, self.depths)
        own: dict[str, tuple[Axis, ...]] = {
            "muon-half-logit": ("key_dim",),
            "muon-half-depth": ("depth",),
            "muon-heads": ("heads",),
            **{name: tuple(axis for other, axis in DRIFTS if other == name) for name in RECIPES},
        }
        return Plan(Shape(*self.base), sizes, self.parametrizations, "muon", epsilon=False, axes_of=own)

    def cells(self) -> tuple[Cell, ...]:
        """Return every network once."""
        return self.plan().cells()

    def learning_rates(self) -> np.ndarray:
        """Return all learning rates that a search may try, in rising order."""
        return all_rates(self.lowest, self.ratio, self.points)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the exponent of the size in the optimal learning rate: zero where the table is followed."""
        pairs = list(self.plan().pairs())
        attributes = {"long_name": "exponent of the size in the optimal learning rate", "units": "1"}
        names = [f"{recipe} along {LETTERS[axis]}" for recipe, axis in pairs]
        powers = np.asarray([DRIFTS.get(pair, 0.0) for pair in pairs])
        return xr.Dataset({"power": ("parametrization", powers, attributes)}, coords={"parametrization": names})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train a network for each learning rate, from the same init on the same batches, and find the optimum."""
        recipe = Recipe(self.steps, EPSILON, self.adam_learning_rate)
        return find_rate(self.plan(), cell, self.task, recipe, self.learning_rates(), self.points, key)

    def claims(self) -> tuple[Claim, ...]:
        """Test the optimal learning rate of every recipe for a drift along every axis."""
        plan, claims = self.plan(), []
        for pair in plan.pairs():
            if pair not in DRIFTS:
                claims.append(transfers_claim(plan, *pair))
                continue
            basis = f"what still counts as transfer; {-DRIFTS[pair] * np.log10(8):.2f} decades are derived"
            claims.append(drifts_claim(plan, *pair, ALLOWED_DECADES, basis))
        return tuple(claims)

    def drift(self, trained: xr.Dataset, parametrization: str, axis: Axis) -> TransferCheck:
        """Return the drift of the optimal learning rate of a recipe along an axis."""
        return drift_of(self.plan(), trained, parametrization, axis)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the loss against the learning rate by size, the optimum against the size, and the drifts."""
        return rate_panels(self.plan(), self.learning_rates(), trained)
