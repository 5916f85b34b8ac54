"""SGD: the reduced chain and the weights against literal steps in n dimensions, and its mean step against the ODE."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.theory.meanfield.contrastive.oracle import noise_covariance

from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.theory.meanfield.contrastive.ode import overlap_trajectory, vector_field
from manyheads.theory.meanfield.contrastive.quadrature import Nodes
from manyheads.theory.meanfield.contrastive.sgd import (
    correlate,
    overlap_step,
    train_overlaps,
    train_weights,
    weight_step,
)
from manyheads.theory.meanfield.contrastive.sgd_covariance import sgd_covariance, step_covariance
from manyheads.theory.meanfield.contrastive.task import ContrastiveTask

N, NODES = 30, Nodes(20, 6, 20)
START = np.array([0.3, 0.2, 0.6])
TASK = ContrastiveTask(correlation=-0.4)


def draw_basis(rng, size=N):
    return np.linalg.qr(rng.standard_normal((size, 3)))[0].T * np.sqrt(size)


def draw_weights(basis):
    return np.array([*START[:2], np.sqrt(START[2] - (START[:2] ** 2).sum())]) @ basis


def literal_step(weights, features, coefficients, noise, penalty):
    """One step of SGD on w with three inputs in n dimensions; the derivatives of the default loss by hand."""
    x = coefficients @ features / np.sqrt(N) + noise  # (3, n)
    f = np.tanh(x @ weights / np.sqrt(N))
    slope = 1 / (1 + np.exp(f[0] * (f[1] - f[2])))
    g = slope * np.array([f[2] - f[1], -f[0], f[0]]) * (1 - f**2)
    decay = TASK.weight_decay * weights + penalty(weights)
    return weights - TASK.learning_rate * (g @ x / np.sqrt(N) + decay / N), g


def test_overlaps_and_norm_are_a_chain_of_their_own(rng):
    basis = draw_basis(rng)
    features, weights = basis[:2], draw_weights(basis)
    root = np.linalg.cholesky(noise_covariance(TASK))
    chain = np.array([*START[:2], np.sqrt(START[2] - (START[:2] ** 2).sum())])
    with jax.enable_x64(True):
        step = jax.jit(partial(overlap_step, TASK.loss, TASK.parameters(), N))
        for _ in range(40):
            coefficients = rng.choice([-1.0, 1.0, 2.0], (2, 2))[[0, 0, 1]]
            noise = root @ rng.standard_normal((3, N))
            outside = weights - features.T @ (features @ weights) / N
            frame = np.array([*(features / np.sqrt(N)), outside / np.linalg.norm(outside)])
            weights, g = literal_step(weights, features, coefficients, noise, lambda w: 0)
            rest = g @ (noise - noise @ frame.T @ frame)  # sum_s g_s a_s in the other directions
            remainder = rest @ rest / (g @ noise_covariance(TASK) @ g)
            chain = np.asarray(step(chain, coefficients, noise @ frame.T, remainder))
            np.testing.assert_allclose(chain[:2], features @ weights / N, atol=1e-12)
            np.testing.assert_allclose((chain**2).sum(), weights @ weights / N, atol=1e-12)


def test_normal_numbers_become_noise_with_the_covariance_of_the_views():
    for correlation in (-0.4, 1.0):
        task = replace(TASK, correlation=correlation)
        with jax.enable_x64(True):
            root = np.asarray(correlate(task.parameters(), np.eye(3)))
        np.testing.assert_allclose(root @ root.T, noise_covariance(task), atol=1e-14)


def test_a_step_of_the_weights_is_the_literal_one(rng):
    basis = draw_basis(rng)
    features, weights = basis[:2], draw_weights(basis)
    with jax.enable_x64(True):
        step = jax.jit(partial(weight_step, TASK.loss, lambda w: 0.3 * jnp.sign(w), TASK.parameters(), features))
        for _ in range(10):
            coefficients = rng.choice([-1.0, 1.0, 2.0], (2, 2))[[0, 0, 1]]
            noise = np.linalg.cholesky(noise_covariance(TASK)) @ rng.standard_normal((3, N))
            along = weights / np.linalg.norm(weights)
            after, g = literal_step(weights, features, coefficients, noise, lambda w: 0.3 * np.sign(w))
            vector = g @ noise / np.sqrt(g @ noise_covariance(TASK) @ g)
            found = step(weights[None], coefficients[None], (noise @ along)[None], vector[None])[0]
            np.testing.assert_allclose(found, after, atol=1e-12)
            weights = after


def scaled_steps(rng, runs):
    """Return n times the change of the overlaps and the squared norm in one step, for n to infinity."""
    dimension = 10**7
    path = train_overlaps(TASK, np.tile(START, (runs, 1)), dimension, [0.0, 1 / dimension], rng)
    return dimension * (path[1] - path[0])


def test_the_mean_step_is_the_ode(rng):
    """The ODE contains Stein's identity, the chain does not: means of 20,000 steps agree within five errors."""
    steps = scaled_steps(rng, 20_000)
    with jax.enable_x64(True):
        expected = vector_field(TASK.loss, NODES, TASK.parameters(), START[None])[0]
    error = steps.std(0) / len(steps) ** 0.5
    assert (np.abs(steps.mean(0) - expected) < 5 * error + 1e-4).all()


@pytest.mark.slow
def test_the_covariance_of_steps_and_of_runs_is_that_of_linear_response(rng):
    steps = scaled_steps(rng, 20_000)
    with jax.enable_x64(True):
        compiled = jax.jit(step_covariance, static_argnums=(0, 1))
        expected = np.asarray(compiled(TASK.loss, NODES, TASK.parameters(), START))
    apart = steps - steps.mean(0)
    products = apart[:, :, None] * apart[:, None]
    assert (np.abs(products.mean(0) - expected) < 5 * products.std(0) / len(steps) ** 0.5 + 1e-4).all()

    dimension, runs = 400, 3000
    ends = train_overlaps(TASK, np.tile(START, (runs, 1)), dimension, [1.0], rng)[-1]
    expected = sgd_covariance(TASK, START, [1.0], NODES)[0]
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert (np.abs(dimension * np.cov(ends.T) - expected) < 0.15 * scale).all()  # five errors of a variance


@pytest.mark.slow
def test_weights_and_chain_have_the_same_moments(rng):
    basis = draw_basis(rng, 60)
    ends = train_weights(TASK, np.tile(draw_weights(basis), (30, 1)), basis[:2], [2.0], rng)[-1]
    found = np.concatenate([ends @ basis[:2].T / 60, (ends**2).mean(1, keepdims=True)], 1)
    chain = train_overlaps(TASK, np.tile(START, (600, 1)), 60, [2.0], rng)[-1]
    error = np.hypot(found.std(0) / 30**0.5, chain.std(0) / 600**0.5)
    assert (np.abs(found.mean(0) - chain.mean(0)) < 5 * error).all()


def test_bad_starts_and_features_are_refused(rng):
    with pytest.raises(UsageError, match="exceed the squared norm"):
        overlap_trajectory(TASK, [0.9, 0.9, 0.5], [1.0])
    with pytest.raises(ShapeError, match="overlaps and the squared norm"):
        train_overlaps(TASK, [[0.1, 0.5]], 100, [1.0], rng)
    with pytest.raises(UsageError, match="increasing times"):
        train_overlaps(TASK, START[None], 100, [1.0, 0.5], rng)
    with pytest.raises(UsageError, match="rng=0: expected a generator"):
        train_overlaps(TASK, START[None], 100, [1.0], 0)
    with pytest.raises(ShapeError, match="orthogonal features"):
        train_weights(TASK, np.ones(10), np.ones((2, 10)), [1.0], rng)
    with pytest.raises(ShapeError, match="for several runs"):
        train_weights(TASK, np.ones((1, 2, 10)), np.ones((2, 10)), [1.0], rng)
    with pytest.raises(ShapeError, match="one initial state"):
        sgd_covariance(TASK, START[None], [1.0])
    with pytest.raises(CertificateError, match="diverged"):
        train_overlaps(replace(TASK, learning_rate=1e6), START[None], 50, [4.0], rng)
