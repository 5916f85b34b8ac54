r"""Logits of Boolean tokens against the normal distribution with the same moments.

Given its query, a logit is :math:`u = \sum_c w_c x_c` with w = Theta^T x_r and signs x_c. A Gaussian token would make
it normal with variance \|w\|^2, and the central limit theorem says how far the two distributions are.

* If all \|w_c\| are equal, u lives on a lattice of spacing 2 \|w\| / sqrt(d), and half of the mass at its largest atom
  is left, whatever estimate with a density is used: :math:`1 / \sqrt{2 \pi d}`. This is the order of the bound of Berry
  and Esseen; no argument by moments improves it.
* If the w_c are far from every lattice, what is left is the next term of Edgeworth's expansion. Signs have no third
  cumulant, and the fourth gives :math:`\frac{1}{12} \sum_c (w_c / \|w\|)^4 \max |He_3 \varphi|`, of order 1/d.

References
----------
W. Feller, An Introduction to Probability Theory and Its Applications II, chapter XVI: both expansions.
S. Chen, Y. Li, arXiv 2402.04084: that lattices have to be kept away from. The two laws for logits are worked out here.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr
from scipy.stats import binom

from manyheads.errors import UsageError
from manyheads.recovery._types import Array

ENUMERATED = 18  # signs up to which all values are enumerated
PEAK = math.sqrt(3 - math.sqrt(6))  # where |He_3 phi| is largest: He_4 vanishes
# Inversion of the characteristic function: where it ends, its step, and the places at which the gap is computed
LAST, STEP = 100.0, 0.02
PLACES = np.arange(0.0, 4.0, 0.02)


class NormalGap(NamedTuple):
    """How far the distribution of sum_c w_c x_c / |w| is from the standard normal one."""

    distance: float  # largest difference of the distribution functions
    near: float  # probability of |u| <= width, over the normal one


def measure_gap(weights: Array, width: float) -> NormalGap:
    """Compare the distribution over signs with the normal one, exactly or by inversion of its characteristic function.

    Exact are weights of one size, by the binomial distribution, and up to 18 others, by enumeration. The
    characteristic function of more, prod_c cos(w_c t / |w|), has to be small at t = 100, as it is far from lattices.

    Raises
    ------
    UsageError
        Weights that are all zero, or that are near a lattice without being of one size.

    Examples
    --------
    >>> import numpy as np
    >>> measure_gap(np.ones(100), 0.1).distance
    0.0397...
    """
    weights = np.abs(np.asarray(weights, np.float64))
    if weights.ndim != 1 or not np.any(weights):
        raise UsageError(f"weights of shape {weights.shape}: give a vector that is not zero")
    unit = weights / np.linalg.norm(weights)
    if np.ptp(unit) < 1e-12:
        values = (2 * np.arange(unit.size + 1) - unit.size) * unit[0]
        return _compare(values, binom.pmf(np.arange(unit.size + 1), unit.size, 0.5), width)
    if unit.size <= ENUMERATED:
        values = enumerate_logits(unit)
        return _compare(values, np.full(values.size, 1 / values.size), width)
    times = np.arange(STEP / 2, LAST, STEP)  # midpoints
    excess = (np.prod(np.cos(times[:, None] * unit), axis=1) - np.exp(-(times**2) / 2)) / times
    left = float(np.abs(excess[times > LAST / 2] * times[times > LAST / 2]).max())
    if left > 0.01:
        raise UsageError(
            f"characteristic function {left:.2g} at t > {LAST / 2:g}, near a lattice: give {ENUMERATED} weights at most"
        )
    gap = STEP / math.pi * np.sin(np.append(PLACES, width)[:, None] * times) @ excess  # F - Phi, odd in its argument
    inside = 2 * float(ndtr(width)) - 1
    return NormalGap(float(np.abs(gap[:-1]).max()), (inside + 2 * float(gap[-1])) / inside)


def enumerate_logits(weights: Array) -> Array:
    """Return all values of sum_c w_c x_c over signs x, in rising order, (2^d,)."""
    values = np.zeros(1)
    for weight in weights:
        values = np.concatenate([values - weight, values + weight])
    return np.sort(values)


def lattice_distance_to_normal(dim: int) -> float:
    """Return the Kolmogorov distance of d equal weights, to leading order."""
    return 1 / math.sqrt(2 * math.pi * dim)


def edgeworth_distance_to_normal(weights: Array) -> float:
    """Return the Kolmogorov distance of weights far from lattices, to leading order."""
    fourth = float(np.sum(np.asarray(weights) ** 4) / np.sum(np.asarray(weights) ** 2) ** 2)
    peak = PEAK * (3 - PEAK**2) * math.exp(-(PEAK**2) / 2) / math.sqrt(2 * math.pi)
    return fourth * peak / 12


def _compare(values: Array, masses: Array, width: float) -> NormalGap:
    """Compare atoms with the normal distribution; values that differ by less than 1e-9 are one atom."""
    last = np.append(np.diff(values) > 1e-9, True)
    after = np.cumsum(masses)[last]
    below, normal = np.append(0.0, after[:-1]), ndtr(values[last])
    distance = float(np.maximum(np.abs(after - normal), np.abs(below - normal)).max())
    near = float(masses[np.abs(values) <= width + 1e-9].sum())
    return NormalGap(distance, near / (2 * float(ndtr(width)) - 1))
