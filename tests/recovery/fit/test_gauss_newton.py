"""The joint Gauss-Newton: its derivatives against JAX, its end against rounding and the parametric rate, bad input."""

import numpy as np
import pytest
import scipy.sparse.linalg

from manyheads.attention import AttentionLayer
from manyheads.errors import ShapeError, UsageError
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings, as_examples, fit_gauss_newton, solve_damped
from manyheads.recovery.fit.variable_projection import Form, Tangent, stack_theta
from manyheads.recovery.planted.task import planted_layer, sequences

FORMS = [
    pytest.param({}, id="plain"),
    pytest.param({"key_bias": True, "bias": True, "causal": True}, id="biases, causal"),
]


def problem(rng, form, *, count=40, length=3, dim=4, heads=2):
    truth = planted_layer(rng, dim, heads, **form)
    x = sequences(rng, count, length, dim, distribution="gaussian")
    return truth, x, np.asarray(truth(x))


def moved(rng, layer, size):
    """Return the layer with every entry of Theta and of the key bias changed by a relative `size` at random."""
    shift = lambda weight: weight * (1 + size * rng.normal(size=weight.shape))  # noqa: E731
    bias = None if layer.key_bias is None else shift(layer.key_bias)
    return AttentionLayer(shift(layer.theta), layer.projection, bias, layer.bias, layer.causal)


@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_is_that_of_the_loss_with_projections_solved_for(rng, form):
    truth, x, y = problem(rng, form)
    examples = as_examples(x, y, Form.of(truth))
    here = Tangent.at(examples, stack_theta(moved(rng, truth, 0.5)))
    change, step = rng.normal(size=here.theta.shape), 1e-5
    ends = [Tangent.at(examples, here.theta + sign * step * change).loss for sign in (1, -1)]
    expected = -2 * np.vdot(here.vjp(here.residual), change) / examples.power
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_projections_are_those_of_least_squares(rng):
    truth, x, y = problem(rng, {"bias": True})
    here = Tangent.at(as_examples(x, y, Form.of(truth)), stack_theta(moved(rng, truth, 0.5)))
    expected = np.linalg.lstsq(here.readings, here.examples.labels, rcond=None)[0]
    np.testing.assert_allclose(here.projection, expected, atol=1e-11 * np.abs(expected).max())


@pytest.mark.parametrize("form", FORMS)
def test_the_metric_is_the_product_of_the_two_mean_curvatures(rng, form):
    truth, x, y = problem(rng, form)
    weights = rng.uniform(0.5, 2, size=x.shape[:2])
    here = Tangent.at(as_examples(x, y, Form.of(truth), weights), stack_theta(truth))
    asked = here.examples.queries.T @ here.examples.queries
    change = rng.normal(size=here.theta.shape)
    measured = []
    for head in range(2):
        a = here.pattern[:, :, head]  # (n, k, k)
        covariance = np.einsum("nrj,njd,nje->nrde", a, x, x)
        mean = np.einsum("nrj,njd->nrd", a, x)
        covariance -= mean[..., :, None] * mean[..., None, :]
        moves = covariance @ here.layer.projection[head]
        curvature = np.einsum("nr,nrde,nrfe->df", weights, moves, moves)
        measured.append(asked @ change[head] @ curvature / (40 * 3))
    np.testing.assert_allclose(here.whiten(np.stack(measured)), change, atol=1e-4 * np.abs(change).max())


def test_the_inner_solve_is_the_damped_least_squares_solution(rng):
    truth, x, y = problem(rng, {})
    here = Tangent.at(as_examples(x, y), stack_theta(moved(rng, truth, 0.5)))
    gradient, size = here.vjp(here.residual), here.theta.size
    change, expected, _ = solve_damped(here, gradient, 1e-9, 1e-10, 500)
    shape = (here.residual.size, size)
    operator = scipy.sparse.linalg.LinearOperator(
        shape,
        matvec=lambda v: here.forward(v.reshape(here.theta.shape)).ravel(),
        rmatvec=lambda r: here.vjp(here._remove_readings(r.reshape(here.residual.shape))).ravel(),
    )
    found = scipy.sparse.linalg.lsmr(operator, here.residual.ravel(), atol=1e-13, btol=1e-13, maxiter=2000)[0]
    np.testing.assert_allclose(change.ravel(), found, atol=1e-4 * np.abs(found).max())
    rest = here.residual - here.forward(change)
    assert expected == pytest.approx(here.loss - np.vdot(rest, rest) / here.examples.power, rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_convergence_is_quadratic_and_ends_at_rounding(rng, form):
    truth, x, y = problem(rng, form, count=300, dim=6)
    done = fit_gauss_newton(moved(rng, truth, 0.02), x, y)
    assert done.converged
    assert done.error < 1e-28
    errors = np.array(done.errors)
    last = int(np.flatnonzero(errors > 1e-20)[-1])
    assert errors[last + 1] < max(1e-26, 1e4 * errors[last] ** 2)  # squared up to a constant of the problem
    np.testing.assert_allclose(done.layer.theta, truth.theta, atol=1e-11)
    np.testing.assert_allclose(done.layer.projection, truth.projection, atol=1e-11)
    if form:
        np.testing.assert_allclose(done.layer.key_bias, truth.key_bias, atol=1e-11)
        np.testing.assert_allclose(done.layer.bias, truth.bias, atol=1e-11)
    assert done.layer.causal is truth.causal


def test_with_noise_it_stops_at_the_parametric_rate(rng):
    truth, x, y = problem(rng, {}, count=2000, length=2, dim=5)
    sigma, fresh = 0.1, sequences(rng, 2000, 2, 5, distribution="gaussian")
    done = fit_gauss_newton(moved(rng, truth, 0.05), x, y + sigma * rng.normal(size=y.shape))
    squares = ((np.asarray(done.layer(fresh)) - truth(fresh)) ** 2).mean()
    numbers = 2 * 2 * 5**2
    # numbers sigma^2 / labels times chi^2 / numbers with 100 degrees of freedom: beyond [0.55, 1.7] once in 10^4
    assert done.converged
    assert 0.5 < squares / (numbers * sigma**2 / y.size) < 1.8


def test_weights_decide_which_rows_count(rng):
    truth, x, y = problem(rng, {}, count=400)
    spoiled, weights = y.copy(), np.ones(y.shape[:2])
    spoiled[:40] += 1.0
    weights[:40] = 0.0
    start = moved(rng, truth, 0.02)
    assert fit_gauss_newton(start, x, spoiled, weights=weights).error < 1e-28
    assert fit_gauss_newton(start, x, spoiled).error > 1e-3


def test_it_says_when_it_did_not_converge(rng):
    truth, x, y = problem(rng, {}, count=300)
    done = fit_gauss_newton(moved(rng, truth, 0.3), x, y, settings=GaussNewtonSettings(steps=1))
    assert not done.converged
    assert len(done.errors) == 2
    assert done.errors[1] < done.errors[0]


def test_equal_heads_are_no_obstacle(rng):
    truth, x, _ = problem(rng, {}, count=300)
    twice = AttentionLayer(np.repeat(truth.theta[:1], 2, 0), truth.projection)
    assert fit_gauss_newton(twice, x, np.asarray(twice(x))).error < 1e-24


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x, y: (x[0], y), ShapeError, "one shape"),
        (lambda x, y: (x, y[:, :, :3]), ShapeError, "one shape"),
        (lambda x, y: (x[:, :, :3], y[:, :, :3]), ShapeError, "dimension 4"),
        (lambda x, y: (x, y + 1j), ShapeError, "complex128"),
        (lambda x, y: (x, np.where(y == y[2, 1, 0], np.nan, y)), UsageError, r"\(2, 1, 0\)"),
        (lambda x, y: (x, 0 * y), UsageError, "do not depend"),
    ],
)
def test_bad_examples_are_refused(rng, change, error, words):
    truth, x, y = problem(rng, {}, count=5)
    with pytest.raises(error, match=words):
        fit_gauss_newton(truth, *change(x, y))


def test_bad_weights_and_settings_are_refused(rng):
    truth, x, y = problem(rng, {}, count=5)
    with pytest.raises(ShapeError, match="one a row"):
        fit_gauss_newton(truth, x, y, weights=np.ones(5))
    with pytest.raises(UsageError, match="zero or positive"):
        fit_gauss_newton(truth, x, y, weights=-np.ones((5, 3)))
    with pytest.raises(UsageError, match="steps"):
        GaussNewtonSettings(steps=0)
    for name in ("tolerance", "flat", "gain", "damping"):
        for wrong in (0.0, np.nan, None):
            with pytest.raises(UsageError, match=f"{name}=.*: expected a positive number$"):
                GaussNewtonSettings(**{name: wrong})


@pytest.mark.parametrize("name", ["tolerance", "flat", "gain", "damping"])
def test_an_infinite_setting_ends_the_fit_where_it_starts(rng, name):
    truth, x, y = problem(rng, {})
    start = moved(rng, truth, 0.1)
    fit = fit_gauss_newton(start, x, y, settings=GaussNewtonSettings(steps=3, **{name: np.inf}))
    assert fit.error == fit.errors[0]
