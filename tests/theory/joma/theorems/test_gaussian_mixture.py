"""Theorem 3 against samples, closed forms, Stein's identity, and SGD against its predicted fluctuations."""

import equinox as eqx
import jax
import numpy as np
import pytest
from scipy import stats
from tests.theory.joma.monte_carlo import sampled_gradient

from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.theory.joma.systems.gaussian_mixture import (
    NONLINEARITIES,
    Mixture,
    Nonlinearity,
    find_nonlinearity,
    train_neuron,
)
from manyheads.theory.joma.systems.recording import SGDOptions
from manyheads.theory.joma.theorems.gaussian_mixture import (
    expected_gradient,
    gradient_covariance,
    linear_noise_approximation,
    mixture_coefficients,
)


def draw_mixture(rng, shape="gaussian", dim=4):
    centres, gradients = rng.normal(size=(3, dim)), rng.normal(size=3)
    return Mixture(centres, rng.dirichlet(np.full(3, 3.0)), gradients, rng.uniform(0.3, 1.0), rng.normal(), shape)


def draw_neuron(rng, shape):
    """Return a mixture with the weight of a neuron whose pre-activation is zero in the mean: half its samples count."""
    mixture, v = draw_mixture(rng, shape), rng.normal(size=4)
    return eqx.tree_at(lambda m: m.offset, mixture, -float(mixture.probabilities @ mixture.means @ v)), v


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("relu", "gaussian"),
        ("tanh", "sphere"),
        pytest.param("relu", "sphere", marks=pytest.mark.slow),
        pytest.param("square", "gaussian", marks=pytest.mark.slow),
    ],
)
def test_the_field_is_the_mean_over_samples(name, shape, rng, seed):
    # 16 scores in all: a normal one exceeds 5.5 once in 3e7 tests.
    (mixture, v), phi = draw_neuron(rng, shape), NONLINEARITIES[name]
    mean, error = sampled_gradient(mixture, v, phi, 60_000, jax.random.key(seed))
    assert np.abs((mean - expected_gradient(mixture, v, phi)) / error).max() < 5.5


def test_relu_has_its_closed_form(rng):
    mixture, v = draw_mixture(rng), rng.normal(size=4)
    found = mixture_coefficients(mixture, v, NONLINEARITIES["relu"])
    rho = (mixture.means @ v + mixture.offset) / (np.linalg.norm(v) * mixture.std)
    np.testing.assert_allclose(found.mean, stats.norm.cdf(rho), atol=1e-13)
    np.testing.assert_allclose(found.weight, mixture.std * stats.norm.pdf(rho), atol=1e-13)


def test_steins_identity_holds_for_gaussian_clouds_alone(rng):
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)  # for E of a normal variable
    for shape in ("gaussian", "sphere"):
        mixture, v = draw_mixture(rng, shape, dim=3), rng.normal(size=3)
        theta = mixture_coefficients(mixture, v, NONLINEARITIES["tanh"]).weight
        size = np.linalg.norm(v)
        y = np.tanh((mixture.means @ v + mixture.offset)[:, None] + size * mixture.std * nodes)
        curvature = (-2 * y * (1 - y**2)) @ weights / weights.sum()  # E phi''(r + |v| u), (C,)
        error = np.abs(theta - size * mixture.std**2 * curvature).max()
        assert (error < 1e-8) == (shape == "gaussian")


@pytest.mark.parametrize("shape", ["gaussian", pytest.param("sphere", marks=pytest.mark.slow)])
def test_the_covariance_is_that_of_samples(shape, rng, seed):
    (mixture, v), phi = draw_neuron(rng, shape), NONLINEARITIES["relu"]
    with jax.enable_x64(True):
        draw = jax.jit(lambda key: mixture.draw(key, 60_000))
        x, a = (np.asarray(part) for part in draw(jax.random.key(seed)))
    g = (a * (x @ v + mixture.offset > 0))[:, None] * x
    products = np.einsum("ni,nj->nij", g - g.mean(0), g - g.mean(0))
    error = products.std(0) / len(g) ** 0.5
    assert np.abs((products.mean(0) - gradient_covariance(mixture, v, phi)) / error).max() < 5.5


@pytest.mark.slow
def test_sgd_strays_from_the_flow_as_predicted(rng, seed):
    # Linear gradients: the linear-noise law is exact but for finite steps. The mean of 256 chi-square variables on
    # about four degrees of freedom is within 30% up to once in ten thousand.
    mixture, phi, start = draw_mixture(rng), NONLINEARITIES["identity"], rng.normal(size=4)
    flow = linear_noise_approximation(mixture, phi, start, np.linspace(0.0, 1.0, 17), 0.5)
    keys = jax.random.split(jax.random.key(seed), 256)
    with jax.enable_x64(True):
        training = SGDOptions(1 / 128, 128, 1)
        paths = np.asarray(jax.vmap(lambda key: train_neuron(mixture, phi, start, training, 0.5, key))(keys))
    away = paths[:, -1] - flow.path[-1] - flow.bias[-1] / 128
    assert (away**2).sum(1).mean() * 128 / np.trace(flow.covariance[-1]) == pytest.approx(1, rel=0.4)


def test_bad_input_is_refused(rng):
    mixture = draw_mixture(rng)
    with pytest.raises(UsageError, match="direction"):
        mixture_coefficients(mixture, np.zeros(4), NONLINEARITIES["relu"])
    with pytest.raises(UsageError, match="weights of shape"):
        mixture_coefficients(mixture, np.ones(3), NONLINEARITIES["relu"])
    with pytest.raises(UsageError, match="add up"):
        Mixture(np.eye(2), np.ones(2), np.ones(2), 1.0)
    with pytest.raises(ShapeError, match="expected"):
        Mixture(np.eye(2), np.ones(3) / 3, np.ones(2), 1.0)
    with pytest.raises(UsageError, match="isotropic"):
        draw_mixture(rng, "cube")
    with pytest.raises(UsageError, match="activation 'none'"):
        find_nonlinearity("none")
    hidden = Nonlinearity("hidden", NONLINEARITIES["relu"].value)
    with pytest.raises(CertificateError, match="kinks"):  # a step that is not announced
        mixture_coefficients(mixture, np.ones(4), hidden)
