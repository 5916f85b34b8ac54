"""`limits/batch-and-horizon`: optimal learning rate of Adam against the batch size and the number of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import check_rising
from manyheads.scaling.checks.transfer_check import final_losses, search_optimum
from manyheads.scaling.trained.transformers import Recipe
from manyheads.statistics import Interval, fit_exponent
from manyheads.studies.scaling.shared.curves import geometric_curve, power_curve
from manyheads.studies.scaling.shared.optimal_rates import all_rates, check_grid
from manyheads.studies.scaling.shared.parametrizations import parametrization_of, task_of
from manyheads.study import Cell, Claim, Lines, Source, Study
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.transformer.shape import Shape

EPSILON = 1e-20  # Adam's, so small that the rates alone are compared
POWERS = {"batch": 0.5, "steps": -0.32}
"""Power of each size in the optimal learning rate, by the rules that are tested."""
TOLERANCE = 0.16  # half of the smaller power: nearer to the rule than to no dependence
NAMES = {"batch": "batch size", "steps": "number of steps"}
CHANGES = {
    "batch": "grows as the root of the batch size",
    "steps": "falls as the number of steps to the power -0.32",
}
RULES = {
    "batch": "the square-root rule of Malladi et al., 2022, whose momenta are adapted as well; here they are kept",
    "steps": "measured on language models by Bjorck et al., 2025",
}


@dataclass(frozen=True)
class BatchAndHorizon(Study):
    """Final loss against the learning rate, and the optimal one against the batch size and the number of steps.

    No table gives these powers: how the noise of gradients and the distance to the optimum enter is not derived.

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``.
    shape
        N, H, L.
    batches, steps
        Sizes along each axis; the other one stays at its middle.
    lowest, ratio, points
        Grid of learning rates; it is widened where the least loss is at an end.
    """

    name: ClassVar[str] = "limits/batch-and-horizon"
    claim: ClassVar[str] = "Adam's optimal learning rate grows as the root of the batch, falls as steps^-0.32"
    source: ClassVar[Source] = Source(
        "bjorck2025horizons",
        "Scaling Optimal LR Across Token Horizons",
        "Johan Bjorck and Alon Benhaim and Vishrav Chaudhary and Furu Wei and Xia Song",
        2025,
        "2409.19913",
        locus="the power of the token horizon; the batch size by the square-root rule of arXiv:2205.10287",
    )
    unread_prediction: ClassVar[str] = (
        "both powers are constants of the rules that are tested; the prediction holds them"
    )

    task: str = "digits"
    shape: tuple[int, int, int] = (8, 4, 1)
    batches: tuple[int, ...] = (4, 16, 64)
    steps: tuple[int, ...] = (75, 300, 1200)
    lowest: float = 1e-3
    ratio: float = 2.0
    points: int = 6

    def __post_init__(self) -> None:
        check_grid(self.lowest, self.ratio, self.points)
        check_rising("batches", self.batches)
        check_rising("steps", self.steps)
        Shape.of(self.shape, "shape")
        task_of(self.task, self.batches[0])

    @classmethod
    def full(cls) -> BatchAndHorizon:
        """Return the study with five sizes along each axis."""
        return cls(batches=(4, 8, 16, 32, 64), steps=(75, 150, 300, 600, 1200))

    @classmethod
    def small(cls) -> BatchAndHorizon:
        """Return the smallest configuration in which every claim can change."""
        return cls(shape=(4, 2, 1), batches=(2, 4), steps=(16, 32), lowest=2.5e-3, ratio=4.0, points=4)

    def sizes(self, axis: str) -> tuple[int, ...]:
        """Return the sizes along an axis."""
        return self.batches if axis == "batch" else self.steps

    def along(self, axis: str) -> tuple[Cell, ...]:
        """Return the trainings along an axis, in the order of the sizes."""
        batch, steps = (each[len(each) // 2] for each in (self.batches, self.steps))
        if axis == "batch":
            return tuple(Cell(batch=size, steps=steps) for size in self.batches)
        return tuple(Cell(batch=batch, steps=size) for size in self.steps)

    def cells(self) -> tuple[Cell, ...]:
        """Return every training once."""
        return tuple(dict.fromkeys(cell for axis in POWERS for cell in self.along(axis)))

    def learning_rates(self) -> np.ndarray:
        """Return all learning rates that a search may try, in rising order."""
        return all_rates(self.lowest, self.ratio, self.points)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the powers of the batch size and of the number of steps, by the rules that are tested."""
        return dataset(
            {"power": ("axis", list(POWERS.values()), "power in the optimal learning rate")}, {"axis": list(POWERS)}
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train a network for each learning rate, from the same start on the same batches, and find the optimum."""
        shape = Shape(*self.shape)
        parametrization = parametrization_of("limits", shape, "adam")
        task, recipe = task_of(self.task, int(cell["batch"])), Recipe(int(cell["steps"]), EPSILON)
        grid, losses = self.learning_rates(), np.full(len(self.learning_rates()), np.nan)
        first = (len(grid) - self.points) // 2

        def train(learning_rates: np.ndarray) -> np.ndarray:
            found = final_losses(task, parametrization, shape, recipe, learning_rates, key)
            losses[np.argmin(np.abs(np.log(learning_rates[:, None] / grid)), axis=1)] = found
            return found

        found = search_optimum(grid[first : first + self.points], train)
        return dataset(
            {
                "loss": ("learning_rate", losses, "final training loss", "nat"),
                "optimal_learning_rate": ((), found.best, "optimal learning rate"),
                "outcome": ((), found.outcome, "where the optimum lies on the grid", None),
            },
            {"learning_rate": (grid, "learning rate", "1")},
        )

    def measured(self, trained: xr.Dataset, name: str, axis: str) -> np.ndarray:
        """Return a variable along an axis: (replicates, sizes, ...)."""
        places = [
            int(np.flatnonzero((trained.batch.values == cell["batch"]) & (trained.steps.values == cell["steps"]))[0])
            for cell in self.along(axis)
        ]
        return trained[name].isel(cell=places).transpose("replicate", "cell", ...).values

    def claims(self) -> tuple[Claim, ...]:
        """Test both powers."""
        return tuple(self._power(axis) for axis in POWERS)

    def _power(self, axis: str) -> Claim:
        def measure(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval]:
            fit = fit_exponent(self.sizes(axis), self.measured(trained, "optimal_learning_rate", axis))
            inside = (self.measured(trained, "outcome", axis) == "inside").all()
            return fit.exponent, fit.interval if inside else fit.interval.widened(math.inf)

        return Claim(
            f"The optimal learning rate of Adam {CHANGES[axis]}",
            measure,
            target=POWERS[axis],
            tolerance=TOLERANCE,
            basis=f"nearer to the rule than to no dependence; {RULES[axis]}",
            expected="refuted" if axis == "batch" else "holds",
            quantity=f"power of the {NAMES[axis]} in the optimal learning rate",
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the optimum over each axis beside its rule, and the losses."""
        x, panels = np.log10(self.learning_rates()), []
        for axis in POWERS:
            sizes = self.sizes(axis)
            optima, losses = (self.measured(trained, name, axis) for name in ("optimal_learning_rate", "loss"))
            start = float(np.exp(np.log(optima).mean(0))[0])
            panels.append(
                Lines(
                    f"Optimal learning rate against the {NAMES[axis]}",
                    NAMES[axis],
                    "optimal learning rate",
                    (
                        geometric_curve(sizes, optima, "trained", 0),
                        power_curve(sizes, start, POWERS[axis], f"to the power {POWERS[axis]:+.2f}"),
                    ),
                    log_x=True,
                    log_y=True,
                    note="Geometric means over replicates; bands range over all.",
                    shows=(CHANGES[axis],),
                )
            )
            seen = np.isfinite(losses).all(0)  # (sizes, rates)
            panels.append(
                Lines(
                    f"Final loss against the learning rate, by {NAMES[axis]}",
                    "log10 of the learning rate",
                    "final training loss [nat]",
                    tuple(
                        spread_curve(x[seen[place]], losses[:, place, seen[place]], f"{size:,}", group=place)
                        for place, size in enumerate(sizes)
                    ),
                    log_y=True,
                    note="Means over replicates; bands range over all.",
                )
            )
        return tuple(panels)
