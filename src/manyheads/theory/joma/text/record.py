"""Transformers of characters, and their statistics while they train on text: loss, attention entropy, stable ranks."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr
from jaxtyping import Array, Int

from manyheads._trees import PyTree
from manyheads.attention import attention_entropy, causal
from manyheads.costs import ModelShape, transformer_cost
from manyheads.data import TextWindows, load_text
from manyheads.data.characters import read_characters
from manyheads.errors import UsageError
from manyheads.spectra.levels import causal_entropy_level, expected_stable_rank
from manyheads.spectra.traced_ranks import traced_stable_rank
from manyheads.study.tables import record
from manyheads.transformer import Shape, TokenInput, Transformer, TransformerConfig, initialize, standard_scaling
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.training import Snapshot, Trained, train

_adam = lru_cache(maxsize=4)(optax.adam)  # one object a learning rate, so that training compiles once
HELD_OUT = 64  # windows of the validation text on which everything is measured
STATISTICS = {
    "validation_loss": (("step",), "loss on held-out text", "nat"),
    "entropy": (("step", "layer", "head"), "attention entropy", "nat"),
    "stable_rank": (("step", "layer"), "stable rank of the lower MLP matrix", "1"),
    "query_key_rank": (("step", "layer", "head"), "stable rank of query times key", "1"),
}


@eqx.filter_jit
def record_statistics(
    model: Transformer, held_out: tuple[Int[Array, "batch length"], Int[Array, "batch length"]]
) -> dict[str, jax.Array]:
    """Measure loss, entropy of every head over windows and positions, and the stable ranks of `STATISTICS`.

    Held out are windows and the characters that follow, both (B, T).
    """
    layers = model.record(held_out[0]).layers
    scale = model.scaling.logit(model.config.shape.key_dim)
    entropy, _ = attention_entropy(layers.queries, layers.keys, scale=scale, mask=causal)  # (L, B, H, T)
    blocks = model.weights.blocks
    product = jnp.einsum("lhdn,lhen->lhde", blocks.query, blocks.key)  # (L, H, d, d)
    return {
        "validation_loss": cross_entropy(model, held_out),
        "entropy": entropy.mean((1, 3)),
        "stable_rank": traced_stable_rank(blocks.mlp_in),
        "query_key_rank": traced_stable_rank(product),
    }


def held_out_starts(validation: Int[np.ndarray, " n"], length: int, before: int = 0) -> Int[np.ndarray, " windows"]:
    """Place the held-out windows at equal distances, with room for `before` characters in front of the first."""
    return np.linspace(before, len(validation) - length - 1, HELD_OUT).astype(np.int32)


def train_and_record(
    model: Transformer,
    text: tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"]],
    batch: int,
    optimizer: optax.GradientTransformation,
    steps: int,
    key: jax.Array,
    *,
    every: int,
    before: int = 0,
) -> Trained:
    """Train on random windows of a text, tokens (training, validation), and record statistics of held-out windows.

    `optimizer`, `steps`, `key` and `every` are those of `manyheads.transformer.training.train`; `before` is that of
    `held_out_starts`.
    """
    training, validation = text
    length = model.config.length
    starts = jnp.asarray(held_out_starts(validation, length, before))
    held_out = TextWindows(validation, length, batch).cut(starts)

    def measure(snapshot: Snapshot) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in record_statistics(snapshot.model, held_out).items()}

    windows = TextWindows(training, length, batch)
    return train(model, cross_entropy, windows, optimizer, steps, key, every=every, measure=measure)


def recorded_dataset(done: Trained, names: tuple[str, ...] = tuple(STATISTICS)) -> xr.Dataset:
    """Collect the recorded statistics of a training as labelled variables over `step`, `layer` and `head`."""
    values = {name: np.stack([statistics[name] for _, statistics in done.measured]) for name in names}
    _, depth, heads = values["entropy"].shape
    coordinates = {
        "step": ("step", np.asarray([step for step, _ in done.measured]), "step"),
        "layer": ("layer", np.arange(depth), "layer, from the bottom"),
        "head": ("head", np.arange(heads), "head"),
    }
    found = {name: (dims, values[name], *text) for name, (dims, *text) in STATISTICS.items() if name in names}
    return record(found | coordinates)


def reference_levels(length: int, width: int) -> xr.Dataset:
    """Compute the entropy of uniform causal attention and the stable rank of a random matrix of the MLP's shape."""
    return record(
        {
            "uniform": ((), causal_entropy_level(length), "entropy of uniform causal attention", "nat"),
            "random_rank": ((), expected_stable_rank(4 * width, width), "stable rank of a random matrix"),
        }
    )


def character_config(shape: Shape, vocabulary: int, length: int) -> TransformerConfig:
    """Configure a causal pre-norm transformer with ReLU that predicts the next of `vocabulary` characters."""
    return TransformerConfig(
        shape,
        TokenInput(vocabulary),
        length=length,
        outputs=vocabulary,
        causal=True,
        read_out="token",
        activation="relu",
    )


def step_flops(shape: Shape, vocabulary: int, length: int, batch: int) -> int:
    """Count the matrix-multiply FLOPs of a training step, masked pairs included, as they are computed."""
    model = ModelShape(shape.depth, shape.key_dim * shape.heads, shape.heads, vocabulary=vocabulary, causal=True)
    return transformer_cost(model, length, batch, training=True, convention="dense").flops


def digest_text(path: Path | None, length: int, before: int = 0) -> dict[str, str]:
    """Hash the text of a study, the default one included, which differs between releases of Python.

    The held-out tenth must hold a window of `length` characters, the next one, and `before` characters in front.
    """
    text, reach = load_text(path), length + before
    held_out = len(read_characters(path)[1].validation)
    if held_out <= reach:
        raise UsageError(
            f"{text.name} leaves {held_out} held-out characters, too few for a window: give a text of more than "
            f"{10 * (reach + 1)} characters, or a shorter --length"
        )
    return {"text": text.sha256}


def train_by_adam(
    config: TransformerConfig,
    loss: Callable[..., jax.Array],
    batches: Callable[[jax.Array], PyTree],
    measure: Callable[[Transformer], dict[str, jax.Array]],
    learning_rate: float,
    steps: int,
    snapshots: int,
    keys: tuple[jax.Array, jax.Array],
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Train from the standard initialization; return the steps of the snapshots, and what `measure` gives there.

    The keys are those of the initialization and of the batches.
    """
    start = initialize(config, standard_scaling(config.shape, config.inputs), keys[0])

    def record(snapshot: Snapshot) -> dict[str, np.ndarray]:
        return jax.tree.map(np.asarray, measure(snapshot.model))

    done = train(start, loss, batches, _adam(learning_rate), steps, keys[1], every=steps // snapshots, measure=record)
    moments, found = zip(*done.measured, strict=True)
    return np.asarray(moments), {name: np.stack([each[name] for each in found]) for name in found[0]}
