"""`limits/attention-over-heads`: how attention is distributed over heads, and whether heads become one as N grows."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.limits.checks.coordinate_check import finite_size_bias
from manyheads.limits.comparisons import mean_field
from manyheads.limits.comparisons.logit_distributions import (
    LEVELS,
    density_curve,
    geometric_curve,
    hold_against_gaussian,
    pool_logits,
    power_guides,
)
from manyheads.limits.comparisons.mean_networks import SquaredBias, decide_within, half_width_of_draws, squared_bias
from manyheads.limits.comparisons.schemes import CAPTION, bordelon, caption_verdict, check_rising
from manyheads.limits.dmft.problem import Problem
from manyheads.limits.systems.ensembles import Network
from manyheads.statistics import fit_exponent, replicates_to_decide
from manyheads.statistics.exponents import ExponentFit
from manyheads.study import Cell, Curve, Lines, Listing, Source, Study, Verdict, grid
from manyheads.study.reporting.panels import Multiples, Panel
from manyheads.study.verdicts import LEVEL

LOGITS = {1.0: "logit exponent 1", 0.5: "logit exponent 1/2"}
WHENS = ("start", "end")
GAUSSIAN = 0.01  # of probability: an excess kurtosis of 0.93
MOVES = 0.23  # how far two per cent of a spread move probabilities, over two per cent

DIMS: dict[str, tuple[str, ...]] = {
    "variance_start": (),
    "variance_end": (),
    "variance_without": (),
    "mean": (),
    "square": (),
    "below": ("level",),
}
NAMES = {
    "variance_start": "variance of the logits over heads before training",
    "variance_end": "variance of the logits over heads after training",
    "variance_without": "the same from the theory without responses",
    "mean": "mean of the pooled logits after training",
    "square": "mean square of the pooled logits after training",
    "below": "share of the pooled logits below a level",
}


@dataclass(frozen=True)
class AttentionOverHeads(Study):
    """Variance of attention logits over heads against N, and their distribution, for both logit exponents.

    The limit of infinitely many heads is sampled at every N, networks are trained beside it at some. In mild training
    the powers of N are those of the start; `--richness 1.5` is strongly rich, where at these sizes they are not, and
    the solver says so before the networks do.

    Attributes
    ----------
    task
        ``"digits"`` (four images, pooled, squared loss) or ``"text"`` (causal, every token reads out, cross-entropy).
    key_dims, theory_key_dims
        N of the networks, and further ones at which the limit is solved.
    heads
        H of the networks.
    depth, depth_exponent, norm
        Blocks, the exponent of their branch multiplier, and whether streams are normalised.
    steps, rate, richness, momentum
        Of the training by gradient descent.
    networks
        Networks of one replicate.
    oversampling
        How many times as many heads are sampled as moments need to be matched.
    """

    name: ClassVar[str] = "limits/attention-over-heads"
    claim: ClassVar[str] = "Logits over heads follow the mean-field distribution as H grows"
    source: ClassVar[Source] = bordelon(
        "figures 2b and 3 and their captions, table 3; the solution and the powers of N are derived here"
    )
    predictions: ClassVar[int | None] = 8

    task: str = "digits"
    key_dims: tuple[int, ...] = (2, 4, 8, 16)
    theory_key_dims: tuple[int, ...] = (1, 32)
    heads: int = 64
    depth: int = 1
    depth_exponent: float = 1.0
    norm: bool = False
    steps: int = 8
    rate: float = 0.3
    richness: float = 0.75
    momentum: float = 0.0
    networks: int = 8
    oversampling: int = 3

    def __post_init__(self) -> None:
        check_rising("key_dims", self.key_dims)
        if self.heads < 2 or self.networks < 3 or self.oversampling < 1 or min(self.theory_key_dims, default=1) < 1:
            raise UsageError(
                f"heads={self.heads}, networks={self.networks}, oversampling={self.oversampling}, "
                f"theory_key_dims={self.theory_key_dims}: from 2 heads, 3 networks, and 1"
            )
        self.problem()

    @classmethod
    def full(cls) -> AttentionOverHeads:
        """Return the study with two blocks, more networks and more sampled heads."""
        return cls(depth=2, networks=16, oversampling=4)

    @classmethod
    def small(cls) -> AttentionOverHeads:
        """Return the smallest configuration in which every claim can change."""
        return cls(key_dims=(1, 2), theory_key_dims=(), heads=4, steps=2, networks=3, oversampling=1)

    def problem(self) -> Problem:
        """Return what is trained."""
        smaller = {"tests": 0} if self.task == "digits" else {}
        return mean_field.problem_of(self, **smaller)

    def sizes(self) -> tuple[int, ...]:
        """Return every N at which the limit is solved."""
        return tuple(sorted({*self.key_dims, *self.theory_key_dims}))

    def cells(self) -> tuple[Cell, ...]:
        """Return all key dimensions at both logit exponents."""
        return grid(logit_exponent=tuple(LOGITS), key_dim=self.key_dims)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Solve the limit at every N and both exponents, with heads of its own."""
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        cases = [(exponent, size) for exponent in LOGITS for size in self.sizes()]
        looks = [self._solve(*case, stream) for case, stream in zip(cases, rng.spawn(len(cases)), strict=True)]
        shape = (len(LOGITS), len(self.sizes()))
        found = {name: np.array([look[name] for look in looks]) for name in looks[0]}
        variables = {
            name: (("logit_exponent", "key_dim", *DIMS[name]), value.reshape(*shape, *value.shape[1:]), _about(name))
            for name, value in found.items()
        }
        return xr.Dataset(variables, coords={"logit_exponent": list(LOGITS), "key_dim": list(self.sizes())})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train some networks of one size and look at the logits of all their heads."""
        exponent, size = float(cell["logit_exponent"]), int(cell["key_dim"])
        trained = mean_field.train_ensemble(
            self.problem(), Network(size, self.heads, exponent), key, self.networks, every_head=True
        )
        share = self.heads / (self.heads - 1)  # H heads vary about their own mean by 1 - 1/H as much
        found = {f"variance_{when}": share * trained[f"variance_{when}"].values for when in WHENS}
        found |= pool_logits(trained["head_logits"].values, self._units(exponent, size))
        return xr.Dataset({name: (("network", *DIMS[name]), value, _about(name)) for name, value in found.items()})

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Fit powers of N before and after training, networks' and theory's, and compare distributions."""
        verdicts: list[Verdict] = []
        for exponent in LOGITS:
            verdicts += self._powers(predicted, trained, exponent)
        verdicts.append(caption_verdict(self.fit(trained, 1.0, "end")))
        for exponent in LOGITS:
            for size in (self.key_dims[0], self.key_dims[-1]):
                verdicts += self._distributions(predicted, trained, exponent, size)
            verdicts.append(self._control(predicted, trained, exponent))
        return tuple(verdicts)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the variance against N, densities at every N, and tables of powers and of distances."""
        return (
            self._variances(predicted, trained),
            self._densities(predicted, trained),
            self._table_of_powers(predicted, trained),
            self._table_of_distances(predicted, trained),
        )

    def fit(self, trained: xr.Dataset, exponent: float, when: str) -> ExponentFit:
        """Return the power of N in the variance of the networks' logits over heads."""
        return fit_exponent(self.key_dims, self._along(trained, f"variance_{when}", exponent).mean(-1))

    def theory_powers(
        self, predicted: xr.Dataset, exponent: float, when: str, sizes: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """Return the power of N in the limit's own variance, one a draw, over the networks' sizes if none are given."""
        values = self._draws(predicted, f"variance_{when}", exponent).sel(key_dim=list(sizes or self.key_dims))
        return np.asarray(fit_exponent(sizes or self.key_dims, values.values).replicate_exponents)

    def distances(
        self, predicted: xr.Dataset, trained: xr.Dataset, exponent: float, size: int
    ) -> tuple[SquaredBias, SquaredBias]:
        """Return how far the logits of single heads are from the limit's in distribution, and from a Gaussian."""
        place = self.key_dims.index(size)
        draws = self._draws(predicted, "below", exponent).sel(key_dim=size).values
        apart, gaussian = self._gaussian(trained, exponent, place)
        return squared_bias(self._below(trained, exponent, place), draws), squared_bias(apart, gaussian[None])

    def _solve(self, exponent: float, size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        problem = self.problem()
        branches = mean_field.sampled_blocks(problem, size, exponent, oversampling=self.oversampling)
        again = copy.deepcopy(rng)  # both begin from the same heads, so that their noise is the same
        solved, heads = mean_field.solve_heads(problem, branches, rng)
        without = mean_field.solve_blocks(problem, branches, again, responses=False)
        ends = {"start": solved.observables[0], "end": solved.observables[-1], "without": without.observables[-1]}
        found = {
            f"variance_{when}": np.mean([look["logit_variance"] for look in looks]) for when, looks in ends.items()
        }
        pooled = pool_logits(heads[None], self._units(exponent, size))
        return found | {name: value[0] for name, value in pooled.items()}

    def _units(self, exponent: float, size: int) -> np.ndarray:
        """Exact spread over heads of every logit in the first layer before training, (sample, token, token_too)."""
        problem = self.problem()
        lengths = np.diag(problem.gram).reshape(problem.samples, problem.tokens) ** 0.5
        if self.norm:
            lengths = np.ones_like(lengths)
        return size ** (0.5 - exponent) * lengths[:, :, None] * lengths[:, None, :]

    def _powers(self, predicted: xr.Dataset, trained: xr.Dataset, exponent: float) -> list[Verdict]:
        power, label = 1 - 2 * exponent, LOGITS[exponent]
        words = f"like N^{power:g}" if power else "by as much at every N"
        before, after = (self.fit(trained, exponent, when) for when in WHENS)
        bias = -2 * finite_size_bias(self.key_dims)
        moved = np.subtract(after.replicate_exponents, before.replicate_exponents)
        theory = np.subtract(*(self.theory_powers(predicted, exponent, when) for when in ("end", "start")))
        most = 5 / self.heads / math.log(self.key_dims[-1] / self.key_dims[0])
        return [
            Verdict.from_interval(
                f"{label}: before training logits vary over heads {words}",
                before.interval,
                figure=before.exponent,
                target=power,
                tolerance=0.1,
                basis="exact in the first layer; corrections of relative size 1/(N H) above it",
                replicates_needed=replicates_to_decide(before.replicate_exponents, power, 0.1, level=LEVEL),
            ),
            Verdict.from_interval(
                f"{label}: after training at richness {self.richness:g} they still do, {words}",
                after.interval,
                figure=after.exponent,
                target=power,
                tolerance=bias,
                basis=f"a correction 1 + N^(-1/2) of the spread moves the power of its square by {bias:.2f}",
                replicates_needed=replicates_to_decide(after.replicate_exponents, power, bias, level=LEVEL),
            ),
            Verdict.from_samples(
                f"{label}: training changes the power of N in the variance as the solver says",
                moved,
                target=float(theory.mean()),
                tolerance=most,
                prediction_error=float(theory.std(ddof=1)) / math.sqrt(len(theory)),
                prediction_dof=len(theory) - 1,
                basis="2.5 / H at either end: corrections of relative size 1/H to what training adds",
            ),
        ]

    def _distributions(self, predicted: xr.Dataset, trained: xr.Dataset, exponent: float, size: int) -> list[Verdict]:
        limit, gaussian = self.distances(predicted, trained, exponent, size)
        label = f"{LOGITS[exponent]}, N={size}"
        moved = exponent == 1 and self.richness > 1  # at exponent 1/2 the initial spread stays the larger part
        return [
            decide_within(
                f"{label}: logits of single heads are distributed as the limit's sampled heads",
                limit,
                MOVES * 1.28 / self.heads,
                basis="root mean square over levels: a mean and a spread that are each off by 1.28 / H spreads move "
                "probabilities by 0.23 times as much",
                count=self.networks,
            ),
            decide_within(
                f"{label}: they are distributed as a Gaussian of their variance",
                gaussian,
                GAUSSIAN,
                basis="one per cent: excess kurtosis 6/N of a product of N pairs moves probabilities by 0.064/N, as "
                "long as features have not moved by their own size",
                count=self.networks,
                expected="holds" if 0.064 / size < GAUSSIAN and not moved else "refuted",
            ),
        ]

    def _control(self, predicted: xr.Dataset, trained: xr.Dataset, exponent: float) -> Verdict:
        size = self.key_dims[-1]  # where training adds most; corrections are of size 1/H at any N
        before, after = (self._along(trained, f"variance_{when}", exponent)[:, -1] for when in WHENS)
        grown = np.log(after / before).mean(-1)  # (replicates,)
        start, limit, without = (
            np.log(self._draws(predicted, f"variance_{when}", exponent).sel(key_dim=size).values)
            for when in (*WHENS, "without")
        )

        def along(low: np.ndarray, high: np.ndarray) -> np.ndarray:
            return (grown - low.mean()) / (high.mean() - low.mean())

        growths, count = (without - start, limit - start), len(start)
        rest = [float(along(*(np.delete(growth, draw) for growth in growths)).mean()) for draw in range(count)]
        return Verdict.from_samples(
            f"{LOGITS[exponent]}, N={size}: in training the variance over heads grows as in the limit, from the "
            "theory without responses (0) to the whole (1)",
            along(*growths),
            target=1.0,
            tolerance=(0.5, 0.5),
            prediction_error=math.sqrt(count - 1) * float(np.std(rest)),
            prediction_dof=count - 1,
            basis="of the logarithm of the growth; at 1/2 the theory without responses is as near as the whole; the "
            "error of the draws by the jackknife",
        )

    def _along(self, trained: xr.Dataset, name: str, exponent: float) -> np.ndarray:
        return mean_field.along(trained, name, "key_dim", logit_exponent=exponent)

    def _draws(self, predicted: xr.Dataset, name: str, exponent: float) -> xr.DataArray:
        return predicted[name].sel(logit_exponent=exponent).transpose("prediction", "key_dim", *DIMS[name])

    def _below(self, trained: xr.Dataset, exponent: float, place: int) -> np.ndarray:
        """Shares below every level of all networks of one size, (network, level)."""
        return self._along(trained, "below", exponent)[:, place].reshape(-1, len(LEVELS))

    def _gaussian(self, trained: xr.Dataset, exponent: float, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Hold the pooled logits of networks against a Gaussian of their mean and variance."""
        mean, square = (self._along(trained, name, exponent)[:, place].ravel() for name in ("mean", "square"))
        return hold_against_gaussian(self._below(trained, exponent, place), mean, square)

    def _variances(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        curves: list[Curve] = []
        for place, exponent in enumerate(LOGITS):
            for late, (when, words) in enumerate(zip(WHENS, ("before", "after"), strict=True)):
                group, name = 2 * place + late, f"variance_{when}"
                own = self._along(trained, name, exponent).mean(-1)
                curves.append(geometric_curve(self.key_dims, own, f"exponent {exponent:g}, {words} training", group))
                limit = self._draws(predicted, name, exponent).values
                curves.append(geometric_curve(self.sizes(), limit, "", group, "predicted"))
        curves += power_guides(self.key_dims, curves[2].y[0], (-1.0, CAPTION), 4)
        return Lines(
            "Variance of attention logits over heads",
            "key dimension N",
            "variance over heads",
            tuple(curves),
            log_x=True,
            log_y=True,
            note=f"Solid: networks with H={self.heads}, geometric means, bands over all replicates. Dashed: the limit "
            "of infinitely many heads. Grey: powers of N from the networks' first point after training at exponent 1.",
        )

    def _densities(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        rows = []
        for exponent in LOGITS:
            row = []
            for place, size in enumerate(self.key_dims):
                networks = self._along(trained, "below", exponent)[:, place].mean(1)  # (replicates, level)
                limit = self._draws(predicted, "below", exponent).sel(key_dim=size).values
                gaussian = self._gaussian(trained, exponent, place)[1][None]
                row.append(
                    (
                        density_curve(networks, "networks", "trained", 0),
                        density_curve(limit, "limit", "predicted", 1),
                        density_curve(gaussian, "Gaussian of their variance", "reference", 2),
                    )
                )
            rows.append(tuple(row))
        return Multiples(
            "Logits of single heads after training",
            "logit, in units of its exact spread before training",
            "density",
            tuple(rows),
            tuple(f"exponent {exponent:g}" for exponent in LOGITS),
            tuple(f"N={size}" for size in self.key_dims),
            log_y=True,
            note="Heads, images and pairs of tokens together; bands reach over replicates and over draws of the limit.",
        )

    def _table_of_powers(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        rows = []
        for exponent in LOGITS:
            for when, words in zip(WHENS, ("before", "after"), strict=True):
                fit = self.fit(trained, exponent, when)
                same, every = (
                    self.theory_powers(predicted, exponent, when, sizes) for sizes in (self.key_dims, self.sizes())
                )
                rows.append(
                    (
                        f"{exponent:g}",
                        words,
                        f"{fit.exponent:.3f} [{fit.interval.low:.3f}, {fit.interval.high:.3f}]",
                        *(f"{found.mean():.3f} ± {half_width_of_draws(found):.3f}" for found in (same, every)),
                    )
                )
        spans = [f"limit, N={sizes[0]} to {sizes[-1]}" for sizes in (self.key_dims, self.sizes())]
        return Listing(
            "Power of N in the variance of logits over heads",
            ("logit exponent", "training", "networks", *spans),
            tuple(rows),
            note="99% intervals, over replicates and over draws of the limit.",
        )

    def _table_of_distances(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        rows = []
        for exponent in LOGITS:
            for size in self.key_dims:
                found = self.distances(predicted, trained, exponent, size)
                shown = [
                    f"{each.distance:.4f} [{each.interval().low:.4f}, {each.interval().high:.4f}]" for each in found
                ]
                rows.append((f"{exponent:g}", str(size), *shown))
        return Listing(
            "How far single heads' logits are in distribution",
            ("logit exponent", "N", "from the limit", "from a Gaussian of their variance"),
            tuple(rows),
            note="Root mean square difference of probabilities, without the noise of networks and of draws; a negative "
            "one is a square below zero.",
        )


def _about(name: str) -> dict[str, str]:
    return {"long_name": NAMES[name], "units": "1"}
