"""`joma/attention-functions`: which attention functions conserve a relation of logits and weights.

The class is derived in `manyheads.theory.joma.theorems.attention_functions`. Two members beyond the paper's, and
normalized attention, are tested by gradient flow and in networks trained on mini-batches together with the matrix above
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Listing, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Lines, Panel, spread_curve
from manyheads.study.tables import dataset, select_cell, select_cells
from manyheads.theory.joma.systems.gradient_flow import FixedSteps, gradient_flow
from manyheads.theory.joma.systems.layer import LayerParameters, draw_parameters, draw_upper, token_weights, train_layer
from manyheads.theory.joma.task import ATTENTIONS, JomaTask, Sizes, UpdateRule, draw_joma_task
from manyheads.theory.joma.theorems.attention_functions import count_invariants
from manyheads.theory.joma.theorems.invariants import NORMALIZED, conserved_quantity, logit_side
from manyheads.theory.papers import TIAN

NEW = ("sigmoid", "square")  # members of the class that the paper does not have
ELEMENTWISE = tuple(name for name in ATTENTIONS if name not in NORMALIZED)
EXACT = 1e-10


@dataclass(frozen=True)
class AttentionFunctions(Study):
    """Conserved quantities of attention with other functions of the logits, and how many there are.

    Attributes
    ----------
    tokens, contexts, neurons
        Size of the task and of the layer.
    horizon, step, records
        End time of flow and training, step of the flow, and number of states kept.
    learning_rates
        Of training by SGD.
    adam
        Learning rate of Adam.
    batch
        Samples of an update.
    counted
        Tokens, and contexts less one, of the layer whose conserved quantities are counted; it has one neuron.
    """

    name: ClassVar[str] = "joma/attention-functions"
    claim: ClassVar[str] = "Attention f(z)x conserves F(z) - |v|^2/2 with F' = f/f'; normalized, no weights"
    source: ClassVar[Source] = replace(TIAN, locus="theorem 1; other functions and the count are derived here")

    tokens: int = 12
    contexts: int = 40
    neurons: int = 24
    horizon: float = 40.0
    step: float = 0.05
    records: int = 20
    learning_rates: tuple[float, ...] = (0.2, 0.1, 0.05, 0.025)
    adam: float = 0.003
    batch: int = 8
    counted: int = 3

    def __post_init__(self) -> None:
        if len(self.learning_rates) < 2 or min(self.learning_rates) <= 0 or not self.adam > 0:
            raise UsageError(
                f"learning_rates={self.learning_rates}, adam={self.adam}: expected two or more, all positive"
            )
        if not 2 <= self.counted <= 12:
            raise UsageError(f"counted={self.counted}: expected 2 to 12 tokens")

    @classmethod
    def full(cls) -> AttentionFunctions:
        """Return the study with more tokens and contexts."""
        return cls(tokens=32, contexts=200, counted=4)

    @classmethod
    def small(cls) -> AttentionFunctions:
        """Return the smallest configuration in which every claim can change."""
        return cls(3, 4, 2, horizon=2.0, step=0.25, records=2, learning_rates=(0.2, 0.1), batch=2, counted=2)

    def cells(self) -> tuple[Cell, ...]:
        """Return every attention with and without the query in the residual stream."""
        return grid(attention=ATTENTIONS, residual=(True, False))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the drift, its order in the learning rate, and the number of conserved quantities."""
        counts = [1.0 if name in NORMALIZED else float(self.counted) for name in ATTENTIONS]
        return dataset(
            {
                "drift": ((), 0.0, "drift of the conserved quantity"),
                "order": ((), 1.0, "order of the drift in the learning rate"),
                "count": ("attention", counts, "number of conserved quantities"),
            },
            coords={"attention": list(ATTENTIONS)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one layer by gradient flow, by SGD and by Adam, and count its conserved quantities."""
        rule = UpdateRule(str(cell["attention"]), "gelu")  # type: ignore[arg-type]
        streams = np.random.default_rng(np.asarray(jax.random.key_data(key))).spawn(5)
        sizes = Sizes(self.tokens, 1, self.contexts, neurons=self.neurons, width=self.tokens + 1)
        task = draw_joma_task(sizes, streams[0])
        if not cell["residual"]:
            task = eqx.tree_at(lambda t: t.query_embeddings, task, np.zeros_like(task.query_embeddings))
        problem = draw_parameters(sizes, rule, streams[1]), task, draw_upper(sizes, streams[2])
        path = gradient_flow(*problem, rule, FixedSteps.until(self.horizon, self.step, self.records))
        exp = UpdateRule("exp")
        return dataset(
            {
                "drift": ((), _drift(rule, task, path.network), "largest drift under gradient flow"),
                "exp_drift": ((), _relative(exp, task, path.network), "the relation of exp attention, over its change"),
                "change": ((), _change(rule, path.network), "largest change of the logits' side"),
                "count": ((), self._count(rule, cell, streams[4]), "number of conserved quantities"),
                **self._networks(rule, problem, int(streams[3].integers(2**31))),
            },
            coords={"learning_rate": (np.asarray(self.learning_rates), "learning rate")},
        )

    def _count(self, rule: UpdateRule, cell: Cell, rng: np.random.Generator) -> float:
        """Count the conserved quantities once, in the cell with the residual stream."""
        return float(count_invariants(rule, self.counted, self.counted + 1, 1, rng)) if cell["residual"] else np.nan

    def _networks(self, rule: UpdateRule, problem: Any, seed: int) -> dict[str, Any]:
        """Train the new attention functions by SGD at every rate and by Adam; NaN for the others."""
        drifts, relatives, decrease = [np.nan] * len(self.learning_rates), [np.nan] * 2, np.nan
        if rule.attention in NEW:
            steps = [round(self.horizon / rate) for rate in self.learning_rates]
            trained = [
                train_layer(problem, rule, "sgd", rate, count, self.batch, seed)
                for rate, count in zip(self.learning_rates, steps, strict=True)
            ]
            adam = train_layer(problem, rule, "adam", self.adam, max(steps), self.batch, seed)
            pairs = [_pair(problem[0], end) for end, _ in (*trained, adam)]
            drifts = [_drift(rule, problem[1], pair) for pair in pairs[:-1]]
            relatives = [_relative(rule, problem[1], pair) for pair in pairs[-2:]]
            decrease = float(trained[-1][1])
        return {
            "sgd_drift": ("learning_rate", drifts, "largest drift under SGD"),
            "sgd_relative": ((), relatives[0], "drift under SGD at the smallest rate, over the change"),
            "adam_relative": ((), relatives[1], "drift under Adam, over the change"),
            "sgd_decrease": ((), decrease, "decrease of the loss under SGD at the smallest rate", "nat"),
        }

    def claims(self) -> tuple[Claim, ...]:
        """Test equalities to rounding, counts exactly, and controls to a tenth."""

        def drift(names: tuple[str, ...]) -> Measure:
            return lambda predicted, trained: float(select_cells(trained, attention=names)["drift"].max())

        def mean_of(name: str, chosen: tuple[str, ...]) -> Measure:
            return lambda predicted, trained: select_cells(trained, attention=chosen)[name].mean("cell").values

        def order(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            drifts = select_cells(trained, attention=NEW)["sgd_drift"].transpose("replicate", "cell", "learning_rate")
            logs = np.log(np.maximum(drifts.values, 1e-300)).mean(1)  # over both functions, with and without residual
            fit = fit_exponent(np.asarray(self.learning_rates), np.exp(logs))
            return fit.exponent, fit.interval

        def miscounted(names: tuple[str, ...]) -> Measure:
            def largest(predicted: xr.Dataset, trained: xr.Dataset) -> float:
                expected = predicted["count"].sel(attention=trained["attention"])
                gaps = abs(trained["count"] - expected)
                return float(gaps.isel(cell=np.isin(trained["attention"].values, names)).max())  # NaN is skipped

            return largest

        def none(predicted: xr.Dataset) -> float:
            return float(predicted["drift"])

        exact: dict[str, Any] = {"quantity": "largest drift", "target": none, "tolerance": EXACT}
        control: dict[str, Any] = {
            "quantity": "drift over the change of the logits' side",
            "target": none,
            "tolerance": 0.1,
            "expected": "refuted",
            "resolution": EXACT,
            "bounds": (0.0, np.inf),
        }
        count: dict[str, Any] = {
            "quantity": "largest difference of numbers",
            "target": 0.0,
            "tolerance": 0.5,
            "basis": "whole numbers: the rank of the Lie algebra of the gradients at a random point",
        }
        tenth = "a tenth of the change, mean over both functions, with and without residual"
        return (
            Claim(
                "Gradient flow conserves z + exp z - |v|^2/2 (sigmoid attention) and z^2/4 - |v|^2/2 (square), with "
                "and without the query in the residual stream",
                drift(NEW),
                basis="an equality: rounding, and the fourth power of the step, leave less",
                **exact,
            ),
            Claim(
                "Sigmoid and square attention conserve the relation z - |v|^2/2 of exp attention",
                mean_of("exp_drift", NEW),
                basis=tenth,
                **control,
            ),
            Claim(
                "Attention normalized by its sum conserves the sum of F over the tokens",
                drift(NORMALIZED),
                basis="an equality: attention is invariant when all f(z) grow by one factor",
                **exact,
            ),
            Claim(
                "Attention by a function of each logit conserves one quantity per token and no other",
                miscounted(ELEMENTWISE),
                **count,
            ),
            Claim(
                "Normalized attention conserves one quantity per query, without the weights, and no other",
                miscounted(NORMALIZED),
                **count,
            ),
            Claim(
                "In networks trained by SGD, upper matrix included, the drift of sigmoid and square attention is "
                "proportional to the learning rate",
                order,
                quantity="exponent of the learning rate",
                target=lambda predicted: float(predicted["order"]),
                tolerance=0.1,
                basis="order one; batches add fluctuations of half an order at most over tokens",
            ),
            Claim(
                "In networks trained by SGD at the smallest rate the quantity is conserved to a tenth",
                mean_of("sgd_relative", NEW),
                **{**control, "expected": "holds"},
                basis=tenth,
            ),
            Claim(
                "In networks trained by Adam the quantity is conserved to a tenth",
                mean_of("adam_relative", NEW),
                basis=tenth,
                **control,
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the drift under SGD by learning rate, and the table of all attention functions."""
        curves = [
            spread_curve(
                self.learning_rates,
                select_cell(trained, attention=name, residual=True)["sgd_drift"].values,
                f"{name} attention",
                group=group,
            )
            for group, name in enumerate(NEW)
        ]
        lines = Lines(
            "Drift of the conserved quantity in networks trained by SGD",
            "learning rate",
            f"drift at time {self.horizon:g}",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Largest over tokens; bands range over replicates.",
            shows=("proportional to the learning rate",),
        )
        return lines, self._table(trained)

    def _table(self, trained: xr.Dataset) -> Panel:
        rows = []
        for cell in self.cells():
            here = select_cell(trained, **dict(cell))
            rows.append(
                (
                    str(cell["attention"]),
                    "yes" if cell["residual"] else "no",
                    f"{float(here['drift'].max()):.0e}",
                    f"{float(here['exp_drift'].mean()):.2f}",
                    *(
                        _known(here[name].values, digits)
                        for name, digits in (("sgd_relative", 3), ("adam_relative", 2))
                    ),
                    _known(here["count"].values, 0),
                )
            )
        columns = ("attention", "residual", "flow", "relation of exp", "SGD", "Adam", "conserved quantities")
        return Listing(
            "Drift of the conserved quantity, and number of such quantities",
            columns,
            tuple(rows),
            note="Flow: largest drift. The others over the change of the logits' side, means over replicates; SGD at "
            f"the smallest rate. Quantities of {self.counted} tokens and one neuron.",
        )


def _known(values: np.ndarray, digits: int) -> str:
    return "" if np.isnan(values).any() else f"{values.mean():.{digits}f}"


def _pair(start: LayerParameters, end: LayerParameters) -> LayerParameters:
    return jax.tree.map(lambda a, b: np.stack([a, b]), start, end)


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
