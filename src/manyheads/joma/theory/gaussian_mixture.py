r"""Theorem 3: what one neuron feels of isotropic clouds of inputs, under uniform attention.

Dictionary: a neuron of weights v sees :math:`x = \bar x_j + s\,\xi` with probability :math:`p_j`, the gradient that
comes back to it is :math:`a_j` there, :math:`r_j = v \cdot \bar x_j + c`, and u is the noise along v,
:math:`u = s\,\xi \cdot v / |v|`. Then

.. math::
    \dot v = \sum_j a_j p_j \Big[\theta_{1j}\,\bar x_j + \theta_{2j}\,\frac{v}{|v|}\Big], \qquad
    \theta_{1j} = \mathbb E\,\phi'(r_j + |v| u), \qquad \theta_{2j} = \mathbb E\,[\phi'(r_j + |v| u)\,u],

because noise across v averages to nothing. Of the noise only the law of one coordinate enters, so the clouds may be
Gaussian or spheres. Derived here and not printed in the paper: the covariance of a single sample's gradient in the same
manner, and from it how far SGD strays from the flow (`predict_fluctuations`).

Tian et al. (2023), JoMA: Demystifying multilayer transformers via joint dynamics of MLP and attention, theorem 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from scipy.special import gammaln

from manyheads._arrays import follows_caller, on_host, takes_arrays, to_numpy
from manyheads._settings import double_precision
from manyheads.errors import CertificateError, UsageError
from manyheads.joma.systems.activations import Nonlinearity
from manyheads.joma.systems.gaussian_mixture import Mixture

REACH = 9.0  # standard deviations: beyond them a Gaussian has 2e-19 of its weight
PANELS = 18
ORDER = 16  # Gauss-Legendre points of a panel
TOLERANCE = 1e-10

Function: TypeAlias = Callable[[Any], Any]


class Coefficients(NamedTuple):
    """theta_1 (what pulls along a cloud's centre) and theta_2 (what pulls along the weights), each of shape (C,)."""

    centre: Any
    weight: Any


@takes_arrays
def cloud_coefficients(mixture: Mixture, weights: Any, activation: Nonlinearity) -> Coefficients:
    r"""Coefficients :math:`\theta_1, \theta_2` for any activation, by quadrature between its kinks.

    Parameters
    ----------
    weights
        v, shape (d,), not zero.

    Returns
    -------
    Coefficients
        Shapes (C,) and (C,); float64 NumPy for NumPy arguments.

    Raises
    ------
    UsageError
        Zero weights have no direction.
    CertificateError
        The quadrature did not converge to 1e-10 relative: the activation bends too fast for weights this large.

    Examples
    --------
    >>> from manyheads.joma.systems.activations import NONLINEARITIES
    >>> clouds = Mixture(np.eye(2), np.array([0.5, 0.5]), np.array([1.0, -1.0]), spread=0.5)
    >>> found = cloud_coefficients(clouds, np.array([3.0, 4.0]), NONLINEARITIES["square"])
    >>> found.centre, found.weight  # r_j and |v| s²
    (array([3., 4.]), array([1.25, 1.25]))
    """
    if on_host(mixture, weights):
        _check(mixture, weights)
        coarse, fine = (_host_coefficients(mixture, weights, activation, panels) for panels in (PANELS, 2 * PANELS))
        scale = max(1.0, *(float(np.abs(part).max()) for part in fine))
        error = max(float(np.abs(a - b).max()) for a, b in zip(coarse, fine, strict=True)) / scale
        if not error <= TOLERANCE:
            raise CertificateError(
                f"the quadrature of {activation.name} did not converge: give its kinks, or smaller weights",
                measured=error,
                threshold=TOLERANCE,
            )
        return fine
    return _coefficients(mixture, weights, activation, PANELS)


@takes_arrays
def relu_coefficients(mixture: Mixture, weights: Any) -> Coefficients:
    r"""Coefficients of ReLU on Gaussian clouds: :math:`\theta_1 = \Phi(\rho),\ \theta_2 = s\,\varphi(\rho)`.

    Here :math:`\rho = r_j / (|v| s)` and :math:`\Phi, \varphi` are the normal distribution and its density.

    Raises
    ------
    UsageError
        Clouds that are not Gaussian, or zero weights.

    Examples
    --------
    >>> clouds = Mixture(np.zeros((1, 2)), np.ones(1), np.ones(1), spread=2.0)
    >>> found = relu_coefficients(clouds, np.array([3.0, 4.0]))
    >>> float(found.centre[0]), round(float(found.weight[0]), 4)
    (0.5, 0.7979)
    """
    _check(mixture, weights)
    if mixture.shape != "gaussian":
        raise UsageError(f"clouds of shape {mixture.shape!r}: the closed form is that of Gaussian clouds")
    return _relu(mixture, weights)


@follows_caller
def _relu(mixture: Mixture, weights: Any) -> Coefficients:
    v = jnp.asarray(weights)
    rho = (jnp.asarray(mixture.centres) @ v + mixture.offset) / (jnp.linalg.norm(v) * mixture.spread)
    return Coefficients(norm.cdf(rho), mixture.spread * norm.pdf(rho))


@follows_caller
def gaussian_weight_coefficient(mixture: Mixture, weights: Any, curvature: Function) -> Any:
    r"""Right side of the Gaussian identity :math:`\theta_2 = |v| s^2\,\mathbb E\,\phi''(r_j + |v| u)`, shape (C,).

    Parameters
    ----------
    curvature
        :math:`\phi''`, a function of `jax.numpy` arrays; the activation has no kinks.

    Notes
    -----
    It is Stein's identity and holds for Gaussian clouds alone: on spheres it fails, which tests use as their control.

    Examples
    --------
    >>> clouds = Mixture(np.eye(2), np.array([0.5, 0.5]), np.array([1.0, -1.0]), spread=0.5)
    >>> gaussian_weight_coefficient(clouds, np.array([3.0, 4.0]), jnp.ones_like)
    array([1.25, 1.25])
    """
    v = jnp.asarray(weights)
    return jnp.linalg.norm(v) * mixture.spread**2 * _moments(mixture, v, curvature, (), PANELS)[0]


@follows_caller
@partial(jax.jit, inline=True, static_argnames="activation")
def cloud_field(mixture: Mixture, weights: Any, activation: Nonlinearity) -> Any:
    r"""Return the expected gradient step :math:`\dot v` of theorem 3, shape (d,).

    Examples
    --------
    >>> from manyheads.joma.systems.activations import NONLINEARITIES
    >>> clouds = Mixture(np.eye(2), np.array([0.5, 0.5]), np.array([1.0, -1.0]), spread=0.5)
    >>> cloud_field(clouds, np.array([3.0, 4.0]), NONLINEARITIES["identity"]).round(12)  # the mean of a x
    array([ 0.5, -0.5])
    """
    v = jnp.asarray(weights)
    theta = _coefficients(mixture, v, activation, PANELS)
    pull = jnp.asarray(mixture.gradients) * jnp.asarray(mixture.shares)  # (C,)
    return (pull * theta.centre) @ jnp.asarray(mixture.centres) + (pull @ theta.weight) * v / jnp.linalg.norm(v)


@follows_caller
@partial(jax.jit, inline=True, static_argnames="activation")
def gradient_covariance(mixture: Mixture, weights: Any, activation: Nonlinearity) -> Any:
    r"""Covariance of one sample's gradient :math:`a\,\phi'(v \cdot x + c)\,x`, shape (d, d).

    With :math:`m_k = \mathbb E[\phi'^2 u^k]`, :math:`n = v/|v|`, and :math:`\mu_k` the same with the variance of a
    coordinate across v as a factor (:math:`s^2` for Gaussian clouds, :math:`(s^2 d - u^2)/(d - 1)` on spheres),

    .. math:: \mathbb E[\phi'^2 x x^\top] = m_0\,\bar x \bar x^\top + m_1 (\bar x n^\top + n \bar x^\top)
        + m_2\,n n^\top + \mu_0 (I - n n^\top).

    Derived here; it is not in the paper.

    Examples
    --------
    >>> from manyheads.joma.systems.activations import NONLINEARITIES
    >>> cloud = Mixture(np.ones((1, 2)), np.ones(1), np.ones(1), spread=0.5)
    >>> gradient_covariance(cloud, np.array([3.0, 4.0]), NONLINEARITIES["identity"]).round(12)
    array([[0.25, 0.  ],
           [0.  , 0.25]])
    """
    v, centres = jnp.asarray(weights), jnp.asarray(mixture.centres)
    m0, m1, m2 = _moments(mixture, v, lambda x: activation.derivative(x) ** 2, activation.kinks, PANELS)  # each (C,)
    variance = mixture.spread**2
    across = variance * m0 if mixture.shape == "gaussian" else (variance * mixture.dim * m0 - m2) / (mixture.dim - 1)
    n = v / jnp.linalg.norm(v)
    weight = jnp.asarray(mixture.shares) * jnp.asarray(mixture.gradients) ** 2
    mixed = jnp.outer((weight * m1) @ centres, n)
    second = jnp.einsum("c,ci,cj->ij", weight * m0, centres, centres) + mixed + mixed.T
    second += (weight @ (m2 - across)) * jnp.outer(n, n) + (weight @ across) * jnp.eye(mixture.dim)
    mean = cloud_field(mixture, v, activation)
    return second - jnp.outer(mean, mean)


class Fluctuations(NamedTuple):
    """A flow and what SGD strays from it.

    Attributes
    ----------
    path
        The gradient flow at the times asked for, shape (T, d).
    covariance
        Covariance of SGD's weights about the flow over rate/batch, to first order in that, shape (T, d, d).
    bias
        Mean departure of SGD from the flow over the rate, to first order, without the part that noise drives through
        the curvature of the field, shape (T, d): the error of Euler's method.
    """

    path: np.ndarray
    covariance: np.ndarray
    bias: np.ndarray


@takes_arrays
def predict_fluctuations(
    mixture: Mixture, activation: Nonlinearity, start: Any, times: Any, decay: float
) -> Fluctuations:
    r"""Gradient flow of theorem 3 with weight decay, and the law of SGD's fluctuations about it.

    .. math:: \dot v = F(v) - \lambda v, \qquad \dot\Sigma = J \Sigma + \Sigma J^\top + C(v), \qquad
        \dot b = J b - \tfrac12 J (F(v) - \lambda v),

    with J the derivative of the field and C the covariance of one sample's gradient. SGD with rate h and batch B is at
    time t normal about :math:`v(t) + h\,b(t)` with covariance :math:`(h/B)\,\Sigma(t)`, for small h: its distance from
    the flow falls as the square root of the number of samples. Derived here (the linear-noise approximation).

    Parameters
    ----------
    start
        v(0), shape (d,), not zero.
    times
        Rising, shape (T,), the first one zero or later.

    Raises
    ------
    UsageError
        Zero weights, or times that do not rise.
    CertificateError
        Where the quadrature does not converge at the end of the path.

    Examples
    --------
    >>> from manyheads.joma.systems.activations import NONLINEARITIES
    >>> cloud = Mixture(np.ones((1, 2)), np.ones(1), np.ones(1), spread=0.5)
    >>> found = predict_fluctuations(cloud, NONLINEARITIES["identity"], np.ones(2), np.array([0.0, 2.0]), decay=0.5)
    >>> float(found.path[1, 0].round(6)), float((2 - np.exp(-1)).round(6))
    (1.632121, 1.632121)
    """
    grid = np.asarray(times, np.float64)
    if grid.ndim != 1 or len(grid) < 1 or grid[0] < 0 or np.any(np.diff(grid) <= 0):
        raise UsageError(f"times={times}: expected rising times from zero on")
    _check(mixture, start)
    with double_precision():
        host = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), mixture)
        found = to_numpy(_solve(host, jnp.asarray(start, jnp.float64), jnp.asarray(grid), decay, activation))
    cloud_coefficients(jax.tree.map(np.asarray, host), found[0][-1], activation)  # raises where it did not converge
    return Fluctuations(*found)


@partial(jax.jit, static_argnames="activation")
def _solve(mixture: Mixture, start: Any, times: Any, decay: Any, activation: Nonlinearity) -> Any:
    def field(v: Any) -> Any:
        return cloud_field(mixture, v, activation) - decay * v

    def rates(t: Any, state: Any, args: Any) -> Any:
        v, sigma, bias = state
        jacobian = jax.jacfwd(field)(v)
        half = jacobian @ sigma
        noise = gradient_covariance(mixture, v, activation)
        return field(v), half + half.T + noise, jacobian @ (bias - field(v) / 2)

    state = (start, jnp.zeros((start.size, start.size)), jnp.zeros_like(start))
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(rates),
        diffrax.Tsit5(),
        t0=0.0,
        t1=times[-1],
        dt0=None,
        y0=state,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.PIDController(rtol=1e-8, atol=1e-10),
    )
    return solution.ys


def _check(mixture: Mixture, weights: Any) -> None:
    if np.shape(weights) != (mixture.dim,):
        raise UsageError(f"weights of shape {np.shape(weights)}: expected ({mixture.dim},), as the centres have")
    if on_host(weights) and not np.linalg.norm(weights) > 0:
        raise UsageError("the weights are zero, or not numbers: theorem 3 needs their direction")


@follows_caller
def _host_coefficients(mixture: Mixture, weights: Any, activation: Nonlinearity, panels: int) -> Coefficients:
    return _compiled_coefficients(mixture, jnp.asarray(weights), activation, panels)


def _coefficients(mixture: Mixture, v: Any, activation: Nonlinearity, panels: int) -> Coefficients:
    return Coefficients(*_moments(mixture, v, activation.derivative, activation.kinks, panels)[:2])


_compiled_coefficients = jax.jit(_coefficients, static_argnums=(2, 3))  # one program instead of forty small ones


def _moments(mixture: Mixture, v: Any, function: Function, kinks: tuple[float, ...], panels: int) -> Any:
    """Return E[f(r + |v| u) u^k] for k = 0, 1, 2, shape (3, C)."""
    size = jnp.linalg.norm(v)
    means = jnp.asarray(mixture.centres) @ v + mixture.offset  # (C,)
    return jax.vmap(lambda r: _one_cloud(mixture, (r, size), function, kinks, panels), out_axes=1)(means)


def _one_cloud(
    mixture: Mixture, line: tuple[Any, Any], function: Function, kinks: tuple[float, ...], panels: int
) -> Any:
    r, size = line
    # The variable of integration is one coordinate of xi for Gaussian clouds, and the angle to v on spheres: the
    # density of a coordinate on the sphere is singular at its ends, that of the angle is not.
    gaussian = mixture.shape == "gaussian"
    low, high = (-REACH, REACH) if gaussian else (0.0, np.pi)
    edges = jnp.linspace(low, high, panels + 1, dtype=size.dtype)
    jumps = (jnp.asarray(kinks, size.dtype) - r) / (size * mixture.spread)
    if not gaussian:
        jumps = jnp.arccos(jnp.clip(jumps / mixture.dim**0.5, -1, 1))
    edges = jnp.sort(jnp.concatenate([edges, jnp.clip(jumps, low, high)]))
    nodes, shares = (jnp.asarray(part, size.dtype) for part in np.polynomial.legendre.leggauss(ORDER))
    half = jnp.diff(edges)[:, None] / 2
    at = edges[:-1, None] + half * (1 + nodes)  # (panels, ORDER)
    coordinate = at if gaussian else mixture.dim**0.5 * jnp.cos(at)
    weight = half * shares * (norm.pdf(at) if gaussian else _angle_density(at, mixture.dim))
    u = mixture.spread * coordinate
    values = weight * function(r + size * u)
    return jnp.stack([values.sum(), (values * u).sum(), (values * u**2).sum()])


def _angle_density(angle: Any, dim: int) -> Any:
    """Density of the angle between a fixed direction and a uniform one in `dim` dimensions."""
    scale = np.exp(gammaln(dim / 2) - gammaln((dim - 1) / 2)) / np.sqrt(np.pi)
    return scale * jnp.sin(angle) ** (dim - 2)
