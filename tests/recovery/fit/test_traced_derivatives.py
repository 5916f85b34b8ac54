"""Derivatives of the solver against those of JAX."""

import jax
import numpy as np
import pytest
from tests.recovery.fit.test_gauss_newton import moved, problem

from manyheads.attention import AttentionLayer
from manyheads.recovery.fit.gauss_newton import as_examples
from manyheads.recovery.fit.variable_projection import Form, Tangent, stack_theta

FORMS = [
    pytest.param({}, id="plain"),
    pytest.param({"key_bias": True, "bias": True, "causal": True}, id="biases, causal"),
]


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_are_those_of_jax(rng, form):
    truth, x, y = problem(rng, form)
    weights = rng.uniform(0.5, 2, size=x.shape[:2])
    examples = as_examples(x, y, Form.of(truth), weights)
    here = Tangent.at(examples, stack_theta(moved(rng, truth, 0.3)))
    layer, scale = here.layer, np.sqrt(weights)[..., None]

    def function(stacked):
        key_bias = stacked[:, 4] if form else None
        made = AttentionLayer(stacked[:, :4], layer.projection, key_bias, layer.bias, layer.causal)
        return (made(x) * scale).reshape(-1, 4)

    change, rows = rng.normal(size=here.theta.shape), rng.normal(size=(x.shape[0] * x.shape[1], 4))

    def differentiate(theta, change, rows):
        value, vjp = jax.vjp(function, theta)
        return value, jax.jvp(function, (theta,), (change,))[1], vjp(rows)[0]

    with jax.enable_x64(True):
        value, slope, back = map(np.asarray, jax.jit(differentiate)(here.theta, change, rows))
    np.testing.assert_allclose(here.examples.labels - here.residual, value, atol=1e-12 * np.abs(value).max())
    np.testing.assert_allclose(here.jvp(change), slope, atol=1e-12 * np.abs(slope).max())
    np.testing.assert_allclose(here.vjp(rows), back, atol=1e-12 * np.abs(back).max())
    # P_perp J and its transpose, and P_perp takes out all that projections can do
    np.testing.assert_allclose(
        np.vdot(here.forward(change), rows), np.vdot(change, here.vjp(here._remove_readings(rows))), rtol=1e-9
    )
    assert np.abs(here.readings.T @ here.forward(change)).max() < 1e-9 * np.abs(here.readings.T @ slope).max()
