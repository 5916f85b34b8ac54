"""A problem is refused before any work where it cannot be solved, and its memory is that of the optimizer."""

from dataclasses import replace

import numpy as np
import pytest

from manyheads.errors import ShapeError, UsageError
from manyheads.theory.dmft.problem import Problem

INPUTS, TARGETS = np.ones((2, 3, 4)), np.array([1.0, -1.0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"steps": 0}, "steps"),
        ({"depth": 1.5}, "an integer"),
        ({"inputs": np.zeros((2, 3, 4)), "norm": True}, "token of zeros"),
        ({"richness": np.inf}, "richness"),
        ({"depth_exponent": 0.4}, "at least 0.5"),
        ({"momentum": 1.0}, "momentum"),
        ({"causal": 1}, "causal=1: choose from True, False"),
        ({"loss": "hinge"}, "hinge"),
        ({"read_out": "last"}, "last"),
        ({"loss": "cross-entropy"}, "probabilities"),
        ({"optimizer": "adam"}, "no closed limit"),
        ({"targets": np.ones(3)}, "fit"),
        ({"targets": np.ones((2, 0))}, "fit"),
        ({"targets": ["three", "five"]}, "targets: .*numbers"),
        ({"inputs": [[[1.0, 2.0]], [[1.0]]]}, "inputs: .*numbers"),
        ({"inputs": np.full((2, 3, 4), 1j)}, "inputs .*complex.*give `.real`"),
        ({"weights": "equal"}, "weights: .*numbers"),
        ({"learning_rate": "0.1"}, "learning_rate='0.1'"),
        ({"momentum": None}, "momentum=None"),
        ({"norm": "pre"}, "norm='pre'"),
        ({"loss": ["squared"]}, "choose from"),
        ({"weights": np.ones(3)}, "weights"),
        ({"weights": -np.ones(2)}, "negative"),
        ({"inputs": np.full((2, 3, 4), np.nan)}, "finite"),
    ],
)
def test_what_cannot_be_solved_is_refused(fields, message):
    with pytest.raises((UsageError, ShapeError), match=message):
        Problem(**({"inputs": INPUTS, "targets": TARGETS} | fields))


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_the_memory_is_what_the_optimizer_remembers(momentum, rng):
    problem = Problem(INPUTS, TARGETS, steps=7, momentum=momentum)
    gradients = rng.standard_normal(7)
    weight, velocity, path = 0.0, 0.0, []
    for gradient in gradients:
        path.append(weight)
        velocity = momentum * velocity + gradient
        weight -= velocity
    assert np.abs(-problem.memory @ gradients - path).max() < 1e-12


def test_a_problem_may_be_given_more_steps():
    longer = replace(Problem(INPUTS, TARGETS, steps=3), steps=5)
    assert longer.loss_weights.shape == (5, 2)
    assert np.all(longer.loss_weights == 0.5)


def test_tokens_that_read_out_and_batches_in_time(rng):
    weights = rng.random((5, 2, 3))
    problem = Problem(INPUTS, rng.standard_normal((2, 3)), weights, steps=5, read_out="token")
    assert problem.outputs == 6
    assert np.array_equal(problem.loss_weights, weights.reshape(5, 6))
    assert np.array_equal(problem.pooling, np.eye(6))
    assert problem.flat_targets.shape == (6, 1)
