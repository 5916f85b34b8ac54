"""Training trajectories of many networks of one shape: losses, and kernels on a probe batch."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from manyheads.errors import UsageError, check_integer, check_rising
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.task import Task
from manyheads.scaling.trained.transformers import (
    NetworkFactors,
    Recipe,
    Setting,
    attention_logits,
    optimizer_of,
    prepare,
)
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.shape import Shape
from manyheads.transformer.training import Batches, TrainState, step, update
from manyheads.transformer.transformer import Record, Transformer, initialize

SEQUENCES, TOKENS = 4, 4
"""Sequences of the probe, and tokens of each, between which kernels are taken: few, so that many networks are kept."""


class NetworkRecords(NamedTuple):
    """Record of some networks in training; not finite where training diverged."""

    losses: jax.Array  # (networks, steps), the loss of every step on its batch before the update, in nats
    kernels: jax.Array  # (networks, records, n, n) h.h/d of the stream after the last block, of n tokens of the probe
    patterns: jax.Array  # (networks, records, n, T) where those tokens attend to, mean over heads and blocks
    logits: jax.Array  # (networks, records) root mean square of the attention logits over the probe


def follow_networks(
    task: Task,
    parametrization: Parametrization,
    shape: Shape,
    recipe: Recipe,
    learning_rate: float,
    records: tuple[int, ...],
    networks: int,
    key: jax.Array,
) -> NetworkRecords:
    """Train networks that differ in their init alone, on the same batches, and record them after some updates.

    Batches and probe depend on the key alone, so that other shapes and parametrizations see the same; so do weights
    where they have the same shape: embeddings and read-out of network i are one at every depth.
    """
    check_integer("networks", networks)
    check_rising("records", records, least=0, count=1)
    if records[-1] > recipe.steps:
        raise UsageError(f"records={records}: give rising numbers of updates, from 0 to {recipe.steps}")
    setting, factors, together = prepare(task, parametrization, shape, recipe, networks)
    # Bounds as data, as in `measure_updates`: one compiled loop body serves all stretches.
    bounds = jnp.asarray([0, *records, recipe.steps], jnp.int32)
    counts = (recipe.steps, networks, together)
    found = _follow((setting, counts), task.batches, factors, jnp.float32(learning_rate), bounds, key)
    return jax.tree.map(np.asarray, found)


@partial(jax.jit, static_argnums=0)
def _follow(
    asked: tuple[Setting, tuple[int, int, int]],
    batches: Batches,
    factors: NetworkFactors,
    learning_rate: jax.Array,
    bounds: jax.Array,
    key: jax.Array,
) -> NetworkRecords:
    setting, (steps, networks, together) = asked
    config = setting.config
    for_models, for_batches, for_probe = jax.random.split(key, 3)
    probe = batches(for_probe)[0][:SEQUENCES]

    def member(number: jax.Array) -> NetworkRecords:
        start = draw_network(setting.config, factors, jax.random.fold_in(for_models, number))
        tx = optimizer_of(setting, factors, start, learning_rate)
        advance = partial(step, partial(update, start, cross_entropy, batches, tx, for_batches))

        def stretch(state: TrainState, span: tuple[jax.Array, jax.Array]) -> tuple[TrainState, tuple[jax.Array, ...]]:
            state = jax.lax.fori_loop(span[0], span[1], advance, state)
            return state, _record(Transformer(state.weights, factors.scaling, config), probe)

        state = TrainState(start.weights, tx.init(start.weights), jnp.zeros(steps))
        end, records = jax.lax.scan(stretch, state, (bounds[:-1], bounds[1:]))
        return NetworkRecords(end.losses, *(record[:-1] for record in records))  # without the end

    return jax.lax.map(member, jnp.arange(networks), batch_size=together if together > 1 else None)


def draw_network(config: TransformerConfig, factors: NetworkFactors, key: jax.Array) -> Transformer:
    """Draw a network that shares with those of other depths its embeddings and read-out, and nothing with others.

    One key alone will not do: of two arrays of different size drawn with it, one may be the beginning of the other.
    """
    shape = config.shape
    outside = jax.random.fold_in(jax.random.fold_in(key, shape.key_dim), shape.heads)
    keys = jnp.stack([outside, jax.random.fold_in(outside, shape.depth)])
    both = jax.vmap(lambda each: initialize(config, factors.scaling, each, jnp.float32).weights)(keys)  # one program
    ends, middle = (jax.tree.map(lambda leaf, place=place: leaf[place], both) for place in (0, 1))
    return Transformer(ends._replace(blocks=middle.blocks), factors.scaling, config)


def _record(model: Transformer, probe: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    record: Record = model.record(probe, patterns=True)
    length = record.start.shape[-2]
    chosen = (np.arange(1, TOKENS + 1) * length) // TOKENS - 1  # the last token of each quarter
    rows = record.layers.stream[-1][:, chosen].reshape(-1, record.start.shape[-1])  # (n, d)
    assert record.layers.patterns is not None  # they were asked for
    pattern = record.layers.patterns[..., chosen, :].mean((0, 2))  # (L, sequences, H, tokens, T) -> (sequences, ...)
    logits = jnp.sqrt(jnp.square(attention_logits(record)).mean())
    return rows @ rows.T / rows.shape[-1], pattern.reshape(-1, length), logits
