"""`limits/muon-coordinates`: RMS update of every module under Muon against N, H, L and D, beside common recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.scaling.axes import LETTERS, Axis
from manyheads.scaling.checks.coordinate_check import TOLERANCE, check_growth
from manyheads.scaling.checks.growth_powers import least_growth, required_growth
from manyheads.scaling.trained.transformers import BY_WEIGHTS, Recipe, measure_updates
from manyheads.statistics import Interval, fit_exponent
from manyheads.statistics.exponents import ExponentFit
from manyheads.studies.scaling.shared.parametrizations import (
    MUON_LABELS,
    PLOT_GROUPS,
    RECIPES,
    Plan,
    choose_sizes,
    parametrization_of,
    task_of,
)
from manyheads.study import Cell, Claim, Curve, Listing, Source, Study
from manyheads.study.panels import Multiples, Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.transformer.shape import Shape

EPSILON = 1e-12  # Adam's and Muon's: too small to matter, so that the rates alone are compared
OWN_WEIGHTS = tuple(name for name in BY_WEIGHTS if not name.startswith("output"))
"""Updates by the weights alone whose inputs are normalized; those of W_O shrink where attention flattens."""
FOLLOWED = {"outputs": "outputs", "residual": "stream after the last block", "logits": "attention logits"}
FOLLOWED |= {name: f"{name.split('_by')[0].replace('_', ' ')} by its own weights" for name in BY_WEIGHTS}
FINITE_SIZE = 0.15
"""Allowed deviation of an update by weights: what a correction 1 + n^(-1/2) makes over the default sizes."""


class Break(NamedTuple):
    """A recipe that goes wrong along an axis: what grows, after the first or the last checkpoint, and how fast."""

    quantity: str
    place: int
    predicted: float
    because: str


BREAKS: dict[tuple[str, Axis], Break] = {
    ("moonlight", "key_dim"): Break("query_by_weights", -1, 0.5, "the factor grows as D^(1/2)"),
    ("moonlight", "heads"): Break("query_by_weights", -1, 0.5, "the factor grows as D^(1/2)"),
    ("keller", "depth"): Break("residual", -1, 1.0, "L blocks move the stream, each as much as one"),
    ("none", "stream"): Break("query_by_weights", -1, 0.5, "a matrix of N H rows has singular values one whatever D"),
    ("heads-none", "heads"): Break("query_by_weights", 0, 0.5, "a head's block takes up inputs of RMS one, H^(1/2)"),
    ("heads-keller", "heads"): Break("output_by_weights", 0, 1.0, "a factor (D/N)^(1/2) on blocks that are summed"),
    ("heads-spectral", "heads"): Break("output_by_weights", 0, 1.0, "the sum over heads is forgotten"),
}
AXES_OF: dict[str, tuple[Axis, ...]] = {
    "muon-half-logit": ("key_dim",),
    "muon-half-depth": ("depth",),
    "muon-heads": ("heads",),
    **{name: tuple(axis for other, axis in BREAKS if other == name) for name in RECIPES},
}


@dataclass(frozen=True)
class MuonCoordinates(Study):
    """Updates of every module under Muon against size: the table, and the recipes in use.

    AdamW's part (embeddings, gains, read-out) keeps its consistent rates in all of them, so that the matrices alone
    differ.

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``.
    axes, parametrizations
        Which of key_dim, heads, depth and stream, and which of `MUON_LABELS`.
    base
        N, H, L, and as a fourth number D, if it stays while N or H grow.
    key_dims, heads_counts, depths, streams
        Sizes along each axis.
    checkpoints
        Numbers of updates.
    learning_rate, adam_learning_rate, batch
        Muon's and AdamW's learning rate at the base, and sequences of a step.
    """

    name: ClassVar[str] = "limits/muon-coordinates"
    claim: ClassVar[str] = "Under Muon, updates are independent of N, H, L, D; common recipes break"
    source: ClassVar[Source] = Source(
        "jordan2024muon",
        "Muon: An optimizer for hidden layers in neural networks",
        "Keller Jordan and Yuchen Jin and Vlado Boza and Jiacheng You and Franz Cesista and Laker Newhouse and "
        "Jeremy Bernstein",
        2024,
        "kellerjordan.github.io/posts/muon",
        kind="misc",
        locus="the optimizer; the exponents in N, H, L and D are derived here",
    )
    unread_prediction: ClassVar[str] = (
        "targets follow from the parametrization and the axis of each claim; the prediction tabulates them"
    )

    task: str = "digits"
    axes: tuple[str, ...] = ("key_dim", "heads", "depth", "stream")
    parametrizations: tuple[str, ...] = tuple(MUON_LABELS)
    base: tuple[int, ...] = (8, 4, 2)
    key_dims: tuple[int, ...] = (4, 8, 32)
    heads_counts: tuple[int, ...] = (2, 4, 16)
    depths: tuple[int, ...] = (2, 8, 16)
    streams: tuple[int, ...] = (16, 32, 128)
    checkpoints: tuple[int, ...] = (1, 25)
    learning_rate: float = 0.01
    adam_learning_rate: float = 3e-3
    batch: int = 16

    def __post_init__(self) -> None:
        check_rising("checkpoints", self.checkpoints, count=1)
        Recipe(adam_learning_rate=self.adam_learning_rate)
        task_of(self.task, self.batch)
        if unknown := set(self.parametrizations) - set(MUON_LABELS):
            raise UsageError(f"parametrization {unknown.pop()!r} of Muon: choose from {', '.join(MUON_LABELS)}")
        self.plan()

    @classmethod
    def full(cls) -> MuonCoordinates:
        """Return the study with four sizes an axis."""
        return cls(
            key_dims=(4, 8, 32, 64), heads_counts=(2, 4, 16, 32), depths=(2, 8, 16, 32), streams=(16, 32, 128, 256)
        )

    @classmethod
    def small(cls) -> MuonCoordinates:
        """Return the smallest configuration in which every claim can change."""
        return cls(
            axes=("heads",),
            parametrizations=("muon", "moonlight"),
            base=(4, 2, 2),
            heads_counts=(2, 4),
            checkpoints=(1, 2),
        )

    def plan(self) -> Plan:
        """Return the networks."""
        sizes = choose_sizes(self.axes, self.key_dims, self.heads_counts, self.depths, self.streams)
        base = Shape.of(self.base, "base")
        return Plan(base, sizes, self.parametrizations, "muon", epsilon=False, axes_of=AXES_OF)

    def cells(self) -> tuple[Cell, ...]:
        """Return every network once."""
        return self.plan().cells()

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the exponents that a consistent scaling prescribes for updates by weights."""
        exponents = [
            [[_prescribed(name, a)[q] for q in BY_WEIGHTS] for a in self.axes] for name in self.parametrizations
        ]
        dims = ("parametrization", "axis", "quantity")
        names = dict(zip(dims, map(list, (self.parametrizations, self.axes, BY_WEIGHTS)), strict=True))
        return dataset({"required": (dims, exponents, "prescribed exponent")}, names)

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one network and measure the updates of all modules at the checkpoints."""
        parametrization, shape = self.plan().train_with(cell)
        recipe = Recipe(epsilon=EPSILON, adam_learning_rate=self.adam_learning_rate)
        task = task_of(self.task, self.batch)
        fields = (*FOLLOWED, "loss")
        found = measure_updates(
            task, parametrization, shape, recipe, self.learning_rate, self.checkpoints, key, fields=fields
        )
        texts = {name: f"update of {text}" for name, text in FOLLOWED.items()} | {"loss": "loss on the probe batch"}
        return xr.Dataset(
            {
                name: ("step", getattr(found, name), {"long_name": text, "units": "nat" if name == "loss" else "1"})
                for name, text in texts.items()
            },
            coords={"step": ("step", np.asarray(self.checkpoints), {"long_name": "updates", "units": "1"})},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test the table along every axis for constant updates, and every recipe where it goes wrong."""
        claims = []
        for name, axis in self.plan().pairs():
            if (name, axis) in BREAKS:
                claims.append(self._breaks(name, axis))
            elif name not in RECIPES:
                claims += [self._by_weights(name, axis), self._modules(name, axis)]
        return tuple(claims)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show all updates against size, and the fitted exponents."""
        return _curves(self, trained), _exponents(self, trained)

    def exponent(self, trained: xr.Dataset, name: str, axis: Axis, quantity: str, place: int = -1) -> ExponentFit:
        """Return the fitted exponent of an update along an axis at a checkpoint."""
        plan = self.plan()
        return fit_exponent(dict(plan.sizes)[axis], plan.along(trained, quantity, name, axis)[..., place])

    def _by_weights(self, name: str, axis: Axis) -> Claim:
        """Claim that what the weights of a block move follows the table; per head its power of H is bounded only."""
        prescribed = _prescribed(name, axis)
        below = 0.5 if name == "muon-heads" and axis == "heads" else 0.0

        def worst(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval]:
            fits = [(self.exponent(trained, name, axis, q), prescribed[q]) for q in OWN_WEIGHTS]
            fit, wanted = max(fits, key=lambda pair: abs(pair[0].exponent - pair[1] + below / 2))
            interval = fit.interval
            return fit.exponent - wanted, Interval(interval.low - wanted, interval.high - wanted, interval.level)

        text = "scale" if not below else "scale by H^-1/2 to one times"
        return Claim(
            f"{MUON_LABELS[name]}: updates by the matrices of the blocks {text} with {LETTERS[axis]} as prescribed "
            "(worst deviation of an exponent)",
            worst,
            quantity="deviation of an exponent",
            target=0.0,
            tolerance=(below + FINITE_SIZE, FINITE_SIZE),
            basis="a correction 1 + n^(-1/2) over these sizes"
            + ("; a head's block takes up the share N/n of inputs in n directions" if below else ""),
        )

    def _modules(self, name: str, axis: Axis) -> Claim:
        """Claim that stream and outputs are constant, as far as random parts at finite size let them be."""
        parametrization = parametrization_of(name, Shape.of(self.base), "muon")

        def worst(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval]:
            plan, found = self.plan(), []
            required, least = required_growth(parametrization), least_growth(parametrization)
            for quantity in ("outputs", "residual"):
                values = plan.along(trained, quantity, name, axis)[..., -1]
                wanted, low = (getattr(powers[quantity], axis) for powers in (required, least))
                fit = check_growth(
                    quantity, axis, dict(plan.sizes)[axis], values, wanted, TOLERANCE[axis], least=low
                ).fit
                if fit is None:  # diverged
                    return 99.0, Interval(99.0, 99.0)
                ends = [max(x - wanted, 0.0) + min(x - low, 0.0) for x in (fit.interval.low, fit.interval.high)]
                found.append((max(fit.exponent - wanted, 0.0) + min(fit.exponent - low, 0.0), Interval(*ends)))
            return max(found, key=lambda pair: max(abs(pair[1].low), abs(pair[1].high)))

        return Claim(
            f"{MUON_LABELS[name]}: the updates of outputs and stream do not depend on {LETTERS[axis]} "
            "(worst deviation of an exponent)",
            worst,
            quantity="deviation of an exponent",
            target=0.0,
            tolerance=TOLERANCE[axis],
            basis="half of the distance between two exponents of the theory; a deviation is counted from where finite "
            "size lets a consistent exponent lie",
        )

    def _breaks(self, name: str, axis: Axis) -> Claim:
        quantity, place, predicted, because = BREAKS[name, axis]
        step = self.checkpoints[place]
        return Claim(
            f"{MUON_LABELS[name]}: the update of {FOLLOWED[quantity]} after {step} steps grows at least as "
            f"{LETTERS[axis]}^{predicted / 2:g}",
            lambda predicted_, trained: self.exponent(trained, name, axis, quantity, place),
            quantity="exponent of the size",
            target=predicted / 2,
            tolerance=(0.0, np.inf),
            basis=f"half of the power that is derived, {predicted:g}: {because}",
        )


def _prescribed(name: str, axis: str) -> dict[str, float]:
    """Return the exponents of updates by weights in a consistent scaling of this logit and depth exponent."""
    required = required_growth(parametrization_of(name, Shape(1, 1, 1), "muon"))
    query, value = (getattr(required[f"{role}_by_weights"], axis) for role in ("query", "value"))
    return dict.fromkeys(BY_WEIGHTS, value) | dict.fromkeys(("query_by_weights", "key_by_weights"), query)


def _curves(study: MuonCoordinates, trained: xr.Dataset) -> Panel:
    """Draw every quantity at the last checkpoint, relative to the smallest size, against the size."""
    plan = study.plan()
    sizes, pairs = dict(plan.sizes), list(plan.pairs())

    def curve(quantity: str, name: str, axis: Axis) -> Curve:
        values = plan.along(trained, quantity, name, axis)[..., -1]  # (replicates, sizes)
        x = np.log2(np.asarray(sizes[axis]) / sizes[axis][0])
        return spread_curve(x, np.log2(values / values[:, :1]), MUON_LABELS[name], group=PLOT_GROUPS[name])

    return Multiples(
        f"Updates after {study.checkpoints[-1]} steps, relative to the smallest size",
        "doublings of the size",
        "doublings of the update",
        tuple(
            tuple(tuple(curve(q, s, axis) for s in study.parametrizations if (s, axis) in pairs) for axis in sizes)
            for q in FOLLOWED
        ),
        row_labels=tuple(name.replace("_by_weights", ", own weights").replace("_", " ") for name in FOLLOWED),
        column_labels=tuple(f"along {LETTERS[axis]}" for axis in sizes),
        note="In brackets the exponents of logits and of depth. Means over replicates; bands range over all. A recipe "
        "is shown only along axes where its networks differ from those of others.",
        shows=("updates by the matrices", "updates of outputs"),
    )


def _exponents(study: MuonCoordinates, trained: xr.Dataset) -> Panel:
    rows = []
    for name, axis in study.plan().pairs():
        for place, step in enumerate(study.checkpoints):
            fits = [study.exponent(trained, name, axis, quantity, place) for quantity in FOLLOWED]
            shown = (f"{fit.exponent:+.2f} ± {fit.interval.width / 2:.2f}" for fit in fits)
            rows.append((MUON_LABELS[name], LETTERS[axis], str(step), *shown))
    return Listing(
        "Exponents, with the half-width of their 99% intervals",
        ("scaling", "axis", "steps", *(name.replace("_by_weights", " by W").replace("_", " ") for name in FOLLOWED)),
        tuple(rows),
        note="In brackets the exponents of logits and of depth.",
    )
