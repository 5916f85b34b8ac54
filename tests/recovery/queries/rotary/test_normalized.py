"""Rotary positions behind a norm: heads from one repeated token, logits by signs, and what is no such layer."""

import numpy as np
import pytest
from tests.recovery.rotary_layers import planted_rotary_layer

import manyheads as mh
from manyheads.recovery import ExtractionOptions, RotaryLayer, compare_layers
from manyheads.recovery.oracle.answers import LayerOracle
from manyheads.recovery.oracle.normalization import Normalization
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.repeated_tokens import RepeatedToken, find_repeated_heads
from manyheads.recovery.refusals import RecoveryRefused

DIM, HEADS = 12, 2
NORM = Normalization(centred=False, epsilon=1e-5)


@pytest.fixture
def layer(seed):
    return planted_rotary_layer(np.random.default_rng([seed, 8]), DIM, HEADS)


def block(layer, norm=NORM, inside=lambda u: u):
    return LayerOracle(lambda x: x + layer(inside(norm(x))), DIM, True, True, None, True)


def test_one_moved_token_shows_the_shares_of_identical_ones(layer, rng):
    """The derivative of row n is sum_i p_i e W_i with p_i from the logits of identical tokens."""
    axis = rng.standard_normal(DIM)
    axis /= np.linalg.norm(axis)
    token = RepeatedToken(Oracle(layer, DIM), np.eye(DIM), axis, np.sqrt(DIM))
    e = token.directions(2, rng)
    found = token.derivatives(e, np.array([1]), 4)[:, 0]
    z = np.sqrt(DIM) * axis
    odds = np.exp([z @ layer.attention(t) @ z for t in range(4)])  # (t, m)
    shares = np.stack([odds[row - 1] / odds[: row + 1].sum(0) for row in range(1, 4)])  # token 1 in rows 1..3
    expected = np.einsum("rm,ad,mde->are", shares, e, layer.projection)
    assert np.abs(found[:, 1:] - expected).max() < 1e-10 * np.abs(expected).max()
    assert np.abs(found[:, 0]).max() < 1e-10


@pytest.mark.parametrize("shared", [False, True])
def test_a_block_is_extracted_and_shared_values_too(layer, shared, seed):
    """Grouped queries: two heads with one value matrix and different outputs."""
    if shared:
        both = layer.projection[0] @ np.linalg.pinv(layer.projection[0]) @ layer.projection[0]
        spaces = [np.linalg.svd(w)[2][: DIM // HEADS] for w in layer.projection]
        value = both @ spaces[0].T
        layer = RotaryLayer(layer.forms, np.array([value @ spaces[0], value @ spaces[1]]), layer.bias, layer.turns)
    found = mh.extract_layer(block(layer), seed=seed, options=ExtractionOptions(verify=60))
    assert (found.method, found.heads) == ("rotary-sphere", HEADS)
    errors = compare_layers(layer, found.layer)
    assert errors.theta < 1e-4
    assert errors.projection < 1e-7
    assert found.certificate.largest_error < 1e-9


def test_heads_that_attend_nearly_alike_are_told_apart(seed):
    """As after the usual initialization: logits far below one, so that a repeated token mixes heads beyond rounding."""
    layer = planted_rotary_layer(np.random.default_rng([seed, 9]), 16, 4, gain=1e-2)
    oracle = LayerOracle(lambda x: x + layer(NORM(x)), 16, True, True, None, True)
    found = mh.extract_layer(oracle, method="rotary-sphere", seed=seed, options=ExtractionOptions(verify=60))
    figures = next(stage.figures for stage in found.stages if stage.name == "values")
    assert (found.method, found.heads) == ("rotary-sphere", 4)
    assert figures["condition of weights"] > 1e3  # the case in question
    assert found.certificate.largest_error < 1e-12


def test_what_is_no_such_layer_is_refused(layer, rng, seed):
    """Negative controls: an MLP on the norm, and a shift behind it, which is left to the method for other scores."""
    shift, weights = rng.standard_normal(DIM), rng.standard_normal((DIM, DIM))
    mlp = LayerOracle(lambda x: x + np.tanh(NORM(x) @ weights), DIM, True, True, None, True)
    options = ExtractionOptions(verify=40, tries=1)
    with pytest.raises(RecoveryRefused):
        mh.extract_layer(mlp, seed=seed, options=options)
    found = mh.extract_layer(block(layer, inside=lambda u: u + shift), seed=seed, options=options)
    assert found.method == "scores-sphere"
    assert found.tried[0].startswith("rotary-sphere: ")
    assert "Error" in found.tried[0]  # refused


def test_weights_without_positions_show_no_heads(rng):
    """Where the weights of identical tokens are equal, all heads have the same shares: they count as one."""
    forms = np.zeros((8, 2, DIM + 1, DIM + 1))
    same = RotaryLayer(forms, rng.standard_normal((2, DIM, DIM)))

    def ask(x, read):
        y = np.asarray(x).cumsum(1) / np.arange(1, x.shape[1] + 1)[:, None] @ same.projection.sum(0)
        return y if read == "all" else y[:, -1]

    assert find_repeated_heads(ask, np.eye(DIM), np.sqrt(DIM), 1e-16, rng).shares.shape[1] == 1
