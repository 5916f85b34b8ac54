"""Lucky neurons against integrated trajectories and random draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

from manyheads.errors import UsageError
from manyheads.theory.joma.systems.networks.wide_layer import WideTraining, train_together
from manyheads.theory.joma.theorems.lucky_neurons import (
    mean_first_time,
    shared_output,
    some_neuron,
    winning_probability,
    winning_time,
)


@pytest.mark.parametrize("attention", ["aligned", "uniform"])
@pytest.mark.parametrize("init", [-0.8, 1.3])
def test_the_time_is_that_of_the_joint_flow_of_logit_and_weight(attention, init):
    def flow(t, state):
        v, z = state
        return 0.7 * np.exp(z) * np.array([1.0, v])

    def reached(t, state):
        return state[0] - 3.0

    reached.terminal = True
    start = [init, init**2 / 2 if attention == "aligned" else 0.0]
    end = solve_ivp(flow, (0, 50), start, events=reached, rtol=1e-10, atol=1e-12).t[-1]
    np.testing.assert_allclose(winning_time(init, 0.7, 3.0, attention), end, rtol=1e-7)


@pytest.mark.parametrize(("attention", "std"), [("aligned", 0.6), ("uniform", 1.0)])
def test_quadratures_are_the_means_of_random_draws(rng, attention, std):
    starts = std * rng.normal(size=(200_000, 2))
    first, second = (winning_time(starts[:, k], gain, 3.0, attention) for k, gain in enumerate((1.0, 0.5)))
    won = winning_probability((1.0, 0.5), 3.0, 2.5, std, attention)
    np.testing.assert_allclose(won, ((second < first) & (second < 2.5)).mean(), atol=0.004)
    mean = mean_first_time(8, 1.0, 3.0, std, attention)
    np.testing.assert_allclose(mean, first.reshape(-1, 8).min(1).mean(), rtol=0.02)
    np.testing.assert_allclose(
        some_neuron(won, 8), ((second < first) & (second < 2.5)).reshape(-1, 8).any(1).mean(), atol=0.01
    )


def test_a_shared_output_is_what_small_steps_of_descent_reach(rng):
    init = rng.normal(size=(3, 5))
    changes = shared_output(init, 6.0, level=6.0)
    training = WideTraining(1e-3, 4000, batch=256, level=6.0)
    reached = train_together(jnp.asarray(init), jnp.asarray(6.0), training, jax.random.key(0))
    np.testing.assert_allclose(changes.sum(1), 6.0, rtol=1e-6)
    np.testing.assert_allclose(reached, changes, atol=0.03 * 6.0)


def test_gains_and_kinds_of_attention_that_do_not_exist_are_refused():
    with pytest.raises(UsageError, match="positive gain"):
        winning_time(0.0, 0.0, 3.0)
    with pytest.raises(UsageError, match="expected one of"):
        winning_time(0.0, 1.0, 3.0, "softmax")
