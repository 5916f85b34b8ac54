"""Laws of sample sizes against the systems that they summarize and against draws from the task."""

import numpy as np
import pytest
from scipy.stats import norm
from tests.theory.bigram.theorems.test_gradient_noise import row_coefficients

from manyheads.errors import UsageError
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems.gradient_noise import ValueNoise
from manyheads.theory.bigram.theorems.population import excess
from manyheads.theory.bigram.theorems.sample_complexity import refit_excess, stage_one_samples
from manyheads.theory.bigram.theorems.signal import SignalSystem, predict_escape
from manyheads.theory.bigram.training.proximal_sgd import State
from manyheads.theory.bigram.training.rounding import refit_jointly, sample_support
from manyheads.theory.bigram.training.settings import balanced_settings


def test_the_rates_make_the_growth_that_the_ratio_asks_for(rng):
    task = draw_bigram_task(rng, 4, 5000, 3)
    settings = balanced_settings(task, 32, noise_ratio=5.0)
    system = SignalSystem.of(task, settings.value_learning_rate, settings.attention_learning_rate, 32)
    assert system.noise_ratio == pytest.approx(5.0)
    assert system.value_learning_rate * task.attention_squared_norm == pytest.approx(system.growth)


def test_the_law_of_stage_one_is_the_system_within_a_fifth(rng):
    for length in (1000, 100_000):
        task = draw_bigram_task(rng, 3, length, 2)
        for ratio in (2.0, 4.0, 8.0):
            settings = balanced_settings(task, 16, noise_ratio=ratio)
            steps = predict_escape(
                SignalSystem.of(task, settings.value_learning_rate, settings.attention_learning_rate, 16)
            )
            assert 0.75 < 16 * steps / stage_one_samples(task, ratio) < 1.2


def test_the_flip_probability_follows_from_the_noise_of_the_first_step(rng):
    """Draw the gradient noise of untrained weights and sum it as the growing mode does."""
    task = draw_bigram_task(rng, 3, 1000, 2)
    settings = balanced_settings(task, 20, noise_ratio=6.0)
    growth = settings.attention_learning_rate * task.transition_squared_norm
    rows = row_coefficients(task, np.full((3, 1000), 1 / 1000))
    drawn = ValueNoise(task, 20).draw(
        rng, np.zeros((20_000, 3, 3)), type(rows)(*(np.broadcast_to(part, (20_000, 3)) for part in rows))
    )
    along = (drawn * task.centred).sum(1) @ task.stationary / task.transition_squared_norm
    spread = settings.value_learning_rate * along.std() / (2 * growth) ** 0.5  # sum of e^{-2 growth s} over steps
    drift = 1 / (1000 * task.attention_squared_norm)
    system = SignalSystem.of(task, settings.value_learning_rate, settings.attention_learning_rate, 20)
    assert system.flip_probability == pytest.approx(norm.cdf(-drift / spread), rel=0.12)  # std to 2.5% at five sigma


def test_the_excess_of_a_refit_is_that_of_least_squares(rng):
    """The mean of 50 fits has a standard error of sqrt(2 / 17 parameters / 50), 5%: five of them."""
    task = draw_bigram_task(rng, 4, 30, 3)
    even = State(np.zeros((4, 4)), (task.attention > 0) / np.float32(3))
    found = []
    for _ in range(50):
        seen = sample_support(rng, task, tuple(task.positions), 4000)
        found.append(excess(task, *refit_jointly(even, task.stationary, seen, tolerance=1e-5)))
    assert np.mean(found) == pytest.approx(refit_excess(task, 4000), rel=0.25)


def test_nonsense_is_refused_with_figures(rng):
    task = draw_bigram_task(rng, 3, 500, 2)
    with pytest.raises(UsageError, match="noise_ratio=9: the scaling law holds"):
        stage_one_samples(task, 9.0)
    with pytest.raises(UsageError, match="grows by"):
        balanced_settings(task, 10_000, noise_ratio=8.0)
    flat = BigramTask(np.eye(2), np.full(2, 0.5), np.array([[0, 1]] * 2), np.full((2, 2), 0.5), 2)
    with pytest.raises(UsageError, match="choose a sparser task"):
        stage_one_samples(flat, 4.0)
