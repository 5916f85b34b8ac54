"""Confidence intervals of means, differences and proportions."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from manyheads._arrays import takes_arrays
from manyheads._extras import Float
from manyheads._namespaces import Floats
from manyheads.errors import ShapeError, UsageError


def check_level(level: float) -> float:
    """Return `level` if it is a probability in (0, 1), and refuse it otherwise."""
    if not 0 < level < 1:
        raise UsageError(f"level={level} is not a coverage probability: give a number between 0 and 1, such as 0.99")
    return float(level)


def as_samples(samples: ArrayLike, name: str = "samples") -> Floats:
    """Return `samples` as a float64 array of one axis, refusing an empty one or one that is not finite."""
    array = np.asarray(samples, dtype=np.float64)
    if array.ndim != 1:
        raise ShapeError(f"{name} has shape {array.shape}: expected an array of one axis")
    if array.size == 0:
        raise UsageError(f"{name} is empty: an interval needs at least one replicate")
    if broken := int(np.sum(~np.isfinite(array))):
        remedy = "do not average over runs that diverged, but report their share with proportion_interval"
        raise UsageError(f"{broken} of the {array.size} values of {name} are NaN or infinite: {remedy}")
    return array


@dataclass(frozen=True)
class Interval:
    """A closed interval [low, high] that covers the true value with probability at least `level`.

    Parameters
    ----------
    low, high
        Ends, low <= high; -inf and inf stand for an unbounded side. An interval that holds no finite number is refused.
    level
        Coverage probability in (0, 1]; 1 is for a bound that is proved.

    Examples
    --------
    >>> slope = Interval(-0.53, -0.48)
    >>> slope.contains(-0.5), slope.within(Interval(-0.62, -0.38)), round(slope.width, 2)
    (True, True, 0.05)
    """

    low: float
    high: float
    level: float = 0.99

    def __post_init__(self) -> None:
        low, high = float(self.low), float(self.high)
        if not (low <= high and low < math.inf and high > -math.inf):
            raise UsageError(f"[{low}, {high}] is no interval: expected low <= high and a finite number between them")
        if not 0 < self.level <= 1:
            raise UsageError(f"level={self.level} is not a coverage probability in (0, 1]")
        self.__dict__.update(low=low, high=high, level=float(self.level))

    @property
    def width(self) -> float:
        """The length high - low; infinite when a side is unbounded."""
        return self.high - self.low

    def contains(self, value: float) -> bool:
        """Tell whether low <= value <= high; the ends belong to the interval."""
        return self.low <= value <= self.high

    def within(self, other: "Interval") -> bool:
        """Tell whether every point of this interval is one of `other`; touching ends are inside."""
        return other.low <= self.low and self.high <= other.high

    def overlaps(self, other: "Interval") -> bool:
        """Tell whether the two intervals share a point; touching ends do."""
        return self.low <= other.high and other.low <= self.high

    def shifted(self, offset: float) -> Self:
        """Move both ends by a number known without error."""
        return type(self)(self.low + offset, self.high + offset, self.level)

    def widened(self, bound: float) -> Self:
        """Allow for a further error that never exceeds `bound` in absolute value: both ends move out by it."""
        if not bound >= 0:
            raise UsageError(f"bound={bound}: an interval is widened by a number that is not negative")
        return type(self)(self.low - bound, self.high + bound, self.level)

    def widened_independently(self, figure: float, half_width: float) -> Self:
        r"""Allow for a further independent error whose own interval is ± `half_width` at the same level.

        The distances from `figure` to the ends grow in quadrature: :math:`h \to \sqrt{h^2 + h_2^2}`. When both
        intervals are t intervals of normal means the result covers at least at `level` (Banerjee 1960).
        """
        if not half_width >= 0:
            raise UsageError(f"half_width={half_width}: expected a number that is not negative")
        if not (math.isfinite(figure) and self.contains(figure)):
            raise UsageError(f"figure={figure} does not lie in [{self.low}, {self.high}], which should be its interval")
        low = figure - math.hypot(figure - self.low, half_width)
        return type(self)(low, figure + math.hypot(self.high - figure, half_width), self.level)

    def mapped(self, function: Callable[[float], float]) -> Self:
        """Image under a monotone function, such as `exp` for an interval of a logarithm."""
        ends, largest = (function(self.low), function(self.high)), sys.float_info.max  # where both overflow
        return type(self)(min(*ends, largest), max(*ends, -largest), self.level)


def t_quantile(level: float, dof: ArrayLike) -> Floats:
    """Two-sided Student quantile; infinite at no degrees of freedom, normal at infinitely many."""
    dof = np.asarray(dof, dtype=np.float64)
    tail = (1 - level) / 2
    return np.where(dof > 0, -special.stdtrit(np.where(dof > 0, dof, 1.0), tail), np.inf)


def half_widths(std: Any, dof: ArrayLike, level: float) -> Floats:
    r"""Half-widths :math:`t_\nu\, s` of t intervals, elementwise; infinite where nothing is known of the spread."""
    quantile = t_quantile(level, dof)
    with np.errstate(over="ignore"):  # beyond the largest number: infinite
        return np.where(
            np.isinf(quantile), np.inf, np.where(np.isinf(quantile), 0.0, quantile) * np.asarray(std, float)
        )


@takes_arrays
def mean_interval(samples: "Float[ArrayLike, ' replicates']", level: float = 0.99) -> Interval:
    r"""Interval of a mean, :math:`\bar x \pm t_{n-1} s / \sqrt n`, pushed out on the side of a longer tail.

    Student's interval alone covers too little where samples are skewed. `tail_factors` gives the shift of each end.

    Parameters
    ----------
    samples
        Independent replicates, shape (n,), finite.
    level
        Coverage: kept at every n for normal data, and nearly for skewed ones; docs/verdicts.md has a table.

    Returns
    -------
    Interval
        (-inf, inf) for one sample. Identical samples give width zero: right for a deterministic quantity, and a
        **trap** for a discrete one, such as eight successes out of eight (use `proportion_interval`), or eight optima
        on one point of a grid (widen by its spacing).

    Raises
    ------
    UsageError
        No samples, or NaN or infinite ones.

    Examples
    --------
    >>> interval = mean_interval([-1.0, 0.0, 1.0, 2.0])
    >>> round(interval.low, 3), round(interval.high, 3)
    (-3.27, 4.27)

    References
    ----------
    Student (1908), The probable error of a mean, Biometrika 6.
    """
    return discrepancy_interval(samples, 0.0, 0.0, level=level)


@takes_arrays
def discrepancy_interval(
    samples: "Float[ArrayLike, ' replicates']",
    prediction: float,
    standard_error: float,
    dof: float = math.inf,
    level: float = 0.99,
) -> Interval:
    r"""Interval of (mean of the samples - true prediction), when the prediction has an error of its own.

    .. math:: \bar x - p \pm \sqrt{f^2 t_{n-1}^2 s^2/n + t_\nu^2 e^2}

    with the factors f >= 1 of `tail_factors` covers at least at `level` for normal errors (Banerjee 1960). Welch's
    approximation is narrower but does not cover at few replicates.

    Parameters
    ----------
    samples
        Independent replicates, shape (n,).
    prediction, standard_error, dof
        The predicted value, its standard error (0: exact) and the degrees of freedom behind that error (inf: known).

    Raises
    ------
    UsageError
        Samples or prediction are not finite, or the error is negative.

    Examples
    --------
    >>> gap = discrepancy_interval([-1.0, 0.0, 1.0, 2.0], prediction=0.5, standard_error=0.1)
    >>> round(gap.low, 3), round(gap.high, 3)
    (-3.779, 3.779)

    References
    ----------
    Banerjee (1960), Approximate confidence interval for linear functions of means of k populations when the population
    variances are not equal, Sankhyā 22.
    """
    level = check_level(level)
    array = as_samples(samples)
    if not math.isfinite(prediction):
        raise UsageError(f"prediction={prediction}: a comparison needs a finite prediction")
    if not (0 <= standard_error < math.inf and dof > 0):
        raise UsageError(f"standard_error={standard_error}, dof={dof}: expected a finite error >= 0 and dof > 0")
    return _interval(array, tail_factors(array), prediction, (standard_error, dof), level)


def student_interval(
    array: Floats, prediction: float = 0.0, standard_error: float = 0.0, dof: float = math.inf, level: float = 0.99
) -> Interval:
    """Return `discrepancy_interval` with both factors 1: for samples that are not skewed, such as logarithms."""
    return _interval(array, (1.0, 1.0), prediction, (standard_error, dof), level)


def _interval(
    array: Floats, factors: tuple[float, float], prediction: float, error: tuple[float, float], level: float
) -> Interval:
    own, other = half_widths([standard_error_of(array), error[0]], [array.size - 1, error[1]], level).tolist()
    below, above = (math.hypot(factor * own, other) for factor in factors)
    return around(float(mean_of(array)) - prediction, below, level, above)


def tail_factors(array: Floats, count: int | None = None) -> tuple[float, float]:
    r"""Return the factors >= 1 by which the lower and the upper half of Student's interval grow for skewed samples.

    A side whose tail is longer grows by the ratio of the tails, max - median over median - min or its inverse, at most
    n, to the power :math:`\min(n/8, 1, \sqrt{32/n})`. Samples of one sign whose logarithms have a standard deviation s
    above 1/2 grow away from zero by :math:`e^{16 (s - 1/2)/n}` as well: few of them hardly ever show their tail. Both
    were chosen by simulation (docs/verdicts.md). `count` is the n of a longer run with the same tails.
    """
    count = count or array.size
    low, middle, high = (float(end) for end in np.quantile(array / 2, [0, 0.5, 1]))  # halves: no overflow
    tails = middle - low, high - middle
    power = min(count / 8, 1.0, math.sqrt(32 / count))
    factors = [
        1.0 if long <= short else min(long / short if short > long / array.size else array.size, array.size) ** power
        for long, short in (tails, tails[::-1])
    ]
    if low > 0 or high < 0:
        std = float(np.std(np.log(np.abs(array)), ddof=1)) if array.size > 1 else 0.0
        factors[int(low > 0)] *= math.exp(min(16 * max(std - 0.5, 0.0) / count, 700.0))
    return factors[0], factors[1]


def proportion_interval(successes: int, trials: int, level: float = 0.99) -> Interval:
    """Clopper and Pearson's interval of a probability: it covers at least at `level` for every number of trials.

    Raises `UsageError`: not 0 <= successes <= trials with at least one trial.

    Examples
    --------
    >>> interval = proportion_interval(58, 60)
    >>> round(interval.low, 3), round(interval.high, 3)
    (0.855, 0.998)

    References
    ----------
    Clopper and Pearson (1934), The use of confidence or fiducial limits, Biometrika 26.
    """
    check_level(level)
    if not (trials >= 1 and 0 <= successes <= trials):
        raise UsageError(f"{successes} successes out of {trials} trials: expected 0 <= successes <= trials and a trial")
    from scipy import stats  # 40 MB of memory that intervals of means do not need

    ends = stats.binomtest(int(successes), int(trials)).proportion_ci(level, method="exact")
    return Interval(float(ends.low), float(ends.high), level)


def _unit(samples: Floats, axis: int) -> Floats:
    """Return powers of two that bring the largest of the samples near 1, so that no square over- or underflows."""
    return np.ldexp(1.0, np.frexp(np.max(np.abs(samples), axis=axis, keepdims=True))[1] - 1)


def mean_of(samples: Floats, axis: int = -1) -> Floats:
    """Mean that returns the common value of identical samples exactly, which a sum over n does not."""
    unit = _unit(samples, axis)
    first = np.take(samples / unit, [0], axis=axis)
    return np.squeeze((first + np.mean(samples / unit - first, axis=axis, keepdims=True)) * unit, axis=axis)


def standard_error_of(samples: Floats, axis: int = -1) -> Floats:
    """Return s / √n; 0 for one sample, whose interval is infinite by its lack of degrees of freedom."""
    count = samples.shape[axis]
    if count == 1:
        return np.zeros_like(np.take(samples, 0, axis=axis))
    # Deviations from one of the samples: identical samples have a spread of exactly zero.
    unit = _unit(samples, axis)
    away = samples / unit - np.take(samples / unit, [0], axis=axis)
    return np.std(away, axis=axis, ddof=1) / math.sqrt(count) * np.squeeze(unit, axis=axis)


def around(figure: float, below: float, level: float, above: float | None = None) -> Interval:
    """Return the interval from figure - below to figure + above, by default as far; all numbers if they overflow."""
    low, high = figure - below, figure + (below if above is None else above)
    if not math.isfinite(figure) or low == math.inf or high == -math.inf:
        low, high = -math.inf, math.inf
    return Interval(low, high, level)
