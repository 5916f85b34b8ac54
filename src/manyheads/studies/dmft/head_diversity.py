"""`limits/head-diversity`: variance and distribution of attention logits over heads against the key dimension N."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.scaling.checks.coordinate_check import finite_size_bias
from manyheads.scaling.trained.transformers import Recipe, measure_updates
from manyheads.studies.dmft.shared import mean_field
from manyheads.studies.dmft.shared.claims import caption_claim, distance_claim
from manyheads.studies.dmft.shared.logit_distributions import pool_logits
from manyheads.studies.dmft.shared.logits_over_heads import (
    EXPONENTS,
    WHENS,
    LogitsOverHeads,
    densities_panel,
    distances_panel,
    exponents_panel,
    variances_panel,
)
from manyheads.studies.scaling.shared.parametrizations import bordelon, parametrization_of, task_of
from manyheads.study import Cell, Claim, Source, Study, grid
from manyheads.study.claims import FromPrediction
from manyheads.study.panels import Panel
from manyheads.study.verdicts import Expected
from manyheads.theory.dmft.finite.ensembles import Network
from manyheads.theory.dmft.problem import Problem
from manyheads.transformer.shape import Shape


class Training(NamedTuple):
    """Sizes and training of the networks."""

    key_dims: tuple[int, ...]
    heads: int
    depth: int
    steps: int
    learning_rate: float


OWN = {
    "gd": Training((2, 4, 8, 16), heads=64, depth=1, steps=8, learning_rate=0.3),
    "sgd": Training((4, 8, 16, 32), heads=4, depth=2, steps=60, learning_rate=0.3),
    "adam": Training((4, 8, 16, 32), heads=4, depth=2, steps=100, learning_rate=0.003),
}
BATCHES = {"sgd": {"digits": 96, "text": 48}, "adam": {"digits": 16, "text": 8}}
OPTIMIZERS = {"sgd": "SGD", "adam": "Adam"}
BY_EXPONENT = {1.0: "limits", 0.5: "half-logit"}  # names of parametrizations
GAUSSIAN = 0.01  # of probability: an excess kurtosis of 0.93
MOVES = 0.23  # how far two per cent of a std move probabilities, over two per cent

DIMS: dict[str, tuple[str, ...]] = {
    "variance_start": (),
    "variance_end": (),
    "variance_without": (),
    "mean": (),
    "square": (),
    "update": (),
    "below": ("level",),
}
NAMES = {
    "variance_start": "variance of the logits over heads before training",
    "variance_end": "variance of the logits over heads after training",
    "variance_without": "the same from the theory without responses",
    "mean": "mean of the pooled logits after training",
    "square": "mean square of the pooled logits after training",
    "update": "update of the attention logits",
    "below": "share of the pooled logits below a level",
}


@dataclass(frozen=True)
class HeadDiversity(Study):
    """Variance of attention logits over heads against N, and their distribution, for both logit exponents.

    With gradient descent (``"gd"``, full batches) the limit of infinitely many heads is sampled at every N and compared
    with networks. In mild training the exponents of N are those of the init; `--richness 1.5` is strongly rich, where
    at these sizes they are not, and the solver predicts that. With ``"sgd"`` and ``"adam"`` transformers are trained on
    mini-batches, for which no limit is solved.

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``; with gradient descent four images (pooled, squared loss) or a few windows (causal,
        every token reads out, cross-entropy).
    optimizer
        ``"gd"``, ``"sgd"`` or ``"adam"``.
    key_dims, heads, depth
        Sizes of the networks; none or 0 takes the optimizer's own.
    steps, learning_rate
        Of the training; 0 takes the optimizer's own.
    base_key_dim
        With mini-batches: N at which both logit exponents are one network.
    theory_key_dims
        With gradient descent, as the following: further N at which the limit is solved.
    depth_exponent, norm, richness, momentum
        Exponent of the branch multiplier, whether streams are normalized, richness and momentum.
    networks
        Networks of one replicate.
    oversampling
        How many times as many heads are sampled as moments need to be matched.

    Notes
    -----
    Before training the exponent is 1 - 2 alpha_A, exact in the first layer. Gradient descent adds to every head what
    the limit prescribes, which at alpha_A = 1 is the same for all, and fluctuations about it of relative size N^(-1/2):
    the exponent stays. At the init the gradient of a logit is of size N^(-1/2) and random in every head; Adam makes it
    of size one, and heads move in directions of their own by an amount that does not fall with N. So a refutation under
    Adam says that its heads are no copies; one under gradient descent, that sizes are too small for the update of the
    logits.
    """

    name: ClassVar[str] = "limits/head-diversity"
    revision: ClassVar[int] = 2
    claim: ClassVar[str] = "The variance of logits over heads goes as 1/N at logit exponent 1, N^0 at 1/2"
    source: ClassVar[Source] = bordelon(
        "figures 2b and 3 and their captions, table 3; the solution and the exponents of N are derived here"
    )
    predictions: ClassVar[int | None] = 8

    task: str = "digits"
    optimizer: str = "gd"
    key_dims: tuple[int, ...] = ()
    heads: int = 0
    depth: int = 0
    steps: int = 0
    learning_rate: float = 0.0
    base_key_dim: int = 8
    theory_key_dims: tuple[int, ...] = (1, 32)
    depth_exponent: float = 1.0
    norm: bool = False
    richness: float = 0.75
    momentum: float = 0.0
    networks: int = 8
    oversampling: int = 3

    def __post_init__(self) -> None:
        if self.optimizer not in OWN:
            raise UsageError(f"optimizer={self.optimizer!r}: choose one of {', '.join(OWN)}")
        check_rising("key_dims", self.training.key_dims)
        if self.training.heads < 2:
            raise UsageError(f"heads={self.heads}: a variance over heads needs two heads or more")
        if self._solved:
            if self.networks < 3 or self.oversampling < 1 or min(self.theory_key_dims, default=1) < 1:
                raise UsageError(
                    f"networks={self.networks}, oversampling={self.oversampling}, theory_key_dims="
                    f"{self.theory_key_dims}: expected at least 3, 1 and 1"
                )
            self.problem()
            return
        own = ("theory_key_dims", "depth_exponent", "norm", "richness", "momentum", "networks", "oversampling")
        if changed := [
            each.name for each in fields(self) if each.name in own and getattr(self, each.name) != each.default
        ]:
            raise UsageError(f"{changed[0]} with optimizer={self.optimizer!r}: it belongs to gradient descent, 'gd'")
        if not 0 < self.training.learning_rate < math.inf:
            raise UsageError(
                f"learning_rate={self.learning_rate}: expected a positive number, or 0 for the optimizer's"
            )
        Recipe(self.training.steps)
        task_of(self.task, 1)

    @classmethod
    def full(cls) -> HeadDiversity:
        """Return the study with two blocks, more networks and more sampled heads."""
        return cls(depth=2, networks=16, oversampling=4)

    @classmethod
    def small(cls) -> HeadDiversity:
        """Return the smallest configuration in which every claim can change."""
        return cls(key_dims=(1, 2), theory_key_dims=(), heads=4, steps=2, networks=3, oversampling=1)

    @property
    def training(self) -> Training:
        """Sizes and training, as given or the optimizer's own."""
        return Training(*(getattr(self, name) or own for name, own in OWN[self.optimizer]._asdict().items()))

    def problem(self) -> Problem:
        """Return the training problem of gradient descent."""
        _, _, depth, steps, learning_rate = self.training
        smaller = {"tests": 0} if self.task == "digits" else {}
        return mean_field.problem_of(self, depth=depth, steps=steps, learning_rate=learning_rate, **smaller)

    def sizes(self) -> tuple[int, ...]:
        """Return every N at which the limit is solved."""
        return tuple(sorted({*self.training.key_dims, *self.theory_key_dims}))

    def cells(self) -> tuple[Cell, ...]:
        """Return all key dimensions at both logit exponents."""
        return grid(logit_exponent=tuple(EXPONENTS), key_dim=self.training.key_dims)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the exponents of N; with gradient descent, solve the limit at every N with heads of its own."""
        about = {"long_name": "exponent of N in the variance of logits over heads", "units": "1"}
        exponents = xr.Dataset(
            {"exponent": ("logit_exponent", [1 - 2 * exponent for exponent in EXPONENTS], about)},
            coords={"logit_exponent": list(EXPONENTS)},
        )
        if not self._solved:
            return exponents
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        cases = [(exponent, size) for exponent in EXPONENTS for size in self.sizes()]
        solved = [self._solve(*case, stream) for case, stream in zip(cases, rng.spawn(len(cases)), strict=True)]
        shape = (len(EXPONENTS), len(self.sizes()))
        found = {name: np.array([one[name] for one in solved]) for name in solved[0]}
        variables = {
            name: (("logit_exponent", "key_dim", *DIMS[name]), value.reshape(*shape, *value.shape[1:]), _about(name))
            for name, value in found.items()
        }
        solved_limit = xr.Dataset(variables, coords={"key_dim": list(self.sizes())})
        return exponents.merge(solved_limit)

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train some networks of one size and measure the logits of their heads."""
        exponent, size = float(cell["logit_exponent"]), int(cell["key_dim"])
        found = self._train_transformer(key, exponent, size) if not self._solved else self._train(key, exponent, size)
        return xr.Dataset({name: (("network", *DIMS[name]), value, _about(name)) for name, value in found.items()})

    def claims(self) -> tuple[Claim, ...]:
        """Test exponents of N before and after training, of networks and of the theory, and distributions."""
        claims: list[Claim] = []
        for exponent in EXPONENTS:
            claims += [self._before(exponent), self._after(exponent)]
            claims += [self._change(exponent)] if self._solved else []
        claims.append(caption_claim(lambda predicted, trained: self.data(predicted, trained).fit(1.0, "end")))
        if self._solved:
            sizes = self.training.key_dims
            for exponent in EXPONENTS:
                claims += [claim for size in (sizes[0], sizes[-1]) for claim in self._distributions(exponent, size)]
                claims.append(self._growth(exponent))
        return tuple(claims)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the variance against N; beside a limit also densities, and tables of exponents and distances."""
        data = self.data(predicted, trained)
        if self._solved:
            variances = variances_panel(data, f"Networks with H={self.training.heads}; dashed: infinitely many heads.")
            return variances, densities_panel(data), exponents_panel(data), distances_panel(data)
        updates = trained["update"].values
        note = f"Root mean square updates of the logits are {updates.min():.2g} to {updates.max():.2g}."
        return (variances_panel(data, note),)

    def data(self, predicted: xr.Dataset, trained: xr.Dataset) -> LogitsOverHeads:
        """Return the results by logit exponent and key dimension."""
        return LogitsOverHeads(predicted, trained, self.training.key_dims)

    @property
    def _solved(self) -> bool:
        """Whether there is a limit."""
        return self.optimizer == "gd"

    def _solve(self, exponent: float, size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        problem = self.problem()
        branches = mean_field.sampled_blocks(problem, size, exponent, oversampling=self.oversampling)
        again = copy.deepcopy(rng)  # both begin from the same heads, so that their noise is the same
        solved, heads = mean_field.solve_heads(problem, branches, rng)
        without = mean_field.solve_blocks(problem, branches, again, responses=False)
        ends = {"start": solved.observables[0], "end": solved.observables[-1], "without": without.observables[-1]}
        found = {
            f"variance_{when}": np.mean([layer["logit_variance"] for layer in layers]) for when, layers in ends.items()
        }
        pooled = pool_logits(heads[None], self._units(exponent, size))
        return found | {name: value[0] for name, value in pooled.items()}

    def _train(self, key: jax.Array, exponent: float, size: int) -> dict[str, np.ndarray]:
        """Train networks by gradient descent in the normalization of the limit."""
        heads = self.training.heads
        trained = mean_field.train_ensemble(
            self.problem(), Network(size, heads, exponent), key, self.networks, every_head=True
        )
        share = heads / (heads - 1)  # H heads vary about their own mean by 1 - 1/H as much
        found = {f"variance_{when}": share * trained[f"variance_{when}"].values for when in WHENS}
        return found | pool_logits(trained["head_logits"].values, self._units(exponent, size))

    def _train_transformer(self, key: jax.Array, exponent: float, size: int) -> dict[str, np.ndarray]:
        """Train one transformer on mini-batches."""
        _, heads, depth, steps, learning_rate = self.training
        base = Shape(self.base_key_dim, heads, depth)
        parametrization = parametrization_of(BY_EXPONENT[exponent], base, "adam" if self.optimizer == "adam" else "sgd")
        task = task_of(self.task, BATCHES[self.optimizer][self.task])
        shape = replace(base, key_dim=size)
        wanted = ("logits", "head_variance_start", "head_variance")
        found = measure_updates(task, parametrization, shape, Recipe(), learning_rate, (steps,), key, fields=wanted)
        return {
            "variance_start": found.head_variance_start[None],
            "variance_end": found.head_variance,
            "update": found.logits,
        }

    def _units(self, exponent: float, size: int) -> np.ndarray:
        """Exact std over heads of every logit in the first layer before training, (sample, token, token_too)."""
        problem = self.problem()
        lengths = np.diag(problem.gram).reshape(problem.samples, problem.tokens) ** 0.5
        if self.norm:
            lengths = np.ones_like(lengths)
        return size ** (0.5 - exponent) * lengths[:, :, None] * lengths[:, None, :]

    def _before(self, exponent: float) -> Claim:
        return Claim(
            f"{EXPONENTS[exponent]}: before training the variance of attention logits over heads scales as "
            f"N^{1 - 2 * exponent:g}",
            lambda predicted, trained: self.data(predicted, trained).fit(exponent, "start"),
            quantity="exponent of N",
            target=lambda predicted: _exponent(predicted, exponent),
            tolerance=0.1,
            basis="exact in the first layer; corrections of relative size 1/(N H) above it",
        )

    def _after(self, exponent: float) -> Claim:
        bias = -2 * finite_size_bias(self.training.key_dims)
        # Descent keeps the exponent, derived; Adam's first steps move each head in its own direction.
        outcomes: dict[tuple[str, float], Expected] = {
            ("sgd", 1.0): "holds",
            ("sgd", 0.5): "holds",
            ("adam", 1.0): "refuted",
        }
        known = outcomes.get((self.optimizer, exponent))
        expected: Expected | FromPrediction[Expected] = "holds"
        if known is not None:  # of any configuration
            expected = partial(_known, known)
        training = f"gradient descent at richness {self.richness:g}"
        if not self._solved:
            training = f"{self.training.steps} steps of {OPTIMIZERS[self.optimizer]}"
        return Claim(
            f"{EXPONENTS[exponent]}: after {training} the variance of attention logits over heads scales as "
            f"N^{1 - 2 * exponent:g}",
            lambda predicted, trained: self.data(predicted, trained).fit(exponent, "end"),
            quantity="exponent of N",
            target=lambda predicted: _exponent(predicted, exponent),
            tolerance=bias,
            basis=f"a correction 1 + N^(-1/2) of the std moves that of its square by {bias:.2f} over these sizes",
            expected=expected,
        )

    def _change(self, exponent: float) -> Claim:
        sizes = self.training.key_dims
        return Claim(
            f"{EXPONENTS[exponent]}: training changes the exponent of N in the variance over heads as the mean-field "
            "solution predicts",
            lambda predicted, trained: self.data(predicted, trained).measured_change(exponent),
            quantity="change of the exponent of N",
            target=lambda predicted: float(self.data(predicted, predicted).change(exponent).mean()),
            tolerance=5 / self.training.heads / math.log(sizes[-1] / sizes[0]),
            basis="2.5 / H at either end: corrections of relative size 1/H to what training adds",
        )

    def _distributions(self, exponent: float, size: int) -> list[Claim]:
        where = f"{EXPONENTS[exponent]}, N={size}"
        rich = exponent == 1 and self.richness > 1  # at exponent 1/2 the initial std stays the larger part
        return [
            distance_claim(
                f"{where}: the distribution of the logits of single heads is that of the mean-field limit",
                lambda predicted, trained: self.data(predicted, trained).limit_distance(exponent, size),
                MOVES * 1.28 / self.training.heads,
                self.networks,
                basis="root mean square over levels: a mean and a std that are each off by 1.28 / H stds move "
                "probabilities by 0.23 times as much",
            ),
            distance_claim(
                f"{where}: the distribution of the logits of single heads is a Gaussian of their variance",
                lambda predicted, trained: self.data(predicted, trained).gaussian_distance(exponent, size),
                GAUSSIAN,
                self.networks,
                basis="one per cent: excess kurtosis 6/N of a product of N pairs moves probabilities by 0.064/N, as "
                "long as features have not moved by their own size",
                expected="holds" if 0.064 / size < GAUSSIAN and not rich else "refuted",
            ),
        ]

    def _growth(self, exponent: float) -> Claim:
        return Claim(
            f"{EXPONENTS[exponent]}, N={self.training.key_dims[-1]}: training increases the variance over heads as in "
            "the limit (0: without response functions, 1: limit)",
            lambda predicted, trained: self.data(predicted, trained).growth(exponent),
            quantity="log growth of the variance (0 without responses, 1 in the limit)",
            target=1.0,
            tolerance=(0.5, 0.5),
            basis="at 1/2 the theory without responses is as near as the whole; error of the draws by the jackknife",
        )


def _known(outcome: Expected, predicted: xr.Dataset) -> Expected:
    return outcome


def _exponent(predicted: xr.Dataset, exponent: float) -> float:
    return float(predicted["exponent"].sel(logit_exponent=exponent).mean())


def _about(name: str) -> dict[str, str]:
    return {"long_name": NAMES[name], "units": "1"}
