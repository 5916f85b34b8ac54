"""Forecast of loss curves: interpolation and band against known answers, and what the study concludes."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from manyheads.errors import CertificateError, UsageError
from manyheads.studies.dmft.forecast import COVERED, WITHIN, Forecast, compare_losses, relative_error
from manyheads.theory.dmft import Network, Problem, forecast_loss, infinite_heads
from manyheads.theory.dmft.finite.forecast import LossForecast, _interpolation, _quantile

STEPS = 5


@pytest.fixture
def problem(rng):
    return Problem(rng.standard_normal((2, 2, 8)), np.array([1.0, -1.0]), steps=STEPS, learning_rate=0.02)


def test_the_bias_is_the_quadratic_through_the_limit_and_both_ensembles():
    def distance(heads):
        return 0.7 / heads - 2.0 / heads**2

    for heads in (32, 512):
        shares = _interpolation((8, 16), heads)
        assert shares @ [distance(8), distance(16)] == pytest.approx(distance(heads), rel=1e-12)
    assert np.abs(_interpolation((8, 16), 10**6)).max() < 1e-4


def test_the_band_holds_whole_curves_with_its_probability(rng):
    mixing = rng.standard_normal((4, 4))

    def draw(count):
        return rng.standard_normal((count, 4)) @ mixing

    missed = []
    for _ in range(60):
        small = draw(24)
        width = _quantile(small, 0.9, rng) * small.std(0, ddof=1)
        missed.append((np.abs(draw(400)) > width).any(-1).mean())
    assert np.mean(missed) == pytest.approx(0.1, abs=0.03)
    assert _quantile(small, 0.99, rng) > _quantile(small, 0.9, rng) > 1.645  # more than at a single step


@pytest.mark.slow
def test_a_forecast_is_the_limit_with_a_bias_and_shows_itself(problem):
    network = Network(2, 256)
    forecast = forecast_loss(problem, network, sizes=(4, 8), networks=16, seed=3)
    again = forecast_loss(problem, network, sizes=(4, 8), networks=16, seed=3)
    assert (forecast.loss == again.loss).all()
    assert (forecast.high == again.high).all()
    limit = infinite_heads(problem, 2)["loss"].values
    assert forecast.limit == pytest.approx(limit, rel=0.05)
    assert forecast.loss == pytest.approx(forecast.limit * np.exp(forecast.bias))
    assert forecast.bias == pytest.approx(_interpolation((4, 8), 256) @ np.log(forecast.ensembles / forecast.limit))
    assert forecast.low[0] == pytest.approx(forecast.high[0])  # nothing is random before the first update
    mean = forecast_loss(problem, network, sizes=(4, 8), networks=16, seed=3, target="mean")
    assert (mean.high - mean.low)[1:].max() < (forecast.high - forecast.low)[1:].max() / 2
    assert forecast.covers(np.stack([forecast.loss, 2 * forecast.loss])).tolist() == [True, False]
    assert "H=256" in repr(forecast)
    assert "99% band" in repr(forecast)
    assert len(forecast.to_dataframe()) == STEPS
    assert forecast.plot().axes


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sizes": (8, 4)}, "sizes"),
        ({"sizes": (8, 64)}, "smaller than the network"),
        ({"sizes": (2, 4, 8)}, "two sizes"),
        ({"networks": 4}, "networks"),
        ({"target": "median"}, "median"),
        ({"level": 1.5}, "level"),
    ],
)
def test_wrong_use_is_refused(problem, options, match):
    with pytest.raises(UsageError, match=match):
        forecast_loss(problem, Network(2, 64), **options)


def test_a_limit_that_diverges_is_refused(problem):
    with pytest.raises(CertificateError, match="diverges"):
        forecast_loss(replace(problem, learning_rate=200.0), Network(2, 64))


@pytest.mark.slow
def test_networks_that_scatter_too_far_are_refused():
    near_zero = Problem(np.eye(4).reshape(2, 2, 4) * 2, np.array([1.0, -1.0]), steps=4, learning_rate=0.3)
    with pytest.raises(CertificateError, match="near zero"):
        forecast_loss(near_zero, Network(2, 64), networks=16)


def made_forecast(limit, bias, fluctuation=0.01):
    error, width = np.full(STEPS, 0.001), 3 * np.hypot(fluctuation, 0.001)
    centre = limit * np.exp(bias)
    ensembles = np.stack([limit * np.exp(64 * bias), limit * np.exp(32 * bias)])
    return LossForecast(
        *(Network(4, 512), "network", 0.99, centre, centre * np.exp(-width), centre * np.exp(width), limit, ensembles),
        *((8, 16), bias, np.full(STEPS, fluctuation), error),
    )


def made_up(study, rng, *, scatter=0.003, actual=1.0):
    """Cases whose networks scatter about the limit with so many times the forecast bias."""
    cells, rows = study.cells(), {}
    for cell in cells:
        count = 1 if cell["heads"] == study.heads else 64
        for _ in range(8):
            limit, bias = np.linspace(2, 1, STEPS) * (1 + 0.1 * rng.random()), np.full(STEPS, 0.32 / cell["heads"])
            curves = limit * np.exp(actual * bias + scatter * rng.standard_normal((count, STEPS)))
            found = compare_losses(made_forecast(limit, bias), curves)
            for name, value in found.items():
                rows.setdefault(name, []).append(value)
    shape = (len(cells), 8)
    trained = xr.Dataset(
        {
            name: (("cell", "replicate", *(("step",) if np.ndim(values[0]) else ())), fold(values, shape))
            for name, values in rows.items()
        },
        coords={name: ("cell", [cell[name] for cell in cells]) for name in cells[0]},
    )
    predicted = xr.Dataset({"covered": COVERED, "error": WITHIN, "slope": 1.0})
    return predicted, trained.transpose("replicate", "cell", ...)


def fold(values, shape):
    return np.reshape(np.stack(values), (*shape, *np.shape(values[0])))


def outcomes(study, results, word):
    return {verdict.outcome for verdict in study.compare(*results) if word in verdict.claim}


def test_good_forecasts_hold_and_their_parts_are_needed(rng):
    study = Forecast(steps=STEPS)
    found = made_up(study, rng)
    assert outcomes(study, found, "in nearly every case") == {"holds"}
    assert outcomes(study, found, "band of a single network") == {"holds"}
    assert outcomes(study, found, "band without their fluctuation") == {"refuted"}
    assert outcomes(study, found, "forecast of a loss curve is within") == {"holds"}
    assert outcomes(study, found, "mean of H=16 is within") == {"refuted"}
    assert outcomes(study, found, "by the forecast bias") == {"holds"}
    assert outcomes(study, found, "without a bias") == {"refuted"}
    assert study.panels(*found)


def test_bad_forecasts_are_refuted(rng):
    study = Forecast(steps=STEPS)
    wide = made_up(study, rng, scatter=0.1)
    for words in ("in nearly every case", "band of a single network", "forecast of a loss curve is within"):
        assert outcomes(study, wide, words) == {"refuted"}
    off = made_up(study, rng, actual=0.0)
    assert outcomes(study, off, "by the forecast bias") == {"refuted"}
    assert outcomes(study, off, "without a bias") == {"holds"}


def test_the_error_is_the_mean_distance_over_the_mean_loss():
    assert relative_error(np.array([2.0, 1.0]), np.array([[2.2, 0.8], [2.0, 1.0]])) == pytest.approx(0.2 / 3 / 1)


@pytest.mark.parametrize(
    "wrong", [{"heads": 16}, {"task": "music"}, {"richness": ()}, {"networks": 4}, {"checked_networks": 1}]
)
def test_what_cannot_be_judged_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Forecast(**wrong)
