"""Screening: counts against loops, the statistic against SciPy, its law of samples against sampling."""

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from manyheads.errors import ShapeError, UsageError
from manyheads.studies.bigram.screening import ScreeningCost
from manyheads.theory.bigram import draw_bigram_task, predict_screening, screen
from manyheads.theory.bigram.screening import chi_square, count_pairs, measure_unevenness
from manyheads.theory.bigram.searches import draw_uniform_batch, ranks_first, search
from manyheads.theory.bigram.transfer import transfer_scores


@pytest.mark.parametrize("size", [3, 20])
def test_counts_are_those_of_loops(rng, size):
    tokens = rng.integers(0, size, (300, 4)).astype(np.uint8)
    queries, targets = rng.integers(0, size, (2, 300))
    exact = np.zeros((size, 4, size, size), int)
    for row, query, target in zip(tokens, queries, targets, strict=True):
        exact[query, np.arange(4), target, row] += 1
    np.testing.assert_array_equal(count_pairs(tokens, queries, targets, size), exact)
    value = rng.normal(size=(size, size))
    scores, counts = transfer_scores(value, tokens, queries, targets)
    np.testing.assert_allclose(scores * np.maximum(counts, 1)[:, None], np.einsum("ktyx,yx->kt", exact, value))


def test_the_statistic_is_scipys(rng):
    tables = rng.integers(1, 30, (5, 4, 4))
    statistics, dof = chi_square(tables)
    for table, statistic in zip(tables, statistics, strict=True):
        np.testing.assert_allclose(statistic, chi2_contingency(table, correction=False).statistic)
    assert (dof == 9).all()
    tables[:, 1] = 0  # an answer that never occurs
    assert (chi_square(tables)[1] == 6).all()
    assert chi_square(np.zeros((4, 4)))[0] == 0


def test_all_positions_are_found_and_hardly_another(rng):
    task = draw_bigram_task(rng, 3, 400, 2, squared_norm=0.3)
    result = screen(*task.draw(rng, 9000), false_alarm=1e-6)
    np.testing.assert_array_equal(result.top(2), task.positions)
    assert result.found.sum() == 6
    assert sorted(result.positions(0)) == task.positions[0].tolist()
    np.testing.assert_allclose(result.attention().sum(1), 1)
    assert (result.attention()[0, task.positions[0]] == 0.5).all()


def test_nothing_is_found_where_nothing_depends(rng):
    tokens, queries, targets = rng.integers(0, 3, (2000, 300)), rng.integers(0, 3, 2000), rng.integers(0, 3, 2000)
    result = screen(tokens, queries, targets, false_alarm=1e-5)
    assert not result.found.any()
    np.testing.assert_allclose(result.attention(), 1 / 300, rtol=1e-6)
    # the threshold is where it should be: 900 chi-square numbers, one in a hundred of them above its own quantile
    from scipy.stats import chi2

    share = (result.scores > chi2.isf(0.01, result.dof)).mean()
    assert 0 < share < 0.035


def test_sparse_tables_are_not_tested(rng):
    tokens, queries, targets = rng.integers(0, 20, (600, 5)), rng.integers(0, 20, 600), rng.integers(0, 20, 600)
    result = screen(tokens, queries, targets)
    assert len(result.untested) == 20
    assert not result.found.any()


def test_rare_tokens_are_not_tested_by_a_law_that_does_not_hold(rng):
    law, size = [0.85, 0.075, 0.075], 600
    tokens, targets = rng.choice(3, (size, 40), p=law), rng.choice(3, size, p=law)
    few = screen(tokens, rng.integers(0, 3, size), targets, false_alarm=1e-6)
    assert len(few.untested) == 3
    many = screen(np.tile(tokens, (30, 1)), np.zeros(30 * size, int), np.tile(targets, 30), vocabulary=3)
    assert len(many.untested) == 2  # the two queries that never occur


def test_unevenness_is_the_variance_of_shuffled_tables(rng):
    answers, tokens = np.repeat([0, 1, 2], [150, 40, 10]), np.repeat([0, 1, 2], [160, 25, 15])
    tables = np.zeros((4000, 3, 3), int)
    for table in tables:
        np.add.at(table, (rng.permutation(answers), tokens), 1)
    statistics, excess = chi_square(tables)[0], measure_unevenness(tables)
    assert np.ptp(excess) < 1e-12  # the sums are all that counts
    assert excess[0] > 0.1
    # the fourth moment is some ten times the square of the second: a standard error of 5%, and terms of 1 / n
    assert statistics.var() == pytest.approx(8 * (1 + excess[0]), rel=0.3)


@pytest.mark.slow
def test_the_law_of_samples_is_that_of_sampling(rng):
    study = ScreeningCost()
    tasks = [study._task(250, rng) for _ in range(48)]
    figures = [search(rng, task, lambda counts: chi_square(counts)[0][None])[0] for task in tasks]
    # one search scatters by 0.45 in the logarithm; five deviations of the mean, and two records for the law itself
    assert abs(np.log(figures).mean() - np.log(predict_screening(tasks[0]))) < 5 * 0.45 / 48**0.5 + 2 * np.log(1.12)


def test_the_law_grows_with_the_logarithm_of_the_length():
    study, rng = ScreeningCost(), np.random.default_rng(0)
    lengths = (250, 4000, 64_000, 1_024_000)
    needed = [predict_screening(study._task(length, rng)) for length in lengths]
    assert needed[2] / needed[0] < 2.5
    steps = np.diff(needed)  # equal steps of the logarithm, equal steps of the samples
    assert steps.max() / steps.min() < 1.1
    assert predict_screening(study._task(250, rng), 0.9) > needed[0]


def test_the_quick_sampler_draws_the_task(rng):
    task = draw_bigram_task(rng, 3, 6, 2)
    tokens, queries, targets = draw_uniform_batch(rng, task, 60_000)
    law = np.einsum("bm,ibm->bi", task.weights[queries], task.transition[:, _attended(tokens, queries, task)])
    gap = (np.eye(3)[targets] - law)[:, :, None] * np.eye(3)[tokens[:, 0]][:, None, :]
    assert np.abs(gap.sum(0)).max() < 5 * 60_000**0.5 * 0.5
    scores = np.zeros((1, 3, 6))
    np.put_along_axis(scores[0], task.positions, 1.0, 1)
    assert ranks_first(task, scores)[0]
    assert not ranks_first(task, -scores)[0]


def _attended(tokens, queries, task):
    return tokens[np.arange(len(tokens))[:, None], task.positions[queries]]


def test_samples_that_are_none_are_refused():
    tokens, few = np.array([[0, 1], [1, 1]]), np.array([0, 1])
    with pytest.raises(ShapeError, match=r"\(B, T\)"):
        screen(tokens, few[:1], few)
    with pytest.raises(UsageError, match="from 0 to 1: a vocabulary of 1"):
        screen(tokens, few, few, vocabulary=1)
    with pytest.raises(UsageError, match="all 2 targets are 0"):
        screen(tokens, few, np.zeros(2, int))
    with pytest.raises(UsageError, match="at least one sample"):
        screen(np.zeros((0, 2), int), few[:0], few[:0])
    with pytest.raises(UsageError, match="false_alarm=2"):
        screen(tokens, few, few, false_alarm=2)
