"""Closed equations on the circle against particles and closed forms; flows, refusals."""

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.theory.meanfield.incontext.circle import (
    circle_flow,
    conserved_quantity,
    escape_rate,
    harmonic_coefficient,
)
from manyheads.theory.meanfield.incontext.crossings import first_crossing
from manyheads.theory.meanfield.incontext.particles import Particles, circle_particles, particle_flow, represent
from manyheads.theory.meanfield.incontext.prompt_length import solve_attention
from manyheads.theory.meanfield.incontext.task import circle_task

SIGNAL, FOREIGN = np.diag([0.3, 0.03]), 0.6 * np.eye(2)
TIMES = np.linspace(0.0, 400.0, 9)


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, 20])
def test_particles_of_a_frozen_layer_follow_the_closed_equations(length):
    limit = circle_flow(SIGNAL, FOREIGN, TIMES, length=length)
    start = circle_particles(SIGNAL, FOREIGN, 512)
    task = circle_task(nodes=64)
    found = particle_flow(task, start, TIMES, layers="outer", length=length)
    assert np.abs(found.loss - limit.loss).max() < 3e-3  # aliasing of the ReLU on 64 nodes
    assert found.condition.max() < 1e4
    end = represent(found.particles, task.inputs)
    assert solve_attention(task, end, length).loss == pytest.approx(found.loss[-1], abs=1e-9)


def test_the_conserved_quantity_is_constant_and_the_escape_has_its_rate():
    drawn = circle_flow(SIGNAL, FOREIGN, TIMES)
    kept = conserved_quantity(drawn)
    assert np.abs(kept - kept[0]).max() < 1e-8
    times = np.linspace(0.0, 500.0, 1001)
    small, large = (
        first_crossing(times, circle_flow(np.diag([0.3, eps]), FOREIGN, times).loss, 0.25) for eps in (1e-5, 1e-3)
    )
    assert small - large == pytest.approx(np.log(100) / escape_rate(0.36), rel=2e-3)
    assert first_crossing(times, np.ones(1001), 0.5) == np.inf
    assert [harmonic_coefficient(degree) for degree in (1, 2, 3)] == pytest.approx(
        [1 / 4, 1 / (3 * np.pi), 0], abs=1e-9
    )


@pytest.mark.slow
def test_fast_attention_is_the_two_timescale_limit():
    times = np.linspace(0.0, 40.0, 5)
    limit = circle_flow(SIGNAL, FOREIGN, times).loss
    errors = [
        np.abs(circle_flow(SIGNAL, FOREIGN, times, attention_speed=speed, tolerance=1e-7).loss - limit).max()
        for speed in (1e3, 1e4)
    ]
    assert errors[1] < 0.2 * errors[0] < 4e-3


@pytest.mark.slow
def test_attention_of_finite_speed_descends_the_loss_at_its_own_weights():
    """Against an integration in NumPy, with central differences of the loss at W."""
    rates = np.repeat([harmonic_coefficient(2) ** 2, harmonic_coefficient(1) ** 2, 3.0], 4)
    signal, foreign = np.array([[0.3, 0.1], [-0.2, 0.1]]), np.array([[0.5, 0.2], [0.1, 0.6]])

    def loss(flat):
        h, g, w = flat.reshape(3, 2, 2)
        return 1 - np.trace(h.T @ w @ h) + 0.5 * np.trace(w @ (h @ h.T + g @ g.T) @ w.T @ h @ h.T)

    def slope(_, flat):
        return -rates * np.array([loss(flat + step) - loss(flat - step) for step in 1e-6 * np.eye(12)]) / 2e-6

    start = np.stack([signal, foreign, np.linalg.inv(signal @ signal.T + foreign @ foreign.T)])
    expected = solve_ivp(slope, (0, 30), start.ravel(), rtol=1e-8, atol=1e-10).y[:, -1].reshape(3, 2, 2)
    found = circle_flow(signal, foreign, [30.0], attention_speed=3.0)
    for name, each in zip(("signal", "foreign", "attention"), expected, strict=True):
        np.testing.assert_allclose(getattr(found, name)[0], each, atol=1e-5)
    assert found.loss[0] == pytest.approx(loss(expected.ravel()), abs=1e-6)


@pytest.mark.slow
def test_steps_of_one_size_are_of_fourth_order_and_follow_the_adaptive_ones():
    task, times = circle_task(nodes=16), [0.3, 0.5, 1.0]
    start = circle_particles(np.diag([0.1, 0.06]), 0.3 * np.eye(2), 6, activation="softplus")
    losses = [
        particle_flow(task, start, times, activation="softplus", layers="both", step=step).loss
        for step in (0.1, 0.05, 0.025)
    ]
    assert np.abs(losses[1] - losses[2]).max() < np.abs(losses[0] - losses[1]).max() / 8
    adaptive = particle_flow(task, start, times, activation="softplus", layers="both").loss
    assert np.abs(losses[2] - adaptive).max() < 1e-5


def test_both_layers_descend_along_the_gradient(rng):
    task = circle_task((1, 2), nodes=32)
    start = Particles(rng.normal(size=(6, 2)), rng.normal(size=(6, 2)))
    step = 1e-4
    found = particle_flow(task, start, [0.0, step], activation="softplus", layers="both")

    def loss(outer, inner):
        return solve_attention(task, represent(Particles(outer, inner), task.inputs, "softplus")).loss

    slopes = []
    for place in range(2):
        slope = np.zeros_like(start[place])
        for entry in np.ndindex(slope.shape):
            moved = [each.copy() for each in start]
            moved[place][entry] += 1e-6
            slope[entry] = (loss(*moved) - loss(*start)) / 1e-6
        slopes.append(slope)
    for before, after, slope in zip(start, found.particles, slopes, strict=True):
        assert after - before == pytest.approx(-6 * step * slope, rel=0.02, abs=1e-6)
    assert found.loss[0] - found.loss[1] == pytest.approx(6 * step * sum((s**2).sum() for s in slopes), rel=0.02)


def test_what_cannot_flow_is_refused(rng):
    task, start = circle_task(nodes=32), circle_particles(SIGNAL, FOREIGN, 8)
    with pytest.raises(CertificateError, match="singular"):
        particle_flow(task, (np.zeros((8, 2)), start.inner), [1.0], layers="outer")
    with pytest.raises(CertificateError, match="singular"):
        circle_flow(np.zeros((2, 2)), np.zeros((2, 2)), [1.0])
    with pytest.raises(ShapeError, match="particles"):
        particle_flow(task, (start.outer, start.inner[:, :1]), [1.0])
    with pytest.raises(UsageError, match="increasing times"):
        particle_flow(task, start, [1.0, 0.5])
    with pytest.raises(UsageError, match="layers"):
        particle_flow(task, start, [1.0], layers="inner")
    with pytest.raises(UsageError, match="activation"):
        particle_flow(task, start, [1.0], activation="step")
    with pytest.raises(UsageError, match="steps of one size are for both layers"):
        particle_flow(task, start, [1.0], layers="outer", step=0.1)
    with pytest.raises(UsageError, match=r"both layers and ReLU: .* give a step"):
        particle_flow(task, start, [1.0], layers="both")
    for step in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(UsageError, match=r"step=.*positive number"):
            particle_flow(task, start, [1.0], layers="both", step=step)
    with pytest.raises(UsageError, match="rng=5: expected a generator"):
        circle_particles(SIGNAL, FOREIGN, 8, 5)
    with pytest.raises(UsageError, match="harmonic"):
        circle_particles(SIGNAL, FOREIGN, 8, activation="sigmoid")
    with pytest.raises(ShapeError, match="signal of shape \\(3, 3\\)"):
        circle_particles(np.eye(3), FOREIGN, 8)
    with pytest.raises(ShapeError, match="vectors of one length"):
        first_crossing([0.0, 1.0], [1.0], 0.5)
    with pytest.raises(UsageError, match="foreign_mass"):
        escape_rate(0.0)
    with pytest.raises(UsageError, match="tolerance"):
        circle_flow(SIGNAL, FOREIGN, [1.0], tolerance=np.nan)
    with pytest.raises(UsageError, match="attention_speed"):
        circle_flow(SIGNAL, FOREIGN, [1.0], attention_speed=0.0)
