"""`attention/order-blindness`: recall of the symbol after a marker by pooling, recurrence and attention.

Three networks of equally many weights are trained on the same batches. The output of a pooled network depends on the
frequencies of the symbols alone, and the best accuracy of any such network is known exactly.
"""

from functools import lru_cache
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

import manyheads.study as st
from manyheads.costs import ModelShape, transformer_cost
from manyheads.costs.shapes import PooledShape, RecurrentShape
from manyheads.data.recall import Recall, RecallSource
from manyheads.studies.attention.baseline_flops import baseline_flops
from manyheads.study.panels import Picture
from manyheads.transformer import Shape, TokenInput, TransformerConfig, initialize, standard_scaling
from manyheads.transformer.baselines import BaselineConfig, initialize_pooled, initialize_recurrent, match_hidden
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.training import count_weights, train

MODELS = ("pooled", "recurrent", "transformer")
TESTED = 8192  # fresh sequences on which a trained network is tested
BUCKETS = 4  # groups of distances from the answer to the end
SEGMENTS = 20  # points of a loss curve, each a mean over its share of the steps


class OrderBlindness(st.Study):
    """Accuracy of recall of a pooled, a recurrent and an attention network, by length.

    Hidden sizes of the first two are chosen to match the number of weights of the transformer.
    """

    name = "attention/order-blindness"
    revision = 3
    claim = "Pooling is order-blind, an RNN forgets with distance, attention does neither"
    source = st.Source(
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
    grid = {"model": MODELS, "length": "lengths"}

    lengths: tuple[int, ...] = st.sweep(
        (8, 16, 32),
        "tokens of a sequence, the marker included",
        above=BUCKETS,
        count=1,
        small=(6,),
        full=(8, 16, 32, 64),
    )
    steps_per_token: int = st.setting(38, "updates over the length", small=5, full=64)
    symbols: int = st.setting(16, "number of symbols")
    key_dim: int = st.setting(32, "key dimension of the transformer", small=4)
    heads: int = st.setting(2, "heads of the transformer")
    depth: int = st.setting(2, "blocks of the transformer; the two others have as many weights", small=1)
    batch: int = st.setting(64, "sequences of a step", small=8)
    learning_rate: float = st.setting(3e-3, "peak with Adam: warm-up over a tenth of the steps, then a half cosine")

    def check(self) -> None:
        if self._steps(min(self.lengths)) < SEGMENTS:
            wanted = f"expected {SEGMENTS} steps or more at the shortest length"
            raise st.UsageError(f"steps_per_token={self.steps_per_token}: {wanted}")

    def predict(self, key: st.Key) -> st.Record:
        """Return the best accuracy of a network that is independent of order, exactly."""
        ceilings = [float(Recall(length, self.symbols).ceiling) for length in self.lengths]
        return {
            "ceiling": ("length", ceilings, "best accuracy without order"),
            "length": ("length", list(self.lengths), "sequence length", "tokens"),
        }

    def train(self, key: st.Key, model: str, length: int) -> st.Record:
        task, steps = Recall(length, self.symbols), self._steps(length)
        for_model, for_batches, for_test = jax.random.split(key, 3)
        network = self._model(model, length, for_model)
        optimizer = _optimizer(self.learning_rate, steps)
        done = train(network, cross_entropy, RecallSource(task, self.batch), optimizer, steps, for_batches)
        tokens, answers, lags = task.draw(for_test, TESTED)
        right = np.asarray(_guess(done.model, tokens) == answers)
        groups = np.minimum(np.asarray(lags) * BUCKETS // (length - 1), BUCKETS - 1)
        by_lag = [right[groups == group].mean() for group in range(BUCKETS)]
        losses = [part.mean() for part in np.array_split(done.losses, SEGMENTS)]
        pattern = self._pattern_of(done.model, model, tokens[0])
        return {
            "accuracy": ((), right.mean(), "accuracy on fresh sequences"),
            "accuracy_by_lag": ("distance", by_lag, "accuracy by distance from the answer to the end"),
            "loss": ("progress", losses, "training loss", "nat"),
            "weights": ((), count_weights(network), "number of weights"),
            "sequence": ("token", np.asarray(tokens[0], float), "a test sequence", "token"),
            "pattern": (("token", "attending"), pattern, "attention, largest over heads and layers"),
            "distance": ("distance", (np.arange(BUCKETS) + 0.5) / BUCKETS, "distance over the length"),
            "progress": ("progress", np.arange(1, SEGMENTS + 1) / SEGMENTS, "share of the steps"),
            "token": ("token", np.arange(length), "position"),
            "attending": ("attending", np.arange(length), "position"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        accuracy, longest = trained["accuracy"], max(self.lengths)
        noise = 2.6 * 0.5 / (TESTED * len(self.lengths)) ** 0.5
        last = accuracy.sel(length=longest)
        yield st.Claim(
            "The accuracy of a pooled network is the best one of any network that is independent of order",
            (accuracy.sel(model="pooled") - theory["ceiling"]).mean("length"),
            st.near(0, (0.03, noise)),
            f"above: 2.6 standard errors of {TESTED} tests a length; below: three points for finite training",
            "accuracy over the best one without order, mean over lengths",
            bounds=(-1.0, 1.0),
            resolution=1 / TESTED,
        )
        yield st.Claim(
            "A transformer of equally many weights recalls the symbol at every length",
            accuracy.sel(model="transformer").min("length"),
            st.near(1, (0.1, np.inf)),
            "accuracy of 0.9 or more at the worst length, far above the best accuracy without order",
            "accuracy, lowest over lengths",
            bounds=(0.0, 1.0),
            resolution=1 / TESTED,
        )
        yield st.Claim(
            f"At {longest} tokens the accuracy of a recurrent network of equally many weights is below that of the "
            "transformer",
            last.sel(model="transformer") - last.sel(model="recurrent"),
            st.near(1, (1.0, np.inf)),
            "an inequality: the difference of both accuracies is positive, seed by seed",
            "difference of accuracies",
            bounds=(-1.0, 1.0),
            resolution=1 / TESTED,
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        by_lag = trained["accuracy_by_lag"].isel(length=-1)
        found, by_distance = (
            {model: each.sel(model=model) for model in MODELS} for each in (trained["accuracy"], by_lag)
        )
        labels = "Recall of the symbol after the marker", "length", "accuracy on fresh sequences"
        note = "Bands range over replicates. Dashed: best accuracy of an order-blind network, exact."
        law = {"best without order": theory["ceiling"]}
        yield st.lines(*labels, found, law, note=note, shows=("recalls the symbol",))
        title = f"By distance from the answer to the end, {self.lengths[-1]} tokens"
        note = "Bands range over replicates."
        yield st.lines(title, "distance", labels[-1], by_distance, note=note, shows=("recurrent network",))
        size = self.lengths[0]
        first = trained.sel(model="transformer", length=size).isel(replicate=0)
        first = first.isel(token=slice(size), attending=slice(size))
        tokens = first["sequence"].values.astype(int)
        names = tuple("→" if token == self.symbols else chr(ord("a") + token) for token in tokens)
        yield Picture(
            "Attention of the transformer",
            "key",
            "query",
            tuple(map(tuple, first["pattern"].values.tolist())),
            value_label="attention, largest over heads and layers",
            x_ticks=names,
            y_ticks=names,
            note="One fresh sequence; → is the marker, letters are symbols. The answer is the letter after the marker.",
        )

    def flops(self, cell: st.Cell) -> int:
        length, width = int(cell["length"]), self.key_dim * self.heads
        if cell["model"] == "transformer":
            shape = ModelShape(self.depth, width, self.heads, mlp_hidden=width, classes=self.symbols, causal=False)
            return self._steps(length) * transformer_cost(shape, length, self.batch, training=True).flops
        kind = RecurrentShape if cell["model"] == "recurrent" else PooledShape
        config = self._baseline(str(cell["model"]), length)
        baseline = kind(config.width, config.hidden, config.layers, self.symbols)
        return self._steps(length) * baseline_flops(baseline, length, self.batch, training=True)

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

    def _model(self, kind: str, length: int, key: st.Key) -> Any:
        if kind == "transformer":
            config = self._transformer(length)
            return initialize(config, standard_scaling(config.shape, config.inputs, config.mlp_ratio), key)
        return (initialize_pooled if kind == "pooled" else initialize_recurrent)(self._baseline(kind, length), key)


@lru_cache(maxsize=16)
def _optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Build one object for equal arguments: training compiles once per optimizer."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10 + 1, steps, 0.05 * learning_rate)
    return optax.adam(schedule, b2=0.99)


_guess = eqx.filter_jit(lambda model, tokens: model(tokens).argmax(-1))
