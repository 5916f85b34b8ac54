import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from manyheads.errors import ShapeError, UsageError
from manyheads.spectra import coherence


def by_hand(vectors):
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = np.array([unit[i] @ unit[j] for i in range(len(unit)) for j in range(i)])
    return np.abs(cosines).mean(), math.sqrt(np.mean(cosines**2))


@given(count=st.integers(2, 12), dimension=st.integers(1, 8), number=st.integers(0, 2**32 - 1))
def test_exact_and_bound_against_all_pairs(count, dimension, number):
    vectors = np.random.default_rng(number).standard_normal((count, dimension)) * 10.0 ** (number % 7)
    value, rms = by_hand(vectors)
    found = coherence(vectors)
    assert found.value == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert found.rms == pytest.approx(rms, rel=1e-6, abs=1e-7)
    assert found.interval.contains(found.value)
    bound = coherence(vectors, "bound")
    assert bound.value is None
    assert bound.interval.low == 0
    assert bound.interval.high == pytest.approx(rms, rel=1e-6, abs=1e-7)
    assert value <= rms + 1e-12
    assert found.pairs == count * (count - 1) // 2


def test_blocks_make_no_difference(rng):
    vectors = (rng.standard_normal((2100, 5)) + 0.5).astype(np.float32)
    unit = vectors.astype(float) / np.linalg.norm(vectors.astype(float), axis=1, keepdims=True)
    cosines = np.abs(unit @ unit.T)[np.triu_indices(2100, 1)]
    found = coherence(vectors)
    assert found.value == pytest.approx(cosines.mean(), rel=1e-9)
    assert found.rms == pytest.approx(math.sqrt(np.mean(cosines**2)), rel=1e-9)


def test_random_directions_sit_at_their_level(rng):
    found = coherence(rng.standard_normal((1500, 64)))
    assert found.value == pytest.approx(found.random_level, rel=0.02)


def test_the_estimate_covers_at_its_level(rng):
    """300 intervals at 99%: more than 15 misses have probability below 1e-6."""
    vectors = rng.standard_normal((300, 16)) + 0.4 * rng.standard_normal((300, 1))
    exact = coherence(vectors).value
    widths, misses = [], 0
    for _ in range(300):
        found = coherence(vectors, "estimate", rows=40, rng=rng)
        misses += not found.interval.contains(exact)
        widths.append(found.interval.width)
    assert stats.binom.sf(15, 300, 0.01) < 1e-6
    assert misses <= 15
    # the control variate halves the width of a plain mean of the rows
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    plain = (np.abs(unit @ unit.T).sum(1) / 299).std() * math.sqrt((1 - 40 / 300) / 40) * 2 * stats.norm.isf(0.005)
    assert np.mean(widths) < 0.5 * plain
    everything = coherence(vectors, "estimate", rows=300, rng=rng)
    assert (everything.value, everything.interval.width) == (pytest.approx(exact, rel=1e-9), 0.0)
    assert everything.pairs == 300 * 299 // 2


class Stored:
    """A table whose rows are read when they are indexed."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, rows):
        return self.array[rows].copy()


@pytest.mark.parametrize("kind", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_rows_read_when_indexed_give_the_same(rng, kind):
    vectors = rng.standard_normal((2100, 6)).astype(kind)
    for method in ("exact", "bound", "estimate"):
        found = [coherence(table, method, rng=np.random.default_rng(0)) for table in (vectors, Stored(vectors))]
        assert found[0] == found[1]


def test_rows_of_zeros_are_left_out_on_request(rng):
    vectors = rng.standard_normal((70, 4))
    padded = np.vstack([np.zeros((2, 4)), vectors, np.zeros((1, 4))])
    for method in ("exact", "bound", "estimate"):
        plain = coherence(vectors, method, rows=70, rng=rng)
        found = coherence(padded, method, rows=70, rng=rng, omit_zeros=True)
        assert (found.zero_rows, found.pairs) == (3, plain.pairs)
        assert (found.rms, found.interval.high) == pytest.approx((plain.rms, plain.interval.high), rel=1e-12)


def test_equal_directions(rng):
    vectors = np.outer(rng.uniform(1, 2, 40), rng.standard_normal(6))
    for found in (coherence(vectors), coherence(vectors, "estimate", rng=rng)):
        assert found.value == pytest.approx(1.0, abs=1e-9)


def test_wrong_use_is_named(rng):
    vectors = rng.standard_normal((5, 3))
    with pytest.raises(ShapeError, match="two vectors"):
        coherence(vectors[:1])
    with pytest.raises(UsageError, match="omit_zeros"):
        coherence(np.vstack([vectors, np.zeros(3)]))
    with pytest.raises(UsageError, match="row 1"):
        coherence(np.array([[1.0, 2.0], [np.nan, 1.0]]))
    with pytest.raises(UsageError, match="rng"):
        coherence(vectors, "estimate")
    with pytest.raises(UsageError, match="30 rows"):
        coherence(vectors, "estimate", rows=10, rng=rng)
    with pytest.raises(UsageError, match="no pair"):
        coherence(np.vstack([vectors[:1], np.zeros((2, 3))]), omit_zeros=True)
    with pytest.raises(UsageError, match="method"):
        coherence(vectors, "fast")
