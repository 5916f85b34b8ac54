"""One token: the affine map of any layer, exactly, at the cost that is said."""

import numpy as np

from manyheads.recovery import planted_layer
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.values.output_spaces import Sums, read_sums


def test_sum_of_projections_and_bias_of_a_planted_layer(rng):
    layer = planted_layer(rng, 9, 3, key_bias=True, bias=True, causal=True)
    oracle = Oracle.of(layer)
    sums = read_sums(oracle, 9)
    np.testing.assert_allclose(sums.projection, layer.projection.sum(0), rtol=0, atol=1e-13)
    np.testing.assert_allclose(sums.bias, layer.bias, rtol=0, atol=1e-15)
    assert (oracle.total.calls, oracle.total.tokens) == (10, 10)
    x = rng.normal(size=(2, 9))
    np.testing.assert_allclose(sums.read(x), x @ layer.projection.sum(0) + layer.bias, rtol=0, atol=1e-12)


def test_curvature_is_the_relative_distance_from_the_affine_map(rng):
    """Answers 1.25 x W + c are a quarter of x W off, whatever c is; affine ones are not."""
    sums = Sums(rng.normal(size=(5, 5)), 10 * rng.normal(size=5))
    for factor, expected in ((1.25, 0.25), (0.0, 1.0), (1.0, 0.0)):
        ask = lambda x, read, factor=factor: factor * x[:, -1] @ sums.projection + sums.bias  # noqa: E731
        assert abs(sums.curvature(ask, rng, 3) - expected) < 1e-13


def test_projections_are_split_by_their_output_spaces(rng):
    parts = [rng.normal(size=(6, rank)) @ rng.normal(size=(rank, 6)) for rank in (2, 3)]
    spaces = [np.linalg.svd(part)[2][:rank] for part, rank in zip(parts, (2, 3), strict=True)]
    np.testing.assert_allclose(Sums(sum(parts), np.zeros(6)).split(spaces).projection, parts, rtol=0, atol=1e-12)
