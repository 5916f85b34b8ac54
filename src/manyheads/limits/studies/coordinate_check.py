"""`limits/coordinate-check`: how far everything in a network moves, along N, H and L, for six ways of scaling it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.limits.checks.axes import LETTERS, Axis
from manyheads.limits.checks.coordinate_check import (
    TOLERANCE,
    Growth,
    finite_size_bias,
    judge_growths,
    least_growth,
    required_growth,
)
from manyheads.limits.comparisons.schemes import CONSISTENT, SCHEMES, Plan, bordelon, choose_sizes, lesson_of, scheme_of
from manyheads.limits.parametrization.scaling_exponents import Optimizer
from manyheads.limits.systems.transformers import QUANTITIES, Recipe, measure_updates
from manyheads.statistics import Interval, fit_exponent
from manyheads.statistics.exponents import ExponentFit
from manyheads.study import Cell, Curve, Listing, Source, Study, Verdict
from manyheads.study.reporting.panels import Multiples, Panel
from manyheads.transformer.shape import Shape

DIVERGED = 99.0  # the exponent that stands for a training that diverged
STARTS = {
    "head_variance_start": "variance of the attention logits over heads, before training",
    "kernel_spread": "spread of the residual kernel between networks, before training",
}
SERIES = {"head_variance": "variance of the attention logits over heads", "loss": "loss on the probe batch"}


@dataclass(frozen=True)
class CoordinateCheckStudy(Study):
    """Motion of outputs, stream, logits, queries and values against size, for every scheme and axis.

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``.
    optimizer
        ``"adam"`` or ``"sgd"``.
    axes, schemes
        Which axes, and which of the schemes: limits, half-logit, half-depth, mup, mup-half-logit, standard.
    base
        N, H, L at which all schemes are one.
    key_dims, heads_counts, depths
        Sizes along each axis.
    checkpoints
        Numbers of updates; none takes the optimizer's own.
    rate, batch
        Learning rate at the base and sequences of a step; 0 takes the optimizer's own.
    networks
        Networks of a replicate, whose geometric mean it is: they cost less than the programs that train them.

    Notes
    -----
    Random parts make the square of a motion 1 + n0/n of what it is at infinite size. For what Adam's weights move n is
    the width N H and n0 is pi/2 times the number of directions in which the tokens of a batch lie, 11 for the digits
    and about 50 for the text: at the default sizes the queries of a right scheme move on text like N^-0.2 where N^0 is
    prescribed, and larger sizes have to decide (NOTEBOOK, 2026-11-22; derived here).
    """

    name: ClassVar[str] = "limits/coordinate-check"
    revision: ClassVar[int] = 2
    claim: ClassVar[str] = "Coordinate check: the RMS update of every module is independent of N, H and L"
    source: ClassVar[Source] = bordelon("table 1 and figure 5; the exponents of single modules are derived here")
    unread_prediction: ClassVar[str] = (
        "targets follow from the scheme and the axis of each claim; the prediction tabulates them"
    )

    task: str = "digits"
    optimizer: str = "adam"
    axes: tuple[str, ...] = ("key_dim", "heads", "depth")
    schemes: tuple[str, ...] = tuple(SCHEMES)
    base: tuple[int, int, int] = (8, 4, 2)
    key_dims: tuple[int, ...] = (4, 8, 32)
    heads_counts: tuple[int, ...] = (2, 4, 16)
    depths: tuple[int, ...] = (2, 8, 16)
    checkpoints: tuple[int, ...] = ()
    rate: float = 0.0
    batch: int = 0
    networks: int = 2

    def __post_init__(self) -> None:
        if self.optimizer not in OWN:
            raise UsageError(f"optimizer={self.optimizer!r}: choose one of {', '.join(OWN)}")
        if self.rate < 0 or self.batch < 0:
            raise UsageError(f"rate={self.rate}, batch={self.batch}: give positive numbers, or 0 for the optimizer's")
        steps = self.checkpoints
        if list(steps) != sorted(set(steps)) or (steps and steps[0] < 1):
            raise UsageError(f"checkpoints={steps}: give numbers of updates, from 1, in rising order")
        if self.networks < 1:
            raise UsageError(f"networks={self.networks}: a replicate trains at least one")
        lesson_of(self.task, 1)
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
            schemes=("limits", "half-logit", "standard"),
            base=(4, 2, 2),
            key_dims=(4, 8),
            checkpoints=(1, 2),
            batch=16,
            networks=1,
        )

    def plan(self) -> Plan:
        """Return the networks."""
        sizes = choose_sizes(self.axes, self.key_dims, self.heads_counts, self.depths)
        return Plan(Shape(*self.base), sizes, self.schemes, self._optimizer)

    def cells(self) -> tuple[Cell, ...]:
        """Return every network once."""
        return self.plan().cells()

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the exponents that a consistent scaling prescribes, and the lowest that it may show."""
        found = {
            "required": [required_growth(scheme_of(name, *self._start)) for name in self.schemes],
            "least": [least_growth(scheme_of(name, *self._start)) for name in self.schemes],
        }
        texts = {"required": "prescribed exponent", "least": "lowest exponent of a consistent scaling"}
        table = {
            part: [[[getattr(powers[q], axis) for q in QUANTITIES] for axis in self.axes] for powers in rows]
            for part, rows in found.items()
        }
        dims = ("scheme", "axis", "quantity")
        return xr.Dataset(
            {part: (dims, np.array(table[part]), {"long_name": texts[part], "units": "1"}) for part in found},
            coords={"scheme": list(self.schemes), "axis": list(self.axes), "quantity": list(QUANTITIES)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train some networks and measure at the checkpoints how far everything has moved."""
        parametrization, shape = self.plan().train_with(cell)
        rate, batch, steps = self._setting
        lesson = lesson_of(self.task, batch)
        runs = [
            measure_updates(lesson, parametrization, shape, Recipe(), rate, steps, jax.random.fold_in(key, number))
            for number in range(self.networks)
        ]
        with np.errstate(invalid="ignore", divide="ignore"):  # a diverged run is data
            found = {name: np.exp(np.mean([np.log(getattr(run, name)) for run in runs], 0)) for name in runs[0]._fields}
        moved = {name: f"motion of {text}" for name, text in QUANTITIES.items()}
        series = {
            name: ("step", found[name], {"long_name": text, "units": "nat" if name == "loss" else "1"})
            for name, text in (moved | SERIES).items()
        }
        starts = {name: ((), found[name], {"long_name": text, "units": "1"}) for name, text in STARTS.items()}
        return xr.Dataset(
            series | starts, coords={"step": ("step", np.asarray(steps), {"long_name": "updates", "units": "1"})}
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Say what is flat and what breaks, axis by axis; how queries move; and what holds before training."""
        verdicts = []
        for scheme, axis in self.plan().pairs():
            growths = self.growths(trained, scheme, axis)
            width_only = scheme == "mup" and axis != "depth"
            verdicts.append(
                _flat(scheme, axis, growths) if scheme in CONSISTENT or width_only else _broken(scheme, axis, growths)
            )
            verdicts += self._queries(scheme, axis, growths)
            verdicts += self._sharp(scheme, axis, growths) if self.task == "digits" else []
            verdicts += self._starts(trained, scheme, axis)
        return tuple(verdicts)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show all motions against size, and the fitted exponents."""
        return _curves(self, trained), _exponents(self, trained)

    def growths(self, trained: xr.Dataset, scheme: str, axis: Axis) -> tuple[Growth, ...]:
        """Return the judged growths of one scheme along one axis."""
        plan = self.plan()
        motions = {name: plan.along(trained, name, scheme, axis) for name in QUANTITIES}
        parametrization = scheme_of(scheme, *self._start)
        sizes = dict(plan.sizes)[axis]
        return judge_growths(parametrization, axis, sizes, motions, self._setting[2], TOLERANCE[axis])

    def _queries(self, scheme: str, axis: Axis, growths: tuple[Growth, ...]) -> list[Verdict]:
        growth = next(g for g in reversed(growths) if g.quantity == "query_by_weights")
        plain = scheme == "mup-half-logit" and axis == "key_dim"
        if not (scheme == "limits" or (scheme in CONSISTENT and growth.required) or plain):
            return []
        power = 0.0 if plain else growth.required
        what = "wrongly moves queries" if plain else "moves queries"
        basis = "a correction 1 + n^(-1/2), random parts being one at n = 1, moves the slope by "
        return [
            _about(
                f"{_who(scheme)}: the query weights' own motion {what} like {LETTERS[axis]}^{power:g}",
                growth,
                power,
                0.15,
                f"{basis}{-finite_size_bias(dict(self.plan().sizes)[axis]):.2f} over these sizes",
            )
        ]

    def _sharp(self, scheme: str, axis: Axis, growths: tuple[Growth, ...]) -> list[Verdict]:
        first = [g for g in growths if g.step == self._setting[2][0]]
        if self.optimizer != "adam":
            return []
        if scheme == "standard" and axis != "depth":
            # Not the outputs: after few steps they differ most between seeds.
            chosen = [g for g in first if g.quantity in ("residual", "logits")]
            words, least = "stream and attention logits move at least like the root of", 0.5
            basis = "a motion of d^(1/2) or more: each of d entries moves by one step of Adam, whatever d"
        elif scheme == "mup" and axis == "depth":
            chosen = [g for g in first if g.quantity == "residual"]
            words, least = "the stream moves nearly in proportion to", 0.8
            basis = "each block adds as much whatever L: L^1, less what blocks that disagree take away"
        else:
            return []
        growth = min(chosen, key=lambda g: _fit(g).low)
        letter, step = LETTERS[axis], growth.step
        return [_about(f"{_who(scheme)}: after {step} steps {words} {letter}", growth, least, (0.0, np.inf), basis)]

    def _starts(self, trained: xr.Dataset, scheme: str, axis: Axis) -> list[Verdict]:
        plan = self.plan()
        sizes = dict(plan.sizes)[axis]
        if axis == "key_dim" and scheme in ("limits", "half-logit"):
            power = -1.0 if scheme == "limits" else 0.0
            variable, words = "head_variance_start", f"logits vary over heads like N^{power:g}"
            basis = "exact in the first layer, N^(1 - 2 alpha_A); deeper ones feel 1/(N H) through their kernels"
        elif axis == "heads" and scheme == "limits":
            variable, words, power = "kernel_spread", "the residual kernel is H^-0.5 from its limit", -0.5
            basis = "root mean squares of sums over N H entries: corrections of relative size 1/H"
        else:
            return []
        fit = fit_exponent(sizes, plan.along(trained, variable, scheme, axis))
        claim = f"{_who(scheme)}: before training {words}"
        return [
            Verdict.from_interval(claim, fit.interval, figure=fit.exponent, target=power, tolerance=0.1, basis=basis)
        ]

    @property
    def _optimizer(self) -> Optimizer:
        return self.optimizer  # type: ignore[return-value]

    @property
    def _start(self) -> tuple[Shape, Optimizer]:
        return Shape(*self.base), self._optimizer

    @property
    def _setting(self) -> tuple[float, int, tuple[int, ...]]:
        rate, batch, steps = OWN[self.optimizer]
        return self.rate or rate, self.batch or batch, self.checkpoints or steps


# Rate, batch and checkpoints. Gradient descent: after training of order one, and away from the edge of stability. After
# 20 steps the largest N has hardly started (loss 2.05 of 2.30 at N=32), and what queries learn looks like N^-0.5.
OWN: dict[str, tuple[float, int, tuple[int, ...]]] = {"adam": (0.003, 16, (4, 25)), "sgd": (0.3, 96, (4, 60))}


def _who(scheme: str) -> str:
    return f"{SCHEMES[scheme]} scaling"


def _fit(growth: Growth) -> Interval:
    return Interval(DIVERGED, DIVERGED) if growth.fit is None else growth.fit.interval


def _excess(growth: Growth, exponent: float) -> float:
    """Return how far an exponent lies above what is required, or (negative) below the least that is right."""
    return max(exponent - growth.required, 0.0) + min(exponent - growth.least, 0.0)


def _beyond(growth: Growth) -> tuple[float, Interval]:
    interval = _fit(growth)
    middle = DIVERGED if growth.fit is None else growth.fit.exponent
    ends = Interval(_excess(growth, interval.low), _excess(growth, interval.high), interval.level)
    return _excess(growth, middle), ends


def _flat(scheme: str, axis: Axis, growths: tuple[Growth, ...]) -> Verdict:
    worst = max(growths, key=lambda g: max(abs(_beyond(g)[1].low), abs(_beyond(g)[1].high)))
    figure, interval = _beyond(worst)
    return Verdict.from_interval(
        f"{_who(scheme)}: every module moves along {LETTERS[axis]} as prescribed",
        interval,
        figure=figure,
        target=0.0,
        tolerance=TOLERANCE[axis],
        basis="half of the distance between two powers of the theory; the figure is the worst deviation of all modules "
        "from where finite size lets a consistent one lie",
        replicates_needed=worst.seeds_needed,
    )


def _broken(scheme: str, axis: Axis, growths: tuple[Growth, ...]) -> Verdict:
    clearest = max(growths, key=lambda g: _beyond(g)[1].low)
    figure, interval = _beyond(clearest)
    return Verdict.from_interval(
        f"{_who(scheme)}: a module grows with {LETTERS[axis]} faster than prescribed",
        interval,
        figure=figure,
        target=TOLERANCE[axis],
        tolerance=(0.0, np.inf),
        basis="half of the distance between two powers of the theory; the figure is the clearest growth of all modules",
    )


def _about(claim: str, growth: Growth, target: float, tolerance: float | tuple[float, float], basis: str) -> Verdict:
    figure = DIVERGED if growth.fit is None else growth.fit.exponent
    return Verdict.from_interval(claim, _fit(growth), figure=figure, target=target, tolerance=tolerance, basis=basis)


def _curves(study: CoordinateCheckStudy, trained: xr.Dataset) -> Panel:
    """Draw every quantity at the last checkpoint, relative to the base's, against the size."""
    plan = study.plan()
    sizes, pairs = dict(plan.sizes), list(plan.pairs())

    def curve(quantity: str, scheme: str, axis: Axis) -> Curve:
        values = plan.along(trained, quantity, scheme, axis)[..., -1]  # (replicates, sizes)
        place = sizes[axis].index(getattr(plan.base, axis)) if getattr(plan.base, axis) in sizes[axis] else 0
        relative = np.log2(values / values[:, place : place + 1])
        x = np.log2(np.asarray(sizes[axis]) / sizes[axis][place])
        return Curve(
            tuple(x.tolist()),
            tuple(relative.mean(0).tolist()),
            SCHEMES[scheme],
            group=list(SCHEMES).index(scheme),
            low=tuple(relative.min(0).tolist()),
            high=tuple(relative.max(0).tolist()),
        )

    return Multiples(
        f"Motion after {study._setting[2][-1]} steps, relative to the base",
        "doublings of the size",
        "doublings of the motion",
        tuple(
            tuple(tuple(curve(q, s, axis) for s in study.schemes if (s, axis) in pairs) for axis in sizes)
            for q in QUANTITIES
        ),
        row_labels=("outputs", "stream", "logits", "queries, own weights", "values, own weights"),
        column_labels=tuple(f"along {LETTERS[axis]}" for axis in sizes),
        note="In brackets the exponents of logits and of depth. Lines are means over replicates, bands reach over all. "
        "Flat is consistent; with a logit (depth) exponent 1/2 the query weights' own motion falls by half a doubling "
        "for each doubling of N (L). A scheme stands only along axes where its networks are its own: along L standard "
        "and width only are one network.",
    )


def _exponents(study: CoordinateCheckStudy, trained: xr.Dataset) -> Panel:
    rows = []
    for scheme, axis in study.plan().pairs():
        last = {g.quantity: g for g in study.growths(trained, scheme, axis) if g.step == study._setting[2][-1]}
        rows.append((SCHEMES[scheme], LETTERS[axis], *(_shown(last[name]) for name in QUANTITIES)))
    return Listing(
        f"Exponents after {study._setting[2][-1]} steps, with the half-width of their 99% intervals",
        ("scaling", "axis", "outputs", "stream", "logits", "queries", "values"),
        tuple(rows),
        note="In brackets the exponents of logits and of depth. * refuted: outside what is prescribed by more than a "
        "quarter; ? not decided. With Adam and widths N H below about 50 on the digits and 200 on the text, what "
        "queries move by their own weights comes out more than a tenth too low for a right scheme.",
    )


def _shown(growth: Growth) -> str:
    if growth.fit is None:
        return "diverged*"
    fit: ExponentFit = growth.fit
    mark = {"refuted": "*", "inconclusive": "?", "holds": ""}[growth.outcome]
    return f"{fit.exponent:+.2f} ± {fit.interval.width / 2:.2f}{mark}"
