"""Valleys against direct search and known answers; the rank correlation within groups against scipy's."""

import numpy as np
import pytest
from scipy import stats

from manyheads.errors import ShapeError, UsageError
from manyheads.joma.drop_and_rise import correlate_within, cross_rises, cross_valleys, find_valley, hold_last


def test_a_valley_is_what_a_search_finds(rng):
    curves = rng.normal(size=(3, 4, 9))
    valley = find_valley(curves)
    for index in np.ndindex(3, 4):
        curve = curves[index].tolist()
        assert valley.place[index] == curve.index(min(curve))
        assert valley.drop[index] == curve[0] - min(curve)
        assert valley.rebound[index] == curve[-1] - min(curve)


def test_absent_curves_stay_absent_and_broken_ones_are_refused():
    valley = find_valley([[np.nan, np.nan], [2.0, 1.0]])
    np.testing.assert_array_equal(valley.drop, [np.nan, 1.0])
    with pytest.raises(UsageError, match="hold_last"):
        find_valley([1.0, np.nan])
    with pytest.raises(ShapeError, match="time"):
        find_valley(np.zeros((3, 0)))


def test_the_mean_curve_of_the_others_names_the_place(rng):
    curves = rng.normal(size=(5, 2, 8))
    valley = cross_valleys(curves)
    for replicate in range(5):
        mean = np.delete(curves, replicate, axis=0).mean(0)  # (2, 8)
        np.testing.assert_array_equal(valley.place[replicate], mean.argmin(-1))
    with pytest.raises(UsageError, match="two replicates"):
        cross_valleys(np.zeros((1, 4)))


def test_noise_alone_has_a_valley_by_itself_and_none_across_seeds(rng):
    """The mean of 2000 unbiased figures lies beyond five standard errors once in a million and a half seeds."""
    noise = rng.normal(size=(4, 2000, 6))
    crossed = cross_valleys(noise).rebound.mean(0)  # (2000,)
    assert abs(crossed.mean()) < 5 * crossed.std() / 2000**0.5
    assert find_valley(noise).rebound.mean() > 1.0  # the mean of six minima is 1.27 below that of the last value


def test_a_rise_after_a_drop_is_where_the_others_rise_most(rng):
    curves = rng.normal(size=(4, 3, 9))
    expected = np.zeros((4, 3))
    for replicate in range(4):
        for row, mean in enumerate(np.delete(curves, replicate, axis=0).mean(0)):
            pairs = [(s, t) for s in range(1, 9) for t in range(s, 9) if mean[s] < mean[:s].min()]
            low, high = max(pairs, key=lambda pair: mean[pair[1]] - mean[pair[0]], default=(0, 0))
            expected[replicate, row] = curves[replicate, row, high] - curves[replicate, row, low]
    np.testing.assert_allclose(cross_rises(curves), expected)
    # Up first and then down for good is no rebound, and neither is noise: five standard errors, as below.
    assert (cross_rises(np.tile([2.0, 3.0, 1.0, 0.5], (3, 1))) == 0).all()
    noise = cross_rises(rng.normal(size=(4, 2000, 6))).mean(0)
    assert abs(noise.mean()) < 5 * noise.std() / 2000**0.5
    assert np.isnan(cross_rises(np.full((2, 3), np.nan))).all()
    with pytest.raises(UsageError, match="two replicates"):
        cross_rises(np.zeros((1, 4)))


def test_a_diverged_run_keeps_what_it_had_reached():
    curves = [[3.0, np.inf, 1.0], [np.nan, np.nan, np.nan], [3.0, 2.0, 1.0]]
    np.testing.assert_array_equal(hold_last(curves), [[3.0, 3.0, 3.0], [np.nan] * 3, [3.0, 2.0, 1.0]])


def test_one_group_is_spearman_and_equal_groups_are_the_mean_of_theirs(rng):
    x, y = rng.integers(0, 5, (2, 30)).astype(float)  # with ties
    assert correlate_within(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    x, y = rng.normal(size=(2, 3, 7))
    groups = np.repeat([0, 1, 2], 7)
    each = [stats.spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    assert correlate_within(x.ravel(), y.ravel(), groups) == pytest.approx(np.mean(each), abs=1e-12)


def test_what_differs_between_groups_has_no_part_in_it(rng):
    x, y, groups = rng.normal(size=20), rng.normal(size=20), rng.integers(0, 3, 20)
    moved = correlate_within(x + 100 * groups, y - 50 * groups, groups)
    assert moved == pytest.approx(correlate_within(x, y, groups), abs=1e-12)


def test_no_order_is_no_correlation_and_what_has_no_rank_is_refused():
    assert correlate_within([1.0, 1.0, 2.0], [1.0, 2.0, 3.0], ["a", "a", "b"]) == 0.0
    with pytest.raises(UsageError, match="no rank"):
        correlate_within([1.0, np.nan], [1.0, 2.0])
    with pytest.raises(ShapeError, match="three"):
        correlate_within([1.0, 2.0], [1.0])
