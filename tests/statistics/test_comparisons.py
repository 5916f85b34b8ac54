import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from manyheads.errors import ShapeError, UsageError
from manyheads.statistics import mean_interval, spearman
from manyheads.statistics.comparisons import paired_comparison


@given(st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_the_exact_p_value_is_scipys(count, number):
    rng = np.random.default_rng(number)
    a, b = rng.integers(-3, 4, (2, count)).astype(float)  # with ties
    result = paired_comparison(a, b)
    expected = stats.permutation_test(
        (a, b),
        lambda x, y, axis: np.abs(np.mean(x - y, axis=axis)),
        permutation_type="samples",
        n_resamples=2**count,
        alternative="greater",
        vectorized=True,
    )
    assert result.p_value == pytest.approx(expected.pvalue, abs=1e-12)
    assert result.exact
    assert result.interval == mean_interval(a - b)


def test_p_values_are_uniform_on_their_atoms_under_the_null(rng):
    """Five pairs of exchangeable skewed data: 16 atoms; chi-squared test at 1e-5."""
    pairs = rng.exponential(size=(3000, 2, 5))
    p = np.array([paired_comparison(*pair).p_value for pair in pairs])
    counts = np.bincount(np.rint(p * 16).astype(int), minlength=17)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > 1e-5


def test_rounding_does_not_break_ties():
    # 0.1 + 0.2 - 0.3 is not zero in floating point, and the observed sum ties with many others
    assert paired_comparison([0.1, 0.2, 0.0], [0.0, 0.0, 0.3]).p_value == 1.0
    assert paired_comparison([0.3, 0.1, 0.2], [0.0, 0.0, 0.0]).p_value == 0.25


def test_sampled_p_value_agrees_with_enumeration(rng):
    """False-alarm rate 1e-5: binomial error of 19,999 draws."""
    difference = rng.standard_normal(15) + 0.35
    signs = 1 - 2 * ((np.arange(2**15)[:, None] >> np.arange(15)) & 1)
    exact = np.mean(np.abs(signs @ difference) >= abs(difference.sum()) - 1e-9)
    result = paired_comparison(difference, np.zeros(15), rng=rng)
    assert not result.exact
    assert abs(result.p_value - exact) <= 4.5 * math.sqrt(exact * (1 - exact) / 19_999) + 1e-4
    strong = paired_comparison(np.full(40, 2.0) + 0.1 * rng.standard_normal(40), np.zeros(40), rng=rng)
    assert strong.p_value == 1 / 20_000  # never zero


def test_effect_size(rng):
    a, b = rng.standard_normal((2, 7))
    assert paired_comparison(a, b).effect_size == pytest.approx((a - b).mean() / (a - b).std(ddof=1))
    assert paired_comparison([2.0, 3.0], [1.0, 2.0]).effect_size == math.inf
    assert paired_comparison([1.0, 2.0], [2.0, 3.0]).effect_size == -math.inf
    same = paired_comparison([1.0, 2.0], [1.0, 2.0])
    assert (same.effect_size, same.p_value, same.mean) == (0.0, 1.0, 0.0)
    assert paired_comparison([1.0], [0.0]).interval.width == math.inf


@pytest.mark.parametrize(("count", "correlation"), [(12, 0.0), (12, 0.6), (30, 0.8)])
def test_spearman_interval_nearly_covers(rng, count, correlation):
    """Measured over 4000 draws: .995, .993, .990; fails below .98 at a rate of 1e-5."""
    population = 6 / math.pi * math.asin(correlation / 2)  # of a bivariate normal
    x = rng.standard_normal((1000, count))
    y = correlation * x + math.sqrt(1 - correlation**2) * rng.standard_normal((1000, count))
    hits = [spearman(a, b).interval.contains(population) for a, b in zip(x, y, strict=True)]
    assert np.mean(hits) >= stats.binom.ppf(1e-5, 1000, 0.985) / 1000


@given(st.integers(4, 20), st.integers(0, 2**32 - 1))
def test_spearman_value_range_and_symmetry(count, number):
    rng = np.random.default_rng(number)
    x, y = rng.permutation(count).astype(float), rng.permutation(count).astype(float)
    result, mirrored = spearman(x, y), spearman(x, -y)
    assert result.value == pytest.approx(1 - 6 * np.sum((x - y) ** 2) / (count**3 - count), abs=1e-12)
    assert -1 <= result.interval.low <= result.value <= result.interval.high <= 1
    np.testing.assert_allclose(
        [mirrored.interval.low, mirrored.interval.high], [-result.interval.high, -result.interval.low], atol=1e-9
    )
    assert spearman(np.exp(x), y**3).value == pytest.approx(result.value, abs=1e-12)


def test_a_perfect_order_is_not_certain():
    result = spearman(np.arange(6), np.arange(6) ** 3)
    assert result.value == 1.0
    assert result.interval.high == 1.0
    assert result.interval.low < 0.5
    assert spearman(np.arange(60), np.arange(60)).interval.low > 0.99


def test_wrong_use_is_named(rng):
    with pytest.raises(ShapeError, match="one to one"):
        paired_comparison([1.0, 2.0], [1.0])
    with pytest.raises(UsageError, match="rng"):
        paired_comparison(np.arange(15.0), np.zeros(15))
    with pytest.raises(UsageError, match="NaN"):
        paired_comparison([1.0, math.nan], [1.0, 2.0])
    with pytest.raises(ShapeError, match="one to one"):
        spearman(np.arange(5), np.arange(6))
    with pytest.raises(UsageError, match="four"):
        spearman(np.arange(3), np.arange(3))
    with pytest.raises(UsageError, match="constant"):
        spearman(np.arange(5), np.ones(5))
