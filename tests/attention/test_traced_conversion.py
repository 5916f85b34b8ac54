"""Conversions of layers on arrays of JAX: derivatives and kinds of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.attention.test_conversion import draw_layer

from manyheads.attention import AttentionLayer

# heads, groups, d, N, N_v, which of the four biases: few, because each one compiles.
FORMS = [
    (1, 1, 4, 4, 4, (False, False, False, False)),
    (4, 2, 6, 2, 3, (True, True, True, True)),
    (3, 1, 3, 5, 1, (True, False, True, False)),
]


@pytest.mark.slow
def test_merging_traces_and_differentiates(rng):
    layer, x = draw_layer(FORMS[1], rng), rng.normal(size=(5, 6))
    with jax.enable_x64(True):
        tokens = jnp.asarray(x)
        direct = jax.jit(jax.grad(lambda layer: (layer(tokens) ** 2).sum()))(layer)
        through = jax.jit(jax.grad(lambda layer: (layer.merged()(tokens) ** 2).sum()))(layer)
    for a, b in zip(jax.tree.leaves(direct), jax.tree.leaves(through), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11)


def test_single_precision_stays_single(rng):
    theta, projection = rng.normal(size=(2, 2, 3, 3)).astype(np.float32)
    for array in (np.asarray, jnp.asarray):
        thin = AttentionLayer(array(theta), array(projection)).factored(3)
        assert thin.query.dtype == np.float32
        assert isinstance(thin.query, type(array(theta)))
    thin = AttentionLayer(theta, projection).factored(3)
    rebuilt = thin.scale * thin.query.astype(float) @ thin.key.astype(float).swapaxes(-1, -2)
    np.testing.assert_allclose(rebuilt, theta, rtol=0, atol=1e-5)
