"""Shapes of curves: exact cases, fits against SciPy's, quantiles of pure noise."""

import numpy as np
import pytest
from scipy.optimize import nnls
from scipy.signal import lfilter

from manyheads.errors import ShapeError, UsageError
from manyheads.joma.curve_shapes import _Fits, _whiten, curve_shape

T = np.arange(59.0)
FALL = 2.5 - (1 - np.exp(-T / 8))
CURVES = {
    "flat": 0 * T,
    "levelled off": FALL,
    "falling": 2.5 - 0.012 * T,
    "rebounded": FALL + 0.4 * (1 - np.exp(-np.maximum(T - 15, 0) / 20)),
    "rising": -FALL,
    "no single shape": -FALL - 0.4 * (1 - np.exp(-np.maximum(T - 15, 0) / 20)),
}


def noise(rng, rho, std=0.03, n=59):
    innovations = std * rng.standard_normal(n)
    innovations[0] /= np.sqrt(1 - rho**2)
    return lfilter([1.0], [1.0, -rho], innovations)


@pytest.mark.parametrize("label", CURVES)
def test_shapes_beyond_their_noise(label, rng):
    found = curve_shape(CURVES[label] + noise(rng, 0.2))
    assert found.label == label or (label, found.label) == ("falling", "levelled off")
    if label == "rebounded":
        assert abs(found.drop - 0.85) < 0.15
        assert abs(found.rise - 0.2) < 0.1
        assert 8 < found.lowest < 25


def test_fits_are_those_of_scipy(rng):
    """Three exponentials of any number are allowed in a fit: with three in all, that is no restriction."""
    fits = _Fits(30, 3)
    curves = np.cumsum(rng.standard_normal((20, 30)), axis=1)
    found = fits.fit(curves)
    for number, curve in enumerate(curves):
        rho = np.array(fits.rhos[found.place[number]])
        design, white = _whiten(fits.design.T, rho).T, _whiten(curve, rho)
        residuals = []
        for quick in (3, 2, 1):  # exponentials that fall; the others rise
            signs = np.array([1] * quick + [-1] * (3 - quick))
            residuals.append(nnls(np.hstack([design[:, :1], -design[:, :1], signs * design[:, 1:]]), white)[1] ** 2)
        assert found.loss[number] == pytest.approx(min(residuals), rel=1e-6)
        assert found.statistic[number] == pytest.approx(residuals[0] / min(residuals) - 1, rel=1e-5, abs=1e-7)
        own = np.sum(_whiten(curve - found.fitted[number], rho) ** 2)
        assert own == pytest.approx(min(residuals), rel=1e-6)


def test_the_tail_of_pure_noise_is_uniform(rng):
    """Of 200 series of the very autocorrelation, those below the nominal 5% are within four standard deviations."""
    fits = _Fits(40, 3)
    place = np.full(200, 6)
    innovations = rng.standard_normal((200, 40))
    innovations[:, 0] /= np.sqrt(1 - 0.3**2)
    found = fits.fit(lfilter([1.0], [1.0, -0.3], innovations, axis=-1))
    below = np.sum(fits.tail(found.statistic, place) <= 0.05)
    assert abs(below - 10) <= 4 * np.sqrt(200 * 0.05 * 0.95)


def test_exact_curves_and_units(rng):
    assert curve_shape(np.full(20, 3.0)).label == "flat"
    noisy = CURVES["rebounded"] + noise(rng, 0.5)
    one, other = curve_shape(noisy), curve_shape(1e6 * noisy - 7)
    assert one.label == other.label
    assert other.p_falls == one.p_falls
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
