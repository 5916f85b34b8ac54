"""Laws of sample sizes against the systems that they summarise and against draws from the task."""

import numpy as np
import pytest

from manyheads.bigram.task import BigramTask, draw_task
from manyheads.bigram.theory.laws import (
    balanced_settings,
    find_noise_ratio,
    find_shrinkage,
    mirror_share,
    noise_strength,
    required_batch,
    stage_one_samples,
)
from manyheads.bigram.theory.noise import ValueNoise, row_coefficients
from manyheads.bigram.theory.population import gradients
from manyheads.bigram.theory.signal import SignalSystem, predict_boost
from manyheads.bigram.training.proximal_sgd import StepSettings
from manyheads.errors import UsageError


def test_the_rates_make_the_growth_that_the_ratio_asks_for(rng):
    task = draw_task(rng, 4, 5000, 3)
    settings = balanced_settings(task, 32, noise_ratio=5.0)
    system = SignalSystem.of(task, settings.value_rate, settings.attention_rate, 32)
    assert system.noise_ratio == pytest.approx(5.0)
    assert find_noise_ratio(task, settings) == pytest.approx(5.0)
    assert system.value_rate * task.attention_energy == pytest.approx(system.growth)
    assert system.mirror_share == pytest.approx(mirror_share(task, 5.0))


def test_the_law_of_stage_one_is_the_system_within_a_fifth(rng):
    for length in (1000, 100_000):
        task = draw_task(rng, 3, length, 2)
        for ratio in (2.0, 4.0, 8.0):
            settings = balanced_settings(task, 16, noise_ratio=ratio)
            steps = predict_boost(SignalSystem.of(task, settings.value_rate, settings.attention_rate, 16))
            assert 0.75 < 16 * steps / stage_one_samples(task, ratio) < 1.2


def test_the_mirror_share_follows_from_the_noise_of_the_first_step(rng):
    """Draw the kicks of untrained weights and sum them as the growing mode does."""
    task = draw_task(rng, 3, 1000, 2, uniform=False)
    settings = balanced_settings(task, 20, noise_ratio=6.0)
    growth = settings.attention_rate * task.transition_energy
    rows = row_coefficients(task, np.full((3, 1000), 1 / 1000))
    drawn = ValueNoise(task, 20).draw(
        rng, np.zeros((20_000, 3, 3)), type(rows)(*(np.broadcast_to(part, (20_000, 3)) for part in rows))
    )
    along = (drawn * task.centred).sum(1) @ task.stationary / task.transition_energy
    spread = settings.value_rate * along.std() / (2 * growth) ** 0.5  # sum of e^{-2 growth s} over steps
    drift = 1 / (1000 * task.attention_energy)
    from scipy.stats import norm

    assert mirror_share(task, 6.0) == pytest.approx(norm.cdf(-drift / spread), rel=0.12)  # std to 2.5% at five sigma


def test_the_penalty_shrinks_a_weight_by_what_is_said(rng):
    task = draw_task(rng, 3, 500, 2)
    even = BigramTask(task.transition, task.stationary, task.positions, np.full((3, 2), 0.5), 500)
    batch = required_batch(even, 2.0, 0.25)
    strength = noise_strength(2.0, task.transition_energy, batch)
    share = find_shrinkage(even, 2.0, batch)
    assert share == pytest.approx(0.25, rel=0.01)
    shrunk = even.attention * (1 - share)
    slope = gradients(even, even.centred, shrunk).attention
    # at rest: the slope at the true positions is minus the penalty, up to the mean over positions
    assert np.take_along_axis(slope, even.positions, 1) == pytest.approx(-strength, rel=0.03)


def test_nonsense_is_refused_with_figures(rng):
    task = draw_task(rng, 3, 500, 2)
    with pytest.raises(UsageError, match="shrinkage=1"):
        required_batch(task, 2.0, 1)
    with pytest.raises(UsageError, match="batch=0"):
        noise_strength(2.0, 0.2, 0)
    with pytest.raises(UsageError, match="noise_ratio=9: the law holds"):
        stage_one_samples(task, 9.0)
    with pytest.raises(UsageError, match="would grow by"):
        balanced_settings(task, 10_000, noise_ratio=8.0)
    flat = BigramTask(np.eye(2), np.full(2, 0.5), np.array([[0, 1]] * 2), np.full((2, 2), 0.5), 2)
    with pytest.raises(UsageError, match="no position to find"):
        find_noise_ratio(flat, StepSettings(1, 0.1, 0.1))
