"""Coverage is simulated with the kernels that the public functions use; the first draws compare the two.

Every simulated rate is compared with binomial limits that a correct interval leaves with probability 1e-5.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from manyheads.errors import UsageError
from manyheads.statistics import Interval, mean_interval
from manyheads.statistics.intervals import (
    discrepancy_interval,
    half_widths,
    mean_of,
    proportion_interval,
    standard_error_of,
    student_interval,
    tail_factors,
)

DRAWS = 20_000
LOWEST, HIGHEST = stats.binom.ppf([1e-5, 1 - 1e-5], DRAWS, 0.99) / DRAWS

finite = st.floats(-1e6, 1e6)


def test_interval_relations():
    a, b = Interval(0.0, 1.0), Interval(-1.0, 2.0)
    assert a.within(b)
    assert not b.within(a)
    assert a.within(a)
    assert a.contains(0.0)
    assert a.contains(1.0)
    assert not a.contains(math.nan)
    assert a.overlaps(Interval(1.0, 3.0))
    assert not a.overlaps(Interval(1.1, 3.0))
    assert a.shifted(2) == Interval(2.0, 3.0)
    assert a.widened(0.5) == Interval(-0.5, 1.5)
    assert Interval(0.0, 1.0).widened_independently(0.0, 2.0) == Interval(-2.0, math.sqrt(5))
    assert Interval(0.0, 3.0).mapped(lambda x: 2.0**-x) == Interval(0.125, 1.0)


@pytest.mark.parametrize(
    "ends", [(1.0, 0.0), (math.nan, 1.0), (0.0, math.nan), (math.inf, math.inf), (-math.inf, -math.inf)]
)
def test_no_interval(ends):
    with pytest.raises(UsageError, match="no interval"):
        Interval(*ends)


def test_interval_refuses_bad_arguments():
    with pytest.raises(UsageError, match="level"):
        Interval(0, 1, 0.0)
    with pytest.raises(UsageError, match="bound"):
        Interval(0, 1).widened(-1)
    with pytest.raises(UsageError, match="figure"):
        Interval(0, 1).widened_independently(2.0, 0.1)
    with pytest.raises(UsageError, match="half_width"):
        Interval(0, 1).widened_independently(0.5, math.nan)


@given(st.lists(finite, min_size=2, max_size=12), st.sampled_from([0.5, 0.95, 0.99]))
def test_student_interval_is_students(samples, level):
    expected = stats.ttest_1samp(samples, 0).confidence_interval(level) if np.ptp(samples) > 1e-6 else None
    found = student_interval(np.array(samples), level=level)
    if expected is not None:
        scale = max(1.0, np.abs(samples).max())
        np.testing.assert_allclose([found.low, found.high], expected, rtol=1e-9, atol=1e-9 * scale)
    assert found.level == level


@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_student_interval_covers_exactly_for_normal_data(rng, count):
    samples = 5.0 + rng.standard_normal((DRAWS, count))
    half = half_widths(standard_error_of(samples), count - 1, 0.99)
    for row, width in zip(samples[:3], half, strict=False):
        assert student_interval(row).width == pytest.approx(2 * width, rel=1e-12)
    assert LOWEST <= np.mean(np.abs(mean_of(samples) - 5.0) <= half) <= HIGHEST


@pytest.mark.parametrize("count", [3, 4, 8, 16])
def test_student_interval_nearly_covers_for_mildly_skewed_data(rng, count):
    """Chi-squared with 8 degrees of freedom (skewness 1): measured .986 .984 .982 .981 over 40,000 draws."""
    samples = rng.chisquare(8, (DRAWS, count))
    half = half_widths(standard_error_of(samples), count - 1, 0.99)
    low = stats.binom.ppf(1e-5, DRAWS, 0.980) / DRAWS
    assert low <= np.mean(np.abs(mean_of(samples) - 8) <= half) <= HIGHEST


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("error", [0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("dof", [2, math.inf])
def test_discrepancy_covers_at_least_at_its_level(rng, count, error, dof):
    """`error` is the prediction's standard error over that of the mean."""
    samples = math.sqrt(count) * rng.standard_normal((DRAWS, count))
    known = np.full(DRAWS, error) if math.isinf(dof) else error * np.sqrt(rng.chisquare(dof, DRAWS) / dof)
    predictions = error * rng.standard_normal(DRAWS)
    spread = standard_error_of(samples)
    half = np.hypot(half_widths(spread, count - 1, 0.99), half_widths(known, dof, 0.99))
    for row in range(3):
        found = student_interval(samples[row], predictions[row], known[row], dof)
        gap = samples[row].mean() - predictions[row]
        np.testing.assert_allclose([found.low, found.high], [gap - half[row], gap + half[row]], rtol=1e-9, atol=1e-9)
    gaps = mean_of(samples) - predictions
    assert np.mean(np.abs(gaps) <= half) >= LOWEST
    if (count, error, dof) == (3, 0.3, math.inf):
        # Welch's approximation, which this interval replaces, misses its level here
        variance = spread**2 + known**2
        welch = stats.t.isf(0.005, variance**2 / (spread**4 / (count - 1))) * np.sqrt(variance)
        assert np.mean(np.abs(gaps) <= welch) < 0.975


@pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("counts", [(3, 3), (3, 10), (8, 8)])
def test_difference_covers_at_least_at_its_level(rng, counts, ratio):
    a, b = rng.standard_normal((DRAWS, counts[0])), ratio * rng.standard_normal((DRAWS, counts[1]))
    half = np.hypot(
        half_widths(standard_error_of(a), counts[0] - 1, 0.99), half_widths(standard_error_of(b), counts[1] - 1, 0.99)
    )
    found = student_interval(a[0], b[0].mean(), standard_error_of(b)[0], dof=counts[1] - 1)
    assert found.width == pytest.approx(2 * half[0], rel=1e-12)
    assert np.mean(np.abs(mean_of(a) - mean_of(b)) <= half) >= LOWEST


@pytest.mark.parametrize("trials", [1, 4, 9, 30])
def test_proportion_covers_for_every_probability(trials):
    intervals = [proportion_interval(k, trials) for k in range(trials + 1)]
    for probability in np.linspace(0, 1, 101):
        weights = stats.binom.pmf(np.arange(trials + 1), trials, probability)
        assert sum(w for w, i in zip(weights, intervals, strict=True) if i.contains(probability)) >= 0.99 - 1e-12
    assert intervals[0].low == 0
    assert intervals[-1].high == 1


def test_edge_cases():
    assert mean_interval([3.0]) == Interval(-math.inf, math.inf)
    assert mean_interval([0.1] * 7) == Interval(0.1, 0.1)
    assert discrepancy_interval([0.1] * 7, 0.1, 0.0) == Interval(0.0, 0.0)
    assert discrepancy_interval([1.0], 0.0, 0.5).width == math.inf
    # a huge offset does not drown the spread
    np.testing.assert_allclose(
        mean_interval(1e8 + np.arange(4.0)).width, mean_interval(np.arange(4.0)).width, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_interval([]), "empty"),
        (lambda: mean_interval([1.0, math.nan]), "1 of the 2 values"),
        (lambda: mean_interval([[1.0, 2.0]]), "shape"),
        (lambda: mean_interval([1.0, 2.0], level=1.0), "level"),
        (lambda: mean_interval([1.0, 2.0], level=99), "level"),
        (lambda: discrepancy_interval([1.0, 2.0], math.nan, 0.1), "prediction"),
        (lambda: discrepancy_interval([1.0, 2.0], 0.0, -0.1), "standard_error"),
        (lambda: discrepancy_interval([1.0, 2.0], 0.0, 0.1, dof=0), "dof"),
        (lambda: proportion_interval(3, 2), "successes"),
        (lambda: proportion_interval(0, 0), "successes"),
    ],
)
def test_wrong_use_is_named(call, message):
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize("scale", [-1000, -500, 500, 1000])
def test_huge_and_tiny_samples_have_the_interval_of_their_shape(rng, scale):
    """Squares of these samples over- or underflow."""
    for samples in (rng.standard_normal(5), rng.exponential(size=9), np.array([0.0, 0.5, 0.7])):
        plain, scaled = mean_interval(samples), mean_interval(np.ldexp(samples, scale))
        expected = [math.ldexp(plain.low, scale), math.ldexp(plain.high, scale)]
        assert [scaled.low, scaled.high] == pytest.approx(expected, rel=1e-9, abs=0)


def test_what_exceeds_the_numbers_is_unbounded_and_never_nan():
    assert mean_interval([-1e308, 1e308]) == Interval(-math.inf, math.inf)
    assert mean_interval([1.7e308] * 3) == Interval(1.7e308, 1.7e308)
    assert discrepancy_interval([1.7e308, 1.6e308], -1.7e308, 1e308) == Interval(-math.inf, math.inf)
    many = mean_interval(np.tile([-1e308, 1e308], 64))
    assert math.isfinite(many.width)
    assert many.low == -many.high


def test_random_extreme_samples_give_an_interval_around_their_mean(rng):
    for _ in range(300):
        samples = rng.choice([-1, 1], size=rng.integers(1, 9)) * 10.0 ** rng.uniform(-320, 308, size=1)
        samples = samples * rng.choice([0.0, 0.5, 1.0, 1 + 2**-52], size=samples.size)
        found = mean_interval(samples)
        assert found.low <= mean_of(samples) <= found.high
        assert samples.min() <= mean_of(samples) <= samples.max()


LAWS = {  # with the mean, and the most that a 99% interval of 4, 8, 16, 32 samples may miss, in percent
    "normal": (lambda rng, shape: rng.standard_normal(shape), 0.0, (1, 1, 1, 1)),
    "uniform": (lambda rng, shape: rng.random(shape), 0.5, (1.6, 1, 1, 1)),
    "exponential": (lambda rng, shape: rng.exponential(1, shape), 1.0, (2.5, 1, 1, 1)),
    "lognormal 1.5": (lambda rng, shape: rng.lognormal(0, 1.5, shape), math.exp(1.125), (7, 2.5, 1, 1)),
    "Pareto 1.5": (lambda rng, shape: 1 + rng.pareto(1.5, shape), 3.0, (19, 10, 4, 1)),
    "minus lognormal 1": (lambda rng, shape: -rng.lognormal(0, 1, shape), -math.exp(0.5), (5, 2.5, 1, 1)),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "place", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_skewed_samples_are_missed_as_rarely_as_the_page_says(rng, law, place):
    """Student's interval misses 20% of eight lognormal samples and 25% of 32 Pareto ones."""
    draw, mean, percent = LAWS[law]
    samples = draw(rng, (600, (4, 8, 16, 32)[place]))
    missed = sum(not mean_interval(each).contains(mean) for each in samples)
    assert missed <= stats.binom.ppf(1 - 1e-5, 600, percent[place] / 100)


def test_symmetric_samples_have_students_interval():
    for samples in ([-2.0, -1.0, 1.0, 2.0], [1.0, 2.0], [7.0, 8.0, 9.0]):
        assert mean_interval(samples) == student_interval(np.array(samples))


@pytest.mark.parametrize(("count", "power"), [(4, 0.5), (8, 1.0), (32, 1.0), (128, 0.5)])
def test_the_factor_of_a_tail_is_a_power_of_the_ratio_of_tails(count, power):
    samples = np.zeros(count)
    samples[[0, -1]] = -1.0, 3.0
    assert tail_factors(samples) == pytest.approx((1.0, 3.0**power))
    assert tail_factors(-samples) == pytest.approx((3.0**power, 1.0))
    assert tail_factors(np.tile([-1.0, 0.0, 3.0], 9), count) == pytest.approx((1.0, 3.0**power))
    # of one sign, the logarithms symmetric: deviation s = 1.5 of the logarithms, on the side away from zero
    logs = np.resize([-1.0, 1.0], count) * 1.5 * math.sqrt((count - 1) / count)

    grown = (math.exp(16 / count), 1.0)
    assert tail_factors(-np.exp(logs)) == pytest.approx(grown)
    assert tail_factors(np.exp(logs)) == pytest.approx(grown[::-1])


def test_a_tail_moves_its_own_end(rng):
    samples = np.array([0.9, 1.0, 1.1, 1.15, 2.5, 1.05, 0.95, 1.0])
    plain, found, mirrored = student_interval(samples), mean_interval(samples), mean_interval(-samples)
    assert found.low == plain.low
    assert found.high - samples.mean() > 5 * (plain.high - samples.mean())
    assert (mirrored.low, mirrored.high) == (-found.high, -found.low)
    assert mean_interval([0.0] * 7 + [1.0]).high < 8.2  # one other value: the tails' ratio ends at n
