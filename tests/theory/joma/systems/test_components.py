"""Flows against quadrature and closed forms; networks trained by SGD against the flows that they follow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import lambertw

from manyheads.errors import UsageError
from manyheads.theory.joma.systems.components import invert_output, relax, relax_layer, train_components, train_layer
from manyheads.theory.joma.systems.recording import SGDOptions
from manyheads.theory.joma.theorems.salient_first import EXP, REGRESSION, exact_time, find_log_deficit


def test_relaxing_components_are_where_quadrature_says(rng):
    targets, times = rng.uniform(0.5, 3, 5), np.sort(rng.uniform(0.01, 4, 6))
    np.testing.assert_allclose(relax(targets, times), find_log_deficit(targets, times[:, None]), rtol=1e-8)


def test_softmax_only_changes_the_clock(rng):
    targets = rng.uniform(0.5, 2.5, 5)
    found = relax(targets, np.array([0.3, 0.5, 0.7, 1.0, 2.0, 5.0]), normalized=True)
    clock = exact_time(targets, found)  # the time of exp attention at which each component is as far
    np.testing.assert_allclose(clock, clock[:, :1] + np.zeros(5), rtol=1e-7)


@pytest.mark.slow
def test_a_layer_without_attention_goes_straight(rng):
    target, init = rng.normal(size=(2, 3, 4))
    found = relax_layer(target, init, np.array([0.7]), "uniform")[0]
    np.testing.assert_allclose(found, target + (init - target) * np.exp(-0.7), rtol=1e-6, atol=1e-7)


def test_the_output_is_inverted_as_lambert_says(rng):
    with jax.enable_x64(True):
        outputs = np.concatenate([[0.0], rng.normal(size=20) * 10.0 ** rng.uniform(-6, 8, 20)])
        expected = np.sign(outputs) * np.sqrt(lambertw(outputs**2).real)
        np.testing.assert_allclose(np.asarray(invert_output(jnp.asarray(outputs))), expected, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "law"), [("matched", EXP), ("squared", REGRESSION)])
def test_training_goes_to_its_law_as_the_rate_falls(loss, law, seed):
    # Every token in every batch: nothing is random, and the error is of the order of the rate.
    targets, horizon, errors = np.array([0.8, 1.4]), 0.6, []
    with jax.enable_x64(True):
        for steps in (640, 1280):
            training = SGDOptions(horizon / steps, steps, 32)
            found = train_components(jnp.asarray(targets), loss, training, 1.0, jax.random.key(seed))[-1]
            errors.append(np.asarray(found) - find_log_deficit(targets, horizon, law))
    np.testing.assert_allclose(errors[0] / errors[1], 2, rtol=0.1)


@pytest.mark.slow
def test_a_trained_layer_keeps_the_conserved_relation(rng, seed):
    target, init = rng.normal(size=(3, 4)) * 0.5, rng.normal(size=(3, 4)) * 0.1
    with jax.enable_x64(True):
        training = SGDOptions(1e-3, 3200, 32)
        found = train_layer(jnp.asarray(target), jnp.asarray(init), training, 0.5, jax.random.key(seed))
    logits, weights = map(np.asarray, found)
    drift = logits - (weights**2).sum(1) / 2
    assert np.abs(drift).max() < 5e-3 < np.abs(logits[-1] - logits[0]).max()


@pytest.mark.parametrize(
    ("steps", "probability", "says"), [(33, 0.5, "multiple of snapshots"), (32, 0.0, "positive number of at most 1")]
)
def test_impossible_trainings_are_refused(steps, probability, says):
    with pytest.raises(UsageError, match=says):
        train_components(jnp.ones(2), "matched", SGDOptions(0.1, steps, 32), probability, jax.random.key(0))


def test_unknown_names_are_refused():
    with pytest.raises(UsageError, match="expected one of exp, softmax"):
        relax_layer(np.eye(2), np.eye(2), np.ones(1), "none")
    with pytest.raises(UsageError, match="expected one of matched, squared"):
        train_components(jnp.ones(2), "none", SGDOptions(0.1, 32, 32), 0.5, jax.random.key(0))
