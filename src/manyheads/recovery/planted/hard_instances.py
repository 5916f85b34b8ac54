r"""Hard instances: layers whose signal lies in high Fourier degrees of Boolean tokens (parity, wave).

Both families read two Boolean tokens. Coordinate 0 is a switch: where the two tokens agree in it, attention adds
nothing. Where they differ, what attention adds to the first row is a function of one even integer,

.. math:: u = \sum_{j \in S} (x_{1j} - x_{2j}) = \sum_{t} z_t, \qquad z = (x_{1j}, -x_{2j})_{j \in S},

a sum of 2|S| signs over a hidden set S of coordinates. A function of such a sum has a Fourier weight at each degree,
computed here exactly (`guarantees`). Functions of few coordinates do not correlate with high degrees, and a gradient of
the squared loss is nothing but correlations of labels with functions that the learner has at the time.

Derived here, after the idea of the hard instances of Chen and Li, whose own constructions differ:

* `parity_layer`: m heads, |S| = m, all weight at degree 2m - 1. Layers with different S have orthogonal signals.
* `wave_layer`: a square wave in u whose teeth are the heads. With period 4 it is the parity of all 2|S| signs as far as
  the heads reach; longer periods are learning with rounding, over covariates in {-1, 0, 1}.

Hard is meant for learners that use correlations with the labels, or gradients: the squares of a parity layer's labels
give S away, and Gaussian elimination finds that of a wave with period 4, because labels have no noise
(`manyheads.recovery.planted.attacks`). Neither family is a cryptographic object.

References
----------
S. Chen, Y. Li, "Provably learning a multi-head attention layer", arXiv 2402.04084: that statistical and cryptographic
lower bounds for this problem exist.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import comb

from manyheads._arrays import takes_arrays
from manyheads._extras import Float
from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery._types import Array
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.refusals import IllConditioned

# Condition number of the system for the projections above which a parity layer is refused: six heads reach 8e3. The
# signal, of size one, is a difference of terms as large as the projections; at 1e4 single precision keeps three
# digits of it.
WORST_CONDITION = 1e4
SHARPEST = 12.0  # least slope of a wave: at the nearest even value, one away, a tooth is within 1.3e-5 of its plateau


@dataclass(frozen=True)
class ParitySystem:
    """The heads of a parity layer: slopes, weights of the projections, and the condition of the system they solve."""

    slopes: Array
    weights: Array
    condition: float


@dataclass(frozen=True)
class Guarantees:
    """Known facts of a hard layer."""

    # (2|S| + 1,): Fourier weight of the signal at each degree in the 2|S| signs, where the switch is on. Degree 0 is a
    # linear function of the tokens.
    fourier_weights: Array
    family: int  # number of hidden sets of this size: layers that a learner must tell apart

    def share_up_to(self, degree: int) -> float:
        """Share of the Fourier weight (degree 0 apart) that lies at degrees 1 to `degree`."""
        return float(np.sum(self.fourier_weights[1 : degree + 1]) / np.sum(self.fourier_weights[1:]))

    def queries(self, tolerance: float) -> float:
        r"""Least number of correlational queries that must be asked, if signals of the family are orthogonal.

        A query g of norm one has, by Bessel, :math:`\sum_S \langle g, f_S/\|f_S\|\rangle^2 \le 1`: it correlates by
        more than `tolerance` with at most 1/tolerance² of the signals, and rules out no other.
        """
        return self.family * tolerance**2


@takes_arrays
def parity_system(heads: int, slopes: ArrayLike | None = None) -> ParitySystem:
    r"""Solve for the projections that make m sigmoids of the sum u a parity-like function.

    .. math:: \sum_i w_i \tanh(c_i u / 2) = (-1)^{(2m - u)/2}\, u / m, \qquad u = 2, 4, \dots, 2m

    Both sides are odd in u, so it holds at every value. The right side is the elementary symmetric polynomial of degree
    2m - 1 in the 2m signs, divided by m: with :math:`z_t^{-1} = z_t`, :math:`e_{2m-1}(z) = \prod_t z_t \sum_t z_t`.

    Slopes c (m,) are positive and distinct; None takes a geometric grid from 0.6/m to 2.5, which keeps projections
    small and bears six heads.
    """
    if heads < 1:
        raise UsageError(f"heads={heads}: a parity layer has at least one")
    grid = np.geomspace(0.6 / heads, 2.5, heads) if heads > 1 else np.array([2.5])
    chosen = np.asarray(grid if slopes is None else slopes, np.float64)
    if chosen.shape != (heads,) or not np.all(chosen > 0) or len(np.unique(chosen)) < heads:
        raise UsageError(f"slopes {chosen.tolist()}: give {heads} distinct positive numbers")
    u = np.arange(2, 2 * heads + 1, 2)
    system = np.tanh(np.outer(u, chosen) / 2)  # (u, m)
    condition = float(np.linalg.cond(system))
    what = f"{heads} slopes give projections that cancel: use fewer heads, or slopes apart"
    IllConditioned.if_above(condition, WORST_CONDITION, what)
    wanted = (-1.0) ** ((2 * heads - u) // 2) * u / heads
    return ParitySystem(chosen, np.linalg.solve(system, wanted), condition)


@takes_arrays
def parity_layer(
    dim: int, heads: int, hidden: Iterable[int], *, slopes: "Float[ArrayLike, ' m'] | None" = None
) -> AttentionLayer:
    r"""Return a layer whose attention signal has all its Fourier weight at degree 2m - 1.

    :math:`\Theta_i = c_i e_0 1_S^\top`, :math:`W_i = w_i e_0 e_0^\top` with c and w from `parity_system`. On two
    Boolean tokens that differ in coordinate 0, attention adds :math:`e_{2m-1}(z)/m` to entry 0 of the first row and
    its negative to that of the second: weight 2/m, at degree 2m - 1 only. A product of 2m - 1 of the signs names S, so
    the signals of all :math:`\binom{d-1}{m}` sets are orthogonal.

    Parameters
    ----------
    dim
        d > m.
    heads
        m, at most six on the default grid of slopes.
    hidden
        S: m different coordinates among 1..d-1.
    slopes
        See `parity_system`.

    Raises
    ------
    UsageError
        A hidden set of another size or outside 1..d-1.
    IllConditioned
        More heads than the projections bear.

    Examples
    --------
    >>> found = guarantees(parity_layer(8, 2, hidden=(3, 5)), hidden=(3, 5))
    >>> found.fourier_weights.round(12).tolist(), found.family
    ([0.0, 0.0, 0.0, 1.0, 0.0], 21)
    """
    hidden = _check_hidden(dim, hidden)
    if len(hidden) != heads:
        raise UsageError(f"hidden={hidden}: a parity layer with {heads} heads hides {heads} coordinates")
    system = parity_system(heads, slopes)
    theta, projection = np.zeros((heads, dim, dim)), np.zeros((heads, dim, dim))
    theta[:, 0, list(hidden)] = system.slopes[:, None]
    projection[:, 0, 0] = system.weights
    return AttentionLayer(theta, projection)


@takes_arrays
def wave_layer(
    dim: int, heads: int, hidden: Iterable[int], *, period: int = 4, slope: float = SHARPEST
) -> AttentionLayer:
    r"""Return a layer whose attention signal is a square wave in a sum over hidden coordinates.

    With s the indicator of S and thresholds :math:`t_i = (i - (m-1)/2)\, q/2` (one more when q/4 is even, so that no
    even number is a threshold): :math:`\Theta_i = e_0 (c s - \tfrac12 c\, t_i e_0)^\top`,
    :math:`W_i = (-1)^i e_0 e_0^\top`. On two Boolean tokens that differ in coordinate 0, entry 0 of the first row is
    :math:`x_{10} \sum_i (-1)^i \tanh(c (v - t_i)/2)` with :math:`v = x_{10}\, u`: within 1.3e-5 m of 0 or 2, changing
    every q/2, as long as :math:`|v| \le m q / 4`, and constant outside.

    m = `heads` is even, so that the projections sum to zero and the wave ends on both sides at the same height, and
    large enough that the teeth reach two standard deviations of v: :math:`m q / 4 \ge 2 \sqrt{2 |S|}`. S = `hidden`
    has coordinates among 1..d-1, q = `period` is a multiple of 4 (at q = 4 the wave is the parity of the 2\|S\| signs),
    and c = `slope` is at least 12.

    Raises
    ------
    UsageError
        An odd number of heads, heads that do not reach, a period or slope that makes no wave, a bad hidden set.

    Examples
    --------
    >>> found = guarantees(wave_layer(8, 6, hidden=(2, 4, 7)), hidden=(2, 4, 7))
    >>> found.fourier_weights.round(3).tolist()
    [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    """
    hidden = _check_hidden(dim, hidden)
    if heads < 2 or heads % 2:
        raise UsageError(f"heads={heads}: a wave has an even number of teeth; with an odd one its ends differ")
    if period < 4 or period % 4:
        raise UsageError(f"period={period}: give a multiple of 4, the sum takes even values")
    if not SHARPEST <= slope < math.inf:
        raise UsageError(f"slope={slope}: teeth are sharp from {SHARPEST:g} on")
    reach, spread = heads * period / 4, math.sqrt(2 * len(hidden))
    if reach < 2 * spread:
        needed = 2 * math.ceil(4 * spread / period)
        short = f"{heads} heads of period {period} reach {reach:g}, the sum has standard deviation {spread:.3g}"
        raise UsageError(f"{short}: give {needed} heads or more, a longer period, or hide fewer coordinates")
    thresholds = (np.arange(heads) - (heads - 1) / 2) * period / 2 + (1 if period % 8 == 0 else 0)
    theta, projection = np.zeros((heads, dim, dim)), np.zeros((heads, dim, dim))
    theta[:, 0, list(hidden)] = slope
    theta[:, 0, 0] = -slope * thresholds / 2
    projection[:, 0, 0] = (-1.0) ** np.arange(heads)
    return AttentionLayer(theta, projection)


def guarantees(layer: AttentionLayer, hidden: Iterable[int]) -> Guarantees:
    r"""Compute the Fourier weights of the signal of a hard layer exactly.

    The signal depends on the n = 2\|S\| signs through their sum alone. With f_j its value when j of them are negative
    (one call of the layer each) and the Krawtchouk polynomials
    :math:`K_k(j) = [t^k]\,(1+t)^{n-j}(1-t)^j`, the Fourier weight at degree k is

    .. math:: \binom{n}{k}^{-1} \Big( 2^{-n} \sum_j \binom{n}{j} K_k(j) f_j \Big)^2 .

    Of layers other than those of `parity_layer` and `wave_layer` the figures say nothing.
    """
    hidden = _check_hidden(layer.dim, hidden)
    signs = 2 * len(hidden)
    x = np.zeros((signs + 1, 2, layer.dim))
    x[:, 0, 0], x[:, 1, 0] = 1.0, -1.0
    z = np.where(np.arange(signs) < np.arange(signs + 1)[:, None], -1.0, 1.0)  # (j, t): the first j are negative
    x[:, 0, list(hidden)], x[:, 1, list(hidden)] = z[:, : len(hidden)], -z[:, len(hidden) :]
    values = attention_signal(layer, x)[:, 0, 0]
    count = comb(signs, np.arange(signs + 1))
    sums = _krawtchouk(signs) @ (count / 2.0**signs * values)
    return Guarantees(sums**2 / count, math.comb(layer.dim - 1, len(hidden)))


@takes_arrays
def attention_signal(layer: AttentionLayer, x: ArrayLike) -> Array:
    r"""Return what a layer adds to uniform attention, :math:`F(x) - \frac1k \sum_j x_j \sum_i W_i - c`, (n, k, d)."""
    tokens = np.asarray(x, np.float64)
    uniform = tokens.mean(axis=-2, keepdims=True) @ np.sum(layer.projection, axis=0)
    return evaluate_layer(layer, tokens) - uniform - (0 if layer.bias is None else layer.bias)


def _check_hidden(dim: int, hidden: Iterable[int]) -> tuple[int, ...]:
    chosen = tuple(int(coordinate) for coordinate in hidden)
    if not chosen or len(set(chosen)) < len(chosen) or not all(1 <= coordinate < dim for coordinate in chosen):
        raise UsageError(f"hidden={chosen}: give different ones among 1 to {dim - 1}; coordinate 0 is the switch")
    return chosen


def _krawtchouk(signs: int) -> Array:
    """Return K_k(j) as (k, j), from the coefficients of (1 + t)^(n - j) (1 - t)^j."""
    table = np.empty((signs + 1, signs + 1))
    for negative in range(signs + 1):
        row = np.ones(1)
        for factor in [1.0] * (signs - negative) + [-1.0] * negative:
            row = np.convolve(row, [1.0, factor])
        table[:, negative] = row
    return table
