"""The layer of forms against one that turns queries and keys by their positions."""

import numpy as np
import pytest
from tests.recovery.rotary_layers import planted_rotary_layer

from manyheads.errors import ShapeError, UsageError
from manyheads.recovery.layers.rotary import RotaryLayer

DIM, HEADS, RANK = 6, 2, 4


def rotate(z, positions, frequencies):
    """Turn planes (f, f + r/2) of z (..., k, r) by position times frequency: RoPE as it is written in code."""
    half = z.shape[-1] // 2
    angle = np.zeros((len(positions), half))
    angle[:, : len(frequencies)] = positions[:, None] * frequencies
    a, b = z[..., :half], z[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)


def rope(x, query, key, projection, frequencies, bias):
    """Attention with turned queries and keys, one head and one row at a time."""
    tokens = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2)
    y = np.zeros_like(x) + bias
    for head in range(len(query)):
        q, k = (rotate(tokens @ w[head], np.arange(x.shape[1]), frequencies) for w in (query, key))
        for row in range(x.shape[1]):
            logits = np.einsum("nr,njr->nj", q[:, row], k[:, : row + 1])
            weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            y[:, row] += np.einsum("nj,njd->nd", weights, x[:, : row + 1]) @ projection[head]
    return y


@pytest.mark.parametrize("turned", [1, 2])  # planes that turn: some, all
def test_forms_are_turned_queries_and_keys(rng, turned):
    query, key = rng.standard_normal((2, HEADS, DIM + 1, RANK)) / 2
    projection, bias = rng.standard_normal((HEADS, DIM, DIM)), rng.standard_normal(DIM)
    frequencies = rng.uniform(0.1, 2, turned)
    layer = RotaryLayer.of_projections(query, key, projection, frequencies, bias=bias, offsets=3)
    x = rng.standard_normal((3, 7, DIM))  # longer than what is listed: the rest follows from turns
    np.testing.assert_allclose(layer(x), rope(x, query, key, projection, frequencies, bias), rtol=1e-9, atol=1e-9)


def test_a_function_of_the_query_alone_is_not_seen(rng):
    layer = planted_rotary_layer(rng, DIM, HEADS - 1, key_bias=0.3)
    forms = layer.forms.copy()
    forms[:, :, :, -1] += rng.standard_normal((1, 1, DIM + 1))
    x = rng.standard_normal((2, 5, DIM))
    np.testing.assert_allclose(RotaryLayer(forms, layer.projection, layer.bias)(x), layer(x), rtol=1e-9, atol=1e-9)


def test_frequencies_are_angles_of_turns(rng):
    layer = planted_rotary_layer(rng, 8, 2, base=100.0)
    for found in layer.turns.frequencies():
        np.testing.assert_allclose(found, [1.0, 0.1], rtol=1e-9)


def test_what_does_not_fit_is_refused(rng):
    layer = planted_rotary_layer(rng, 8, 2)
    listed = RotaryLayer(layer.forms[:4], layer.projection)
    with pytest.raises(UsageError, match="offsets 0 to 3"):
        listed(np.zeros((1, 5, 8)))
    with pytest.raises(ShapeError, match="would fit"):
        RotaryLayer(layer.forms[..., :-1], layer.projection)
    with pytest.raises(ShapeError, match="would fit"):
        RotaryLayer(layer.forms, layer.projection, bias=np.zeros(3))
    with pytest.raises(ShapeError, match="takes"):
        layer(np.zeros((5, 8)))
    with pytest.raises(UsageError, match="at most half"):
        RotaryLayer.of_projections(*np.zeros((2, 1, 4, 3)), np.zeros((1, 4, 4)), np.ones(1))
