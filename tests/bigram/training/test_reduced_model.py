"""Simulators without positions against dense ones that know no shortcut."""

import numpy as np
import pytest
from scipy import stats

from manyheads.bigram.task import draw_task
from manyheads.bigram.theory.laws import balanced_settings, mirror_share
from manyheads.bigram.theory.noise import ValueNoise, attention_noise, row_coefficients
from manyheads.bigram.theory.population import excess, gradients, measure_overlaps
from manyheads.bigram.theory.signal import SignalSystem, predict_boost
from manyheads.bigram.training.proximal_sgd import Diverged, State, StepSettings
from manyheads.bigram.training.reduced_model import (
    ReducedState,
    descend_reduced,
    find_boost,
    flip_reduced,
    materialise,
    measure_reduced,
    start_reduced,
)
from manyheads.bigram.training.sparse_sgd import LazyState, descend_lazily, draw_places, forget_places, measure_lazy
from manyheads.errors import UsageError


def descend_densely(task, state, settings, steps, rng):
    """Exact gradients plus noise at every position, with a soft threshold that keeps no sum."""
    value, attention = state.value, np.array(state.attention, float)
    noise = ValueNoise(task, settings.batch)
    for _ in range(steps):
        rows, slope = row_coefficients(task, attention), gradients(task, value, attention)
        white = rng.standard_normal(attention.shape)
        white -= white.mean(1, keepdims=True)
        scatter = attention_noise(task, value, rows, settings.batch)[:, None] * white
        value = value - settings.value_rate * (slope.value + noise.draw(rng, value, rows))
        attention = attention - settings.attention_rate * (slope.attention + scatter)
        attention = attention - np.clip(attention, -settings.threshold, settings.threshold)
    return State(value, attention)


def test_the_reduced_chain_has_the_law_of_the_dense_one(rng):
    """Two-sample tests of both signals and the square norm; a correct chain fails once in 10^5."""
    task = draw_task(rng, 3, 12, 2)
    settings = balanced_settings(task, 4, noise_ratio=1.0)
    runs, steps = 250, 25
    reduced = measure_reduced(task, descend_reduced(task, start_reduced(task, runs), settings, steps, rng))
    empty = State(np.zeros((3, 3)), np.full((3, 12), 1 / 12))
    dense = [measure_overlaps(task, *descend_densely(task, empty, settings, steps, rng)) for _ in range(runs)]
    for name in ("value_signal", "attention_signal", "attention_energy", "value_energy"):
        found = stats.ks_2samp(getattr(reduced, name), [getattr(one, name) for one in dense])
        assert found.pvalue > 2.5e-6, name


def test_a_dense_state_is_what_the_reduced_one_says(rng):
    task = draw_task(rng, 4, 60, 3, uniform=False)
    state = descend_reduced(task, start_reduced(task, 3), balanced_settings(task, 8, noise_ratio=2.0), 60, rng)
    found, dense = measure_reduced(task, state), materialise(task, state, 1, rng)
    overlaps = measure_overlaps(task, *dense)
    assert dense.attention.sum(1) == pytest.approx(np.ones(4), abs=1e-5)
    for name in ("value_energy", "value_overlap", "attention_energy", "attention_signal"):
        assert getattr(overlaps, name) == pytest.approx(getattr(found, name)[1], rel=1e-4, abs=1e-6)
    assert excess(task, *dense) == pytest.approx(found.excess[1], rel=1e-4)
    # the same state again has other entries off the true positions, and the same norm
    again = materialise(task, state, 1, rng).attention
    assert np.abs(again - dense.attention).max() > 1e-3 * np.abs(again).max()


def test_reflection_keeps_products_and_sums(rng):
    task = draw_task(rng, 3, 60, 2)
    on_support = np.stack([1 / 60 + sign * (task.weights - 1 / 60) for sign in (1, -1)])
    state = ReducedState(np.stack([task.centred, -task.centred]), on_support, np.zeros((2, 3)))
    before, after = (measure_reduced(task, one) for one in (state, flip_reduced(task, state)))
    assert before.attention_signal == pytest.approx(np.array([1, -1]))
    assert after.attention_signal == pytest.approx(np.ones(2))
    assert after.value_signal == pytest.approx(np.ones(2))
    assert before.excess[1] == pytest.approx(2 * task.transition_energy / 60)
    assert after.excess[1] == pytest.approx(0, abs=1e-12)


def test_boosts_come_when_the_system_says_and_on_both_sides(rng):
    """Median time within a tenth, sides within six standard errors of 400 runs."""
    task = draw_task(rng, 3, 100_000, 2)
    batch = 20_000
    settings = balanced_settings(task, batch, noise_ratio=5.0)
    boost = find_boost(task, settings, 400, rng, most_steps=800)
    assert (boost.outcome == "boosted").all()
    system = SignalSystem.of(task, settings.value_rate, settings.attention_rate, batch)
    assert np.median(boost.steps[~boost.mirrored]) == pytest.approx(predict_boost(system), rel=0.1)
    share = mirror_share(task, 5.0)
    assert boost.mirrored.mean() == pytest.approx(share, abs=6 * (share / 400) ** 0.5)


def test_runs_that_do_not_boost_say_why(rng):
    task = draw_task(rng, 3, 1000, 2)
    budget = find_boost(task, balanced_settings(task, 64, noise_ratio=1.0), 3, rng, most_steps=2)
    assert budget.outcome.tolist() == ["budget"] * 3
    assert not budget.steps.any()
    wild = StepSettings(4, value_rate=50.0, attention_rate=50.0)
    assert (find_boost(task, wild, 3, rng, most_steps=200).outcome != "budget").all()
    with pytest.raises(Diverged, match="take smaller rates than 50"):
        descend_reduced(task, start_reduced(task, 3), wild, 300, rng)


def test_the_lazy_simulation_has_the_law_of_the_dense_one(rng):
    """Means over runs of energy, share alive and signal, within five standard errors."""
    task = draw_task(rng, 3, 400, 2)
    begin = State(0.6 * task.centred, 0.6 * task.attention)
    settings = StepSettings(
        256, 0.2, 0.5, strength=2.0 * (0.36 * task.transition_energy / 256) ** 0.5, constrained=False
    )
    lazy, dense = [], []
    for _ in range(40):
        found = descend_lazily(task, forget_places(task, begin), settings, 12, rng)
        lazy.append(measure_lazy(task, found))
        other = descend_densely(task, begin, settings, 12, rng)
        dense.append(measure_lazy(task, forget_places(task, other)))
        assert dense[-1].excess == pytest.approx(excess(task, *other))
    ours, theirs = np.array(lazy), np.array(dense)
    error = np.hypot(ours.std(0), theirs.std(0)) / 40**0.5
    assert (np.abs(ours.mean(0) - theirs.mean(0)) < 5 * error).all()
    assert 0.01 < theirs[:, 3].mean() < 0.5  # something lives, and not all


def test_places_come_and_go(rng):
    task = draw_task(rng, 3, 50, 2)
    lazy = LazyState(task.centred, task.weights, np.array([0.5, -0.25, 0.125]), np.array([0, 0, 2]))
    dense = draw_places(task, lazy, rng)
    again = forget_places(task, dense)
    assert np.sort(again.entries).tolist() == [-0.25, 0.125, 0.5]
    assert sorted(again.queries.tolist()) == [0, 0, 2]
    assert again.on_support == pytest.approx(task.weights, abs=1e-7)
    assert measure_lazy(task, lazy).attention_energy == pytest.approx(measure_overlaps(task, *dense).attention_energy)


def test_nonsense_is_refused(rng):
    task, short = draw_task(rng, 3, 50, 2), draw_task(rng, 3, 4, 2)
    with pytest.raises(UsageError, match="three others or more"):
        start_reduced(short, 1)
    with pytest.raises(UsageError, match="runs=0"):
        start_reduced(task, 0)
    with pytest.raises(UsageError, match="with a penalty"):
        descend_reduced(task, start_reduced(task, 1), StepSettings(8, 0.1, 0.1, strength=0.1), 1, rng)
    with pytest.raises(UsageError, match="run=1"):
        materialise(task, start_reduced(task, 1), 1, rng)
    with pytest.raises(UsageError, match="lives on a threshold"):
        descend_lazily(
            task, forget_places(task, State(task.centred, task.attention)), StepSettings(8, 0.1, 0.1), 1, rng
        )
    wild = StepSettings(8, 1e9, 0.1, strength=0.1, constrained=False)
    with pytest.raises(Diverged, match=r"in step 0: .* smaller rates than 1e\+09 and 0.1, .* a larger batch than 8"):
        descend_lazily(task, forget_places(task, State(task.centred, task.attention)), wild, 2, rng)
