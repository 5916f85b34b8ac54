"""The method by subspaces, whole: layers of every kind it is made for, counts, accuracy, refusals by name."""

import numpy as np
import pytest

from manyheads.attention import AttentionLayer
from manyheads.recovery import compare_layers, gpt_layer, planted_layer
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.layers.matching import function_error
from manyheads.recovery.oracle.oracle import Oracle, OracleSettings
from manyheads.recovery.queries.effort import ACCURATE, PROBES, SPARING, Effort
from manyheads.recovery.queries.subspaces.method import extract_by_subspaces
from manyheads.recovery.refusals import RecoveryRefused

EXACT, DIM = 1e-15, 9


def extract(layer, rng, effort=SPARING):
    oracle = Oracle.of(layer)
    return extract_by_subspaces(oracle, EXACT, rng, effort), oracle


def error(layer, found, rng):
    x = rng.normal(size=(8, 5, layer.dim))
    return function_error(lambda tokens: evaluate_layer(layer, tokens), found, x)


@pytest.mark.parametrize("causal", [True, False])
def test_gpt_shaped_layers_come_back(rng, causal):
    layer = gpt_layer(rng, 24, 3, causal=causal)
    found, _ = extract(layer, rng)
    assert compare_layers(layer, found.layer).worst < 1e-7
    assert error(layer, found, rng) < 1e-14
    assert [stage.name for stage in found.stages] == ["sums", "pairs", "values", "subspaces", "rows"]


def test_d64_h4_within_the_calls_of_the_specification(rng):
    layer = gpt_layer(rng, 64, 4)
    found, oracle = extract(layer, rng)
    errors = compare_layers(layer, found.layer)
    assert max(errors.theta, errors.projection) < 1e-8
    assert oracle.total.calls < 700
    assert {name for name, counts in oracle.counts.items() if counts.calls} == {"sums", "pairs", "values", "rows"}


def test_probes_bear_single_precision_where_output_spaces_are_nearly_dependent(rng):
    """The condition of the output spaces multiplies the noise of W, and errors of W hide the rank of Theta."""
    layer = gpt_layer(rng, 32, 2)
    left, singular, right = np.linalg.svd(layer.projection)
    near = np.linalg.qr((right[0, :16] + 3e-3 * right[1, :16]).T)[0].T  # output spaces of condition about a thousand
    projection = np.stack([layer.projection[0], (left[1, :, :16] * singular[1, :16]) @ near])
    layer = AttentionLayer(layer.theta, projection, layer.key_bias, layer.bias, causal=True)
    worst = {}
    for effort in (SPARING, PROBES):
        oracle = Oracle(lambda x: evaluate_layer(layer, x).astype(np.float32), 32)
        try:
            found = extract_by_subspaces(oracle, 1e-7, np.random.default_rng(3), effort)
            worst[effort] = error(layer, found, rng)
        except RecoveryRefused:
            worst[effort] = 1.0
    assert worst[PROBES] < 1e-4 < worst[SPARING]
    assert worst[SPARING] > 10 * worst[PROBES]
    assert np.linalg.matrix_rank(found.layer.theta, tol=1e-6).tolist() == [16, 16]
    assert oracle.total.calls < 2000


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rank", [None, 5])
def test_one_head_costs_little_more_than_its_projection(rng, causal, rank):
    layer = gpt_layer(rng, 24, 1, rank=rank, causal=causal)
    found, oracle = extract(layer, rng)
    assert compare_layers(layer, found.layer).worst < 1e-8
    assert "values" not in oracle.counts
    assert oracle.total.calls < 25 + 100


def test_accurate_settings_spend_more_calls(rng):
    layer = gpt_layer(rng, 24, 3)
    calls = [extract(layer, rng, effort)[1].total.calls for effort in (SPARING, ACCURATE)]
    assert calls[0] < calls[1]


def test_full_rank_heads_without_being_told(rng):
    layer = planted_layer(rng, 10, 2, causal=True, key_bias=True, bias=True)
    found, _ = extract(layer, rng)
    assert compare_layers(layer, found.layer).worst < 1e-7


def test_shared_keys_and_values(rng):
    """Multi-query attention: all heads have the same W_K and W_V."""
    queries, outputs = rng.normal(size=(3, 24, 8)) / 24**0.5, rng.normal(size=(3, 8, 24)) / 24**0.5
    key, value = rng.normal(size=(2, 24, 8)) / 24**0.5
    layer = AttentionLayer(queries @ key.T / 8**0.5, value @ outputs, None, None, causal=True)
    found, _ = extract(layer, rng)
    assert compare_layers(layer, found.layer).worst < 1e-7


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_layer_that_ignores_its_tokens_is_one_uniform_head(rng, share):
    layer = gpt_layer(rng, 12, 2)
    blind = AttentionLayer(0 * layer.theta, share * layer.projection, None, layer.bias, causal=True)
    found, oracle = extract(blind, rng)
    assert found.layer.heads == 1
    np.testing.assert_allclose(found.layer.projection[0], share * layer.projection.sum(0), rtol=0, atol=1e-14)
    assert oracle.total.calls < 300


def test_projections_that_cancel_are_refused(rng):
    """With W_S = 0 the heads' shares of any probe are linearly dependent."""
    layer = planted_layer(rng, 12, 3, causal=True)
    projection = layer.projection.copy()
    projection[2] = -projection[0] - projection[1]
    cancelling = AttentionLayer(layer.theta, projection, None, None, causal=True)
    with pytest.raises(RecoveryRefused):
        extract(cancelling, rng)


@pytest.mark.parametrize(("kind", "heads"), [("dead", 2), ("uniform", 3), ("equal", 2), ("weak", 3)])
def test_special_heads(rng, kind, heads):
    """A dead head is none, a uniform one is found, equal attention is one head, a weak projection is seen."""
    layer = gpt_layer(rng, 24, 3)
    theta, projection, beta = layer.theta.copy(), layer.projection.copy(), layer.key_bias.copy()
    if kind == "dead":
        projection[0] = 0
    if kind == "uniform":
        theta[0], beta[0] = 0, 0
    if kind == "equal":
        theta[1], beta[1] = theta[0], beta[0]
    if kind == "weak":
        projection[0] *= 1e-3
    special = AttentionLayer(theta, projection, beta, layer.bias, causal=True)
    found, _ = extract(special, rng)
    assert found.layer.heads == heads
    assert error(special, found, rng) < 1e-14
    if kind == "uniform":
        assert np.linalg.norm(found.layer.theta, axis=(1, 2)).min() == 0


def test_residual_connection_is_taken_off_by_the_oracle(rng):
    layer = gpt_layer(rng, 16, 2)
    found = extract_by_subspaces(Oracle.of(layer, residual=True), EXACT, rng)
    assert compare_layers(layer, found.layer).worst < 1e-7


def test_float32_answers_give_fewer_digits_not_a_wrong_layer(rng):
    layer = gpt_layer(rng, 24, 2, rank=6)
    oracle = Oracle(lambda x: evaluate_layer(layer, x).astype(np.float32), 24, OracleSettings())
    found = extract_by_subspaces(oracle, 6e-8, rng, ACCURATE)
    assert found.layer.heads == 2
    assert error(layer, found, rng) < 1e-4


@pytest.mark.parametrize("kind", ["perceptron", "capped", "collinear"])
def test_what_is_no_such_layer_is_refused_by_name(rng, kind):
    layer = gpt_layer(rng, DIM, 3, gain=2.0)
    if kind == "collinear":
        projection = layer.projection.copy()
        projection[1] = -0.6 * projection[0]
        layer = AttentionLayer(layer.theta, projection, layer.key_bias, layer.bias, causal=True)
    gate, mixing = rng.normal(size=(2, DIM, DIM)) / DIM**0.5

    def function(x):
        if kind == "perceptron":  # on running means, which at one token are the token
            mean = np.cumsum(x, 1) / np.arange(1, x.shape[1] + 1)[:, None]
            y = x + np.tanh(mean @ gate) * ((mean - x) @ mixing)
        elif kind == "capped":  # logits through a soft cap: any normalized weights pass S1 to S3
            logits = np.einsum("nkd,mde,nle->nmkl", x, layer.theta, x)
            mass = np.exp(2 * np.tanh(logits / 2)) * np.tril(np.ones(logits.shape[-2:]))
            y = np.einsum("nmkl,nld,mde->nke", mass / mass.sum(-1, keepdims=True), x, layer.projection)
        else:
            y = evaluate_layer(layer, x)
        return y

    with pytest.raises(RecoveryRefused) as refused:
        extract_by_subspaces(Oracle(function, DIM), EXACT, rng, Effort(tries=2))
    assert np.isfinite(refused.value.threshold)
