"""The chapter on chaos: its closed form is the mean-field map, and its verdicts on planted measurements."""

import numpy as np
import pytest
import xarray as xr

from manyheads.demo.chaos import DemoChaos, next_spin, separation_rate, smallest_network
from manyheads.errors import UsageError
from manyheads.study import check_study
from manyheads.theory.meanfield import mean_field_trajectory

SMALL = DemoChaos.small()


def test_the_closed_form_is_the_mean_field_map():
    gain, beta = 20.0, 1.25  # below chaos, which amplifies rounding
    spins = [1.0, np.tanh(beta)]  # the first token attends to itself: value 1 at position 0
    for place in range(1, 20):
        spins.append(next_spin(np.array(spins[-1]), np.array(spins[-2]), 2 * (place % 2) - 1, beta, gain))
    found = mean_field_trajectory(smallest_network(), beta, 20, gain=gain)[:, 0]
    np.testing.assert_allclose(found, spins[1:], atol=1e-12)


def test_nearby_orbits_separate_by_attention_only(rng):
    assert separation_rate(1.25, 251.0, 8, 400, rng) > 0.3
    uniform = separation_rate(1.25, 0.0, 8, 400, rng)
    # Both tokens count one half: s = +-1/2 and the fixed point x = tanh(beta (1 - eps) x) of the mean value.
    x = 0.5
    for _ in range(200):
        x = np.tanh(1.25 * 0.9 * x)
    slope = 1.25 * 0.9 * (1 - x**2) / 2
    expected = np.log(np.abs(np.roots([1, -slope, -slope])).max())
    np.testing.assert_allclose(uniform, expected, atol=2e-3)


def planted(exponent, uniform, late, rng):
    """Return measurements of six replicates that scatter a little about the given ones."""
    near = 1 + 0.001 * rng.standard_normal((1, 6))
    late = np.asarray(late) * near[..., None]
    return xr.Dataset(
        {
            "exponent": (("cell", "replicate"), exponent * near),
            "uniform": (("cell", "replicate"), uniform * near),
            "late": (("cell", "replicate", "neurons"), late),
        },
        {"neurons": list(SMALL.neurons)},
    )


@pytest.mark.parametrize(
    ("trained", "outcomes"),
    [
        ((0.41, -0.16, (0.1, 0.1)), ["holds", "holds", "holds", "holds"]),
        ((-0.1, 0.2, (0.1, 0.01)), ["refuted", "refuted", "refuted", "refuted"]),
    ],
)
def test_verdicts_on_planted_measurements(trained, outcomes, rng):
    predicted = xr.Dataset({"exponents": ("order", [0.409, -0.5]), "error": ((), 0.001)})
    found = SMALL.compare(predicted, planted(*trained, rng))
    assert [verdict.outcome for verdict in found] == outcomes


def test_sizes_that_do_not_increase_are_refused():
    with pytest.raises(UsageError, match="neurons"):
        DemoChaos(neurons=(100, 10))
    with pytest.raises(UsageError, match=r"steps=2: .*at least 50"):
        DemoChaos(steps=2)


@pytest.mark.slow
def test_it_keeps_the_contract(seed):
    check_study(DemoChaos, 2, seed)
