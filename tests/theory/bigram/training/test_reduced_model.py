"""The reduced model against dense training with Gaussian noise, and against the signal system."""

import numpy as np
import pytest
from scipy import stats
from tests.theory.bigram.theorems.test_gradient_noise import row_coefficients

from manyheads.errors import UsageError
from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.theorems.gradient_noise import ValueNoise, attention_noise
from manyheads.theory.bigram.theorems.population import gradients, measure_overlaps
from manyheads.theory.bigram.theorems.signal import SignalSystem, predict_escape
from manyheads.theory.bigram.training.proximal_sgd import State, StepSettings
from manyheads.theory.bigram.training.reduced_model import ReducedChain, find_escape, initial_runs, measure_reduced
from manyheads.theory.bigram.training.settings import balanced_settings


def descend_densely(task, state, settings, steps, rng):
    """Exact gradients plus noise at every position, without a penalty."""
    value, attention = state.value, np.array(state.attention, float)
    noise = ValueNoise(task, settings.batch)
    for _ in range(steps):
        rows, slope = row_coefficients(task, attention), gradients(task, value, attention)
        white = rng.standard_normal(attention.shape)
        white -= white.mean(1, keepdims=True)
        scatter = attention_noise(task, value, rows, settings.batch)[:, None] * white
        value = value - settings.value_learning_rate * (slope.value + noise.draw(rng, value, rows))
        attention = attention - settings.attention_learning_rate * (slope.attention + scatter)
    return State(value, attention)


@pytest.mark.slow
def test_the_reduced_chain_has_the_law_of_the_dense_one(rng):
    """Two-sample tests of both signals and the square norm; a correct chain fails once in 10^5."""
    task = draw_bigram_task(rng, 3, 12, 2)
    settings = balanced_settings(task, 4, noise_ratio=1.0)
    steps = 25
    chain, state = ReducedChain(task, settings), initial_runs(task, 3000)
    for _ in range(steps):
        state = chain.step(rng, state)
    reduced = measure_reduced(task, state)
    empty = State(np.zeros((3, 3)), np.full((3, 12), 1 / 12))
    dense = [measure_overlaps(task, *descend_densely(task, empty, settings, steps, rng)) for _ in range(100)]
    for name in ("value_signal", "attention_signal", "attention_squared_norm", "value_squared_norm"):
        found = stats.ks_2samp(getattr(reduced, name), [getattr(one, name) for one in dense])
        assert found.pvalue > 2.5e-6, name


def test_plateau_escapes_and_flips_are_those_of_the_signal_system(rng):
    """Median time within a tenth, share of flips within six standard errors of 400 runs."""
    task = draw_bigram_task(rng, 3, 100_000, 2)
    batch = 20_000
    settings = balanced_settings(task, batch, noise_ratio=5.0)
    escape = find_escape(task, settings, 400, rng, most_steps=800)
    assert (escape.outcome == "escaped").all()
    system = SignalSystem.of(task, settings.value_learning_rate, settings.attention_learning_rate, batch)
    assert np.median(escape.steps[~escape.flipped]) == pytest.approx(predict_escape(system), rel=0.1)
    share = system.flip_probability
    assert escape.flipped.mean() == pytest.approx(share, abs=6 * (share / 400) ** 0.5)


def test_runs_without_escape_have_an_outcome(rng):
    task = draw_bigram_task(rng, 3, 1000, 2)
    budget = find_escape(task, balanced_settings(task, 64, noise_ratio=1.0), 3, rng, most_steps=2)
    assert budget.outcome.tolist() == ["budget"] * 3
    assert not budget.steps.any()
    wild = StepSettings(4, value_learning_rate=50.0, attention_learning_rate=50.0)
    assert (find_escape(task, wild, 3, rng, most_steps=200).outcome != "budget").all()


def test_nonsense_is_refused(rng):
    task, short = draw_bigram_task(rng, 3, 50, 2), draw_bigram_task(rng, 3, 4, 2)
    with pytest.raises(UsageError, match="three others or more"):
        initial_runs(short, 1)
    with pytest.raises(UsageError, match="runs=0"):
        initial_runs(task, 0)
    with pytest.raises(UsageError, match="with a penalty"):
        find_escape(task, StepSettings(8, 0.1, 0.1, penalty=0.1), 1, rng, most_steps=1)
