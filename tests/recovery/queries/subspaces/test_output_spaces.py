"""Output spaces decide the projections: planted ones come back, errors scale with the condition, overlaps refuse."""

import numpy as np
import pytest

from manyheads.recovery import gpt_layer, planted_layer
from manyheads.recovery.queries.values.output_spaces import Sums, split_projections
from manyheads.recovery.queries.values.probes import Stacks
from manyheads.recovery.refusals import FitError, RankBudgetError


def stacks_of(rng, layer, ranks, probes=12, error=0.0):
    directions = rng.normal(size=(probes, layer.dim))
    values = directions @ layer.projection
    values += error * rng.normal(size=values.shape)
    levels = np.full(layer.heads, max(error, 1e-15) * np.sqrt(layer.dim))
    return Stacks(directions, values, levels, None if ranks is None else np.array(ranks), 0, 0)


def sums_of(layer):
    return Sums(layer.projection.sum(0), np.zeros(layer.dim))


def test_projections_follow_from_their_sum_and_their_output_spaces(rng):
    layer = gpt_layer(rng, 20, 4, rank=4)
    found = split_projections(sums_of(layer), stacks_of(rng, layer, [4] * 4))
    np.testing.assert_allclose(found.projection, layer.projection, rtol=0, atol=1e-10)
    # V_i O_i with V_i = W_S O^+_i: answers split into the coordinates of each head.
    split = rng.normal(size=(3, 20)) @ layer.projection[2] @ np.array(found.splits)
    assert np.abs(split[[0, 1, 3]]).max() < 1e-10 < np.abs(split[2]).max()


def test_uneven_ranks(rng):
    layer = gpt_layer(rng, 20, 2, rank=4)
    projection = layer.projection.copy()
    left, singular, right = np.linalg.svd(projection[1])
    projection[1] = (left[:, :2] * singular[:2]) @ right[:2]
    uneven = type(layer)(layer.theta, projection)
    found = split_projections(sums_of(uneven), stacks_of(rng, uneven, [4, 2]))
    np.testing.assert_allclose(found.projection, projection, rtol=0, atol=1e-10)
    assert [one.shape for one in found.readers] == [(20, 4), (20, 2)]
    left = [one @ np.linalg.pinv(one) for one in found.readers]  # the values of a head are its column space
    np.testing.assert_allclose(np.array(left) @ projection, projection, rtol=0, atol=1e-10)


def test_errors_grow_with_the_condition_of_the_output_spaces(rng):
    layer = gpt_layer(rng, 20, 2, rank=4)
    projection = layer.projection.copy()
    first, second = (np.linalg.svd(part)[2][:4] for part in projection)
    near = np.linalg.qr((first + 1e-3 * second).T)[0].T
    projection[1] = projection[1] @ second.T @ near
    close = type(layer)(layer.theta, projection)
    error = 1e-11
    found = split_projections(sums_of(close), stacks_of(rng, close, [4, 4], error=error))
    assert 1e2 < found.condition < 1e5
    assert np.abs(found.projection - projection).max() < 1e3 * error * found.condition


def test_full_rank_heads_are_measured_by_d_probes(rng):
    layer = planted_layer(rng, 8, 3)
    found = split_projections(sums_of(layer), stacks_of(rng, layer, None, probes=30))
    assert found.splits is None
    np.testing.assert_allclose(found.projection, layer.projection, rtol=0, atol=1e-9)


def test_overlapping_output_spaces_are_refused(rng):
    layer = gpt_layer(rng, 12, 4, rank=4)
    with pytest.raises(RankBudgetError, match="16 dimensions together"):
        split_projections(sums_of(layer), stacks_of(rng, layer, [4] * 4, probes=9))
    projection = layer.projection[:2].copy()
    projection[1] = rng.normal(size=(12, 12)) @ projection[0]
    same = type(layer)(layer.theta[:2], projection)
    with pytest.raises(RankBudgetError, match="overlap"):
        split_projections(sums_of(same), stacks_of(rng, same, [4] * 2, probes=9))


def test_spaces_that_are_not_exhausted_by_the_probes_that_were_kept_are_refused(rng):
    layer = planted_layer(rng, 8, 3)
    with pytest.raises(RankBudgetError, match="7 probes"):
        split_projections(sums_of(layer), stacks_of(rng, layer, None, probes=7))


def test_an_exchanged_probe_is_found(rng):
    layer = gpt_layer(rng, 20, 2, rank=4)
    stacks = stacks_of(rng, layer, [4, 4])
    values = stacks.values.copy()
    values[:, 5] = values[::-1, 5]
    with pytest.raises((FitError, RankBudgetError)):
        split_projections(sums_of(layer), stacks._replace(values=values))


def test_heads_below_the_noise_are_refused(rng):
    layer = gpt_layer(rng, 12, 2)
    with pytest.raises(FitError, match="below the noise"):
        split_projections(sums_of(layer), stacks_of(rng, layer, [0, 0]))
