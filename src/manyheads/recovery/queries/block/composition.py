r"""Composition of an extracted attention layer with a block's own token-wise part.

With the layer found, k(v) = v + N(v) W is known, and the block is

.. math:: F(x)_r = h(k^{-1}(x_r + A_r(x))) \quad\text{or}\quad F(x)_r = h(x_r) + A_r(x) - N(x_r) W \text{ (parallel)},

h(v) = F([v]) one sequence of one token: the MLP is an oracle, and this is the function of the whole block. For a norm
N(v) = v C / rho(v), with C the identity or what subtracts the mean, a given y has

.. math:: v(\rho) = y\,(1 + C W / \rho)^{-1}, \qquad \rho^2 = \operatorname{mean}\,(v C)^2 + \epsilon,

one equation for the number rho. From infinity down to the largest pole of v(rho) or sqrt(epsilon) its sides change
order, so that there always is a solution, and h gives the same answer at each. Derived here.
"""

from dataclasses import dataclass

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Array, ArrayFunction
from manyheads.recovery.layers.evaluation import apply_layer
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.oracle.normalization import Normalization
from manyheads.recovery.queries.block.token_wise import TokenWise

STEPS = 60  # of the bracket of log rho, at most
CLOSE = 1e-14  # of log rho
ROWS = 1 << 12  # tokens that are solved together
POLISH = 3  # corrections with the linear map of the solution


@dataclass(frozen=True)
class Composition:
    """The function of a block: an attention layer, and the block's own answers to single tokens."""

    token_wise: TokenWise
    layer: AttentionLayer | RotaryLayer  # acts on what `norm` makes of the tokens
    norm: Normalization

    def __call__(self, x: Array) -> Array:
        """Return the answers to sequences (n, k, d)."""
        attended = apply_layer(self.layer, self.norm(x))
        return attended + self.token_wise_part(x) if self.token_wise.parallel else self.token_wise_part(x + attended)

    def token_wise_part(self, y: Array) -> Array:
        """Return g(y), what the block makes of tokens (..., d) besides its attention, from one-token sequences."""
        if self.token_wise.parallel:
            return self.token_wise.answer(y, None) - self.norm(y) @ self.projection
        return self.token_wise.answer(one_token_inverse(self.projection, self.norm, y), None)

    def beyond_one_token(self, x: Array) -> Array:
        """Return what other tokens change in the answers."""
        if self.token_wise.parallel:
            return apply_layer(self.layer, self.norm(x)) - self.norm(x) @ self.projection
        return self(x) - self.token_wise.answer(x, None)

    @property
    def projection(self) -> Array:
        """Sum of the projections, W (d, d)."""
        return np.asarray(self.layer.projection, np.float64).sum(0)


def _root(function: ArrayFunction, low: Array, high: Array) -> Array:
    """Return the zeros of a function of many numbers between points of other signs, by the Illinois rule."""
    at_low, at_high = np.maximum(function(low), 0.0), np.minimum(function(high), 0.0)
    middle = low
    for step in range(STEPS):
        slope = at_low / np.maximum(at_low - at_high, np.finfo(float).tiny)
        middle = low + (high - low) * np.where(step % 4 == 3, 0.5, slope)
        at = function(middle)
        if (np.minimum(high - low, np.abs(at)) < CLOSE).all():
            break
        above = at > 0
        at_high, at_low = np.where(above, at_high / 2, at), np.where(above, at, at_low / 2)
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return middle


def one_token_inverse(projection: Array, norm: Normalization, y: Array) -> Array:
    """Return v (..., d) with v + N(v) W = y, the solution of the largest norm."""
    dim = len(projection)
    centre = np.eye(dim) - np.full((dim, dim), norm.centred / dim)
    values, frame = np.linalg.eig(centre @ projection)
    back = np.linalg.inv(frame)
    poles = -values.real[(np.abs(values.imag) < 1e-12 * np.abs(values).max()) & (values.real < 0)]
    least = max(float(poles.max(initial=0.0)) * (1 + 1e-12), norm.epsilon**0.5)
    flat = y.reshape(-1, dim)
    found = np.empty_like(flat)
    for start in range(0, len(flat), ROWS):
        part = flat[start : start + ROWS]
        turned = part @ frame

        def solve(rho: Array, turned: Array = turned) -> Array:
            return ((turned / (1 + values / rho[:, None])) @ back).real

        def excess(log_rho: Array, solve: ArrayFunction = solve) -> Array:
            v = solve(np.exp(log_rho)) @ centre
            return np.log(np.mean(v**2, 1) + norm.epsilon) / 2 - log_rho

        largest = np.sqrt(np.mean(part**2, 1) + norm.epsilon) + 2 * np.linalg.norm(projection, 2) + least
        rho = np.exp(_root(excess, np.full(len(part), np.log(least)), np.log(largest)))
        v = solve(rho)
        for _ in range(POLISH):
            rest = part - v - norm(v) @ projection
            moved = v + solve(rho, rest @ frame)
            better = np.linalg.norm(part - moved - norm(moved) @ projection, axis=1) < np.linalg.norm(rest, axis=1)
            v = np.where(better[:, None], moved, v)
        found[start : start + ROWS] = v
    return found.reshape(y.shape)
