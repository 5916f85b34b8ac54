r"""Theorem 3: gradient of one neuron on an isotropic mixture of inputs, under uniform attention.

Dictionary: the input of a neuron with weights v is :math:`x = \bar x_j + s\,\xi` with probability :math:`p_j`, its
backpropagated gradient there is :math:`a_j`, :math:`r_j = v \cdot \bar x_j + c`, and u is the noise along v,
:math:`u = s\,\xi \cdot v / |v|`. Then

.. math::
    \dot v = \sum_j a_j p_j \Big[\theta_{1j}\,\bar x_j + \theta_{2j}\,\frac{v}{|v|}\Big], \qquad
    \theta_{1j} = \mathbb E\,\phi'(r_j + |v| u), \qquad \theta_{2j} = \mathbb E\,[\phi'(r_j + |v| u)\,u],

because noise orthogonal to v averages to zero. Only the distribution of one coordinate of the noise enters, so the
components may be Gaussian or spheres. Derived here and not printed in the paper: the covariance of the gradient of a
single sample, and from it the fluctuations of SGD about the flow (`linear_noise_approximation`).

Tian et al. (2023), JoMA: Demystifying multilayer transformers via joint dynamics of MLP and attention, theorem 3.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from jaxtyping import Array, ArrayLike, Float
from scipy.special import gammaln

from manyheads._arrays import check_times, follows_caller, on_host, takes_arrays, to_numpy
from manyheads._settings import double_precision
from manyheads._trees import PyTree
from manyheads.errors import CertificateError, UsageError
from manyheads.theory.joma.systems.gaussian_mixture import Mixture, Nonlinearity
from manyheads.theory.joma.systems.recording import integrate

CUTOFF = 9.0  # standard deviations; the Gaussian mass beyond is 2e-19
PANELS = 18
ORDER = 16  # Gauss-Legendre points of a panel
TOLERANCE = 1e-10

Function: TypeAlias = Callable[[Array], Array]


class Coefficients(NamedTuple):
    """Coefficients theta_1, along the mean of a component, and theta_2, along the weights."""

    mean: Float[Any, " components"]
    weight: Float[Any, " components"]


@takes_arrays
def mixture_coefficients(mixture: Mixture, weights: Float[ArrayLike, " d"], activation: Nonlinearity) -> Coefficients:
    r"""Compute :math:`\theta_1, \theta_2` for any activation by quadrature between its kinks.

    Float64 NumPy for NumPy arguments, which are checked; others are traced.

    Raises `UsageError`: zero weights, which have no direction. `CertificateError`: the quadrature did not converge to
    1e-10 relative: the curvature is too large at weights of this size.
    """
    if on_host(mixture, weights):
        _check(mixture, weights)
        coarse, fine = (_host_coefficients(mixture, weights, activation, panels) for panels in (PANELS, 2 * PANELS))
        scale = max(1.0, *(float(np.abs(part).max()) for part in fine))
        error = max(float(np.abs(a - b).max()) for a, b in zip(coarse, fine, strict=True)) / scale
        if not error <= TOLERANCE:
            raise CertificateError(
                f"the quadrature of {activation.name} did not converge: give its kinks, or use smaller weights",
                measured=error,
                threshold=TOLERANCE,
            )
        return fine
    return _coefficients(mixture, weights, activation, PANELS)


@follows_caller
@partial(jax.jit, inline=True, static_argnames="activation")
def expected_gradient(mixture: Mixture, weights: Float[Any, " d"], activation: Nonlinearity) -> Float[Array, " d"]:
    r"""Compute the expected gradient :math:`\dot v` of theorem 3.

    Examples
    --------
    >>> from manyheads.theory.joma.systems.gaussian_mixture import NONLINEARITIES
    >>> mixture = Mixture(np.eye(2), np.array([0.5, 0.5]), np.array([1.0, -1.0]), std=0.5)
    >>> expected_gradient(mixture, np.array([3.0, 4.0]), NONLINEARITIES["identity"]).round(12)  # the mean of a x
    array([ 0.5, -0.5])
    """
    v = jnp.asarray(weights)
    theta = _coefficients(mixture, v, activation, PANELS)
    weighted = jnp.asarray(mixture.gradients) * jnp.asarray(mixture.probabilities)  # (C,)
    return (weighted * theta.mean) @ jnp.asarray(mixture.means) + (weighted @ theta.weight) * v / jnp.linalg.norm(v)


@follows_caller
@partial(jax.jit, inline=True, static_argnames="activation")
def gradient_covariance(mixture: Mixture, weights: Float[Any, " d"], activation: Nonlinearity) -> Float[Array, "d d"]:
    r"""Compute the covariance of the gradient :math:`a\,\phi'(v \cdot x + c)\,x` of one sample.

    With :math:`m_k = \mathbb E[\phi'^2 u^k]`, :math:`n = v/|v|`, and :math:`\mu_k` the same with the variance of a
    coordinate orthogonal to v as a factor, :math:`s^2` for Gaussian components and :math:`(s^2 d - u^2)/(d - 1)` on
    spheres,

    .. math:: \mathbb E[\phi'^2 x x^\top] = m_0\,\bar x \bar x^\top + m_1 (\bar x n^\top + n \bar x^\top)
        + m_2\,n n^\top + \mu_0 (I - n n^\top).

    Derived here; it is not in the paper.
    """
    v, means = jnp.asarray(weights), jnp.asarray(mixture.means)
    m0, m1, m2 = _moments(mixture, v, lambda x: activation.derivative(x) ** 2, activation.kinks, PANELS)  # each (C,)
    variance = mixture.std**2
    across = (
        variance * m0 if mixture.distribution == "gaussian" else (variance * mixture.dim * m0 - m2) / (mixture.dim - 1)
    )
    n = v / jnp.linalg.norm(v)
    weight = jnp.asarray(mixture.probabilities) * jnp.asarray(mixture.gradients) ** 2
    mixed = jnp.outer((weight * m1) @ means, n)
    second = jnp.einsum("c,ci,cj->ij", weight * m0, means, means) + mixed + mixed.T
    second += (weight @ (m2 - across)) * jnp.outer(n, n) + (weight @ across) * jnp.eye(mixture.dim)
    mean = expected_gradient(mixture, v, activation)
    return second - jnp.outer(mean, mean)


class LinearNoise(NamedTuple):
    """Gradient flow and the fluctuations of SGD about it, to first order in the learning rate.

    The covariance is in units of learning rate over batch size. The bias is in units of the learning rate: the error of
    Euler's method, without the part that noise causes through the curvature of the field.
    """

    path: Float[np.ndarray, "times d"]
    covariance: Float[np.ndarray, "times d d"]
    bias: Float[np.ndarray, "times d"]


@takes_arrays
def linear_noise_approximation(
    mixture: Mixture,
    activation: Nonlinearity,
    init: Float[ArrayLike, " d"],
    times: Float[ArrayLike, " times"],
    weight_decay: float,
) -> LinearNoise:
    r"""Integrate the gradient flow of theorem 3 with weight decay, and the fluctuations of SGD about it.

    .. math:: \dot v = F(v) - \lambda v, \qquad \dot\Sigma = J \Sigma + \Sigma J^\top + C(v), \qquad
        \dot b = J b - \tfrac12 J (F(v) - \lambda v),

    with J the Jacobian of the field and C the covariance of the gradient of one sample. For small learning rates h the
    weights of SGD with batch size B at time t are normal with mean :math:`v(t) + h\,b(t)` and covariance
    :math:`(h/B)\,\Sigma(t)`: their distance from the flow falls as the inverse square root of the number of samples.
    Derived here (linear-noise approximation).

    Raises `UsageError`: initial weights of zero, or times that do not rise from zero or later. `CertificateError`: the
    quadrature does not converge at the end of the flow.
    """
    grid = check_times(times)
    _check(mixture, init)
    with double_precision():
        host = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), mixture)
        found = to_numpy(_solve(host, jnp.asarray(init, jnp.float64), jnp.asarray(grid), weight_decay, activation))
    mixture_coefficients(jax.tree.map(np.asarray, host), found[0][-1], activation)  # raises if it does not converge
    return LinearNoise(*found)


@partial(jax.jit, static_argnames="activation")
def _solve(mixture: Mixture, init: Array, times: Array, weight_decay: Array, activation: Nonlinearity) -> Any:
    def field(v: Array) -> Array:
        return expected_gradient(mixture, v, activation) - weight_decay * v

    def rates(t: Array, state: PyTree, args: object) -> PyTree:
        v, sigma, bias = state
        jacobian = jax.jacfwd(field)(v)
        half = jacobian @ sigma
        noise = gradient_covariance(mixture, v, activation)
        return field(v), half + half.T + noise, jacobian @ (bias - field(v) / 2)

    state = (init, jnp.zeros((init.size, init.size)), jnp.zeros_like(init))
    return integrate(rates, state, times, 1e-8, 1e-10, solver=diffrax.Tsit5()).ys


def _check(mixture: Mixture, weights: Any) -> None:
    if np.shape(weights) != (mixture.dim,):
        raise UsageError(f"weights of shape {np.shape(weights)}: expected ({mixture.dim},), as for the means")
    if on_host(weights) and not np.linalg.norm(weights) > 0:
        raise UsageError("the weights are zero or NaN: theorem 3 needs their direction")


def _coefficients(mixture: Mixture, v: Any, activation: Nonlinearity, panels: int) -> Coefficients:
    return Coefficients(*_moments(mixture, v, activation.derivative, activation.kinks, panels)[:2])


_host_coefficients = follows_caller(jax.jit(_coefficients, static_argnums=(2, 3)))  # one program, not forty small ones


def _moments(mixture: Mixture, v: Array, function: Function, kinks: tuple[float, ...], panels: int) -> Array:
    """Return E[f(r + |v| u) u^k] for k = 0, 1, 2, shape (3, C)."""
    size = jnp.linalg.norm(v)
    means = jnp.asarray(mixture.means) @ v + mixture.offset  # (C,)
    return jax.vmap(lambda r: _component_moments(mixture, (r, size), function, kinks, panels), out_axes=1)(means)


def _component_moments(
    mixture: Mixture, line: tuple[Array, Array], function: Function, kinks: tuple[float, ...], panels: int
) -> Array:
    r, size = line
    # The variable of integration is one coordinate of xi for Gaussian components, and the angle to v on spheres: the
    # density of a coordinate on the sphere is singular at its ends, that of the angle is not.
    gaussian = mixture.distribution == "gaussian"
    low, high = (-CUTOFF, CUTOFF) if gaussian else (0.0, np.pi)
    edges = jnp.linspace(low, high, panels + 1, dtype=size.dtype)
    jumps = (jnp.asarray(kinks, size.dtype) - r) / (size * mixture.std)
    if not gaussian:
        jumps = jnp.arccos(jnp.clip(jumps / mixture.dim**0.5, -1, 1))
    edges = jnp.sort(jnp.concatenate([edges, jnp.clip(jumps, low, high)]))
    nodes, quadrature = (jnp.asarray(part, size.dtype) for part in np.polynomial.legendre.leggauss(ORDER))
    half = jnp.diff(edges)[:, None] / 2
    at = edges[:-1, None] + half * (1 + nodes)  # (panels, ORDER)
    coordinate = at if gaussian else mixture.dim**0.5 * jnp.cos(at)
    # of the density of the angle between a fixed direction and a uniform one in d dimensions
    scale = np.exp(gammaln(mixture.dim / 2) - gammaln((mixture.dim - 1) / 2)) / np.sqrt(np.pi)
    weight = half * quadrature * (norm.pdf(at) if gaussian else scale * jnp.sin(at) ** (mixture.dim - 2))
    u = mixture.std * coordinate
    values = weight * function(r + size * u)
    return jnp.stack([values.sum(), (values * u).sum(), (values * u**2).sum()])
