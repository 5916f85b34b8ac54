"""`limits/weight-decay`: optimal learning rate of AdamW against H: no, coupled and independent weight decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.scaling.checks.transfer_check import (
    ALLOWED_DECADES,
    LAST,
    PIECE,
    TransferCheck,
    decide_drift,
    search_optimum,
)
from manyheads.scaling.trained.transformers import Recipe
from manyheads.scaling.trained.weight_decay import train_with_decay
from manyheads.statistics import Interval, fit_exponent
from manyheads.statistics.exponents import ExponentFit
from manyheads.studies.scaling.shared.curves import geometric_curve
from manyheads.studies.scaling.shared.optimal_rates import all_rates, check_grid
from manyheads.studies.scaling.shared.parametrizations import parametrization_of, task_of
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.transformer.shape import Shape

if TYPE_CHECKING:
    from manyheads.study.claims import Measure

EPSILON = 1e-20  # Adam's, so small that the rates alone are compared
DRIFTS = 0.6  # decades over a factor of eight: half way from what still is transfer to 0.90, a rate like 1/size
EARLY = 20  # relative updates are measured after this part of the steps, and at the end
HALF_ROOT = 0.25  # half of the exponent 1/2 by which relative updates grow with H under one rate

LABELS: dict[str, str] = {
    "table": "rates by the table, no decay",
    "table-coupled": "rates by the table, coupled decay",
    "table-independent": "rates by the table, independent decay",
    "one-rate": "one rate, no decay",
    "one-rate-decay": "one rate with decay",
}
"""Settings of AdamW in cells → label in plots. Under one rate coupled and independent decay are one."""


@dataclass(frozen=True)
class WeightDecay(Study):
    """Final loss against the learning rate over H, with weight decay or without, by the table's rates or one rate.

    Decay takes the share s = (learning rate) (weight decay) of the matrices of the blocks in every step. Independent
    decay keeps s at every size, coupled decay keeps the weight decay, so that s falls with the rate of each matrix.

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``.
    base
        N, H, L at which all settings are one.
    heads_counts
        Sizes H.
    total_decays
        T s at the base, in e-folds over the T steps of training, of the settings with decay.
    steps
        Updates T.
    scan
        What is kept while the learning rate is scanned: the ``"share"`` s, or the ``"decay"``, for which s is
        proportional to the rate and as stated at the middle of the first grid.
    batch
        Sequences of a step.
    lowest, ratio, points
        Grid of learning rates; it is widened where the least loss is at an end.
    """

    name: ClassVar[str] = "limits/weight-decay"
    claim: ClassVar[str] = "The table's learning rate transfers with independent decay; decay does not make one rate do"
    source: ClassVar[Source] = Source(
        "kosson2025decay",
        "Weight Decay may matter more than muP for Learning Rate Transfer in Practice",
        "Atli Kosson and Jeremy Welborn and Yang Liu and Martin Jaggi and Xi Chen",
        2025,
        "2510.19093",
        locus="independent weight decay; relative updates",
    )
    unread_prediction: ClassVar[str] = "targets follow from the setting of each claim; the prediction tabulates them"

    task: str = "digits"
    base: tuple[int, int, int] = (8, 4, 1)
    heads_counts: tuple[int, ...] = (2, 4, 16)
    total_decays: tuple[float, ...] = (2.0,)
    steps: int = 300
    scan: str = "share"
    batch: int = 16
    lowest: float = 5e-4
    ratio: float = 2.0
    points: int = 6

    def __post_init__(self) -> None:
        check_grid(self.lowest, self.ratio, self.points)
        check_rising("heads_counts", self.heads_counts)
        if not self.total_decays or list(self.total_decays) != sorted({each for each in self.total_decays if each > 0}):
            raise UsageError(f"total_decays={self.total_decays}: positive and in rising order; none is always there")
        if self.scan not in ("share", "decay"):
            raise UsageError(f"scan={self.scan!r}: keep the 'share' of a weight or the 'decay'")
        if self.steps < EARLY:
            raise UsageError(f"steps={self.steps}: at least {EARLY}, for a look at one {EARLY}th of them")
        Shape.of(self.base, "base")
        task_of(self.task, self.batch)

    @classmethod
    def full(cls) -> WeightDecay:
        """Return the study with little and much decay and twice the number of steps."""
        return cls(total_decays=(0.3, 1.0, 4.0), steps=600)

    @classmethod
    def small(cls) -> WeightDecay:
        """Return the smallest configuration in which every claim can change."""
        return cls(base=(4, 2, 1), heads_counts=(2, 4), steps=20, lowest=0.01, ratio=4.0, points=3)

    def settings(self) -> tuple[tuple[str, float], ...]:
        """Return every setting of AdamW with its T s."""
        decays = [(name, total) for total in self.total_decays for name in LABELS if name not in ("table", "one-rate")]
        return (("table", 0.0), ("one-rate", 0.0), *decays)

    def cells(self) -> tuple[Cell, ...]:
        """Return every network once, small ones first: at the base all settings with one T s are one."""
        cells = {self.cell(*setting, heads) for heads in self.heads_counts for setting in self.settings()}
        return tuple(sorted(cells, key=lambda cell: (cell["heads"], cell["total_decay"], cell["setting"])))

    def cell(self, setting: str, total: float, heads: int) -> Cell:
        """Return the cell in which a network is trained."""
        if heads == self.base[1]:
            setting = "table-independent" if total else "table"
        return Cell(setting=setting, total_decay=total, heads=heads)

    def learning_rates(self) -> np.ndarray:
        """Return all learning rates that a search may try, in rising order."""
        return all_rates(self.lowest, self.ratio, self.points)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the exponents of H that are derived: of the optimal rate, and of relative updates early and late."""
        names = list(LABELS)
        one = np.array([name.startswith("one-rate") for name in names])
        forgotten = np.array([name in ("table-independent", "one-rate-decay") for name in names])
        early = np.where(one, 0.5, -0.5)
        return dataset(
            {
                "optimum": ("setting", np.where(one, -1.0, 0.0), "exponent of H in the optimal learning rate"),
                "early": ("setting", early, "exponent of H in the first relative updates"),
                "late": ("setting", np.where(forgotten, 0.0, np.nan), "exponent of H once the start is forgotten"),
            },
            {"setting": names},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train a network for each learning rate, from the same start on the same batches, and find the optimum."""
        shape = Shape(self.base[0], int(cell["heads"]), self.base[2])
        parametrization = parametrization_of("limits", Shape(*self.base), "adam")
        task, recipe = task_of(self.task, self.batch), Recipe(self.steps, EPSILON)
        grid, setting = self.learning_rates(), str(cell["setting"])
        first = (len(grid) - self.points) // 2
        middle = grid[first + (self.points - 1) // 2]
        losses, early, late = (np.full(len(grid), np.nan) for _ in range(3))

        def train(learning_rates: np.ndarray) -> np.ndarray:
            share = float(cell["total_decay"]) / self.steps
            shares = share * (learning_rates / middle if self.scan == "decay" else np.ones(len(learning_rates)))
            places = np.argmin(np.abs(np.log(learning_rates[:, None] / grid)), axis=1)
            for part in range(0, len(places), PIECE):  # one compiled program serves all grids
                chosen = np.arange(part, part + PIECE).clip(max=len(places) - 1)
                found = train_with_decay(
                    task,
                    parametrization,
                    shape,
                    recipe,
                    learning_rates[chosen],
                    shares[chosen],
                    key,
                    one_rate=setting.startswith("one-rate"),
                    coupled=setting == "table-coupled",
                )
                last = max(1, self.steps // LAST)
                losses[places[chosen]] = found.losses[:, -last:].mean(1)
                late[places[chosen]] = found.relative_updates[:, -last:].mean(1)
                around = slice(max(1, self.steps // (2 * EARLY)), 3 * self.steps // (2 * EARLY) + 1)
                early[places[chosen]] = found.relative_updates[:, around].mean(1)
            return losses[places]

        found = search_optimum(grid[first : first + self.points], train)
        place = int(np.argmin(np.abs(grid - middle)))
        return dataset(
            {
                "loss": ("learning_rate", losses, "final training loss", "nat"),
                "optimal_learning_rate": ((), found.best, "optimal learning rate of the base shape"),
                "outcome": ((), found.outcome, "where the optimum lies on the grid", None),
                "early": ((), early[place], f"relative update after 1/{EARLY} of the steps"),
                "late": ((), late[place], "relative update at the end"),
            },
            {"learning_rate": (grid, "learning rate of the base shape", "1")},
        )

    def along(self, trained: xr.Dataset, name: str, setting: str, total: float) -> np.ndarray:
        """Return a variable over H: (replicates, sizes, ...)."""
        picked = [self._of(trained, self.cell(setting, total, heads)) for heads in self.heads_counts]
        return np.stack([each[name].transpose("replicate", ...).values for each in picked], axis=1)

    def _of(self, trained: xr.Dataset, cell: Cell) -> xr.Dataset:
        same = np.logical_and.reduce([trained[name].values == value for name, value in cell.items()])
        return trained.isel(cell=int(np.flatnonzero(same)[0]))

    def drift(self, trained: xr.Dataset, setting: str, total: float) -> TransferCheck:
        """Return the drift of the optimal learning rate over H."""
        optima = self.along(trained, "optimal_learning_rate", setting, total)
        return decide_drift("heads", self.heads_counts, optima)

    def exponent(self, trained: xr.Dataset, when: str, setting: str, total: float) -> ExponentFit:
        """Return the exponent of H in relative updates, "early" or "late", at the middle of the first grid."""
        return fit_exponent(self.heads_counts, self.along(trained, when, setting, total))

    def claims(self) -> tuple[Claim, ...]:
        """Test every setting for transfer, and relative updates for their exponents."""
        claims = [self._transfers("table", 0.0), self._drifts("one-rate", 0.0)]
        claims += [self._updates("early", setting, 0.0) for setting in ("table", "one-rate")]
        for total in self.total_decays:
            claims += [self._transfers("table-independent", total), self._transfers("one-rate-decay", total)]
            claims += [self._updates("late", setting, total) for setting in ("table-independent", "one-rate-decay")]
        return tuple(claims)

    def _decades(self, setting: str, total: float) -> Measure:
        def measure(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval, int | None]:
            found = self.drift(trained, setting, total)
            middle, low, high = found.decades
            interval = Interval(low, high, found.drift.fit.interval.level)
            if not (self.along(trained, "outcome", setting, total) == "inside").all():
                return middle, interval.widened(math.inf), None
            return middle, interval, found.drift.replicates_needed

        return measure

    def _transfers(self, setting: str, total: float) -> Claim:
        return Claim(
            f"{_named(setting, total)}: the optimal learning rate changes by at most {ALLOWED_DECADES:g} decades over "
            "a factor of eight in H",
            self._decades(setting, total),
            target=0.0,
            tolerance=ALLOWED_DECADES,
            basis="half way from no drift to the root of the size, 0.45 decades, rounded up",
            expected="refuted" if setting == "one-rate-decay" else "holds",
            quantity="drift of the optimal learning rate (decades)",
        )

    def _drifts(self, setting: str, total: float) -> Claim:
        return Claim(
            f"{_named(setting, total)}: the optimal learning rate falls by at least {DRIFTS:g} decades over a factor "
            "of eight in H",
            self._decades(setting, total),
            target=-DRIFTS,
            tolerance=(math.inf, 0.0),
            basis=f"half way from {ALLOWED_DECADES:g} to a learning rate proportional to 1/H, 0.90 decades",
            quantity="drift of the optimal learning rate (decades)",
        )

    def _updates(self, when: str, setting: str, total: float) -> Claim:
        target = 0.0 if when == "late" else 0.5 if setting == "one-rate" else -0.5
        power = {0.5: "grow as H^1/2", -0.5: "fall as H^-1/2", 0.0: "do not depend on H"}[target]
        where = "at the end" if when == "late" else f"after 1/{EARLY} of the steps"
        return Claim(
            f"{_named(setting, total)}: relative updates of the values' weights {power} {where}",
            lambda predicted, trained: self.exponent(trained, when, setting, total),
            target=target,
            tolerance=HALF_ROOT,
            basis="half of the exponent 1/2 that separates the laws; once the start is forgotten s alone sets the size "
            "of uncorrelated updates, not of correlated ones",
            expected="refuted" if when == "late" and setting == "one-rate-decay" else "holds",
            quantity="exponent of H in relative updates",
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the optimum over H, relative updates over H, and both as figures."""
        sizes, settings = self.heads_counts, self.settings()

        def curves(name: str) -> tuple[Curve, ...]:
            return tuple(
                geometric_curve(sizes, self.along(trained, name, *setting), _named(*setting), place)
                for place, setting in enumerate(settings)
            )

        spread = "Geometric means over replicates; bands range over all."
        x = np.log10(self.learning_rates())
        largest = []
        for place, setting in enumerate(settings):
            losses = self.along(trained, "loss", *setting)[:, -1]  # (replicates, rates)
            seen = np.isfinite(losses).all(0)
            largest.append(spread_curve(x[seen], losses[:, seen], _named(*setting), group=place))
        rows = []
        for setting in settings:
            middle, low, high = self.drift(trained, *setting).decades
            fits = [self.exponent(trained, when, *setting) for when in ("early", "late")]
            shown = (f"{fit.exponent:+.2f} ± {fit.interval.width / 2:.2f}" for fit in fits)
            rows.append((_named(*setting), f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]", *shown))
        return (
            Lines(
                "Optimal learning rate along H",
                "heads H",
                "optimal learning rate of the base shape",
                curves("optimal_learning_rate"),
                log_x=True,
                log_y=True,
                note=f"{spread} A horizontal line is transfer.",
                shows=("the optimal learning rate",),
            ),
            Lines(
                f"Final loss against the learning rate at H = {sizes[-1]}",
                "log10 of the learning rate of the base shape",
                "final training loss [nat]",
                tuple(largest),
                log_y=True,
                note="Means over replicates; bands range over all.",
            ),
            Lines(
                "Relative update of the values' weights at the end",
                "heads H",
                "norm of an update over the norm of the weight",
                curves("late"),
                log_x=True,
                log_y=True,
                note=f"{spread} At the middle of the first grid of learning rates.",
                shows=("at the end",),
            ),
            Listing(
                "Drift of the optimum, and exponents of H in relative updates",
                ("setting", "drift, decades over a factor of eight", "early exponent", "late exponent"),
                tuple(rows),
                note="With 99% intervals.",
            ),
        )


def _named(setting: str, total: float) -> str:
    return f"{LABELS[setting]}, T s = {total:g}" if total else LABELS[setting]
