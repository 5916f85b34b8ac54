"""Alarms: the rate of false ones where their assumptions hold, faults that are named, and what is refused."""

import numpy as np
import pytest
import xarray as xr
from scipy import integrate, stats

from manyheads.errors import UsageError
from manyheads.probe import find_alarms
from manyheads.probe.alarms.calibration import calibrated_level, score
from manyheads.probe.alarms.changes import DEGREES, alarm_level, detection_statistics, standardized_residuals
from manyheads.probe.alarms.detection import WATCHED

PAST = {"window": 24, "ignored": 24, "silent": 48}
PROBES, LAYERS, HEADS = 160, 2, 3
WORDS = {figure.name: figure.words for figure in WATCHED}


def noise(rng, probes, series, correlation):
    """Return series (T, K) whose increments are a stationary autoregression."""
    increments = rng.standard_normal((probes + 50, series))
    for t in range(1, len(increments)):
        increments[t] += correlation * increments[t - 1]
    return increments[50:].cumsum(axis=0)


def dataset(rng, correlation=0.3, size=0.01):
    """Return curves of a run without a fault, every figure at a plausible level."""

    def walk():
        return size * noise(rng, PROBES, LAYERS * HEADS, correlation).reshape(PROBES, LAYERS, HEADS)

    levels = {"entropy": 3.0, "max_logit": 8.0, "first_mass": 0.1, "stable_rank": 6.0, "frobenius": 2.0}
    figures = {name: (("step", "layer", "head"), level * np.exp(0.3 * walk())) for name, level in levels.items()}
    uniform = ("layer", [3.5] * LAYERS)
    return xr.Dataset({**figures, "entropy_uniform": uniform}, {"step": 20 * np.arange(PROBES), "head": [4, 5, 6]})


def test_an_e_value_has_a_mean_of_at_most_one():
    def integrand(z):
        residuals = np.array([[z]])
        return np.exp(detection_statistics(residuals)[0, 0]) * stats.t.pdf(z, DEGREES)

    # The integrand falls as |z|^-2: what lies beyond is 1 / 400.
    mean = integrate.quad(integrand, -50, 2000, limit=500, points=[0, 10, 100])[0]
    assert 0.97 < mean < 1.0


def test_the_statistic_is_the_sum_over_starts_of_products_of_e_values(rng):
    """R_t = sum over s <= t of e_s ... e_t, with e of each residual by itself."""
    residuals = rng.standard_normal((6, 2)) + 1
    e = np.exp([[detection_statistics(np.array([[z]]))[0, 0] for z in row] for row in residuals])
    expected = sum(np.prod(e[start:], axis=0) for start in range(len(e)))
    np.testing.assert_allclose(np.exp(detection_statistics(residuals)[-1]), expected)


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_clean_runs_keep_the_rate(rng, correlation):
    """50 runs of 12 series, of which half move together, at alpha = .2: 10 alarms at most are expected; more than 21
    have a chance of 2e-4 at alpha itself."""
    runs, K = 50, 12
    series = noise(rng, PROBES, runs * K, correlation).reshape(PROBES, runs, K)
    series[..., K // 2 :] = series[..., :1] + 0.1 * series[..., K // 2 :]
    residuals = standardized_residuals(series.reshape(PROBES, -1), np.repeat(np.arange(runs), K), **PAST)
    assert np.isnan(residuals[:48]).all()
    assert np.isfinite(residuals[48:]).all()
    assert 0.4 < residuals[48:].std() < 1.0  # the scale is the largest one so far, of most heads
    statistics = detection_statistics(residuals).reshape(PROBES, runs, K)
    alarmed = (np.logaddexp.reduce(statistics, axis=2) >= alarm_level(PROBES, K, 0.2)).any(axis=0)
    assert alarmed.sum() <= 21


@pytest.mark.parametrize("figure", WORDS)
def test_a_sudden_change_is_named_at_its_step_in_its_direction_alone(rng, figure):
    curves = dataset(rng)
    assert find_alarms(curves) == []
    factor = {"entropy": 0.5, "stable_rank": 0.5, "first_mass": 4.0}.get(figure, 3.0)
    for up in (False, True):
        broken = curves.copy(deep=True)
        broken[figure][100:, 1, 2] *= 1 / factor if up else factor
        found = find_alarms(broken)
        if up:
            assert found == []
        else:
            (alarm,) = found
            assert (alarm.detector, alarm.figure, alarm.step, alarm.layer, alarm.head) == ("change", figure, 2000, 1, 6)
            assert alarm.value / alarm.before == pytest.approx(factor, rel=0.1)
            assert alarm.others == 0
            assert str(alarm).startswith(f"step 2000, layer 1 head 6: {WORDS[figure]}")


def test_the_last_interval_may_be_shorter(rng):
    """The end of a training is measured too."""
    curves = dataset(rng)
    assert find_alarms(curves.assign_coords(step=[*curves.step.values[:-1], curves.step.values[-2] + 7])) == []


def test_small_changes_are_no_alarms(rng):
    """Of quiet series: sure, and not worth one."""
    curves = dataset(rng, size=1e-4)
    curves["max_logit"][100:] *= 1.3
    assert find_alarms(curves) == []
    curves["max_logit"][100:] *= 1.3
    assert find_alarms(curves)[0].others == LAYERS * HEADS - 1


def test_a_slow_drift_is_found_by_the_level_and_by_clean_runs(rng):
    clean = [dataset(rng, size=0.05) for _ in range(8)]
    curves = dataset(rng, size=0.05)
    curves["max_logit"][100:, 0, 1] *= np.exp(0.05 * np.arange(60))  # three times the noise of a probe
    found = {alarm.detector: alarm for alarm in find_alarms(curves, clean=clean)}
    assert set(found) == {"clean runs", "level"}
    assert found["level"].step > found["clean runs"].step >= 2000
    assert all((alarm.layer, alarm.head, alarm.figure) == (0, 5, "max_logit") for alarm in found.values())
    assert found["clean runs"].false_alarm == pytest.approx(1 / 9)
    assert found["level"].false_alarm is None
    assert float(curves.max_logit.sel(step=found["level"].step)[0, 1]) > 50


def test_clean_runs_exceed_the_calibrated_level_as_often_as_stated(rng):
    """1 / (m + 1) of 200 runs, within four standard errors of a binomial."""
    alarms = 0
    for _ in range(200):
        runs = rng.standard_normal((9, 40, 2)).cumsum(axis=1)
        alarms += score(runs[0], runs[1:])[-1] > calibrated_level(runs[1:])
    assert abs(alarms - 200 / 9) < 4 * np.sqrt(200 / 9)


def test_figures_that_end_are_named(rng):
    curves = dataset(rng)
    curves["frobenius"][70:, 1, 0] = np.nan
    (alarm,) = find_alarms(curves)
    assert (alarm.detector, alarm.figure, alarm.step, alarm.layer, alarm.head) == (
        "not finite",
        "frobenius",
        1400,
        1,
        4,
    )
    assert "layer 1 head 4: frobenius is not finite" in str(alarm)
    curves = dataset(rng)
    curves["entropy"][:, 1, 2] = np.nan  # a head that the layer lacks
    assert find_alarms(curves) == []


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda curves: curves.isel(step=0), {}, "expected dimensions step, layer and head"),
        (
            lambda curves: curves[["entropy_uniform"]].expand_dims(step=3, head=2),
            {},
            "expected one of entropy, max_logit",
        ),
        (lambda curves: curves.drop_vars("entropy_uniform"), {}, "without entropy_uniform"),
        (lambda curves: curves.isel(step=slice(None, None, -1)), {}, "do not rise"),
        (lambda curves: curves.isel(step=[0, 1, 3, 4]), {}, "unequal intervals"),
        (lambda curves: curves.isel(step=slice(0)), {}, "expected one of entropy"),
        (lambda curves: curves, {"clean": xr.Dataset()}, "expected a sequence"),
        (lambda curves: curves, {"false_alarm": 0}, "false_alarm=0: expected a chance"),
        (lambda curves: [curves], {}, "curves of type list"),
        (lambda curves: curves, {"max_logit": np.nan}, "max_logit=nan: expected a positive"),
        (lambda curves: curves, {"silent": 20}, "silent=20: expected an integer of at least 31"),
        (lambda curves: curves, {"probes": 10}, "probes=10: expected an integer of at least 160"),
        (lambda curves: curves, {"clean": 1}, "1 clean runs: expected at least 4"),
        (lambda curves: curves.isel(layer=[0]), {"clean": 4}, "other steps, heads or figures"),
    ],
)
def test_what_cannot_be_judged_is_refused(rng, change, options, words):
    curves = dataset(rng)
    if isinstance(options.get("clean"), int):
        options = {"clean": [dataset(rng) for _ in range(options["clean"])]}
    with pytest.raises(UsageError, match=words):
        find_alarms(change(curves), **options)
