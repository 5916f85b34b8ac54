"""McKean-Vlasov particles: the ODE without a penalty, and the refusal of long steps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manyheads.errors import CertificateError, UsageError
from manyheads.theory.meanfield.contrastive.ode import overlap_trajectory
from manyheads.theory.meanfield.contrastive.particles import simulate_particles
from manyheads.theory.meanfield.contrastive.quadrature import Nodes
from manyheads.theory.meanfield.contrastive.task import ContrastiveTask

TASK, NODES = ContrastiveTask(), Nodes(20, 6, 20)


def draw_particles(rng, size):
    features = np.kron([[1, 1, 1, 1], [1, 1, -1, -1]], np.ones(size // 4))
    rest = np.kron([1, -1, 1, -1], np.ones(size // 4))
    return 0.3 * features[0] + 0.2 * features[1] + np.sqrt(0.6 - 0.13) * rest, features


@pytest.mark.slow
def test_particles_without_a_penalty_follow_the_ode(rng, seed):
    weights, features = draw_particles(rng, 20_000)
    found = simulate_particles(TASK, weights, features, 3.0, jax.random.key(seed), steps=96, records=3, nodes=NODES)
    expected = overlap_trajectory(TASK, [0.3, 0.2, 0.6], found.times, NODES, tolerance=1e-3)
    np.testing.assert_allclose(found.states, expected, atol=0.02)  # five standard errors, and the steps' error
    np.testing.assert_allclose(found.states[0], [0.3, 0.2, 0.6], atol=1e-12)


def test_a_penalty_in_proportion_to_the_weights_is_weight_decay(rng, seed):
    weights, features = draw_particles(rng, 400)
    settings = {"key": jax.random.key(seed), "steps": 8, "records": 2, "nodes": NODES, "tolerance": 1.0}
    penalized = simulate_particles(TASK, weights, features, 1.0, penalty=lambda w: 0.3 * w, **settings)
    decayed = simulate_particles(
        replace(TASK, weight_decay=TASK.weight_decay + 0.3), weights, features, 1.0, **settings
    )
    np.testing.assert_allclose(penalized.weights, decayed.weights, atol=1e-12)


@pytest.mark.slow
def test_long_steps_are_refused(rng, seed):
    weights, features = draw_particles(rng, 400)
    with pytest.raises(CertificateError, match="give more steps"):
        simulate_particles(
            TASK, weights, features, 8.0, jax.random.key(seed), lambda w: 2 * jnp.sign(w), 4, 2, NODES, tolerance=1e-3
        )


def test_steps_that_do_not_divide_are_refused(rng, seed):
    weights, features = draw_particles(rng, 400)
    with pytest.raises(UsageError, match="multiple of 4"):
        simulate_particles(TASK, weights, features, 8.0, jax.random.key(seed), steps=5, records=2)
