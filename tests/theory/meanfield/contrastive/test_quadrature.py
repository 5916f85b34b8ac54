"""Expectations against the product rule over all features and outputs, with second derivatives."""

import itertools

import jax
import numpy as np
import pytest
from numpy.polynomial.hermite_e import hermegauss
from tests.theory.meanfield.contrastive.oracle import noise_covariance

from manyheads.errors import CertificateError
from manyheads.theory.meanfield.contrastive.ode import overlap_trajectory
from manyheads.theory.meanfield.contrastive.quadrature import Nodes, QuadratureError, expectations
from manyheads.theory.meanfield.contrastive.sgd_covariance import sgd_covariance
from manyheads.theory.meanfield.contrastive.stationary_states import growth_rates
from manyheads.theory.meanfield.contrastive.task import ContrastiveTask, logistic_loss, sparse_feature


def polynomial(anchor, positive, negative):
    """A loss whose expectations few Gauss-Hermite nodes integrate exactly."""
    return -anchor * positive + 0.3 * anchor**2 * negative**2 + 0.1 * positive**3 * anchor


def product_rule(task, overlaps, squared_norm, count):
    """Return A, B and D by enumeration of the features and Gauss-Hermite nodes of three outputs, B by the Hessian."""
    x, w = hermegauss(count)
    z = np.array(list(itertools.product(x, x, x))) @ np.linalg.cholesky(noise_covariance(task)).T
    chances = np.prod(list(itertools.product(w, w, w)), 1) / w.sum() ** 3

    def of_outputs(y):
        return task.loss(*y)

    both = jax.jit(jax.vmap(lambda y: (jax.grad(of_outputs)(y), jax.hessian(of_outputs)(y))))
    parameters, total = task.parameters(), [0.0, 0.0, 0.0]
    joint = list(zip(parameters.values, parameters.probabilities, strict=True))
    features = [(c, d, p * q) for (c, p), (d, q) in itertools.product(joint, repeat=2)]
    c = np.array([(one, one, other) for one, other, _ in features])  # (pairs, view, p)
    y = (c @ overlaps)[:, None] + np.sqrt(squared_norm) * z  # (pairs, nodes, view)
    weights = np.multiply.outer([p for *_, p in features], chances).ravel()
    g, h = map(np.asarray, both(y.reshape(-1, 3)))
    total[0] = np.einsum("n,ns,nsk->k", weights, g, np.repeat(c, len(z), 0))
    total[1] = np.einsum("n,nst,st->", weights, h, noise_covariance(task))
    total[2] = np.einsum("n,ns,nt,st->", weights, g, g, noise_covariance(task))
    return total


@pytest.mark.parametrize(
    ("loss", "count", "error"), [pytest.param(polynomial, 4, 1e-7, marks=pytest.mark.slow), (logistic_loss, 9, 2e-3)]
)
def test_reduced_expectations_are_those_of_the_product_rule(loss, count, error):
    task = ContrastiveTask(correlation=-0.4, loss=loss)
    overlaps, squared_norm = np.array([0.5, 0.3]), 0.7
    with jax.enable_x64(True):
        reduced = jax.jit(expectations, static_argnums=(0, 1))
        found = reduced(loss, Nodes(40, 12, 40), task.parameters(), overlaps, squared_norm)
        for one, other in zip(found, product_rule(task, overlaps, squared_norm, count), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=error)


@pytest.mark.slow
def test_too_few_nodes_are_refused_with_figure_threshold_and_remedy():
    task = ContrastiveTask(features=(sparse_feature(0.01),), shared_std=0.1, augmentation_std=0.1)
    with pytest.raises(QuadratureError, match="give more nodes") as caught:
        overlap_trajectory(task, [0.5, 0.5], [0.5], Nodes(6, 2, 6))
    assert isinstance(caught.value, CertificateError)
    assert caught.value.measured > caught.value.threshold == 1e-5


def test_noise_narrower_than_the_grid_is_refused_where_both_node_counts_agree_on_zero():
    task = ContrastiveTask(shared_std=1e-4, correlation=-1.0)
    state = [0.41, 0.33, 0.6]
    with pytest.raises(QuadratureError, match="narrower than the spacing") as caught:
        overlap_trajectory(task, state, [0.5, 1.0])
    assert caught.value.measured == pytest.approx(1, abs=0.2)
    for refused in (growth_rates, lambda *given: sgd_covariance(*given, [0.5])):
        with pytest.raises(QuadratureError, match="narrower than the spacing"):
            refused(task, state)
