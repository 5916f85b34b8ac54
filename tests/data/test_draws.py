from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from manyheads.data.draws import SMALL, draw_integers, draw_vectors
from manyheads.errors import UsageError


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**32 - 1))
def test_high_word_equals_the_exact_integer_formula(bound, number):
    key = jax.random.key(number)
    words = np.asarray(jax.random.bits(key, (64,), np.uint32)).astype(object)
    assert np.array_equal(np.asarray(draw_integers(key, (64,), bound)).astype(object), words * bound >> 32)


@given(st.integers(1, 2**16), st.integers(0, 2**32 - 1))
def test_sixteen_bits_equal_the_exact_integer_formula(bound, number):
    key = jax.random.key(number)
    words = np.asarray(jax.random.bits(key, (64,), np.uint16)).astype(object)
    assert np.array_equal(np.asarray(draw_integers(key, (64,), bound, bits=16)).astype(object), words * bound >> 16)


@pytest.mark.parametrize("bound", [1, 7, 16, 1000, 65535, 65536])
def test_bias_bound_by_enumerating_all_words(bound):
    counts = np.bincount(np.arange(2**16) * bound >> 16, minlength=bound)
    assert counts.size == bound
    worst = max(abs(Fraction(int(count), 2**16) - Fraction(1, bound)) for count in counts)
    assert worst < Fraction(1, 2**16)
    assert (worst == 0) == (bound & (bound - 1) == 0)


@pytest.mark.parametrize("bits", [16, 32])
def test_draws_are_uniform(seed, bits):
    # Chi-square at 1e-5 (false alarm 2e-5 over both); the bias adds less than 1e-3 to a statistic of mean 28.
    draws = draw_integers(jax.random.key(seed), (100_000,), 29, bits=bits)
    assert stats.chisquare(np.bincount(np.asarray(draws), minlength=29)).pvalue > 1e-5


def test_wrong_bounds_are_refused():
    key = jax.random.key(0)
    for bound, bits in ((0, 32), (2**31, 32), (2**16 + 1, 16)):
        with pytest.raises(UsageError, match="bound"):
            draw_integers(key, (1,), bound, bits=bits)
    with pytest.raises(UsageError, match="bits=8"):
        draw_integers(key, (1,), 3, bits=8)


@pytest.mark.parametrize(
    ("sampler", "dtype"),
    [
        (jax.random.normal, "float32"),
        pytest.param(jax.random.normal, float, marks=pytest.mark.slow),
        pytest.param(jax.random.uniform, "float32", marks=pytest.mark.slow),
    ],
)
def test_vectors_drawn_together_are_those_drawn_alone(sampler, dtype, seed):
    sizes = (3, 7, SMALL + 1, 1, 7)
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(seed), len(sizes))
        together = jax.jit(lambda keys: draw_vectors(sampler, keys, sizes, dtype))(keys)
        for vector, key, size in zip(together, keys, sizes, strict=True):
            np.testing.assert_array_equal(vector, sampler(key, (size,), dtype), strict=True)
