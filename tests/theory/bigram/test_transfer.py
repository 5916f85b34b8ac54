"""The transfer test: what a pilot says of rho, what it decides, and the law of samples."""

from dataclasses import replace

import numpy as np
import pytest

from manyheads.errors import ShapeError, UsageError
from manyheads.studies.bigram.transfer import TransferCost
from manyheads.theory.bigram import TransferSettings, draw_bigram_task, transfer_test
from manyheads.theory.bigram.searches import draw_uniform_batch, search
from manyheads.theory.bigram.task import Batch, draw_correlated
from manyheads.theory.bigram.transfer import predict_transfer


@pytest.fixture
def task(rng):
    drawn = draw_bigram_task(rng, 3, 500, 2)
    return replace(drawn, weights=np.full((3, 2), 0.5))  # a position of little weight may hide in half a pilot


def pilot(rng, task, size):
    return draw_uniform_batch(rng, task, size)


@pytest.mark.parametrize("rho", [1.0, 0.7, -0.7])
def test_a_pilot_shows_the_correlation_and_its_sign(rng, task, rho):
    value = draw_correlated(rng, task, rho)
    batch = pilot(rng, task, 8000)
    for squared_norm in (None, task.transition_squared_norm):
        test = transfer_test(value, batch, 2, settings=TransferSettings(squared_norm=squared_norm))
        assert test.decision == "helps"
        assert test.flip == (rho < 0)
        # half a pilot: an error of about .03, and .02 more where the squared norm is estimated
        assert abs(test.correlation - rho) < 0.2
        np.testing.assert_array_equal(test.positions, task.positions)
        assert test.samples_range[0] <= test.samples <= test.samples_range[1]


def test_the_value_may_come_with_its_means(rng, task):
    value, batch = draw_correlated(rng, task, 0.8), pilot(rng, task, 3000)
    moved = 5 * value + rng.normal(size=3)[:, None] + rng.normal(size=3)
    first, second = transfer_test(value, batch, 2), transfer_test(moved, batch, 2)
    np.testing.assert_allclose(first.strongest, second.strongest, rtol=1e-9)
    np.testing.assert_allclose(first.correlation, second.correlation, rtol=1e-9)


@pytest.mark.parametrize(("length", "size", "rho"), [(100, 400, 0.5), (200, 2000, 0.2), (300, 1000, 0.4)])
def test_what_helps_has_a_correlation_and_a_finite_number_of_samples(length, size, rho):
    """Pilots in which one score stands out, but the squared norm at the picked positions does not exceed its error."""
    task = draw_bigram_task(np.random.default_rng(5001), 4, length, 2)
    value = draw_correlated(np.random.default_rng(6001), task, rho)
    test = transfer_test(value, task.draw(np.random.default_rng(7001), size), 2)
    assert test.strongest > test.threshold
    if test.decision == "helps":
        assert round(test.samples) > 0
        assert test.interval.contains(test.correlation)
        assert test.interval.contains(rho)
        assert not test.flip
        assert np.isfinite(test.pilot_needed)
    else:
        assert test.decision == "undecided"


def test_few_positions_helping_leave_bounds_on_the_correlation():
    """By Cauchy and Schwarz a positive product with P bounds the squared norm, and rho, from below."""
    sides = []
    for seed in range(12):
        rng = np.random.default_rng([5001, seed])
        task = draw_bigram_task(rng, 4, 100, 2)
        value = draw_correlated(rng, task, 0.5)
        test = transfer_test(value, task.draw(rng, 800), 2)
        if test.decision == "helps":
            assert np.isfinite([test.correlation, test.samples, test.pilot_needed]).all()
            sides.append((test.interval.contains(0.5), test.interval.high == 1.0))
    covered, bounded = np.sum(sides, 0)
    assert bounded > 0  # the case occurs
    assert covered >= len(sides) - 1  # at 99%, two of twelve would be a chance of less than one in a hundred


def test_without_correlation_a_large_pilot_says_no_and_a_small_one_says_how_large(rng):
    task = draw_bigram_task(rng, 3, 100, 2, squared_norm=0.3)
    value = draw_correlated(rng, task, 0.0)
    settings = TransferSettings(squared_norm=0.3, least=0.4, level=0.9999)
    small = transfer_test(value, pilot(rng, task, 800), 2, settings=settings)
    assert small.decision == "undecided"
    assert 800 < small.pilot_needed < 20_000
    large = transfer_test(value, pilot(rng, task, round(small.pilot_needed) + 1500), 2, settings=settings)
    assert large.decision == "does not"
    assert abs(large.correlation) < 0.2
    blind = transfer_test(value, pilot(rng, task, 800), 2)
    assert blind.decision == "undecided"  # without the squared norm nothing can be excluded


@pytest.mark.slow
def test_the_samples_go_like_the_inverse_square_of_the_correlation(rng):
    study, rho = TransferCost(), (1.0, 0.5, 0.25)
    logs, predicted = [], []
    for _ in range(24):
        task = study._task(250, rng)
        values = np.stack([draw_correlated(rng, task, one) for one in rho])
        found = search(rng, task, lambda counts, values=values: np.einsum("ktyx,ryx->rkt", counts, values))
        logs.append(np.log(found * np.square(rho)))
        predicted.append(
            [np.log(predict_transfer(task, value) * one**2) for value, one in zip(values, rho, strict=True)]
        )
    level = np.mean(logs, 0)
    assert np.ptp(level) < np.log(1.6)
    np.testing.assert_allclose(predicted, np.mean(predicted), atol=2e-3)  # C/rho^2, whatever the rest of the matrix is
    # 24 searches at three correlations scatter by 0.45 each; five deviations, and two records
    assert abs(level.mean() - np.mean(predicted)) < 5 * 0.45 / 24**0.5 / 3**0.5 + 2 * np.log(1.12)


def test_bad_pilots_and_matrices_are_refused_with_the_figure(rng, task):
    value, batch = draw_correlated(rng, task, 0.5), pilot(rng, task, 400)
    with pytest.raises(UsageError, match="a pilot of 200 samples is too small: 320"):
        transfer_test(value, Batch(*(part[:200] for part in batch)), 2)
    with pytest.raises(ShapeError, match=r"value of shape \(3, 2\)"):
        transfer_test(value[:, :2], batch, 2)
    with pytest.raises(UsageError, match="constant"):
        transfer_test(np.ones((3, 3)), batch, 2)
    with pytest.raises(UsageError, match="sparsity=0"):
        transfer_test(value, batch, 0)
    with pytest.raises(UsageError, match="one query occurs 0 times"):
        transfer_test(value, batch._replace(queries=np.zeros(400, int)), 2)
    with pytest.raises(UsageError, match="squared_norm=2"):
        TransferSettings(squared_norm=2.0)


def test_the_law_agrees_with_its_leading_order(task):
    """Typical extremes of normal numbers overstate the median, the less the longer the context is."""
    ratios = []
    for length in (500, 50_000, 5_000_000):
        longer = replace(task, length=length)
        extremes = (2 * np.log(3 * length)) ** 0.5 + (2 * np.log(3 * 2)) ** 0.5
        leading = extremes**2 / task.transition_squared_norm / 0.5**2
        ratios.append(leading / predict_transfer(longer, -3 * task.centred))
    assert ratios[0] == pytest.approx(1.74, abs=0.05)
    assert ratios[2] == pytest.approx(1.41, abs=0.05)
    assert ratios[0] > ratios[1] > ratios[2]


def test_a_matrix_that_shows_nothing_has_no_law(rng, task):
    with pytest.raises(UsageError, match="not correlated"):
        predict_transfer(task, draw_correlated(rng, task, 0.0))
    with pytest.raises(UsageError, match="not correlated"):
        predict_transfer(task, np.zeros((3, 3)))
    with pytest.raises(ShapeError, match=r"this task needs \(3, 3\)"):
        predict_transfer(task, np.zeros((2, 2)))
