"""Bootstrap intervals, and means of series whose values depend on one another."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from manyheads._arrays import takes_arrays
from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.statistics.intervals import Array, Interval, as_samples, check_level, mean_interval

RESAMPLES = 9999


@takes_arrays
def bootstrap(
    samples: ArrayLike | Sequence[ArrayLike],
    statistic: Callable[..., Any],
    *,
    rng: np.random.Generator,
    level: float = 0.99,
    method: Literal["BCa", "basic", "percentile"] = "BCa",
    paired: bool = False,
) -> Interval:
    """Bootstrap interval of any statistic, or an error where the bootstrap has nothing to say.

    A thin layer over `scipy.stats.bootstrap` (9999 resamples). For a mean use `mean_interval`, which is right at any
    number of replicates; the bootstrap is right for many (its 99% interval of the mean of 8, 16, 30 normal replicates
    covers 96%, 97%, 98%).

    Parameters
    ----------
    samples
        Replicates, shape (n,), or a sequence of such arrays for a statistic of several samples.
    statistic
        `statistic(sample)` or `statistic(sample_1, sample_2, …)`; called on whole stacks if it takes `axis`.
    rng
        Source of the resamples.
    level, method
        Coverage and kind of interval.
    paired
        Resample the indices of several samples together.

    Raises
    ------
    UsageError
        Too few replicates: the n of them have C(2n - 1, n) different resamples, of which each tail must hold five, so a
        99% interval needs n >= 7. Or a statistic that is not finite on the samples themselves.
    CertificateError
        The interval is undefined: the statistic does not vary over the resamples, or is not finite on some of them.

    Examples
    --------
    >>> data = np.random.default_rng(0).exponential(size=40)
    >>> interval = bootstrap(data, np.median, rng=np.random.default_rng(1))
    >>> interval.contains(float(np.log(2)))
    True

    References
    ----------
    Efron (1987), Better bootstrap confidence intervals, Journal of the American Statistical Association 82.
    """
    level = check_level(level)
    many: Any = samples if isinstance(samples, list | tuple) and np.ndim(samples[0]) > 0 else (samples,)
    data = tuple(as_samples(sample) for sample in many)
    if paired and len({sample.size for sample in data}) > 1:
        raise ShapeError(f"paired samples must match one to one: sizes {[sample.size for sample in data]}")
    smallest = min(sample.size for sample in data)
    if math.comb(2 * smallest - 1, smallest) * (1 - level) / 2 < 5:
        raise UsageError(
            f"{smallest} replicates have {math.comb(2 * smallest - 1, smallest)} different resamples, too few for the "
            f"tails of a {level:.3g} interval: add replicates, or use mean_interval for a mean"
        )
    if not np.all(np.isfinite(statistic(*data))):
        raise UsageError("the statistic is not finite on the samples themselves")
    with warnings.catch_warnings():
        # A degenerate resample is an error below; as a warning it would only be seen by chance.
        warnings.simplefilter("ignore")
        result = stats.bootstrap(
            data, statistic, n_resamples=RESAMPLES, paired=paired, confidence_level=level, method=method, rng=rng
        )
    broken = float(np.mean(~np.isfinite(result.bootstrap_distribution)))
    if broken > 0:
        raise CertificateError(
            "the statistic is not finite on some resamples: use one that is defined on all of them, or more replicates",
            measured=broken,
            threshold=0.0,
        )
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    if not (math.isfinite(low) and math.isfinite(high)):
        spread = float(np.ptp(result.bootstrap_distribution))
        raise CertificateError(
            f"the {method} interval is undefined, because the statistic hardly varies over the resamples: report the "
            "value itself, or use method='percentile'",
            measured=spread,
            threshold=0.0,
        )
    return Interval(low, high, level)


@takes_arrays
def autocorrelation_time(series: ArrayLike, *, most: float = 0.02) -> float:
    r"""Integrated autocorrelation time of a stationary series, :math:`\tau = 1 + 2 \sum_{t \ge 1} \rho(t)`.

    The mean of n values has the variance :math:`\sigma^2 \tau / n`: n / tau is the effective number of values, and tau
    is 1 for independent ones. The sum stops at the first window of at least 5 tau (Sokal), and ten lags.

    Parameters
    ----------
    series
        Shape (n,), or (chains, n) for independent chains of one process, whose autocovariances are averaged.
    most
        Largest tau, as a share of n, that the series can resolve.

    Raises
    ------
    CertificateError
        The series is shorter than tau / `most` (50 tau by default), or alternates so strongly that the sum is not
        positive: it must be longer.
    UsageError
        A constant series: it has no autocorrelation.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> 0.8 < autocorrelation_time(rng.standard_normal(5000)) < 1.2
    True

    References
    ----------
    Sokal (1997), Monte Carlo methods in statistical mechanics: foundations and new algorithms, section 3.
    """
    array = np.atleast_2d(np.asarray(series, dtype=np.float64))
    array = as_samples(array, "series", ndim=2)
    count = array.shape[1]
    if np.all(array == array[:, :1]):
        raise UsageError("the series is constant: it has no autocorrelation, and its mean is exact")
    centred = array - array.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, 2 * count, axis=1)
    covariance = np.fft.irfft(np.abs(spectrum) ** 2, axis=1)[:, :count].mean(axis=0)  # (n,)
    taus = 2 * np.cumsum(covariance / covariance[0]) - 1
    # Never fewer than ten lags: the partial sums of an alternating series dip below zero at first.
    inside = np.arange(count) >= 5 * np.maximum(taus, 2.0)
    tau = float(taus[int(np.argmax(inside))]) if inside.any() else math.inf
    if not 0 < tau <= most * count:
        raise CertificateError(
            f"{count} values are too few to resolve their own autocorrelation time: run longer, or record less often",
            measured=tau,
            threshold=most * count,
        )
    return tau


@takes_arrays
def series_interval(series: ArrayLike, *, level: float = 0.99, batches: int = 16) -> Interval:
    """Interval of the mean of one stationary series, by batch means.

    The series is cut into `batches` equal pieces (values that do not fill the first one are left out), whose means are
    close to independent when a piece is many autocorrelation times long; their Student interval is returned.

    Parameters
    ----------
    series
        Shape (n,), after its transient.
    level, batches
        Coverage, and the number of pieces.

    Raises
    ------
    CertificateError
        A piece is shorter than ten autocorrelation times.
    UsageError
        Fewer than two batches, or fewer values than batches.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> series_interval(rng.standard_normal(4000)).contains(0.0)
    True

    References
    ----------
    Law and Carson (1979), A sequential procedure for determining the length of a steady-state simulation, Operations
    Research 27.
    """
    array = as_samples(series, "series")
    if not 2 <= batches <= array.size:
        raise UsageError(f"{batches} batches of a series of {array.size} values: expected 2 <= batches <= values")
    if np.all(array == array[0]):
        return mean_interval(array, level)
    length = array.size // batches
    tau = autocorrelation_time(array, most=0.2)
    if length < 10 * tau:
        raise CertificateError(
            f"a batch holds {length} values, fewer than ten autocorrelation times: run longer, or use fewer batches",
            measured=length / tau,
            threshold=10.0,
        )
    means: Array = array[array.size - batches * length :].reshape(batches, length).mean(axis=1)
    return mean_interval(means, level)
