"""Tokens without values: planted groups of heads, and layers whose attention such tokens do not show."""

import numpy as np
import pytest
from tests.recovery.queries.subspaces.test_rows import error, known

from manyheads.attention import AttentionLayer
from manyheads.recovery import ServerLimits, gpt_layer
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import SPARING
from manyheads.recovery.queries.logits.row_reader import UnseenPlan, plan_groups
from manyheads.recovery.queries.logits.rows import read_rows

SETTINGS = SPARING


def layer_of(rng, ranks, dim, causal):
    """Return heads of these ranks."""
    parts = [gpt_layer(rng, dim, 1, rank=rank) for rank in ranks]
    joined = [np.concatenate([getattr(one, name) for one in parts]) for name in ("theta", "projection", "key_bias")]
    return AttentionLayer(*joined, parts[0].bias, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [[2, 17], [3, 3, 14], [5, 8, 9], [2, 3, 4, 5, 9]])
def test_groups_come_back_with_the_sequences_that_were_planned(rng, causal, ranks):
    layer = layer_of(rng, ranks, 24, causal)
    heads, oracle = known(layer, ranks), Oracle.of(layer)
    groups = plan_groups(oracle, heads, 24, SETTINGS)
    assert any(group.plan for group in groups)
    found = read_rows(oracle, layer.bias, heads, rng, SETTINGS)
    assert max(error(*pair) for pair in zip(found.theta, layer.theta, strict=True)) < 1e-8
    assert error(found.key_bias, layer.key_bias) < 1e-8
    assert found.ranks.tolist() == ranks
    if all(group.plan for group in groups):
        planned = sum(group.plan.sequences for group in groups)
        assert planned < oracle.total.calls <= planned + 12 * len(groups)  # pilots


@pytest.mark.parametrize("causal", [True, False])
def test_queries_that_are_read_as_values_are(rng, causal):
    """Queries without values have no logits then: the sequences without such tokens are asked instead."""
    layer = layer_of(rng, [6, 6], 24, causal)
    theta = np.stack([w @ rng.standard_normal((24, 24)) / 24 for w in np.asarray(layer.projection)])
    tied = AttentionLayer(theta, layer.projection, layer.key_bias, layer.bias, causal=causal)
    found = read_rows(Oracle.of(tied), tied.bias, known(tied, 6), rng, SETTINGS)
    assert error(found.theta, theta) < 1e-8
    assert found.ranks.tolist() == [6, 6]


@pytest.mark.parametrize("rank", [0, 2, 11, 20])
def test_attention_of_another_rank_than_the_values(rng, rank):
    """Below it, above it, and so far above that tokens without values are too few."""
    layer = layer_of(rng, [5, 5], 20, True)
    theta = np.stack([rng.standard_normal((20, rank)) @ rng.standard_normal((rank, 20)) / 20 for _ in range(2)])
    other = AttentionLayer(theta, layer.projection, layer.key_bias, layer.bias, causal=True)
    found = read_rows(Oracle.of(other), other.bias, known(other, 5), rng, SETTINGS)
    assert np.linalg.norm(found.theta - theta) < 1e-8 * max(1, np.linalg.norm(theta))
    assert error(found.key_bias, layer.key_bias) < 1e-8


def test_short_sequences_are_kept_to(rng):
    """Tokens without values make long sequences: a server of short ones is asked without them."""
    layer = layer_of(rng, [3, 14], 24, True)
    oracle = Oracle.of(layer, limits=ServerLimits(max_length=9))
    heads = known(layer, [3, 14])
    assert not any(group.plan for group in plan_groups(oracle, heads, 24, SETTINGS))
    assert error(read_rows(oracle, layer.bias, heads, rng, SETTINGS).theta, layer.theta) < 1e-8


def test_no_plan_where_too_few_tokens_are_unseen():
    assert UnseenPlan.of(np.array([8, 8]), 16, SETTINGS) is None
    assert UnseenPlan.of(np.array([1, 3]), 16, SETTINGS) is None
    plan = UnseenPlan.of(np.array([8]), 24, SETTINGS)
    assert plan is not None
    assert plan.longest(24, True) >= 1 + plan.seen + plan.queries + 1
