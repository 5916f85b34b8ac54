"""Statistics of a transformer recorded while it trains on text: loss, attention entropy, stable ranks."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr
from jaxtyping import Array, Int

from manyheads.attention import attention_entropy, causal
from manyheads.data import TextWindows
from manyheads.spectra.levels import causal_entropy_level, expected_stable_rank
from manyheads.spectra.traced_ranks import traced_stable_rank
from manyheads.study.tables import record
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.training import Snapshot, Trained, train
from manyheads.transformer.transformer import Transformer

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
