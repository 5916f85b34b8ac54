import numpy as np
import pytest
from scipy import signal, stats

from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.statistics import Interval, autocorrelation_time, bootstrap, series_interval


def autoregressive(rng, correlation, shape):
    noise = rng.standard_normal((*shape[:-1], shape[-1] + 500))
    return signal.lfilter([1.0], [1.0, -correlation], noise, axis=-1)[..., 500:]


@pytest.mark.parametrize("method", ["BCa", "basic", "percentile"])
def test_bootstrap_is_scipys(rng, method):
    data = rng.exponential(size=30)
    found = bootstrap(data, np.median, rng=np.random.default_rng(1), method=method, level=0.95)
    expected = stats.bootstrap(
        (data,), np.median, confidence_level=0.95, method=method, rng=np.random.default_rng(1)
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)


def test_bootstrap_of_the_mean_is_close_to_students(rng):
    data = rng.standard_normal(200)
    found = bootstrap(data, np.mean, rng=rng)
    width = 2 * stats.t.isf(0.005, 199) * data.std(ddof=1) / np.sqrt(200)
    assert found.width == pytest.approx(width, rel=0.15)


def test_bootstrap_of_pairs(rng):
    x = rng.standard_normal(60)
    y = x + 0.5 * rng.standard_normal(60)

    def correlation(a, b, axis=-1):
        a = a - a.mean(axis=axis, keepdims=True)
        b = b - b.mean(axis=axis, keepdims=True)
        return (a * b).sum(axis=axis) / np.sqrt((a**2).sum(axis=axis) * (b**2).sum(axis=axis))

    found = bootstrap((x, y), correlation, rng=rng, paired=True)
    assert found.contains(np.corrcoef(x, y)[0, 1])
    assert 0.3 < found.low < found.high < 1
    apart = bootstrap([x, y], lambda a, b, axis=-1: a.mean(axis=axis) - b.mean(axis=axis), rng=rng)
    assert apart.contains(x.mean() - y.mean())


def test_bootstrap_failures_are_errors(rng):
    data = rng.standard_normal(20)
    with pytest.raises(UsageError, match="different resamples"):
        bootstrap(data[:6], np.mean, rng=rng)
    assert isinstance(bootstrap(data[:7], np.mean, rng=rng), Interval)
    with pytest.raises(CertificateError, match="hardly varies"):
        bootstrap(np.ones(20), np.mean, rng=rng)
    with pytest.raises(UsageError, match="not finite on the samples"):
        bootstrap(data, lambda sample, axis=-1: np.mean(sample, axis=axis) * np.nan, rng=rng)
    with pytest.raises(CertificateError, match="some resamples"):
        # defined on the sample, undefined where its largest value was not drawn
        bootstrap(data, lambda s, axis=-1: np.where(s.max(axis=axis) == data.max(), 1.0, np.nan), rng=rng)
    with pytest.raises(ShapeError, match="one to one"):
        bootstrap((data, data[1:]), lambda a, b, axis=-1: a.mean(axis=axis), rng=rng, paired=True)
    with pytest.raises(UsageError, match="NaN"):
        bootstrap(np.r_[data, np.nan], np.mean, rng=rng)


@pytest.mark.parametrize("correlation", [-0.5, 0.0, 0.7, 0.9])
def test_autocorrelation_time_of_an_autoregressive_series(rng, correlation):
    """tau = (1 + r) / (1 - r). At r = 0.9 400 chains of 4000 have a standard error of 1% and a bias of 4%."""
    tau = autocorrelation_time(autoregressive(rng, correlation, (400, 4000)))
    assert tau == pytest.approx((1 + correlation) / (1 - correlation), rel=0.1)


def test_autocorrelation_time_predicts_the_variance_of_the_mean(rng):
    """Variance of 800 means against sigma² tau / n: relative error 5% (one standard error), allowed 25%."""
    chains = autoregressive(rng, 0.8, (800, 1000))
    tau = autocorrelation_time(chains)
    assert chains.mean(axis=1).var() / (chains.var() * tau / 1000) == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize(("correlation", "length"), [(0.0, 2000), (0.8, 10_000)])
def test_series_interval_nearly_covers(rng, correlation, length):
    """Measured .988 over 2000 draws; 300 of them at a rate of .985 fail with probability 1e-5.

    A batch is 69 autocorrelation times long, far above the ten at which a series is refused.
    """
    series = autoregressive(rng, correlation, (300, length))
    hits = [series_interval(row).contains(0.0) for row in series]
    assert np.mean(hits) >= stats.binom.ppf(1e-5, 300, 0.985) / 300
    # the interval that ignores the dependence does not
    if correlation:
        naive = stats.norm.isf(0.005) * series.std(axis=1) / np.sqrt(length)
        assert np.mean(np.abs(series.mean(axis=1)) <= naive) < 0.8


def test_short_and_constant_series_are_refused(rng):
    walk = np.cumsum(rng.standard_normal(500))
    with pytest.raises(CertificateError, match="run longer") as caught:
        autocorrelation_time(walk)
    assert caught.value.measured > caught.value.threshold
    with pytest.raises(CertificateError, match="longer"):
        series_interval(autoregressive(rng, 0.95, (1000,)))
    with pytest.raises(UsageError, match="constant"):
        autocorrelation_time(np.full(100, 0.1))
    assert series_interval(np.full(100, 0.1)) == Interval(0.1, 0.1)
    with pytest.raises(UsageError, match="batches"):
        series_interval(np.arange(5.0))
    with pytest.raises(UsageError, match="NaN"):
        autocorrelation_time([1.0, np.nan])
