"""Values of the heads: what every head reads at every probe, ranks by gap, guards and refusals."""

import numpy as np
import pytest

from manyheads.attention import AttentionLayer
from manyheads.recovery import gpt_layer
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import SPARING
from manyheads.recovery.queries.gates.pairs import Pairs, separate_heads
from manyheads.recovery.queries.nets.sigmoid_network import fit_nets, net_amplification
from manyheads.recovery.queries.subspaces.method import read_head_values, with_fewer_queries
from manyheads.recovery.queries.values.output_spaces import read_sums
from manyheads.recovery.queries.values.ranks import find_ranks, rank_by_gap
from manyheads.recovery.refusals import FitError


def sliced(layer, rng):
    oracle = Oracle.of(layer)
    pairs = Pairs(oracle, read_sums(oracle, layer.dim), causal=layer.causal)
    start = separate_heads(pairs, layer.dim, rng, oversampling=1.0, tries=8)
    return read_head_values(pairs, start, rng, SPARING)


@pytest.mark.parametrize("causal", [True, False])
def test_fewer_queries_err_as_little_as_predicted(rng, causal):
    """By prediction the values err `loss` times as much at most as with all queries, and they err as predicted.

    The sum of the values is known too, and is a row of the fit with fewer queries; without it nothing is for nothing.
    The figures of 200 draws have a standard deviation of 5% at most; five are allowed.
    """
    layer = gpt_layer(rng, 24, 3, causal=causal)
    oracle = Oracle.of(layer)
    pairs = Pairs(oracle, read_sums(oracle, 24), causal=causal, both=True, middle=True)
    start = separate_heads(pairs, 24, rng, oversampling=2.0, tries=8)
    fewer = with_fewer_queries(pairs, start, rng, 8.0)
    assert len(fewer.queries) < len(start.queries)
    predicted, noise = [], 1e-9
    for chosen, design in ((start, start.design), (fewer, fewer.design.with_sum())):
        exact = design.units(chosen.net.slopes) @ chosen.net.values
        noisy = exact + noise * rng.normal(size=(200, *exact.shape))
        errors = fit_nets(design, noisy, chosen.net.slopes).values - chosen.net.values
        inside = errors @ np.linalg.qr(chosen.net.values.T)[0]
        predicted.append(net_amplification(design, chosen.net)[1])
        np.testing.assert_allclose(np.sqrt(np.mean(inside**2, axis=(0, 2))), noise * predicted[-1], rtol=0.25)
    assert (predicted[1] / predicted[0]).max() <= 8.0
    assert (net_amplification(fewer.design, fewer.net)[1] > predicted[0]).all()


def test_rows_are_what_the_heads_read(rng):
    layer = gpt_layer(rng, 18, 3, rank=4)
    stacks = sliced(layer, rng)
    read = stacks.probes @ layer.projection  # (m, b, d)
    distance = np.linalg.norm(read[:, None] - stacks.values[None], axis=-1).max(-1)
    order = distance.argmin(1)
    assert sorted(order) == [0, 1, 2]
    assert distance.min(1).max() < 1e-7 * np.linalg.norm(read, axis=-1).mean()
    assert stacks.ranks.tolist() == [4, 4, 4]
    assert len(stacks.probes) < 18


def test_predicted_noise_bounds_the_error_of_most_rows(rng):
    """The level is a prediction to a factor: rounding stays below a hundred times it, and is not far below."""
    layer = gpt_layer(rng, 18, 2)
    stacks = sliced(layer, rng)
    read = stacks.probes @ layer.projection
    errors = np.linalg.norm(read[:, None] - stacks.values[None], axis=-1)  # (m, m, b)
    ratio = np.median(errors.min(0), axis=-1) / stacks.levels
    assert ratio.min() > 1e-4
    assert ratio.max() < 100


def test_a_head_without_logits_has_a_stack_of_its_own(rng):
    layer = gpt_layer(rng, 16, 2, rank=4)
    theta, beta = layer.theta.copy(), layer.key_bias.copy()
    theta[0], beta[0] = 0, 0
    stacks = sliced(AttentionLayer(theta, layer.projection, beta, layer.bias, causal=True), rng)
    assert stacks.ranks.tolist() == [4, 4]
    np.testing.assert_allclose(stacks.values[1], stacks.probes @ layer.projection[0], rtol=0, atol=1e-8)


def test_all_probes_are_taken_where_the_ranks_exceed_the_dimension(rng):
    layer = gpt_layer(rng, 12, 2, rank=8)
    stacks = sliced(layer, rng)
    assert len(stacks.probes) + stacks.dropped == 13


def test_probes_that_cannot_be_followed_are_refused(rng):
    layer = gpt_layer(rng, 12, 2)
    oracle = Oracle.of(layer)
    start = separate_heads(Pairs(oracle, read_sums(oracle, 12)), 12, rng, oversampling=1.0, tries=8)
    # The net of another layer leaves a residual at every step.
    other = Oracle.of(gpt_layer(rng, 12, 3))
    wrong = Pairs(other, read_sums(other, 12))
    with pytest.raises(FitError, match="failed their guards") as refused:
        read_head_values(wrong, start, rng, SPARING)
    assert refused.value.measured > refused.value.threshold


def test_rank_is_at_the_largest_gap_that_ends_in_the_noise():
    spectrum = np.array([1.0, 0.5, 1e-3, 2e-11, 1e-11])
    assert rank_by_gap(spectrum, 1e-11) == 3
    assert rank_by_gap(spectrum, 1e-16) is None  # such a gap ends above the noise
    assert rank_by_gap(1e-12 * spectrum, 1e-12) == 0
    # A decaying spectrum: the gap at noise counts, not the larger one above it.
    assert rank_by_gap(np.array([1.0, 1e-5, 1e-6, 1e-10, 9e-11]), 1e-10) == 3


def test_ranks_need_two_values_below_the_gap(rng):
    rows = rng.normal(size=(1, 5, 3)) @ rng.normal(size=(1, 3, 9))
    assert find_ranks(rows, np.array([1e-13])).tolist() == [3]
    assert find_ranks(rows[:, :4], np.array([1e-13])) is None
