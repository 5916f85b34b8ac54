"""Matching is the best of all permutations; errors are what was put in."""

import itertools

import numpy as np
import pytest

from manyheads.attention import AttentionLayer
from manyheads.errors import ShapeError, UsageError
from manyheads.recovery.layers.matching import compare_layers, function_error, match_heads
from manyheads.recovery.planted.task import planted_layer, sequences


def test_the_matching_is_the_best_of_all_permutations(rng):
    truth, found = planted_layer(rng, 5, 4, scale=1.0), planted_layer(rng, 5, 4, scale=3.0)
    sizes = np.linalg.norm(truth.theta, axis=(1, 2))

    def cost(order):
        return np.sum(np.linalg.norm(truth.theta - found.theta[list(order)], axis=(1, 2)) / sizes)

    best = min(itertools.permutations(range(4)), key=cost)
    assert match_heads(truth, found).tolist() == list(best)


def test_heads_that_share_their_attention_are_ordered_by_their_projections(rng):
    layer = planted_layer(rng, 4, 2)
    theta = np.stack([layer.theta[0], layer.theta[0]])
    truth = AttentionLayer(theta, layer.projection)
    found = AttentionLayer(theta * (1 + 1e-15), layer.projection[::-1])
    assert compare_layers(truth, found).projection < 1e-12


def test_errors_are_what_was_put_in(rng):
    truth = planted_layer(rng, 6, 3, key_bias=True, bias=True)
    order = rng.permutation(3)
    found = AttentionLayer(
        truth.theta[order] * (1 + 1e-3 * np.array([1, 2, 3]))[:, None, None],
        truth.projection[order] * 1.25,
        truth.key_bias[order] * 0.9,
        truth.bias * 1.5,
    )
    errors = compare_layers(truth, found)
    np.testing.assert_allclose(
        [errors.theta, errors.projection, errors.key_bias, errors.bias], [3e-3, 0.25, 0.1, 0.5], rtol=1e-9
    )
    assert errors.permutation == tuple(np.argsort(order))
    assert errors.worst == errors.bias


def test_weights_that_are_zero_in_truth_have_a_finite_error(rng):
    layer = planted_layer(rng, 4, 2, scale=2.0)
    dead = AttentionLayer(layer.theta * np.array([1.0, 0.0])[:, None, None], layer.projection)
    found = AttentionLayer(dead.theta + 1e-3, layer.projection, np.full((2, 4), 1e-3), np.full(4, 1e-3))
    errors = compare_layers(dead, found)
    np.testing.assert_allclose(errors.theta, 2e-3)  # 4e-3 / 2: against the head that is not zero
    np.testing.assert_allclose(errors.bias, 1e-3)  # 2e-3 / 2: against a projection of norm sqrt(4)
    assert errors.key_bias == pytest.approx(2e-3)  # the dead head has no attention matrix either: absolute
    assert compare_layers(dead, dead).worst == 0


def test_a_function_error_is_a_ratio_of_squares(rng):
    layer, x = planted_layer(rng, 4, 2), sequences(rng, 50, 3, 4)
    doubled = AttentionLayer(layer.theta, layer.projection * 1.5)
    y = layer(x)
    expected = 0.25 * np.mean(y**2) / np.mean((y - y.mean((0, 1))) ** 2)
    assert function_error(layer, doubled, x) == pytest.approx(expected)
    assert function_error(layer, layer, x) == 0
    moved, other = (lambda x, f=f: f(x) + 1e4 for f in (layer, doubled))
    assert function_error(moved, other, x) == pytest.approx(expected, rel=1e-6)  # a constant does not count


def test_what_cannot_be_compared_is_refused(rng):
    layer, x = planted_layer(rng, 4, 2), sequences(rng, 5, 3, 4)
    with pytest.raises(ShapeError, match="function_error"):
        compare_layers(layer, planted_layer(rng, 4, 3))
    with pytest.raises(ShapeError, match="answers"):
        function_error(layer, lambda x: x[:, 0], x)
    with pytest.raises(UsageError, match="constant"):
        function_error(lambda x: 0 * x, layer, x)
