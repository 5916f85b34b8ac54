"""What studies of many heads decide by: the mean network without noise, its power, and shares below levels."""

import math

import jax
import numpy as np
import pytest

from manyheads.errors import CertificateError, UsageError
from manyheads.limits import Network, Problem, train_networks
from manyheads.limits.comparisons.logit_distributions import LEVELS, gaussian_below, hold_against_gaussian, pool_logits
from manyheads.limits.comparisons.mean_field import (
    sampled_blocks,
    solve_blocks,
    solve_heads,
    train_seeds,
    training_problem,
)
from manyheads.limits.comparisons.mean_networks import bias_exponent, networks_to_decide, squared_bias
from manyheads.limits.studies.attention_over_heads import MOVES


def naive(networks, draws):
    """|mean - mean|^2 minus what either scatters, from the definition."""
    gap = networks.mean(0) - draws.mean(0)
    noise = networks.var(0, ddof=1).mean() / len(networks)
    return (gap**2).mean() - noise - (draws.var(0, ddof=1).mean() / len(draws) if len(draws) > 1 else 0)


def test_pseudo_values_are_those_of_leaving_one_out(rng):
    networks, draws = rng.normal(0.3, 1, (7, 5)), rng.normal(0, 0.2, (4, 5))
    found = squared_bias(networks, draws)
    assert found.square == pytest.approx(naive(networks, draws))
    for own, values, place in ((found.networks, networks, 0), (found.draws, draws, 1)):
        sides = [networks, draws]
        whole = naive(*sides)
        for one in range(len(values)):
            sides[place] = np.delete(values, one, axis=0)
            direct = len(values) * whole - (len(values) - 1) * naive(*sides)
            assert own[one] - own.mean() == pytest.approx(direct - whole, abs=1e-12)


def test_noise_is_no_distance_and_a_distance_is_found(rng):
    covered = {0.0: 0, 0.3: 0}
    for true in covered:
        for _ in range(60):
            # Correlated in time, as outputs are: four directions carry ten numbers.
            mixing = rng.normal(size=(4, 10)) / 2
            networks, draws = (rng.normal(size=(n, 4)) @ mixing * size for n, size in ((200, 1.0), (8, 0.1)))
            covered[true] += squared_bias(networks + true, draws).interval().contains(true)
    # Squares are skewed: with 200 networks of four directions three per cent are missed, eleven of sixty once in 1e5.
    assert min(covered.values()) >= 50
    exact = squared_bias(rng.normal(0.3, 1e-3, (8, 5)), np.zeros((1, 5)))
    assert exact.distance == pytest.approx(0.3, abs=2e-3)
    assert exact.drawn == 0


def test_the_power_of_the_bias_is_bounded_only_where_it_is_seen(rng):
    def at(mean, noise):
        return squared_bias(mean + noise * rng.normal(size=(200, 6)), 1e-3 * rng.normal(size=(8, 6)))

    seen = bias_exponent((4, 64), at(0.4, 0.1), at(0.025, 0.05))
    assert seen[1].contains(-1)
    assert seen[1].width < 1
    half_seen = bias_exponent((4, 64), at(0.4, 0.1), at(0.0, 0.05))[1]
    assert half_seen.low == -math.inf
    assert half_seen.high < -0.6
    unseen = bias_exponent((4, 64), at(0.0, 0.1), at(0.0, 0.1))[1]
    assert unseen.width == math.inf
    assert unseen.high > 0
    assert networks_to_decide((4, 64), at(0.4, 0.1), at(0.0, 0.01), -0.75) == 200
    more = networks_to_decide((4, 64), at(0.4, 0.1), at(0.0, 1.5), -0.75)
    assert more is None or more > 200


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
        far = squared_bias(networks, gaussian[None])
        squares.append(far.square)
        covered += far.interval().contains(0)
    # With all of the networks' noise taken off, the mean is ten standard errors below zero.
    assert abs(np.mean(squares)) < 4.5 * np.std(squares, ddof=1) / math.sqrt(len(squares))
    assert covered >= 36


def test_networks_that_diverge_are_counted_and_refused(rng):
    lesson = Problem(rng.standard_normal((2, 3, 5)), np.array([1.0, -1.0]), steps=2, rate=1e200)
    with pytest.raises(CertificateError, match="2 of 2 networks with N=2, H=3 diverge"):
        train_seeds(lesson, Network(2, 3), jax.random.key(0), 2, every_head=True)
    with pytest.raises(UsageError, match="steps=1"):
        training_problem("digits", steps=1)


def test_single_heads_are_those_whose_mean_and_variance_are_known(rng):
    lesson = Problem(rng.standard_normal((2, 3, 5)), np.array([1.0, -1.0]), steps=2, rate=0.3)
    branches = sampled_blocks(lesson, 2, 0.5)
    solved, heads = solve_heads(lesson, branches, np.random.default_rng(1))
    assert np.array_equal(solved.outputs, solve_blocks(lesson, branches, np.random.default_rng(1)).outputs)
    np.testing.assert_allclose(heads[0].mean(0), solved.observables[-1][0]["logits"], atol=1e-12)
    np.testing.assert_allclose(heads[0].var(0), solved.observables[-1][0]["logit_variance"], atol=1e-12)
    trained = train_networks(lesson, Network(2, 3), [0, 1], every_head=True)
    np.testing.assert_allclose(trained.head_logits.mean("head"), trained.logits, atol=1e-12)
    variance = trained.head_logits.var("head").mean(("sample", "token", "key"))
    np.testing.assert_allclose(variance, trained.logit_variance, atol=1e-12)
