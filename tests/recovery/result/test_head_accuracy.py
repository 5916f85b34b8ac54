"""Stated accuracies of heads: against derivatives by hand, against true errors, and what a phantom is called."""

import numpy as np
import pytest
from tests.recovery.rotary_layers import planted_rotary_layer

from manyheads.attention import AttentionLayer
from manyheads.recovery import ExtractionOptions, compare_layers, evaluate_layer, extract_layer, gpt_layer
from manyheads.recovery.result.results import head_accuracies, note_unresolved


def changed(layer, head, theta=1.0, projection=1.0):
    factors = np.ones((2, layer.heads))
    factors[:, head] = theta, projection
    weights = np.asarray(layer.theta) * factors[0, :, None, None], np.asarray(layer.projection)
    bias = layer.key_bias * factors[0, :, None]
    return AttentionLayer(weights[0], weights[1] * factors[1, :, None, None], bias, layer.bias, layer.causal)


@pytest.mark.parametrize("part", ["projection", "theta"])
def test_an_error_of_the_stated_size_changes_the_answers_by_the_error_of_the_layer(rng, part):
    """One head alone has nothing to hide behind: its error follows from a finite difference."""
    layer, x = gpt_layer(rng, 6, 1), rng.standard_normal((300, 5, 6))
    y = evaluate_layer(layer, x)
    variance = float(np.mean((y - y.mean((0, 1))) ** 2))
    (stated,) = head_accuracies(layer, [x], error=1e-8, variance=variance)
    moved = evaluate_layer(changed(layer, 0, **{part: 1 + getattr(stated, part)}), x) - y
    moved -= moved.mean((0, 1))
    # the other part of the head hides a share of it: at least as much is changed
    assert 1e-8 * variance * 0.999 < np.mean(moved**2) < 1e-8 * variance * 5


@pytest.mark.slow
def test_stated_errors_are_larger_than_true_ones(rng):
    """Heads of sizes 1 to 1e-4, exact and rounded: no head is wrong by more than it states."""
    for index in (0, 1, 4):
        layer = gpt_layer(rng, 12, 3)
        sizes = 10.0 ** -np.array([0, index, 0])[:, None, None]
        layer = AttentionLayer(layer.theta, layer.projection * sizes, layer.key_bias, layer.bias, causal=True)
        dtype = ("float64", "float32")[index == 1]
        function = lambda x, layer=layer, dtype=dtype: evaluate_layer(layer, x).astype(dtype)  # noqa: E731
        found = extract_layer(function, 12, options=ExtractionOptions(progress=False))
        assert found.heads == 3
        for head, other in enumerate(compare_layers(layer, found.layer).permutation):
            stated = found.head_accuracy[other]
            for name in ("projection", "theta"):
                true, got = getattr(layer, name)[head], getattr(found.layer, name)[other]
                assert np.linalg.norm(got - true) <= getattr(stated, name) * np.linalg.norm(true)


def test_a_head_below_the_error_is_named(rng):
    layer = changed(gpt_layer(rng, 8, 3), 1, projection=1e-6)
    accuracies = head_accuracies(layer, [rng.standard_normal((60, 4, 8))], error=1e-8, variance=1.0)
    assert [one.resolved for one in accuracies] == [True, False, True]
    assert note_unresolved(accuracies) == ("head 1 is below the error of the layer, and might not exist",)
    assert note_unresolved(accuracies[:1]) == ()


def test_heads_that_resemble_each_other_are_known_less_well(rng):
    layer, x = gpt_layer(rng, 8, 2), [rng.standard_normal((200, 4, 8))]
    near = np.stack([layer.theta[0], layer.theta[0] + 1e-3 * layer.theta[1]])
    values = np.stack([layer.projection[0]] * 2)
    alike = AttentionLayer(near, values, layer.key_bias[[0, 0]], layer.bias, causal=True)
    plain, close = (head_accuracies(one, x, 1e-12, 1.0)[0] for one in (layer, alike))
    assert close.projection > 100 * plain.projection


def test_a_head_that_ignores_the_tokens_has_no_relative_error_of_theta(rng):
    layer = gpt_layer(rng, 6, 2)
    flat = changed(layer, 0, theta=0.0)
    accuracies = head_accuracies(flat, [rng.standard_normal((50, 4, 6))], 1e-12, 1.0)
    assert accuracies[0].theta == np.inf
    assert accuracies[0].resolved


def test_rotary_layers_have_accuracies(rng):
    layer, x = planted_rotary_layer(rng, 8, 2), rng.standard_normal((50, 6, 8))
    y = layer(x)
    variance = float(np.mean((y - y.mean((0, 1))) ** 2))
    shares = [one.share for one in head_accuracies(layer, [x], 1e-12, variance)]
    alone = [np.std((w @ x) @ p) for w, p in zip(_patterns(layer, x), layer.projection, strict=True)]
    assert np.allclose(shares, np.array(alone) / variance**0.5, rtol=0.1)


def _patterns(layer, x):
    logits = np.exp(layer.logits(x))
    return logits / logits.sum(-1, keepdims=True)
