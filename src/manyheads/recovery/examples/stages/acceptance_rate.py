r"""Acceptance rate of certificates: the share of rows in which all heads agree, the price of the six stages.

A row of k tokens is certified to misfit epsilon when the softmax vectors of all m heads agree to about epsilon in k - 1
numbers each, which has probability of order :math:`\epsilon^{(k-1)(m-1)}` for epsilon to zero. What holds before the
limit follows from large dimension: projected tokens x_j W_i are then orthogonal and of one length, the best lambda is
the mean of the heads' weights, and

.. math:: \text{misfit}^2 = \frac{1}{m (k-1)} \sum_i \|a_i - \bar a\|^2, \qquad a_i = \mathrm{softmax}(\beta g_i),

with independent normal g_i (k,) and beta the Frobenius norm of every Theta. Nothing is fitted. For two heads and two
tokens the limit is known in closed form; in the range of use, saturated rows agree cheaply and the probability falls
more slowly.

References
----------
S. Chen, Y. Li, arXiv 2402.04084: the exponent (k-1)(m-1). The law before the limit, the closed form and the correction
are derived here.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from manyheads.errors import UsageError
from manyheads.recovery._types import Array, Generator
from manyheads.recovery.layers.evaluation import softmax

BLOCK = 1 << 16  # rows that are drawn at a time


def predict_acceptance(
    rng: Generator, length: int, heads: int, thresholds: ArrayLike, scale: float = 2.0, draws: int = 400_000
) -> Array:
    """Return the probability that a row is certified to each threshold, in large dimension, by Monte Carlo.

    The relative standard error is 1 / sqrt(draws x probability); `scale` is beta, `thresholds` the misfits epsilon.
    """
    if length < 2 or heads < 2:
        raise UsageError(f"length={length}, heads={heads}: give two or more of each")
    limits = np.asarray(thresholds, np.float64)
    counts = np.zeros(len(limits))
    for begin in range(0, draws, BLOCK):
        logits = scale * rng.standard_normal((min(BLOCK, draws - begin), heads, length))
        weights = softmax(logits)
        spread = np.square(weights - weights.mean(1, keepdims=True)).sum((1, 2)) / (heads * (length - 1))
        counts += (np.sqrt(spread)[:, None] < limits).sum(0)
    return counts / draws


def predict_small_threshold(scale: float = 2.0) -> float:
    r"""Return the limit of acceptance over epsilon for two heads and two tokens.

    The misfit is |p_1 - p_2| / sqrt 2 with p the weight of the first token, whose logit has variance 2 beta^2. Its
    density f at zero difference is :math:`\int f^2 = (1 + e^{\beta^2/2}) / (\beta\sqrt{2\pi})`, since 1/(p (1 - p)) = 2
    + 2 cosh u. The limit is 2 sqrt 2 times that.
    """
    return 2 * math.sqrt(2) * (1 + math.exp(scale**2 / 2)) / (scale * math.sqrt(2 * math.pi))


def dimension_correction(slope: float, length: int, dim: int) -> float:
    """Return the relative excess of acceptance at dimension d over that in large dimension, to leading order.

    The fit of k - 1 numbers takes a share (k-1)/d of the squared residual, and that square fluctuates from row to row
    with relative variance 2/d. Where acceptance is locally a power `slope` of the threshold, it grows by slope (k-1) /
    (2 d) + (slope/2) (slope/2 + 1) / d.
    """
    return (slope * (length - 1) / 2 + slope / 2 * (slope / 2 + 1)) / dim
