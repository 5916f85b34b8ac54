"""Frozen embeddings with a given Gram matrix, and the couplings of tokens along a trajectory."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from manyheads.theory.joma.systems.gradient_flow import FlowTrajectory
from manyheads.theory.joma.systems.layer import LayerParameters, Loss, forward
from manyheads.theory.joma.task import JomaTask, UpdateRule


def with_gram(task: JomaTask, gram: Float[np.ndarray, "tokens tokens"]) -> JomaTask:
    """Replace the token embeddings by the symmetric root of a Gram matrix, orthogonal to one query embedding.

    Only products of embeddings enter the flow, so d = M + 1 dimensions hold embeddings of any other dimension. The task
    is not `checked`, because its embeddings are not orthonormal.
    """
    tokens = len(gram)
    values, vectors = np.linalg.eigh(gram)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    frame = np.concatenate([root, np.zeros((1, tokens))])  # (M + 1, M)
    query = np.eye(tokens + 1)[:, tokens:]
    return eqx.tree_at(lambda t: (t.token_embeddings, t.query_embeddings), task, (frame, query))


def random_gram(tokens: int, dimension: int, rng: np.random.Generator) -> Float[np.ndarray, "tokens tokens"]:
    """Draw the cosines of random directions, the identity in expectation."""
    directions = rng.normal(size=(dimension, tokens))
    directions /= np.linalg.norm(directions, axis=0)
    return directions.T @ directions


def integrate_couplings(
    path: FlowTrajectory, task: JomaTask, loss: Loss, rule: UpdateRule
) -> tuple[Float[np.ndarray, "states tokens tokens"], Float[np.ndarray, "tokens tokens"]]:
    """Integrate sum_k v_mk a_jk along a trajectory of one query by Simpson's rule, its absolute value to the end."""
    from scipy.integrate import cumulative_simpson, trapezoid

    rates, times = np.asarray(_coupling_rates(path.network, task, loss, rule)), np.asarray(path.times)
    return cumulative_simpson(rates, x=times, axis=0, initial=0), trapezoid(np.abs(rates), times, axis=0)


@eqx.filter_jit
def _coupling_rates(network: LayerParameters, task: JomaTask, loss: Loss, rule: UpdateRule) -> jax.Array:
    task = jax.tree.map(jnp.asarray, task)

    def rates(state: LayerParameters) -> jax.Array:
        b, preactivations = forward(state, task, rule)  # (N, M), (N, K)
        gradient = -jax.grad(lambda a: loss(rule.function(a), task))(preactivations)  # of the mean over samples
        return (task.token_embeddings.T @ state.weights) @ (b.T @ gradient).T  # (M, M)

    return jax.vmap(rates)(jax.tree.map(jnp.asarray, network))
