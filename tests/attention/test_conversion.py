import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.attention import AttentionLayer, MultiHeadAttention, causal, padding, sliding_window
from manyheads.attention.conversion import RankTooSmall, factor_stacks
from manyheads.attention.masks import evaluate
from manyheads.errors import CertificateError, UsageError

# heads, groups, d, N, N_v, which of the four biases: few, because each one compiles.
FORMS = [
    (1, 1, 4, 4, 4, (False, False, False, False)),
    (4, 2, 6, 2, 3, (True, True, True, True)),
    (3, 1, 3, 5, 1, (True, False, True, False)),
]
# Some tables leave rows without any key; so does padding to length 0.
MASKS = {
    "none": lambda draw: np.ones((2, 5, 5), bool),
    "causal": lambda draw: causal & np.ones((2, 5, 5), bool),
    "window": lambda draw: causal & sliding_window(2) & np.ones((2, 5, 5), bool),
    "table": lambda draw: draw.random((2, 5, 5)) < 0.5,
    "padding": lambda draw: padding(draw.integers(0, 6, size=2)) & np.ones((2, 5, 5), bool),
}


def draw_layer(form, draw):
    heads, groups, dim, key_dim, value_dim, biased = form

    def normal(*shape):
        return draw.normal(size=shape) / dim**0.5

    shapes = {
        "query_bias": (heads, key_dim),
        "key_bias": (groups, key_dim),
        "value_bias": (groups, value_dim),
        "bias": (dim,),
    }
    biases = {name: normal(*shape) for (name, shape), present in zip(shapes.items(), biased, strict=True) if present}
    query, key = normal(heads, dim, key_dim), normal(groups, dim, key_dim)
    return MultiHeadAttention(
        query, key, normal(groups, dim, value_dim), normal(heads, value_dim, dim), scale=0.7, **biases
    )


@pytest.mark.slow
@given(form=st.sampled_from(FORMS), mask=st.sampled_from(sorted(MASKS)), number=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_both_forms_are_one_function(form, mask, number):
    draw = np.random.default_rng(number)
    layer = draw_layer(form, draw)
    x = draw.normal(size=(2, 5, layer.dim))
    mask = evaluate(MASKS[mask](draw), (5, 5))  # tables of one shape, so that each form compiles once
    y = layer(x, mask)
    merged = layer.merged()
    np.testing.assert_allclose(merged(x, mask), y, rtol=0, atol=1e-12)
    if form is FORMS[1]:  # one more program for each form of the layer: the one with everything in it will do
        np.testing.assert_allclose(merged.weights(x, mask), layer.weights(x, mask), rtol=0, atol=1e-12)
    rank = max(layer.query.shape[-1], layer.value.shape[-1])
    again = merged.factored(rank)
    assert again.query.shape == (layer.heads, layer.dim, rank)
    assert again.output.shape == (layer.heads, rank, layer.dim)
    np.testing.assert_allclose(again(x, mask), y, rtol=0, atol=1e-12)


def test_merging_follows_its_formula(rng):
    layer = draw_layer(FORMS[1], rng)
    merged = layer.merged()
    c = layer.bias.copy()
    for head in range(4):
        group = head // 2
        np.testing.assert_allclose(merged.theta[head], 0.7 * layer.query[head] @ layer.key[group].T, rtol=0, atol=1e-14)
        np.testing.assert_allclose(
            merged.key_bias[head], 0.7 * layer.key[group] @ layer.query_bias[head], rtol=0, atol=1e-14
        )
        np.testing.assert_allclose(merged.projection[head], layer.value[group] @ layer.output[head], rtol=0, atol=1e-14)
        c += layer.output[head].T @ layer.value_bias[group]
    np.testing.assert_allclose(merged.bias, c, rtol=0, atol=1e-14)
    assert type(merged.theta) is np.ndarray
    assert merged.theta.dtype == np.float64


def test_scale_and_causality_survive(rng):
    theta, projection = rng.normal(size=(2, 3, 4, 4))
    layer = AttentionLayer(theta, projection, rng.normal(size=(3, 4)), rng.normal(size=4), causal=True)
    x = rng.normal(size=(5, 4))
    for scale in (None, 1.0, 0.01):
        thin = layer.factored(4, scale=scale)
        assert thin.causal
        assert thin.scale == (0.5 if scale is None else scale)
        np.testing.assert_allclose(thin(x), layer(x), rtol=0, atol=1e-12)


def test_a_rank_beyond_the_dimension_is_padded(rng):
    theta, projection = rng.normal(size=(2, 2, 3, 3))
    layer, x = AttentionLayer(theta, projection), rng.normal(size=(4, 3))
    thin = layer.factored(7)
    assert thin.key.shape == (2, 3, 7)
    np.testing.assert_allclose(thin(x), layer(x), rtol=0, atol=1e-12)


def test_too_small_a_rank_is_refused_with_its_figures(rng):
    left, values, right = np.linalg.svd(rng.normal(size=(2, 4, 4)))
    values[:] = [1, 0.5, 0.25, 0]
    values[1, 1:] = [0.125, 0, 0]
    theta = left * values[:, None] @ right
    layer = AttentionLayer(theta, np.ones((2, 4, 4)))
    with pytest.raises(CertificateError) as caught:
        layer.factored(2)
    error = caught.value
    assert isinstance(error, RankTooSmall)
    assert error.measured == pytest.approx(0.25, rel=1e-12)
    assert 1e-16 < error.threshold < 1e-13
    assert error.smallest_rank == 3
    assert "rank 3 or more" in str(error)
    assert layer.factored(error.smallest_rank).query.shape == (2, 4, 3)
    assert layer.factored(2, tolerance=0.26).query.shape == (2, 4, 2)
    with pytest.raises(RankTooSmall) as caught:
        layer.factored(1, tolerance=0.3)
    assert (caught.value.measured, caught.value.smallest_rank) == (pytest.approx(0.5, rel=1e-12), 2)


def test_a_query_bias_may_cost_one_rank(rng):
    layer = AttentionLayer(np.zeros((1, 3, 3)), np.zeros((1, 3, 3)), key_bias=rng.normal(size=(1, 3)))
    thin, x = layer.factored(1), rng.normal(size=(4, 3))
    np.testing.assert_allclose(thin.weights(x), layer.weights(x), rtol=0, atol=1e-13)
    assert np.ptp(layer.weights(x)[0], axis=0).max() < 1e-13 < np.ptp(layer.weights(x)[0], axis=1).min()


def test_the_error_survives_a_worker_process():
    error = RankTooSmall(2, measured=0.5, threshold=1e-14, smallest_rank=3)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.measured, copy.threshold, copy.smallest_rank) == (0.5, 1e-14, 3)


def test_extended_precision_is_factored_in_double(rng):
    theta, projection = rng.normal(size=(2, 2, 3, 3))
    found, plain = (AttentionLayer(each, projection).factored(3) for each in (theta.astype(np.longdouble), theta))
    np.testing.assert_array_equal(found.query, plain.query)


def test_half_precision_is_factored_in_single(rng):
    theta, projection = rng.normal(size=(2, 2, 3, 3)).astype(np.float16)
    thin = AttentionLayer(theta, projection).factored(3)
    assert thin.query.dtype == np.float32
    np.testing.assert_allclose(thin.scale * thin.query @ thin.key.swapaxes(-1, -2), theta, rtol=0, atol=1e-5)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_weights_that_are_not_numbers_are_refused(broken):
    with pytest.raises(UsageError, match="NaN or infinite"):
        AttentionLayer(np.full((1, 2, 2), broken), np.ones((1, 2, 2))).factored(2)


def test_no_column_is_no_factor():
    with pytest.raises(UsageError, match="at least 1"):
        factor_stacks((np.ones((1, 2, 2)),), rank=0, tolerance=None)
