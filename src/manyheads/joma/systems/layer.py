"""The layer of finite size as it really learns: its forward pass, losses behind it, and the gradient's field.

`manyheads.joma.systems.gradient_flow` follows the field in time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from manyheads._arrays import takes_arrays
from manyheads.errors import ShapeError
from manyheads.joma.task import Rule, Setting, Sizes

Loss: TypeAlias = Callable[[jax.Array, Setting], jax.Array]


class Network(eqx.Module):
    """What is learned.

    Attributes
    ----------
    logits
        z, (Q, M).
    weights
        W, (d, K) shared by all queries, or (Q, d, K), one for each.
    """

    logits: Any
    weights: Any


class CrossEntropy(eqx.Module):
    """Mean cross-entropy of classes read from the hidden values by a fixed upper layer, (C, K); in nats."""

    upper: Any

    def __call__(self, hidden: jax.Array, setting: Setting) -> jax.Array:
        """Return the loss of hidden values (N, K)."""
        scores = jax.nn.log_softmax(hidden @ self.upper.T)  # (N, C)
        return -jnp.take_along_axis(scores, setting.labels[:, None], axis=1).mean()


class ConstantPull(eqx.Module):
    """A loss whose gradient never changes, -mean_n g_n . h_n: the stationary gradient of theorem 2; g is (N, K)."""

    pulls: Any

    def __call__(self, hidden: jax.Array, setting: Setting) -> jax.Array:
        """Return the loss of hidden values (N, K)."""
        if hidden.shape != self.pulls.shape:
            raise ShapeError(f"pulls {self.pulls.shape}: expected one for each of the hidden values {hidden.shape}")
        return -(hidden * self.pulls).sum(-1).mean()


def draw_network(
    sizes: Sizes, rule: Rule, rng: np.random.Generator, spread: tuple[float, float] = (0.2, 0.3)
) -> Network:
    """Draw normal logits and weights with the given standard deviations, float64; linear attention starts about one."""
    logits = spread[0] * rng.normal(size=(sizes.queries, sizes.tokens)) + (rule.attention == "linear")
    own = (sizes.queries,) if rule.own_weights else ()
    return Network(logits, spread[1] * rng.normal(size=(*own, sizes.width, sizes.neurons)))


def draw_upper(sizes: Sizes, rng: np.random.Generator) -> CrossEntropy:
    """Draw the upper layer behind a cross-entropy: normal, variance 1/K, float64."""
    return CrossEntropy(rng.normal(size=(sizes.classes, sizes.neurons)) * sizes.neurons**-0.5)


@takes_arrays
def attend(rule: Rule, logits: jax.Array, contexts: jax.Array) -> jax.Array:
    """Return the attention b, (..., M), of logits and frequencies (..., M)."""
    scaled = logits / rule.temperature
    if rule.attention == "linear":
        return scaled * contexts
    if rule.attention == "exp":
        return jnp.exp(scaled) * contexts
    return jax.nn.softmax(scaled + jnp.log(contexts), axis=-1)  # frequency 0: log is -inf, attention exactly 0


def forward(network: Network, setting: Setting, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """Return the attention b (N, M) and what goes into the activation, W^T f, (N, K)."""
    logits, weights, queries = jnp.asarray(network.logits), jnp.asarray(network.weights), jnp.asarray(setting.queries)
    if weights.ndim != 2 + rule.own_weights:
        raise ShapeError(f"weights {weights.shape} with own_weights={rule.own_weights}: expected (d, K) or (Q, d, K)")
    b = attend(rule, logits[queries], jnp.asarray(setting.contexts))  # (N, M)
    f = b @ setting.token_embeddings.T + jnp.asarray(setting.query_embeddings).T[queries]  # (N, d)
    return b, jnp.einsum("nd,ndk->nk", f, weights[queries]) if rule.own_weights else f @ weights


@takes_arrays
def objective(network: Network, setting: Setting, loss: Loss, rule: Rule, gates: jax.Array | None = None) -> jax.Array:
    """Return the loss; with `gates` (N, K), booleans, the ReLU is open where they say and not where its input does."""
    _, before = forward(network, setting, rule)
    return loss(rule.function(before) if gates is None else jnp.where(gates, before, 0.0), setting)


@takes_arrays
def field(network: Network, setting: Setting, loss: Loss, rule: Rule, gates: jax.Array | None = None) -> Network:
    """Return the time derivative of logits and weights under gradient flow with the rule's ratio and decay."""
    downhill = jax.grad(objective)(network, setting, loss, rule, gates)
    return Network(
        -rule.rate_ratio * (downhill.logits + rule.decay * network.logits),
        -(downhill.weights + rule.decay * network.weights),
    )


def pulls(network: Network, setting: Setting, loss: Loss, rule: Rule) -> jax.Array:
    """Return g phi', (N, K): minus N times the derivative of the loss by each sample's input to the activation."""
    _, before = forward(network, setting, rule)
    return -len(before) * jax.grad(lambda a: loss(rule.function(a), setting))(before)


@takes_arrays
def token_weights(setting: Setting, weights: Any) -> Any:
    """Return what the neurons read of each token, U_C^T W: (..., d, K) becomes (..., M, K)."""
    return setting.token_embeddings.T @ weights
