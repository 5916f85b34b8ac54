import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from manyheads.errors import ShapeError, UsageError
from manyheads.statistics.rank_correlation import spearman


@pytest.mark.parametrize(
    ("count", "correlation"),
    [(12, 0.6), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((12, 0.0), (30, 0.8)))],
)
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


def test_wrong_use_is_named():
    with pytest.raises(ShapeError, match="one to one"):
        spearman(np.arange(5), np.arange(6))
    with pytest.raises(UsageError, match="four"):
        spearman(np.arange(3), np.arange(3))
    with pytest.raises(UsageError, match="constant"):
        spearman(np.arange(5), np.ones(5))
