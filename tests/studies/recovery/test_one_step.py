"""One gradient step from a head at zero: what it is, and its bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.recovery.examples.stages.crude_sum import estimate_crude_sum, measure_moments, predict_bias
from manyheads.recovery.examples.stages.shards import open_shards
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.planted.task import equal_spectrum_layer, planted_layer, sequences
from manyheads.studies.recovery.steps.one_step import OneStep


def test_the_correlation_is_a_gradient_step_from_zero_and_attention_does_not_move(rng):
    layer = planted_layer(rng, 4, 2)
    x = sequences(rng, 30, 3, 4)
    y = evaluate_layer(layer, x)

    def loss(theta, projection):
        pattern = jax.nn.softmax(jnp.einsum("nrd,de,nje->nrj", x, theta, x), axis=-1)
        return 0.5 * jnp.mean(jnp.sum((jnp.einsum("nrj,njd,de->nre", pattern, x, projection) - y) ** 2, (1, 2)))

    with jax.enable_x64(True):
        for_theta, for_projection = jax.grad(loss, (0, 1))(jnp.zeros((4, 4)), jnp.zeros((4, 4)))
    np.testing.assert_allclose(estimate_crude_sum(open_shards((x, y)), "correlation")[0], -for_projection, atol=1e-12)
    assert np.all(np.asarray(for_theta) == 0)


def test_the_bias_for_gaussian_tokens_is_that_of_steins_identity(rng):
    """The excess over W_S equals Theta times the covariance of the tokens under attention, and its closed form."""
    layer = equal_spectrum_layer(rng, 12, 1, 12, scale=1.0)
    theta, projection = layer.theta[0], layer.projection[0]
    x = sequences(rng, 60_000, 3, 12, distribution="gaussian")
    moments = measure_moments(x, evaluate_layer(layer, x))
    measured = (moments.cross - moments.inputs @ projection) / moments.rows
    pattern = _pattern(x, theta)
    mean = pattern @ x
    spread = np.einsum("nrj,njd,nje->de", pattern, x, x) - np.einsum("nrd,nre->de", mean, mean)
    exact = theta @ (spread / x.shape[0] / 3) @ projection
    assert np.linalg.norm(measured - exact) < 0.08 * np.linalg.norm(exact)
    closed = predict_bias(layer, 3, rng)
    assert np.linalg.norm(exact - closed) < 0.15 * np.linalg.norm(closed)  # corrections of order scale^2 / r = 1/12


def _pattern(x, theta):
    logits = np.exp((x @ theta) @ x.transpose(0, 2, 1))
    return logits / logits.sum(-1, keepdims=True)


def test_a_layer_of_equal_spectrum_has_its_stable_rank_and_norms(rng):
    layer = equal_spectrum_layer(rng, 9, 3, 4, scale=2.0)
    values = np.linalg.svd(layer.theta)[1]
    np.testing.assert_allclose(values[:, :4], 1.0)
    np.testing.assert_allclose(values[:, 4:], 0.0, atol=1e-12)
    np.testing.assert_allclose(
        layer.projection @ layer.projection.transpose(0, 2, 1), np.eye(9)[None].repeat(3, 0), atol=1e-12
    )


@pytest.mark.parametrize("fields", [{"ranks": (8, 4)}, {"ranks": (4,)}, {"scale": 0.0}, {"tokens": 1}])
def test_sizes_without_a_power_are_refused(fields):
    with pytest.raises(UsageError):
        OneStep(**fields)
