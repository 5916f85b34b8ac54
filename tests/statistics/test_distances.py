"""Squared distances of means without noise: against their definition, by coverage, and the exponent of a distance."""

import math

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.statistics.distances import distance_exponent, samples_to_decide, squared_distance


def naive(networks, draws):
    """|mean - mean|^2 minus what either scatters, from the definition."""
    gap = networks.mean(0) - draws.mean(0)
    noise = networks.var(0, ddof=1).mean() / len(networks)
    return (gap**2).mean() - noise - (draws.var(0, ddof=1).mean() / len(draws) if len(draws) > 1 else 0)


def test_pseudo_values_are_those_of_leaving_one_out(rng):
    networks, draws = rng.normal(0.3, 1, (7, 5)), rng.normal(0, 0.2, (4, 5))
    found = squared_distance(networks, draws)
    assert found.square == pytest.approx(naive(networks, draws))
    for own, values, place in ((found.first, networks, 0), (found.second, draws, 1)):
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
            covered[true] += squared_distance(networks + true, draws).interval().contains(true)
    # Squares are skewed: with 200 networks of four directions three per cent are missed, eleven of sixty once in 1e5.
    assert min(covered.values()) >= 50
    exact = squared_distance(rng.normal(0.3, 1e-3, (8, 5)), np.zeros((1, 5)))
    assert exact.distance == pytest.approx(0.3, abs=2e-3)
    assert exact.drawn == 0


def test_the_exponent_of_a_distance_is_bounded_only_where_it_is_seen(rng):
    def at(mean, noise):
        return squared_distance(mean + noise * rng.normal(size=(200, 6)), 1e-3 * rng.normal(size=(8, 6)))

    seen = distance_exponent((4, 64), at(0.4, 0.1), at(0.025, 0.05))
    assert seen[1].contains(-1)
    assert seen[1].width < 1
    half_seen = distance_exponent((4, 64), at(0.4, 0.1), at(0.0, 0.05))[1]
    assert half_seen.low == -math.inf
    assert half_seen.high < -0.6
    unseen = distance_exponent((4, 64), at(0.0, 0.1), at(0.0, 0.1))[1]
    assert unseen.width == math.inf
    assert unseen.high > 0
    assert samples_to_decide((4, 64), at(0.4, 0.1), at(0.0, 0.01), -0.75) == 200
    more = samples_to_decide((4, 64), at(0.4, 0.1), at(0.0, 1.5), -0.75)
    assert more is None or more > 200


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e76])
def test_what_has_no_square_is_refused(value):
    with pytest.raises(UsageError, match="rescale both samples"):
        squared_distance(np.array([0.0, 1.0, value]), np.zeros(1))
