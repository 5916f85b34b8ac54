import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.attention.masks import causal, evaluate, padding, sliding_window
from manyheads.attention.softmax import masked_softmax
from manyheads.errors import ShapeError, UsageError

shapes = st.integers(1, 6).flatmap(lambda m: st.tuples(st.integers(1, m), st.just(m)))


def booleans(shape, number):
    return np.random.default_rng(number).random(shape) < 0.6


def full(allowed, n, m):
    """Broadcast to the whole pattern."""
    allowed = np.asarray(allowed)
    return np.broadcast_to(allowed, (*allowed.shape[:-2], n, m))


@given(shape=shapes, width=st.integers(1, 7), length=st.integers(0, 7), number=st.integers(0, 1000))
def test_rules_say_what_their_definition_says(shape, width, length, number):
    n, m = shape
    table = booleans((n, m), number)
    rule = causal & sliding_window(width) & padding(np.array(length)) & table
    expected = np.zeros((n, m), bool)
    for row in range(n):
        query = m - n + row  # queries are the last n positions
        for key in range(m):
            near = abs(query - key) < width
            expected[row, key] = key <= query and near and key < length and table[row, key]
    np.testing.assert_array_equal(full(evaluate(rule, shape), n, m), expected)


@given(shape=shapes, number=st.integers(0, 1000))
def test_a_block_is_a_block_of_the_whole(shape, number):
    n, m = shape
    draw = np.random.default_rng(number)
    rows = draw.integers(0, n, size=3)
    lengths = draw.integers(0, m + 1, size=(2,))
    for mask in (causal, sliding_window(2), padding(lengths), booleans((2, n, m), number), booleans((1, m), number)):
        whole = full(evaluate(mask, shape), n, m)
        np.testing.assert_array_equal(full(evaluate(mask, shape, rows), 3, m), whole[..., rows, :])


@given(shape=shapes)
def test_suffix_queries_see_the_last_rows_of_the_square(shape):
    n, m = shape
    for rule in (causal, sliding_window(2), causal & sliding_window(3)):
        np.testing.assert_array_equal(evaluate(rule, (n, m)), evaluate(rule, (m, m))[m - n :])


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_arrays_join_rules_from_either_side(array):
    table = booleans((3, 3), 0)
    expected = table & np.tri(3, dtype=bool)
    for rule in (causal & array(table), array(table) & causal):
        np.testing.assert_array_equal(evaluate(rule, (3, 3)), expected)


def test_lengths_bring_their_own_axis():
    allowed = evaluate(padding([2, 0]) & causal, (3, 3))
    np.testing.assert_array_equal(allowed[0], np.tri(3, dtype=bool) & (np.arange(3) < 2))
    assert not allowed[1].any()


def test_rules_are_pytrees_and_their_arrays_may_be_traced():
    count = jax.jit(lambda rule: evaluate(rule, (4, 4)).sum())
    assert count(padding(np.array([3])) & causal) == 1 + 2 + 3 + 3
    assert count(padding(np.array([1])) & causal) == 4
    assert eqx.tree_equal(padding([1, 2]) & causal, padding([1, 2]) & causal)


def test_softmax_against_a_loop(rng):
    logits, allowed = rng.normal(scale=3, size=(5, 4, 6)), rng.random((5, 4, 6)) < 0.5
    allowed[0, 0] = False
    with jax.enable_x64(True):
        found = np.asarray(masked_softmax(logits, allowed))
    for index in np.ndindex(5, 4):
        chosen = np.exp(logits[index][allowed[index]])
        expected = np.zeros(6)
        expected[allowed[index]] = chosen / chosen.sum()
        np.testing.assert_allclose(found[index], expected, rtol=1e-13, atol=0)
    assert not found[~allowed].any()


@jax.jit
def softmax_and_jacobian(logits, allowed):
    return masked_softmax(logits, allowed), jax.jacobian(masked_softmax)(logits, allowed)


@pytest.mark.parametrize("forbidden", [0.0, 1e30, -1e30, np.inf, -np.inf])
def test_forbidden_logits_reach_neither_value_nor_derivative(forbidden):
    allowed = np.array([[True, True, False], [False, False, False]])
    logits = np.where(allowed, [[0.0, 1.0, 9.0], [2.0, 3.0, 4.0]], forbidden).astype(np.float32)
    weights, jacobian = softmax_and_jacobian(logits, allowed)
    p = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(weights, [[1 - p, p, 0], [0, 0, 0]], rtol=1e-6)
    expected = np.zeros((2, 3, 2, 3))
    expected[0, :2, 0, :2] = p * (1 - p) * np.array([[1, -1], [-1, 1]])
    np.testing.assert_allclose(jacobian, expected, rtol=1e-5, atol=1e-7)


def test_huge_logits_do_not_overflow():
    softmax, logits = jax.jit(masked_softmax), np.float32([3e38, 0.0, -3e38])
    np.testing.assert_array_equal(softmax(logits), [1, 0, 0])
    np.testing.assert_array_equal(softmax(logits, np.array([False, True, True])), [0, 1, 0])


def test_an_allowed_logit_that_overflowed_has_no_weight():
    logits, allowed = np.float32([[0.0, -np.inf], [-np.inf, -np.inf]]), np.ones((2, 2), bool)
    np.testing.assert_array_equal(jax.jit(masked_softmax)(logits, allowed), [[1, 0], [0, 0]])
    assert jax.jit(masked_softmax)(jnp.zeros((0, 0)), np.ones((0, 0), bool)).shape == (0, 0)


@pytest.mark.parametrize(
    ("mask", "shape", "says"),
    [
        (np.zeros((2, 2), int), (2, 2), "booleans"),
        (np.ones(2, bool), (2, 2), "queries by keys"),
        (np.ones((3, 2), bool), (2, 2), "does not broadcast"),
        (np.ones((2, 3), bool) & causal, (2, 2), "does not broadcast"),
        (causal, (3, 2), "last n of the m keys"),
        (sliding_window(1), (3, 2), "last n of the m keys"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask, shape, says):
    with pytest.raises(ShapeError, match=says):
        evaluate(mask, shape)


def test_rules_that_mean_nothing_are_refused():
    with pytest.raises(UsageError, match="at least 1"):
        sliding_window(0)
    with pytest.raises(ShapeError, match="whole number"):
        padding(np.array([1.5]))
