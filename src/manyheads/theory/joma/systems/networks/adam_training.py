"""Transformers trained by Adam, measured at equal distances."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import jax
import numpy as np
import optax

from manyheads._trees import PyTree
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.training import Snapshot, train
from manyheads.transformer.transformer import Transformer, initialize

_adam = lru_cache(maxsize=4)(optax.adam)  # one object a learning rate, so that training compiles once


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
