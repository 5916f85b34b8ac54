"""`limits/head-diversity`: variance and distribution of attention logits over heads against the key dimension N."""

import copy
import math
from dataclasses import fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.scaling.checks.coordinate_check import finite_size_bias
from manyheads.scaling.trained.transformers import Recipe, measure_updates
from manyheads.statistics.distances import squared_distance
from manyheads.studies.dmft.shared import mean_field
from manyheads.studies.dmft.shared.logit_distributions import LEVELS, densities, hold_against_gaussian, pool_logits
from manyheads.studies.scaling.shared.parametrizations import parametrization_of, task_of
from manyheads.theory.dmft import Network, Problem
from manyheads.theory.papers import BORDELON
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
EXPONENTS = {1.0: "logit exponent 1", 0.5: "logit exponent 1/2"}
BY_EXPONENT = {1.0: "limits", 0.5: "half-logit"}  # names of parametrizations
# Derived: descent keeps the exponent, and Adam's first steps move each head in its own direction.
KNOWN = {("sgd", 1.0): "holds", ("sgd", 0.5): "holds", ("adam", 1.0): "refuted"}
CAPTION = -2  # exponent of N in the caption of figure 2b
GAUSSIAN = 0.01  # of probability: an excess kurtosis of 0.93
MOVES = 0.23  # how far two per cent of a std move probabilities, over two per cent
NAMES = {
    "variance_start": "variance of the logits over heads before training",
    "variance_end": "variance of the logits over heads after training",
    "variance_without": "the same from the theory without responses",
    "mean": "mean of the pooled logits after training",
    "square": "mean square of the pooled logits after training",
    "update": "update of the attention logits",
    "below": "share of the pooled logits below a level",
}


class HeadDiversity(st.Study):
    """Variance of attention logits over heads against N, and their distribution, for both logit exponents.

    With gradient descent (``"gd"``, full batches) the limit of infinitely many heads is sampled at every N and compared
    with networks. In mild training the exponents of N are those of the init; `--richness 1.5` is strongly rich, where
    at these sizes they are not, and the solver predicts that. With ``"sgd"`` and ``"adam"`` transformers are trained on
    mini-batches, for which no limit is solved.

    Notes
    -----
    Before training the exponent is 1 - 2 alpha_A, exact in the first layer. Gradient descent adds to every head what
    the limit prescribes, which at alpha_A = 1 is the same for all, and fluctuations about it of relative size N^(-1/2):
    the exponent stays. At the init the gradient of a logit is of size N^(-1/2) and random in every head; Adam makes it
    of size one, and heads move in directions of their own by an amount that does not fall with N. So a refutation under
    Adam says that its heads are no copies; one under gradient descent, that sizes are too small for the update of the
    logits.
    """

    name = "limits/head-diversity"
    revision = 2
    claim = "The variance of logits over heads goes as 1/N at logit exponent 1, N^0 at 1/2"
    source = BORDELON.at("figures 2b and 3 and their captions, table 3; solution and exponents are derived here")
    predictions = 8

    task: str = st.setting("digits", "digits or text; with gradient descent four images or a few windows")
    optimizer: Literal["gd", "sgd", "adam"] = st.setting("gd", "gradient descent, or SGD and Adam on mini-batches")
    key_dims: tuple[int, ...] = st.setting(
        (), "key dimensions N; none for the optimizer's own, as 0 below", least=1, count=0, order="rising", small=(1, 2)
    )
    heads: int = st.setting(0, "number of heads H", least=0, small=4)
    depth: int = st.setting(0, "blocks", least=0, full=2)
    steps: int = st.setting(0, "steps of the training", least=0, small=2)
    learning_rate: float = st.setting(0.0, "its learning rate", least=0)
    base_key_dim: int = st.setting(8, "with mini-batches, N at which both logit exponents are one network")
    theory_key_dims: tuple[int, ...] = st.setting(
        (1, 32), "with gradient descent, as all below: further N of the limit", least=1, count=0, small=()
    )
    depth_exponent: float = st.setting(1.0, "exponent of the branch multiplier")
    norm: bool = st.setting(False, "whether streams are normalized")
    richness: float = st.setting(0.75, "richness of the training")
    momentum: float = st.setting(0.0, "its momentum")
    networks: int = st.setting(8, "networks of one replicate", least=3, small=3, full=16)
    oversampling: int = st.setting(3, "sampled heads over those that moments need", least=1, small=1, full=4)

    def check(self) -> None:
        if len(self.training.key_dims) < 2:
            raise st.UsageError(f"key_dims={self.key_dims}: expected two or more, or none")
        if self.training.heads < 2:
            raise st.UsageError(f"heads={self.heads}: a variance over heads needs two heads or more")
        if self._solved:
            self.problem()
            return
        own = ("theory_key_dims", "depth_exponent", "norm", "richness", "momentum", "networks", "oversampling")
        for each in fields(self):
            if each.name in own and getattr(self, each.name) != each.default:
                raise st.UsageError(f"{each.name} with optimizer={self.optimizer!r}: it belongs to 'gd'")
        Recipe(self.training.steps)
        task_of(self.task, 1)

    def cells(self) -> tuple[st.Cell, ...]:
        return st.grid(logit_exponent=tuple(EXPONENTS), key_dim=self.training.key_dims)

    def predict(self, key: st.Key) -> st.Record:
        """Return the exponents of N; with gradient descent, solve the limit at every N with heads of its own."""
        powers = [1 - 2 * exponent for exponent in EXPONENTS]
        found: dict[str, tuple[Any, ...]] = {
            "exponent": ("logit_exponent", powers, "exponent of N in the variance of logits over heads")
        }
        if not self._solved:
            return found
        cases = [(exponent, size) for exponent in EXPONENTS for size in self.sizes()]
        streams = st.generator(key).spawn(len(cases))
        solved = [self._solve(*case, stream) for case, stream in zip(cases, streams, strict=True)]
        for name in solved[0]:
            values = np.array([one[name] for one in solved])
            values = values.reshape(len(EXPONENTS), len(self.sizes()), *values.shape[1:])
            found[name] = (("logit_exponent", "key_dim", *("level",)[: values.ndim - 2]), values, NAMES[name])
        return found | {"key_dim": ("key_dim", list(self.sizes()), "key dimension")}

    def train(self, key: st.Key, logit_exponent: float, key_dim: int) -> st.Record:
        train = self._train if self._solved else self._train_transformer
        found = train(key, logit_exponent, key_dim)
        return {name: (("network", "level")[: value.ndim], value, NAMES[name]) for name, value in found.items()}

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        parts = {exponent: [data.sel(logit_exponent=exponent) for data in (theory, trained)] for exponent in EXPONENTS}
        for exponent, (limit, found) in parts.items():
            yield from self._exponents(exponent, limit, found)
        text = "The variance of attention logits over heads scales as N^-2 after training (caption of figure 2)"
        basis = "half way to N^-1, which is derived here"
        yield st.Claim(text, self._exponent("end", *parts[1.0]), st.near(CAPTION, 0.5), basis, expected="refuted")
        for exponent, (limit, found) in parts.items() if self._solved else ():
            for size in (self.training.key_dims[0], self.training.key_dims[-1]):
                yield from self._distributions(exponent, size, limit.sel(key_dim=size), found.sel(key_dim=size))
            yield self._growth(exponent, limit, found)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        if not self._solved:
            moved = {one: trained["update"].sel(logit_exponent=one).mean("network") for one in EXPONENTS}
            curves = {words: moved[one] for one, words in EXPONENTS.items()}
            labels = "Update of the attention logits", "key_dim", "root mean square"
            yield st.lines(*labels, curves, log="xy", x_label="key dimension N")
            return
        plots = {}
        for exponent, words in EXPONENTS.items():
            for size in self.training.key_dims:
                limit, found = (data.sel(logit_exponent=exponent, key_dim=size) for data in (theory, trained))
                plots[words, f"N={size}"] = {
                    "networks": found["below"],
                    "limit": limit["below"],
                    "Gaussian of their variance": xr.DataArray(_beside_gaussian(found)[1], dims="level"),
                }
        note = "Heads, samples and pairs of tokens together; bands range over replicates and over draws of the limit."
        yield densities("Logits of single heads after training", "logit over its std before training", plots, note)

    @property
    def training(self) -> Training:
        return Training(*(getattr(self, name) or own for name, own in OWN[self.optimizer]._asdict().items()))

    @property
    def _solved(self) -> bool:
        """Whether there is a limit."""
        return self.optimizer == "gd"

    def problem(self) -> Problem:
        _, _, depth, steps, learning_rate = self.training
        smaller = {"tests": 0} if self.task == "digits" else {}
        return mean_field.problem_of(self, depth=depth, steps=steps, learning_rate=learning_rate, **smaller)

    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({*self.training.key_dims, *self.theory_key_dims}))

    def _solve(self, exponent: float, size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        problem = self.problem()
        branches = mean_field.sampled_blocks(problem, size, exponent, oversampling=self.oversampling)
        again = copy.deepcopy(rng)  # both begin from the same heads, so that their noise is the same
        solved, heads = mean_field.solve_heads(problem, branches, rng)
        without = mean_field.solve_blocks(problem, branches, again, responses=False)
        ends = {"start": solved.observables[0], "end": solved.observables[-1], "without": without.observables[-1]}
        found = {f"variance_{when}": np.mean([one["logit_variance"] for one in every]) for when, every in ends.items()}
        pooled = pool_logits(heads[None], self._units(exponent, size))
        return found | {name: value[0] for name, value in pooled.items()}

    def _train(self, key: st.Key, exponent: float, size: int) -> dict[str, np.ndarray]:
        heads = self.training.heads
        network = Network(size, heads, exponent)
        trained = mean_field.train_ensemble(self.problem(), network, key, self.networks, every_head=True)
        share = heads / (heads - 1)  # H heads vary about their own mean by 1 - 1/H as much
        found = {name: share * trained[name][1] for name in ("variance_start", "variance_end")}
        return found | pool_logits(trained["head_logits"][1], self._units(exponent, size))

    def _train_transformer(self, key: st.Key, exponent: float, size: int) -> dict[str, np.ndarray]:
        _, heads, depth, steps, learning_rate = self.training
        base = Shape(self.base_key_dim, heads, depth)
        parametrization = parametrization_of(BY_EXPONENT[exponent], base, "adam" if self.optimizer == "adam" else "sgd")
        task = task_of(self.task, BATCHES[self.optimizer][self.task])
        shape = replace(base, key_dim=size)
        wanted = ("logits", "head_variance_start", "head_variance")
        found = measure_updates(task, parametrization, shape, Recipe(), learning_rate, (steps,), key, fields=wanted)
        ends = {"variance_start": found.head_variance_start[None], "variance_end": found.head_variance}
        return ends | {"update": found.logits}

    def _units(self, exponent: float, size: int) -> np.ndarray:
        """Exact std over heads of every logit in the first layer before training, (sample, token, token_too)."""
        problem = self.problem()
        lengths = np.diag(problem.gram).reshape(problem.samples, problem.tokens) ** 0.5
        if self.norm:
            lengths = np.ones_like(lengths)
        return size ** (0.5 - exponent) * lengths[:, :, None] * lengths[:, None, :]

    def _exponent(self, when: str, limit: st.Data, found: st.Data) -> st.Figure:
        name = f"variance_{when}"
        return st.exponent(found[name].mean("network"), "key_dim", "N", predicted=limit.get(name))

    def _exponents(self, exponent: float, limit: st.Data, found: st.Data) -> st.Claims:
        sizes, words, power = self.training.key_dims, EXPONENTS[exponent], limit["exponent"].mean()
        text = f"{words}: before training the variance of attention logits over heads scales as N^{1 - 2 * exponent:g}"
        basis = "exact in the first layer; corrections of relative size 1/(N H) above it"
        yield st.Claim(text, self._exponent("start", limit, found), st.near(power, 0.1), basis)
        bias = -2 * finite_size_bias(sizes)
        training = f"gradient descent at richness {self.richness:g}"
        if not self._solved:
            training = f"{self.training.steps} steps of {OPTIMIZERS[self.optimizer]}"
        yield st.Claim(
            f"{words}: after {training} the variance of attention logits over heads scales as N^{1 - 2 * exponent:g}",
            self._exponent("end", limit, found),
            st.near(power, bias),
            f"a correction 1 + N^(-1/2) of the std moves that of its square by {bias:.2f} over these sizes",
            expected=KNOWN.get((self.optimizer, exponent), "holds"),
            derived=(self.optimizer, exponent) in KNOWN,
        )
        if self._solved:
            theirs = limit.sel(key_dim=list(sizes))
            change, wanted = (
                st.slope(st.log(after), "key_dim", np.log(sizes)) - st.slope(st.log(before), "key_dim", np.log(sizes))
                for before, after in (
                    (found["variance_start"].mean("network"), found["variance_end"].mean("network")),
                    (theirs["variance_start"], theirs["variance_end"]),
                )
            )
            yield st.Claim(
                f"{words}: training changes the exponent of N in the variance over heads as the mean-field solution "
                "predicts",
                change,
                st.near(wanted.mean(), 5 / self.training.heads / math.log(sizes[-1] / sizes[0])),
                "2.5 / H at either end: corrections of relative size 1/H to what training adds",
                "change of the exponent of N",
                prediction_error=float(wanted.std(ddof=1)) / math.sqrt(wanted.size),
                prediction_dof=wanted.size - 1,
            )

    def _distributions(self, exponent: float, size: int, limit: st.Data, found: st.Data) -> st.Claims:
        rich = exponent == 1 and self.richness > 1  # at exponent 1/2 the initial std stays the larger part
        shares, gaussian = _beside_gaussian(found)
        draws = limit["below"].transpose("prediction", "level").values
        where = f"{EXPONENTS[exponent]}, N={size}: the distribution of the logits of single heads is"
        yield st.Claim(
            f"{where} that of the mean-field limit",
            st.Root.of(squared_distance(found["below"].values.reshape(-1, len(LEVELS)), draws), self.networks),
            st.near(0, (math.inf, MOVES * 1.28 / self.training.heads)),
            "root mean square over levels: a mean and a std that are each off by 1.28 / H stds move probabilities by "
            "0.23 times as much",
            "distance of the means",
        )
        yield st.Claim(
            f"{where} a Gaussian of their variance",
            st.Root.of(squared_distance(shares, gaussian[None]), self.networks),
            st.near(0, (math.inf, GAUSSIAN)),
            "one per cent: excess kurtosis 6/N of a product of N pairs moves probabilities by 0.064/N, as long as "
            "features have not moved by their own size",
            "distance of the means",
            "holds" if 0.064 / size < GAUSSIAN and not rich else "refuted",
        )

    def _growth(self, exponent: float, limit: st.Data, found: st.Data) -> st.Claim:
        """Test the growth of the variance at the largest N; the error of the draws by the jackknife."""
        size = self.training.key_dims[-1]  # where training adds most; corrections are of size 1/H at any N
        here = found.sel(key_dim=size)
        grown = st.log(here["variance_end"] / here["variance_start"]).mean("network")
        variances = (limit[f"variance_{when}"].sel(key_dim=size) for when in ("start", "end", "without"))
        start, end, without = map(st.log, variances)

        def between(draws: np.ndarray) -> xr.DataArray:
            low, high = ((each - start).isel(prediction=draws).mean() for each in (without, end))
            return (grown - low) / (high - low)

        draws = np.arange(start.sizes["prediction"])
        rest = [float(between(np.delete(draws, one)).mean()) for one in draws]
        return st.Claim(
            f"{EXPONENTS[exponent]}, N={size}: training increases the variance over heads as in the limit (0: without "
            "response functions, 1: limit)",
            between(draws),
            st.near(1, 0.5),
            "at 1/2 the theory without responses is as near as the whole; error of the draws by the jackknife",
            "log growth of the variance (0 without responses, 1 in the limit)",
            prediction_error=math.sqrt(len(draws) - 1) * float(np.std(rest)),
            prediction_dof=len(draws) - 1,
        )


def _beside_gaussian(found: st.Data) -> tuple[np.ndarray, np.ndarray]:
    """Return shares of networks of one size and of the Gaussian of their mean and variance, to be compared."""
    mean, square = (found[name].values.ravel() for name in ("mean", "square"))
    return hold_against_gaussian(found["below"].values.reshape(-1, len(LEVELS)), mean, square)
