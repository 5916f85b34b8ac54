"""The verdict rule: holds, refuted or inconclusive, and how many replicates would decide."""

import math
from functools import cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from manyheads._arrays import takes_arrays
from manyheads._extras import Float
from manyheads.errors import UsageError
from manyheads.statistics import intervals

Outcome: TypeAlias = Literal["holds", "refuted", "inconclusive"]

MOST_REPLICATES = 10_000  # beyond, `replicates_to_decide` answers None: the estimate sits on the edge


def acceptance_region(target: float, tolerance: float | tuple[float, float]) -> intervals.Interval:
    """Return the closed region target ± tolerance in which a claim holds.

    A tolerance is a distance on both sides, or a pair (below, above), of which one may be infinite: `(inf, 0.2)` claims
    "at most target + 0.2".

    Raises `UsageError`: the target is not finite, a tolerance is negative or NaN, or both are infinite: such a claim
    cannot fail.

    Examples
    --------
    >>> acceptance_region(-0.5, 0.125)
    Interval(low=-0.625, high=-0.375, level=1.0)
    """
    below, above = tolerance if isinstance(tolerance, tuple) else (tolerance, tolerance)
    if not math.isfinite(target):
        raise UsageError(f"target={target}: a claim needs a finite target; one-sided claims have an infinite tolerance")
    if not (below >= 0 and above >= 0):
        raise UsageError(f"tolerance={tolerance}: expected a number >= 0, or a pair (below, above) of such numbers")
    if math.isinf(below) and math.isinf(above):
        raise UsageError("a tolerance that is infinite on both sides cannot be missed: a claim must be able to fail")
    return intervals.Interval(target - below, target + above, 1.0)


def decide(
    figure: float, interval: intervals.Interval, target: float, tolerance: float | tuple[float, float]
) -> Outcome:
    """Decide whether a measured figure agrees with a claim.

    * *holds*: the interval lies wholly inside the closed region [target - below, target + above]; touching is inside.
    * *refuted*: it has no point in common with the region.
    * *inconclusive*: everything else, and every figure that is NaN or infinite: it measured nothing.

    With an equal-tailed interval at level 1 - a, a claim whose true value lies on an edge or beyond is said to hold
    with probability at most a/2, and one whose true value lies in the region is refuted with probability at most
    a (a/2 on each side).

    Parameters
    ----------
    figure, interval
        The measured value, and its interval, which includes the error of the prediction.
    target, tolerance
        The claim; see `acceptance_region`, also for errors.

    Examples
    --------
    >>> from manyheads.statistics import Interval
    >>> decide(0.9, Interval(0.7, 1.1), target=0.0, tolerance=(float("inf"), 0.2))
    'refuted'
    """
    region = acceptance_region(target, tolerance)
    if not math.isfinite(figure):
        return "inconclusive"
    if interval.within(region):
        return "holds"
    return "inconclusive" if interval.overlaps(region) else "refuted"


@takes_arrays
def replicates_to_decide(
    samples: "Float[ArrayLike, ' replicates']",
    target: float,
    tolerance: float | tuple[float, float],
    *,
    level: float = 0.99,
    power: float = 0.8,
    prediction_error: float = 0.0,
) -> int | None:
    r"""How many replicates in all (those at hand included) would decide, with probability `power`.

    The mean of N replicates, given the n at hand, is spread around their mean as
    :math:`\sigma \sqrt{1/n - 1/N}`, where :math:`(n-1) s^2 / \sigma^2` is chi-squared with n - 1 degrees of freedom
    (flat prior on the mean, 1/sigma on the standard deviation). The answer is the smallest N for which the interval of
    N replicates straddles an edge of the region with probability at most 1 - `power`; the small variation of the final
    standard deviation about its expectation is left out.

    Running until a verdict comes is optional stopping: each further look at the data adds up to its own error rate.
    One extension of a run by this number at most doubles it.

    Parameters
    ----------
    samples
        Replicates at hand, shape (n,).
    target, tolerance
        The claim; see `acceptance_region`.
    level, power
        Coverage of the interval and the wanted probability of a decision, either way.
    prediction_error
        Half-width at `level` of the prediction's own interval, which more replicates do not shrink.

    Returns
    -------
    int or None
        n itself if the samples at hand decide. None if one sample, or equal ones, leave the standard deviation
        unknown, or if more than `MOST_REPLICATES` would be needed.

    Examples
    --------
    >>> replicates_to_decide([0.3, -0.2, 0.4, -0.3, 0.1, 0.2], target=0.0, tolerance=0.3)
    90
    """
    region = acceptance_region(target, tolerance)
    level, power = intervals.check_level(level), intervals.check_level(power)
    array = intervals.as_samples(samples)
    if not 0 <= prediction_error < math.inf:
        raise UsageError(f"prediction_error={prediction_error}: expected a finite half-width >= 0")
    centre = float(intervals.mean_of(array))
    now = intervals.mean_interval(array, level)
    if math.isinf(now.width):
        return None
    if decide(centre, now.widened_independently(centre, prediction_error), target, tolerance) != "inconclusive":
        return array.size
    std = float(intervals.standard_error_of(array)) * math.sqrt(array.size)
    if std == 0:  # undecided because of the prediction alone: no number of replicates changes that
        return None

    ends = (region.low - centre) / std, (region.high - centre) / std

    def decides(total: int) -> bool:
        errors, factors = (level, prediction_error / std), intervals.tail_factors(array, total)
        return _decision_probability(ends, (array.size, total), errors, factors) >= power

    high = array.size + 1
    while not decides(high):
        if high >= MOST_REPLICATES:
            return None
        high = min(2 * high, MOST_REPLICATES)
    low = max(array.size, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high


def _decision_probability(
    ends: tuple[float, float], counts: tuple[int, int], errors: tuple[float, float], factors: tuple[float, float]
) -> float:
    """Predictive probability that `counts[1]` replicates decide, after `counts[0]` of mean 0 and standard deviation 1.

    `ends` are those of the region; the two halves of the interval are Student's times `factors`.
    """
    (now, total), (level, fixed) = counts, errors
    # sigma (64,), over equally likely values of its chi-squared variable
    sigma = np.sqrt((now - 1) / stats.chi2.ppf((np.arange(64) + 0.5) / 64, now - 1))
    final = np.sqrt(((now - 1) + (total - now) * sigma**2) / (total - 1))
    below, above = (
        np.hypot(f * intervals.half_widths(final / math.sqrt(total), total - 1, level), fixed) for f in factors
    )
    moves = sigma * math.sqrt(1 / now - 1 / total)

    def lies_below(value: np.ndarray) -> np.ndarray:
        return stats.norm.cdf(value / moves)

    with np.errstate(over="ignore", invalid="ignore"):  # NaN, which is no probability, where all of them are too large
        inside = np.maximum(lies_below(ends[1] - above) - lies_below(ends[0] + below), 0.0)
        outside = lies_below(ends[0] - above) + 1 - lies_below(ends[1] + below)
        return float(np.mean(inside + outside))


def sequence_factor(level: float, first: int, now: int) -> float:
    r"""Factor on Student's interval of `now` replicates that makes it valid at every number of them from `first` on.

    Lai's sequence covers the mean of normal samples at all n >= m = `first` at once, with probability at least `level`:

    .. math:: |\bar x - \mu| \le \frac{s}{\sqrt n}
        \sqrt{(n - 1) \Big[\big(\tfrac nm (1 + \tfrac{a^2}{m - 1})^m\big)^{1/n} - 1\Big]}, \qquad
        1 - \text{level} = 2 P(T_{m-1} > a) + 2 a f_{m-1}(a),

    with f the density of Student's T.

    Raises `UsageError`: not 2 <= first <= now.

    References
    ----------
    Lai (1976), On confidence sequences, Annals of Statistics 4. Wang and Ramdas (2023), Anytime-valid t-tests and
    confidence sequences for Gaussian means with unknown variance, arXiv:2310.03722.
    """
    if not 2 <= first <= now:
        raise UsageError(f"first={first}, now={now}: a sequence begins at two replicates or more")
    start = _first_bound(level, first)
    grown = math.expm1((math.log(now / first) + first * math.log1p(start**2 / (first - 1))) / now)
    return math.sqrt((now - 1) * grown) / float(intervals.t_quantile(level, now - 1))


@cache
def _first_bound(level: float, first: int) -> float:
    """Return the a of `sequence_factor`."""
    from scipy.optimize import brentq

    law = stats.t(first - 1)
    return float(brentq(lambda a: 2 * (law.sf(a) + a * law.pdf(a)) - (1 - level), 0.0, 1e3 / (1 - level)))
