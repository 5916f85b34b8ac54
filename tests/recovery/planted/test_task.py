"""Planted layers have the norms, ranks and logits that are promised; sequences the moments."""

import math

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.recovery.planted.task import gpt_layer, planted_layer, sequences


def test_a_planted_layer_has_its_norms_ranks_and_parts(rng):
    layer = planted_layer(rng, 12, 3, scale=1.5, rank=2, key_bias=True, bias=True, causal=True)
    np.testing.assert_allclose(np.linalg.norm(layer.theta, axis=(1, 2)), 1.5)
    np.testing.assert_allclose(np.linalg.norm(layer.projection, axis=(1, 2)), math.sqrt(12))
    np.testing.assert_allclose(np.linalg.norm(layer.key_bias, axis=1), 0.75)
    assert np.linalg.matrix_rank(layer.theta).tolist() == [2, 2, 2]
    assert layer.bias.shape == (12,)
    assert layer.causal
    plain = planted_layer(rng, 5, 1)
    assert plain.key_bias is None
    assert plain.bias is None
    assert not plain.causal
    assert plain.theta.dtype == np.float64


@pytest.mark.parametrize("distribution", ["boolean", "gaussian"])
def test_logits_between_different_tokens_have_the_scale_as_standard_deviation(rng, distribution):
    layer = planted_layer(rng, 16, 2, scale=3.0)
    x = sequences(rng, 20_000, 2, 16, distribution=distribution)
    logits = np.einsum("na,mab,nb->mn", x[:, 0], layer.theta, x[:, 1])
    # fourth moments of the logits are below 9 s^4, so 8/sqrt(20000) is over five standard errors of the variance
    np.testing.assert_allclose(logits.var(axis=1), 9.0, rtol=2 * 8 / math.sqrt(20_000))
    if distribution == "boolean":
        assert set(np.unique(x)) == {-1.0, 1.0}


def test_a_gpt_layer_has_rank_and_gain(rng):
    layer = gpt_layer(rng, 24, 4, gain=2.0)
    assert np.linalg.matrix_rank(layer.theta).tolist() == [6] * 4
    assert np.linalg.matrix_rank(layer.projection).tolist() == [6] * 4
    x = sequences(rng, 4000, 2, 24, distribution="gaussian")
    logits = np.einsum("na,mab,nb->mn", x[:, 0], layer.theta, x[:, 1])
    assert 1.0 < logits.std() < 4.0
    # the key bias lies in the span of the keys, which is the row space of theta
    for theta, beta in zip(layer.theta, layer.key_bias, strict=True):
        _, _, rows = np.linalg.svd(theta)
        np.testing.assert_allclose(rows[6:] @ beta, 0, atol=1e-12)
    bare = gpt_layer(rng, 8, 2, rank=3, key_bias=False, bias=False, causal=False)
    assert (bare.key_bias, bare.bias, bare.causal) == (None, None, False)


@pytest.mark.parametrize(
    "call",
    [
        lambda rng: planted_layer(rng, 4, 2, scale=0.0),
        lambda rng: planted_layer(rng, 4, 2, rank=5),
        lambda rng: planted_layer(rng, 4, 0),
        lambda rng: gpt_layer(rng, 4, 8),
        lambda rng: gpt_layer(rng, 4, 2, gain=math.nan),
        lambda rng: sequences(rng, 0, 2, 4),
        lambda rng: sequences(rng, 1, 2, 4, distribution="uniform"),
    ],
)
def test_what_cannot_be_planted_is_refused(rng, call):
    with pytest.raises(UsageError):
        call(rng)
