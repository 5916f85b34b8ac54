r"""Wide layers with a random initialization, trained by SGD: which neurons win which token, and when.

Each neuron k attends to tokens l by its own logits :math:`z_{kl}`, a context holds one token, and the output of a
neuron is :math:`h_{kl} = v_{kl} e^{z_{kl}}`. With a constant gain the loss is :math:`-\sum_k \Delta_l h_{kl}`
(theorem 2); with a shared one it is :math:`\frac12 (y - \sum_k (h_{kl} - h_{kl}(0)))^2`, for one token.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manyheads._arrays import takes_arrays
from manyheads._trees import PyTree

Networks = Float[Array, "networks neurons tokens"]


class WideTraining(NamedTuple):
    """Plain SGD over batches of contexts; `learning_rate * steps` is the time of the gradient flow."""

    learning_rate: float
    steps: int
    batch: int
    level: float  # a weight is frozen from here on


@takes_arrays
@partial(jax.jit, static_argnames="training")
def train_alone(
    weights: Networks, logits: Networks, gains: Float[Array, " tokens"], training: WideTraining, key: jax.Array
) -> Networks:
    """Train with constant gains and return the time at which each weight reaches the level, inf if it does not."""
    tokens = weights.shape[-1]

    def speed(number: jax.Array) -> jax.Array:
        seen = jax.random.randint(jax.random.fold_in(key, number), (training.batch,), 0, tokens)
        counts = (seen[:, None] == jnp.arange(tokens)).mean(0) * tokens  # (M,), of mean one
        return training.learning_rate * gains * counts

    v, times = race(weights, logits, training, speed)
    return jnp.where(v < training.level, jnp.inf, times)


def race(
    weights: jax.Array, logits: jax.Array, training: WideTraining, speed: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Move weights at speeds of each step until they reach the level; return them and their times; traceable."""

    def step(state: PyTree, number: jax.Array) -> tuple[PyTree, None]:
        v, z, times = state
        running = v < training.level
        push = jnp.where(running, speed(number) * jnp.exp(z), 0.0)
        return (v + push, z + push * v, jnp.where(running, number + 1.0, times)), None

    (v, _, times), _ = jax.lax.scan(step, (weights, logits, jnp.zeros_like(weights)), jnp.arange(training.steps))
    return v, times * training.learning_rate


@takes_arrays
@partial(jax.jit, static_argnames="training")
def train_together(
    weights: Float[Array, "networks neurons"], target: Float[Array, ""], training: WideTraining, key: jax.Array
) -> Float[Array, "networks neurons"]:
    """Train on a shared squared loss from uniform attention and return the change of each neuron's output."""

    def step(state: PyTree, number: jax.Array) -> tuple[PyTree, None]:
        v, z = state
        seen = jax.random.bernoulli(jax.random.fold_in(key, number), 0.5, (training.batch,)).mean() * 2
        missing = target - (v * jnp.exp(z) - weights).sum(-1, keepdims=True)
        push = training.learning_rate * seen * missing * jnp.exp(z)
        return (v + push, z + push * v), None

    (v, z), _ = jax.lax.scan(step, (weights, jnp.zeros_like(weights)), jnp.arange(training.steps))
    return v * jnp.exp(z) - weights
