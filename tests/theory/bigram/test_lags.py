"""Lags of a stream: every sum against loops, every minimization against another solver, planted lags found."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import nnls
from scipy.stats import binomtest

from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.theory.bigram import LagSettings, fit_lags, plant_lags
from manyheads.theory.bigram.lags.alternating_least_squares import (
    LagProblem,
    Minimum,
    alternate,
    attended,
    attention_sums,
    find_violation,
    list_chosen,
    solve_attention,
    solve_value,
    value_sums,
)
from manyheads.theory.bigram.lags.fit import Forecast, independence_test
from manyheads.theory.bigram.lags.pair_counts import PairCounts
from manyheads.theory.bigram.lags.streams import read_streams


def one_pass(problem):
    """Return the problem without tables of all pairs, whose sums are taken by one pass over the stream."""
    copy = replace(problem)
    copy.__dict__["all_pairs"] = None
    return copy


@pytest.fixture
def small(rng):
    sessions = [rng.integers(0, 4, size) for size in (60, 80)]
    data = read_streams(sessions, 5, [rng.integers(0, 4, len(session)) for session in sessions], 4)
    return LagProblem.of(data, 2.0)


def test_the_sums_of_a_round_are_those_of_loops(small, rng):
    data, value, attention = small.data, rng.normal(size=(4, 4)), rng.random((4, 5))
    one = np.eye(4)
    gram, correlation, second, cross = np.zeros((4, 5, 5)), np.zeros((4, 5)), np.zeros((4, 4)), np.zeros((4, 4))
    for window, query, target in zip(data.windows, data.queries, data.targets, strict=True):
        rest = one[target] - small.mean
        seen = value @ one[:, window]  # (4, 5)
        gram[query] += seen.T @ seen
        correlation[query] += seen.T @ rest
        hidden = one[:, window] @ attention[query]
        second += np.outer(hidden, hidden) / len(data)
        cross += np.outer(rest, hidden) / len(data)
    by_pass = one_pass(small)
    for source in (by_pass, small):  # by one pass, and from tables
        for found, exact in zip(attention_sums(source, value), (gram, correlation), strict=True):
            np.testing.assert_allclose(found, exact, atol=1e-11)
    for found in (value_sums(by_pass, attention), value_sums(small, attention)):
        np.testing.assert_allclose(found[0], second, atol=1e-12)
        np.testing.assert_allclose(found[1], cross, atol=1e-12)


def test_tables_of_some_lags_hold_the_sums_at_these_lags(small, rng):
    attention = np.where(rng.random((4, 5)) < 0.5, rng.random((4, 5)), 0.0)
    chosen = list_chosen(attention)
    used = np.take_along_axis(attention, chosen, 1) > 0
    tables, value, rows = PairCounts.of(small.data, chosen, used), rng.normal(size=(4, 4)), np.arange(4)[:, None]
    gram, correlation = attention_sums(one_pass(small), value)
    found = tables.attention_sums(value, small.mean)
    exact = gram[rows[:, :, None], chosen[:, :, None], chosen[:, None, :]] * used[:, :, None] * used[:, None, :]
    np.testing.assert_allclose(found[0], exact, atol=1e-11)
    np.testing.assert_allclose(found[1], correlation[rows, chosen] * used, atol=1e-11)
    weights = np.take_along_axis(attention, chosen, 1)
    for one, other in zip(tables.value_sums(weights, small.mean), value_sums(one_pass(small), attention), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
    np.testing.assert_array_equal(tables.spread(weights, 5), attention)


def test_sums_do_not_depend_on_the_blocks(small, rng, monkeypatch):
    value = rng.normal(size=(4, 4))
    by_pass = one_pass(small)
    before = attention_sums(by_pass, value)
    monkeypatch.setattr("manyheads.theory.bigram.lags.streams.BLOCK", 7)
    for found, exact in zip(attention_sums(by_pass, value), before, strict=True):
        np.testing.assert_allclose(found, exact, atol=1e-11)


def test_the_value_is_stationary_and_zero_where_the_penalty_is_too_large(small, rng):
    factor = rng.normal(size=(6, 4))
    second, cross = factor.T @ factor, rng.normal(size=(4, 4))
    cross -= cross.mean(0)  # as of any stream: targets less their frequencies
    root = np.linalg.pinv(small.covariance, hermitian=True, rcond=1e-9)
    largest = float(np.sum(cross * (root @ cross) / small.frequencies)) ** 0.5
    for load in (0.1 * largest, 0.9 * largest):
        value = solve_value(second, cross, small, load)
        penalty_gradient = load * small.covariance @ value * small.frequencies / small.norm(value)
        np.testing.assert_allclose(value @ second + penalty_gradient, cross, atol=1e-7 * largest)
    assert not solve_value(second, cross, small, 1.01 * largest).any()
    np.testing.assert_allclose(solve_value(second, cross, small, 0.0) @ second, cross, rtol=1e-3, atol=1e-3)


def test_the_lasso_is_solved_exactly_where_lags_say_almost_the_same(rng):
    factors = rng.normal(size=(40, 30, 1)) + 1e-3 * rng.normal(size=(40, 30, 12))
    gram, correlation = (
        np.einsum("kna,knb->kab", factors, factors),
        np.einsum("kna->ka", factors) + rng.normal(size=(40, 12)),
    )
    found = solve_attention(gram, correlation, np.full(40, 0.1), np.zeros((40, 12)))
    free = rng.random((40, 12)) < 0.5
    part = solve_attention(gram, correlation, np.full(40, 0.1), found, free)
    assert not part[~free].any()

    def level(weights):
        return 0.5 * np.einsum("ka,kab,kb->k", weights, gram, weights) - ((correlation - 0.1) * weights).sum(1)

    for query in range(40):
        upper = np.linalg.cholesky(gram[query] + 1e-12 * np.trace(gram[query]) * np.eye(12)).T
        exact, _ = nnls(upper, np.linalg.solve(upper.T, correlation[query] - 0.1))
        assert level(found)[query] <= level(exact[None])[query] + 1e-5 * abs(level(exact[None])[query])


def test_the_lasso_agrees_with_active_sets(rng):
    factors = rng.normal(size=(3, 12, 6))
    gram, correlation, penalty = np.einsum("kna,knb->kab", factors, factors), 5 * rng.normal(size=(3, 6)), rng.random(3)
    found = solve_attention(gram, correlation, penalty, np.zeros((3, 6)))
    for query in range(3):
        upper = np.linalg.cholesky(gram[query]).T
        exact, _ = nnls(upper, np.linalg.solve(upper.T, correlation[query] - penalty[query]))
        np.testing.assert_allclose(found[query], exact, atol=1e-6)
    assert find_violation(gram, correlation, penalty, found) < 1e-6
    assert find_violation(gram, correlation, penalty, found + 0.1) > 1e-2


def test_the_objective_never_rises_and_its_end_is_certified(rng):
    stream = np.cumsum(rng.integers(0, 2, 4000)) % 5  # each symbol is the one before or the next
    table = rng.dirichlet(np.full(5, 0.3), size=5).T
    lags = np.stack([rng.choice(np.arange(1, 10), 2, replace=False) for _ in range(5)])
    targets = plant_lags(rng, stream, table, lags, np.full((5, 2), 0.5))
    problem = LagProblem.of(read_streams(stream, 10, targets, 5), None)
    init = solve_value(*value_sums(one_pass(problem), np.full((5, 10), 0.1)), problem, 0.0)
    done = alternate(problem, init, 100, 0.01)
    assert done.violation <= 0.01
    assert (np.diff(done.objective) <= 1e-12).all()
    assert np.isclose(problem.shares @ done.attention.sum(1), 1)
    # F and the certificate from their definitions, sample by sample
    data = problem.data
    errors = problem.mean + attended(data, done.attention) @ done.value.T - np.eye(5)[data.targets]
    size = np.einsum("x,yx,yz,zx", problem.frequencies, done.value, problem.covariance, done.value) ** 0.5
    penalty = problem.strength * size * np.sqrt(problem.counts)
    level = 0.5 * (errors**2).sum(1).mean() + penalty @ done.attention.sum(1) / len(data)
    assert done.objective[-1] == pytest.approx(level, rel=1e-9)
    assert find_violation(*attention_sums(one_pass(problem), done.value), penalty, done.attention) <= 0.01


@pytest.mark.parametrize("seed", [0, 4])
def test_a_periodic_stream_is_explained_by_its_period(seed):
    rng = np.random.default_rng(seed)
    period = np.tile(rng.permutation(10)[:8], 1000)
    changed = rng.random(len(period)) < 0.15
    fit = fit_lags(np.where(changed, rng.integers(0, 10, len(period)), period), 24)
    assert sorted(np.argsort(-fit.importance)[:3].tolist()) == [7, 15, 23]
    assert fit.importance[[7, 15, 23]].sum() > 0.99
    assert fit.better_than_unigram
    assert "no better" not in repr(fit)


def copies(rng, stream, lags, weights, tables):
    """Draw targets from a mixture of lags, each with its own table (lags, N, N), row the symbol that is looked up."""
    picked = rng.choice(len(lags), len(stream), p=weights)
    steps = np.cumsum(tables, 2)[picked, stream[np.arange(len(stream)) - np.asarray(lags)[picked]]]
    return np.minimum((rng.random(len(stream))[:, None] >= steps).sum(1), tables.shape[1] - 1)


def test_lags_with_tables_of_their_own_are_found_and_said(rng):
    stream = rng.integers(0, 6, 9000)
    truth = np.array([3, 7, 1, 9, 5, 2])
    orders = np.stack([rng.permutation(6) for _ in range(10)])
    looked_up = orders[truth[stream], stream[np.arange(9000) - truth[stream]]]
    targets = np.where(rng.random(9000) < 0.8, looked_up, rng.integers(0, 6, 9000))
    with pytest.warns(UserWarning, match="one transition table for all lags is rejected"):
        fit = fit_lags(stream, 12, targets=targets)
    assert fit.top(1).ravel().tolist() == truth.tolist()
    assert ((fit.weights > 0).sum(1) == 1).all()
    assert "rejected: lags have tables of their own" in repr(fit)
    mixed = copies(rng, stream, [2, 5, 11], [0.4, 0.3, 0.3], rng.dirichlet(np.full(6, 0.3), size=(3, 6)))
    with pytest.warns(UserWarning, match="rejected"):
        fit = fit_lags(stream, 16, targets=mixed)
    assert np.flatnonzero(fit.importance).tolist() == [2, 5, 11]
    assert fit.loss.additive < fit.loss.fitted  # the baseline sees lag 11
    assert fit.loss.short == (2, 5, 11)
    assert fit.table.left not in (2, 5, 11)
    assert fit.table.left_pvalue > 0.005


def test_a_markov_background_adds_no_lags():
    """A chain with a copy from 34 steps back: the lasso returned 12 lags a symbol."""
    rng = np.random.default_rng(6)
    steps, stream = np.cumsum(rng.dirichlet(np.full(4, 0.5), size=4), 1), rng.integers(0, 4, 9000)
    for place, draw in enumerate(rng.random((9000, 2))):
        if place > 40:
            before, copied = stream[place - 1], stream[place - 35]
            stream[place] = copied if draw[0] < 0.35 else min(3, np.searchsorted(steps[before], draw[1]))
    with pytest.warns(UserWarning, match="lag 0"):
        fit = fit_lags(stream, 64)
    assert [[lag for lag, _ in fit.lags_of(symbol) if lag] for symbol in range(4)] == [[34]] * 4
    sticky = stream[np.maximum.accumulate(np.where(rng.random(9000) < 0.2, np.arange(9000), 0))]
    table = 0.7 * np.eye(4)[[2, 0, 3, 1]] + 0.3 / 4
    fit = fit_lags(sticky, 64, targets=plant_lags(rng, sticky, table, [[50], [3], [20], [20]], np.ones((4, 1))) % 4)
    assert fit.own is None
    assert [[lag for lag, _ in fit.lags_of(symbol)] for symbol in range(4)] == [[50], [3], [20], [20]]


def test_neighbours_that_depend_early_in_the_stream_are_not_called_independent(rng):
    stream = rng.integers(0, 5, 6000)
    part = slice(0, 4000)  # the last fifth is independent
    stream[part] = np.where(rng.random(4000) < 0.12, np.roll(stream[part], 1), stream[part])
    with pytest.warns(UserWarning, match="rejected"):
        fit = fit_lags(stream, 6)
    assert fit.pvalue < 1e-4
    assert np.flatnonzero(fit.importance).tolist() == [0]


def test_independent_chains_have_no_lags(rng):
    """Targets that depend on each other but not on the stream: chi-square tests of single lags are misled."""
    for _ in range(6):
        changes = rng.random((2, 3000)) < 0.1
        places = np.maximum.accumulate(np.where(changes, np.arange(3000), 0), axis=1)
        stream, targets = np.take_along_axis(rng.integers(0, 4, (2, 3000)), places, 1)
        with pytest.raises(CertificateError, match="no better than unigram"):
            fit_lags(stream, 6, targets=targets)


def test_noise_has_no_lags():
    found = 0
    for seed in range(10):  # without a test, 85 in 100 such streams had some
        rng = np.random.default_rng([10, seed])
        with suppress(CertificateError):
            fit_lags(rng.integers(0, 4 if seed % 2 else 8, 3000), 6)
            found += 1
    assert found <= 1  # two at half a per cent each: one in a thousand


def test_what_no_single_lag_shows_is_no_better_than_unigram(rng):
    stream = rng.integers(0, 2, 6000)
    with pytest.raises(CertificateError, match="no better than unigram"):
        fit_lags(stream, 6, targets=np.roll(stream, 1) ^ np.roll(stream, 4))


@pytest.mark.parametrize("own", [True, False])
def test_pvalues_of_independent_symbols_are_uniform_where_few_samples_meet_many_symbols(rng, own):
    """Permutations keep the frequencies: a symbol just seen is rarer among the rest, which looks like a dependence."""
    value, attention = -np.eye(40), np.full((40, 12), 1 / 12)
    found = []
    for _ in range(150):
        stream = rng.integers(0, 40, 112)
        data = read_streams(stream, 12, None if own else rng.integers(0, 40, 112), 40)
        forecast = Forecast.of(data, 11, Minimum(attention, value, (), 0.0))
        found.append(independence_test(forecast, own, 0.1, rng))
    for level in (0.1, 0.3):
        assert binomtest(sum(one <= level for one in found), len(found), level, "greater").pvalue > 1e-4


def test_the_variance_over_rotations_is_that_of_a_loop(rng):
    stream, targets = (np.cumsum(rng.random(200) < 0.1) % 3 for _ in range(2))  # long runs
    data = read_streams(stream, 3, targets, 3)
    fit = Minimum(rng.random((3, 3)), rng.normal(size=(3, 3)), (), 0.0)
    forecast = Forecast.of(data, 50, fit)
    block = forecast.data
    turns = [forecast.statistic(replace(block, targets=np.roll(block.targets, k))) for k in range(1, len(block))]
    assert forecast.rotated_variance() == pytest.approx(np.mean(np.square(turns)), rel=1e-9)
    orders = [forecast.statistic(forecast.permuted(rng, own=False)) for _ in range(500)]
    assert np.var(turns) > 2 * np.var(orders)
    errors = np.eye(3)[block.targets] - np.bincount(block.targets) / len(block)
    exact = np.vdot(errors, attended(block, fit.attention) @ fit.value.T)
    assert forecast.statistic(block) == pytest.approx(exact, rel=1e-9)


def test_labels_are_of_any_type(rng):
    numbers = rng.integers(0, 3, 2500)
    targets = np.roll(numbers, 2)
    plain = fit_lags(numbers, 4, targets=targets)
    assert plain.lags_of(1)[0][0] == 2
    for labels in (np.array(["get", "put", "del"]), np.array([10**9, -5, 7]), np.array([2.5, -1.0, 0.1])):
        order = np.argsort(labels)
        fit = fit_lags(labels[numbers], 4, targets=labels[targets])
        assert fit.labels.tolist() == labels[order].tolist()
        np.testing.assert_allclose(fit.attention, plain.attention[order], atol=1e-6)
        assert fit.lags_of(labels[1])[0][0] == 2
        window = labels[numbers[:8]].reshape(2, 4)
        expected = plain.predict(numbers[:8].reshape(2, 4))[:, order]
        np.testing.assert_allclose(fit.predict(window), expected, atol=1e-6)
        with pytest.raises(UsageError, match="none of the 3 symbols"):
            fit.lags_of("other")
    names = ["x", 2.5, 3]
    mixed = fit_lags([names[number] for number in numbers], 4, targets=[names[number] for number in targets])
    assert set(mixed.labels.tolist()) == set(names)
    assert mixed.lags_of(2.5)[0][0] == 2
    letters = fit_lags("".join("abc"[number] for number in numbers), 4, targets="".join("abc"[n] for n in targets))
    np.testing.assert_allclose(letters.attention, plain.attention, atol=1e-12)


def test_planted_lags_are_found_on_real_text(rng):
    pytest.importorskip("jax")
    from manyheads.studies.bigram.lags import prepare

    vocabulary, tokens, table = prepare(None, 32)
    size, lags = len(vocabulary), 32
    begin = int(rng.integers(len(tokens) - 25_100))
    stream = tokens[begin : begin + 25_033]  # 20,000 samples to fit
    places = np.stack([np.sort(rng.choice(np.arange(1, lags), 2, replace=False)) for _ in range(size)])
    weights = rng.dirichlet(np.full(2, 20.0), size=size)
    targets = plant_lags(rng, stream, table, places, weights)
    fit = fit_lags(stream, lags, targets=targets, vocabulary=size)
    hits = (fit.top(2)[:, :, None] == places[:, None, :]).any(1).mean(1)
    assert fit.counts @ hits / fit.counts.sum() > 0.95  # 98% in the mean of seeds: acceptance lane
    assert fit.loss.fitted < min(fit.loss.unigram, fit.loss.bigram, fit.loss.additive)
    window = read_streams(stream, lags, targets, size).windows[:50]
    law = fit.predict(window)
    np.testing.assert_allclose(law.sum(1), 1, atol=1e-9)
    assert len(fit.lags_of(1)) == (fit.attention[1] > 0).sum()


def test_what_depends_on_nothing_is_refused_with_the_figure(rng):
    stream = rng.integers(0, 4, 1500)
    with pytest.raises(CertificateError, match="no lag stands out from the noise of 1197 samples"):
        fit_lags(stream, 4, settings=LagSettings(strength=6.0))


def test_too_little_is_refused(rng):
    with pytest.raises(UsageError, match="give a longer stream"):
        fit_lags(rng.integers(0, 30, 31), 2, vocabulary=30)
    with pytest.raises(UsageError, match="held_out"):
        LagSettings(held_out=1.0)
    with pytest.raises(UsageError, match="strength"):
        LagSettings(strength=-1.0)
    stream = rng.integers(0, 3, 3000)
    with pytest.raises(CertificateError, match="did not converge in 1 rounds"):
        fit_lags(stream, 3, targets=np.roll(stream, 1), settings=LagSettings(iterations=1))
    fit = fit_lags(stream, 3, targets=np.roll(stream, 1))
    assert fit.top(1).ravel().tolist() == [1, 1, 1]
    with pytest.raises(ShapeError, match="lag 0 first"):
        fit.predict(stream[:4])


def test_no_lag_is_called_rejected_where_all_are_chosen(rng):
    stream = rng.integers(0, 3, 2000)
    fit = fit_lags(stream, 1, targets=np.where(rng.random(2000) < 0.5, (stream + 1) % 3, stream))
    assert fit.importance == pytest.approx([1.0])
    assert "rejected lag" not in repr(fit)
    assert fit.to_dataframe()["lag"].unique().tolist() == [0]
