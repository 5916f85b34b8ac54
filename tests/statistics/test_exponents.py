"""Fits are simulated with their own linear maps; the first draws compare these with the public functions.

Every simulated rate is compared with binomial limits that a correct procedure leaves with probability 1e-5.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from manyheads.errors import ShapeError, UsageError
from manyheads.statistics import Interval, decide, fit_exponent
from manyheads.statistics.exponents import _Basis, drift_test, fit_exponent_to_means
from manyheads.statistics.intervals import half_widths, mean_of, standard_error_of

DRAWS = 20_000
SIZES = np.array([4.0, 8, 16, 64, 128])


def limits(rate, draws=DRAWS):
    return stats.binom.ppf([1e-5, 1 - 1e-5], draws, rate) / draws


def noisy(rng, exponent, shape, spreads, shared=0.0):
    """Power laws with lognormal noise of the given spread at each size and a factor shared by a replicate."""
    logs = exponent * np.log(SIZES) + spreads * rng.standard_normal((*shape, SIZES.size))
    return np.exp(logs + shared * rng.standard_normal((*shape, 1)))


@given(
    st.lists(st.integers(1, 10**6), min_size=2, max_size=7, unique=True),
    st.floats(-3, 3),
    st.floats(1e-6, 1e6),
    st.integers(1, 4),
)
def test_an_exact_power_law_is_recovered(sizes, exponent, prefactor, replicates):
    values = prefactor * np.array(sizes, dtype=float) ** exponent
    fit = fit_exponent(sizes, np.tile(values, (replicates, 1)))
    assert fit.exponent == pytest.approx(exponent, abs=1e-7)
    assert math.exp(fit.log_prefactor) == pytest.approx(prefactor, rel=1e-5)
    np.testing.assert_allclose(fit.residuals, 0, atol=1e-9)
    assert fit.predict(10.0) == pytest.approx(prefactor * 10.0**exponent, rel=1e-5)
    assert len(fit.replicate_exponents) == replicates
    assert (fit.interval.width < 1e-9) == (replicates > 1)
    assert (fit.curvature is None) == (len(sizes) == 2)


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.integers(0, 2**32 - 1))
def test_units_do_not_matter(unit, scale, number):
    values = noisy(np.random.default_rng(number), -0.5, (6,), 0.1)
    a, b = fit_exponent(SIZES, values), fit_exponent(SIZES * unit, values * scale)
    np.testing.assert_allclose([b.exponent, *b.residuals], [a.exponent, *a.residuals], atol=1e-9)
    np.testing.assert_allclose([b.interval.low, b.interval.high, b.p_fit], [a.interval.low, a.interval.high, a.p_fit])


@pytest.mark.parametrize("replicates", [2, 3, 8])
def test_paired_slopes_cover_with_shared_seeds_and_unequal_spreads(rng, replicates):
    values = noisy(rng, -0.5, (DRAWS, replicates), np.array([0.05, 0.1, 0.1, 0.2, 0.5]), shared=1.0)
    slopes = np.log(values) @ _Basis.of(SIZES, 5, None).slope
    half = half_widths(standard_error_of(slopes), replicates - 1, 0.99)
    for row in range(3):
        fit = fit_exponent(SIZES, values[row])
        np.testing.assert_allclose(fit.replicate_exponents, slopes[row], rtol=1e-10)
        assert fit.interval.width == pytest.approx(2 * half[row], rel=1e-9)
    low, high = limits(0.99)
    assert low <= np.mean(np.abs(mean_of(slopes) + 0.5) <= half) <= high


@pytest.mark.slow
def test_paired_lack_of_fit_is_uniform_and_sees_a_bend(rng):
    """Kolmogorov-Smirnov at 1e-5; a 1/N correction bends the logarithm by 0.2, ten times the spread."""
    values = noisy(rng, -0.5, (1000, 8), np.array([0.05, 0.1, 0.1, 0.05, 0.02]), shared=0.3)
    fits = [fit_exponent(SIZES, v) for v in values]
    assert stats.kstest([f.p_fit for f in fits], "uniform").pvalue > 1e-5
    low, high = limits(0.99, 1000)
    assert low <= np.mean([f.curvature.contains(0.0) for f in fits]) <= high
    bent = fit_exponent(SIZES, noisy(rng, -0.5, (12,), 0.02, shared=0.3) * (1 + 3 / SIZES))
    assert bent.p_fit < 1e-3
    assert bent.curvature.low > 0
    assert max(map(abs, bent.residuals)) > 0.06


def test_curvature_and_slope_are_those_of_polyfit(rng):
    values = noisy(rng, -0.7, (5,), 0.2)
    fit = fit_exponent(SIZES, values)
    x, y = np.log(SIZES), np.log(values).mean(axis=0)
    slope, level = np.polyfit(x, y, 1)
    np.testing.assert_allclose([fit.exponent, fit.log_prefactor], [slope, level], rtol=1e-9)
    np.testing.assert_allclose(fit.residuals, y - slope * x - level, atol=1e-12)
    assert (fit.curvature.low + fit.curvature.high) / 2 == pytest.approx(np.polyfit(x, y, 2)[0], rel=1e-9)


def test_values_without_replicates_use_their_scatter(rng):
    values = noisy(rng, 2.0, (), 0.1)
    fit, expected = fit_exponent(SIZES, values), stats.linregress(np.log(SIZES), np.log(values))
    assert fit.exponent == pytest.approx(expected.slope, rel=1e-10)
    assert fit.interval.width == pytest.approx(2 * stats.t.isf(0.005, 3) * expected.stderr, rel=1e-9)
    assert fit.design == "scatter"


@pytest.mark.slow
def test_means_with_known_errors_cover(rng):
    truth, relative = SIZES**-1.0, np.array([0.02, 0.02, 0.04, 0.06, 0.1])
    means = truth * (1 + relative * rng.standard_normal((1500, 5)))
    fits = [fit_exponent_to_means(SIZES, m, truth * relative) for m in means]
    low, high = limits(0.99, 1500)
    assert low <= np.mean([fit.interval.contains(-1.0) for fit in fits]) <= high
    assert stats.kstest([f.p_fit for f in fits], "uniform").pvalue > 1e-5
    # weights are those of least variance: polyfit's, 1 / error each
    slope, level = np.polyfit(np.log(SIZES), np.log(means[0]), 1, w=means[0] / (truth * relative))
    np.testing.assert_allclose([fits[0].exponent, fits[0].log_prefactor], [slope, level], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(3, 3, 3, 3, 3), (32, 24, 16, 5, 3)])
def test_means_with_estimated_errors_cover_at_least_at_their_level(rng, counts):
    """As at the ends of most tables: few replicates at the largest sizes."""
    truth, dof = SIZES**-0.5, np.array(counts) - 1
    draws = 1000
    spread = 0.1 * truth
    errors = spread * np.sqrt(rng.chisquare(dof, (draws, 5)) / dof / counts)
    means = truth + spread / np.sqrt(counts) * rng.standard_normal((draws, 5))
    fits = [fit_exponent_to_means(SIZES, m, e, dof=dof) for m, e in zip(means, errors, strict=True)]
    assert np.mean([fit.interval.contains(-0.5) for fit in fits]) >= limits(0.99, draws)[0]


def test_missing_p_values_and_exact_means(rng):
    assert fit_exponent(SIZES, noisy(rng, 1.0, (4,), 0.1)).p_fit is None  # 4 replicates, 3 departures
    assert fit_exponent(SIZES, noisy(rng, 1.0, (5,), 0.1)).p_fit is not None
    assert fit_exponent(SIZES[:2], noisy(rng, 1.0, (5,), 0.1)[:, :2]).p_fit is None
    exact = fit_exponent_to_means(SIZES, SIZES**-2.0, np.zeros(5))
    assert exact.interval.width < 1e-12
    assert exact.p_fit == 1.0
    assert fit_exponent_to_means(SIZES, SIZES**-2.0 + 1e-3, np.zeros(5)).p_fit == 0.0
    one_exact = fit_exponent_to_means(SIZES, SIZES**-2.0, SIZES**-2.0 * [0.0, 0.1, 0.1, 0.1, 0.1])
    assert one_exact.p_fit == pytest.approx(1.0, abs=1e-6)
    assert fit_exponent(SIZES, noisy(rng, 1.0, (1,), 0.1)).interval == Interval(-math.inf, math.inf)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda v: fit_exponent(SIZES, -v), UsageError, "positive finite"),
        (lambda v: fit_exponent(SIZES, v * np.nan), UsageError, "positive finite"),
        (lambda v: fit_exponent(-SIZES, v), UsageError, "positive finite"),
        (lambda v: fit_exponent(SIZES[:4], v), ShapeError, "4 sizes for 5"),
        (lambda v: fit_exponent(np.ones(5), v), UsageError, "two different sizes"),
        (lambda v: fit_exponent(SIZES, v[None]), ShapeError, "replicates, sizes"),
        (lambda v: fit_exponent(SIZES[:2], v[0, :2]), UsageError, "third size"),
        (lambda v: fit_exponent_to_means(SIZES, v[0], v[0] * 0.5), UsageError, "not resolved from zero"),
        (lambda v: fit_exponent_to_means(SIZES, v[0], -v[0]), UsageError, "negative"),
        (lambda v: fit_exponent_to_means(SIZES, v[0], v[0, :2]), ShapeError, "match"),
        (lambda v: drift_test(SIZES, v, tolerance=0.1, resolution=0.5), UsageError, "resolution"),
        (lambda v: drift_test(SIZES, v[0], tolerance=0.1), ShapeError, "replicates, sizes"),
    ],
)
def test_wrong_use_is_named(rng, call, error, message):
    with pytest.raises(error, match=message):
        call(noisy(rng, 1.0, (3,), 0.1))


@pytest.mark.slow
def test_drift_verdicts_have_the_error_rates_of_the_rule(rng):
    """300 runs of four seeds each: no drift, and a drift on the edge of the tolerance."""
    high_false = stats.binom.ppf(1 - 1e-5, 300, 0.01)
    outcomes = {}
    for drift in (0.0, 0.2):
        tests = [drift_test(SIZES, v, tolerance=0.2) for v in noisy(rng, drift, (300, 4), 0.1)]
        outcomes[drift] = [test.outcome for test in tests]
    assert outcomes[0.0].count("refuted") <= high_false
    assert outcomes[0.2].count("holds") <= stats.binom.ppf(1 - 1e-5, 300, 0.005)
    # at this spread the slope has a standard error of 0.02: no drift is mostly recognized
    assert outcomes[0.0].count("holds") > 225


def test_drift_by_hand(rng):
    optima = noisy(rng, 0.1, (6,), 0.2)
    test, fit = drift_test(SIZES, optima, tolerance=0.3), fit_exponent(SIZES, optima)
    assert test.fit == fit
    assert test.factor_per_doubling.low == pytest.approx(2**fit.interval.low)
    assert test.outcome == decide(fit.exponent, fit.interval, 0.0, 0.3)
    tight = drift_test(SIZES, optima, tolerance=abs(fit.exponent) + 0.01)
    assert tight.outcome == "inconclusive"
    assert tight.replicates_needed > 6


@given(
    st.floats(-0.5, 0.5),
    st.floats(1.0, 4.0),
    st.lists(st.integers(1, 1024), min_size=3, max_size=6, unique=True),
    st.floats(1e-4, 1.0),
)
def test_the_resolution_of_a_grid_is_never_underestimated(drift, step, sizes, optimum):
    """Read off a grid, every replicate gives the same point: the spread is zero and only the resolution is honest."""
    truth = optimum * np.array(sizes, dtype=float) ** drift
    points = np.round(np.log(truth) / math.log(step)) if step > 1 else np.log(truth)
    read = np.exp(points * (math.log(step) if step > 1 else 1.0))
    test = drift_test(sizes, np.tile(read, (3, 1)), tolerance=0.1, resolution=step)
    assert test.fit.interval.widened(1e-9).contains(drift)


def test_a_grid_point_that_never_moves_is_no_proof(rng):
    same = np.full((8, 3), 0.01)
    unnamed = drift_test([4, 8, 32], same, tolerance=0.277)  # from a grid that nobody named
    assert (unnamed.outcome, unnamed.replicates_needed) == ("inconclusive", None)
    coarse = drift_test([4, 8, 32], same, tolerance=0.277, resolution=3.0)
    assert coarse.outcome == "inconclusive"
    assert coarse.replicates_needed is None
    assert drift_test([4, 8, 32], same, tolerance=0.277, resolution=1.2).outcome == "holds"


def test_no_replicate_at_all_is_refused():
    with pytest.raises(ShapeError, match="at least one replicate"):
        fit_exponent([2, 8], np.zeros((0, 2)))


def test_extreme_values_give_numbers_or_a_reason():
    fit = fit_exponent([1.0, 1.001], [[1e-300, 1e300], [1e-299, 1e300]])
    assert fit.predict(1e300) == math.inf
    with pytest.raises(UsageError, match="positive finite sizes"):
        fit.predict(0.0)
    test = drift_test([1.0, 1.001], [[1e-300, 1e300], [1e-299, 1e300]], tolerance=0.1)
    assert test.outcome == "refuted"
    assert test.factor_per_doubling.high == math.inf
    tiny = fit_exponent_to_means([1, 2, 4], [1.0, 2.0, 4.0], [1e-170, 2e-170, 4e-170])
    assert tiny.exponent == pytest.approx(1.0)
