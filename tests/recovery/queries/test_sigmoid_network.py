"""The pair net: planted nets come back, the residual certifies, noise is amplified as predicted."""

import numpy as np
import pytest
from scipy.optimize import least_squares

from manyheads.errors import ShapeError
from manyheads.recovery.queries.nets.sigmoid_network import NetDesign, PairNets, fit_nets, net_amplification


def draw(rng, rows=24, width=4, heads=3, outputs=7, shifts=0.0, centred=False):
    """A design with an offset, and a net on it."""
    features = np.concatenate([rng.normal(size=(rows, width - 1)), np.ones((rows, 1))], axis=1)
    design = NetDesign.of(features, shifts, centred=centred)
    return design, 1.5 * rng.normal(size=(heads, width)), rng.normal(size=(heads, outputs))


def test_units_are_the_logistic_function_of_shifted_logits(rng):
    design, slopes, _ = draw(rng, shifts=np.linspace(-1, 1, 24), centred=True)
    logits = design.features @ slopes.T
    direct = 1 / (1 + np.exp(design.shifts[:, None] - logits)) - 1 / (1 + np.exp(design.shifts[:, None]))
    np.testing.assert_allclose(design.units(slopes), direct, rtol=1e-12, atol=1e-15)
    assert np.abs(design.units(0 * slopes)).max() == 0


def test_last_row_of_a_design_with_the_sum_is_the_sum_of_the_values(rng):
    """Whatever the slopes are; the other rows stay."""
    design, slopes, values = draw(rng, centred=True)
    summed = design.with_sum()
    np.testing.assert_allclose(summed.units(slopes)[-1] @ values, values.sum(0), rtol=1e-14)
    np.testing.assert_array_equal(summed.units(slopes)[:-1], design.units(slopes))
    found = fit_nets(summed, summed.units(slopes) @ values, 1.1 * slopes)
    np.testing.assert_allclose(found.values, values, rtol=1e-8)
    assert np.all(net_amplification(summed, found)[1] < net_amplification(design, found)[1])


@pytest.mark.parametrize("outputs", [4, 40])  # fewer and more outputs than rows
def test_planted_nets_come_back_at_every_probe(rng, outputs):
    design, slopes, values = draw(rng, rows=30, heads=2, outputs=outputs)
    many = slopes + 0.05 * rng.normal(size=(5, *slopes.shape))
    targets = values + 0.2 * rng.normal(size=(5, *values.shape))
    found = fit_nets(design, design.units(many) @ targets, slopes)
    assert found.residual.max() < 1e-13
    # How far a residual of rounding lets the parameters go depends on the draw: measured by their own amplification.
    gains = [net_amplification(design, found.one(probe)) for probe in range(5)]
    allowed = 1e-13 * max(max(slope.max(), value.max()) for slope, value in gains)
    np.testing.assert_allclose(found.slopes, many, rtol=0, atol=allowed)
    np.testing.assert_allclose(found.values, targets, rtol=0, atol=allowed)


def test_fit_ends_where_an_independent_solver_ends(rng):
    """With noise the minimum is no zero: SciPy's trust region on slopes and values together finds the same."""
    design, slopes, values = draw(rng, rows=40, heads=2, outputs=3)
    noisy = design.units(slopes) @ values + 1e-2 * rng.normal(size=(40, 3))
    found = fit_nets(design, noisy, slopes, tolerance=1e-13)

    def rest(flat):
        return (design.units(flat[:8].reshape(2, 4)) @ flat[8:].reshape(2, 3) - noisy).ravel()

    other = least_squares(rest, np.r_[slopes.ravel(), values.ravel()], xtol=1e-14, ftol=1e-14, gtol=1e-14)
    assert abs(2 * other.cost / (noisy**2).sum() / found.residual**2 - 1) < 1e-8
    np.testing.assert_allclose(found.slopes.ravel(), other.x[:8], rtol=0, atol=1e-4)


def test_shifts_settle_the_signs_that_a_centred_net_leaves_open(rng):
    """Centred at shift zero the net is odd: (theta, C) and (-theta, -C) agree; a shift tells them apart."""
    features = rng.normal(size=(24, 3))
    slopes, values = rng.normal(size=(2, 3)), rng.normal(size=(2, 5))
    odd, shifted = (NetDesign.of(features, s, centred=True) for s in (0.0, np.tile([0.0, 0.7], 12)))
    np.testing.assert_allclose(odd.units(-slopes) @ -values, odd.units(slopes) @ values, atol=1e-13)
    wrong = shifted.units(-slopes) @ -values
    assert np.abs(wrong - shifted.units(slopes) @ values).max() > 1e-2 * np.abs(wrong).max()


def test_equal_heads_do_not_break_the_fit(rng):
    design, slopes, values = draw(rng, heads=2)
    slopes[1] = slopes[0]
    found = fit_nets(design, design.units(slopes) @ values, slopes)
    assert np.isfinite(found.values).all()
    assert found.residual < 1e-12


def test_shapes_that_do_not_fit_are_refused(rng):
    design, slopes, _ = draw(rng)
    with pytest.raises(ShapeError, match="expected"):
        fit_nets(design, np.zeros((23, 7)), slopes)
    with pytest.raises(ShapeError, match="features"):
        NetDesign.of(np.zeros(3))


def test_amplification_predicts_the_spread_of_noisy_fits(rng):
    """200 fits: a ratio of standard deviations errs by 1 / sqrt(2 * 200 * 4), relatively; a third is 10 of it."""
    design, slopes, values = draw(rng, rows=40, heads=2, outputs=4, shifts=np.linspace(-1, 1, 40), centred=True)
    clean = design.units(slopes) @ values
    slope_gain, value_gain = net_amplification(design, PairNets(slopes, values, np.zeros(())))
    noise = 1e-5
    found = fit_nets(design, clean + noise * rng.normal(size=(200, *clean.shape)), slopes)
    onto = values.T @ np.linalg.pinv(values.T)  # errors inside the space of the values
    spread = np.sqrt((((found.values - values) @ onto) ** 2).sum(-1).mean(0) / 2)
    np.testing.assert_allclose(spread / noise, value_gain, rtol=1 / 3)
    spread = np.sqrt(((found.slopes - slopes) ** 2).mean((0, 2)))
    np.testing.assert_allclose(spread / noise, slope_gain, rtol=1 / 3)
