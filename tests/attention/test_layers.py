"""What both forms of a layer share: precision, compilation, masks, derivatives, refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manyheads._trees import static
from manyheads.attention import AttentionLayer, MultiHeadAttention, causal, padding
from manyheads.attention.layers import Layer
from manyheads.errors import ShapeError


def theta_layer(rng, dtype=np.float64, **options):
    theta, projection = rng.normal(size=(2, 3, 4, 4)).astype(dtype) / 2
    return AttentionLayer(
        theta, projection, rng.normal(size=(3, 4)).astype(dtype), rng.normal(size=4).astype(dtype), **options
    )


def thin_layer(rng, dtype=np.float64, **options):
    def draw(*shape):
        return rng.normal(size=shape).astype(dtype) / 2

    return MultiHeadAttention(
        draw(4, 4, 3),
        draw(2, 4, 3),
        draw(2, 4, 2),
        draw(4, 2, 4),
        query_bias=draw(4, 3),
        key_bias=draw(2, 3),
        value_bias=draw(2, 2),
        bias=draw(4),
        **options,
    )


both = pytest.mark.parametrize("make", [theta_layer, thin_layer], ids=["theta", "thin"])
thin_first = pytest.mark.parametrize("make", [pytest.param(theta_layer, marks=pytest.mark.slow), thin_layer])


@thin_first
def test_numpy_in_numpy_out_in_its_own_precision(make, rng):
    before = dict(jax.config.values)
    for dtype in (np.float64, np.float32):
        layer = make(rng, dtype)
        x = rng.normal(size=(2, 5, 4)).astype(dtype)
        for found in (layer(x), layer.weights(x)):
            assert type(found) is np.ndarray
            assert found.dtype == dtype
    assert dict(jax.config.values) == before


@both
def test_weights_are_kept_as_given(make, rng):
    layer = make(rng)
    assert all(type(leaf) is np.ndarray and leaf.dtype == np.float64 for leaf in jax.tree.leaves(layer))


@both
def test_jax_arrays_follow_the_caller(make, rng):
    layer, x = make(rng), rng.normal(size=(5, 4))
    assert layer(jnp.asarray(x)).dtype == jnp.float32
    assert jax.tree.map(jnp.asarray, layer)(x).dtype == jnp.float32
    with jax.enable_x64(True):
        found = layer(jnp.asarray(x))
        assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, layer(x), rtol=0, atol=1e-14)
    np.testing.assert_allclose(layer(jnp.asarray(x)), layer(x), rtol=0, atol=1e-4)


def test_constants_of_a_traced_function_are_evaluated_and_spoil_nothing(rng):
    layer, x = theta_layer(rng), rng.normal(size=(5, 4))
    expected = layer(x)
    found = jax.jit(lambda factor: factor * layer(x))(2.0)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 2 * expected, rtol=1e-6, atol=1e-6)
    # The program for single precision must not be the one that was traced in double.
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(layer(x), expected)


@thin_first
def test_jit_and_vmap_agree_with_the_call(make, rng):
    layer, x, lengths = make(rng, causal=True), rng.normal(size=(3, 5, 4)), np.array([5, 2, 0])
    with jax.enable_x64(True):
        jitted = jax.jit(lambda layer, x, lengths: layer(x, padding(lengths)))(layer, x, lengths)
        mapped = jax.vmap(lambda x, length: layer(x, padding(length)))(jnp.asarray(x), jnp.asarray(lengths))
    expected = layer(x, padding(lengths))
    np.testing.assert_allclose(jitted, expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(mapped, expected, rtol=0, atol=1e-14)


class Journal(list):
    """A list that may be part of the structure of a pytree."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


class Traced(Layer):
    """A layer that writes down each time it is traced."""

    temperature: Any
    journal: Journal = static()
    bias: Any = None
    causal: bool = static(default=True)
    heads = 1
    dim = 2

    def logits(self, x, keys=None):
        self.journal.append(x.shape)
        return self.temperature * (x @ x.swapaxes(-1, -2))[..., None, :, :]

    def read(self, pattern, x):
        return pattern[..., 0, :, :] @ x


def test_it_compiles_once_per_shape(rng):
    journal = Journal()
    for number in range(3):
        layer = Traced(jnp.float32(number), journal)
        layer(rng.normal(size=(3, 2)))
        layer(rng.normal(size=(4, 2)))
    assert list(journal) == [(3, 2), (4, 2)]


@both
def test_a_row_without_any_key_is_exactly_zero(make, rng):
    layer, x = make(rng), rng.normal(size=(2, 5, 4))
    mask = rng.random((2, 5, 5)) < 0.6
    mask[0, 2] = mask[1, 4] = False
    mask[0, 1, 0] = True
    y, pattern = layer(x, mask), layer.weights(x, mask)
    assert not y[0, 2].any()
    assert not y[1, 4].any()
    assert y[0, 1].all()
    assert not pattern[np.broadcast_to(~mask[:, None], pattern.shape)].any()
    np.testing.assert_allclose(pattern.sum(-1), np.broadcast_to(mask.any(-1)[:, None], pattern.shape[:-1]), atol=1e-14)


@thin_first
def test_derivatives_are_finite_and_right_with_an_empty_row(make, rng):
    layer, x = make(rng), rng.normal(size=(4, 4))
    mask = np.tri(4, k=-1, dtype=bool)  # the first row attends to nothing
    direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape) / 10, (layer, x))

    def value(step):
        at, tokens = jax.tree.map(lambda leaf, way: leaf + step * way, (layer, x), direction)
        return np.sin(at(tokens, mask)).sum()

    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(lambda both: jnp.sin(both[0](both[1], mask)).sum()))((layer, x))
    slope = sum(np.vdot(a, b) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
    # Central differences of fourth order: error of about 1e-12 from rounding, and h^4 times a fifth derivative.
    h = 1e-3
    difference = (8 * (value(h) - value(-h)) - (value(2 * h) - value(-2 * h))) / (12 * h)
    np.testing.assert_allclose(slope, difference, rtol=1e-6, atol=1e-7)


def test_a_bias_is_added_to_the_logits(rng):
    layer, x = thin_layer(rng), rng.normal(size=(2, 5, 4))
    bias = rng.normal(size=(2, 5, 5))
    bias[0, 2, :3] = bias[1, 4] = np.finfo(np.float64).min
    logits = np.asarray(layer.logits(x)) + bias[:, None]
    exponentials = np.exp(logits)
    total = exponentials.sum(-1, keepdims=True)
    expected = np.divide(exponentials, total, out=np.zeros_like(total * exponentials), where=total > 0)
    np.testing.assert_allclose(layer.weights(x, bias), expected, rtol=0, atol=1e-6)
    assert not layer(x, bias)[1, 4].any()


@thin_first
def test_causal_is_the_causal_mask(make, rng):
    x = rng.normal(size=(2, 5, 4))
    state = np.random.default_rng(3)
    twin = make(np.random.default_rng(3), causal=True)
    plain = make(state)
    np.testing.assert_allclose(twin(x), plain(x, causal), rtol=0, atol=1e-14)
    np.testing.assert_allclose(twin(x, padding([3, 4])), plain(x, causal & padding([3, 4])), rtol=0, atol=1e-14)
    past = x.copy()
    past[:, 3:] += 1
    np.testing.assert_array_equal(twin(past)[:, :3], twin(x)[:, :3])
    everything = np.ones((5, 5), bool)
    assert np.abs(plain(past, everything) - plain(x, everything))[:, :3].max() > 1e-3


@both
def test_tokens_and_masks_that_do_not_fit_are_refused(make, rng):
    layer = make(rng)
    with pytest.raises(ShapeError, match=r"\(\.\.\., k, 4\)"):
        layer(np.zeros((5, 3)))
    with pytest.raises(ShapeError, match="does not broadcast"):
        layer(np.zeros((5, 4)), np.ones((4, 5), bool))
    with pytest.raises(ShapeError, match="no axis for the heads"):
        layer(np.zeros((2, 5, 4)), np.ones((3, 5, 5), bool))
