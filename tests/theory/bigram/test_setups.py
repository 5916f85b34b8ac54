"""Shared parts of the bigram studies: what a step's rates and batch mean for the signal system."""

import numpy as np
import pytest

from manyheads.theory.bigram.setups import balanced_steps, share_of_right_positions, signal_system
from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.training.plateau_escape import SgdEscape
from manyheads.theory.bigram.training.proximal_sgd import State


@pytest.mark.parametrize("noise", [0.5, 4.0])
def test_balanced_steps_have_the_growth_and_the_noise_that_were_asked_for(noise):
    task = draw_bigram_task(np.random.default_rng(0), 4, 100_000, 2)
    settings = balanced_steps(task, 0.03, noise)
    system = signal_system(task, settings)
    assert system.growth == pytest.approx(0.03, rel=1e-12)
    assert system.noise_ratio == pytest.approx(noise, rel=1e-3)  # the batch is a whole number
    ratio = settings.attention_learning_rate / settings.value_learning_rate
    assert ratio == pytest.approx(task.attention_squared_norm / task.transition_squared_norm)


def test_positions_are_right_up_to_the_sign():
    task = draw_bigram_task(np.random.default_rng(0), 4, 30, 2)
    weights = np.zeros((4, 30), np.float32)
    np.put_along_axis(weights, task.positions, np.float32(0.5), axis=1)

    def share(attention, flipped):
        return share_of_right_positions(task, SgdEscape(1, flipped, State(task.centred, attention)))

    assert (share(weights, False), share(-weights, True), share(-weights, False)) == (1.0, 1.0, 0.0)
