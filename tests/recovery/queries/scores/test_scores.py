"""Layers with any attention score: heads from repeated tokens, scores from last rows, and the forms behind them."""

import numpy as np
import pytest
from tests.recovery.rotary_layers import planted_rotary_layer

from manyheads.recovery import ExtractionOptions, RecoveryRefused, compare_layers, extract_layer
from manyheads.recovery.layers.evaluation import softmax
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.scores.heads import find_heads, refine_spaces
from manyheads.recovery.queries.values.output_spaces import read_sums
from manyheads.recovery.refusals import RankBudgetError

DIM, HEADS = 16, 2
EPS = 2e-16


def layer_of_score(projection, score):
    """Return a causal layer with the scores score(x_r, x_j, r - j) (m, ...) of tokens (..., d)."""

    def layer(x):
        length = x.shape[1]
        apart = np.arange(length)[:, None] - np.arange(length)
        logits = score(x[:, :, None], x[:, None, :], apart)  # (m, n, k, k)
        weights = softmax(np.where(apart >= 0, logits, -np.inf))
        return np.einsum("mnrk,nkd,mde->nre", weights, x, projection, optimize=True)

    return layer


def projections(rng, heads, rank, shared=False):
    """Return random W (m, d, d) of a rank; `shared` values are the same in all heads."""
    values = rng.standard_normal((1 if shared else heads, DIM, rank)) / DIM**0.5
    return values @ (rng.standard_normal((heads, rank, DIM)) / DIM**0.5)


def ripples(rng, heads):
    """Return a score that is no form of its tokens: the sine of one, and a distance."""
    left, right = rng.standard_normal((2, heads, DIM)) / DIM**0.5
    slopes = rng.uniform(0.1, 0.6, heads)

    def score(query, key, apart):
        waves = np.sin(2 * query @ left.T) + np.cos(key @ right.T) * np.sin(query @ right.T)
        return np.moveaxis(waves - slopes * apart[..., None], -1, 0)

    return score


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("heads", "shared"), [(3, False), (2, True)])
def test_heads_of_any_score(seed, heads, shared):
    """Scores that are no forms at all; with shared values no single Jacobian shows all heads."""
    rng = np.random.default_rng(seed)
    truth = projections(rng, heads, 4, shared)
    oracle = Oracle(layer_of_score(truth, ripples(rng, heads)), DIM)
    found = find_heads(oracle, read_sums(oracle, DIM), EPS, rng)
    assert found.ranks == [4] * heads
    apart = np.linalg.norm(truth[:, None] - found.projection, axis=(2, 3))
    assert sorted(apart.argmin(1)) == list(range(heads))
    assert apart.min(1).max() < 1e-6 * np.linalg.norm(truth)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rotary_positions_with_biases(seed):
    layer = planted_rotary_layer(np.random.default_rng(seed), DIM, HEADS, key_bias=0.7)
    found = extract_layer(layer, DIM, seed=seed, options=ExtractionOptions(scores=True, verify=60))
    assert (found.heads, found.method) == (HEADS, "scores")
    errors = compare_layers(layer, found.layer)
    assert max(errors.theta, errors.projection, errors.key_bias) < 1e-5
    for mine, true in zip(found.layer.turns.frequencies(), layer.turns.frequencies(), strict=True):
        np.testing.assert_allclose(mine, true, atol=1e-4)


def test_a_layer_said_to_be_plain_rotary_is_tried_with_biases():
    rng = np.random.default_rng(0)
    layer = planted_rotary_layer(rng, DIM, HEADS, key_bias=0.7)
    found = extract_layer(layer, DIM, options=ExtractionOptions(rotary=True, tries=1, verify=60))
    assert found.method == "scores"


def test_scores_that_are_no_form_are_refused():
    rng = np.random.default_rng(0)
    layer = layer_of_score(projections(rng, 2, 6), ripples(rng, 2))
    with pytest.raises(RecoveryRefused, match=r"no gap|scores are not affine"):
        extract_layer(layer, DIM, options=ExtractionOptions(scores=True, tries=2, verify=60))


def test_heads_that_write_into_the_same_space_are_refused():
    rng = np.random.default_rng(0)
    truth = projections(rng, 2, 4)
    truth[1] = rng.standard_normal((DIM, DIM)) @ truth[0]
    oracle = Oracle(layer_of_score(truth, ripples(rng, 2)), DIM)
    with pytest.raises((RecoveryRefused, RankBudgetError)):
        find_heads(oracle, read_sums(oracle, DIM), EPS, rng)


@pytest.mark.parametrize("seed", [0, 1])
def test_random_rows_refine_spaces_that_are_a_little_wrong(seed):
    """Spaces that are wrong by a percent come out right to rounding, those of another function do not."""
    rng = np.random.default_rng(seed)
    truth = projections(rng, 3, 4)
    oracle = Oracle(layer_of_score(truth, ripples(rng, 3)), DIM)
    sums = read_sums(oracle, DIM)
    spaces = [np.linalg.svd(one)[2][:4] for one in truth]
    near = [space + 0.01 * rng.standard_normal((4, 12)) @ np.concatenate(spaces) for space in spaces]
    found, rest = refine_spaces(oracle, sums, near, 1.0, rng)
    assert rest < 1e-11
    for mine, own in zip(found, spaces, strict=True):
        outside = mine - mine @ own.T @ own
        assert np.linalg.norm(outside) < 1e-10 * np.linalg.norm(mine)
    apart = Oracle(lambda x: np.tanh(oracle.function(x)), DIM)
    assert refine_spaces(apart, read_sums(apart, DIM), near, 1.0, rng)[1] > 1e-4
