"""`joma/attention-functions`: which attention functions conserve a relation of logits and weights.

The class is derived in `manyheads.theory.joma.theorems.attention_functions`. Two members beyond the paper's, and
normalized attention, are tested by gradient flow and in networks trained on mini-batches together with the matrix above
them.
"""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.theory.joma.systems.gradient_flow import FixedSteps, gradient_flow
from manyheads.theory.joma.systems.layer import LayerParameters, draw_parameters, draw_upper, token_weights, train_layer
from manyheads.theory.joma.task import ATTENTIONS, Attention, JomaTask, Sizes, UpdateRule, draw_joma_task
from manyheads.theory.joma.theorems.attention_functions import count_invariants
from manyheads.theory.joma.theorems.invariants import NORMALIZED, conserved_quantity, logit_side
from manyheads.theory.papers import TIAN

NEW = ("sigmoid", "square")  # members of the class that the paper does not have
ELEMENTWISE = tuple(name for name in ATTENTIONS if name not in NORMALIZED)
EXACT = 1e-10


class AttentionFunctions(st.Study):
    """Conserved quantities of attention with other functions of the logits, and how many there are."""

    name = "joma/attention-functions"
    claim = "Attention f(z)x conserves F(z) - |v|^2/2 with F' = f/f'; normalized, no weights"
    source = TIAN.at("theorem 1; other functions and the count are derived here")
    grid = {"attention": ATTENTIONS, "residual": (True, False)}

    tokens: int = st.setting(12, "tokens", least=1, small=3, full=32)
    contexts: int = st.setting(40, "contexts", least=1, small=4, full=200)
    neurons: int = st.setting(24, "hidden neurons", least=1, small=2)
    horizon: float = st.setting(40.0, "end time of flow and training", above=0, small=2.0)
    step: float = st.setting(0.05, "step of the flow", above=0, small=0.25)
    records: int = st.setting(20, "number of states kept", least=1, small=2)
    learning_rates: tuple[float, ...] = st.setting((0.2, 0.1, 0.05, 0.025), "SGD", above=0, count=2, small=(0.2, 0.1))
    adam: float = st.setting(0.003, "learning rate of Adam", above=0)
    batch: int = st.setting(8, "samples of an update", least=1, small=2)
    # It has one neuron, and a context more than tokens.
    counted: int = st.setting(3, "tokens where the conserved quantities are counted", least=2, most=12, small=2, full=4)

    def predict(self, key: st.Key) -> st.Record:
        counts = [1.0 if name in NORMALIZED else float(self.counted) for name in ATTENTIONS]
        return {
            "drift": ((), 0.0, "drift of the conserved quantity"),
            "order": ((), 1.0, "order of the drift in the learning rate"),
            "count": ("attention", counts, "number of conserved quantities"),
        }

    def train(self, key: st.Key, attention: Attention, residual: bool) -> st.Record:
        rule, streams = UpdateRule(attention, "gelu"), st.generator(key).spawn(5)
        sizes = Sizes(self.tokens, 1, self.contexts, neurons=self.neurons, width=self.tokens + 1)
        task = draw_joma_task(sizes, streams[0])
        if not residual:
            task = eqx.tree_at(lambda t: t.query_embeddings, task, np.zeros_like(task.query_embeddings))
        problem = draw_parameters(sizes, rule, streams[1]), task, draw_upper(sizes, streams[2])
        path = gradient_flow(*problem, rule, FixedSteps.until(self.horizon, self.step, self.records)).network
        exp_drift = _relative(UpdateRule("exp"), task, path)
        # Counted once, in the cell with the residual stream.
        count = float(count_invariants(rule, self.counted, self.counted + 1, 1, streams[4])) if residual else np.nan
        return {
            "learning_rate": ("learning_rate", np.asarray(self.learning_rates), "learning rate"),
            "drift": ((), _drift(rule, task, path), "largest drift under gradient flow"),
            "exp_drift": ((), exp_drift, "the relation of exp attention, over its change"),
            "change": ((), _change(rule, path), "largest change of the logits' side"),
            "count": ((), count, "number of conserved quantities"),
            **self._networks(rule, problem, int(streams[3].integers(2**31))),
        }

    def _networks(self, rule: UpdateRule, problem: Any, seed: int) -> st.Record:
        """Train the new attention functions by SGD at every rate and by Adam; NaN for the others."""
        drifts, relatives, decrease = [np.nan] * len(self.learning_rates), [np.nan] * 2, np.nan
        if rule.attention in NEW:
            steps = [round(self.horizon / rate) for rate in self.learning_rates]
            trained = [
                train_layer(problem, rule, "sgd", rate, count, self.batch, seed)
                for rate, count in zip(self.learning_rates, steps, strict=True)
            ]
            adam = train_layer(problem, rule, "adam", self.adam, max(steps), self.batch, seed)
            pairs = [jax.tree.map(lambda a, b: np.stack([a, b]), problem[0], end) for end, _ in (*trained, adam)]
            drifts = [_drift(rule, problem[1], pair) for pair in pairs[:-1]]
            relatives = [_relative(rule, problem[1], pair) for pair in pairs[-2:]]
            decrease = float(trained[-1][1])
        return {
            "sgd_drift": ("learning_rate", drifts, "largest drift under SGD"),
            "sgd_relative": ((), relatives[0], "drift under SGD at the smallest rate, over the change"),
            "adam_relative": ((), relatives[1], "drift under Adam, over the change"),
            "sgd_decrease": ((), decrease, "decrease of the loss under SGD at the smallest rate", "nat"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        new, normalized = (trained.sel(attention=list(names)) for names in (NEW, NORMALIZED))
        none, cells = float(theory["drift"]), ("attention", "residual")
        tenth = "a tenth of the change, mean over both functions, with and without residual"
        control: dict[str, Any] = {"quantity": "drift over the change of the logits' side", "expected": "refuted"}
        control |= {"resolution": EXACT, "bounds": (0.0, np.inf)}
        counts = st.near(0, 0.5), "whole numbers: the rank of the Lie algebra of the gradients at a random point"
        miscounted = abs(trained["count"] - theory["count"])
        mean_drift = xr.DataArray(np.exp(st.log(new["sgd_drift"].clip(1e-300)).mean(cells)))
        yield st.Claim(
            "Gradient flow conserves z + exp z - |v|^2/2 (sigmoid attention) and z^2/4 - |v|^2/2 (square), with "
            "and without the query in the residual stream",
            new["drift"].max(),
            st.near(none, EXACT),
            "an equality: rounding, and the fourth power of the step, leave less",
            "largest drift",
        )
        near = st.near(none, 0.1), tenth
        text = "Sigmoid and square attention conserve the relation z - |v|^2/2 of exp attention"
        yield st.Claim(text, new["exp_drift"].mean(cells), *near, **control)
        text = "Attention normalized by its sum conserves the sum of F over the tokens"
        basis = "an equality: attention is invariant when all f(z) grow by one factor"
        yield st.Claim(text, normalized["drift"].max(), st.near(none, EXACT), basis, "largest drift")
        text = "Attention by a function of each logit conserves one quantity per token and no other"
        quantity = "largest difference of numbers"
        yield st.Claim(text, miscounted.sel(attention=list(ELEMENTWISE)).max(), *counts, quantity)
        text = "Normalized attention conserves one quantity per query, without the weights, and no other"
        quantity = "largest difference of numbers"
        yield st.Claim(text, miscounted.sel(attention=list(NORMALIZED)).max(), *counts, quantity)
        yield st.Claim(
            "In networks trained by SGD, upper matrix included, the drift of sigmoid and square attention is "
            "proportional to the learning rate",
            st.exponent(mean_drift, "learning_rate", "the learning rate"),
            st.near(theory["order"], 0.1),
            "order one; batches add fluctuations of half an order at most over tokens",
        )
        for who, name, options in (
            ("SGD at the smallest rate", "sgd_relative", control | {"expected": "holds"}),
            ("Adam", "adam_relative", control),
        ):
            text = f"In networks trained by {who} the quantity is conserved to a tenth"
            yield st.Claim(text, new[name].mean(cells), *near, **options)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        drifts = {f"{name} attention": trained["sgd_drift"].sel(residual=True, attention=name) for name in NEW}
        title = "Drift of the conserved quantity in networks trained by SGD"
        what, note = f"drift at time {self.horizon:g}", "Largest over tokens; bands range over replicates."
        shows = ("proportional to the learning rate",)
        yield st.lines(title, "learning_rate", what, drifts, log="xy", note=note, shows=shows)


def _drift(rule: UpdateRule, task: JomaTask, states: LayerParameters) -> float:
    """Return the largest change of the conserved quantity since the start."""
    weights = token_weights(task, np.asarray(states.weights))
    relation = conserved_quantity(rule, np.asarray(states.logits), weights)
    return float(np.abs(relation - relation[:1]).max())


def _change(rule: UpdateRule, states: LayerParameters) -> float:
    side = logit_side(rule, np.asarray(states.logits))
    return float(np.abs(side - side[:1]).max())


def _relative(rule: UpdateRule, task: JomaTask, states: LayerParameters) -> float:
    return _drift(rule, task, states) / _change(rule, states)
