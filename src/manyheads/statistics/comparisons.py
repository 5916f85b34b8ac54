"""Comparisons of two samples that share their replicates: paired differences and rank correlation."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from manyheads._arrays import takes_arrays
from manyheads.errors import ShapeError, UsageError
from manyheads.statistics.intervals import Array, Interval, as_samples, check_level, mean_interval, mean_of

MOST_ENUMERATED = 14
"""Up to 2^14 sign patterns are enumerated; beyond, they are sampled."""

SIGN_DRAWS = 19_999
"""Sampled sign patterns; with the observed one they are 20,000, so the smallest p-value is 5e-5."""


@dataclass(frozen=True)
class PairedComparison:
    """The difference of two paired samples.

    Attributes
    ----------
    mean, interval
        Mean of a - b and its Student interval.
    p_value
        Two-sided sign-flip p-value of "a and b are exchangeable within every pair".
    effect_size
        Mean of the differences over their standard deviation; infinite for equal differences that are not zero.
    exact
        Whether all sign patterns were enumerated.
    """

    mean: float
    interval: Interval
    p_value: float
    effect_size: float
    exact: bool


@takes_arrays
def paired_comparison(
    a: ArrayLike, b: ArrayLike, *, level: float = 0.99, rng: np.random.Generator | None = None
) -> PairedComparison:
    r"""Compare paired replicates: mean difference with its interval, sign-flip test, effect size.

    The p-value is the share of the sign patterns :math:`\epsilon \in \{\pm 1\}^n` with
    :math:`|\sum \epsilon_i d_i| \ge |\sum d_i|`, d = a - b. It assumes symmetry of the differences under the null
    hypothesis and nothing else. Its smallest value is :math:`2^{1-n}`: with fewer than eight pairs it cannot fall below
    1%.

    Parameters
    ----------
    a, b
        Replicates, shape (n,), a[i] and b[i] of the same replicate.
    level
        Coverage of the interval.
    rng
        Source of sign patterns for n > 14, where (1 + hits) / (1 + draws) keeps the test valid; not used below.

    Raises
    ------
    ShapeError
        Different lengths.
    UsageError
        Not finite, or more than 14 pairs without `rng`.

    Examples
    --------
    >>> result = paired_comparison([1.2, 1.4, 1.1, 1.5, 1.3], [1.0, 1.1, 1.0, 1.1, 1.2])
    >>> round(result.mean, 2), result.p_value, result.exact
    (0.22, 0.0625, True)

    References
    ----------
    Fisher (1935), The Design of Experiments, section 21. Phipson and Smyth (2010), Permutation p-values should never
    be zero, Statistical Applications in Genetics and Molecular Biology 9.
    """
    a, b = as_samples(a, "a"), as_samples(b, "b")
    if a.shape != b.shape:
        raise ShapeError(f"paired samples must match one to one: a has {a.size} replicates and b has {b.size}")
    difference = a - b
    mean = float(mean_of(difference))
    std = float(np.std(difference - difference[0], ddof=1)) if difference.size > 1 else math.nan
    effect = mean / std if std > 0 else (0.0 if mean == 0 else math.copysign(math.inf, mean))
    exact = difference.size <= MOST_ENUMERATED
    if not exact and rng is None:
        raise UsageError(
            f"{difference.size} pairs have too many sign patterns to enumerate: give a NumPy generator as rng"
        )
    return PairedComparison(mean, mean_interval(difference, level), _sign_flip(difference, rng), effect, exact)


def _sign_flip(difference: Array, rng: np.random.Generator | None) -> float:
    count = difference.size
    if count <= MOST_ENUMERATED:
        patterns = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    else:
        assert rng is not None  # refused by the caller
        patterns = rng.integers(0, 2, (SIGN_DRAWS, count), dtype=np.int8)
    sums = np.abs((1.0 - 2.0 * patterns) @ difference)
    # Patterns that tie in exact arithmetic must tie here: the margin is a few roundings of the largest possible sum.
    reached = sums >= abs(difference.sum()) - 4 * count * np.finfo(float).eps * np.abs(difference).sum()
    return float(np.mean(reached)) if count <= MOST_ENUMERATED else float((1 + np.sum(reached)) / (1 + SIGN_DRAWS))


@dataclass(frozen=True)
class Correlation:
    """A rank correlation: its value in [-1, 1], its interval, and the p-value of no association."""

    value: float
    interval: Interval
    p_value: float


@takes_arrays
def spearman(x: ArrayLike, y: ArrayLike, *, level: float = 0.99) -> Correlation:
    r"""Spearman's rank correlation with an interval.

    The interval is :math:`\tanh(\operatorname{artanh} r \pm z \sqrt{(1 + r^2/2)/(n - 3)})`, an approximation that is
    good for n of ten or more and |correlation| below about 0.9. The p-value is scipy's.

    Parameters
    ----------
    x, y
        Pairs, shape (n,), n >= 4.
    level
        Coverage of the interval.

    Raises
    ------
    UsageError
        Fewer than four pairs, or one of the two is constant and has no ranks.

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
    result = stats.spearmanr(x, y)
    value = min(1.0, max(-1.0, float(result.statistic)))
    # A perfect order has an infinite artanh: it stands at half a swap of neighbours, which costs 6 / (n³ - n).
    edge = 1 - 6 / (x.size**3 - x.size)
    centre = math.atanh(min(edge, max(-edge, value)))
    half = float(stats.norm.isf((1 - level) / 2)) * math.sqrt((1 + value**2 / 2) / (x.size - 3))
    low, high = math.tanh(centre - half), math.tanh(centre + half)
    return Correlation(value, Interval(min(low, value), max(high, value), level), float(result.pvalue))
