"""Drop and rise against direct search and known answers; the rank correlation within groups against scipy's."""

import numpy as np
import pytest
from scipy import stats

from manyheads.curves.drop_and_rise import (
    cross_fitted_drop_and_rise,
    cross_fitted_rise,
    drop_and_rise,
    forward_fill,
    replicated_drop_and_rise,
)
from manyheads.curves.summaries import within_group_spearman
from manyheads.errors import ShapeError, UsageError


def test_drop_and_rise_are_what_a_search_finds(rng):
    curves = rng.normal(size=(3, 4, 9))
    found = drop_and_rise(curves)
    for index in np.ndindex(3, 4):
        curve = curves[index].tolist()
        assert found.argmin[index] == curve.index(min(curve))
        assert found.drop[index] == curve[0] - min(curve)
        assert found.rise[index] == curve[-1] - min(curve)


def test_absent_curves_stay_absent_and_broken_ones_are_refused():
    found = drop_and_rise([[np.nan, np.nan], [2.0, 1.0]])
    np.testing.assert_array_equal(found.drop, [np.nan, 1.0])
    with pytest.raises(UsageError, match="forward_fill"):
        drop_and_rise([1.0, np.nan])
    with pytest.raises(ShapeError, match="along time"):
        drop_and_rise(np.zeros((3, 0)))


def test_the_mean_curve_of_the_others_names_the_place(rng):
    curves = rng.normal(size=(5, 2, 8))
    found = cross_fitted_drop_and_rise(curves)
    for replicate in range(5):
        mean = np.delete(curves, replicate, axis=0).mean(0)  # (2, 8)
        np.testing.assert_array_equal(found.argmin[replicate], mean.argmin(-1))
    with pytest.raises(UsageError, match="two replicates"):
        cross_fitted_drop_and_rise(np.zeros((1, 4)))


def test_noise_alone_rises_by_itself_and_not_across_seeds(rng):
    """The mean of 2000 unbiased figures lies beyond five standard errors once in a million and a half seeds."""
    noise = rng.normal(size=(4, 2000, 6))
    crossed = cross_fitted_drop_and_rise(noise).rise.mean(0)  # (2000,)
    assert abs(crossed.mean()) < 5 * crossed.std() / 2000**0.5
    assert drop_and_rise(noise).rise.mean() > 1.0  # the mean of six minima is 1.27 below that of the last value


def test_a_rise_after_a_drop_is_where_the_others_rise_most(rng):
    curves = rng.normal(size=(4, 3, 9))
    expected = np.zeros((4, 3))
    for replicate in range(4):
        for row, mean in enumerate(np.delete(curves, replicate, axis=0).mean(0)):
            pairs = [(s, t) for s in range(1, 9) for t in range(s, 9) if mean[s] < mean[:s].min()]
            low, high = max(pairs, key=lambda pair: mean[pair[1]] - mean[pair[0]], default=(0, 0))
            expected[replicate, row] = curves[replicate, row, high] - curves[replicate, row, low]
    np.testing.assert_allclose(cross_fitted_rise(curves), expected)
    # Up first and then down for good is no rebound, and neither is noise: five standard errors, as below.
    assert (cross_fitted_rise(np.tile([2.0, 3.0, 1.0, 0.5], (3, 1))) == 0).all()
    noise = cross_fitted_rise(rng.normal(size=(4, 2000, 6))).mean(0)
    assert abs(noise.mean()) < 5 * noise.std() / 2000**0.5
    assert np.isnan(cross_fitted_rise(np.full((2, 3), np.nan))).all()
    with pytest.raises(UsageError, match="two replicates"):
        cross_fitted_rise(np.zeros((1, 4)))


def test_one_replicate_is_measured_by_itself_and_several_by_each_other(rng):
    curves = rng.normal(size=(3, 4, 7))
    alone, together = replicated_drop_and_rise(curves[:1]), replicated_drop_and_rise(curves)
    np.testing.assert_array_equal(alone.rise, drop_and_rise(curves[:1]).rise)
    np.testing.assert_array_equal(together.rise, cross_fitted_rise(curves))
    np.testing.assert_array_equal(together.drop, cross_fitted_drop_and_rise(curves).drop)


def test_a_diverged_run_keeps_what_it_had_reached():
    curves = [[3.0, np.inf, 1.0], [np.nan, np.nan, np.nan], [3.0, 2.0, 1.0]]
    np.testing.assert_array_equal(forward_fill(curves), [[3.0, 3.0, 3.0], [np.nan] * 3, [3.0, 2.0, 1.0]])


def test_one_group_is_spearman_and_equal_groups_are_the_mean_of_theirs(rng):
    x, y = rng.integers(0, 5, (2, 30)).astype(float)  # with ties
    assert within_group_spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    x, y = rng.normal(size=(2, 3, 7))
    groups = np.repeat([0, 1, 2], 7)
    each = [stats.spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    assert within_group_spearman(x.ravel(), y.ravel(), groups) == pytest.approx(np.mean(each), abs=1e-12)


def test_what_differs_between_groups_has_no_part_in_it(rng):
    x, y, groups = rng.normal(size=20), rng.normal(size=20), rng.integers(0, 3, 20)
    moved = within_group_spearman(x + 100 * groups, y - 50 * groups, groups)
    assert moved == pytest.approx(within_group_spearman(x, y, groups), abs=1e-12)


def test_no_order_is_no_correlation_and_what_has_no_rank_is_refused():
    assert within_group_spearman([1.0, 1.0, 2.0], [1.0, 2.0, 3.0], ["a", "a", "b"]) == 0.0
    with pytest.raises(UsageError, match="no rank"):
        within_group_spearman([1.0, np.nan], [1.0, 2.0])
    with pytest.raises(ShapeError, match="three"):
        within_group_spearman([1.0, 2.0], [1.0])
