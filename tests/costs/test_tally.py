"""Pairs of a causal mask, against enumeration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.costs.conventions import ConventionError
from manyheads.costs.tally import Tally, pair
from manyheads.errors import UsageError


def enumerated(n, m, window):
    seen = 0
    for query in range(m - n, m):
        seen += sum(1 for key in range(m) if key <= query and (not window or key > query - window))
    return seen


def test_every_small_pattern():
    for m in range(9):
        for n in range(m + 1):
            for window in range(11):
                tally = pair(n, m, True, window)
                assert tally.exact == enumerated(n, m, window)
                assert (tally.dense, tally.doubled_halved) == (n * m, 2 * n * m - n * n)
    assert pair(3, 2, False) == Tally.of(6)


@given(
    *[st.builds(Tally, *[st.integers(0, 10**30)] * 3)] * 2, st.integers(0, 10**6), st.sampled_from(["exact", "dense"])
)
def test_reading_is_linear(a, b, factor, causal):
    assert (factor * (a + b)).products(causal) == factor * (a.products(causal) + b.products(causal))
    assert (a * factor + b).elementwise(causal) == factor * a.elementwise(causal) + b.elementwise(causal)


def test_half_a_product_is_refused():
    assert Tally(9, 6, 8).products("halved") == 4
    with pytest.raises(ConventionError, match="9/2"):
        Tally(9, 6, 9).products("halved")


def test_windows_of_both_sides():
    for n in range(1, 9):
        for window in range(1, 20):
            seen = sum(abs(i - j) <= window // 2 for i in range(n) for j in range(n))
            assert pair(n, n, False, window).exact == seen
            assert pair(n, n, False, window).dense == n * n


def test_refusals():
    with pytest.raises(UsageError, match="cannot be the last"):
        pair(3, 2, True)
    with pytest.raises(UsageError, match="as many queries as keys"):
        pair(3, 4, False, 2)
    with pytest.raises(UsageError, match="negative"):
        pair(-1, 3, True)
