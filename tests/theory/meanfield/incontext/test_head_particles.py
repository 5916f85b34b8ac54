"""Heads as particles: variance by quadrature against drawn heads, gradient descent of one step, refusals."""

import jax
import numpy as np
import pytest

from manyheads._settings import double_precision
from manyheads.errors import CertificateError, UsageError
from manyheads.studies.meanfield.incontext.head_particles import HeadParticlesStudy
from manyheads.theory.meanfield.incontext.head_particles import (
    PARAMETERS,
    HeadParticles,
    cross_entropy,
    draw_labelled_prompts,
    head_outputs,
    initial_variance,
    train_head_particles,
)
from manyheads.theory.meanfield.incontext.task import gaussian_points


def test_variance_by_quadrature_is_that_of_drawn_heads(rng):
    prompts = draw_labelled_prompts(rng, 4, 3)
    squares = np.asarray(head_outputs(HeadParticles.of(rng.standard_normal((20_000, PARAMETERS))), prompts)) ** 2
    standard_error = squares.std(0) / len(squares) ** 0.5
    assert (abs(squares.mean(0) - initial_variance(prompts)) < 5 * standard_error).all()


def test_first_step_is_gradient_descent_with_learning_rates_times_heads(rng):
    heads, rate = 5, 0.3
    prompts, points = draw_labelled_prompts(rng, 4, 3), rng.standard_normal((1, heads, PARAMETERS))
    with double_precision():
        found = train_head_particles(HeadParticles.of(points), prompts, learning_rate=rate, steps=1)
        start = HeadParticles.of(points[0])

        def loss(weights):
            return cross_entropy(head_outputs(weights, prompts).mean(0), prompts.answer)

        moved = jax.tree.map(lambda weight, slope: weight - rate * heads * slope, start, jax.grad(loss)(start))
        expected = [head_outputs(weights, prompts).mean(0) for weights in (start, moved)]
    np.testing.assert_allclose(found[0], expected, rtol=1e-10)


def test_copies_of_all_heads_change_nothing_when_heads_are_averaged(rng):
    prompts, points = draw_labelled_prompts(rng, 4, 3), rng.standard_normal((1, 2, PARAMETERS))
    with double_precision():
        few, many = (
            train_head_particles(HeadParticles.of(each), prompts, learning_rate=0.5, steps=1)
            for each in (points, np.concatenate([points, points], 1))
        )
    np.testing.assert_allclose(few, many, rtol=1e-10)


def test_points_of_low_discrepancy_are_standard_normal(rng):
    points = gaussian_points(3, 4096, rng)
    np.testing.assert_allclose(points.mean(0), 0, atol=0.01)
    np.testing.assert_allclose(points.T @ points / 4096, np.eye(3), atol=0.02)


def test_what_cannot_be_measured_is_refused(monkeypatch, rng):
    with pytest.raises(UsageError, match="two systems"):
        HeadParticlesStudy(heads=(16, 64), drawn=64)
    with pytest.raises(UsageError, match="power of two"):
        gaussian_points(2, 24, rng)
    study = HeadParticlesStudy.small()
    far = np.zeros((2, study.steps + 1, study.prompts))
    far[1] += 1.0
    monkeypatch.setattr(HeadParticlesStudy, "_train", lambda *_: far)
    with pytest.raises(CertificateError, match="raise reference"):
        study.predict(jax.random.key(0))
