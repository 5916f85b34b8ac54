"""Exact times against an ODE solver, the affine law, and ratios that overshoot."""

import numpy as np
import pytest
from scipy.integrate import quad, solve_ivp

from manyheads.errors import UsageError
from manyheads.theory.joma.theorems.salient_first import (
    EXP,
    LINEAR,
    REGRESSION,
    UNIFORM,
    affine_offset,
    deficit_ratio,
    exact_time,
    final_rate,
    find_log_deficit,
)

LAWS = (EXP, UNIFORM, LINEAR, REGRESSION)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_times_are_those_of_an_ode_solver(law, rng):
    for mu in rng.uniform(0.5, 2.5, 2):
        v = mu * (1 - 10.0 ** -rng.uniform(0.5, 4))
        t = float(exact_time(mu, -np.log1p(-v / mu), law))

        def velocity(t, v, mu=mu):  # of v itself, not of the log deficit
            return (mu - v) * np.exp(law.log_rate(v, mu, np))

        flow = solve_ivp(velocity, (0, t), [0.0], "DOP853", rtol=1e-12, atol=1e-14)
        assert flow.y[0, -1] == pytest.approx(v, rel=1e-8)


def test_the_squared_loss_has_the_law_of_its_own_gradient(rng):
    mu = rng.uniform(0.5, 2.5)
    v = rng.uniform(0, 0.99, 8) * mu
    h = v * np.exp(v**2 / 2)
    velocity = (mu * np.exp(mu**2 / 2) - h) * np.exp(v**2 / 2)
    np.testing.assert_allclose((mu - v) * np.exp(REGRESSION.log_rate(v, mu, np)), velocity, rtol=1e-12)


def test_offsets_are_the_published_integral():
    mu = np.array([1.0, 1.5, 2.0, 2.5, 3.0])
    expected = [quad(lambda s, m=m: np.expm1(m * m * (s - s * s / 2)) / s, 0, 1)[0] for m in mu]
    np.testing.assert_allclose(affine_offset(mu), expected, rtol=1e-10)
    np.testing.assert_allclose(affine_offset(mu), [0.881, 2.48, 6.34, 17.2, 55.5], rtol=3e-3)


def test_the_affine_law_holds_up_to_the_deficit():
    mu, late = np.array([1.0, 1.5, 2.0, 2.5, 3.0]), np.log(1e6)
    error = np.abs(final_rate(mu) * exact_time(mu, late) - affine_offset(mu) - late) / late
    assert error.max() < 1e-6
    assert (error > 1e-9).all()  # it is a law of late times, not an identity
    np.testing.assert_allclose(error * late, mu**2 * 1e-6, rtol=1e-3)  # the first term that it leaves out


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_times_are_inverted(law, rng):
    mu, goal = rng.uniform(0.2, 3, 6), 10.0 ** rng.uniform(-3, 3, 6)
    np.testing.assert_allclose(find_log_deficit(mu, exact_time(mu, goal, law), law), goal, rtol=1e-9)


def test_ratios_overshoot_exactly_where_the_larger_target_waits_less():
    late = np.geomspace(30, 1e4, 5)
    for first, second in ((2.0, 1.0), (3.0, 2.0), (2.5, 2.0), (1.8, 1.5)):
        limit = float(final_rate(first) / final_rate(second))
        ratios = deficit_ratio(first, second, late)
        wait = float(affine_offset(second) / final_rate(second) - affine_offset(first) / final_rate(first))
        np.testing.assert_allclose(ratios, limit * (1 + final_rate(second) * wait / late), rtol=1e-9)
        assert (np.sign(ratios - limit) == np.sign(wait)).all()
    assert deficit_ratio(3.0, 2.0, 3.0) > final_rate(3.0) / final_rate(2.0) > deficit_ratio(3.0, 2.0, 1.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: exact_time(-1.0, 1.0),
        lambda: exact_time(1.0, -1.0),
        lambda: affine_offset(30.0),
        lambda: find_log_deficit(1.0, np.nan, EXP),
        lambda: deficit_ratio(2.0, 1.0, 0.0),
    ],
)
def test_what_has_no_answer_is_refused(call):
    with pytest.raises(UsageError):
        call()
