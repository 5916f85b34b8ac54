r"""Rotary layer from random sequences alone: joint fits that begin at random weights.

Where noise is too large for differences of answers, nothing is asked but Gaussian sequences. Random queries and keys,
W by linear least squares and cut to its rank, then Gauss-Newton: first at RoPE's own frequencies, then at those that
fit best, and layers with biases first as if they had none. A start is right when its residual is that of the noise. The
number of heads and their ranks are told, and the base of the frequencies is guessed.
"""

from typing import Any, NamedTuple

import numpy as np

from manyheads.recovery._types import Array, Figures, Generator
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings, descend
from manyheads.recovery.fit.rotary_tangent import RotaryTangent, RotaryWeights, cut_projection
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.refinement import LENGTH, ask_fresh
from manyheads.recovery.refusals import FitError

BASE = 1e4  # of the frequencies at which fits begin: RoPE's own
EXCESS = 36.0  # labels of the sequences, against the weights
STARTS = 8
EXPLAINED = 2.0  # residual of a start that is right, against that of the noise
LEAST = 5e-8  # squared residual that is small enough without noise
NEAR = 1e-5  # squared residual from which frequencies are fitted, too
WITHOUT = GaussNewtonSettings(steps=20, inner=15, flat=1e-3, damping=1.0)


class RotaryShape(NamedTuple):
    """What is told of a layer: dimension, heads, their rank, and whether there are biases, and positions."""

    dim: int
    heads: int
    rank: int
    biases: bool  # of queries and keys
    positions: bool = True


def fit_from_random_starts(
    oracle: Oracle, shape: RotaryShape, noise: float, rng: Generator
) -> tuple[RotaryLayer, Figures]:
    """Return a layer that explains fresh answers up to their relative noise, and how many starts it took."""
    size = random_weights(shape, rng).flat().size
    fresh, _ = ask_fresh(oracle, int(np.ceil(EXCESS * size / (LENGTH * shape.dim))), LENGTH, rng)
    floor = max(EXPLAINED * noise**2, LEAST)
    frozen = GaussNewtonSettings(steps=40, inner=15, flat=1e-3, damping=1.0, tolerance=max(floor, NEAR))
    free = GaussNewtonSettings(steps=60, inner=60, flat=1e-3, tolerance=floor)
    best = np.inf
    for start in range(1, STARTS + 1):
        weights = with_best_projections(random_weights(shape._replace(biases=False), rng), fresh)
        if shape.biases:
            weights = RotaryWeights.of(descend(RotaryTangent.at(fresh, weights, frozen=True), WITHOUT).layer)
            query, key = (np.pad(side, ((0, 0), (0, 1), (0, 0))) for side in (weights.query, weights.key))
            weights = weights._replace(query=query, key=key)
        fitted = descend(RotaryTangent.at(fresh, weights, frozen=True), frozen).layer
        found = descend(RotaryTangent.at(fresh, RotaryWeights.of(fitted)), free)
        best = min(best, found.error)
        if found.error <= floor:
            layer: Any = found.layer
            return layer, {"starts": start, "residual": found.error}
    raise FitError(f"none of {STARTS} random starts explains the answers: other ranks, or no rotary layer", best, floor)


def random_weights(shape: RotaryShape, rng: Generator) -> RotaryWeights:
    """Draw weights of a shape, logits of order one on tokens of order one."""
    dim, heads, rank, biases, positions = shape

    def draw(*sizes: int) -> Array:
        return rng.standard_normal(sizes) / dim**0.5

    query, key = (draw(heads, dim + biases, rank) / rank**0.25 for _ in range(2))
    frequencies = positions * BASE ** (-np.arange(rank // 2) / (rank // 2))
    generator = np.tile(np.stack([0 * frequencies, frequencies, -frequencies], axis=-1), (heads, 1, 1))
    return RotaryWeights(query, key, generator, draw(heads, dim, rank), draw(heads, rank, dim), np.zeros(dim))


def with_best_projections(weights: RotaryWeights, examples: Examples) -> RotaryWeights:
    """Return the same attention with the W and c of least squares, each W cut to its rank."""
    here = RotaryTangent.at(examples, weights)
    heads, rank, dim = weights.output.shape
    readings = np.concatenate([*here.mean.reshape(heads, -1, dim), np.ones((here.residual.shape[0], 1))], axis=1)
    solved = np.linalg.lstsq(readings, examples.y.reshape(-1, dim), rcond=None)[0]
    value, output = cut_projection(solved[:-1].reshape(heads, dim, dim), rank)
    return weights._replace(value=value, output=output, bias=solved[-1])
