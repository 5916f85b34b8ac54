"""`joma/invariants`: conserved quantities of theorem 1 under gradient flow, weight decay and gradient descent.

One layer is trained on random labels of random contexts behind a fixed upper layer. Equalities are tested to rounding;
forms that are not equalities, the quantity of a single query among several and the softmax form on ordinary contexts,
are refuted with the size of their error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.statistics import fit_exponent
from manyheads.studies.joma.invariant_panels import DRIFTING, drifting_cell, invariant_panels, softmax_relations
from manyheads.study import Cell, Claim, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel
from manyheads.study.tables import dataset, select_cells
from manyheads.theory.joma.systems.gradient_flow import FixedSteps, FlowTrajectory, gradient_descent, gradient_flow
from manyheads.theory.joma.systems.layer import (
    CrossEntropy,
    LayerParameters,
    attend,
    draw_parameters,
    draw_upper,
    token_weights,
)
from manyheads.theory.joma.task import JomaTask, Sizes, UpdateRule, draw_joma_task
from manyheads.theory.joma.theorems.invariants import (
    conserved_quantity,
    decayed_quantity,
    drift,
    per_query_quantity,
)
from manyheads.theory.papers import TIAN

DIAGONAL = ("linear", "exp")  # attention whose derivative in the logits is diagonal
SMOOTH_LIMIT, KINK_LIMIT, INTEGRAL_LIMIT = 1e-10, 1e-4, 1e-4
UNRELATED = 0.708  # 99% quantile of the absolute correlation of twelve independent pairs


@dataclass(frozen=True)
class Invariants(Study):
    """Drift of the quantities that theorem 1 conserves, and error of its softmax form.

    Attributes
    ----------
    activations
        Of the hidden layer, including gelu.
    tokens, queries, contexts, neurons
        Size of the task; `queries` is the larger of two numbers of queries, the other is one.
    horizon, step, records
        End time, step length, and number of states kept.
    learning_rates
        Of gradient descent, over the same horizon.
    weight_decay
        Of the flow with weight decay.
    """

    name: ClassVar[str] = "joma/invariants"
    claim: ClassVar[str] = "Gradient flow conserves z^2 - |v|^2 (linear) and z - |v|^2/2 (exp attention)"
    source: ClassVar[Source] = replace(
        TIAN,
        locus="theorem 1; the sum over queries, the law under decay and the exact softmax form are derived here",
    )
    revision: ClassVar[int] = 2
    # Not vectorized: one program per attention and activation serves all cells and replicates, while a vectorized study
    # compiles one per cell, which takes longer than running them.
    activations: tuple[str, ...] = ("identity", "gelu", "relu")
    tokens: int = 12
    queries: int = 3
    contexts: int = 40
    neurons: int = 24
    horizon: float = 40.0
    step: float = 0.02
    records: int = 2000  # every step: splines through fewer have relative errors of 1e-4 at the kinks of a ReLU
    learning_rates: tuple[float, ...] = (0.4, 0.2, 0.1, 0.05, 0.025)
    weight_decay: float = 0.02

    def __post_init__(self) -> None:
        if DRIFTING not in self.activations or self.queries < 2 or self.contexts < 2 or len(self.learning_rates) < 2:
            raise UsageError(
                f"activations={self.activations}, queries={self.queries}, contexts={self.contexts}, learning_rates="
                f"{self.learning_rates}: expected {DRIFTING} among the activations, and two or more of the others"
            )

    @classmethod
    def full(cls) -> Invariants:
        """Return the study with steps half as long and one more activation."""
        return cls(activations=("identity", "gelu", "square", "relu"), step=0.01)

    @classmethod
    def small(cls) -> Invariants:
        """Return the smallest configuration in which every claim can change."""
        return cls(
            activations=("gelu",),
            tokens=3,
            queries=2,
            contexts=4,
            neurons=2,
            horizon=2.0,
            step=0.25,
            records=8,
            learning_rates=(0.2, 0.1),
        )

    def cells(self) -> tuple[Cell, ...]:
        """Return linear and exp attention with one and several queries, softmax with one context and with many."""
        diagonal = grid(
            attention=DIAGONAL,
            activation=self.activations,
            queries=(1, self.queries),
            contexts=(self.contexts,),
        )
        normalized = grid(
            attention=("softmax",), activation=self.activations, queries=(1,), contexts=(1, self.contexts)
        )
        return diagonal + normalized

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the drift under gradient flow, zero, and its order in the learning rate under gradient descent."""
        return dataset(
            {
                "drift": ((), 0.0, "drift of the conserved quantity"),
                "order": ((), 1.0, "order of the drift in the learning rate"),
            }
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one layer by gradient flow, with weight decay, and by gradient descent at every learning rate."""
        rule = UpdateRule(str(cell["attention"]), str(cell["activation"]))  # type: ignore[arg-type]
        problem = self._problem(rule, key, int(cell["queries"]), int(cell["contexts"]))
        task = problem[1]
        path = gradient_flow(*problem, rule, FixedSteps.until(self.horizon, self.step, self.records))
        weights, logits = token_weights(task, path.network.weights), path.network.logits
        alone = per_query_quantity(rule, logits, weights)
        squares = (weights**2).sum(-1)  # (S, M)
        quadratic = 1 if rule.attention == "linear" else 2
        square_change = _largest(squares - squares[:1]) / quadratic
        descent_drift, decay_error = self._unsteady(problem, rule, int(cell["queries"]))
        largest, alone_drift = _largest(drift(rule, path.times, logits, weights)), _largest(alone - alone[:1])
        return dataset(
            {
                "drift": ((), largest, "largest drift of the conserved quantity"),
                "per_query_drift": ((), alone_drift, "largest drift of the quantity of one query alone"),
                "logit_change": ((), _largest(logits - logits[:1]), "largest change of a logit"),
                "square_change": ((), square_change, "largest change of the squared weights in the quantity"),
                "loss_decrease": ((), path.losses[0] - path.losses[-1], "decrease of the loss", "nat"),
                "descent_drift": ("learning_rate", descent_drift, "drift under gradient descent"),
                "decay_error": ((), decay_error, "largest distance from exponential decay"),
                **self._states(rule, task, path, squares),
            },
            coords={
                "time": (np.linspace(0, self.horizon, self.records + 1), "time"),
                "token": (np.arange(self.tokens), "token"),
                "learning_rate": (np.asarray(self.learning_rates), "learning rate"),
            },
        )

    def _problem(
        self, rule: UpdateRule, key: jax.Array, queries: int, contexts: int
    ) -> tuple[LayerParameters, JomaTask, CrossEntropy]:
        """Draw a problem in arrays of one size: a single query stands in all contexts, a single context is repeated."""
        sizes = Sizes(self.tokens, self.queries, self.contexts, neurons=self.neurons, width=self.tokens + self.queries)
        for_setting, for_network, for_upper = np.random.default_rng(np.asarray(jax.random.key_data(key))).spawn(3)
        drawn = draw_joma_task(sizes, for_setting)
        rows = np.zeros(self.contexts, int) if contexts == 1 else np.arange(self.contexts)
        query_tokens = drawn.queries if queries > 1 else np.zeros(self.contexts, int)
        frame = drawn.token_embeddings, drawn.query_embeddings
        task = JomaTask(drawn.contexts[rows], query_tokens, drawn.labels[rows], *frame)
        return draw_parameters(sizes, rule, for_network), task, draw_upper(sizes, for_upper)

    def _unsteady(
        self, problem: tuple[LayerParameters, JomaTask, CrossEntropy], rule: UpdateRule, queries: int
    ) -> tuple[np.ndarray, float]:
        """Measure the drift under descent and the error under decay; NaN in the cells that do without."""
        if rule.attention == "softmax" or rule.activation != DRIFTING or queries != 1:
            return np.full(len(self.learning_rates), np.nan), np.nan
        paths = [
            gradient_descent(*problem, rule, FixedSteps(rate, round(self.horizon / rate), 1))
            for rate in self.learning_rates
        ]
        drifts = np.stack([_drift(rule, problem[1], path) for path in paths])
        falling = replace(rule, weight_decay=self.weight_decay)
        path = gradient_flow(*problem, falling, FixedSteps.until(self.horizon, self.step, self.records))
        # The library has no law for exp attention: its quantity is compared with the law of linear attention.
        relation = conserved_quantity(rule, path.network.logits, token_weights(problem[1], path.network.weights))
        law = decayed_quantity(UpdateRule("linear", weight_decay=self.weight_decay), relation[0], path.times)
        return drifts, _largest(relation - law)

    def _states(self, rule: UpdateRule, task: JomaTask, path: FlowTrajectory, squares: np.ndarray) -> dict[str, Any]:
        """Return the terms of the softmax form: logits, summed squares, mean attention; NaN for other attention."""
        states: list[Any] = [np.full(squares.shape, np.nan)] * len(STATES)
        if rule.attention == "softmax":
            logits = path.network.logits[:, 0]  # (S, M)
            mean = np.asarray(attend(rule, jnp.asarray(logits[:, None]), jnp.asarray(task.contexts)).mean(1))
            states = [logits, squares, mean]
        return {
            name: (("time", "token"), value, text) for (name, text), value in zip(STATES.items(), states, strict=True)
        }

    def claims(self) -> tuple[Claim, ...]:
        """Test equalities to rounding, forms that are no equalities to a tenth, and shapes against chance."""
        return (*self._equalities(), *self._descent_and_decay(), *self._softmax())

    def _equalities(self) -> tuple[Claim, ...]:
        def drift(relu: bool) -> Measure:
            def largest(predicted: xr.Dataset, trained: xr.Dataset) -> float:
                kept = [name for name in self.activations if (name == "relu") == relu]
                return float(select_cells(trained, attention=DIAGONAL, activation=kept)["drift"].max())

            return largest

        def per_query(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            several = select_cells(trained, attention=DIAGONAL, queries=self.queries)
            return (several["per_query_drift"] / several["square_change"]).min("cell").values

        claims = [
            Claim(
                "Gradient flow conserves sum_q z_q^2 - |v|^2 (linear attention) and sum_q z_q - |v|^2/2 (exp "
                "attention) for smooth activations",
                drift(relu=False),
                quantity="relative drift",
                target=_no_drift,
                tolerance=SMOOTH_LIMIT,
                basis="an equality: rounding, and the fourth power of the step, leave less",
            ),
            Claim(
                "Each of several queries with shared weights conserves its own quantity",
                per_query,
                quantity="relative drift",
                target=_no_drift,
                tolerance=0.1,
                expected="refuted",
                resolution=SMOOTH_LIMIT,
                basis="a tenth of the change of the squared weights, in the cell of the smallest drift",
            ),
        ]
        if "relu" in self.activations:
            claims.append(
                Claim(
                    "With ReLU the quantity is conserved up to the error of fixed steps at the kinks",
                    drift(relu=True),
                    quantity="relative drift",
                    target=_no_drift,
                    tolerance=KINK_LIMIT,
                    basis="the error of a step over a kink is a multiple of its square",
                )
            )
        return tuple(claims)

    def _descent_and_decay(self) -> tuple[Claim, ...]:
        def order(attention: str) -> Measure:
            def fitted(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                drifts = drifting_cell(trained, attention)["descent_drift"].values  # (replicates, learning rates)
                fit = fit_exponent(np.asarray(self.learning_rates), np.maximum(drifts, 1e-300))
                return fit.exponent, fit.interval

            return fitted

        def decay_error(attention: str) -> Callable[[xr.Dataset], np.ndarray]:
            return lambda trained: drifting_cell(trained, attention)["decay_error"].values

        linear, exp = decay_error("linear"), decay_error("exp")
        decay = "Under weight decay lambda the conserved quantity of {} attention decays as exp(-2 lambda t)"
        return (
            *(
                Claim(
                    f"The drift under gradient descent is proportional to the learning rate ({attention} attention)",
                    order(attention),
                    quantity="exponent of the learning rate",
                    target=lambda predicted: float(predicted["order"]),
                    tolerance=0.05,
                    basis="order one; the next order changes the slope by a multiple of the learning rate",
                )
                for attention in DIAGONAL
            ),
            Claim(
                decay.format("linear"),
                lambda predicted, trained: float(linear(trained).max()),
                quantity="relative drift",
                target=_no_drift,
                tolerance=SMOOTH_LIMIT,
                basis="an equality: both sides are quadratic and shrink together",
            ),
            Claim(
                decay.format("exp"),
                lambda predicted, trained: exp(trained),
                quantity="relative drift",
                target=_no_drift,
                tolerance=0.01,
                expected="refuted",
                resolution=SMOOTH_LIMIT,
                basis="one side is linear and shrinks at half the rate of the other; logits are of size 0.2",
            ),
        )

    def _softmax(self) -> tuple[Claim, ...]:
        def sum_drift(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            return float(select_cells(trained, attention="softmax")["drift"].max())

        def single_context(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            return max(form.relative_error("moving_mean") for form in softmax_relations(trained, 1).ravel())

        def errors(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            forms = softmax_relations(trained, self.contexts)  # (activations, replicates)
            return np.vectorize(lambda form: form.relative_error("fixed_mean"))(forms).mean(0)

        def correlations(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            forms = softmax_relations(trained, self.contexts)
            return np.vectorize(lambda form: form.correlation("fixed_mean"))(forms).mean(0)

        return (
            Claim(
                "Softmax attention conserves the sum of the logits of each query",
                sum_drift,
                quantity="relative drift",
                target=_no_drift,
                tolerance=SMOOTH_LIMIT,
                basis="an equality: attention is invariant under a shift of all logits",
            ),
            Claim(
                "With a single context and a moving mean attention, theorem 1 is exact for softmax attention",
                single_context,
                quantity="relative error",
                target=_no_drift,
                tolerance=INTEGRAL_LIMIT,
                basis="an equality up to the splines of the integral, whose error is of order two at a kink",
            ),
            Claim(
                "With many contexts theorem 1 gives the change of the logits of softmax attention",
                errors,
                quantity="relative error",
                target=_no_drift,
                tolerance=0.1,
                expected="refuted",
                resolution=INTEGRAL_LIMIT,
                basis="a tenth of the change",
            ),
            Claim(
                "With many contexts theorem 1 gives the direction of the change of the logits of softmax attention",
                correlations,
                quantity="correlation over tokens",
                bounds=(-1.0, 1.0),
                target=1.0,
                tolerance=(1 - UNRELATED, np.inf),
                resolution=INTEGRAL_LIMIT,
                basis=f"a correlation over tokens above {UNRELATED}, the 99% quantile for independent vectors of "
                "twelve numbers",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the drift by cell and by learning rate, and theorem 1 for softmax attention."""
        return invariant_panels(trained)


STATES = {
    "state_logits": "logits under softmax attention",
    "state_squares": "squares of token weights, summed over neurons",
    "state_attention": "attention, mean over contexts",
}


def _no_drift(predicted: xr.Dataset) -> float:
    return float(predicted["drift"])


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max())


def _drift(rule: UpdateRule, task: JomaTask, path: FlowTrajectory) -> float:
    weights = token_weights(task, path.network.weights)
    return _largest(drift(rule, path.times, path.network.logits, weights))
