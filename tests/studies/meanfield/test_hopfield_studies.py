"""Studies of 1-bit self-attention: verdicts and pictures on planted measurements, and what they refuse."""

import numpy as np
import pytest
import xarray as xr

from manyheads.errors import UsageError
from manyheads.studies.meanfield.hopfield.attractors import TABLE, AttractorStudy, _kaplan_yorke
from manyheads.studies.meanfield.hopfield.stationary_moments import StationaryMoments, deviations


def distances(study, powers, rng):
    """Return distances of finite networks that go as N to a given power at each temperature."""
    sizes, scatter = np.asarray(study.neurons, float), 1 + 0.001 * rng.standard_normal((1, 6, 1, 1))
    values = sizes ** np.asarray(powers)[:, None] * scatter
    dims, starts = ("cell", "replicate", "beta", "neurons"), (1, 6, len(TABLE), study.starts)
    return xr.Dataset(
        {
            "distance": (dims, values),
            "start_kind": (("cell", "replicate", "temperature", "start"), np.full(starts, "locked")),
            "start_period": (("cell", "replicate", "temperature", "start"), np.full(starts, 4)),
        },
        {"beta": list(study.betas), "neurons": list(study.neurons), "temperature": list(TABLE)},
    )


@pytest.mark.parametrize(
    ("powers", "outcomes"), [((-0.5, 0.0), ["holds", "holds"]), ((0.0, -0.5), ["refuted", "refuted"])]
)
def test_distances_are_held_against_the_sign_of_the_exponent(powers, outcomes, rng):
    study = AttractorStudy.small()
    exponents = np.where(np.array(TABLE) < 1.2, -0.1, 0.1)
    predicted = xr.Dataset(
        {
            "exponents": (("network", "temperature", "order"), exponents[None, :, None]),
            "kind": (("network", "temperature"), np.full((1, len(TABLE)), "locked")),
            "period": (("network", "temperature"), np.where(np.array(TABLE) == 1.27, 28, 4)[None]),
        },
        {"network": ["published"], "temperature": list(TABLE)},
    )
    found = study.compare(predicted, distances(study, powers, rng))
    assert [verdict.outcome for verdict in found] == [*outcomes, "holds", "refuted"]


def test_dimension_of_attractors():
    assert _kaplan_yorke(np.array([0.1, 0.0, -0.2])) == pytest.approx(2.5)
    assert _kaplan_yorke(np.array([-0.1, -0.2])) == 0
    assert np.isnan(_kaplan_yorke(np.array([0.1, -0.05])))


def test_time_averages_are_compared_by_size(rng):
    study = StationaryMoments.small()
    reference = xr.DataArray(rng.uniform(-1, 1, (2, 6)), dims=("beta", "moment"))
    offset = xr.DataArray(0.3 / np.asarray(study.neurons), dims="neurons")
    signs = xr.DataArray(rng.choice([-1.0, 1.0], (1, 5, 2)), dims=("cell", "replicate", "run"))
    trained = xr.Dataset({"moments": reference + offset * signs}, {"beta": list(study.betas)})
    predicted = xr.Dataset({"moments": reference}, {"beta": list(study.betas)})
    found = deviations(predicted, trained.isel(cell=0), "moments").transpose("replicate", "beta", "neurons")
    np.testing.assert_allclose(found, np.tile(offset, (5, 2, 1)))


def test_mirrored_attractors_are_refused_by_name():
    with pytest.raises(UsageError, match=r"eps = 0 the map is odd.*mirrored"):
        StationaryMoments(positional_weight=0.0)


def test_sizes_and_temperatures_are_refused():
    for study in (AttractorStudy, StationaryMoments):
        with pytest.raises(UsageError, match="neurons"):
            study(neurons=(300, 300))
    with pytest.raises(UsageError, match=r"betas=.*choose from"):
        AttractorStudy(betas=(0.77,))
    with pytest.raises(UsageError, match=r"pairs=1: expected .* at least 2"):
        AttractorStudy(pairs=1)
    with pytest.raises(UsageError, match=r"orbits=1: expected .* at least 2"):
        StationaryMoments(orbits=1)
