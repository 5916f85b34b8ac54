"""Other scores behind a norm: its inverse, what is determined of gain and shift, and what is no such layer."""

import numpy as np
import pytest
from tests.recovery.rotary_layers import planted_rotary_layer
from tests.recovery.score_layers import planted_score_layer

import manyheads as mh
from manyheads.recovery import ExtractionOptions, compare_layers
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.oracle.answers import LayerOracle
from manyheads.recovery.oracle.normalization import Normalization
from manyheads.recovery.refusals import FitError, NotALayer, RecoveryRefused

DIM, HEADS = 16, 2
RMS, LAYER = Normalization(centred=False, epsilon=1e-6), Normalization(centred=True, epsilon=1e-5)


def block(layer, norm, gain=1.0, shift=0.0):
    """Return x + layer(gain norm(x) + shift)."""
    return LayerOracle(lambda x: x + layer(gain * norm(x) + shift), DIM, True, True, True, True, True)


def behind(layer, norm, gain, shift):
    """Return the layer with biases on u that is `layer` on gain u + shift, projected on what u can show."""
    off = np.diag(gain)
    if norm.centred:
        off = off - np.ones((DIM, 1)) @ gain[None] / DIM
    wide = np.block([[off, np.zeros((DIM, 1))], [shift[None], np.ones((1, 1))]])
    constant = layer.bias + (shift @ layer.projection).sum(0)
    return RotaryLayer(wide @ layer.forms @ wide.T, off @ layer.projection, constant)


@pytest.mark.parametrize("norm", [RMS, LAYER])
def test_the_inverse_of_a_norm_reaches_every_token_of_the_ball(norm, rng):
    u = rng.standard_normal((40, DIM))
    u -= u.mean(-1, keepdims=True) if norm.centred else 0.0
    u *= np.sqrt(DIM) * rng.uniform(0, 0.999, (40, 1)) / np.linalg.norm(u, axis=1, keepdims=True)
    u[0] = 0.0
    np.testing.assert_allclose(norm(norm.inverse(u)), u, atol=1e-12)


@pytest.mark.parametrize("norm", [RMS, LAYER])
def test_biases_and_shifts_are_found_as_far_as_they_are_determined(norm, seed):
    """The weights are those with gain and shift moved into them."""
    rng = np.random.default_rng([seed, 3])
    layer = planted_rotary_layer(rng, DIM, HEADS, key_bias=0.5)
    gain, shift = rng.uniform(0.5, 1.5, DIM), 0.3 * rng.standard_normal(DIM)
    options = ExtractionOptions(verify=60)
    found = mh.extract_layer(block(layer, norm, gain, shift), seed=seed, options=options)
    assert (found.method, found.heads) == ("scores-sphere", HEADS)
    truth = behind(layer, norm, gain, shift)
    errors = compare_layers(truth, found.layer)
    assert max(errors.theta, errors.key_bias) < 1e-5
    assert errors.projection < 1e-6
    assert found.extracted.prepare.epsilon == pytest.approx(norm.epsilon, rel=1e-9)
    np.testing.assert_allclose(found.layer.bias, truth.bias, atol=1e-9)
    assert compare_layers(behind(layer, norm, gain, 0 * shift), found.layer).key_bias > 0.1  # the shift shows


@pytest.mark.parametrize("kind", ["head norms", "ALiBi and biases", "sinks, biases and window"])
def test_a_layer_of_scaled_tokens(kind, rng):
    """Gains that are moved into the weights leave the function as it is."""
    layer, x = planted_score_layer(rng, DIM, HEADS, kind), rng.standard_normal((3, 9, DIM))
    np.testing.assert_allclose(layer.of_scaled_tokens(3.0)(x), layer(3.0 * x), atol=1e-11)


@pytest.mark.parametrize(
    ("kind", "norm"),
    [("head norms", RMS), ("cap", RMS), ("window", LAYER), ("ALiBi and biases", LAYER), ("buckets", LAYER)],
)
def test_scores_behind_a_norm(kind, norm, seed):
    rng = np.random.default_rng([seed, 4])
    layer = planted_score_layer(rng, DIM, HEADS, kind)
    shift = 0.3 * rng.standard_normal(DIM) * norm.centred
    found = mh.extract_layer(
        block(layer, norm, rng.uniform(0.5, 1.5, DIM), shift), seed=seed, options=ExtractionOptions(verify=60)
    )
    assert (found.heads, found.certificate.largest_error < 1e-8) == (HEADS, True)
    assert found.layer.window == layer.window
    if kind == "cap":
        assert found.layer.cap == pytest.approx(layer.cap, rel=1e-4)
    if layer.slopes is not None:
        np.testing.assert_allclose(np.sort(found.layer.slopes), np.sort(layer.slopes), atol=1e-7)


def test_what_is_no_such_layer_is_refused(rng, seed):
    """Negative controls: no epsilon, sinks, query-key norms of shifted tokens, an MLP on the norm."""
    options = ExtractionOptions(verify=40, tries=1)
    layer = planted_rotary_layer(rng, DIM, HEADS, key_bias=0.5)
    with pytest.raises(FitError, match="shows no epsilon"):
        mh.extract_layer(block(layer, Normalization(centred=False, epsilon=0.0)), seed=seed, options=options)
    with pytest.raises(NotALayer, match="any epsilon"):
        mh.extract_layer(block(planted_score_layer(rng, DIM, HEADS, "sinks"), RMS), seed=seed, options=options)
    normed = planted_score_layer(rng, DIM, HEADS, "head norms")
    with pytest.raises(RecoveryRefused):
        mh.extract_layer(block(normed, LAYER, 1.0, 0.3 * rng.standard_normal(DIM)), seed=seed, options=options)
    weights = rng.standard_normal((DIM, DIM))
    with pytest.raises(RecoveryRefused):
        mh.extract_layer(block(lambda u: np.tanh(u @ weights), RMS), seed=seed, options=options)
