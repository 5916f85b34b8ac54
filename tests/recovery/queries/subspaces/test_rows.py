"""All rows: weights of planted layers, logits by multiplicities, sketches of every rank, causal or not."""

import numpy as np
import pytest

from manyheads.attention import AttentionLayer
from manyheads.recovery import gpt_layer, planted_layer
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import SPARING
from manyheads.recovery.queries.logits.row_reader import RowReader, Rows
from manyheads.recovery.queries.logits.rows import read_rows
from manyheads.recovery.queries.values.output_spaces import Projections
from manyheads.recovery.refusals import FitError


def known(layer, ranks=None):
    """The projections as S3 hands them over, from the weights: of these ranks, or of full rank."""
    heads, dim = layer.heads, layer.dim
    if ranks is None:
        return Projections(layer.projection, None, np.full(heads, dim), 1.0, 0.0)
    ranks = np.broadcast_to(ranks, heads)
    bases = [np.linalg.svd(part)[2][:rank] for part, rank in zip(layer.projection, ranks, strict=True)]
    splits = np.split(np.linalg.pinv(np.concatenate(bases)), np.cumsum(ranks)[:-1], axis=1)
    condition = float(np.linalg.cond(np.concatenate(bases)))
    return Projections(layer.projection, tuple(splits), ranks, condition, 0.0)


def error(found, true):
    return np.linalg.norm(found - true) / np.linalg.norm(true)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_attention_matrices_and_key_biases_come_back(rng, causal, direct):
    layer = gpt_layer(rng, 18, 3, causal=causal)
    heads = known(layer, None if direct else 6)
    found = read_rows(Oracle.of(layer), layer.bias, heads, rng, SPARING)
    assert error(found.theta, layer.theta) < 1e-7
    assert error(found.key_bias, layer.key_bias) < 1e-7
    assert found.ranks.tolist() == [6, 6, 6]


def test_heads_of_uneven_ranks_are_read_in_groups(rng):
    """Every head comes back, with fewer calls than at the smallest rank for all."""
    small, large = gpt_layer(rng, 24, 2, rank=3), gpt_layer(rng, 24, 1, rank=14)
    parts = [np.concatenate([getattr(one, name) for one in (small, large)]) for name in ("theta", "projection")]
    layer = AttentionLayer(*parts, np.concatenate([small.key_bias, large.key_bias]), small.bias, causal=True)
    heads = known(layer, [3, 3, 14])
    oracle = Oracle.of(layer)
    found = read_rows(oracle, layer.bias, heads, rng, SPARING)
    assert error(found.theta, layer.theta) < 1e-7
    assert error(found.key_bias, layer.key_bias) < 1e-7
    assert found.ranks.tolist() == [3, 3, 14]
    together = Oracle.of(layer)
    reader = RowReader.of(together, layer.bias, heads, SPARING)
    assert oracle.total.calls < -(-20 // reader.sketched) * -(-24 // reader.fresh)


def test_full_rank_attention_is_read_from_a_whole_basis(rng):
    layer = planted_layer(rng, 10, 2, causal=True, key_bias=True, bias=True)
    found = read_rows(Oracle.of(layer), layer.bias, known(layer), rng, SPARING)
    assert error(found.theta, layer.theta) < 1e-8
    assert error(found.key_bias, layer.key_bias) < 1e-8


def test_a_sketch_that_is_too_narrow_is_widened(rng):
    """Projections of rank 3 beside attention of rank 9: the first sketch of 7 has no gap."""
    layer = gpt_layer(rng, 24, 2, rank=9)
    projection = gpt_layer(rng, 24, 2, rank=3).projection
    mixed = AttentionLayer(layer.theta, projection, layer.key_bias, layer.bias, causal=True)
    found = read_rows(Oracle.of(mixed), mixed.bias, known(mixed, 3), rng, SPARING)
    assert found.ranks.tolist() == [9, 9]
    assert error(found.theta, layer.theta) < 1e-7


def test_a_head_without_logits_has_rank_zero(rng):
    layer = gpt_layer(rng, 16, 2)
    theta, beta = layer.theta.copy(), layer.key_bias.copy()
    theta[0], beta[0] = 0, 0
    uniform = AttentionLayer(theta, layer.projection, beta, layer.bias, causal=True)
    found = read_rows(Oracle.of(uniform), layer.bias, known(uniform, 8), rng, SPARING)
    assert found.ranks.tolist() == [0, 8]
    assert np.abs(found.theta[0]).max() == 0
    assert np.abs(found.key_bias[0]).max() < 1e-10


@pytest.mark.parametrize("direct", [True, False])
def test_weights_are_the_softmax_of_the_layer(rng, direct):
    """Against the softmax itself, with repeated tokens sharing their weight."""
    layer = gpt_layer(rng, 12, 2, bias=False)
    reader = RowReader.of(Oracle.of(layer), np.zeros(12), known(layer, None if direct else 6), SPARING)
    tokens = np.concatenate([np.zeros((1, 12)), rng.normal(size=(3, 12))])
    tokens = np.concatenate([tokens, tokens[1:2], tokens[:1]])  # 0, a, b, c, a, 0
    rows = [Rows(2, 2, np.ones(2), 1), Rows(5, 3, np.array([2.0, 1.0, 1.0]), 2)]
    short, long = reader.weights(tokens[None], rows)
    logits = np.einsum("td,mde,se->mts", tokens, layer.theta, tokens) + (tokens @ layer.key_bias.T).T[:, None]
    mass = np.exp(logits)
    first = mass[:, 2, 1:3] / mass[:, 2, :3].sum(-1, keepdims=True)
    np.testing.assert_allclose(short[0].T, first, rtol=0, atol=1e-11)
    last = mass[:, 5] / mass[:, 5].sum(-1, keepdims=True)
    together = np.stack([last[:, 1] + last[:, 4], last[:, 2], last[:, 3]], axis=-1)
    np.testing.assert_allclose(long[0].T, together, rtol=0, atol=1e-11)
    exact = np.einsum("d,mde,se->ms", tokens[5], layer.theta, tokens[1:4]) + layer.key_bias @ tokens[1:4].T
    np.testing.assert_allclose(reader.logits(long, rows[1])[0].T, exact, rtol=0, atol=1e-9)


def test_weights_below_zero_are_refused(rng):
    """Projections of another layer explain no answer."""
    layer, other = gpt_layer(rng, 12, 2), gpt_layer(rng, 12, 2)
    with pytest.raises(FitError):
        read_rows(Oracle.of(layer), layer.bias, known(other, 6), rng, SPARING)


def test_tokens_are_shortened_where_weights_would_hide(rng):
    """A direction of its own, as trained layers have: few logits are far beyond the others."""
    layer = gpt_layer(rng, 18, 2, rank=6)
    left, singular, right = np.linalg.svd(layer.theta[0])
    singular[0] *= 40
    theta = layer.theta.copy()
    theta[0] = left @ (singular[:, None] * right)
    spiked = AttentionLayer(theta, layer.projection, layer.key_bias, layer.bias, causal=True)
    found = read_rows(Oracle.of(spiked), spiked.bias, known(spiked, 6), rng, SPARING)
    assert error(found.theta, theta) < 1e-7
    assert found.smallest > 1e-9
