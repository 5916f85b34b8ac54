"""Shapes of curves: exact cases, every shape at many scales, moments against dense matrices, levels of pure noise."""

import numpy as np
import pytest
from scipy.optimize import nnls
from scipy.signal import lfilter

from manyheads.curves.curve_shapes import (
    RHOS,
    STILL,
    _estimate_noise,
    _Moves,
    _trend,
    _variances,
    curve_shape,
)
from manyheads.errors import ShapeError, UsageError

T = np.arange(59.0)
FALL = 2.5 - (1 - np.exp(-T / 8))
CURVES = {
    "flat": 0 * T,
    "levelled off": FALL,
    "falling": 2.5 - 0.012 * T,
    "rebounded": FALL + 0.4 * (1 - np.exp(-np.maximum(T - 15, 0) / 20)),
    "rising": -FALL,
    "rose and fell": -FALL - 0.4 * (1 - np.exp(-np.maximum(T - 15, 0) / 20)),
}


def noise(rng, rho, std=0.03, n=59):
    innovations = std * rng.standard_normal(n)
    innovations[0] /= np.sqrt(1 - rho**2)
    return lfilter([1.0], [1.0, -rho], innovations)


@pytest.mark.parametrize("label", CURVES)
def test_shapes_beyond_their_noise(label, rng):
    found = [curve_shape(CURVES[label] + noise(rng, 0.2)) for _ in range(12)]
    same = {label} | ({"falling", "levelled off"} if label in ("falling", "levelled off") else set())
    assert {each.label for each in found} <= same | {"undecided"}
    assert sum(each.label in same for each in found) >= 6
    if label == "rebounded":
        assert abs(np.mean([each.drop for each in found]) - 0.85) < 0.1
        assert abs(np.mean([each.rise for each in found]) - 0.2) < 0.1
        assert 8 < np.mean([each.lowest for each in found]) < 25


def test_a_quick_drop_and_a_slow_rise_rebound(seed):
    """The drop is over within the first samples, of which it takes one or two."""
    wrong = 0
    for each in range(30):
        rng = np.random.default_rng([seed, each])
        n, quick, slow = int(rng.integers(40, 90)), rng.uniform(0.2, 2), rng.uniform(8, 40)
        t = np.arange(n)
        curve = np.exp(-t / quick) + rng.uniform(0.4, 1) * (1 - np.exp(-t / slow))
        wrong += curve_shape(curve + 0.02 * rng.standard_normal(n)).label != "rebounded"
    assert wrong <= 1


def shapes_of_steps(t, rng):
    """Return sharp and smooth curves of every shape, of size one, over times of any spacing."""
    at, last, quick = rng.uniform(0.3, 0.6), t[-1], rng.uniform(0.005, 0.06)

    def step(place):
        return 1 / (1 + np.exp(-np.clip((t / last - place) / quick, -50, 50)))

    return {
        "flat": 0 * t,
        "falling": -step(at),
        "rising": np.minimum(t / last / at, 1.0),
        "rebounded": -step(at - 0.2) + rng.uniform(0.4, 1.5) * step(at + 0.2),
        "rose and fell": np.where(t < at * last, t / at / last, 1 - rng.uniform(0.4, 1) * (t / last - at) / (1 - at)),
        "no single shape": np.cos(np.pi * 3 * t / last),
    }


@pytest.mark.parametrize(("rho", "even"), [(0.0, True), (0.5, True), (0.0, False)])
def test_no_definite_shape_is_wrong(rho, even, seed):
    """Of 240 curves at most one, where it is the chance of a move of noise; most shapes are stated."""
    wrong, stated, n = [], 0, 64
    for each in range(40):
        rng = np.random.default_rng([seed, each])
        t = np.arange(n) if even else np.geomspace(1, 10_000, n)
        for label, curve in shapes_of_steps(t if even else np.log(t), rng).items():
            found = curve_shape(curve + noise(rng, rho, rng.uniform(1e-3, 0.04), n), even=even).label
            found = "falling" if found == "levelled off" else found
            stated += found != "undecided"
            wrong += [(label, found)] * (found not in (label, "undecided"))
    assert len(wrong) <= 1, wrong
    assert stated > 180


def test_outliers_do_not_rebound(seed):
    """Of noise with Student's t of three degrees of freedom on 60 curves that rest or level off."""
    named = []
    for each in range(60):
        rng = np.random.default_rng([seed, each])
        curve = (each % 2) * np.exp(-np.arange(120) / 15) + 0.02 * rng.standard_t(3, 120)
        named.append(curve_shape(curve).label)
    assert named.count("rebounded") + named.count("rose and fell") <= 2
    assert named.count("flat") + named.count("levelled off") > 20


def test_noise_of_a_trend_has_the_moments_of_dense_matrices():
    basis, moments = _trend(30)
    project = np.eye(30) - basis @ basis.T
    for place in (0, 7, 19):
        covariance = RHOS[place] ** np.abs(np.subtract.outer(np.arange(30), np.arange(30)))
        residual = project @ covariance @ project
        assert moments[place] == pytest.approx([np.trace(residual), np.trace(residual, 1)], rel=1e-9)
        for length, variances in _variances(30).items():
            assert variances[place] == pytest.approx(covariance[:length, :length].mean(), rel=1e-12)


@pytest.mark.parametrize("rho", [0.0, 0.4])
def test_pure_noise_moves_at_the_chance_stated(rho, rng):
    """Of 400 series "flat" is denied to those beyond the level of 5%, within four standard deviations."""
    moved = 0
    for _ in range(400):
        y = noise(rng, rho, 1.0, 40)
        y -= y.mean()
        place, std = _estimate_noise(y)
        moves = _Moves(y, int(place), float(std), True)
        moves.null = round(rho / RHOS[1])
        moved += moves._sequence(STILL, 0.0) != ""
    assert moved <= 20 + 4 * np.sqrt(400 * 0.05 * 0.95)


def test_drop_and_rise_are_those_of_the_best_fit_that_falls_and_rises(rng):
    """Against all places of the minimum, fitted by quadratic programming with nonnegative steps."""
    y = np.abs(np.linspace(-1, 1.4, 24)) + 0.1 * rng.standard_normal(24)
    fits = []
    for place in range(24):
        signs = np.where(np.arange(1, 24) <= place, -1, 1)
        steps = np.tri(24, 24, -1)[:, :23] * signs
        design = np.hstack([np.ones((24, 1)), -np.ones((24, 1)), steps])
        found, loss = nnls(design, y)
        fits.append((loss, design @ found))
    best = min(fits, key=lambda each: each[0])[1]
    found = curve_shape(y)
    assert (found.drop, found.rise) == pytest.approx((best[0] - best.min(), best[-1] - best.min()), abs=1e-6)


def test_exact_curves_and_units(rng):
    assert curve_shape(np.full(20, 3.0)).label == "flat"
    noisy = CURVES["rebounded"] + noise(rng, 0.5)
    one, other = curve_shape(noisy), curve_shape(1e6 * noisy - 7)
    assert one.label == other.label
    assert other.autocorrelation == one.autocorrelation
    assert other.rise == pytest.approx(1e6 * one.rise)


@pytest.mark.parametrize(
    ("label", "curve"),
    [
        ("levelled off", np.r_[1.0, np.zeros(59)]),
        ("falling", 1.5 + np.exp(-np.arange(60) / 6)),  # of no time constant of the fit
        ("falling", -np.arange(60.0)),
        ("rising", np.arange(60.0)),
        ("rebounded", np.exp(-np.arange(60) / 6) + 0.3 * (1 - np.exp(-np.arange(60) / 20))),
        ("flat", 2 + 1e-15 * np.cos(np.arange(60.0))),
    ],
)
def test_curves_without_noise_rise_only_where_their_values_do(label, curve):
    assert curve_shape(curve).label == label


def test_refusals():
    with pytest.raises(ShapeError, match="at least 20"):
        curve_shape(np.arange(19.0))
    with pytest.raises(UsageError, match="not finite"):
        curve_shape([np.nan] * 20)


def test_no_shape_contradicts_means_of_many_samples_at_unequal_intervals(seed):
    """Noise of a quarter of the range of two or three moves does not hide them, nor irregular steps a last rise."""
    waves, turns = [], []
    for each in range(60):
        rng = np.random.default_rng([seed, each])
        n = 60
        wave = np.sin(np.linspace(0, 2 * np.pi * rng.uniform(2, 3), n) + rng.uniform(0, 2 * np.pi))
        waves.append(curve_shape(wave + 0.48 * rng.standard_normal(n), even=False).label)
        t = np.cumsum(rng.integers(1, 20, 60))
        turn = np.abs(t / t[-1] - rng.uniform(0.8, 0.86))
        turns.append(curve_shape(turn + 0.02 * rng.standard_normal(60), even=False).label)
    assert set(turns) <= {"rebounded", "undecided"}
    assert waves.count("flat") <= 5


@pytest.mark.parametrize("even", [True, False])
def test_moves_beyond_noise_are_never_dropped(even, seed):
    """Five moves, of which three are at most a fifth of the range, and a hundred standard deviations."""
    for each in range(20):
        rng = np.random.default_rng([seed, each])
        small = rng.uniform(0.05, 0.2)
        curve = np.interp(np.linspace(0, 5, 100), np.arange(6), [1, 0, small, 0, small, 0.0])
        curve = np.concatenate([curve, np.linspace(0, 0.5, 20)])
        found = curve_shape(curve + 5e-4 * rng.standard_normal(120), even=even).label
        assert found in ("no single shape", "undecided")


def test_white_noise_at_unequal_intervals_is_flat(rng):
    found = [curve_shape(rng.standard_normal(int(rng.choice([20, 40, 60]))), even=False).label for _ in range(100)]
    assert set(found) <= {"flat", "undecided"}
    assert found.count("flat") > 90
