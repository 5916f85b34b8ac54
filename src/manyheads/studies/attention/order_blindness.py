"""`attention/order-blindness`: recall of the symbol after a marker by pooling, recurrence and attention.

Three networks of equally many weights are trained on the same batches. The output of a pooled network depends on the
frequencies of the symbols alone, and the best accuracy of any such network is known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import equinox as eqx
import jax
import numpy as np
import optax
import xarray as xr

from manyheads.costs import ModelShape, transformer_cost
from manyheads.costs.formulas.recurrent import pooled_cost, rnn_cost
from manyheads.costs.shapes import PooledShape, RecurrentShape
from manyheads.data.recall import Recall, RecallSource
from manyheads.errors import UsageError
from manyheads.study import Cell, Claim, Lines, Listing, Source, Study, grid
from manyheads.study.panels import Panel, Picture, spread_curve
from manyheads.study.tables import dataset, select_cell, unstack
from manyheads.transformer.baselines import BaselineConfig, initialize_pooled, initialize_recurrent, match_hidden
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.inputs import TokenInput
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.shape import Shape
from manyheads.transformer.training import count_weights, train
from manyheads.transformer.transformer import initialize

MODELS = {"pooled": "pooled MLP", "recurrent": "recurrent network", "transformer": "transformer"}
TESTED = 8192  # fresh sequences on which a trained network is tested
BUCKETS = 4  # groups of distances from the answer to the end
SEGMENTS = 20  # points of a loss curve, each a mean over its share of the steps


@dataclass(frozen=True)
class OrderBlindness(Study):
    """Accuracy of recall of a pooled, a recurrent and an attention network, by length.

    Attributes
    ----------
    lengths
        Tokens of a sequence, the marker included.
    steps_per_token
        Updates over the length.
    symbols
        Number of symbols.
    key_dim, heads, depth
        Shape of the transformer; the two others have as many weights.
    batch
        Sequences of a step.
    learning_rate
        Peak, with Adam: a linear warm-up over a tenth of the steps, then a half cosine.
    """

    name: ClassVar[str] = "attention/order-blindness"
    revision: ClassVar[int] = 3
    claim: ClassVar[str] = "Pooling is order-blind, an RNN forgets with distance, attention does neither"
    source: ClassVar[Source] = Source(
        "zaheer2017",
        "Deep Sets",
        "Manzil Zaheer and Satwik Kottur and Siamak Ravanbakhsh and Barnabas Poczos and Ruslan Salakhutdinov and "
        "Alexander J. Smola",
        2017,
        kind="inproceedings",
        venue="Advances in Neural Information Processing Systems",
        volume="30",
        identifier="1703.06114",
        locus="theorem 2: what a permutation-invariant function is; the ceiling is derived here",
    )

    lengths: tuple[int, ...] = (8, 16, 32)
    steps_per_token: int = 38
    symbols: int = 16
    key_dim: int = 32
    heads: int = 2
    depth: int = 2
    batch: int = 64
    learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        rising = list(self.lengths) == sorted(set(self.lengths))
        if not self.lengths or min(self.lengths) <= BUCKETS or not rising:
            raise UsageError(f"lengths={self.lengths}: expected one or more, each above {BUCKETS}, in rising order")
        if self._steps(min(self.lengths)) < SEGMENTS:
            raise UsageError(
                f"steps_per_token={self.steps_per_token}: expected {SEGMENTS} steps or more at the shortest length"
            )

    @classmethod
    def full(cls) -> OrderBlindness:
        """Return the study up to 64 tokens."""
        return cls(lengths=(8, 16, 32, 64), steps_per_token=64)

    @classmethod
    def small(cls) -> OrderBlindness:
        """Return the smallest configuration in which every claim can change."""
        return cls(lengths=(6,), steps_per_token=5, key_dim=4, heads=2, depth=1, batch=8)

    def cells(self) -> tuple[Cell, ...]:
        """Return every model at every length."""
        return grid(model=tuple(MODELS), length=self.lengths)

    def flops(self, cell: Cell) -> int:
        """Return the matrix-multiply FLOPs of training one network."""
        length, width = int(cell["length"]), self.key_dim * self.heads
        call = {"length": length, "batch": self.batch, "training": True}
        if cell["model"] == "transformer":
            shape = ModelShape(self.depth, width, self.heads, mlp_hidden=width, classes=self.symbols, causal=False)
            return self._steps(length) * transformer_cost(shape, **call).flops  # type: ignore[arg-type]
        config = self._baseline(str(cell["model"]), length)
        embedding = 2 * self.batch * length * config.width * config.hidden  # its gradient, which the closed forms omit
        if cell["model"] == "recurrent":
            recurrent = RecurrentShape(config.width, config.hidden, config.layers, self.symbols)
            return self._steps(length) * (rnn_cost(recurrent, **call).flops + embedding)  # type: ignore[arg-type]
        pooled = PooledShape(config.width, config.hidden, config.layers, self.symbols)
        mixing = 6 * self.batch * config.hidden**2  # once more after the pool, forward and backward
        return self._steps(length) * (pooled_cost(pooled, **call).flops + embedding + mixing)  # type: ignore[arg-type]

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the best accuracy of a network that is independent of order, exactly."""
        ceilings = [float(Recall(length, self.symbols).ceiling) for length in self.lengths]
        variables = {"ceiling": ("length", ceilings, "best accuracy without order")}
        return dataset(variables, coords={"length": list(self.lengths)})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one network and test it on fresh sequences."""
        length = int(cell["length"])
        task = Recall(length, self.symbols)
        for_model, for_batches, for_test = jax.random.split(key, 3)
        model = self._model(str(cell["model"]), length, for_model)
        steps = self._steps(length)
        optimizer = _optimizer(self.learning_rate, steps)
        done = train(model, cross_entropy, RecallSource(task, self.batch), optimizer, steps, for_batches)
        tokens, answers, lags = task.draw(for_test, TESTED)
        right = np.asarray(_guess(done.model, tokens) == answers)
        groups = np.minimum(np.asarray(lags) * BUCKETS // (length - 1), BUCKETS - 1)
        by_lag = [right[groups == group].mean() for group in range(BUCKETS)]
        losses = [part.mean() for part in np.array_split(done.losses, SEGMENTS)]
        sequence, pattern = np.asarray(tokens[0], float), self._pattern_of(done.model, str(cell["model"]), tokens[0])
        return dataset(
            {
                "accuracy": ((), right.mean(), "accuracy on fresh sequences"),
                "accuracy_by_lag": ("distance", by_lag, "accuracy by distance from the answer to the end"),
                "loss": ("progress", losses, "training loss", "nat"),
                "weights": ((), count_weights(model), "number of weights"),
                "sequence": ("token", sequence, "a test sequence", "token"),
                "pattern": (("token", "attending"), pattern, "attention, largest over heads and layers"),
            },
            coords={
                "distance": ((np.arange(BUCKETS) + 0.5) / BUCKETS, "share of length"),
                "progress": (np.arange(1, SEGMENTS + 1) / SEGMENTS, "share of the steps"),
                "token": (np.arange(length), "position"),
                "attending": (np.arange(length), "position"),
            },
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare accuracies with the ceiling, with one, and with each other."""
        noise = 2.6 * 0.5 / (TESTED * len(self.lengths)) ** 0.5
        longest = max(self.lengths)

        def beyond_ceiling(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            accuracy = unstack(trained, "accuracy").sel(model="pooled")
            return (accuracy - predicted["ceiling"]).mean("length").values

        def worst_recall(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return unstack(trained, "accuracy").sel(model="transformer").min("length").values

        def lead(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            accuracy = unstack(trained, "accuracy").sel(length=longest)
            return (accuracy.sel(model="transformer") - accuracy.sel(model="recurrent")).values

        return (
            Claim(
                "The accuracy of a pooled network is the best one of any network that is independent of order",
                beyond_ceiling,
                target=0.0,
                tolerance=(0.03, noise),
                bounds=(-1.0, 1.0),
                quantity="accuracy over the best one without order, mean over lengths",
                resolution=1 / TESTED,
                basis=f"above: 2.6 standard errors of {TESTED} tests a length; below: three points for finite training",
            ),
            Claim(
                "A transformer of equally many weights recalls the symbol at every length",
                worst_recall,
                target=1.0,
                tolerance=(0.1, float("inf")),
                bounds=(0.0, 1.0),
                quantity="accuracy, lowest over lengths",
                resolution=1 / TESTED,
                basis="accuracy of 0.9 or more at the worst length, far above the best accuracy without order",
            ),
            Claim(
                f"At {longest} tokens the accuracy of a recurrent network of equally many weights is below that of the "
                "transformer",
                lead,
                target=1.0,
                tolerance=(1.0, float("inf")),
                bounds=(-1.0, 1.0),
                quantity="difference of accuracies",
                resolution=1 / TESTED,
                basis="an inequality: the difference of both accuracies is positive, seed by seed",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show accuracy by length, by distance, and the attention of a solved sequence."""
        accuracy, lengths = unstack(trained, "accuracy"), list(self.lengths)
        by_lag = unstack(trained, "accuracy_by_lag").sel(length=lengths[-1])
        distance = trained["distance"].values
        curves, lags = (
            [
                spread_curve(x, table.sel(model=model).transpose("replicate", ...).values, label, group=group)
                for group, (model, label) in enumerate(MODELS.items())
            ]
            for x, table in ((lengths, accuracy), (distance, by_lag))
        )
        curves.append(spread_curve(lengths, predicted["ceiling"].values[None], "best without order", "predicted", 0))
        weights = unstack(trained, "weights").isel(replicate=0)
        rows = tuple(
            (label, *(f"{int(weights.sel(model=model, length=length)):,}" for length in lengths))
            for model, label in MODELS.items()
        )
        return (
            Lines(
                "Recall of the symbol after the marker",
                "sequence length [tokens]",
                "accuracy on fresh sequences",
                tuple(curves),
                note="Bands range over replicates. Dashed: best accuracy of an order-blind network, exact.",
                shows=("recalls the symbol",),
            ),
            Lines(
                f"By distance, {lengths[-1]} tokens",
                "distance from the answer to the end, share of the length",
                "accuracy on fresh sequences",
                tuple(lags),
                note="Bands range over replicates.",
                shows=("recurrent network",),
            ),
            self._pattern(trained),
            Listing(
                "Number of weights",
                ("model", *(f"n = {length}" for length in lengths)),
                rows,
                note="Hidden sizes of the others are chosen to match the number of weights of the transformer.",
            ),
        )

    def _pattern(self, trained: xr.Dataset) -> Panel:
        """Draw the attention to one sequence of the shortest length, first replicate."""
        size = self.lengths[0]
        cell = select_cell(trained, model="transformer", length=size).isel(replicate=0)
        tokens = cell["sequence"].values[:size].astype(int)
        names = tuple("→" if token == self.symbols else chr(ord("a") + token) for token in tokens)
        pattern = cell["pattern"].values[:size, :size]
        return Picture(
            "Attention of the transformer",
            "key",
            "query",
            tuple(tuple(float(value) for value in row) for row in pattern),
            value_label="attention, largest over heads and layers",
            x_ticks=names,
            y_ticks=names,
            note="One fresh sequence; → is the marker, letters are symbols. The answer is the letter after the marker.",
        )

    def _pattern_of(self, model: Any, kind: str, tokens: jax.Array) -> np.ndarray:
        """Return the attention of a transformer to one sequence, (T, T); zero for the other networks."""
        if kind != "transformer":
            return np.zeros((len(tokens), len(tokens)))
        layers = model.record(tokens[None], patterns=True).layers
        return np.asarray(layers.patterns[:, 0].max(axis=(0, 1)), np.float64)

    def _steps(self, length: int) -> int:
        return self.steps_per_token * length

    def _transformer(self, length: int) -> TransformerConfig:
        shape = Shape(self.key_dim, self.heads, self.depth)
        inputs = TokenInput(self.symbols + 1)
        return TransformerConfig(shape, inputs, length, self.symbols, mlp_ratio=1, activation="relu")

    def _baseline(self, kind: str, length: int) -> BaselineConfig:
        config = self._transformer(length)
        start = BaselineConfig(config.inputs, self.symbols, config.shape.width, 1, layers=1 + (kind == "pooled"))
        target = jax.eval_shape(lambda: self._model("transformer", length, jax.random.key(0)))
        return match_hidden(start, count_weights(target))

    def _model(self, kind: str, length: int, key: jax.Array) -> Any:
        if kind == "transformer":
            config = self._transformer(length)
            scaling = standard_scaling(config.shape, config.inputs, config.mlp_ratio)
            return initialize(config, scaling, key)
        baseline = self._baseline(kind, length)
        return (initialize_pooled if kind == "pooled" else initialize_recurrent)(baseline, key)


@lru_cache(maxsize=16)
def _optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Build one object for equal arguments: training compiles once per optimizer."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10 + 1, steps, 0.05 * learning_rate)
    return optax.adam(schedule, b2=0.99)


@eqx.filter_jit
def _guess(model: Any, tokens: jax.Array) -> jax.Array:
    return model(tokens).argmax(-1)
