r"""Stage one: crude estimate of the sum of the projections W_S, from uniform attention.

Since rows of attention sum to one, y_r = x_r W_S + sum_i sum_j a_irj (x_j - x_r) W_i with :math:`W_S = \sum_i W_i`
(vectors are rows). Summed over the rows r, and with attention taken for uniform, only W_S is left:
:math:`\sum_r y_r \approx \sum_j x_j W_S`. What is neglected is a bias, not noise: more examples do not remove it.

The bias is known. For independent Gaussian tokens Stein's identity, applied to the token on the left, gives exactly

.. math:: \frac1k \mathbb{E}\, X^\top 1 1^\top F(X) = \sum_i (I + \Theta_i C_i) W_i, \qquad
          C_i = \frac1k \sum_r \mathbb{E} \Big[\sum_j a_{irj} x_j x_j^\top - \bar x_{ir} \bar x_{ir}^\top\Big],
          \quad \bar x_{ir} = \sum_j a_{irj} x_j,

since the logits of a row move by Theta_i x_l, up to a constant, when all tokens are shifted alike. Where no direction
of Theta_i stands out, logits are independent of any one coordinate and C_i is a multiple of the identity,
:math:`c(\beta_i) = 1 - \mathbb{E} \sum_j \mathrm{softmax}(\beta_i g)_j^2` with beta_i the norm of Theta_i and g
normal. The crude sum is then off by :math:`\sum_i c(\beta_i) \Theta_i W_i`, whose operator norm falls as the inverse
root of the stable rank at logits of given size, and whose Frobenius norm does not know the rank. For Boolean tokens the
diagonals of Theta_i count less, by 2/k of them to first order, which is of relative order 1/d.

Both forms need two sums over the examples, S^T S and S^T R with S = sum_j x_j and R = sum_r y_r, (N, d) each: 2 d^2
numbers that are added over shards.

References
----------
S. Chen, Y. Li, "Provably learning a multi-head attention layer", arXiv 2402.04084: the first stage, one gradient step.
The form as a regression, the two sums, and the bias are worked out here.
"""

from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery._types import Array, Generator
from manyheads.recovery.examples.stages.shards import Shards, add_up
from manyheads.recovery.layers.evaluation import dense_weights, softmax
from manyheads.recovery.refusals import DesignError

CrudeForm: TypeAlias = Literal["regression", "correlation"]
WORST_CONDITION = 1e8  # condition of S^T S above which the inputs count as not spanning the space


class Moments(NamedTuple):
    """Sums over sequences that stage one needs; moments of two shards add up."""

    inputs: Array  # S^T S, (d, d), with S the sum of a sequence's tokens
    cross: Array  # S^T R, (d, d), with R the sum of its labels
    rows: int  # number of rows N k
    power: float  # sum of squares of all labels


def measure_moments(x: Array, y: Array) -> Moments:
    """Return the moments of some examples (N, k, d)."""
    tokens, labels = x.sum(1), y.sum(1)  # (N, d)
    return Moments(tokens.T @ tokens, tokens.T @ labels, x.shape[0] * x.shape[1], float(np.vdot(y, y)))


def estimate_crude_sum(data: Shards, form: CrudeForm = "regression") -> tuple[Array, float]:
    r"""Estimate the sum of projections, and how much of the labels' size it accounts for.

    "correlation", as published: one gradient step from zero projections under uniform attention,
    :math:`\frac1{kN}\sum_n X_n^\top 1 1^\top Y_n`, which is right for inputs of identity covariance. "regression": its
    least-squares form, right for any covariance. Returns the estimate (d, d) and its effective size, ||estimate||_F
    over the root mean square of the labels' norms: about one or more where projections do not cancel.
    """
    if form not in ("regression", "correlation"):
        raise UsageError(f"form={form!r}: expected 'regression' or 'correlation'")
    moments = Moments(*add_up(data.map(measure_moments)))
    values = np.linalg.eigvalsh(moments.inputs)
    condition = float(values[-1] / values[0]) if values[0] > 0 else np.inf
    what = "the sums of tokens do not span the space: project the tokens, or add examples"
    DesignError.if_above(condition, WORST_CONDITION, what)
    regression = form == "regression"
    estimate = np.linalg.solve(moments.inputs, moments.cross) if regression else moments.cross / moments.rows
    variance = np.trace(moments.inputs) / (moments.rows * data.dim)
    label = (moments.power / moments.rows) ** 0.5
    return estimate, float(np.linalg.norm(estimate) * variance**0.5 / label) if label else 0.0


def predict_bias(layer: AttentionLayer, length: int, rng: Generator, draws: int = 200_000) -> Array:
    r"""Return the bias of the correlation form, to leading order in the stable rank: sum_i c(beta_i) Theta_i W_i.

    c is a Monte Carlo mean over `draws` rows of `length` independent logits: its standard error is below
    1 / (2 sqrt(draws)).
    """
    theta, projection, *_ = dense_weights(layer)
    rows = rng.standard_normal((draws, length))
    sizes = np.linalg.norm(theta, axis=(1, 2))
    spread = [1 - float(np.square(softmax(size * rows)).sum(-1).mean()) for size in sizes]
    return np.einsum("i,ide,ief->df", spread, theta, projection)
