"""The mean-field map against plain loops, its expansion in correlations of weights, and explicit bits."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from tests.theory.meanfield.hopfield import oracle

from manyheads.errors import ShapeError, UsageError
from manyheads.theory.meanfield import OneBitNetwork, mean_field_trajectory, simulate_network
from manyheads.theory.meanfield.hopfield.simulation import overlap_fluctuations

PUBLISHED = OneBitNetwork.published()


def test_the_map_is_that_of_plain_loops(rng):
    found = mean_field_trajectory(PUBLISHED, 1.4, 50)
    assert np.abs(found - oracle.run(PUBLISHED, 1.4, 50)).max() < 1e-12
    other = replace(OneBitNetwork.random(rng, 2, 5, 1), gain=3.0, positional_weight=0.3)
    found = mean_field_trajectory(other, [[0.7], [1.1]], 9, gain=[3.0, 5.0])
    assert found.shape == (2, 2, 9, 2)
    np.testing.assert_allclose(found[1, 0], oracle.run(other, 1.1, 9), atol=1e-13)
    np.testing.assert_allclose(found[0, 1], oracle.run(other, 0.7, 9, gain=5.0), atol=1e-13)


def test_the_sum_over_types_is_the_expansion_in_odd_products(rng):
    """< W f(W^o) > = 2^-M sum_sigma f(sigma) sum_S prod sigma_S < W prod W^o_S >: exact for any types, odd S alone."""
    features, types = 3, 7
    output, other = 2.0 * rng.integers(0, 2, (2, features, types)) - 1
    attended = rng.normal(size=features)
    direct = (other * np.tanh(attended @ output)).mean(1)
    signs = np.array(list(itertools.product((-1, 1), repeat=features)))
    total = np.zeros(features)
    for size in (1, 3):
        for chosen in itertools.combinations(range(features), size):
            products = output[list(chosen)].prod(0)
            weight = (np.tanh(signs @ attended) * signs[:, list(chosen)].prod(1)).mean()
            total += weight * (other * products).mean(1)
    np.testing.assert_allclose(total, direct, atol=1e-14)


def test_without_positions_the_dynamics_is_odd():
    network = replace(PUBLISHED, positional_weight=0.0)
    one = mean_field_trajectory(network, 1.0, 40, initial=[1.0, -1, 0.5])
    np.testing.assert_allclose(one, -mean_field_trajectory(network, 1.0, 40, initial=[-1.0, 1, -0.5]), atol=1e-12)


def test_the_simulation_by_types_has_the_distribution_of_explicit_bits(rng):
    steps, neurons, beta = 6, 30, 1.0
    explicit = np.array([oracle.run(PUBLISHED, beta, steps, neurons, rng) for _ in range(120)])
    fast = simulate_network(PUBLISHED, beta, steps, np.full(4000, neurons), rng)
    pooled = np.sqrt(explicit.var(0) / len(explicit) + fast.var(0) / len(fast))
    assert (np.abs(explicit.mean(0) - fast.mean(0)) < 5 * pooled).all()
    chances = [stats.ks_2samp(explicit[:, t, c], fast[:, t, c]).pvalue for t in range(steps) for c in range(3)]
    assert min(chances) > 1e-5


def test_fluctuations_are_those_of_large_networks(rng):
    predicted = overlap_fluctuations(PUBLISHED, 0.5, 10)
    size = 3 * 10**7
    found = simulate_network(PUBLISHED, 0.5, 10, np.full(2000, size), rng)
    measured = (found - mean_field_trajectory(PUBLISHED, 0.5, 10)).std(0) * size**0.5
    np.testing.assert_allclose(measured, predicted, rtol=0.08)  # 5 standard errors of 2000 runs


def test_systems_may_start_from_tokens_of_their_own(rng):
    first = rng.uniform(-1, 1, (2, 3))
    both = mean_field_trajectory(PUBLISHED, [0.5, 1.0], 6, initial=first)
    for place, beta in enumerate((0.5, 1.0)):
        alone = mean_field_trajectory(PUBLISHED, [beta, beta], 6, initial=first[place])
        np.testing.assert_allclose(both[place], alone[0], atol=1e-14)
    with pytest.raises(UsageError, match="mean spins"):
        mean_field_trajectory(PUBLISHED, [0.5, 1.0, 2.0], 6, initial=first)


def test_quenched_correlations_belong_to_one_network(rng):
    network = PUBLISHED.with_neurons(50, "quenched", rng)
    assert network.counts(50).sum() == 50
    assert PUBLISHED.with_neurons(300, "limit") is PUBLISHED
    assert PUBLISHED.counts(3 * 10**13).tolist() == [10**13] * 3
    one = np.ones((1, 2))
    uneven = OneBitNetwork(one, one, one, one, np.ones((3, 1, 1)), fractions=[0.3, 0.7])
    assert uneven.counts(10**12).tolist() == [3 * 10**11, 7 * 10**11]
    with pytest.raises(UsageError, match="no whole numbers"):
        uneven.counts(10**9 + 1)
    with pytest.raises(UsageError, match="no whole numbers"):
        PUBLISHED.with_neurons(50, "limit")
    with pytest.raises(UsageError, match="give rng"):
        PUBLISHED.with_neurons(50, "quenched")
    with pytest.raises(UsageError, match='"limit" or "quenched"'):
        PUBLISHED.with_neurons(50, "both")


def test_what_cannot_be_run_is_refused(rng):
    with pytest.raises(UsageError, match="no whole numbers"):
        simulate_network(PUBLISHED, 1.0, 2, 100, rng)
    with pytest.raises(UsageError, match="beta"):
        mean_field_trajectory(PUBLISHED, -1.0, 2)
    with pytest.raises(ShapeError, match=r"beta of dtype .*: give numbers"):
        mean_field_trajectory(PUBLISHED, "cold", 2)
    with pytest.raises(UsageError, match="rng=None: expected a generator"):
        simulate_network(PUBLISHED, 1.0, 2, 300, None)
    with pytest.raises(ShapeError, match="broadcast"):
        simulate_network(PUBLISHED, [1.0, 2.0], 2, [3, 3, 3], rng)
    with pytest.raises(ShapeError, match="at least one system"):
        mean_field_trajectory(PUBLISHED, [], 2)
    with pytest.raises(UsageError, match="gain"):
        replace(PUBLISHED, gain=np.nan)
    with pytest.raises(UsageError, match="mean spins"):
        mean_field_trajectory(PUBLISHED, 1.0, 2, initial=[2.0, 0, 0])
    with pytest.raises(UsageError, match="-1 and \\+1"):
        OneBitNetwork(np.zeros((1, 1)), *[np.ones((1, 1))] * 3, np.ones((3, 1, 0)))
    with pytest.raises(ShapeError, match="features, types"):
        OneBitNetwork(np.ones((1, 2)), *[np.ones((1, 1))] * 3, np.ones((3, 1, 0)))
