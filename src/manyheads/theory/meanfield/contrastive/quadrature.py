"""Quadrature over three correlated outputs, reduced by conditioning to the mean and half-difference of the two views.

The theory needs the expectations, over features c, c^(2) and noise z ~ N(0, R), of derivatives l_s of the loss at
y_s = sum_k c_k^(s) Q_k + sqrt(q) z_s:

    A_k = E sum_s l_s c_k^(s),      B = sum_ss' R_ss' E l_ss',      D = sum_ss' R_ss' E[l_s l_s'].

Three steps keep the integral small, smooth and free of second derivatives [derived here]:

* The mean of the two views m = (y_0 + y_1)/2 and half their difference d = (y_0 - y_1)/2 are independent, of variances
  q (R_00 +- R_01)/2, and d does not depend on the features. Strong correlation, where a product rule in y_0 and y_1
  fails, only makes one of the two integrals narrow. d is integrated by Gauss-Hermite nodes: one node is exact at its
  limit, equal views.
* m and y_2 are mixtures of Gaussians over the M joint values of the features. Each is integrated by the trapezoidal
  rule on one grid for all components, which converges geometrically for analytic integrands; given its value, the
  features are integrated out: A_k needs E[c_k | m] and E[c_k | y_2] only. So the number of evaluations of the loss does
  not grow with the number of features.
* Stein's identity, E[l_s z_s] = sqrt(q) sum_s' R_ss' E l_ss', gives q B = E sum_s l_s y_s - sum_k Q_k A_k from first
  derivatives, and with one and the same B in both equations of the ODE the discrete system keeps sum_k Q_k^2 <= q.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.polynomial.hermite_e import hermegauss

from manyheads.errors import CertificateError, check_integers
from manyheads.theory.meanfield.contrastive.task import ContrastiveLoss, TaskParameters

Overlaps = Float[Array, " features"]
Scalar = Float[Array, ""]

REACH = 6.5  # standard deviations on either side of the outermost component; what lies outside has 1e-10
MISSING = 1e-5  # probability that a grid may miss: components narrower than its spacing fall between the nodes


class QuadratureError(CertificateError):
    """Two node counts disagree, the grid is wider than the noise, or squared overlaps exceed the squared norm."""


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Nodes of the mean of the two views, of their half-difference, and of the negative.

    Examples
    --------
    >>> Nodes(32, 10, 32).finer()
    Nodes(mean=48, difference=15, negative=48)
    """

    mean: int = 32
    difference: int = 10
    negative: int = 32

    def __post_init__(self) -> None:
        check_integers(self, "mean", "negative", least=4)
        check_integers(self, "difference")

    def finer(self) -> "Nodes":
        """Return one and a half times as many of each."""
        return Nodes(*(math.ceil(1.5 * count) for count in dataclasses.astuple(self)))


class Expectations(NamedTuple):
    """A (features,), B and D of the module's first lines."""

    signal: Overlaps
    restoring: Scalar
    diffusion: Scalar


class Mixture(NamedTuple):
    """Nodes of a mixture of Gaussians over the features, their weights, and the weights times the moments of c.

    The moments are E[c_k | node] and E[c_k c_l | node].
    """

    nodes: Float[Array, " nodes"]
    weights: Float[Array, " nodes"]
    features: Float[Array, "nodes features"]
    squares: Float[Array, "nodes features features"]


class SamplePoints(NamedTuple):
    """Nodes of m, d and y_2 with their weights, and the derivatives of the loss there, (mean, difference, negative)."""

    mean: Mixture
    difference: Float[Array, " difference"]
    chances: Float[Array, " difference"]  # weights of the difference
    negative: Mixture
    gradient: tuple[Array, Array, Array]


def sample_points(
    loss: ContrastiveLoss, nodes: Nodes, parameters: TaskParameters, overlaps: Overlaps, squared_norm: Scalar
) -> SamplePoints:
    """Return the nodes at overlaps Q and squared norm q > 0, with the derivatives of the loss; to be traced."""
    mean, negative = _mixtures(nodes, parameters, overlaps, squared_norm)
    ticks, chances = hermegauss(nodes.difference)
    opposed = parameters.variance - parameters.covariance
    half = jnp.sqrt(squared_norm) * jnp.sqrt(jnp.maximum(opposed, 0) / 2) * ticks  # differentiable at equal views
    gradient = jnp.vectorize(jax.grad(loss, argnums=(0, 1, 2)))
    m, d, y2 = mean.nodes[:, None, None], half[None, :, None], negative.nodes[None, None, :]
    return SamplePoints(mean, half, chances / chances.sum(), negative, gradient(m + d, m - d, y2))


def expectations(
    loss: ContrastiveLoss, nodes: Nodes, parameters: TaskParameters, overlaps: Overlaps, squared_norm: Scalar
) -> Expectations:
    """Return A, B and D at overlaps Q and squared norm q > 0; a function to be traced, `loss` and `nodes` static.

    NaN where the grid misses more than `MISSING`: all weights of components between its nodes vanish, and two node
    counts would agree on zero.
    """
    mean, half, chances, negative, (g0, g1, g2) = sample_points(loss, nodes, parameters, overlaps, squared_norm)
    of_mean = jnp.einsum("ijl,j,l->i", g0 + g1, chances, negative.weights)
    of_difference = jnp.einsum("ijl,i,j,l->", (g0 - g1) * half[:, None], mean.weights, chances, negative.weights)
    of_negative = jnp.einsum("ijl,i,j->l", g2, mean.weights, chances)
    signal = of_mean @ mean.features + of_negative @ negative.features
    total = (of_mean * mean.nodes) @ mean.weights + of_difference + (of_negative * negative.nodes) @ negative.weights
    squares = noise_power(parameters, (g0, g1, g2))
    diffusion = jnp.einsum("ijl,i,j,l->", squares, mean.weights, chances, negative.weights)
    found = Expectations(signal, (total - overlaps @ signal) / squared_norm, diffusion)
    factor = jnp.where(_missing_share(mean, negative) <= MISSING, 1.0, jnp.nan)  # derivatives become NaN as well
    return jax.tree.map(lambda values: factor * values, found)


def missing_probability(nodes: Nodes, parameters: TaskParameters, overlaps: Overlaps, squared_norm: Scalar) -> float:
    """Return the probability that the grids of the mean and of the negative miss, the larger of both."""
    return float(_missing_share(*_mixtures(nodes, parameters, overlaps, squared_norm)))


def noise_power(parameters: TaskParameters, gradient: Sequence[Array] | Array) -> Array:
    """Return g^T R g, the variance of a coordinate of sum_s g_s a_s, from g of the three views."""
    g0, g1, g2 = gradient
    return parameters.variance * (g0**2 + g1**2 + g2**2) + 2 * parameters.covariance * g0 * g1


def _mixtures(
    nodes: Nodes, parameters: TaskParameters, overlaps: Overlaps, squared_norm: Scalar
) -> tuple[Mixture, Mixture]:
    """Return the rules for the mean of the two views and for the negative."""
    shared = parameters.variance + parameters.covariance
    mean = _mixture(parameters, overlaps, jnp.sqrt(squared_norm * shared / 2), nodes.mean)
    return mean, _mixture(parameters, overlaps, jnp.sqrt(squared_norm * parameters.variance), nodes.negative)


def _missing_share(mean: Mixture, negative: Mixture) -> Scalar:
    return jnp.maximum(abs(mean.weights.sum() - 1), abs(negative.weights.sum() - 1))


def _mixture(parameters: TaskParameters, overlaps: Overlaps, std: Scalar, count: int) -> Mixture:
    """Return the trapezoidal rule for y = sum_k c_k Q_k + std z."""
    centers = parameters.values @ overlaps  # (joint,)
    end = jnp.abs(centers).max() + REACH * std
    nodes = end * jnp.linspace(-1, 1, count)
    step = 2 * end / (count - 1)
    density = jnp.exp(-0.5 * ((nodes[:, None] - centers) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    joint = step * density * parameters.probabilities  # (nodes, joint)
    squares = parameters.values[:, :, None] * parameters.values[:, None, :]
    return Mixture(nodes, joint.sum(1), joint @ parameters.values, jnp.einsum("nj,jkl->nkl", joint, squares))
