"""Spearman's rank correlation with an interval."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from manyheads._arrays import takes_arrays
from manyheads._extras import Float
from manyheads.errors import ShapeError, UsageError
from manyheads.statistics.intervals import Interval, as_samples, check_level


@dataclass(frozen=True)
class Correlation:
    """A rank correlation: its value in [-1, 1] and its interval."""

    value: float
    interval: Interval


@takes_arrays
def spearman(x: "Float[ArrayLike, ' n']", y: "Float[ArrayLike, ' n']", *, level: float = 0.99) -> Correlation:
    r"""Spearman's rank correlation with an interval.

    The interval is :math:`\tanh(\operatorname{artanh} r \pm z \sqrt{(1 + r^2/2)/(n - 3)})`, an approximation that is
    good for n of ten or more and |correlation| below about 0.9, and of coverage `level`. `x` and `y` are pairs, (n,).

    Raises `UsageError`: fewer than four pairs, or one of the two is constant and has no ranks.

    Examples
    --------
    >>> result = spearman([1, 2, 3, 4, 5, 6, 7, 8], [2, 1, 4, 3, 6, 5, 8, 7])
    >>> round(result.value, 3), result.interval.contains(0.5)
    (0.905, True)

    References
    ----------
    Bonett and Wright (2000), Sample size requirements for estimating Pearson, Kendall and Spearman correlations,
    Psychometrika 65.
    """
    level = check_level(level)
    x, y = as_samples(x, "x"), as_samples(y, "y")
    if x.shape != y.shape:
        raise ShapeError(f"pairs must match one to one: x has {x.size} values and y has {y.size}")
    if x.size < 4:
        raise UsageError(f"{x.size} pairs: the interval of a rank correlation needs at least four")
    if np.all(x == x[0]) or np.all(y == y[0]):
        raise UsageError("one of the two samples is constant: it has no ranks to correlate")
    value = min(1.0, max(-1.0, float(stats.spearmanr(x, y).statistic)))
    # A perfect order has an infinite artanh: it stands at half a swap of neighbours, which costs 6 / (n³ - n).
    edge = 1 - 6 / (x.size**3 - x.size)
    centre = math.atanh(min(edge, max(-edge, value)))
    half = float(stats.norm.isf((1 - level) / 2)) * math.sqrt((1 + value**2 / 2) / (x.size - 3))
    low, high = math.tanh(centre - half), math.tanh(centre + half)
    return Correlation(value, Interval(min(low, value), max(high, value), level))
