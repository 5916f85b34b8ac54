r"""Student of an attention layer and the MLP behind it, learned together by L-BFGS from random starts.

.. math:: y = \mathrm{GELU}(F(x) A + a) B, \qquad
          F(x) = \sum_i \mathrm{softmax}_{\mathrm{rows}}(x \Theta_i x^\top) x W_i

row by row. The function determines the Theta_i, and the projections up to a common linear map G, which the MLP takes
back: :math:`(W_i G, G^{-1} A)` is the same function for every invertible G.
"""

import contextlib
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

from manyheads.errors import UsageError
from manyheads.recovery._types import Array, Generator

BIAS = 0.5  # standard deviation of the biases of a drawn MLP, beside inputs of variance about one
MEMORY = 30  # pairs of steps and gradients that L-BFGS keeps


class Composed(NamedTuple):
    """Weights of an attention layer without biases, and of the MLP behind it."""

    theta: Array  # (m, d, d)
    projection: Array  # (m, d, d)
    into: Array  # A (d, h)
    bias: Array  # a (h,)
    out: Array  # B (h, d)


class ComposedFit(NamedTuple):
    """The best point over the starts, its share of the labels' variance, and what it took."""

    weights: Composed
    loss: float
    evaluations: int
    starts: int


class _Solved(Exception):
    """The loss is as small as was asked for."""


def draw_composed(rng: Generator, dim: int, heads: int, hidden: int, *, logits: float = 0.5) -> Composed:
    """Draw weights of a start: normal, of variance one over the width; `logits` is the logits' standard deviation."""
    shapes = ((heads, dim, dim), (heads, dim, dim), (dim, hidden), (hidden,), (hidden, dim))
    scales = (logits / dim, dim**-0.5, 1.0, BIAS, hidden**-0.5)
    return Composed(*(scale * rng.standard_normal(shape) for shape, scale in zip(shapes, scales, strict=True)))


@jax.jit
def evaluate_composed(weights: Composed, x: jax.Array) -> jax.Array:
    """Return the outputs (n, k, d) of attention and MLP."""
    logits = jnp.einsum("nrd,mde,nje->mnrj", x, weights.theta, x)
    mixed = jnp.einsum("mnrj,njd,mde->nre", jax.nn.softmax(logits, axis=-1), x, weights.projection)
    return jax.nn.gelu(mixed @ weights.into + weights.bias, approximate=False) @ weights.out


@jax.jit
def _loss_and_gradient(weights: Composed, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Composed]:
    def loss(at: Composed) -> jax.Array:
        return jnp.mean((evaluate_composed(at, x) - y) ** 2) / jnp.var(y)

    return jax.value_and_grad(loss)(weights)


def fit_composed(
    x: Array,
    y: Array,
    starts: list[Composed],
    *,
    held: tuple[str, ...] = (),
    enough: float = 1e-14,
    evaluations: int = 2000,
) -> ComposedFit:
    """Fit examples from each start until one is good enough; the fields named in `held` stay where they start.

    `enough` is a share of the labels' variance, `evaluations` the most of one start.
    """
    if not starts:
        raise UsageError("no start: give one or more")
    free = [name for name in Composed._fields if name not in held]
    found, spent = [], 0
    for start in starts:
        loss, weights, used = _descend(x, y, start, free, enough, evaluations)
        found.append((loss, weights))
        spent += used
        if loss < enough:
            break
    loss, weights = min(found, key=lambda one: one[0])
    return ComposedFit(weights, loss, spent, len(found))


def _descend(
    x: Array, y: Array, start: Composed, free: list[str], enough: float, evaluations: int
) -> tuple[float, Composed, int]:
    """Return the least loss from one start, where it is, and the evaluations that it took."""
    cuts = np.cumsum([getattr(start, name).size for name in free])[:-1]
    least, best, used = math.inf, start, 0

    def objective(point: Array) -> tuple[float, Array]:
        nonlocal least, best, used
        parts = zip(free, np.split(point, cuts), strict=True)
        weights = start._replace(**{name: part.reshape(getattr(start, name).shape) for name, part in parts})
        value, gradient = _loss_and_gradient(weights, x, y)
        loss, used = float(value), used + 1
        if loss < least:
            least, best = loss, weights
        if loss < enough:
            raise _Solved
        return loss, np.concatenate([np.ravel(getattr(gradient, name)) for name in free])

    limits = {"maxiter": evaluations, "maxfun": evaluations, "ftol": 0.0, "gtol": 0.0, "maxcor": MEMORY}
    first = np.concatenate([np.ravel(getattr(start, name)) for name in free])
    with contextlib.suppress(_Solved):
        minimize(objective, first, jac=True, method="L-BFGS-B", options=limits)
    return least, Composed(*(np.array(one) for one in best)), used
