"""Theorem 2: the erf law against SciPy's integrator and against the flow of the layer; limits, times, refusals."""

import math

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from manyheads.errors import UsageError
from manyheads.theory.joma.systems.gradient_flow import AdaptiveSteps, adaptive_gradient_flow
from manyheads.theory.joma.systems.layer import LayerParameters, LinearLoss, token_weights
from manyheads.theory.joma.task import Sizes, UpdateRule, draw_joma_task
from manyheads.theory.joma.theorems.winner_take_all import (
    blowup_time,
    common_ratio,
    frozen_weights,
    linear_attention_at,
    reaching_time,
    weights_at,
)


@pytest.mark.parametrize("s", [1.0, 0.4])
def test_the_erf_law_solves_its_equation(rng, s):
    gains = rng.normal(size=5)
    end = 0.95 * blowup_time(gains, s)
    solved = solve_ivp(
        lambda t, v: gains * np.exp(s * v**2 / 2), (0, end), np.zeros(5), "DOP853", rtol=1e-11, atol=1e-12
    )
    assert np.abs(weights_at(gains, [end], s)[0] - solved.y[:, -1]).max() < 1e-7


def test_linear_attention_solves_its_equations(rng):
    gains, ratio = rng.normal(size=4), 0.3
    solved = solve_ivp(
        lambda t, y: np.concatenate([gains * y[4:], ratio * gains * y[:4]]),
        (0, 1.5),
        np.repeat([0.0, 1.2], 4),
        "DOP853",
        rtol=1e-11,
        atol=1e-12,
    )
    v, z = linear_attention_at(gains, [1.5], 1.2, ratio)
    assert np.abs(np.concatenate([v[0], z[0]]) - solved.y[:, -1]).max() < 1e-7


@pytest.mark.slow
def test_the_layer_follows_the_law_to_its_blow_up(rng):
    sizes, rule = Sizes(tokens=5, contexts=7, neurons=1, width=6), UpdateRule("exp", "identity", 0.8, 0.5)
    s = 0.5 / 0.8**2  # r/T^2
    task, gradients = draw_joma_task(sizes, rng), 0.5 + rng.normal(size=(7, 1))
    gains, start = (gradients * task.contexts).mean(0), LayerParameters(np.zeros((1, 5)), np.zeros((6, 1)))
    until = AdaptiveSteps(2 * blowup_time(gains, s), 4, 1e-12, 1e-14, limit=6.0)
    path = adaptive_gradient_flow(start, task, LinearLoss(gradients), rule, until)
    v = token_weights(task, path.network.weights)[..., 0]
    assert bool(path.stopped)
    assert abs(path.times[-1] / reaching_time(gains, 6.0, s) - 1) < 1e-9
    assert np.abs(v[1] - weights_at(gains, path.times[1:2], s)[0]).max() < 1e-9
    assert common_ratio(gains, v[1], math.sqrt(s / 2)) < 1e-8
    assert common_ratio(gains, v[1], math.sqrt(s) / 2) > 1e-4
    loser = np.abs(gains) < 0.9 * np.abs(gains).max()
    assert np.abs(v[-1] - frozen_weights(gains, s))[loser].max(initial=0) < 1e-4


def test_losers_limits_are_the_law_at_the_blow_up(rng):
    gains = np.array([1.0, *rng.uniform(-0.9, 0.9, size=4)])
    late = weights_at(gains, [blowup_time(gains) * (1 - 1e-9)])[0]
    assert np.abs(late - frozen_weights(gains))[1:].max() < 1e-6
    assert np.isinf(frozen_weights(gains)[0])


def test_what_breaks_an_assumption_is_refused():
    with pytest.raises(UsageError, match="blow-up"):
        weights_at([1.0, 0.5], [10.0])
    with pytest.raises(UsageError, match="not all zero"):
        blowup_time([0.0, 0.0])
