import numpy as np
import pytest

from manyheads.attention import AttentionLayer
from manyheads.errors import ShapeError


def by_loops(layer, x, mask):
    """The definition, one token at a time."""
    k, d = x.shape
    y = np.zeros((k, d))
    pattern = np.zeros((layer.heads, k, k))
    for head in range(layer.heads):
        for row in range(k):
            keys = [j for j in range(k) if mask[row, j]]
            bias = np.zeros(d) if layer.key_bias is None else layer.key_bias[head]
            logits = [x[row] @ layer.theta[head] @ x[j] + bias @ x[j] for j in keys]
            for j, logit in zip(keys, logits, strict=True):
                pattern[head, row, j] = np.exp(logit) / np.exp(logits).sum()
                y[row] += pattern[head, row, j] * layer.projection[head].T @ x[j]
    if layer.bias is not None:
        y[mask.any(axis=1)] += layer.bias
    return y, pattern


@pytest.mark.parametrize("biased", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("causal", [False, True])
def test_layer_is_its_definition(rng, biased, causal):
    theta, projection = rng.normal(size=(2, 3, 4, 4)) / 2
    biases = (rng.normal(size=(3, 4)), rng.normal(size=4)) if biased else (None, None)
    layer = AttentionLayer(theta, projection, *biases, causal=causal)
    x, mask = rng.normal(size=(2, 5, 4)), rng.random((5, 5)) < 0.7
    for number in range(2):
        both = mask & np.tri(5, dtype=bool) if causal else mask
        y, pattern = by_loops(layer, x[number], both)
        np.testing.assert_allclose(layer(x, mask)[number], y, rtol=0, atol=1e-13)
        np.testing.assert_allclose(layer.weights(x, mask)[number], pattern, rtol=0, atol=1e-14)


def test_order_of_heads_does_not_matter_and_twins_merge(rng):
    theta, projection = rng.normal(size=(2, 3, 4, 4))
    x = rng.normal(size=(5, 4))
    y = AttentionLayer(theta, projection)(x)
    np.testing.assert_allclose(AttentionLayer(theta[[2, 0, 1]], projection[[2, 0, 1]])(x), y, rtol=0, atol=1e-13)
    twins = AttentionLayer(theta[[0, 0]], projection[:2])(x)
    merged = AttentionLayer(theta[:1], projection[:2].sum(0, keepdims=True))(x)
    np.testing.assert_allclose(twins, merged, rtol=0, atol=1e-13)


def test_permuting_tokens_permutes_the_output(rng):
    theta, projection = rng.normal(size=(2, 2, 4, 4))
    layer, x, order = AttentionLayer(theta, projection), rng.normal(size=(6, 4)), rng.permutation(6)
    np.testing.assert_allclose(layer(x[order]), layer(x)[order], rtol=0, atol=1e-13)


def test_lists_and_whole_numbers_are_welcome():
    layer = AttentionLayer([[[0, 0], [0, 0]]], [[[1, 0], [0, 1]]])
    np.testing.assert_array_equal(layer([[1, 0], [3, 4]]), [[2, 2], [2, 2]])
    signs = np.array([[1, -1], [1, 1]], dtype=np.int8)
    np.testing.assert_array_equal(layer(signs), [[1, 0], [1, 0]])


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ((np.zeros((2, 3)), np.zeros((2, 3, 3))), r"expected \(m, d, d\)"),
        ((np.zeros((0, 3, 3)), np.zeros((0, 3, 3))), "at least 1"),
        ((np.zeros((2, 3, 4)), np.zeros((2, 3, 3))), r"theta of shape \(2, 3, 4\)"),
        ((np.zeros((2, 3, 3)), np.zeros((1, 3, 3))), "projection"),
        ((np.zeros((2, 3, 3)), np.zeros((2, 3, 3)), np.zeros(3)), "key_bias"),
        ((np.zeros((2, 3, 3)), np.zeros((2, 3, 3)), None, np.zeros(2)), "bias"),
        ((np.zeros((2, 3, 3), int), np.zeros((2, 3, 3))), "floating-point"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, says):
    with pytest.raises(ShapeError, match=says):
        AttentionLayer(*weights)
