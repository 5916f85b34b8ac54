"""Stationary states, growth rates and basins: closed properties, finite differences, and tasks without a norm."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from manyheads.errors import CertificateError, UsageError
from manyheads.theory.meanfield.contrastive import stationary_states as stability
from manyheads.theory.meanfield.contrastive.ode import jacobians, vector_field
from manyheads.theory.meanfield.contrastive.quadrature import Nodes, QuadratureError
from manyheads.theory.meanfield.contrastive.stationary_states import (
    basin_boundary,
    find_basins,
    growth_rates,
    norms_without_features,
    stationary_states,
)
from manyheads.theory.meanfield.contrastive.task import ContrastiveTask, FeatureDistribution, sparse_feature

NODES = Nodes(20, 6, 20)
TASK = ContrastiveTask()


def test_growth_rates_at_zero_overlap_depend_on_second_moments_alone():
    norm = norms_without_features(TASK, NODES)[-1]
    rates = [
        growth_rates(replace(TASK, features=(sparse_feature(), sparse_feature(p))), [0, 0, norm], NODES)
        for p in (0.25, 0.1)
    ]
    np.testing.assert_allclose(rates, np.full((2, 2), rates[0][0]), atol=1e-12)
    twice = replace(TASK, features=(sparse_feature(), sparse_feature(0.25, 2.0)))
    assert growth_rates(twice, [0, 0, norm], NODES)[1] > 1.5 * rates[0][0]


@pytest.mark.slow
def test_stationary_states_are_stationary_and_their_jacobian_is_a_derivative():
    nodes = Nodes(28, 8, 28)
    states = stationary_states(TASK, [[0.9, 0.05, 1.0], [0.02, 0.7, 0.7]], nodes)
    assert [state.stable for state in states] == [True, False, False]
    assert states[0].cosines[0] == pytest.approx(0.959, abs=2e-3)
    assert states[1].eigenvalues[0].real == pytest.approx(0.082, abs=2e-3)  # towards the first feature
    with jax.enable_x64(True):
        parameters, point = TASK.parameters(), np.array(states[0].state)
        assert np.abs(vector_field(TASK.loss, nodes.finer(), parameters, point[None])).max() < 1e-9
        nudged = point + 1e-5 * np.concatenate([np.eye(3), -np.eye(3)])
        slopes = vector_field(TASK.loss, nodes, parameters, nudged)
        jacobian = jacobians(TASK.loss, nodes, parameters, point[None])[0]
        np.testing.assert_allclose(jacobian.T, (slopes[:3] - slopes[3:]) / 2e-5, atol=1e-7)


@pytest.mark.slow
def test_the_first_feature_wins_on_its_side_of_the_boundary():
    angles = np.deg2rad([20.0, 70.0])
    equal = replace(TASK, features=(sparse_feature(), sparse_feature()))
    starts = np.stack([0.1 * np.cos(angles), 0.1 * np.sin(angles), [0.508] * 2], 1)
    assert find_basins(equal, starts, 60.0, NODES).tolist() == [0, 1]


@pytest.mark.parametrize(("boundary", "expected"), [(54.67, 54.67), (0.01, 0.0), (91.0, 90.0)])
def test_the_boundary_of_the_basins_is_bracketed(monkeypatch, boundary, expected):
    def find(task, states, horizon, nodes):
        np.testing.assert_allclose(np.hypot(states[:, 0], states[:, 1]), 0.1)
        assert (states[:, 2] == 0.5).all()
        return np.where(np.rad2deg(np.arctan2(states[:, 1], states[:, 0])) < boundary, 0, 1)

    monkeypatch.setattr(stability, "norms_without_features", lambda *_: (0.2, 0.5))
    monkeypatch.setattr(stability, "find_basins", find)
    assert basin_boundary(TASK) == pytest.approx(expected, abs=0.05)  # half of the last bracket


def test_a_task_whose_norm_decays_has_no_state_without_features():
    task = replace(TASK, correlation=-0.9)
    assert norms_without_features(task, NODES) == ()
    with pytest.raises(CertificateError, match="no stationary norm at Q = 0"):
        basin_boundary(task, nodes=NODES)
    assert find_basins(task, [0.0, 0.0, 0.01], 20.0, NODES) == -1


def test_views_without_noise_of_their_own_have_a_jacobian():
    with jax.enable_x64(True):
        parameters = replace(TASK, augmentation_std=0.0).parameters()
        assert np.isfinite(jacobians(TASK.loss, NODES, parameters, np.array([[0.3, 0.2, 0.6]]))).all()


def test_tasks_that_the_theory_does_not_cover_are_refused():
    with pytest.raises(UsageError, match="symmetric distribution"):
        FeatureDistribution((-1.0, 2.0), (2 / 3, 1 / 3))
    with pytest.raises(UsageError, match="expected 1"):
        FeatureDistribution((-1.0, 1.0), (0.5, 0.6))
    with pytest.raises(UsageError, match="always zero"):
        FeatureDistribution((0.0,), (1.0,)).kurtosis  # noqa: B018
    with pytest.raises(UsageError, match="at least -1 and at most 1"):
        ContrastiveTask(correlation=1.5)
    with pytest.raises(UsageError, match="no noise"):
        ContrastiveTask(shared_std=0.0, correlation=-1.0)


def test_basins_from_too_few_nodes_are_refused():
    with pytest.raises(QuadratureError):
        find_basins(TASK, [0.15, 0.1, 0.5], 1.0, Nodes(4, 1, 4))


@pytest.mark.parametrize("horizon", [np.nan, np.inf, -1.0])
def test_a_horizon_that_is_no_time_is_refused(horizon):
    with pytest.raises(UsageError, match="finite, increasing times"):
        find_basins(TASK, [0.15, 0.1, 0.5], horizon, NODES)


@pytest.mark.parametrize("state", [[np.nan, 0.1, 0.5], [0.1, 0.1, np.inf], np.zeros((0, 3))])
def test_states_without_finite_numbers_are_refused(state):
    with pytest.raises(UsageError, match="finite numbers"):
        find_basins(TASK, state, 1.0, NODES)


def test_a_loss_without_finite_derivatives_is_refused():
    task = replace(TASK, loss=lambda anchor, positive, negative: jax.numpy.log(anchor - 50) * positive)
    with pytest.raises(CertificateError, match="not finite"):
        find_basins(task, [0.15, 0.1, 0.5], 1.0, NODES)


def test_the_search_for_norms_goes_on_while_they_grow():
    task = replace(TASK, learning_rate=4.0, weight_decay=0.01)
    (norm,) = norms_without_features(task, NODES)
    assert 10 < norm < 30
    with pytest.raises(CertificateError, match="grows without bound"):
        norms_without_features(replace(TASK, loss=lambda y0, y1, y2: -y0 * y1, correlation=0.5), NODES)
