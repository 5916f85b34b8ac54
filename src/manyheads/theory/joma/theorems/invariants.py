r"""Theorem 1: conserved quantities of attention logits and MLP weights under joint gradient flow.

Dictionary (the paper's letter, the field's name)
-------------------------------------------------
========================  =============================================================================================
z, (Q, M)                 attention logits, one row a query
v_k, columns of (M, K)    token weights of neuron k, :math:`U_C^\top w_k`
b, :math:`\bar b`         attention of a sample over the tokens, and its mean over the samples
g phi'                    minus the derivative of a sample's loss with respect to its pre-activation
r, T, :math:`\lambda`     learning rate of the logits over that of the weights, temperature, weight decay
========================  =============================================================================================

With orthonormal frozen embeddings :math:`U_C^\top f = b`, hence

.. math:: \dot v_k = E[g_k \phi_k' b], \qquad
          \dot z_q = r\, E\Big[1_q \Big(\frac{\partial b}{\partial z_q}\Big)^{\!\top} \sum_k g_k \phi_k' v_k\Big].

Linear and exp attention have a diagonal :math:`\partial b/\partial z`, equal to b/z and b/T, so that
:math:`z \dot z` or :math:`\dot z` is a multiple of :math:`\sum_k v_k \dot v_k`. Loss, activation and ReLU gates drop
out.

Source: Tian, Wang, Zhang, Chen, Du, "JoMA", ICLR 2024 (arXiv 2310.00535), theorem 1, for one query, equal learning
rates, T = 1 and no decay. The sum over queries that share their weights, the factors r and T, the law under decay, the
sum of the softmax logits and the exact softmax identity are derived here.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

from manyheads._arrays import takes_arrays
from manyheads._namespaces import Array
from manyheads.errors import ShapeError, UsageError
from manyheads.theory.joma.task import UpdateRule

NORMALIZED = ("softmax", "normalized-sigmoid")


@takes_arrays
def conserved_quantity(
    rule: UpdateRule,
    logits: Float[ArrayLike, "... queries tokens"],
    token_weights: Float[ArrayLike, "... tokens neurons"],
) -> Array:
    r"""Compute the quantity that gradient flow conserves.

    ================== ================================================ ==========================================
    linear             :math:`\sum_q z_q^2 - r \sum_k v_k^2`            per query where each has its own weights
    exp                :math:`\sum_q z_q - \frac{r}{2T} \sum_k v_k^2`   per query where each has its own weights
    sigmoid, square    :math:`\sum_q F(z_q) - \frac{r}{2}\sum_k v_k^2`  per query where each has its own weights
    softmax            :math:`\sum_m z_{qm}`                            always per query
    normalized-sigmoid :math:`\sum_m F(z_{qm})`                         always per query
    ================== ================================================ ==========================================

    :math:`F(z) = T^2 (z/T + e^{z/T})` (sigmoid) and :math:`z^2/4` (square): see
    `manyheads.theory.joma.theorems.attention_functions` for the rule.

    Assumed: orthonormal frozen embeddings, gradient flow on one loss over all queries.

    Parameters
    ----------
    logits, token_weights
        z; v (..., M, K) shared by all queries, or (..., Q, M, K) with `rule.per_query_weights`.

    Returns
    -------
    array
        (..., M) with shared weights, where a single query conserves nothing, and (..., Q, M) with one weight matrix per
        query. Softmax and normalized-sigmoid: (..., Q). A JAX array, traced or not, if one was given.

    Raises
    ------
    UsageError
        Weight decay, under which the quantity is not constant: see `decayed_quantity`.

    Examples
    --------
    >>> z, v = np.full((1, 2), 3.0), np.ones((2, 4))
    >>> rules = UpdateRule("linear"), UpdateRule("exp", learning_rate_ratio=0.5), UpdateRule("softmax")
    >>> [conserved_quantity(rule, z, v).tolist() for rule in rules]
    [[5.0, 5.0], [2.0, 2.0], [6.0]]
    """
    if rule.weight_decay:
        raise UsageError(
            f"weight_decay={rule.weight_decay}: expected gradient flow without weight decay; for linear attention "
            "with decay use `decayed_quantity`"
        )
    return _relation(rule, logits, token_weights)


def _relation(rule: UpdateRule, logits: Array, token_weights: Array) -> Array:
    z, v = _arrays(logits, token_weights)
    expected = (*z.shape, v.shape[-1]) if rule.per_query_weights else (*z.shape[:-2], z.shape[-1], v.shape[-1])
    if z.ndim < 2 or v.shape != expected:
        kind = "(..., Q, M, K)" if rule.per_query_weights else "(..., M, K)"
        raise ShapeError(f"logits {z.shape}, token weights {v.shape}: expected (..., Q, M) and {kind}")
    sides = logit_side(rule, z)
    if rule.attention in NORMALIZED:
        return sides.sum(-1)
    squares = (v**2).sum(-1)  # (..., M) or (..., Q, M)
    ratio = rule.learning_rate_ratio
    shares = {"linear": ratio, "exp": ratio / (2 * rule.temperature)}
    share = shares.get(rule.attention, ratio / 2)
    return (sides if rule.per_query_weights else sides.sum(-2)) - share * squares


@takes_arrays
def logit_side(rule: UpdateRule, logits: Float[ArrayLike, "*shape"]) -> Array:
    """Compute the side of the logits in the conserved quantity, of the same shape: z^2, z, or F(z)."""
    (z,) = _arrays(logits)
    if rule.attention == "linear":
        return z**2
    if rule.attention in ("exp", "softmax"):
        return z
    if rule.attention == "square":
        return z**2 / 4
    scaled = z / rule.temperature
    return rule.temperature**2 * (scaled + np.e**scaled)


def _arrays(*given: ArrayLike) -> tuple[Array, ...]:
    """Convert to JAX arrays if one of them is, to NumPy arrays otherwise."""
    return tuple(map(jnp.asarray if any(isinstance(one, jax.Array) for one in given) else np.asarray, given))


@takes_arrays
def per_query_quantity(
    rule: UpdateRule,
    logits: Float[ArrayLike, "... queries tokens"],
    token_weights: Float[ArrayLike, "... tokens neurons"],
) -> Array:
    """Compute the quantity of each query alone, (..., Q, M), which shared weights do not conserve: a negative control.

    Raises `UsageError`: weight decay, as for `conserved_quantity`.
    """
    z, v = _arrays(logits, token_weights)
    if not rule.per_query_weights:
        v = v[..., None, :, :].repeat(z.shape[-2], axis=-3)
    return conserved_quantity(replace(rule, per_query_weights=True), z, v)


@takes_arrays
def decayed_quantity(rule: UpdateRule, initial: Float[ArrayLike, "*shape"], times: Float[ArrayLike, " times"]) -> Array:
    r"""Compute the quantity of linear attention under weight decay, :math:`e^{-2 \lambda t}` times its initial value.

    Both sides are quadratic, so decay shrinks them at the same rate. Returns (S, ...). Derived here.

    Raises `UsageError`: exp or softmax attention, where one side is linear in the logits and the other quadratic in the
    weights; or unequal learning rates, under which decay shrinks the two sides differently.
    """
    if rule.attention != "linear":
        raise UsageError(f"attention={rule.attention!r}: only linear attention has a closed form under weight decay")
    if rule.learning_rate_ratio != 1 and rule.weight_decay:
        raise UsageError(
            f"learning_rate_ratio={rule.learning_rate_ratio}: expected equal learning rates of logits and weights "
            "under weight decay; set learning_rate_ratio=1, or weight_decay=0 and use `conserved_quantity`"
        )
    first, t = _arrays(initial, times)
    return np.e ** (-2 * rule.weight_decay * t.reshape(-1, *(1,) * first.ndim)) * first


@takes_arrays
def drift(
    rule: UpdateRule,
    times: Float[ArrayLike, " states"],
    logits: Float[ArrayLike, "states queries tokens"],
    token_weights: Float[ArrayLike, "states ... tokens neurons"],
) -> Array:
    """Compute the drift of the conserved quantity along a trajectory, (S, ...): zero in theory, at every time.

    Raises `UsageError`: the rule conserves nothing; the message names the assumption that it breaks. Weight decay needs
    linear attention and equal learning rates.
    """
    if not rule.weight_decay:
        relation = conserved_quantity(rule, logits, token_weights)
        return relation - relation[:1]
    decayed_quantity(rule, 0.0, times)  # checks the assumptions
    relation = _relation(rule, logits, token_weights)
    return relation - decayed_quantity(rule, relation[0], times)


@dataclass(frozen=True)
class SoftmaxRelation:
    r"""Change z(t) - z(0) of the logits of softmax attention, beside the forms of theorem 1.

    They are :math:`\frac{r}{2T} \sum_k ([v_k^2]_0^t - \bar b(0) [\|v_k\|^2]_0^t)` with the initial mean attention at
    all times, :math:`\frac{r}{2T} \sum_k ([v_k^2]_0^t - \int_0^t \bar b\, d\|v_k\|^2)` with that of each time, exact
    for a single context, and the first term alone.
    """

    change: Float[np.ndarray, "states tokens"]
    fixed_mean: Float[np.ndarray, "states tokens"]
    moving_mean: Float[np.ndarray, "states tokens"]
    squares: Float[np.ndarray, "states tokens"]

    def relative_error(self, form: str) -> float:
        """Compute the largest final error of a form, by its attribute's name, over the largest change."""
        gap = getattr(self, form)[-1] - self.change[-1]
        return float(np.abs(gap).max() / np.abs(self.change[-1]).max())

    def correlation(self, form: str) -> float:
        """Compute the correlation over tokens between a form and the change at the end (the paper's NC)."""
        return float(np.corrcoef(getattr(self, form)[-1], self.change[-1])[0, 1])


@takes_arrays
def softmax_relation(
    rule: UpdateRule,
    times: Float[ArrayLike, " states"],
    logits: Float[ArrayLike, "states 1 tokens"],
    token_weights: Float[ArrayLike, "states tokens neurons"],
    mean_attention: Float[ArrayLike, "states tokens"],
) -> SoftmaxRelation:
    """Compute the forms of theorem 1 for softmax attention along a trajectory.

    The integral is taken over cubic splines through the states, so keep enough of them. The mean attention is that over
    the contexts at each state.

    Raises `UsageError`: another attention, weight decay, or fewer than four states. `ShapeError`: several queries: the
    theorem is for one.
    """
    from scipy.interpolate import CubicSpline

    if rule.attention != "softmax" or rule.weight_decay:
        raise UsageError(
            f"attention={rule.attention!r}, weight_decay={rule.weight_decay}: expected softmax attention without "
            "weight decay; for other attention use `conserved_quantity`"
        )
    z, v = np.asarray(logits), np.asarray(token_weights)
    b, t = np.asarray(mean_attention), np.asarray(times)
    if z.ndim != 3 or z.shape[1] != 1 or v.ndim != 3 or b.shape != z[:, 0].shape:
        raise ShapeError(
            f"logits {z.shape}, token weights {v.shape}, mean attention {b.shape}: the softmax form is for one query, "
            "(S, 1, M), (S, M, K), (S, M)"
        )
    if len(t) < 4 or not (np.diff(t) > 0).all():
        raise UsageError(f"{len(t)} states: expected four or more, at rising times")
    squares = (v**2).sum(-1)  # (S, M)
    norms = squares.sum(-1, keepdims=True)  # (S, 1)
    scale = rule.learning_rate_ratio / (2 * rule.temperature)
    speed = CubicSpline(t, norms)(t, 1)
    weighted = CubicSpline(t, b * speed).antiderivative()(t)  # (S, M), zero at the start
    grown = squares - squares[0]
    return SoftmaxRelation(
        z[:, 0] - z[0, 0], scale * (grown - b[0] * (norms - norms[0])), scale * (grown - weighted), scale * grown
    )
