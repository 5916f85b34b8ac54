"""Statistics of a transformer recorded while it trains on text: loss, attention entropy, stable ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.attention import attention_entropy, causal
from manyheads.data import TextWindows
from manyheads.spectra import traced_stable_rank
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.training import Snapshot, Trained, train
from manyheads.transformer.transformer import Transformer

if TYPE_CHECKING:
    import optax

HELD_OUT = 64  # windows of the validation text on which everything is measured

STATISTICS = {
    "validation_loss": (("step",), "loss on held-out text", "nat"),
    "entropy": (("step", "layer", "head"), "attention entropy", "nat"),
    "stable_rank": (("step", "layer"), "stable rank of the lower MLP matrix", "1"),
    "query_key_rank": (("step", "layer", "head"), "stable rank of query times key", "1"),
}


@eqx.filter_jit
def record_statistics(model: Transformer, held_out: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    """Measure loss, entropy of every head, and the stable ranks of the lower MLP matrix and of query times key.

    Parameters
    ----------
    model
        The transformer in training.
    held_out
        Windows and the characters that follow, both (B, T).

    Returns
    -------
    dict
        `validation_loss` (), `entropy` (L, H) as the mean over windows and positions, `stable_rank` (L,),
        `query_key_rank` (L, H).
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


def held_out_starts(validation: np.ndarray, length: int, before: int = 0) -> np.ndarray:
    """Place the held-out windows at equal distances, with room for `before` characters in front of the first."""
    return np.linspace(before, len(validation) - length - 1, HELD_OUT).astype(np.int32)


def train_and_record(
    model: Transformer,
    text: tuple[np.ndarray, np.ndarray],
    batch: int,
    optimizer: optax.GradientTransformation,
    steps: int,
    key: jax.Array,
    *,
    every: int,
    before: int = 0,
) -> Trained:
    """Train on random windows of a text and record the statistics of the held-out windows every few steps.

    Parameters
    ----------
    model
        Any transformer that predicts the next character.
    text
        Training and validation text, token numbers.
    batch
        Windows of a step.
    optimizer, steps, key, every
        As for `manyheads.transformer.training.train`.
    before
        As for `held_out_starts`.
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
    variables: dict[str, Any] = {}
    for name in names:
        dims, label, units = STATISTICS[name]
        values = np.stack([statistics[name] for _, statistics in done.measured])
        variables[name] = (dims, values, {"long_name": label, "units": units})
    _, depth, heads = variables["entropy"][1].shape
    return xr.Dataset(
        variables,
        coords={
            "step": ("step", np.asarray([step for step, _ in done.measured]), {"long_name": "step"}),
            "layer": ("layer", np.arange(depth), {"long_name": "layer, from the bottom"}),
            "head": ("head", np.arange(heads), {"long_name": "head"}),
        },
    )
