r"""Theorem 1 for embeddings that are not orthogonal: what stays conserved, and how fast the rest drifts.

Dictionary (the paper's letter, the field's name)
-------------------------------------------------
==========================  ===========================================================================================
:math:`U_C`, (d, M)         frozen token embeddings, columns of length one; d may be below M
:math:`G = U_C^\top U_C`    their Gram matrix: cosines, ones on the diagonal
:math:`\mu`                 coherence, the largest :math:`|G_{mj}|` off the diagonal
:math:`a_k`, (M,)           :math:`E[g_k \phi_k' b]`, the gradient of neuron k that each token receives
:math:`C_{mj}`              couplings :math:`\int_0^t \sum_k v_{mk} a_{jk}`
==========================  ===========================================================================================

The query embedding is orthogonal to the tokens. Then :math:`U_C^\top \dot w_k = G a_k`, while the logits of linear and
exp attention move by :math:`\sum_k a_{mk} v_{mk}`, which knows nothing of G. Hence the quantity of theorem 1 drifts by

.. math:: \kappa \sum_{j \ne m} (-G_{mj})\, C_{mj}, \qquad
          |\text{drift}_m| \le \kappa \mu \int_0^t \Big( \sum_{j \ne m} \Big|\sum_k v_{mk} a_{jk}\Big| \Big),

with :math:`\kappa = 2r` (linear) and r/T (exp). The first is an identity along the trajectory itself. With the
couplings of orthonormal embeddings in place of its own it is the first order in the cosines. For random directions in
d dimensions the cosines are independent with variance 1/d, so that the root mean square of the drift is
:math:`\kappa d^{-1/2} (\sum_{j \ne m} C_{mj}^2)^{1/2}`.

Summed over the tokens nothing is lost: :math:`\sum_m a_{mk} v_{mk} = (U_C a_k)^\top w_k = \dot w_k^\top w_k` outside
the direction of the query, for any embeddings, more tokens than dimensions included.

Derived here; the paper assumes orthonormal embeddings and reports measured cosines (its reply to reviewers).
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

from manyheads._arrays import takes_arrays
from manyheads.errors import ShapeError, UsageError
from manyheads.theory.joma.systems.gradient_flow import FlowTrajectory
from manyheads.theory.joma.systems.layer import LayerParameters, Loss, forward
from manyheads.theory.joma.task import JomaTask, UpdateRule

Couplings = Float[ArrayLike, "... tokens tokens"]
Drift = Float[np.ndarray, "... tokens"]
Gram = Float[ArrayLike, "tokens tokens"]


@takes_arrays
def token_sum(
    rule: UpdateRule,
    logits: Float[ArrayLike, "... queries tokens"],
    weights: Float[ArrayLike, "... width neurons"],
    query_embedding: Float[ArrayLike, " width"],
) -> Any:
    r"""Compute the quantity that gradient flow conserves for any token embeddings, (...).

    .. math:: \sum_m z_m^2 - r \|W_\perp\|_F^2 \ \text{(linear)}, \qquad
              \sum_m z_m - \frac{r}{2T} \|W_\perp\|_F^2 \ \text{(exp)},

    summed over queries, with the part :math:`W_\perp` of W orthogonal to the query embedding. Softmax attention has no
    such quantity.

    Raises `UsageError`: softmax attention, weight decay, or one matrix per query.
    """
    _check_rule(rule)
    z, w, u = np.asarray(logits), np.asarray(weights), np.asarray(query_embedding)
    squares = (w**2).sum((-1, -2)) - (np.einsum("d,...dk->...k", u, w) ** 2).sum(-1) / (u @ u)
    powers = z**2 if rule.attention == "linear" else z
    return powers.sum((-1, -2)) - _factor(rule) / 2 * squares


def _check_rule(rule: UpdateRule) -> None:
    if rule.attention not in ("linear", "exp") or rule.weight_decay or rule.per_query_weights:
        raise UsageError(
            f"attention={rule.attention!r}, weight_decay={rule.weight_decay}, per_query_weights="
            f"{rule.per_query_weights}: expected linear or exp attention, no weight decay, and shared weights"
        )


def _factor(rule: UpdateRule) -> float:
    """Return kappa, the drift per coupling and cosine."""
    ratio = float(rule.learning_rate_ratio)
    return 2 * ratio if rule.attention == "linear" else ratio / float(rule.temperature)


@takes_arrays
def drift_from_couplings(rule: UpdateRule, gram: Gram, couplings: Couplings) -> Drift:
    """Compute the drift of theorem 1: exact with a trajectory's own couplings, first order with orthonormal ones."""
    cosines, coupled = _off_diagonal(rule, gram, couplings)
    return np.asarray(-_factor(rule) * (cosines * coupled).sum(-1))


@takes_arrays
def drift_bound(rule: UpdateRule, gram: Gram, paths: Couplings) -> Drift:
    r"""Compute the bound on the absolute drift from the integrals of :math:`|\sum_k v_{mk} a_{jk}|` over time."""
    cosines, lengths = _off_diagonal(rule, gram, paths)
    return np.asarray(_factor(rule) * np.abs(cosines).max() * lengths.sum(-1))


@takes_arrays
def random_drift(rule: UpdateRule, dimension: int, couplings: Couplings) -> Drift:
    """Compute the root mean square of the drift over random directions in `dimension` dimensions, to first order."""
    _, coupled = _off_diagonal(rule, np.eye(np.shape(couplings)[-1]), couplings)
    return np.asarray(_factor(rule) * np.sqrt((coupled**2).sum(-1) / dimension))


def _off_diagonal(rule: UpdateRule, gram: Any, couplings: Any) -> tuple[np.ndarray, np.ndarray]:
    """Check, and set the diagonals to zero."""
    _check_rule(rule)
    cosines, coupled = np.asarray(gram, float), np.asarray(couplings, float)
    if cosines.ndim != 2 or cosines.shape[0] != cosines.shape[1] or coupled.shape[-2:] != cosines.shape:
        raise ShapeError(f"Gram matrix {cosines.shape}, couplings {coupled.shape}: expected (M, M) and (..., M, M)")
    off = ~np.eye(len(cosines), dtype=bool)
    return cosines * off, coupled * off


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
