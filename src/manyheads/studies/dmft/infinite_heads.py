"""`limits/infinite-heads`: convergence of networks to the mean-field limit of infinitely many heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.scaling.checks.coordinate_check import finite_size_bias
from manyheads.statistics import Interval, fit_exponent, replicates_to_decide
from manyheads.statistics.distances import (
    SquaredDistance,
    distance_exponent,
    half_width_of_draws,
    samples_to_decide,
    squared_distance,
)
from manyheads.statistics.intervals import mean_interval
from manyheads.studies.dmft.shared import mean_field
from manyheads.studies.dmft.shared.claims import distance_claim, nearer_claim, single_network_claim
from manyheads.studies.dmft.shared.mean_field import DIMS, QUANTITIES
from manyheads.studies.scaling.shared.curves import power_curve
from manyheads.studies.scaling.shared.parametrizations import bordelon
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, grid
from manyheads.study.claims import SampledFigure
from manyheads.study.panels import Multiples, Panel, spread_curve
from manyheads.study.verdicts import LEVEL
from manyheads.theory.dmft.finite.ensembles import Network
from manyheads.theory.dmft.problem import Problem

LOGITS = {1.0: "logit exponent 1", 0.5: "logit exponent 1/2"}
FASTER = 0.25  # middle between H^(-1/2) and 1/H
ENDS = {"variance_start": "variance of the logits over heads at the start", "variance_end": "the same at the end"}


@dataclass(frozen=True)
class InfiniteHeads(Study):
    """Single networks, their mean and their std over heads against infinitely many heads of one key dimension.

    The limit is sampled: every draw of the prediction has heads of its own, and the intervals include the noise of the
    draws.

    `full()` is the strongly rich regime: four blocks at richness 1.5, whose kernel moves by its own size while
    attention learns. How the mean network nears the limit is not settled there: from H=16 to 64 it does so like
    H^-0.76 (99%: -0.97 to -0.60, 512 networks of each size), faster than single networks, but so near the edge of the
    claim that larger H have to decide and not more seeds. That was `--depth 4 --richness 1.5 --learning-rate 0.15
    --steps 10 --heads-counts 16 32 64 --logit-exponents 1.0 --networks 64`. The learning rate is half the default, at
    which four blocks are at the edge of stability: there the limit's own loss rises between two steps, and H=64 is far
    from it.

    Attributes
    ----------
    task
        ``"digits"`` (pooled, squared loss) or ``"text"`` (causal, every token reads out, cross-entropy).
    heads_counts, key_dim
        Numbers of heads H, and their key dimension N.
    logit_exponents
        1, 1/2 or both.
    depth, depth_exponent
        Blocks, and the exponent of their branch multiplier.
    norm, activation
        Whether streams are normalized, and the activation of an MLP after every attention, "none" for no MLP: `--norm
        --activation gelu` is the complete block.
    steps, learning_rate, richness, momentum
        Of the training by gradient descent.
    networks
        Networks of one replicate.
    oversampling
        How many times as many heads are sampled as moments need to be matched.
    """

    name: ClassVar[str] = "limits/infinite-heads"
    claim: ClassVar[str] = "Training converges to its mean-field limit as H grows, at both logit exponents"
    source: ClassVar[Source] = bordelon(
        "the limit of infinitely many heads; its solution and the rates are derived here"
    )
    predictions: ClassVar[int | None] = 8

    task: str = "digits"
    heads_counts: tuple[int, ...] = (4, 16, 64)
    key_dim: int = 4
    logit_exponents: tuple[float, ...] = (1.0, 0.5)
    depth: int = 2
    depth_exponent: float = 1.0
    norm: bool = False
    activation: str = "none"
    steps: int = 8
    learning_rate: float = 0.3
    richness: float = 0.75
    momentum: float = 0.0
    networks: int = 48
    oversampling: int = 4

    def __post_init__(self) -> None:
        counts = self.heads_counts
        check_rising("heads_counts", counts, least=2)
        if not self.logit_exponents or not set(self.logit_exponents) <= set(LOGITS):
            raise UsageError(f"logit_exponents={self.logit_exponents}: choose from {', '.join(map(str, LOGITS))}")
        if self.networks < 4 or self.oversampling < 1:
            raise UsageError(f"networks={self.networks}, oversampling={self.oversampling}: from 4 and from 1")
        self.network(counts[0], self.logit_exponents[0])
        self.problem()

    @classmethod
    def full(cls) -> InfiniteHeads:
        """Return the strongly rich regime at four blocks, with more heads and more networks."""
        return cls(
            heads_counts=(16, 64, 256),
            logit_exponents=(1.0,),
            depth=4,
            richness=1.5,
            learning_rate=0.15,
            steps=10,
            networks=128,
        )

    @classmethod
    def small(cls) -> InfiniteHeads:
        """Return the smallest configuration in which every claim can change."""
        return cls(heads_counts=(2, 4), key_dim=2, logit_exponents=(0.5,), depth=1, steps=3, networks=4, oversampling=1)

    def problem(self) -> Problem:
        """Return what is trained."""
        return mean_field.problem_of(self)

    def network(self, heads: int, logit_exponent: float) -> Network:
        """Return a network of the ensemble."""
        return Network(self.key_dim, heads, logit_exponent, None if self.activation == "none" else self.activation)

    def cells(self) -> tuple[Cell, ...]:
        """Return all numbers of heads at every logit exponent."""
        return grid(logit_exponent=self.logit_exponents, heads=self.heads_counts)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Solve the limit with heads of its own, and, to see what they are worth, without response functions."""
        drawn = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        solutions = [self._solve(exponent, rng) for exponent, rng in self._streams(drawn)]
        found = {name: np.stack([solution[name] for solution in solutions]) for name in solutions[0]}
        dims = DIMS | {"output_without": DIMS["output"]} | dict.fromkeys(ENDS, ())
        names = QUANTITIES | {"output_without": "outputs without response functions"} | ENDS
        dataset = mean_field.label(found, lead=("logit_exponent",), dims=dims, names=names)
        about = {"long_name": "logit exponent", "units": "1"}
        return dataset.assign_coords(logit_exponent=("logit_exponent", list(self.logit_exponents), about))

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train some networks of one size, and keep what the limit predicts about each."""
        network = self.network(int(cell["heads"]), float(cell["logit_exponent"]))
        return mean_field.train_ensemble(self.problem(), network, key, self.networks)

    def claims(self) -> tuple[Claim, ...]:
        """Test the convergence of single networks and of their mean, and the std of logits over heads."""
        claims: list[Claim] = []
        for exponent in self.logit_exponents:
            claims += [self._convergence(name, exponent) for name in QUANTITIES]
            claims += [make(exponent) for make in (self._control, self._distance, self._order, self._std)]
        return tuple(claims)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show one output over training, the distances of single networks, and a table of their mean."""
        return (
            self._trajectory(predicted, trained),
            self._distances(predicted, trained),
            self._table(predicted, trained),
        )

    def bias(
        self, predicted: xr.Dataset, trained: xr.Dataset, exponent: float, heads: int, name: str = "output"
    ) -> SquaredDistance:
        """Return how far the mean network of one size is from the limit, or, by its name, from the control."""
        values = self._along(trained, "output", exponent)[:, self.heads_counts.index(heads)]
        return squared_distance(values.reshape(-1, *values.shape[2:]), self._draws(predicted, name, exponent))

    def _streams(self, drawn: np.random.Generator) -> list[tuple[float, np.random.Generator]]:
        return list(zip(self.logit_exponents, drawn.spawn(len(self.logit_exponents)), strict=True))

    def _solve(self, exponent: float, rng: np.random.Generator) -> dict[str, np.ndarray]:
        problem = self.problem()
        # The control is far away, and needs no more heads than it must have.
        branches, few = (
            mean_field.sampled_blocks(problem, self.key_dim, exponent, self.activation, times)
            for times in (self.oversampling, 1)
        )
        solved = mean_field.solve_blocks(problem, branches, rng)
        without = mean_field.solve_blocks(problem, few, rng, responses=False)
        found = mean_field.summarize(solved) | {"output_without": without.outputs}
        for name, records in zip(ENDS, (solved.observables[0], solved.observables[-1]), strict=True):
            found[name] = np.mean([record["logit_variance"] for record in records if "logit_variance" in record])
        return found

    def _convergence(self, name: str, exponent: float) -> Claim:
        bias = -finite_size_bias(self.heads_counts)

        def measure(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval, int | None]:
            draws, values = self._draws(predicted, name, exponent), self._along(trained, name, exponent)
            fit, *each = (
                fit_exponent(self.heads_counts, self._apart(values, draws, place))
                for place in (None, *range(len(draws)))
            )
            drawn = half_width_of_draws(np.asarray([one.exponent for one in each]))
            needed = replicates_to_decide(fit.replicate_exponents, -0.5, bias, level=LEVEL, prediction_error=drawn)
            return fit.exponent, fit.interval.widened_independently(fit.exponent, drawn), needed

        return single_network_claim(
            f"{LOGITS[exponent]}: the distance of single networks from the limit scales as H^(-1/2) "
            f"({QUANTITIES[name]})",
            measure,
            "H",
            self.heads_counts,
        )

    def _control(self, exponent: float) -> Claim:
        def ratio(largest: np.ndarray, near: np.ndarray, far: np.ndarray) -> np.ndarray:
            return np.log(mean_field.biases(largest, near) / mean_field.biases(largest, far))[:, 0]  # (replicates,)

        def measure(predicted: xr.Dataset, trained: xr.Dataset) -> SampledFigure:
            largest = self._along(trained, "output", exponent)[:, -1:]
            draws = [self._draws(predicted, name, exponent) for name in ("output", "output_without")]
            each = np.array([ratio(largest, near, far).mean() for near, far in zip(*draws, strict=True)])
            error = float(each.std(ddof=1)) / math.sqrt(len(each))
            return SampledFigure(ratio(largest, draws[0].mean(0), draws[1].mean(0)), error, len(each) - 1)

        return nearer_claim(
            f"{LOGITS[exponent]}: at H={self.heads_counts[-1]} the mean network is nearer to the limit than to the "
            "equations without response functions (log ratio)",
            measure,
        )

    def _distance(self, exponent: float) -> Claim:
        most, heads = 1.28 / self.heads_counts[-1], self.heads_counts[-1]
        return distance_claim(
            f"{LOGITS[exponent]}: at H={heads} the distance of the mean network from the limit is at most {most:.2g}",
            lambda predicted, trained: self.bias(predicted, trained, exponent, heads),
            most,
            self.networks,
            basis="of second order: 1.28 / H, a constant of order one; noise is subtracted, the root keeps the sign",
        )

    def _order(self, exponent: float) -> Claim:
        sizes = (self.heads_counts[0], self.heads_counts[-1])

        def measure(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval, int | None]:
            first, last = (self.bias(predicted, trained, exponent, heads) for heads in sizes)
            needed = self._replicates(samples_to_decide(sizes, first, last, FASTER - 1))
            return *distance_exponent(sizes, first, last), needed

        return Claim(
            f"{LOGITS[exponent]}: from H={sizes[0]} to {sizes[1]} the distance of the mean network from the limit "
            "falls as 1/H or faster",
            measure,
            quantity="exponent of H",
            target=-1.0,
            tolerance=(math.inf, FASTER),
            basis="a quarter is the middle between the second order, 1/H, and H^(-1/2) of single networks",
        )

    def _std(self, exponent: float) -> Claim:
        heads, most = self.heads_counts[-1], 1.28 / self.heads_counts[-1]

        def measure(predicted: xr.Dataset, trained: xr.Dataset) -> tuple[float, Interval, int | None]:
            draws = self._draws(predicted, "variance_end", exponent)
            # The variance of H heads about their own mean is that over all heads times 1 - 1/H.
            ratios = self._along(trained, "variance_end", exponent)[:, -1].ravel() * heads / (heads - 1) / draws.mean()
            drawn = half_width_of_draws(draws / draws.mean())
            middle = float(ratios.mean())
            interval = mean_interval(ratios, LEVEL).widened_independently(middle, drawn)
            region = ((1 - (1 - most) ** 2), (1 + most) ** 2 - 1)
            needed = replicates_to_decide(ratios, 1.0, region, level=LEVEL, prediction_error=drawn)
            positive = Interval(max(interval.low, 0.0), max(interval.high, 0.0), LEVEL)
            return math.sqrt(max(middle, 0.0)), positive.mapped(math.sqrt), self._replicates(needed)

        return Claim(
            f"{LOGITS[exponent]}: at H={heads} the std of attention logits over heads is that of the limit to "
            f"{100 * most:.1f}% (ratio)",
            measure,
            quantity="std of logits, measured over limit",
            target=1.0,
            tolerance=most,
            basis="1.28 / H: a correction 1/H of a variance is 1/(2 H) of its root; 2.5 times as much is allowed",
        )

    def _replicates(self, networks: int | None) -> int | None:
        """Return replicates that hold so many networks."""
        return None if networks is None else -(-networks // self.networks)

    def _along(self, trained: xr.Dataset, name: str, exponent: float) -> np.ndarray:
        return mean_field.along(trained, name, "heads", logit_exponent=exponent)

    def _draws(self, predicted: xr.Dataset, name: str, exponent: float) -> np.ndarray:
        own = [dim for dim in predicted[name].dims if dim not in ("prediction", "logit_exponent")]
        return predicted[name].sel(logit_exponent=exponent).transpose("prediction", *own).values

    def _apart(self, values: np.ndarray, draws: np.ndarray, place: int | None = None) -> np.ndarray:
        """Distances of single networks from the mean of all draws, or from one; what these scatter is subtracted."""
        scatter = float(draws.var(0, ddof=1).mean())
        if place is None:
            return mean_field.distances(values, draws.mean(0), scatter / len(draws))
        return mean_field.distances(values, draws[place], scatter)

    def _trajectory(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        steps = np.arange(self.steps)
        columns = []
        for exponent in self.logit_exponents:
            limit = self._draws(predicted, "output", exponent)[:, :, 0, 0]
            values = self._along(trained, "output", exponent)[..., 0, 0]  # (replicates, sizes, networks, step)
            curves = [
                spread_curve(steps, values[:, place].reshape(-1, self.steps), f"H={heads}", group=place)
                for place, heads in enumerate(self.heads_counts)
            ]
            columns.append((*curves, spread_curve(steps, limit, "limit", "predicted", len(curves))))
        return Multiples(
            "Output of the first read-out over training",
            "updates",
            "output",
            (tuple(columns),),
            ("",),
            tuple(LOGITS[exponent] for exponent in self.logit_exponents),
            note="Means over networks; bands range over all of them. Dashed: the limit, all draws.",
        )

    def _distances(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        curves: list[Curve] = []
        sizes = np.asarray(self.heads_counts, float)
        for exponent in self.logit_exponents:
            for name, text in QUANTITIES.items():
                values = self._apart(self._along(trained, name, exponent), self._draws(predicted, name, exponent))
                label = text.removesuffix(" at the end").removesuffix(" over training").removeprefix("attention ")
                curves.append(spread_curve(sizes, values, f"{label}, exponent {exponent:g}", group=len(curves)))
        curves.append(power_curve(self.heads_counts, curves[0].y[0], -0.5, "H^(-1/2)", len(curves)))
        return Lines(
            "Distance of single networks from the limit",
            "heads H",
            "root mean square distance",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Means over replicates; bands range over all. Logits are means over heads.",
            shows=("distance of single networks from the limit",),
        )

    def _table(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        rows = []
        for exponent in self.logit_exponents:
            logits = self._draws(predicted, "logits", exponent).mean(0)
            std = {name: math.sqrt(self._draws(predicted, name, exponent).mean()) for name in ENDS}
            for place, heads in enumerate(self.heads_counts):
                near, far = (
                    self.bias(predicted, trained, exponent, heads, name) for name in ("output", "output_without")
                )
                variances = [self._along(trained, name, exponent)[:, place].mean() for name in ENDS]
                own = [math.sqrt(value * heads / (heads - 1)) for value in variances]
                low, high = near.interval().low, near.interval().high
                rows.append(
                    (
                        f"{exponent:g}",
                        str(heads),
                        f"{near.distance:.4f}",
                        f"[{low:.4f}, {high:.4f}]",
                        f"{far.distance:.4f}",
                        *(f"{mine:.3f} ({theirs:.3f})" for mine, theirs in zip(own, std.values(), strict=True)),
                        f"{np.sqrt((logits**2).mean()):.3f}",
                    )
                )
        return Listing(
            "The mean network",
            (
                "logit exponent",
                "H",
                "from the limit",
                "99%",
                "without responses",
                "std over heads before (limit)",
                "after (limit)",
                "mean logits of the limit",
            ),
            tuple(rows),
            note="Distances are root mean squares over steps and outputs, without the noise of networks and draws; a "
            "negative one is a square below zero. Std: root mean square over layers and pairs of tokens.",
        )
