"""Token frequencies: mean and noise of the first gradient for any distribution of tokens."""

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems.frequencies import ShiftedTask, effective_vocabulary
from manyheads.theory.bigram.training.proximal_sgd import State, batch_gradients, initial_state


@pytest.fixture
def shifted(rng):
    drawn = draw_bigram_task(rng, 3, 60, 2)
    return ShiftedTask(drawn.transition, np.array([0.2, 0.3, 0.5]), drawn.positions, drawn.weights, drawn.length)


def test_equal_frequencies_have_their_own_vocabulary(rng):
    assert effective_vocabulary(draw_bigram_task(rng, 5, 40, 2)) == pytest.approx(5)


@pytest.mark.parametrize("uniform_values", [False, True])
def test_the_first_gradient_has_the_predicted_mean_and_noise(shifted, uniform_values):
    task, batch = shifted, 8
    start = initial_state(task)
    mean = (1 / 3 - task.stationary) if uniform_values else np.zeros(3)
    start = State(np.tile(mean[:, None], 3), start.attention)
    found = [batch_gradients(task, start, batch, seed=seed).value for seed in range(2000)]
    signals = (
        np.array([task.stationary @ (each * task.centred).sum(0) for each in found]) / task.transition_squared_norm
    )
    variance = 1 / (task.length * batch * task.transition_squared_norm * effective_vocabulary(task, mean))
    assert signals.mean() == pytest.approx(-1 / task.length, abs=4 * (variance / 2000) ** 0.5)
    assert signals.var() == pytest.approx(variance, rel=0.15)
    assert np.abs(np.mean(found, 0) @ task.stationary).max() < 1e-9  # of float32 attention: the mean prediction stays


def test_only_a_shifted_task_has_tokens_that_the_transition_does_not_keep(shifted):
    fields = shifted.transition, shifted.stationary, shifted.positions, shifted.weights, shifted.length
    with pytest.raises(UsageError, match="must satisfy P mu = mu"):
        BigramTask(*fields)
    np.testing.assert_allclose(shifted.centred @ shifted.stationary, 0, atol=1e-15)
    np.testing.assert_allclose(shifted.centred.sum(0), 0, atol=1e-15)
