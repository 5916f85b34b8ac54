"""A whole transformer block: its attention against the planted one, its MLP as an oracle, and what is refused."""

import dataclasses

import numpy as np
import pytest
from tests.recovery.planted_blocks import CONTROLS, PlantedBlock
from tests.recovery.score_layers import planted_score_layer

import manyheads as mh
from manyheads.errors import UsageError
from manyheads.recovery import ExtractionOptions, ServerLimits, compare_layers, evaluate_layer
from manyheads.recovery.oracle.normalization import Normalization
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.block.method import attention_oracle, one_token_inverse
from manyheads.recovery.queries.block.token_wise import open_token_wise
from manyheads.recovery.queries.block.value_sum import read_value_sum
from manyheads.recovery.refusals import FitError, LimitError, NotALayer

DIM = 16
FEW = ExtractionOptions(verify=40)

KINDS = {
    "sequential": {},
    "parallel": {"parallel": True},
    "all tokens, RMSNorm": {"causal": False, "centred": False},
    "ReLU": {"activation": lambda x: np.maximum(x, 0.0)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_sequences_leave_the_attention(kind, rng):
    """Every answer of the oracle is the planted attention's, whatever the MLP is."""
    block = PlantedBlock(rng, **KINDS[kind])
    oracle = Oracle(block, DIM)
    token_wise = open_token_wise(oracle, rng)
    assert token_wise.parallel == block.parallel
    assert token_wise.causal == block.layer.causal
    assert token_wise.centred == block.norm.centred
    figures = {}
    projection, norm = read_value_sum(token_wise, False, rng, figures)
    truth = block.truth.projection.sum(0)
    assert np.linalg.norm(projection - truth) < 1e-9 * np.linalg.norm(truth)
    assert norm.epsilon == pytest.approx(block.norm.epsilon, rel=1e-5)
    x = rng.standard_normal((4, 6, DIM))
    expected = evaluate_layer(block.truth, block.norm(token_wise.scale * x))
    answers = attention_oracle(token_wise, projection, norm)
    np.testing.assert_allclose(answers(x, "all"), expected, atol=1e-8)
    np.testing.assert_allclose(answers(x, (1, 4)), expected[:, [1, 4]], atol=1e-8)
    assert oracle.total.calls == block.calls


@pytest.mark.parametrize("kind", [{}, {"parallel": True, "causal": False}, {"rotary": True, "centred": False}])
def test_a_block_is_extracted_and_certified_as_a_whole(kind, rng, seed):
    block = PlantedBlock(rng, **kind)
    found = mh.extract_layer(block, seed=seed, options=FEW)
    errors = compare_layers(block.truth, found.layer)
    assert (found.heads, found.certificate.accepted) == (2, True)
    assert errors.theta < 1e-4
    assert errors.projection < 1e-5
    assert found.total.calls == block.calls  # one-token sequences are calls
    assert found.counts["one-token sequences"].calls > 0
    assert found.layer.bias is None
    x = rng.standard_normal((3, 7, DIM))
    np.testing.assert_allclose(found.extracted(x), block(x), atol=1e-3)
    if block.parallel:  # the MLP alone, but for the constant that belongs to either
        part = found.extracted.whole.token_wise_part(x) - x - block.feed_forward(x)
        np.testing.assert_allclose(part, np.broadcast_to(part[:1, :1], x.shape), atol=1e-3)
    else:
        bias = 0 if block.layer.bias is None else np.asarray(block.layer.bias)
        bias = bias + block.shift @ np.asarray(block.layer.projection).sum(0)
        part = found.extracted.whole.token_wise_part(x) - (x + bias) - block.feed_forward(x + bias)
        np.testing.assert_allclose(part, 0, atol=1e-3)
    assert "other tokens" in found.certificate.distribution


def test_the_certificate_is_relative_to_what_other_tokens_change(rng, seed):
    """A block that adds little to its stream is not certified by the stream."""
    block = PlantedBlock(rng)
    block.layer = dataclasses.replace(block.layer, projection=1e-3 * np.asarray(block.layer.projection))
    found = mh.extract_layer(block, seed=seed, options=FEW)
    x = rng.standard_normal((200, 8, DIM))
    alone = block(x.reshape(-1, 1, DIM)).reshape(x.shape)
    assert found.certificate.variance < 10 * np.mean((block(x) - alone) ** 2) < 1e-3 * np.var(block(x))
    assert np.mean((found.extracted(x) - block(x)) ** 2) < 1e-6 * np.mean((block(x) - alone) ** 2)


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("centred", [False, True])
def test_the_one_token_map_is_inverted_where_its_projections_are_larger_than_the_tokens(size, centred, rng):
    norm, projection = Normalization(centred, 1e-5), size * rng.standard_normal((DIM, DIM)) / DIM**0.5
    y = rng.standard_normal((300, DIM)) * rng.choice([0.3, 1.0, 3.0], (300, 1))
    v = one_token_inverse(projection, norm, y)
    assert np.abs(v + norm(v) @ projection - y).max() < 1e-8 * (1 + size)


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
@pytest.mark.parametrize("rotary", [False, True])
def test_what_is_no_block_is_refused(control, rotary, seed):
    block = PlantedBlock(np.random.default_rng(seed))
    options = ExtractionOptions(mlp=True, rotary=rotary, verify=40)
    with pytest.raises((NotALayer, FitError)):
        mh.extract_layer(control(block), DIM, seed=seed, options=options)


def test_other_scores_are_extracted_beside_an_mlp_and_refused_in_front_of_it(rng, seed):
    """Beside an MLP nothing is inverted, so that tokens may be short, as the method for other scores wants them."""
    block = PlantedBlock(rng, rotary=True, parallel=True)
    block.layer, block.scores = planted_score_layer(rng, DIM, 2, "cap"), True
    found = mh.extract_layer(block, seed=seed, options=FEW)
    assert (found.heads, found.method) == (2, "scores-sphere")
    assert "cap" in found.extracted.acts_on
    x = rng.standard_normal((3, 7, DIM))
    np.testing.assert_allclose(found.extracted(x), block(x), atol=1e-3)
    block.parallel = False
    with pytest.raises(NotALayer, match="Extract the attention without it"):
        mh.extract_layer(block, seed=seed, options=FEW)


def test_refusals_say_what_to_do(rng):
    block = PlantedBlock(rng)

    def noisy(x):
        return block(x) + 1e-9 * rng.standard_normal(x.shape)

    turned = PlantedBlock(rng, rotary=True, centred=False)
    asks = {
        "in float32": (lambda x: block(x).astype(np.float32), {}, NotALayer),
        "in float64 are exact to": (noisy, {}, NotALayer),
        "say rotary=True": (lambda x: turned(x), {}, NotALayer),
        "rounded answers or a vocabulary": (block, {"limits": ServerLimits(decimals=9)}, LimitError),
        "extract its attention alone": (block, {"limits": ServerLimits(max_norm=20.0)}, LimitError),
        "leave residual out": (block, {"residual": True}, UsageError),
    }
    for said, (function, given, error) in asks.items():
        with pytest.raises(error, match=said):
            mh.extract_layer(function, DIM, options=ExtractionOptions(mlp=True, **given))
    with pytest.raises(UsageError, match="choose from auto, sphere"):
        mh.extract_layer(block, method="subspaces")
    with pytest.raises(UsageError, match="ExtractionOptions says"):
        mh.extract_layer(block, through="block-with-mlp")
