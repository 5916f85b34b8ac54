"""Tests of lags against contingency tables, regressions on dense matrices, and distributions of SciPy."""

import numpy as np
import pytest
from scipy import stats

from manyheads.theory.bigram import plant_lags
from manyheads.theory.bigram.lags.alternating_least_squares import LagProblem
from manyheads.theory.bigram.lags.fit import eliminate
from manyheads.theory.bigram.lags.forward_selection import (
    Scores,
    _pillai_trace,
    merge_levels,
    select_lags,
    wilson_hilferty,
)
from manyheads.theory.bigram.lags.held_out import RIDGE, Additive, measure_losses
from manyheads.theory.bigram.lags.shared_table import check_shared_table
from manyheads.theory.bigram.lags.streams import lag_information, read_streams

SIZE, LAGS = 3, 4
TABLE = 0.7 * np.eye(SIZE)[[1, 2, 0]] + 0.1  # of answer and symbol: no symmetry hides a transpose


@pytest.fixture
def data(rng):
    """A sticky stream, whose targets depend on lags 1 and 3, in two ways."""
    stream = rng.integers(0, SIZE, 6000)
    stream = stream[np.maximum.accumulate(np.where(rng.random(6000) < 0.6, np.arange(6000), 0))]
    targets = np.where(rng.random(6000) < 0.3, np.roll(stream, 1), rng.integers(0, SIZE, 6000))
    targets = np.where(rng.random(6000) < 0.2, (np.roll(stream, 3) + 1) % SIZE, targets)
    return read_streams(stream, LAGS, targets, SIZE)


def groups_of(data, count):
    return np.arange(len(data)) * 7 % count


def residuals(rows, beside):
    """Return what a regression on the columns of `beside` and a constant leaves of the rows."""
    design = np.column_stack([np.ones(len(rows)), beside])
    return rows - design @ np.linalg.lstsq(design, rows, rcond=None)[0]


def trace(targets, symbols):
    """Return Pillai's trace of centred rows."""
    cross = targets.T @ symbols
    inverses = (np.linalg.pinv(rows.T @ rows, hermitian=True, rcond=1e-9) for rows in (targets, symbols))
    left, right = inverses
    return np.trace(left @ cross @ right @ cross.T)


def test_the_statistic_of_a_lag_is_that_of_its_contingency_table(data):
    groups = groups_of(data, 2)
    tables = Scores(data, groups, np.arange(SIZE))
    scores, excess = tables.score_groups()
    for group in range(2):
        part = groups == group
        for lag in range(LAGS):
            counts = np.histogram2d(data.targets[part], data.windows[part, lag], SIZE)[0]
            exact = stats.chi2_contingency(counts, correction=False)
            assert excess[group, lag] + exact.dof == pytest.approx(exact.statistic, rel=0.01)
            expected = wilson_hilferty(np.array(exact.statistic), np.array(exact.dof), 0.0)
            assert scores[group, lag] == pytest.approx(expected, rel=0.01, abs=0.02)


def test_one_matrix_for_all_groups_is_tested_within_them(data):
    groups, one = groups_of(data, 2), np.eye(SIZE)
    targets, symbols = one[data.targets], one[data.windows]
    for group in range(2):
        part = groups == group
        targets[part] -= targets[part].mean(0)
        symbols[part] -= symbols[part].mean(0)
    excess = Scores(data, groups, np.arange(SIZE)).score_pooled()[1]
    for lag in range(LAGS):
        exact = len(data) * trace(targets, symbols[:, lag])
        assert excess[lag] + (SIZE - 1) ** 2 == pytest.approx(exact, rel=0.01)


def test_conditioning_is_regression_on_the_lags_before(data):
    groups, one = groups_of(data, 2), np.eye(SIZE)
    tables = Scores(data, groups, np.arange(SIZE))
    bits = [tables.condition(1, lag) for lag in (1, 3)]
    part = groups == 1
    targets, symbols = one[data.targets[part]], one[data.windows[part]]
    known = np.concatenate([symbols[:, 1, 1:], symbols[:, 3, 1:]], 1)
    assert tables.residual_dof().tolist() == [len(part) - part.sum() - 1, part.sum() - 1 - 2 * (SIZE - 1)]
    _, excess = tables.score_groups()
    for lag in (0, 2):
        exact = tables.residual_dof()[1] * trace(residuals(targets, known), residuals(symbols[:, lag], known))
        assert excess[1, lag] + (SIZE - 1) ** 2 == pytest.approx(exact, rel=0.02, abs=0.02)
    assert not tables.free[1, [1, 3]].any()
    assert tables.free[0].all()
    first = symbols[:, 1, 1:]
    exact = part.sum() * trace(residuals(targets, first), residuals(symbols[:, 3], first)) - (SIZE - 1) ** 2
    assert bits[1] == pytest.approx(exact / (2 * np.log(2) * part.sum()), rel=0.02)


def test_information_is_mutual_information_where_the_dependence_is_weak(rng):
    stream = rng.integers(0, SIZE, 40_000)
    targets = np.where(rng.random(40_000) < 0.08, np.roll(stream, 2), rng.integers(0, SIZE, 40_000))
    data = read_streams(stream, LAGS, targets, SIZE)
    found = select_lags(data, 0.001)
    bias = (SIZE - 1) ** 2 / (2 * np.log(2) * len(data))
    assert found.order == (2,)
    assert found.information[0, 2] == pytest.approx(lag_information(stream, LAGS, targets=targets)[2] - bias, rel=0.1)


def test_a_multiple_of_a_direction_is_left_out_as_the_best_one(rng):
    cross, direction = rng.normal(size=(2, SIZE, SIZE))
    within, targets = (10 * np.eye(SIZE) + each @ each.T for each in rng.normal(size=(2, SIZE, SIZE)))
    at = [float(_pillai_trace(cross - c * direction, within, targets)[0]) for c in (-1, 0, 1)]
    linear, square = (at[2] - at[0]) / 2, (at[2] + at[0]) / 2 - at[1]
    (whole, dof), (found, less) = (_pillai_trace(cross, within, targets, each) for each in (None, direction))
    assert found == pytest.approx(at[1] - linear**2 / (4 * square), rel=1e-9)
    assert (whole, less) == (pytest.approx(at[1]), dof - 1)


def test_the_present_symbol_is_tested_by_its_contingency_table(data):
    one = np.eye(SIZE)[data.targets]
    tables = Scores(data, data.queries, np.arange(SIZE), one - one.mean(0))
    plain = Scores(data, data.queries, np.arange(SIZE))
    np.testing.assert_allclose(tables.cross, plain.cross, atol=1e-8)
    np.testing.assert_allclose(tables.targets, plain.targets, atol=1e-8)
    exact = stats.chi2_contingency(np.histogram2d(data.queries, data.targets, SIZE)[0], correction=False)
    excess = tables.score_present(np.zeros((SIZE, SIZE)))[1]
    assert excess + SIZE * (SIZE - 1) == pytest.approx(exact.statistic, rel=0.1)  # variance within groups, not in all
    # errors that are multiples of the columns of W are no evidence
    value = TABLE - TABLE.mean(0)
    tables.means = np.array([0.2, -0.1, 0.3])[:, None] * value.T
    assert tables.score_present(value)[1] == pytest.approx(-SIZE * (SIZE - 2))


@pytest.mark.parametrize(("dof", "uneven"), [(4, 0.0), (20, 0.0), (20, 0.7)])
def test_scores_have_the_tail_of_chi_square(dof, uneven):
    """With a larger variance: of the multiple of a chi-square variable that has this mean and variance."""
    for pvalue in (0.3, 1e-2, 1e-4):
        statistic = stats.chi2.isf(pvalue, dof / (1 + uneven)) * (1 + uneven)
        found = wilson_hilferty(np.array(statistic), np.array(dof), uneven)
        assert found == pytest.approx(stats.norm.isf(pvalue), abs=0.1)


def test_gaps_are_no_symbols(rng):
    stream = rng.integers(0, 12, 3000).astype(float)
    gaps = rng.random(3000) < 0.7
    data = read_streams(np.where(gaps, np.nan, stream), 1, rng.integers(0, 2, 3000), 12)
    assert data.occurrences.tolist() == np.bincount(stream[~gaps].astype(int), minlength=12).tolist()
    assert merge_levels(data, 12).max() == merge_levels(read_streams(stream[~gaps], 1, data.targets, 12), 12).max()


@pytest.mark.parametrize("strength", [0.3, 0.7, 1.5, 3.0, 5.0])
def test_elimination_is_that_of_least_squares_on_dense_matrices(data, rng, strength):
    data = data.part(0, 2000)
    problem, value, one = LagProblem.of(data, strength), (TABLE - TABLE.mean(0)).T, np.eye(SIZE)
    attention = 0.1 + rng.random((SIZE, LAGS))
    rest = one[data.targets] - problem.mean
    # variance of the noise: of the product with an independent target, in units of the squared column
    products = (value.T @ (one - problem.mean).T) ** 2  # (symbol, target)
    target = np.bincount(data.targets, minlength=SIZE) / len(data)
    noise = problem.frequencies @ (products @ target) / (problem.frequencies @ (value**2).sum(0))
    expected = np.zeros((SIZE, LAGS), bool)
    for query in range(SIZE):
        part, kept = data.queries == query, list(range(LAGS))
        while kept:
            design = np.stack([value.T[data.windows[part, lag]].ravel() for lag in kept], 1)
            fitted = np.linalg.lstsq(design, rest[part].ravel(), rcond=None)[0]
            scores = fitted / np.sqrt(noise * np.diag(np.linalg.inv(design.T @ design)))
            if scores.min() >= problem.strength:
                break
            kept.pop(int(scores.argmin()))
        expected[query, kept] = True
    np.testing.assert_array_equal(eliminate(problem, value, attention), expected)


def test_a_wrong_weight_does_not_contradict_a_shared_table_and_another_table_does(rng):
    stream = rng.integers(0, SIZE, 6000)
    lags, value = np.array([[1], [3], [2]]), TABLE - TABLE.mean(0)
    targets = plant_lags(rng, stream, TABLE, lags, np.ones((SIZE, 1))) % SIZE
    data, mean = read_streams(stream, LAGS, targets, SIZE), np.bincount(targets, minlength=SIZE) / 6000
    attention = np.zeros((SIZE, LAGS))
    np.put_along_axis(attention, lags, 1.0, 1)
    right, half = check_shared_table(data, value, attention, mean), check_shared_table(data, value, attention / 2, mean)
    assert min(right.pvalue, half.pvalue) > 1e-3
    assert right.share < 0.02
    other = check_shared_table(data, value.T, attention, mean)
    assert other.rejected(1e-6)
    assert other.lag in (1, 2, 3)
    missed = check_shared_table(data, value, attention * [1, 1, 1, 0], mean)
    assert missed.pvalue > 1e-3
    assert (missed.left, missed.left_pvalue < 1e-6) == (3, True)


def test_separate_tables_add_the_share_of_information_that_was_planted(rng):
    """Of the table of symbol 1, the transpose, a quarter is a multiple of W; symbol 2 is independent."""
    stream, noise = rng.integers(0, SIZE, (2, 40_000))
    before, weak = np.roll(stream, 1), rng.random(40_000) < 0.2
    turned = np.where(stream == 0, (before - 1) % SIZE, (before + 1) % SIZE)
    data = read_streams(stream, 2, np.where(weak & (stream < 2), turned, noise), SIZE)
    value, attention = 0.2 * (np.eye(SIZE)[[1, 2, 0]] - 1 / SIZE), np.zeros((SIZE, 2))
    attention[0, 1] = 1.0
    found = check_shared_table(data, value, attention, np.full(SIZE, 1 / SIZE))
    assert found.share == pytest.approx(3 / 7, rel=0.15)
    assert (found.rejected(1e-3), found.lag) == (True, 1)


def test_losses_are_those_of_loops_and_ridge_regressions(data):
    earlier, later = data.split(0.2)
    mean, one = np.bincount(earlier.targets, minlength=SIZE) / len(earlier), np.eye(SIZE)
    additive, order = Additive.fit(earlier, mean, [1, 3, 0]), [1, 3, 0]
    value, attention = TABLE - TABLE.mean(0), np.full((SIZE, LAGS), 0.2)
    found = measure_losses(earlier, later, value, attention, additive, 3)

    def errors(predict):
        rows = zip(later.windows, later.targets, strict=True)
        return np.array([0.5 * ((predict(window) - one[target]) ** 2).sum() for window, target in rows])

    losses = []
    for count in (1, 2, 3):
        design = one[earlier.windows[:, order[:count]]].reshape(len(earlier), -1)
        stacked = np.vstack([design, RIDGE**0.5 * np.eye(count * SIZE)])
        rest = np.vstack([one[earlier.targets] - mean, np.zeros((count * SIZE, SIZE))])
        exact = np.linalg.lstsq(stacked, rest, rcond=None)[0]
        matrices = additive.matrices(count)
        np.testing.assert_allclose(matrices.transpose(0, 2, 1).reshape(-1, SIZE), exact, atol=1e-9)
        losses.append(errors(lambda window, each=exact, n=count: mean + one[window[order[:n]]].ravel() @ each))
    fitted = errors(lambda window: mean + value @ (0.2 * one[window].sum(0)))
    assert found.fitted == pytest.approx(fitted.mean())
    assert found.unigram == pytest.approx(errors(lambda window: mean).mean())
    assert found.additive == pytest.approx(min(each.mean() for each in losses))
    every = [fitted, *losses]
    best = min(every, key=np.mean)
    allowed = [max(np.std(each - best) / len(later) ** 0.5, 0.05 * (found.unigram - best.mean())) for each in losses]
    enough = [np.mean(each - best) <= most for each, most in zip(losses, allowed, strict=True)]
    assert found.short == tuple(sorted(order[: enough.index(True) + 1]))
    assert found.short_loss == pytest.approx(losses[enough.index(True)].mean())
