"""Drop and rebound: exact curves, their approach to the limit, and systems without a rebound."""

import jax
import numpy as np
import pytest

from manyheads.curves.drop_and_rise import drop_and_rise
from manyheads.errors import ShapeError
from manyheads.theory.joma.systems.components import relax
from manyheads.theory.joma.systems.rebound_networks import target_entropies
from manyheads.theory.joma.theorems.rebound import (
    REBOUND,
    entropy_curve,
    entropy_of,
    final_rank_slope,
    linear_entropy_curve,
    predict_approach,
)
from manyheads.theory.joma.theorems.salient_first import EXP, LINEAR, UNIFORM, exact_time

TIMES = np.concatenate([[0.0], np.geomspace(1e-2, 60, 90)])


def test_entropy_is_its_definition(rng):
    logits = rng.normal(size=(3, 5)) * 4
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(entropy_of(logits), -(p * np.log(p)).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(entropy_of(logits, np.arange(5) < 2), entropy_of(logits[:, :2]), rtol=1e-12)


@pytest.mark.slow
def test_exact_curves_are_those_of_the_solver(rng):
    targets = rng.uniform(0.5, 3, 5)
    times = np.array([0.1, 0.3, 0.5, 2.0, 6.0, 20.0])
    v = -targets * np.expm1(-relax(targets, times))
    np.testing.assert_allclose(entropy_curve(targets, times), entropy_of(v**2 / 2), atol=1e-8)


def test_the_final_slope_of_the_stable_rank_is_a_difference_quotient(rng):
    target, init = rng.normal(size=(2, 4, 3))

    def rank(passed):
        layer = init + passed * (target - init)
        return (layer**2).sum() / np.linalg.norm(layer, 2) ** 2

    slope = (rank(1 + 1e-6) - rank(1 - 1e-6)) / 2e-6
    assert final_rank_slope(target, init) == pytest.approx(slope / (2 * rank(1.0)), abs=1e-7)
    assert final_rank_slope(target, -init) == pytest.approx(-final_rank_slope(target, init))
    with pytest.raises(ShapeError, match="one shape"):
        final_rank_slope(target, init[:2])


@pytest.mark.slow
def test_entropy_ends_on_the_side_that_leading_order_says(rng):
    for law in (EXP, UNIFORM, LINEAR):
        targets = rng.uniform(0.5, 2.5, 4)
        late = float(exact_time(targets.min(), 12.0, law))
        curve, end = entropy_curve(targets, [late], law), entropy_of(targets**2 / 2)
        assert np.sign(curve[0] - end) == predict_approach(targets, law)
    assert predict_approach([1.3, 1.3, 1.3]) == 0


@pytest.mark.slow
def test_with_attention_nearly_all_rebound_and_without_none(rng):
    # Published: 97% of 60 vectors. Of 600 vectors 98.5% exceed the level here; 120 vectors fall below 94% by chance
    # less often than once in ten thousand.
    with jax.enable_x64(True):
        attended, linear = (target_entropies(dynamics, 120, rng) for dynamics in ("exp", "linear"))
    assert 0.94 <= (drop_and_rise(attended).rise > REBOUND).mean() <= 1
    assert drop_and_rise(linear).rise.max() < 1e-12
    for count in (2, 7, 19):
        mu = rng.uniform(0.5, 3, (7, 1, count))
        held = entropy_of((mu * np.expm1(-TIMES)[:, None]) ** 2 / 2)  # one rate for all components
        assert drop_and_rise(held).rise.max() < 1e-12


def test_entropy_under_a_linear_activation_falls_to_zero(rng):
    curve = linear_entropy_curve(rng.uniform(0.5, 3, 5), 1 - np.geomspace(1, 1e-12, 60))
    assert drop_and_rise(curve).rise < 1e-12
    assert curve[-1] < 0.1 < curve[0]
