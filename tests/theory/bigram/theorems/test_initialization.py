"""Initialization of training from scratch: signals of random states, and softmax attention from the wrong sign."""

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from manyheads.errors import UsageError
from manyheads.theory.bigram.setups import signal_system
from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.theorems.initialization import (
    attention_spread,
    saturation_delay,
    sign_correction,
    value_spread,
)
from manyheads.theory.bigram.theorems.population import measure_overlaps
from manyheads.theory.bigram.training.plateau_escape import perturbed_runs, perturbed_state
from manyheads.theory.bigram.training.proximal_sgd import StepSettings
from manyheads.theory.bigram.training.reduced_model import find_escape, measure_reduced


@pytest.mark.parametrize("uniform", [True, False])
def test_random_states_have_the_predicted_signals_in_both_engines(rng, uniform):
    task = draw_bigram_task(rng, 3, 40, 2, uniform=uniform)
    drift = 1 / (task.length * task.attention_squared_norm)
    states = [measure_overlaps(task, *perturbed_state(rng, task, 0.01, 0.5)) for _ in range(2000)]
    runs = measure_reduced(task, perturbed_runs(rng, task, 0.01, 0.5, 2000))
    for signals in (np.array([state.attention_signal for state in states]), runs.attention_signal):
        assert signals.std() / drift == pytest.approx(attention_spread(task, 0.5, 0.0), rel=0.08)  # 5 standard errors
    for norms in (np.array([state.attention_squared_norm for state in states]), runs.attention_squared_norm):
        assert norms.mean() == pytest.approx((1 + 0.25) / task.length, rel=0.02)
    if uniform:  # elsewhere centring the values is no orthogonal projection
        for signals in (np.array([state.value_signal for state in states]), runs.value_signal):
            assert signals.std() / drift == pytest.approx(value_spread(task, 0.01), rel=0.08)


def test_a_softmax_head_corrects_a_wrong_sign_in_the_time_of_the_closed_form():
    def back(time, state):  # x is one again
        return state[1] - 1 if time > 0.1 else -1.0

    back.terminal = True
    for wrong in (0.7, 1.5):
        path = solve_ivp(lambda t, s: (s[1], s[1] ** 2 * s[0]), (0, 50), (-wrong, 1.0), events=back, rtol=1e-10)
        assert path.t[-1] == pytest.approx(sign_correction(wrong), rel=1e-4)
        assert path.y[0, -1] == pytest.approx(wrong, rel=1e-4)
    assert sign_correction(0.0) == 0
    with pytest.raises(UsageError, match="wrong=-1"):
        sign_correction(-1.0)


def test_saturation_delays_the_escape_by_the_difference_of_two_integrated_times():
    def escape(saturates):
        def reached(time, state):
            return state[0] * state[1] - 0.3

        def velocity(time, state):
            v, p = state
            rest = 1 - p * v
            return p * rest, v * rest * ((1 - p) ** 2 if saturates else 1.0)

        reached.terminal = True
        return solve_ivp(velocity, (0, 50), (1e-6, 1e-6), events=reached, rtol=1e-10, atol=1e-14).t[-1]

    assert saturation_delay(0.3) == pytest.approx(escape(True) - escape(False), abs=1e-5)


def test_the_share_of_flips_from_random_values_and_attention_is_that_of_the_closed_form():
    rng = np.random.default_rng(0)
    task = draw_bigram_task(rng, 3, 3000, 2)
    growth, noise = 0.1, 4.0
    transition, attention = task.transition_squared_norm, task.attention_squared_norm
    batch = round(growth * task.length / (noise * transition * attention))
    settings = StepSettings(batch, growth / attention, growth / transition)
    system = signal_system(task, settings)
    for std, relative in ((0.002, 0.0), (0.0, 2.0)):
        init = perturbed_runs(rng, task, std, relative, 1500)
        found = find_escape(task, settings, 1500, rng, most_steps=300, init=init)
        spread = np.hypot(value_spread(task, std), attention_spread(task, relative, system.init_noise))
        assert (found.outcome == "escaped").all()
        assert found.flipped.mean() == pytest.approx(system.flip_probability_from(spread), abs=0.05)
        assert system.flip_probability_from(spread) > system.flip_probability + 0.05
    assert system.flip_probability_from(0.0, shift=-1.0) == pytest.approx(0.5)
