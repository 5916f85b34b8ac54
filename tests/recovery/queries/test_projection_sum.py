"""One token: the affine map of any layer, exactly, at the cost that is said."""

import numpy as np

from manyheads.recovery import planted_layer
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.projection_sum import read_sums


def test_sum_of_projections_and_bias_of_a_planted_layer(rng):
    layer = planted_layer(rng, 9, 3, key_bias=True, bias=True, causal=True)
    oracle = Oracle.of(layer)
    sums = read_sums(oracle, 9)
    np.testing.assert_allclose(sums.projection, layer.projection.sum(0), rtol=0, atol=1e-13)
    np.testing.assert_allclose(sums.bias, layer.bias, rtol=0, atol=1e-15)
    assert (oracle.total.calls, oracle.total.tokens) == (10, 10)
    x = rng.normal(size=(2, 9))
    np.testing.assert_allclose(sums.read(x), x @ layer.projection.sum(0) + layer.bias, rtol=0, atol=1e-12)
