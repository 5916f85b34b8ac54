"""How far the mean of an ensemble is from a limit that is itself sampled, without what either of them scatters.

Networks x_i, i = 1..n, are independent, and so are draws p_k, k = 1..K, of the limit. With |.|^2 a mean over steps,
read-outs and classes,

    b^2 = |mean x - mean p|^2 - s_x^2 / n - s_p^2 / K

has the mean |E x - E p|^2: it is a U-statistic, and negative by chance where there is no distance. Its jackknife gives
one pseudo-value a network and one a draw, whose means have the spread of b^2.

References
----------
B. Efron, C. Stein, "The jackknife estimate of variance", Annals of Statistics 9 (1981): the pseudo-values' variance is
never too small on average, also for a U-statistic without a linear part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manyheads.errors import UsageError
from manyheads.statistics import Interval, replicates_to_decide
from manyheads.statistics.intervals import half_widths, mean_interval, standard_error_of
from manyheads.study.verdicts import LEVEL, Expected, Verdict


@dataclass(frozen=True)
class SquaredBias:
    """The squared distance of the mean network from the limit.

    Attributes
    ----------
    square
        b^2, without noise; may be negative.
    networks, draws
        Pseudo-values of the jackknife, (n,) and (K,); one draw is exact.
    """

    square: float
    networks: np.ndarray
    draws: np.ndarray

    @property
    def distance(self) -> float:
        """Root of the square, with the square's sign."""
        return signed_root(self.square)

    @property
    def drawn(self) -> float:
        """Half-width of the part of the interval that the draws make."""
        return half_width_of_draws(self.draws)

    def interval(self) -> Interval:
        """Return the 99% interval of the distance; a negative end is a square below zero."""
        squares = mean_interval(self.networks, LEVEL).widened_independently(float(self.networks.mean()), self.drawn)
        return squares.shifted(self.square - float(self.networks.mean())).mapped(signed_root)


def squared_bias(networks: np.ndarray, draws: np.ndarray) -> SquaredBias:
    """Estimate how far the mean network is from the limit.

    A square is skewed: where networks scatter in few directions the 99% interval covers 97% (200 to 400 networks).

    Parameters
    ----------
    networks
        (n, ...), at least three.
    draws
        (K, ...) of the limit: at least three, or one that is exact.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> far, near = (squared_bias(rng.normal(mean, 1, (400, 5)), rng.normal(0, 0.1, (8, 5))) for mean in (0.3, 0))
    >>> far.interval().contains(0.3), near.interval().contains(0)
    (True, True)
    """
    values, wanted = (np.asarray(part, np.float64).reshape(len(part), -1) for part in (networks, draws))
    if len(values) < 3 or len(wanted) == 2:
        raise UsageError(f"{len(values)} networks and {len(wanted)} draws: three or more, or one exact solution")
    gap = values.mean(0) - wanted.mean(0)
    noise = _noise(values) + (_noise(wanted) if len(wanted) > 1 else 0.0)
    square = float((gap**2).mean()) - noise
    return SquaredBias(square, _pseudo_values(values, gap), _pseudo_values(wanted, -gap))


def signed_root(square: float) -> float:
    """Return the root of the size with the sign of the number."""
    return math.copysign(math.sqrt(abs(square)), square)


def half_width_of_draws(figures: np.ndarray) -> float:
    """Half-width of the 99% interval of the mean of one figure a draw of the limit; zero for a single, exact one."""
    return float(half_widths(standard_error_of(figures), len(figures) - 1, LEVEL)) if len(figures) > 1 else 0.0


def decide_within(
    claim: str, found: SquaredBias, most: float, *, basis: str, count: int, expected: Expected = "holds"
) -> Verdict:
    """Decide whether the distance is at most so large; `count` networks are one replicate."""
    needed = replicates_to_decide(found.networks, 0.0, (math.inf, most**2), level=LEVEL, prediction_error=found.drawn)
    return Verdict.from_interval(
        claim,
        found.interval(),
        figure=found.distance,
        target=0.0,
        tolerance=(math.inf, most),
        basis=basis,
        expected=expected,
        replicates_needed=None if needed is None else -(-needed // count),
    )


def bias_exponent(sizes: Sequence[int], first: SquaredBias, last: SquaredBias) -> tuple[float, Interval]:
    """Return the power of the size with which the distance falls between two sizes, and its 99% interval.

    The interval is Fieller's, of a ratio of two means that are measured together: it reaches to minus infinity where
    the last distance cannot be told from zero, and everywhere where the first cannot. Where one of the squares is
    negative the figure is the upper end of the interval, or zero where that has none.

    Parameters
    ----------
    sizes
        The two sizes.
    first, last
        From the same seeds, so that pseudo-values belong together.
    """
    scale = 2 * math.log(sizes[-1] / sizes[0])
    ends = _fieller(first, last)
    if ends is None or ends[1] <= 0:
        interval = Interval(-math.inf, math.inf, LEVEL)
    else:
        interval = Interval(math.log(ends[0]) / scale if ends[0] > 0 else -math.inf, math.log(ends[1]) / scale, LEVEL)
    if first.square > 0 and last.square > 0:
        return math.log(last.square / first.square) / scale, interval
    return (interval.high if math.isfinite(interval.high) else 0.0), interval


def networks_to_decide(sizes: Sequence[int], first: SquaredBias, last: SquaredBias, most: float) -> int | None:
    """Return how many networks would decide whether the power lies below `most`; None if that cannot be said.

    The power is below it where the last square is smaller than the first one times (ratio of sizes)^(2 most).
    """
    share = (sizes[-1] / sizes[0]) ** (2 * most)
    excess = last.networks - share * first.networks
    drawn = half_width_of_draws(last.draws - share * first.draws)
    return replicates_to_decide(excess, 0.0, (math.inf, 0.0), level=LEVEL, prediction_error=drawn)


def _noise(values: np.ndarray) -> float:
    return float(values.var(0, ddof=1).mean()) / len(values)


def _pseudo_values(values: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """Jackknife |mean - centre|^2 - s^2 / n, where the mean of all is `gap` away from the centre; its noise elsewhere.

    Without one network the mean moves by -(x_i - mean) / (n - 1), and the sum of squares falls by |x_i - mean|^2
    n / (n - 1).
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


def _fieller(first: SquaredBias, last: SquaredBias) -> tuple[float, float] | None:
    """Return the ends of the 99% interval of last / first, or None where the first cannot be told from zero."""
    parts = [(first.networks, last.networks)]
    if len(first.draws) > 1:
        parts.append((first.draws, last.draws))
    spread = np.zeros((2, 2))  # t^2 times the covariance of the two means
    for pair in parts:
        count = len(pair[0])
        factor = float(half_widths(1.0, count - 1, LEVEL)) ** 2
        spread += factor * np.cov(np.array(pair)) / count
    squared = first.square**2 - spread[0, 0]
    if squared <= 0:
        return None
    crossed = first.square * last.square - spread[0, 1]
    rest = last.square**2 - spread[1, 1]
    root = math.sqrt(max(crossed**2 - squared * rest, 0.0))
    return (crossed - root) / squared, (crossed + root) / squared
