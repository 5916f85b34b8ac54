"""Convergence in size: distance to training at the largest size, as a power of the size."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from manyheads._arrays import takes_arrays
from manyheads.errors import ShapeError, check_rising
from manyheads.statistics import Interval, fit_exponent, mean_interval
from manyheads.statistics.distances import noise_of_mean

LARGEST_ERROR = 1 / 3  # relative, of the sum of squared distances: beyond it there is no distance to speak of
STEEPEST = 8.0  # powers beyond it are those of a single distance that stands out, and none
LEVEL = 0.99


class SizeDistances(NamedTuple):
    r"""Squared distances of every size but the largest to it, each (replicates, sizes - 1).

    With :math:`d_i` the difference of network i at a size and network i at the largest size,

    .. math::
        \text{mean} = |\bar d|^2 - \text{scatter}/S, \qquad \text{scatter} = \frac{1}{S-1}\sum_i |d_i - \bar d|^2,

    where :math:`|\cdot|^2` is the mean square of the entries: unbiased estimates of the squared distance between
    expectations, negative where that is below the noise, and of the variance of one difference.
    """

    mean: np.ndarray
    scatter: np.ndarray


class Fall(NamedTuple):
    """The power of the size in a distance."""

    power: float  # the figure; 0 where the distance does not stand out from the noise
    interval: Interval  # at 99%; infinite where the distance does not stand out from the noise
    samples: np.ndarray | None  # (replicates,) linearized, with the power as their mean; None where nothing stands out

    @property
    def measured(self) -> np.ndarray | tuple[float, Interval]:
        """Measure of a claim: the samples, or the figure and its interval where there are none."""
        return (self.power, self.interval) if self.samples is None else self.samples


@takes_arrays
def distances_to_largest(values: Float[ArrayLike, "replicates sizes networks *entries"]) -> SizeDistances:
    """Return how far networks are from those of the largest size, in expectation and one by one."""
    array = np.asarray(values, np.float64)
    if array.ndim < 4 or array.shape[1] < 2 or array.shape[2] < 2:
        raise ShapeError(
            f"values of shape {array.shape}: expected (replicates, sizes, networks, ...), "
            "with two or more sizes and two or more networks"
        )
    gaps = (array[:, :-1] - array[:, -1:]).reshape(*(array.shape[0], array.shape[1] - 1, array.shape[2], -1))
    return SizeDistances((gaps.mean(2) ** 2).mean(-1) - noise_of_mean(gaps), gaps.var(2, ddof=1).mean(-1))


def effective_sizes(sizes: Sequence[int], scatter: bool = False) -> np.ndarray:
    r"""Return the sizes of which distances to a *finite* largest size are plain powers.

    A mean that is b/n from its limit is :math:`b\,(1/n - 1/m)` from the mean at the largest size m, the power -1 of
    :math:`(1/n - 1/m)^{-1}`. Independent networks that scatter by :math:`(v/n)^{1/2}` differ by
    :math:`(v/n + v/m)^{1/2}`, the power -1/2 of :math:`(1/n + 1/m)^{-1}`.

    Examples
    --------
    >>> effective_sizes((4, 8, 16)).tolist(), effective_sizes((4, 12), scatter=True).tolist()
    ([5.333333333333333, 16.0], [3.0])
    """
    check_rising("sizes", sizes)
    small, largest = 1 / np.asarray(sizes[:-1], np.float64), 1 / sizes[-1]
    return 1 / (small + largest if scatter else small - largest)


def power_of_drift(sizes: Sequence[int]) -> float:
    r"""Return the power that `fall_of_mean` finds in a drift without end, :math:`\log(m/n)`.

    Distances to the largest size fall with the size even where there is no limit. What grows like a power of the size
    has a power above this one, what has a limit one below it.

    Examples
    --------
    >>> round(power_of_drift((4, 8, 16, 64)), 2), round(power_of_drift((4, 8, 16, 1024)), 2)
    (-0.42, -0.2)
    """
    squares = np.log(sizes[-1] / np.asarray(sizes[:-1], np.float64)) ** 2
    return fall_of_mean(sizes, np.stack([squares, squares])).power


def fall_of_mean(sizes: Sequence[int], squares: Float[np.ndarray, "replicates distances"]) -> Fall:
    r"""Fit a power of the effective size to the distances of means, which may be below the noise.

    The power p and a prefactor solve :math:`\sum_n (y_n - c\,s_n^{2p})(1, \log s_n) = 0` for the mean over replicates
    y of the squared distances (the score of a Poisson regression, which asks of y only that its mean is a power: no
    logarithm of a noisy number is taken). The interval is Student's for the replicates' shares in the score.

    References
    ----------
    Santos Silva, Tenreyro, "The log of gravity", Review of Economics and Statistics 88, 2006.
    """
    logs = np.log(effective_sizes(sizes))
    middle = squares.mean(0)
    total = float(middle.sum())
    nothing = Interval(-np.inf, np.inf, LEVEL)
    error = float(np.std(squares.sum(1), ddof=1)) / np.sqrt(len(squares)) if len(squares) > 1 else np.inf
    if len(logs) < 2 or not np.isfinite(total) or total <= 0 or error > LARGEST_ERROR * total:
        return Fall(0.0, nothing, None)
    wanted = float(middle @ logs) / total  # mean logarithm of the size, weighted by the squared distances

    def tilted(power: float) -> tuple[float, float]:
        weights = np.exp(2 * power * (logs - logs.mean()))
        weights /= weights.sum()
        mean = float(weights @ logs)
        return mean, float(weights @ (logs - mean) ** 2)

    ends = [tilted(power)[0] - wanted for power in (-STEEPEST, STEEPEST)]
    if ends[0] >= 0 or ends[1] <= 0:  # beyond the steepest: nothing but the first or the last distance is there
        return Fall(0.0, nothing, None)
    power = float(brentq(lambda p: tilted(p)[0] - wanted, -STEEPEST, STEEPEST))
    samples = power + squares @ (logs - wanted) / (2 * tilted(power)[1] * total)
    return Fall(power, mean_interval(samples, LEVEL), samples)


def fall_of_scatter(sizes: Sequence[int], squares: Float[np.ndarray, "replicates distances"]) -> Fall:
    """Fit a power of the effective size to the scatter of single networks."""
    if not np.isfinite(squares).all() or not (squares > 0).all():
        return Fall(0.0, Interval(-np.inf, np.inf, LEVEL), None)
    fit = fit_exponent(effective_sizes(sizes, scatter=True), np.sqrt(squares), level=LEVEL)
    return Fall(fit.exponent, fit.interval, np.asarray(fit.replicate_exponents))
