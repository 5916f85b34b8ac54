"""Unbiased squared distance between the means of two samples, with the jackknife's interval.

Samples x_i, i = 1..n, are independent, and so are p_k, k = 1..K. With |.|^2 a mean over entries,

    b^2 = |mean x - mean p|^2 - s_x^2 / n - s_p^2 / K

has the mean |E x - E p|^2: it is a U-statistic, and negative by chance where there is no distance. Its jackknife gives
one pseudo-value for each x and each p, whose means have the variance of b^2.

References
----------
B. Efron, C. Stein, "The jackknife estimate of variance", Annals of Statistics 9 (1981): the pseudo-values' variance is
never too small on average, also for a U-statistic without a linear part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manyheads.errors import UsageError
from manyheads.statistics.intervals import Interval, half_widths, mean_interval, standard_error_of
from manyheads.statistics.verdicts import replicates_to_decide

LEVEL = 0.99
LARGEST = 1e75  # its fourth power, which intervals of ratios take, is a number


@dataclass(frozen=True)
class SquaredDistance:
    """The squared distance between two means, and pseudo-values of the jackknife."""

    square: float  # b^2, without noise; may be negative
    first: np.ndarray  # (n,)
    second: np.ndarray  # (K,); a single one is exact

    @property
    def distance(self) -> float:
        """Root of the square, with the square's sign."""
        return signed_root(self.square)

    @property
    def drawn(self) -> float:
        """Half-width of the part of the interval that the second sample makes."""
        return half_width_of_draws(self.second)

    def interval(self) -> Interval:
        """Return the 99% interval of the distance; a negative end is a square below zero."""
        squares = mean_interval(self.first, LEVEL).widened_independently(float(self.first.mean()), self.drawn)
        return squares.shifted(self.square - float(self.first.mean())).mapped(signed_root)


def squared_distance(first: np.ndarray, second: np.ndarray) -> SquaredDistance:
    """Estimate the squared distance between the means of two samples, such as networks and draws of their limit.

    Samples are (n, ...), at least three, and (K, ...), at least three, or one that is exact. A square is skewed: where
    samples vary in few directions the 99% interval covers 97% (200 to 400 samples).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> far, near = (squared_distance(rng.normal(mean, 1, (400, 5)), rng.normal(0, 0.1, (8, 5))) for mean in (0.3, 0))
    >>> far.interval().contains(0.3), near.interval().contains(0)
    (True, True)
    """
    values, wanted = (np.asarray(part, np.float64).reshape(len(part), -1) for part in (first, second))
    if len(values) < 3 or len(wanted) == 2:
        raise UsageError(
            f"{len(values)} and {len(wanted)} samples: expected three of each, or one exact in second place"
        )
    if not all((np.abs(part) < LARGEST).all() for part in (values, wanted)):
        raise UsageError(f"samples are NaN or beyond {LARGEST:g}: squares of them are no numbers; rescale both samples")
    gap = values.mean(0) - wanted.mean(0)
    noise = noise_of_mean(values) + (noise_of_mean(wanted) if len(wanted) > 1 else 0.0)
    square = float((gap**2).mean() - noise)
    return SquaredDistance(square, _pseudo_values(values, gap), _pseudo_values(wanted, -gap))


def noise_of_mean(samples: np.ndarray) -> np.ndarray:
    """Return the mean square error (...) of a mean of n independent samples (..., n, entries), over all entries."""
    return np.asarray(samples.var(-2, ddof=1).mean(-1) / samples.shape[-2])


def signed_root(square: float) -> float:
    """Return the root of the size with the sign of the number."""
    return math.copysign(math.sqrt(abs(square)), square)


def half_width_of_draws(figures: np.ndarray) -> float:
    """Return the half-width of the 99% interval of a mean of samples; zero for a single, exact one."""
    return float(half_widths(standard_error_of(figures), len(figures) - 1, LEVEL)) if len(figures) > 1 else 0.0


def distance_exponent(sizes: Sequence[int], first: SquaredDistance, last: SquaredDistance) -> tuple[float, Interval]:
    """Return the power of the size with which the distance falls between two sizes, and its 99% interval.

    The interval is Fieller's, of a ratio of two means that are measured together: it reaches to minus infinity where
    the last distance cannot be told from zero, and everywhere where the first cannot. Where one of the squares is
    negative the figure is the upper end of the interval, or zero where that has none.
    Both distances are from the same seeds, so that pseudo-values belong together.
    """
    scale = 2 * math.log(sizes[-1] / sizes[0])
    low, high = _fieller(first, last) or (0.0, 0.0)
    powers = math.log(low) / scale if low > 0 else -math.inf, math.log(high) / scale if high > 0 else math.inf
    interval = Interval(*powers, LEVEL)
    if first.square > 0 and last.square > 0:
        return math.log(last.square / first.square) / scale, interval
    return (interval.high if math.isfinite(interval.high) else 0.0), interval


def samples_to_decide(sizes: Sequence[int], first: SquaredDistance, last: SquaredDistance, most: float) -> int | None:
    """Return how many networks would decide whether the power lies below `most`; None if that cannot be said.

    The power is below it where the last square is smaller than the first one times (ratio of sizes)^(2 most).
    """
    share = (sizes[-1] / sizes[0]) ** (2 * most)
    excess = last.first - share * first.first
    drawn = half_width_of_draws(last.second - share * first.second)
    return replicates_to_decide(excess, 0.0, (math.inf, 0.0), level=LEVEL, prediction_error=drawn)


def _pseudo_values(values: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """Jackknife |mean - centre|^2 - s^2 / n, where the mean of all is `gap` away from the centre; its noise elsewhere.

    Without x_i the mean moves by -(x_i - mean) / (n - 1), and the sum of squares falls by |x_i - mean|^2 n / (n - 1).
    """
    count = len(values)
    if count == 1:
        return np.zeros(1)
    away = values - values.mean(0)
    squares = (away**2).mean(1)  # |x_i - mean|^2
    rest = (squares.sum() - squares * count / (count - 1)) / ((count - 1) * (count - 2))
    moved = (gap**2).mean() - 2 * (away @ gap) / (len(gap) * (count - 1)) + squares / (count - 1) ** 2
    whole = (gap**2).mean() - squares.sum() / (count * (count - 1))
    return count * whole - (count - 1) * (moved - rest)


def _fieller(first: SquaredDistance, last: SquaredDistance) -> tuple[float, float] | None:
    """Return the ends of the 99% interval of last / first, or None where the first cannot be told from zero."""
    spread = np.zeros((2, 2))  # t^2 times the covariance of the two means
    for pair in ((first.first, last.first), (first.second, last.second)):
        if (count := len(pair[0])) > 1:
            spread += float(half_widths(1.0, count - 1, LEVEL)) ** 2 * np.cov(np.array(pair)) / count
    squared = first.square**2 - spread[0, 0]
    if squared <= 0:
        return None
    crossed = first.square * last.square - spread[0, 1]
    rest = last.square**2 - spread[1, 1]
    root = math.sqrt(max(crossed**2 - squared * rest, 0.0))
    return (crossed - root) / squared, (crossed + root) / squared
