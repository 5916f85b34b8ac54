"""Layer and the MLP's upper matrix trained together on mini-batches, as networks are."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from manyheads._arrays import follows_caller
from manyheads.joma.systems.layer import CrossEntropy, LayerParameters, objective
from manyheads.joma.task import JomaTask, UpdateRule

OPTIMIZERS = {"sgd": optax.identity(), "adam": optax.scale_by_adam()}


@follows_caller
def train_layer(
    problem: tuple[LayerParameters, JomaTask, CrossEntropy],
    rule: UpdateRule,
    optimizer: str,
    learning_rate: float,
    steps: int,
    batch: int,
    seed: int,
) -> tuple[LayerParameters, Any]:
    """Train logits, weights and the upper matrix; return the trained layer and the decrease of the loss over all data.

    `optimizer` is a name of `OPTIMIZERS`. Batches are drawn with replacement.
    """
    return _train(
        problem,
        rule.traced(),
        optimizer,
        (jnp.asarray(learning_rate, float), jnp.asarray(steps), jnp.asarray(seed)),
        batch,
    )


@eqx.filter_jit
def _train(problem: Any, rule: UpdateRule, optimizer: str, clock: Any, batch: int) -> tuple[LayerParameters, jax.Array]:
    layer, task, upper = jax.tree.map(jnp.asarray, problem)
    learning_rate, steps, seed = clock
    transform, key = OPTIMIZERS[optimizer], jax.random.key(seed)

    def loss(parameters: tuple[LayerParameters, CrossEntropy], samples: JomaTask) -> jax.Array:
        return objective(parameters[0], samples, parameters[1], rule)

    def advance(number: jax.Array, state: Any) -> Any:
        parameters, memory = state
        rows = jax.random.randint(jax.random.fold_in(key, number), (batch,), 0, len(task.contexts))
        updates, memory = transform.update(jax.grad(loss)(parameters, task.take(rows)), memory)
        return jax.tree.map(lambda p, u: p - learning_rate * u, parameters, updates), memory

    start = (layer, upper)
    end, _ = jax.lax.fori_loop(0, steps, advance, (start, transform.init(start)))
    return end[0], loss(start, task) - loss(end, task)
