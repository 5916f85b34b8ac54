"""Distributions of logits over heads: shares below levels, Gaussian comparison, sampled heads."""

import math

import jax
import numpy as np
import pytest

from manyheads.errors import CertificateError, UsageError
from manyheads.statistics.distances import squared_distance
from manyheads.studies.dmft.head_diversity import MOVES
from manyheads.studies.dmft.shared.logit_distributions import LEVELS, gaussian_below, hold_against_gaussian, pool_logits
from manyheads.studies.dmft.shared.mean_field import (
    sampled_blocks,
    solve_blocks,
    solve_heads,
    train_seeds,
    training_problem,
)
from manyheads.theory.dmft import Network, Problem, train_networks


def test_shares_below_levels_are_those_of_known_distributions(rng):
    moved = gaussian_below(0.02, 1.02**2) - gaussian_below(0.0, 1.0)
    assert np.sqrt((moved**2).mean()) == pytest.approx(0.02 * MOVES, rel=0.05)
    # A product of sixteen pairs has excess kurtosis 6/16: an Edgeworth term moves shares by 0.064/16.
    logits = (rng.normal(size=(400, 500, 16)) * rng.normal(size=(400, 500, 16))).sum(-1) / 4
    units = np.full((1, 1, 1), 2.0)
    found = pool_logits(2 * logits.reshape(1, 1, -1, 1, 1, 1), units)
    assert found["square"][0] == pytest.approx(1, abs=0.03)
    gap = found["below"][0] - gaussian_below(found["mean"][0], found["square"][0])
    assert np.sqrt((gap**2).mean()) == pytest.approx(0.064 / 16, rel=0.35)
    assert found["below"].shape == (1, len(LEVELS))


def test_a_gaussian_that_is_fitted_takes_noise_with_it(rng):
    squares, covered = [], 0
    for _ in range(40):
        found = pool_logits(rng.normal(0.3, 1.2, (60, 1, 50, 1, 1, 1)), np.ones((1, 1, 1)))
        networks, gaussian = hold_against_gaussian(found["below"], found["mean"], found["square"])
        np.testing.assert_allclose(networks.mean(0), found["below"].mean(0), atol=1e-12)
        far = squared_distance(networks, gaussian[None])
        squares.append(far.square)
        covered += far.interval().contains(0)
    # With all of the networks' noise taken off, the mean is ten standard errors below zero.
    assert abs(np.mean(squares)) < 4.5 * np.std(squares, ddof=1) / math.sqrt(len(squares))
    assert covered >= 36


@pytest.mark.slow
def test_networks_that_diverge_are_counted_and_refused(rng):
    problem = Problem(rng.standard_normal((2, 3, 5)), np.array([1.0, -1.0]), steps=2, learning_rate=1e200)
    with pytest.raises(CertificateError, match="2 of 2 networks with N=2, H=3 diverge"):
        train_seeds(problem, Network(2, 3), jax.random.key(0), 2, every_head=True)
    with pytest.raises(UsageError, match="steps=1"):
        training_problem("digits", steps=1)


def two_steps(rng):
    return Problem(rng.standard_normal((2, 3, 5)), np.array([1.0, -1.0]), steps=2, learning_rate=0.3)


def test_solved_heads_are_those_whose_mean_and_variance_are_known(rng):
    problem = two_steps(rng)
    branches = sampled_blocks(problem, 2, 0.5)
    solved, heads = solve_heads(problem, branches, np.random.default_rng(1))
    assert np.array_equal(solved.outputs, solve_blocks(problem, branches, np.random.default_rng(1)).outputs)
    np.testing.assert_allclose(heads[0].mean(0), solved.observables[-1][0]["logits"], atol=1e-12)
    np.testing.assert_allclose(heads[0].var(0), solved.observables[-1][0]["logit_variance"], atol=1e-12)


@pytest.mark.slow
def test_trained_heads_are_those_whose_mean_and_variance_are_known(rng):
    trained = train_networks(two_steps(rng), Network(2, 3), [0, 1], every_head=True)
    np.testing.assert_allclose(trained.head_logits.mean("head"), trained.logits, atol=1e-12)
    variance = trained.head_logits.var("head").mean(("sample", "token", "key"))
    np.testing.assert_allclose(variance, trained.logit_variance, atol=1e-12)
