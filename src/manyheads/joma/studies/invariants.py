"""`joma/invariants`: what logits and weights keep while both follow the gradient, and where the relation is none.

One layer learns random labels from random contexts behind a fixed upper layer. Equalities are held to rounding, forms
that are no equalities to what they are: the relation of a single query among several, and the softmax form on ordinary
contexts, are refuted and reported with how far they fail.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.joma.source import SOURCE
from manyheads.joma.systems.gradient_flow import Path, Steps, descend, flow
from manyheads.joma.systems.layer import CrossEntropy, Network, attend, draw_network, draw_upper, token_weights
from manyheads.joma.task import Rule, Setting, Sizes, draw_setting
from manyheads.joma.theory.invariants import (
    SoftmaxForm,
    conserved,
    conserved_per_query,
    decayed,
    drift,
    softmax_form,
)
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Curve, Lines, Listing, Panel, Source, Study, Verdict, grid, spread_curve

SMOOTH_LIMIT, KINK_LIMIT, INTEGRAL_LIMIT = 1e-10, 1e-4, 1e-4
FORMS = ("integral", "constant", "squares")
UNRELATED = 0.708  # 99% point of the size of the correlation of twelve unrelated pairs
DRIFTING = "gelu"  # descent and decay are looked at with this activation


@dataclass(frozen=True)
class Invariants(Study):
    """Linear and exp attention conserve a relation exactly; softmax attention conserves its shape.

    Attributes
    ----------
    activations
        Of the hidden layer, gelu among them.
    tokens, queries, contexts, neurons
        Size of the task; `queries` is the larger of two numbers of queries, the other is one.
    horizon, step, records
        The flow's end, the length of a step, and how many states are kept.
    rates
        Learning rates of plain gradient descent, over the same horizon.
    decay
        Weight decay of the law under decay.
    """

    name: ClassVar[str] = "joma/invariants"
    claim: ClassVar[str] = "logits and weights keep a relation: exact for linear and exp attention, a shape for softmax"
    source: ClassVar[Source] = replace(
        SOURCE, locus="theorem 1; the sum over queries, the law under decay and the exact softmax form are derived here"
    )
    unread_prediction: ClassVar[str] = (
        "a conserved relation predicts zero and order one, which stand as targets in the claims"
    )
    # Not vectorised: one program for each attention and activation serves all cells and replicates, while a vectorised
    # study compiles one for every cell, which takes longer than to run them.
    activations: tuple[str, ...] = ("identity", "gelu", "relu")
    tokens: int = 12
    queries: int = 3
    contexts: int = 40
    neurons: int = 24
    horizon: float = 40.0
    step: float = 0.02
    records: int = 2000  # every step: splines through fewer err by 1e-4 of the movement at a ReLU's kinks
    rates: tuple[float, ...] = (0.4, 0.2, 0.1, 0.05, 0.025)
    decay: float = 0.02

    def __post_init__(self) -> None:
        if DRIFTING not in self.activations or self.queries < 2 or self.contexts < 2 or len(self.rates) < 2:
            raise UsageError(
                f"activations={self.activations}, queries={self.queries}, contexts={self.contexts}, rates={self.rates}:"
                f" {DRIFTING} must be an activation, and two or more are needed of each of the others"
            )

    @classmethod
    def full(cls) -> Invariants:
        """Return the study with steps half as long and one more activation."""
        return cls(activations=("identity", "gelu", "square", "relu"), step=0.01)

    def cells(self) -> tuple[Cell, ...]:
        """Return linear and exp attention with one and several queries, softmax with one context and with many."""
        diagonal = grid(
            attention=("linear", "exp"),
            activation=self.activations,
            queries=(1, self.queries),
            contexts=(self.contexts,),
        )
        normalised = grid(
            attention=("softmax",), activation=self.activations, queries=(1,), contexts=(1, self.contexts)
        )
        return diagonal + normalised

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return what each relation is to deviate by, and the order of its drift under descent."""
        zero = {"long_name": "departure from the conserved relation", "units": "1"}
        order = {"long_name": "order of the drift in the learning rate", "units": "1"}
        return xr.Dataset({"departure": ((), 0.0, zero), "order": ((), 1.0, order)})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Follow one layer, under flow, under flow with decay, and under descent at every rate."""
        rule = Rule(str(cell["attention"]), str(cell["activation"]))  # type: ignore[arg-type]
        task = self._task(rule, key, int(cell["queries"]), int(cell["contexts"]))
        setting = task[1]
        path = flow(*task, rule, Steps.until(self.horizon, self.step, self.records))
        weights, logits = token_weights(setting, path.network.weights), path.network.logits
        alone = conserved_per_query(rule, logits, weights)
        squares = (weights**2).sum(-1)  # (S, M)
        observed = {
            "departure": _largest(drift(rule, path.times, logits, weights)),
            "single": _largest(alone - alone[:1]),
            "moved": _largest(logits - logits[:1]),
            "grown": _largest(squares - squares[:1]) / (1 if rule.attention == "linear" else 2),
            "fall": path.losses[0] - path.losses[-1],
        }
        return xr.Dataset(
            {name: ((), value, ATTRIBUTES[name]) for name, value in observed.items()}
            | self._unsteady(task, rule, int(cell["queries"]))
            | self._states(rule, setting, path, squares),
            coords={
                "time": ("time", np.linspace(0, self.horizon, self.records + 1), {"long_name": "time"}),
                "token": ("token", np.arange(self.tokens), {"long_name": "token"}),
                "rate": ("rate", np.asarray(self.rates), {"long_name": "learning rate"}),
            },
        )

    def _task(self, rule: Rule, key: jax.Array, queries: int, contexts: int) -> tuple[Network, Setting, CrossEntropy]:
        """Draw a task in arrays of one size: a single query is one that all contexts ask, a single context repeated."""
        sizes = Sizes(self.tokens, self.queries, self.contexts, neurons=self.neurons, width=self.tokens + self.queries)
        for_setting, for_network, for_upper = np.random.default_rng(np.asarray(jax.random.key_data(key))).spawn(3)
        drawn = draw_setting(sizes, for_setting)
        rows = np.zeros(self.contexts, int) if contexts == 1 else np.arange(self.contexts)
        asked = drawn.queries if queries > 1 else np.zeros(self.contexts, int)
        frame = drawn.token_embeddings, drawn.query_embeddings
        setting = Setting(drawn.contexts[rows], asked, drawn.labels[rows], *frame)
        return draw_network(sizes, rule, for_network), setting, draw_upper(sizes, for_upper)

    def _unsteady(self, task: tuple[Network, Setting, CrossEntropy], rule: Rule, queries: int) -> dict[str, Any]:
        """Return the departures under descent and under decay; NaN in the cells where they are not looked at."""
        slips, withered = np.full(len(self.rates), np.nan), np.nan
        if rule.attention != "softmax" and rule.activation == DRIFTING and queries == 1:
            paths = [descend(*task, rule, Steps(rate, round(self.horizon / rate), 1)) for rate in self.rates]
            slips = np.stack([_departure(rule, task[1], path) for path in paths])
            falling = replace(rule, decay=self.decay)
            path = flow(*task, falling, Steps.until(self.horizon, self.step, self.records))
            # Exp attention has no law to ask the library for: its relation is held against linear attention's.
            relation = conserved(rule, path.network.logits, token_weights(task[1], path.network.weights))  # (S, M)
            law = decayed(Rule("linear", decay=self.decay), relation[0], path.times)
            withered = _largest(relation - law)
        return {
            "slip": ("rate", slips, ATTRIBUTES["slip"]),
            "withered": ((), withered, ATTRIBUTES["withered"]),
        }

    def _states(self, rule: Rule, setting: Setting, path: Path, squares: np.ndarray) -> dict[str, Any]:
        """Return what the softmax form is made of: logits, summed squares, mean attention; NaN for other attention."""
        states = dict.fromkeys(STATES, np.full(squares.shape, np.nan))
        if rule.attention == "softmax":
            logits = path.network.logits[:, 0]  # (S, M)
            mean = np.asarray(attend(rule, jnp.asarray(logits[:, None]), jnp.asarray(setting.contexts)).mean(1))
            states = {"logits": logits, "squares": squares, "attention": mean}
        return {f"state_{name}": (("time", "token"), value, STATES[name]) for name, value in states.items()}

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Hold equalities to rounding, forms that are none to a tenth, shapes to chance."""
        return (*self._equalities(trained), *self._unsteady_verdicts(trained), *self._softmax_verdicts(trained))

    def _equalities(self, trained: xr.Dataset) -> tuple[Verdict, ...]:
        diagonal = _where(trained, trained["attention"] != "softmax")
        smooth, kinked = (_where(diagonal, (diagonal["activation"] == "relu") == is_relu) for is_relu in (False, True))
        several = _where(diagonal, diagonal["queries"] > 1)
        share = (several["single"] / several["grown"]).min("cell").values
        verdicts = [
            Verdict.exact(
                "with linear and exp attention the relation, summed over queries, is conserved (smooth activations)",
                float(smooth["departure"].max()),
                target=0.0,
                tolerance=SMOOTH_LIMIT,
                basis="an equality: rounding, and the fourth power of the step, leave less",
            ),
            Verdict.from_samples(
                "every query keeps the relation by itself, although all share their weights",
                share,
                target=0.0,
                tolerance=0.1,
                expected="refuted",
                resolution=SMOOTH_LIMIT,
                basis="a tenth of the movement of the relation's other side, in the cell where it fails least",
            ),
        ]
        if kinked.sizes["cell"]:
            claim = "with a ReLU it is conserved up to what a fixed step makes of kinks"
            basis = "a step over a kink errs by a multiple of its square"
            figure = float(kinked["departure"].max())
            verdicts.append(Verdict.exact(claim, figure, target=0.0, tolerance=KINK_LIMIT, basis=basis))
        return tuple(verdicts)

    def _unsteady_verdicts(self, trained: xr.Dataset) -> tuple[Verdict, ...]:
        orders = {}
        for attention in ("linear", "exp"):
            slips = self._drifting(trained, attention)["slip"].values  # (replicates, rates)
            orders[attention] = fit_exponent(np.asarray(self.rates), np.maximum(slips, 1e-300))
        decay = "under weight decay the relation of {} attention decays like exp(-2 decay t)"
        withered = [self._drifting(trained, attention)["withered"].values for attention in ("linear", "exp")]
        return (
            *(
                Verdict.from_interval(
                    f"plain gradient descent drifts from it in proportion to the learning rate ({attention})",
                    fit.interval,
                    figure=fit.exponent,
                    target=1.0,
                    tolerance=0.05,
                    basis="order one; the next order changes the slope by a multiple of the rate",
                )
                for attention, fit in orders.items()
            ),
            Verdict.exact(
                decay.format("linear"),
                float(withered[0].max()),
                target=0.0,
                tolerance=SMOOTH_LIMIT,
                basis="an equality: both sides are quadratic and shrink together",
            ),
            Verdict.from_samples(
                decay.format("exp"),
                withered[1],
                target=0.0,
                tolerance=0.01,
                expected="refuted",
                resolution=SMOOTH_LIMIT,
                basis="one side is linear and shrinks at half the other's rate: logits are of size 0.2",
            ),
        )

    def _softmax_verdicts(self, trained: xr.Dataset) -> tuple[Verdict, ...]:
        softmax = _where(trained, trained["attention"] == "softmax")
        single, many = (self._forms(trained, contexts) for contexts in (1, self.contexts))
        exact = [form.relative_error("integral") for form in single.ravel()]
        errors = np.vectorize(lambda form: form.relative_error("constant"))(many)  # (activations, replicates)
        shapes = np.vectorize(lambda form: form.correlation("constant"))(many)
        return (
            Verdict.exact(
                "the sum of a query's logits is conserved under softmax attention",
                float(softmax["departure"].max()),
                target=0.0,
                tolerance=SMOOTH_LIMIT,
                basis="an equality: shifting all logits changes nothing",
            ),
            Verdict.exact(
                "with one context the softmax form, its mean attention moving, is exact",
                max(exact),
                target=0.0,
                tolerance=INTEGRAL_LIMIT,
                basis="an equality: left are the integral's splines, whose error is of order two at a kink",
            ),
            Verdict.from_samples(
                "with ordinary contexts the softmax form gives the logits' movement",
                errors.mean(0),
                target=0.0,
                tolerance=0.1,
                expected="refuted",
                resolution=INTEGRAL_LIMIT,
                basis="a tenth of the movement",
            ),
            Verdict.from_samples(
                "with ordinary contexts the softmax form has the shape of the logits' movement",
                shapes.mean(0),
                target=1.0,
                tolerance=(1 - UNRELATED, np.inf),
                resolution=INTEGRAL_LIMIT,
                basis=f"a correlation over tokens above {UNRELATED}, which one in a hundred unrelated pairs of vectors "
                "of twelve numbers reaches",
            ),
        )

    def _drifting(self, trained: xr.Dataset, attention: str) -> xr.Dataset:
        chosen = (trained["attention"] == attention) & (trained["activation"] == DRIFTING) & (trained["queries"] == 1)
        return _where(trained, chosen).isel(cell=0)

    def _forms(self, trained: xr.Dataset, contexts: int) -> np.ndarray:
        """Return the softmax form of every activation and replicate, objects (activations, replicates)."""
        chosen = _where(trained, (trained["attention"] == "softmax") & (trained["contexts"] == contexts))
        return np.array(
            [
                [_form(chosen.isel(cell=cell, replicate=replicate)) for replicate in range(chosen.sizes["replicate"])]
                for cell in range(chosen.sizes["cell"])
            ],
            dtype=object,
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show departures by cell, the drift by rate, and the softmax forms."""
        return (_table(trained), self._drift_panel(trained), self._movement(trained), self._softmax_table(trained))

    def _drift_panel(self, trained: xr.Dataset) -> Panel:
        curves = []
        for group, attention in enumerate(("linear", "exp")):
            slips = self._drifting(trained, attention)["slip"].values
            curves.append(spread_curve(self.rates, slips, f"{attention} attention", group=group))
            line = tuple(float(slips[:, 0].mean() * rate / self.rates[0]) for rate in self.rates)
            curves.append(Curve(self.rates, line, "" if group else "order one", "predicted", group))
        return Lines(
            "Plain gradient descent leaves the relation",
            "learning rate",
            f"departure at time {self.horizon:g}",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Bands reach over replicates. Dashed: in proportion to the rate, through the largest.",
        )

    def _movement(self, trained: xr.Dataset) -> Panel:
        """Show the token whose logit moves most, first replicate, one context and many, against both forms."""
        curves = []
        for group, contexts in enumerate((1, self.contexts)):
            form = self._forms(trained, contexts)[self.activations.index(DRIFTING), 0]
            token = int(np.abs(form.moved[-1]).argmax())
            times, name = tuple(map(float, trained["time"].values[::10])), f"{contexts} context{'s' * (contexts > 1)}"
            for array, label, role in ((form.moved, "logit", "trained"), (form.constant, "theorem", "predicted")):
                line = tuple(map(float, array[::10, token]))
                curves.append(Curve(times, line, f"{name}, {label}", role, group))  # type: ignore[arg-type]
        return Lines(
            f"Softmax attention, {DRIFTING}: movement of one logit",
            "time",
            "change since the start",
            tuple(curves),
            note="The token that moves most, first replicate. Dashed: theorem 1 with the mean attention of the start.",
        )

    def _softmax_table(self, trained: xr.Dataset) -> Panel:
        rows = []
        for contexts in (1, self.contexts):
            for activation, forms in zip(self.activations, self._forms(trained, contexts), strict=True):
                errors = {name: [form.relative_error(name) for form in forms] for name in FORMS}
                shapes = {name: [form.correlation(name) for form in forms] for name in ("constant", "squares")}
                cells = [f"{max(errors['integral']):.1g}", _extent(errors["constant"])]
                rows.append(
                    (f"{contexts}", activation, *cells, _extent(shapes["constant"]), _extent(shapes["squares"]))
                )
        columns = ("contexts", "activation", "moving mean: error", "fixed mean: error", "its shape", "squares alone")
        return Listing(
            "Theorem 1 for softmax attention",
            columns,
            tuple(rows),
            note="Errors over the movement, shapes as correlations over tokens; median and range over replicates, the "
            "largest in the first column. Squares alone: without the mean-attention term.",
        )


ATTRIBUTES = {
    "departure": {"long_name": "largest departure from the conserved relation", "units": "1"},
    "single": {"long_name": "largest departure from the relation of one query alone", "units": "1"},
    "moved": {"long_name": "largest movement of a logit", "units": "1"},
    "grown": {"long_name": "largest movement of the relation's other side", "units": "1"},
    "fall": {"long_name": "fall of the loss", "units": "nat"},
    "slip": {"long_name": "departure under gradient descent", "units": "1"},
    "withered": {"long_name": "largest departure from exponential decay", "units": "1"},
}
STATES = {
    "logits": {"long_name": "logits under softmax attention", "units": "1"},
    "squares": {"long_name": "squares of token weights, summed over neurons", "units": "1"},
    "attention": {"long_name": "attention, mean over contexts", "units": "1"},
}


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max())


def _departure(rule: Rule, setting: Setting, path: Path) -> float:
    weights = token_weights(setting, path.network.weights)
    return _largest(drift(rule, path.times, path.network.logits, weights))


def _where(data: xr.Dataset, chosen: xr.DataArray) -> xr.Dataset:
    return data.isel(cell=np.flatnonzero(chosen.values))


def _form(cell: xr.Dataset) -> SoftmaxForm:
    """Return theorem 1 along one path; only sums over neurons enter, so one neuron with their root stands for all."""
    rule = Rule("softmax", str(cell["activation"].item()))
    logits, weights = cell["state_logits"].values[:, None], np.sqrt(np.abs(cell["state_squares"].values))[..., None]
    return softmax_form(rule, cell["time"].values, logits, weights, cell["state_attention"].values)


def _table(trained: xr.Dataset) -> Panel:
    rows = []
    for number in range(trained.sizes["cell"]):
        cell = trained.isel(cell=number)
        several = int(cell["queries"]) > 1
        alone = _extent((cell["single"] / cell["grown"]).values) if several else ""
        rows.append(
            (
                *(str(cell[name].item()) for name in ("attention", "activation", "queries", "contexts")),
                f"{float(cell['departure'].max()):.1e}",
                _extent(cell["moved"].values),
                alone,
            )
        )
    return Listing(
        "What is conserved",
        ("attention", "activation", "queries", "contexts", "departure", "logits moved", "one query alone"),
        tuple(rows),
        note="Departure from the conserved relation (sum of the logits for softmax), the largest of all replicates, "
        "tokens and times. One query alone: departure over the movement of the other side. Median and range.",
    )


def _extent(values: Any) -> str:
    low, middle, high = np.quantile(np.asarray(values, float), [0, 0.5, 1])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
