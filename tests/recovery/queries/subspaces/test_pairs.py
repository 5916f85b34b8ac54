"""Pairs: the centred answers are the net that is claimed, and the heads at one probe come back, signs included."""

import numpy as np
import pytest
from scipy.special import expit

from manyheads.attention import AttentionLayer
from manyheads.recovery import gpt_layer, planted_layer
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.gates.pairs import Pairs, find_scale, separate_heads
from manyheads.recovery.queries.values.output_spaces import Sums, read_sums
from manyheads.recovery.refusals import FitError, RecoveryRefused


def pairs_of(layer, **settings):
    oracle = Oracle.of(layer)
    return Pairs(oracle, read_sums(oracle, layer.dim), causal=layer.causal, **settings)


def logits_and_values(layer, queries, probe):
    """Of all heads, from the weights: q Theta v + beta v, (m, n), and v W, (m, d)."""
    logits = np.einsum("nd,mde,e->mn", queries, layer.theta, probe) + (layer.key_bias @ probe)[:, None]
    return logits, np.einsum("d,mde->me", probe, layer.projection)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("copies", [(1, 4), (2, 3)])
def test_answers_are_the_centred_net_of_the_weights(rng, causal, copies):
    layer = gpt_layer(rng, 12, 3, causal=causal)
    pairs = pairs_of(layer, before=copies[0], after=copies[1])
    queries, probes = rng.normal(size=(4, 12)), rng.normal(size=(2, 12))
    answers = pairs.respond(queries, probes)
    assert answers.shape == (2, 4, len(pairs.copies), 12)
    for found, probe in zip(answers, probes, strict=True):
        logits, values = logits_and_values(layer, queries, probe)
        units = expit(logits[..., None] - pairs.shifts) - expit(-pairs.shifts)  # (m, n, K)
        np.testing.assert_allclose(found, np.einsum("mnk,md->nkd", units, values), rtol=0, atol=1e-13)
        net = pairs.design(4).units(logits) @ values  # the design says the same
        np.testing.assert_allclose(found.reshape(-1, 12), net, rtol=0, atol=1e-13)


@pytest.mark.parametrize("middle", [True, False])
def test_both_rows_of_full_attention_are_nets_of_the_same_values(rng, middle):
    """Rows at q and at q + v in turn, at the logits of either."""
    layer = gpt_layer(rng, 12, 3, causal=False)
    pairs = pairs_of(layer, both=True, middle=middle)
    queries, probe = rng.normal(size=(4, 12)), rng.normal(size=12)
    answers = pairs.respond(queries, probe)[0]
    rows = np.stack([queries, queries + probe], 1).reshape(8, 12)
    logits, values = logits_and_values(layer, rows, probe)
    units = expit(logits[..., None] - pairs.shifts) - expit(-pairs.shifts)
    assert answers.shape == (8, 3 if middle else 2, 12)
    np.testing.assert_allclose(answers, np.einsum("mnk,md->nkd", units, values), rtol=0, atol=1e-13)
    assert pairs.oracle.counts["other"].calls == 13 + 4 * len(pairs.copies)


@pytest.mark.parametrize("factor", [0.05, 1.0, 30.0])
def test_scale_follows_the_size_of_the_logits(rng, factor):
    """Scaling Theta divides the scale by as much, up to the octave or half octave that the search stops in."""
    layer = planted_layer(rng, 16, 2, causal=True)
    probe = rng.normal(size=16)
    directions = np.random.default_rng(5)
    scaled = AttentionLayer(factor * layer.theta, layer.projection, None, None, causal=True)
    scale = find_scale(pairs_of(scaled), probe, directions) * factor
    logits = np.linalg.norm(layer.theta @ probe, axis=1).mean()  # deviation of the logit at the scale one
    assert 0.1 < scale * logits < 12


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [1, 2, 5])
def test_heads_at_one_probe_come_back_with_their_signs(rng, heads, causal):
    layer = gpt_layer(rng, 20, heads, causal=causal)
    found = separate_heads(pairs_of(layer), 20, rng, oversampling=1.0, tries=8)
    logits, values = logits_and_values(layer, found.queries, found.probe)
    assert len(found.net.values) == heads
    order = np.argmin(np.linalg.norm(found.net.values[None] - values[:, None], axis=-1), axis=1)
    np.testing.assert_allclose(found.net.values[order], values, rtol=0, atol=1e-8 * np.abs(values).max())
    units = found.design.units(found.net.slopes[order]), found.design.units(logits)
    np.testing.assert_allclose(*units, rtol=0, atol=1e-8)
    assert found.lacking < 1e-8 * np.linalg.norm(values)


def test_a_head_that_ignores_the_tokens_is_what_the_others_lack(rng):
    layer = gpt_layer(rng, 16, 3)
    theta, beta = layer.theta.copy(), layer.key_bias.copy()
    theta[1], beta[1] = 0, 0
    found = separate_heads(
        pairs_of(AttentionLayer(theta, layer.projection, beta, layer.bias, causal=True)),
        16,
        rng,
        oversampling=1.0,
        tries=8,
    )
    assert len(found.net.values) == 2
    value = np.linalg.norm(found.probe @ layer.projection[1])
    assert abs(found.lacking / value - 1) < 1e-7


def test_equal_attention_is_one_head(rng):
    layer = gpt_layer(rng, 16, 3)
    theta, beta = layer.theta.copy(), layer.key_bias.copy()
    theta[2], beta[2] = theta[0], beta[0]
    pairs = pairs_of(AttentionLayer(theta, layer.projection, beta, layer.bias, causal=True))
    found = separate_heads(pairs, 16, rng, oversampling=1.0, tries=8)
    merged = found.probe @ (layer.projection[0] + layer.projection[2])
    assert len(found.net.values) == 2
    assert np.linalg.norm(found.net.values - merged, axis=1).min() < 1e-8 * np.linalg.norm(merged)


def test_collinear_projections_are_refused(rng):
    layer = gpt_layer(rng, 16, 3)
    projection = layer.projection.copy()
    projection[1] = -0.6 * projection[0]
    pairs = pairs_of(AttentionLayer(layer.theta, projection, layer.key_bias, layer.bias, causal=True))
    with pytest.raises(FitError) as refused:
        separate_heads(pairs, 16, rng, oversampling=1.0, tries=4)
    assert refused.value.measured != refused.value.threshold


def test_another_function_of_two_tokens_is_refused(rng):
    """Affine at one token, as a layer is; then a running mean passes a gate of its own."""
    gate, mixing = rng.normal(size=(2, 8, 8)) / 3

    def function(x):
        mean = np.cumsum(x, 1) / np.arange(1, x.shape[1] + 1)[:, None]
        return x + np.tanh(mean @ gate) * ((mean - x) @ mixing)

    pairs = Pairs(Oracle(function, 8), Sums(np.eye(8), np.zeros(8)))
    with pytest.raises(RecoveryRefused):
        separate_heads(pairs, 8, rng, oversampling=1.0, tries=3)
