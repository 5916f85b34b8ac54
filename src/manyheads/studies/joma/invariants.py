"""`joma/invariants`: conserved quantities of theorem 1 under gradient flow, weight decay and gradient descent.

One layer is trained on random labels of random contexts behind a fixed upper layer. Equalities are tested to rounding;
forms that are not equalities, the quantity of a single query among several and the softmax form on ordinary contexts,
are refuted with the size of their error.
"""

import itertools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.theory.joma.systems.gradient_flow import FixedSteps, FlowTrajectory, gradient_descent, gradient_flow
from manyheads.theory.joma.systems.layer import attend, draw_parameters, draw_upper, token_weights
from manyheads.theory.joma.task import Attention, JomaTask, Sizes, UpdateRule, draw_joma_task
from manyheads.theory.joma.theorems import invariants as theorem
from manyheads.theory.papers import TIAN

DIAGONAL = ("linear", "exp")  # attention whose derivative in the logits is diagonal
DRIFTING = "gelu"  # activation of the cells with descent and decay
SMOOTH_LIMIT, KINK_LIMIT, INTEGRAL_LIMIT = 1e-10, 1e-4, 1e-4
STATES = {
    "state_logits": "logits under softmax attention",
    "state_squares": "squares of token weights, summed over neurons",
    "state_attention": "attention, mean over contexts",
}
FIGURES = {  # of the forms of theorem 1 for softmax attention: a method of the relation, and the form
    "moving mean: error": ("relative_error", "moving_mean"),
    "fixed mean: error": ("relative_error", "fixed_mean"),
    "its correlation": ("correlation", "fixed_mean"),
    "squares alone": ("correlation", "squares"),
}
UNRELATED = 0.708  # 99% quantile of the absolute correlation of twelve independent pairs


class Invariants(st.Study):
    """Drift of the quantities that theorem 1 conserves, and error of its softmax form."""

    name = "joma/invariants"
    claim = "Gradient flow conserves z^2 - |v|^2 (linear) and z - |v|^2/2 (exp attention)"
    source = TIAN.at("theorem 1; the sum over queries, the law under decay and the exact softmax form are derived here")
    revision = 2
    # Not vectorized: one program per attention and activation serves all cells and replicates, while a vectorized study
    # compiles one per cell, which takes longer than running them.
    activations: tuple[str, ...] = st.setting(
        ("identity", "gelu", "relu"), "gelu among them", small=("gelu",), full=("identity", "gelu", "square", "relu")
    )
    tokens: int = st.setting(12, "tokens", least=1, small=3)
    queries: int = st.setting(3, "the larger of two numbers of queries, the other is one", least=2, small=2)
    contexts: int = st.setting(40, "the larger of two numbers of contexts, the other is one", least=2, small=4)
    neurons: int = st.setting(24, "hidden neurons", least=1, small=2)
    horizon: float = st.setting(40.0, "end time", above=0, small=2.0)
    step: float = st.setting(0.02, "step length", above=0, small=0.25, full=0.01)
    # Every step: splines through fewer have relative errors of 1e-4 at the kinks of a ReLU.
    records: int = st.setting(2000, "number of states kept", least=3, small=8)
    learning_rates: tuple[float, ...] = st.setting(
        (0.4, 0.2, 0.1, 0.05, 0.025), "of gradient descent, over the same horizon", above=0, count=2, small=(0.2, 0.1)
    )
    weight_decay: float = st.setting(0.02, "of the flow with weight decay", least=0)

    def check(self) -> None:
        if DRIFTING not in self.activations:
            raise st.UsageError(f"activations={self.activations}: expected {DRIFTING} among the activations")

    def cells(self) -> tuple[st.Cell, ...]:
        """Return linear and exp attention with one and several queries, softmax with one context and with many."""
        activations, several = self.activations, (self.contexts,)
        diagonal = st.grid(attention=DIAGONAL, activation=activations, queries=(1, self.queries), contexts=several)
        return diagonal + st.grid(attention=("softmax",), activation=activations, queries=(1,), contexts=(1, *several))

    def predict(self, key: st.Key) -> st.Record:
        return {
            "drift": ((), 0.0, "drift of the conserved quantity"),
            "order": ((), 1.0, "order of the drift in the learning rate"),
        }

    def train(self, key: st.Key, attention: Attention, activation: str, queries: int, contexts: int) -> st.Record:
        rule = UpdateRule(attention, activation)
        problem = self._problem(rule, key, queries, contexts)
        path = gradient_flow(*problem, rule, self._steps())
        weights, logits = token_weights(problem[1], path.network.weights), path.network.logits
        alone = theorem.per_query_quantity(rule, logits, weights)
        squares = (weights**2).sum(-1)  # (S, M)
        square_change = _largest(squares - squares[:1]) / (1 if attention == "linear" else 2)
        # The terms of the softmax form; NaN for other attention.
        states: list[Any] = [np.full(squares.shape, np.nan)] * len(STATES)
        if attention == "softmax":
            mean = np.asarray(attend(rule, jnp.asarray(logits[:, :1]), jnp.asarray(problem[1].contexts)).mean(1))
            states = [logits[:, 0], squares, mean]
        descent, decay = np.full(len(self.learning_rates), np.nan), np.nan
        if attention != "softmax" and activation == DRIFTING and queries == 1:
            steps = [FixedSteps(rate, round(self.horizon / rate), 1) for rate in self.learning_rates]
            paths = [gradient_descent(*problem, rule, each) for each in steps]
            descent, decay = np.stack([_drift(rule, problem[1], each) for each in paths]), self._decay(problem, rule)
        return {
            "time": ("time", np.linspace(0, self.horizon, self.records + 1), "time"),
            "token": ("token", np.arange(self.tokens), "token"),
            "learning_rate": ("learning_rate", np.asarray(self.learning_rates), "learning rate"),
            "drift": ((), _drift(rule, problem[1], path), "largest drift of the conserved quantity"),
            "per_query_drift": ((), _largest(alone - alone[:1]), "largest drift of the quantity of one query alone"),
            "logit_change": ((), _largest(logits - logits[:1]), "largest change of a logit"),
            "square_change": ((), square_change, "largest change of the squared weights in the quantity"),
            "loss_decrease": ((), path.losses[0] - path.losses[-1], "decrease of the loss", "nat"),
            "descent_drift": ("learning_rate", descent, "drift under gradient descent"),
            "decay_error": ((), decay, "largest distance from exponential decay"),
            **{name: (("time", "token"), states.pop(0), text) for name, text in STATES.items()},
        }

    def _problem(self, rule: UpdateRule, key: st.Key, queries: int, contexts: int) -> tuple[Any, JomaTask, Any]:
        """Draw a problem in arrays of one size: a single query stands in all contexts, a single context is repeated."""
        sizes = Sizes(self.tokens, self.queries, self.contexts, neurons=self.neurons, width=self.tokens + self.queries)
        for_setting, for_network, for_upper = st.generator(key).spawn(3)
        drawn = draw_joma_task(sizes, for_setting)
        rows = np.zeros(self.contexts, int) if contexts == 1 else np.arange(self.contexts)
        query_tokens = drawn.queries if queries > 1 else np.zeros(self.contexts, int)
        frame = drawn.token_embeddings, drawn.query_embeddings
        task = JomaTask(drawn.contexts[rows], query_tokens, drawn.labels[rows], *frame)
        return draw_parameters(sizes, rule, for_network), task, draw_upper(sizes, for_upper)

    def _steps(self) -> FixedSteps:
        return FixedSteps.until(self.horizon, self.step, self.records)

    def _decay(self, problem: tuple[Any, JomaTask, Any], rule: UpdateRule) -> float:
        path = gradient_flow(*problem, replace(rule, weight_decay=self.weight_decay), self._steps())
        weights = token_weights(problem[1], path.network.weights)
        # The library has no law for exp attention: its quantity is compared with the law of linear attention.
        relation = theorem.conserved_quantity(rule, path.network.logits, weights)
        law = theorem.decayed_quantity(UpdateRule("linear", weight_decay=self.weight_decay), relation[0], path.times)
        return _largest(relation - law)

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        none, relative = float(theory["drift"]), "relative drift"
        diagonal = trained.sel(attention=list(DIAGONAL), contexts=self.contexts)
        yield st.Claim(
            "Gradient flow conserves sum_q z_q^2 - |v|^2 (linear attention) and sum_q z_q - |v|^2/2 (exp "
            "attention) for smooth activations",
            diagonal["drift"].sel(activation=[name for name in self.activations if name != "relu"]).max(),
            st.near(none, SMOOTH_LIMIT),
            "an equality: rounding, and the fourth power of the step, leave less",
            relative,
        )
        several = diagonal.sel(queries=self.queries)
        text = "Each of several queries with shared weights conserves its own quantity"
        figure = (several["per_query_drift"] / several["square_change"]).min(("attention", "activation"))
        basis = "a tenth of the change of the squared weights, in the cell of the smallest drift"
        yield st.Claim(text, figure, st.near(none, 0.1), basis, relative, "refuted", resolution=SMOOTH_LIMIT)
        if "relu" in self.activations:
            yield st.Claim(
                "With ReLU the quantity is conserved up to the error of fixed steps at the kinks",
                diagonal["drift"].sel(activation="relu").max(),
                st.near(none, KINK_LIMIT),
                "the error of a step over a kink is a multiple of its square",
                relative,
            )
        drifting = diagonal.sel(activation=DRIFTING, queries=1, drop=True).drop_vars("contexts")
        for attention in DIAGONAL:
            drift = drifting["descent_drift"].sel(attention=attention).clip(1e-300)
            yield st.Claim(
                f"The drift under gradient descent is proportional to the learning rate ({attention} attention)",
                st.exponent(drift, "learning_rate", "the learning rate"),
                st.near(theory["order"], 0.05),
                "order one; the next order changes the slope by a multiple of the learning rate",
            )
        decay = "Under weight decay lambda the conserved quantity of {} attention decays as exp(-2 lambda t)"
        linear, exp = (drifting["decay_error"].sel(attention=name) for name in DIAGONAL)
        basis = "an equality: both sides are quadratic and shrink together"
        yield st.Claim(decay.format("linear"), linear.max(), st.near(none, SMOOTH_LIMIT), basis, relative)
        text, region, refuted = decay.format("exp"), st.near(none, 0.01), "refuted"
        basis = "one side is linear and shrinks at half the rate of the other; logits are of size 0.2"
        yield st.Claim(text, exp, region, basis, relative, refuted, resolution=SMOOTH_LIMIT)
        yield from self._softmax(none, trained.sel(attention="softmax", queries=1))

    def _softmax(self, none: float, trained: st.Data) -> st.Claims:
        text = "Softmax attention conserves the sum of the logits of each query"
        basis = "an equality: attention is invariant under a shift of all logits"
        yield st.Claim(text, trained["drift"].max(), st.near(none, SMOOTH_LIMIT), basis, "relative drift")
        forms, many = _forms(trained), {"figure": "fixed mean: error", "contexts": self.contexts}
        yield st.Claim(
            "With a single context and a moving mean attention, theorem 1 is exact for softmax attention",
            forms.sel(figure="moving mean: error", contexts=1).max(),
            st.near(none, INTEGRAL_LIMIT),
            "an equality up to the splines of the integral, whose error is of order two at a kink",
            "relative error",
        )
        text = "With many contexts theorem 1 gives the change of the logits of softmax attention"
        figure = forms.sel(many).mean("activation")
        basis = "a tenth of the change"
        quantity = "relative error"
        yield st.Claim(text, figure, st.near(none, 0.1), basis, quantity, "refuted", resolution=INTEGRAL_LIMIT)
        yield st.Claim(
            "With many contexts theorem 1 gives the direction of the change of the logits of softmax attention",
            forms.sel(many | {"figure": "its correlation"}).mean("activation"),
            st.near(1, (1 - UNRELATED, np.inf)),
            f"a correlation over tokens above {UNRELATED}, the 99% quantile for independent vectors of twelve numbers",
            "correlation over tokens",
            bounds=(-1.0, 1.0),
            resolution=INTEGRAL_LIMIT,
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        softmax = trained.sel(attention="softmax", queries=1)
        logit, law = dict[str, xr.DataArray](), dict[str, xr.DataArray]()
        for contexts in (1, self.contexts):
            part = softmax.sel(contexts=contexts, activation=DRIFTING).isel(replicate=0)
            form = _relation(part["time"].values, *(part[name].values for name in STATES))
            token, every = int(np.abs(form.change[-1]).argmax()), max(1, len(form.change) // 20)
            for curves, values in ((logit, form.change), (law, form.fixed_mean)):
                at = xr.DataArray(values[::every, token], {"time": part["time"][::every]}, dims="time")
                curves[f"{contexts} context{'s' * (contexts > 1)}"] = at
        title = f"Softmax attention, {DRIFTING}: change of one logit"
        note = "Token of the largest change, first replicate. Dashed: theorem 1 with the initial mean attention."
        yield st.lines(title, "time", "change since the start", logit, law, note=note)
        forms, rows = _forms(softmax), []
        for contexts, activation in itertools.product((1, self.contexts), self.activations):
            here = forms.sel(contexts=contexts, activation=activation)
            figures = {name: _extent(here.sel(figure=name).values) for name in FIGURES}
            rows.append({"contexts": str(contexts), "activation": activation} | figures)
        note = "Squares alone: correlation without the mean-attention term. Median and range over replicates."
        yield st.table("Theorem 1 for softmax attention: relative errors, correlations over tokens", rows, note)


def _forms(softmax: st.Data) -> xr.DataArray:
    """Return errors and correlations of the forms of theorem 1 at the end."""

    def figures(*states: np.ndarray) -> np.ndarray:
        form = _relation(softmax["time"].values, *states)
        return np.array([getattr(form, measure)(name) for measure, name in FIGURES.values()])

    states, dims = [softmax[name] for name in STATES], [["time", "token"]] * len(STATES)
    found = xr.apply_ufunc(figures, *states, input_core_dims=dims, output_core_dims=[["figure"]], vectorize=True)
    return found.assign_coords(figure=list(FIGURES))


def _relation(times: np.ndarray, logits: np.ndarray, squares: np.ndarray, mean: np.ndarray) -> theorem.SoftmaxRelation:
    """Compute theorem 1 along one trajectory; only sums over neurons enter, so one neuron with their root suffices."""
    weights = np.sqrt(np.abs(squares))[..., None]
    return theorem.softmax_relation(UpdateRule("softmax"), times, logits[:, None], weights, mean)


def _extent(values: np.ndarray) -> str:
    low, middle, high = np.quantile(values, [0, 0.5, 1])
    return f"{middle:.2g} ({low:.2g} to {high:.2g})"


def _drift(rule: UpdateRule, task: JomaTask, path: FlowTrajectory) -> float:
    weights = token_weights(task, path.network.weights)
    return _largest(theorem.drift(rule, path.times, path.network.logits, weights))


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max())
