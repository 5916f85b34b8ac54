"""Stability: noise under a penalty, and the learning rate at which training diverges."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.integrate import quad

from manyheads.errors import UsageError
from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.theorems.stability import divergence_growth, penalty_ratio, remaining_noise, theory_penalty


@pytest.mark.parametrize("ratio", [0.02, 0.5, 3.0])
def test_the_noise_under_a_penalty_is_that_of_the_stationary_density(ratio):
    beta = ratio / 0.8**2 * math.sqrt(2 / 0.1)
    zeroth, second = (quad(lambda u, n=n: u**n * math.exp(-(u**2) / 2 - beta * u), 0, np.inf)[0] for n in (0, 2))
    assert remaining_noise(ratio, 0.1, 0.8) == pytest.approx(second / zeroth, rel=1e-6)


def test_the_noise_under_a_penalty_is_that_of_a_simulated_weight(rng):
    growth, ratio, steps = 0.05, 0.2, 400
    u = np.zeros(20_000)  # weights in standard deviations of the gradient, times the learning rate
    for _ in range(steps):
        u = (1 - growth) * u + growth * rng.standard_normal(u.shape)
        u -= np.clip(u, -growth * ratio, growth * ratio)
    free = growth**2 / (1 - (1 - growth) ** 2)
    assert (u**2).mean() / free == pytest.approx(remaining_noise(ratio, growth), rel=0.06)


def test_the_threshold_grows_as_the_root_of_the_batch_over_the_length(rng):
    task = draw_bigram_task(rng, 3, 4000, 2)
    first = divergence_growth(task, 64, 100.0)
    assert divergence_growth(task, 256, 100.0) / first == pytest.approx(2, rel=0.1)
    assert divergence_growth(replace(task, length=16_000), 64, 100.0) / first == pytest.approx(0.5, rel=0.1)
    with pytest.raises(UsageError, match="batch=0"):
        divergence_growth(task, 0, 100.0)


def test_the_penalty_of_the_theory_is_one_standard_deviation_at_a_batch_polynomial_in_tokens_and_positions(rng):
    task = draw_bigram_task(rng, 3, 100, 2)
    batch = (2**2 * 3**3 / 0.1) ** 2 / task.transition_squared_norm
    assert penalty_ratio(task, theory_penalty(task, 0.1), round(batch)) == pytest.approx(1, rel=1e-6)
