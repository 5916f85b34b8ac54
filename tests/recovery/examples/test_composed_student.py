"""Attention and MLP in one student: the function, its symmetry, and what is held."""

import numpy as np
import pytest
from scipy.special import erf

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery.examples.composed_student import Composed, draw_composed, evaluate_composed, fit_composed
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.planted.task import sequences
from manyheads.studies.recovery.layer_and_mlp import LayerAndMlp, compare_weights


@pytest.fixture
def teacher(rng):
    return draw_composed(rng, 3, 2, 4, logits=2.0)


def test_it_is_the_mlp_of_the_layer_row_by_row(teacher, rng):
    x = sequences(rng, 20, 3, 3)
    inner = evaluate_layer(AttentionLayer(teacher.theta, teacher.projection), x) @ teacher.into + teacher.bias
    expected = (inner * (1 + erf(inner / 2**0.5)) / 2) @ teacher.out
    np.testing.assert_allclose(np.asarray(evaluate_composed(teacher, x)), expected, atol=2e-5)


def test_a_linear_map_between_layer_and_mlp_cannot_be_seen(teacher, rng):
    x, between = sequences(rng, 20, 2, 3), rng.standard_normal((3, 3)) + 2 * np.eye(3)
    moved = teacher._replace(projection=teacher.projection @ between, into=np.linalg.solve(between, teacher.into))
    np.testing.assert_allclose(
        np.asarray(evaluate_composed(moved, x)), np.asarray(evaluate_composed(teacher, x)), atol=2e-4
    )
    found = compare_weights(teacher, moved._replace(theta=moved.theta[::-1], projection=moved.projection[::-1]))
    assert found["theta"] == 0
    assert found["mapped"] < 1e-10 < 0.1 < found["projection"]


def test_a_start_beside_the_teacher_finds_it_and_what_is_held_stays(teacher, rng):
    import jax

    with jax.enable_x64(True):
        x = sequences(rng, 300, 2, 3, distribution="gaussian")
        y = np.asarray(evaluate_composed(teacher, x))
        start = Composed(*(one + 0.02 * rng.standard_normal(one.shape) for one in teacher))
        held = ("into", "bias", "out")
        start = start._replace(**{name: getattr(teacher, name) for name in held})
        found = fit_composed(x, y, [start], held=held, enough=1e-12, evaluations=400)
    assert found.loss < 1e-12
    assert found.starts == 1
    np.testing.assert_allclose(found.weights.theta, teacher.theta, atol=1e-4)
    np.testing.assert_array_equal(found.weights.into, teacher.into)


def test_no_start_and_sizes_that_lose_the_layer_are_refused(rng):
    x = sequences(rng, 5, 2, 2)
    with pytest.raises(UsageError, match="no start"):
        fit_composed(x, x, [])
    with pytest.raises(UsageError, match="at least dim=4"):
        LayerAndMlp(dim=4, hidden=3)
