"""Bounded extraction: exact and rounded oracles, odd heads, exchanged heads caught, what is no layer refused."""

import numpy as np
import pytest

from manyheads.attention import AttentionLayer
from manyheads.recovery import compare_layers, evaluate_layer, gpt_layer, planted_layer
from manyheads.recovery.layers.matching import function_error
from manyheads.recovery.oracle.oracle import Oracle, OracleSettings
from manyheads.recovery.queries.bounded import method as bounded
from manyheads.recovery.queries.bounded.method import extract_bounded
from manyheads.recovery.queries.effort import BOUNDED, Effort
from manyheads.recovery.queries.nets.sigmoid_network import PairNets
from manyheads.recovery.queries.nets.warm_start import Match
from manyheads.recovery.queries.refinement import refine_layer
from manyheads.recovery.refusals import RecoveryRefused


def in_float32(layer):
    """The layer with answers rounded to float32: half a unit in the last place of every number."""
    return lambda x: evaluate_layer(layer, x).astype(np.float32)


def noisy(layer, level, rng):
    """The layer with noise relative to the root mean square of its answers."""

    def answer(x):
        y = evaluate_layer(layer, x)
        return y + level * np.sqrt(np.mean(y**2)) * rng.standard_normal(y.shape)

    return answer


def changed(layer, **parts):
    names = {"theta", "projection", "key_bias", "bias"} - set(parts)
    return AttentionLayer(**parts, **{name: np.array(getattr(layer, name)) for name in names}, causal=layer.causal)


def error_of(layer, found, rng):
    x = rng.standard_normal((40, 6, layer.dim))
    return function_error(lambda x: evaluate_layer(layer, x), found, x)


@pytest.mark.parametrize("causal", [True, False])
def test_full_rank_heads_come_back_to_rounding_from_short_tokens(rng, causal):
    layer = planted_layer(rng, 16, 3, key_bias=True, bias=True, causal=causal)
    oracle = Oracle.of(layer)
    found = extract_bounded(oracle, 1e-16, rng)
    assert compare_layers(layer, found.layer).worst < 1e-9
    assert found.layer.causal == causal
    assert [stage.name for stage in found.stages] == ["sums", "pairs", "net", "directions"]
    assert sum(counts.calls for counts in oracle.counts.values()) < (1 if causal else 2) * 6 * 16**2


def test_rounding_to_float32_costs_the_digits_of_float32(rng):
    layer = gpt_layer(rng, 24, 4)
    found = extract_bounded(Oracle(in_float32(layer), 24), 5e-8, rng)
    assert compare_layers(layer, found.layer).worst < 2e-3
    assert error_of(layer, found, rng) < 1e-8


def test_uniform_heads_are_found_and_equal_and_dead_ones_merge(rng):
    layer = gpt_layer(rng, 16, 3)
    theta, beta, projection = np.array(layer.theta), np.array(layer.key_bias), np.array(layer.projection)
    theta[0], beta[0] = 0, 0
    uniform = changed(layer, theta=theta, key_bias=beta)
    found = extract_bounded(Oracle.of(uniform), 1e-16, rng)
    assert compare_layers(uniform, found.layer).worst < 1e-8
    assert (np.abs(found.layer.theta).max(axis=(1, 2)) == 0).sum() == 1
    theta[0], beta[0] = theta[1], beta[1]
    equal = changed(layer, theta=theta, key_bias=beta)
    found = extract_bounded(Oracle.of(equal), 1e-16, rng)
    assert found.layer.heads == 2
    assert error_of(equal, found, rng) < 1e-18
    projection[2] = 0
    dead = changed(layer, projection=projection)
    found = extract_bounded(Oracle.of(dead), 1e-16, rng)
    assert found.layer.heads == 2
    assert error_of(dead, found, rng) < 1e-18


def test_a_layer_of_uniform_heads_alone_is_one_head(rng):
    projection = rng.standard_normal((2, 8, 8))
    layer = AttentionLayer(np.zeros((2, 8, 8)), projection, causal=True)
    found = extract_bounded(Oracle.of(layer), 1e-16, rng).layer
    assert found.heads == 1
    np.testing.assert_allclose(found.projection[0], projection.sum(0), rtol=0, atol=1e-12)


def test_a_uniform_head_that_cancels_the_others_leaves_no_scale_to_one_token(rng):
    """W_S = 0: what answers to one token are left with is no measure of the noise of the others."""
    layer = planted_layer(rng, 10, 3, causal=True)
    theta, projection = np.array(layer.theta), np.array(layer.projection)
    theta[2], projection[2] = 0, -projection[:2].sum(0)
    layer = AttentionLayer(theta, projection, causal=True)
    found = extract_bounded(Oracle(in_float32(layer), 10), 5e-8, rng)
    assert found.layer.heads == 3
    assert error_of(layer, found, rng) < 1e-8


@pytest.mark.parametrize("level", [1e-16, 5e-8])
def test_collinear_projections_are_refused(rng, level):
    layer = gpt_layer(rng, 16, 3)
    collinear = changed(layer, projection=np.stack([layer.projection[0] * a for a in (1.0, 0.5, -2.0)]))
    oracle = Oracle(in_float32(collinear), 16) if level > 1e-12 else Oracle.of(collinear)
    with pytest.raises(RecoveryRefused):
        extract_bounded(oracle, level, rng, Effort(tries=3))


@pytest.mark.slow
def test_the_mirror_sees_heads_that_were_exchanged(rng, monkeypatch):
    """A refit whose heads 0 and 1 come back exchanged, behind the back of the matching: no halving can mend it."""
    layer = gpt_layer(rng, 12, 3)
    refit = bounded.Continuation.refit

    def exchanging(self, answers):
        nets = refit(self, answers)
        order = np.r_[1, 0, np.arange(2, nets.slopes.shape[1])]
        nets.slopes[0], nets.values[0] = nets.slopes[0][order], nets.values[0][order]
        return nets

    def unmatched(found, *reference):
        return Match(np.arange(len(found.slopes)), 0.0, 0.0)

    monkeypatch.setattr(bounded.Continuation, "refit", exchanging)
    monkeypatch.setattr("manyheads.recovery.queries.nets.warm_start.match_net", unmatched)
    with pytest.raises(RecoveryRefused, match="cannot be followed"):
        extract_bounded(Oracle.of(layer), 1e-16, rng)


def test_the_mirror_check_alone_tells_right_from_exchanged(rng):
    layer = gpt_layer(rng, 12, 3)
    oracle = Oracle.of(layer)
    sums = bounded.read_sums(oracle, 12)
    pairs = bounded.Pairs(oracle, sums, noise=1e-15)
    base = bounded.read_base(pairs, bounded.separate_heads(pairs, 12, rng, oversampling=2.5, tries=8), rng, BOUNDED)
    check = bounded._mirror(base, np.arange(3))
    delta = 0.2 * rng.standard_normal((5, 12))
    right = bounded.Continuation(base.design, base.net).refit(base.ask(delta))
    order = np.r_[1, 0, 2]
    wrong = PairNets(right.slopes[:, order], right.values[:, order], right.residual)
    assert check(delta, right).max() < 1
    assert check(delta, wrong).min() > 1e3


def test_noise_is_refined_to_the_parametric_rate(rng):
    """The error of the refined layer is within four of sigma^2 P / (N k d), and that of the extraction is not."""
    layer = gpt_layer(rng, 12, 2)
    found = extract_bounded(Oracle(noisy(layer, 1e-3, rng), 12), 1e-3, rng)
    figures = found.stages[-1].figures
    assert found.stages[-1].name == "refinement"
    assert figures["kept"] == 1
    assert 0.5e-6 < figures["noise"] < 2e-6
    error = error_of(layer, found, rng)
    assert error < 8 * figures["predicted"]
    assert figures["after"] < figures["before"]


def test_refinement_keeps_what_it_cannot_better(rng):
    """From the true layer, exact answers: least squares moves by rounding, and a worse layer is never kept."""
    layer = gpt_layer(rng, 6, 2)
    refined = refine_layer(Oracle.of(layer), layer, rng, excess=3.0)
    assert refined.after < 1e-20
    assert error_of(layer, lambda x: evaluate_layer(refined.layer, x), rng) < 1e-24


def test_what_is_no_layer_is_refused(rng):
    mix = rng.standard_normal((8, 8)) / 2

    def mlp(x):
        return np.tanh(np.cumsum(x, 1) / np.arange(1, x.shape[1] + 1)[:, None] @ mix)

    with pytest.raises(RecoveryRefused):
        extract_bounded(Oracle(mlp, 8, OracleSettings()), 1e-16, rng, Effort(tries=2))
