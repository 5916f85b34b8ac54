r"""Theorem 1: what the logits and the weights above them keep while both follow the gradient.

Dictionary (the paper's letter, the field's name)
-------------------------------------------------
========================  =============================================================================================
z, (Q, M)                 attention logits, one row a query
v_k, columns of (M, K)    what neuron k reads of each token, :math:`U_C^\top w_k`
b, :math:`\bar b`         attention of a sample over the tokens, and its mean over the samples
g phi'                    minus the derivative of a sample's loss by what goes into the activation, `finite.pulls`
r, T, :math:`\lambda`     learning rate of the logits over that of the weights, temperature, weight decay
========================  =============================================================================================

All of it rests on one line: with orthonormal frozen embeddings :math:`U_C^\top f = b`, hence

.. math:: \dot v_k = E[g_k \phi_k' b], \qquad
          \dot z_q = r\, E\Big[1_q \Big(\frac{\partial b}{\partial z_q}\Big)^{\!\top} \sum_k g_k \phi_k' v_k\Big].

Linear and exp attention have a diagonal :math:`\partial b/\partial z`, equal to b/z and b/T, so that
:math:`z \dot z` or :math:`\dot z` is a multiple of :math:`\sum_k v_k \dot v_k`. Loss and activation drop out, and so
do a ReLU's gates.

Source: Tian, Wang, Zhang, Chen, Du, "JoMA", ICLR 2024 (arXiv 2310.00535), theorem 1, for one query, equal learning
rates, T = 1 and no decay. The sum over queries that share their weights, the factors r and T, the law under decay, the
sum of the softmax logits and the exact softmax identity are derived here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyheads._arrays import takes_arrays
from manyheads.errors import ShapeError, UsageError
from manyheads.joma.task import Rule

Array = NDArray[np.float64]


@takes_arrays
def conserved(rule: Rule, logits: Any, token_weights: Any) -> Any:
    r"""Return what gradient flow leaves unchanged.

    ======== ==================================================== ====================================================
    linear   :math:`\sum_q z_q^2 - r \sum_k v_k^2`                per query where each has its own weights
    exp      :math:`\sum_q z_q - \frac{r}{2T} \sum_k v_k^2`       per query where each has its own weights
    softmax  :math:`\sum_m z_{qm}`                                always per query
    ======== ==================================================== ====================================================

    Parameters
    ----------
    rule
        The layer. Assumed: orthonormal frozen embeddings, gradient flow on one loss over all queries.
    logits, token_weights
        z (..., Q, M); v (..., M, K) shared by all queries, or (..., Q, M, K) with `rule.own_weights`.

    Returns
    -------
    array
        Linear and exp: (..., M) with shared weights, of which queries have no relation each, and (..., Q, M) with
        weights of their own. Softmax: (..., Q). A JAX array, traced or not, if one was given.

    Raises
    ------
    UsageError
        Weight decay, under which nothing of this is constant: see `decayed`.

    Examples
    --------
    >>> z, v = np.full((1, 2), 3.0), np.ones((2, 4))
    >>> conserved(Rule("linear"), z, v), conserved(Rule("exp", rate_ratio=0.5), z, v), conserved(Rule("softmax"), z, v)
    (array([5., 5.]), array([2., 2.]), array([6.]))
    """
    if rule.decay:
        raise UsageError(
            f"decay={rule.decay}: the relations assume gradient flow without weight decay; linear attention has a law "
            "under it (`decayed`), the others have none"
        )
    return _relation(rule, logits, token_weights)


def _relation(rule: Rule, logits: Any, token_weights: Any) -> Any:
    z, v = _arrays(logits, token_weights)
    _check_shapes(rule, z, v)
    if rule.attention == "softmax":
        return z.sum(-1)
    squares = (v**2).sum(-1)  # (..., M) or (..., Q, M)
    powers = z**2 if rule.attention == "linear" else z
    share = rule.rate_ratio if rule.attention == "linear" else rule.rate_ratio / (2 * rule.temperature)
    return (powers if rule.own_weights else powers.sum(-2)) - share * squares


def _arrays(*given: Any) -> tuple[Any, ...]:
    """Return JAX arrays if one of them is, NumPy arrays otherwise."""
    return tuple(map(jnp.asarray if any(isinstance(one, jax.Array) for one in given) else np.asarray, given))


def _check_shapes(rule: Rule, z: Any, v: Any) -> None:
    expected = (*z.shape, v.shape[-1]) if rule.own_weights else (*z.shape[:-2], z.shape[-1], v.shape[-1])
    if z.ndim < 2 or v.shape != expected:
        kind = "(..., Q, M, K)" if rule.own_weights else "(..., M, K)"
        raise ShapeError(f"logits {z.shape}, token weights {v.shape}: expected (..., Q, M) and {kind}")


@takes_arrays
def conserved_per_query(rule: Rule, logits: Any, token_weights: Any) -> Any:
    """Return the relation of each query alone, (..., Q, M), which shared weights do not keep: a negative control.

    Raises
    ------
    UsageError
        Weight decay, as for `conserved`.
    """
    z, v = _arrays(logits, token_weights)
    if not rule.own_weights:
        v = v[..., None, :, :].repeat(z.shape[-2], axis=-3)
    return conserved(replace(rule, own_weights=True), z, v)


@takes_arrays
def decayed(rule: Rule, start: Any, times: Any) -> Any:
    r"""Return the relation of linear attention under weight decay, :math:`e^{-2 \lambda t}` of what it was.

    Both sides are quadratic, and decay shrinks both at the same rate. Derived here.

    Parameters
    ----------
    rule
        Linear attention with equal learning rates.
    start
        The relation at time zero, shape (...).
    times
        (S,).

    Returns
    -------
    array
        (S, ...).

    Raises
    ------
    UsageError
        Exp or softmax attention, which have no such law: one side is linear in the logits and the other quadratic in
        the weights. Or unequal learning rates: decay, multiplied by them, then shrinks the two sides differently.
    """
    if rule.attention != "linear":
        raise UsageError(f"attention={rule.attention!r}: only linear attention has a law under weight decay")
    if rule.rate_ratio != 1 and rule.decay:
        raise UsageError(
            f"rate_ratio={rule.rate_ratio}: the law under weight decay assumes equal learning rates of logits and "
            "weights; set rate_ratio=1, or decay=0 and use `conserved`"
        )
    first, t = _arrays(start, times)
    return np.e ** (-2 * rule.decay * t.reshape(-1, *(1,) * first.ndim)) * first


@takes_arrays
def drift(rule: Rule, times: Any, logits: Any, token_weights: Any) -> Any:
    """Return how far the relation is from its law along a path, (S, ...): zero in theory, at every time.

    Parameters
    ----------
    rule
        The layer; with weight decay, linear attention and equal learning rates.
    times, logits, token_weights
        Of the path: (S,), (S, Q, M), and (S, M, K) or (S, Q, M, K).

    Raises
    ------
    UsageError
        A rule without a law, with the assumption that it breaks.
    """
    if not rule.decay:
        relation = conserved(rule, logits, token_weights)
        return relation - relation[:1]
    decayed(rule, 0.0, times)  # refuses what has no law
    relation = _relation(rule, logits, token_weights)
    return relation - decayed(rule, relation[0], times)


@takes_arrays
def softmax_velocity(rule: Rule, attention: ArrayLike, pulls: ArrayLike, token_weights: ArrayLike) -> tuple[Any, Any]:
    r"""Return both terms of the exact identity of softmax attention, :math:`\dot z` = growth - correction.

    .. math:: \frac rT \sum_k v_k \circ \dot v_k \quad\text{and}\quad \frac rT \sum_k E[g_k \phi_k' b b^\top] v_k

    No assumption beyond orthonormal embeddings, one query and no decay. Derived here; theorem 1 replaces the second by
    :math:`\bar b\, \frac{d}{dt} \|v_k\|^2 / 2`.

    Parameters
    ----------
    attention, pulls, token_weights
        b (N, M), g phi' (N, K) of `finite.pulls`, v (M, K).

    Returns
    -------
    tuple
        Two arrays (M,).
    """
    _needs_softmax(rule)
    b, g, v = np.asarray(attention), np.asarray(pulls), np.asarray(token_weights)
    scale = rule.rate_ratio / rule.temperature
    growth = (v * (b.T @ g / len(b))).sum(1)
    seen = ((b @ v) * g).sum(1)  # (N,): sum_k g_k phi_k' (b . v_k)
    return scale * growth, scale * (b * seen[:, None]).mean(0)


def _needs_softmax(rule: Rule) -> None:
    if rule.attention != "softmax" or rule.decay:
        raise UsageError(
            f"attention={rule.attention!r}, decay={rule.decay}: this is a form for softmax attention without weight "
            "decay; for the others use `conserved`"
        )


@dataclass(frozen=True)
class SoftmaxForm:
    r"""How the logits of softmax attention moved, and how theorem 1 says they did.

    Attributes
    ----------
    moved
        z(t) - z(0), (S, M).
    constant
        The theorem with the mean attention at the start for all time,
        :math:`\frac{r}{2T} \sum_k ([v_k^2]_0^t - \bar b(0) [\|v_k\|^2]_0^t)`.
    integral
        With the moving mean, :math:`\frac{r}{2T} \sum_k ([v_k^2]_0^t - \int_0^t \bar b\, d\|v_k\|^2)`: exact for a
        single context.
    squares
        The first term alone.
    """

    moved: Array
    constant: Array
    integral: Array
    squares: Array

    def relative_error(self, form: str) -> float:
        """Return the largest error of a form ("constant", "integral" or "squares") at the end, over the movement."""
        gap = getattr(self, form)[-1] - self.moved[-1]
        return float(np.abs(gap).max() / np.abs(self.moved[-1]).max())

    def correlation(self, form: str) -> float:
        """Return the correlation over tokens between a form and the movement at the end (the paper's NC)."""
        return float(np.corrcoef(getattr(self, form)[-1], self.moved[-1])[0, 1])


@takes_arrays
def softmax_form(
    rule: Rule, times: ArrayLike, logits: ArrayLike, token_weights: ArrayLike, mean_attention: ArrayLike
) -> SoftmaxForm:
    """Return theorem 1 for softmax attention along a path, beside what the logits did.

    The integral is taken over cubic splines through the states of the path: keep enough of them.

    Parameters
    ----------
    rule
        Softmax attention without decay.
    times, logits, token_weights
        Of the path: (S,), (S, 1, M), (S, M, K).
    mean_attention
        E[b] over the contexts at each state, (S, M).

    Raises
    ------
    UsageError
        Another attention, weight decay, or fewer than four states.
    ShapeError
        Several queries: the theorem speaks of one.
    """
    from scipy.interpolate import CubicSpline

    _needs_softmax(rule)
    z, v = np.asarray(logits), np.asarray(token_weights)
    b, t = np.asarray(mean_attention), np.asarray(times)
    if z.ndim != 3 or z.shape[1] != 1 or v.ndim != 3 or b.shape != z[:, 0].shape:
        raise ShapeError(
            f"logits {z.shape}, token weights {v.shape}, mean attention {b.shape}: the softmax form is for one query, "
            "(S, 1, M), (S, M, K), (S, M)"
        )
    if len(t) < 4 or not (np.diff(t) > 0).all():
        raise UsageError(f"{len(t)} states: the integral needs four or more, at times that rise")
    squares = (v**2).sum(-1)  # (S, M)
    norms = squares.sum(-1, keepdims=True)  # (S, 1)
    scale = rule.rate_ratio / (2 * rule.temperature)
    speed = CubicSpline(t, norms)(t, 1)
    weighted = CubicSpline(t, b * speed).antiderivative()(t)  # (S, M), zero at the start
    grown = squares - squares[0]
    return SoftmaxForm(
        z[:, 0] - z[0, 0],
        scale * (grown - b[0] * (norms - norms[0])),
        scale * (grown - weighted),
        scale * grown,
    )
