"""`limits/coordinate-check`: RMS update of every module against N, H and L, under six parametrizations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.scaling.axes import LETTERS, Axis
from manyheads.scaling.checks.coordinate_check import TOLERANCE, Growth, decide_growths, finite_size_bias
from manyheads.scaling.checks.growth_powers import QUANTITIES, least_growth, required_growth
from manyheads.scaling.parametrization.scaling_exponents import Optimizer
from manyheads.scaling.trained.transformers import USUAL, Recipe, measure_updates
from manyheads.statistics import Interval, fit_exponent
from manyheads.studies.scaling.shared.parametrizations import (
    CONSISTENT,
    LABELS,
    Plan,
    bordelon,
    choose_sizes,
    parametrization_of,
    task_of,
)
from manyheads.study import Cell, Claim, Curve, Listing, Source, Study
from manyheads.study.panels import Multiples, Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.transformer.shape import Shape

DIVERGED = 99.0  # the exponent that stands for a training that diverged
STARTS = {
    "head_variance_start": "variance of the attention logits over heads, before training",
    "kernel_std": "std of the residual kernel between networks, before training",
}
SERIES = {"head_variance": "variance of the attention logits over heads", "loss": "loss on the probe batch"}


@dataclass(frozen=True)
class CoordinateCheckStudy(Study):
    """Updates of outputs, stream, logits, queries and values against size, for every parametrization and axis.

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``.
    optimizer
        ``"adam"`` or ``"sgd"``.
    axes, parametrizations
        Which axes, and which of the parametrizations: limits, half-logit, half-depth, mup, mup-half-logit, standard.
    base
        N, H, L at which all parametrizations are one.
    key_dims, heads_counts, depths
        Sizes along each axis.
    checkpoints
        Numbers of updates; none takes the optimizer's own.
    learning_rate, batch
        Learning rate at the base and sequences of a step; 0 takes the optimizer's own.
    networks
        Networks of a replicate, whose geometric mean is taken.

    Notes
    -----
    Random parts make the square of an update 1 + n0/n of what it is at infinite size. For what Adam's weights move n is
    the width N H and n0 is pi/2 times the number of directions in which the tokens of a batch lie, 11 for the digits
    and about 50 for the text: at the default sizes the update of queries by a right parametrization scales on text as
    N^-0.2
    where N^0 is prescribed, and larger sizes have to decide (NOTEBOOK, 2026-11-22; derived here).
    """

    name: ClassVar[str] = "limits/coordinate-check"
    revision: ClassVar[int] = 3
    claim: ClassVar[str] = "Coordinate check: the RMS update of every module is independent of N, H and L"
    source: ClassVar[Source] = bordelon("table 1 and figure 5; the exponents of single modules are derived here")
    unread_prediction: ClassVar[str] = (
        "targets follow from the parametrization and the axis of each claim; the prediction tabulates them"
    )

    task: str = "digits"
    optimizer: Optimizer = "adam"
    axes: tuple[str, ...] = ("key_dim", "heads", "depth")
    parametrizations: tuple[str, ...] = tuple(LABELS)
    base: tuple[int, int, int] = (8, 4, 2)
    key_dims: tuple[int, ...] = (4, 8, 32)
    heads_counts: tuple[int, ...] = (2, 4, 16)
    depths: tuple[int, ...] = (2, 8, 16)
    checkpoints: tuple[int, ...] = ()
    learning_rate: float = 0.0
    batch: int = 0
    networks: int = 2

    def __post_init__(self) -> None:
        if self.optimizer not in OWN:
            raise UsageError(f"optimizer={self.optimizer!r}: choose one of {', '.join(OWN)}")
        if self.learning_rate < 0 or self.batch < 0:
            raise UsageError(
                f"learning_rate={self.learning_rate}, batch={self.batch}: expected positive numbers, or 0 for the "
                "optimizer's own"
            )
        check_rising("checkpoints", self.checkpoints, count=0)
        if self.networks < 1:
            raise UsageError(f"networks={self.networks}: a replicate trains at least one")
        task_of(self.task, 1)
        self.plan()

    @classmethod
    def full(cls) -> CoordinateCheckStudy:
        """Return the study with four sizes an axis, up to 32 times the smallest."""
        return cls(key_dims=(4, 8, 32, 128), heads_counts=(2, 4, 16, 64), depths=(2, 8, 16, 64))

    @classmethod
    def small(cls) -> CoordinateCheckStudy:
        """Return the smallest configuration in which every claim can change."""
        # Networks, and compiled programs, of the sweep and of head diversity as well.
        return cls(
            axes=("key_dim",),
            parametrizations=("limits", "half-logit", "standard"),
            base=(4, 2, 2),
            key_dims=(4, 8),
            checkpoints=(1, 2),
            batch=16,
            networks=1,
        )

    def plan(self) -> Plan:
        """Return the networks."""
        sizes = choose_sizes(self.axes, self.key_dims, self.heads_counts, self.depths)
        return Plan(Shape(*self.base), sizes, self.parametrizations, self.optimizer)

    def cells(self) -> tuple[Cell, ...]:
        """Return every network once."""
        return self.plan().cells()

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the exponents that a consistent scaling prescribes, and the lowest that it may show at finite size."""
        found = {
            "required": [required_growth(parametrization_of(name, *self._base)) for name in self.parametrizations],
            "least": [least_growth(parametrization_of(name, *self._base)) for name in self.parametrizations],
        }
        texts = {"required": "prescribed exponent", "least": "lowest exponent of a consistent scaling"}
        table = {
            part: [[[getattr(powers[q], axis) for q in QUANTITIES] for axis in self.axes] for powers in rows]
            for part, rows in found.items()
        }
        dims = ("parametrization", "axis", "quantity")
        return dataset(
            {part: (dims, table[part], texts[part]) for part in found},
            dict(zip(dims, map(list, (self.parametrizations, self.axes, QUANTITIES)), strict=True)),
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train some networks and measure the updates of all modules at the checkpoints."""
        parametrization, shape = self.plan().train_with(cell)
        learning_rate, batch, steps = self._training
        task = task_of(self.task, batch)
        runs = [
            measure_updates(
                task, parametrization, shape, Recipe(), learning_rate, steps, jax.random.fold_in(key, number)
            )
            for number in range(self.networks)
        ]
        with np.errstate(invalid="ignore", divide="ignore"):  # a diverged run is data
            found = {name: np.exp(np.mean([np.log(getattr(run, name)) for run in runs], 0)) for name in USUAL}
        moved = {name: f"update of {text}" for name, text in QUANTITIES.items()}
        series = {
            name: ("step", found[name], {"long_name": text, "units": "nat" if name == "loss" else "1"})
            for name, text in (moved | SERIES).items()
        }
        starts = {name: ((), found[name], {"long_name": text, "units": "1"}) for name, text in STARTS.items()}
        return xr.Dataset(
            series | starts, coords={"step": ("step", np.asarray(steps), {"long_name": "updates", "units": "1"})}
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test every parametrization along every axis: updates of all modules, those of queries, statistics at init."""
        claims: list[Claim] = []
        for name, axis in self.plan().pairs():
            consistent = name in CONSISTENT or (name == "mup" and axis != "depth")
            claims.append(self._consistent(name, axis) if consistent else self._inconsistent(name, axis))
            claims += self._queries(name, axis)
            claims += self._early(name, axis)
            claims += self._at_init(name, axis)
        return tuple(claims)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show all updates against size, and the fitted exponents."""
        return _curves(self, trained), _exponents(self, trained)

    def growths(self, trained: xr.Dataset, name: str, axis: Axis) -> tuple[Growth, ...]:
        """Return the judged growths of one parametrization along one axis."""
        plan = self.plan()
        updates = {quantity: plan.along(trained, quantity, name, axis) for quantity in QUANTITIES}
        parametrization = parametrization_of(name, *self._base)
        sizes = dict(plan.sizes)[axis]
        return decide_growths(parametrization, axis, sizes, updates, self._training[2], TOLERANCE[axis])

    def _consistent(self, name: str, axis: Axis) -> Claim:
        def worst(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval, int | None]:
            growths = self.growths(trained, name, axis)
            found = max(growths, key=lambda g: max(abs(_beyond(g)[1].low), abs(_beyond(g)[1].high)))
            return *_beyond(found), found.seeds_needed

        return Claim(
            f"{_who(name)}: the updates of all modules scale with {LETTERS[axis]} as prescribed",
            worst,
            quantity="deviation of an exponent, worst module",
            target=0.0,
            tolerance=TOLERANCE[axis],
            basis="half of the distance between two exponents of the theory, beyond where finite size lets one lie",
        )

    def _inconsistent(self, name: str, axis: Axis) -> Claim:
        def clearest(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval]:
            return _beyond(max(self.growths(trained, name, axis), key=lambda g: _beyond(g)[1].low))

        return Claim(
            f"{_who(name)}: the update of a module grows with {LETTERS[axis]} faster than prescribed",
            clearest,
            quantity="excess of an exponent, clearest module",
            target=TOLERANCE[axis],
            tolerance=(0.0, np.inf),
            basis="half of the distance between two exponents of the theory; the clearest growth of all modules counts",
        )

    def _queries(self, name: str, axis: Axis) -> list[Claim]:
        required = getattr(required_growth(parametrization_of(name, *self._base))["query_by_weights"], axis)
        unscaled = name == "mup-half-logit" and axis == "key_dim"
        if not (name == "limits" or (name in CONSISTENT and required) or unscaled):
            return []
        exponent = 0.0 if unscaled else required

        def last(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval]:
            growths = self.growths(trained, name, axis)
            return _fitted(next(g for g in reversed(growths) if g.quantity == "query_by_weights"))

        bias = -finite_size_bias(dict(self.plan().sizes)[axis])
        return [
            Claim(
                f"{_who(name)}: the update of queries by their own weights scales as "
                f"{LETTERS[axis]}^{exponent:g}"
                + (", which a consistent scaling does not prescribe" if unscaled else ""),
                last,
                quantity="exponent of the size",
                target=exponent,
                tolerance=0.15,
                basis="a correction 1 + n^(-1/2), random parts being one at n = 1, moves the exponent by "
                f"{bias:.2f} over these sizes",
            )
        ]

    def _early(self, name: str, axis: Axis) -> list[Claim]:
        """Claim how fast updates grow after few steps of Adam on the digits, where that is known."""
        if self.task != "digits" or self.optimizer != "adam":
            return []
        step = self._training[2][0]
        if name == "standard" and axis != "depth":
            # Not the outputs: after few steps they differ most between seeds.
            chosen: tuple[str, ...] = ("residual", "logits")
            text, least = f"the updates of stream and attention logits grow at least as {LETTERS[axis]}^0.5", 0.5
            basis = "an update of d^(1/2) or more: each of d entries moves by one step of Adam, whatever d"
        elif name == "mup" and axis == "depth":
            chosen, text, least = ("residual",), "the update of the stream grows at least as L^0.8", 0.8
            basis = "each block adds as much whatever L: L^1, less what blocks that disagree take away"
        else:
            return []

        def slowest(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval]:
            growths = self.growths(trained, name, axis)
            found = [_fitted(g) for g in growths if g.step == step and g.quantity in chosen]
            return min(found, key=lambda fitted: fitted[1].low)

        return [
            Claim(
                f"{_who(name)}: after {step} steps {text}",
                slowest,
                quantity="exponent of the size",
                target=least,
                tolerance=(0.0, np.inf),
                basis=basis,
            )
        ]

    def _at_init(self, name: str, axis: Axis) -> list[Claim]:
        if axis == "key_dim" and name in ("limits", "half-logit"):
            power = -1.0 if name == "limits" else 0.0
            variable, text = "head_variance_start", f"the variance of attention logits over heads scales as N^{power:g}"
            basis = "exact in the first layer, N^(1 - 2 alpha_A); deeper ones feel 1/(N H) through their kernels"
        elif axis == "heads" and name == "limits":
            variable, power = "kernel_std", -0.5
            text = "the residual kernel fluctuates between networks as H^-0.5"
            basis = "root mean squares of sums over N H entries: corrections of relative size 1/H"
        else:
            return []
        plan = self.plan()
        return [
            Claim(
                f"{_who(name)}: before training {text}",
                lambda predicted, trained: fit_exponent(
                    dict(plan.sizes)[axis], plan.along(trained, variable, name, axis)
                ),
                quantity="exponent of the size",
                target=power,
                tolerance=0.1,
                basis=basis,
            )
        ]

    @property
    def _base(self) -> tuple[Shape, Optimizer]:
        return Shape(*self.base), self.optimizer

    @property
    def _training(self) -> tuple[float, int, tuple[int, ...]]:
        learning_rate, batch, steps = OWN[self.optimizer]
        return self.learning_rate or learning_rate, self.batch or batch, self.checkpoints or steps


# Learning rate, batch and checkpoints. Gradient descent: after training of order one, and away from the edge of
# stability. After 20 steps the largest N has hardly started: queries seem to move as N^-0.5.
OWN: dict[str, tuple[float, int, tuple[int, ...]]] = {"adam": (0.003, 16, (4, 25)), "sgd": (0.3, 96, (4, 60))}


def _who(name: str) -> str:
    return f"{LABELS[name]} parametrization"


def _fitted(growth: Growth) -> tuple[float, Interval]:
    """Return an exponent and its interval, where training diverged a number beyond all exponents."""
    if growth.fit is None:
        return DIVERGED, Interval(DIVERGED, DIVERGED)
    return growth.fit.exponent, growth.fit.interval


def _beyond(growth: Growth) -> tuple[float, Interval]:
    """Return how far an exponent lies above what is required, or (negative) below the least that is right."""

    def excess(exponent: float) -> float:
        return max(exponent - growth.required, 0.0) + min(exponent - growth.least, 0.0)

    exponent, interval = _fitted(growth)
    return excess(exponent), Interval(excess(interval.low), excess(interval.high), interval.level)


def _curves(study: CoordinateCheckStudy, trained: xr.Dataset) -> Panel:
    """Draw every quantity at the last checkpoint, relative to the base's, against the size."""
    plan = study.plan()
    sizes, pairs = dict(plan.sizes), list(plan.pairs())

    def curve(quantity: str, name: str, axis: Axis) -> Curve:
        values = plan.along(trained, quantity, name, axis)[..., -1]  # (replicates, sizes)
        place = sizes[axis].index(getattr(plan.base, axis)) if getattr(plan.base, axis) in sizes[axis] else 0
        relative = np.log2(values / values[:, place : place + 1])
        x = np.log2(np.asarray(sizes[axis]) / sizes[axis][place])
        return spread_curve(x, relative, LABELS[name], group=list(LABELS).index(name))

    return Multiples(
        f"Updates after {study._training[2][-1]} steps, relative to the base",
        "doublings of the size",
        "doublings of the update",
        tuple(
            tuple(tuple(curve(q, s, axis) for s in study.parametrizations if (s, axis) in pairs) for axis in sizes)
            for q in QUANTITIES
        ),
        row_labels=("outputs", "stream", "logits", "queries, own weights", "values, own weights"),
        column_labels=tuple(f"along {LETTERS[axis]}" for axis in sizes),
        note="In brackets the exponents of logits and of depth. Means over replicates; bands range over all. A "
        "horizontal line is consistent, except that at logit (depth) exponent 1/2 N^-0.5 (L^-0.5) is prescribed for "
        "queries by their own weights. A parametrization is shown where its networks differ from those of others.",
        shows=("updates of all modules", "update of a module"),
    )


def _exponents(study: CoordinateCheckStudy, trained: xr.Dataset) -> Panel:
    rows = []
    for name, axis in study.plan().pairs():
        last = {g.quantity: g for g in study.growths(trained, name, axis) if g.step == study._training[2][-1]}
        rows.append((LABELS[name], LETTERS[axis], *(_shown(last[quantity]) for quantity in QUANTITIES)))
    return Listing(
        f"Exponents after {study._training[2][-1]} steps, with the half-width of their 99% intervals",
        ("scaling", "axis", "outputs", "stream", "logits", "queries", "values"),
        tuple(rows),
        note="In brackets the exponents of logits and of depth. * refuted: outside what is prescribed by more than "
        f"{TOLERANCE['key_dim']:g}; ? inconclusive.",
    )


def _shown(growth: Growth) -> str:
    if growth.fit is None:
        return "diverged*"
    mark = {"refuted": "*", "inconclusive": "?", "holds": ""}[growth.outcome]
    return f"{growth.fit.exponent:+.2f} ± {growth.fit.interval.width / 2:.2f}{mark}"
