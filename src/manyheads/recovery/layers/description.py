"""Description of a layer in figures: ranks and norms of its heads, and how many numbers determine it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery.layers.evaluation import dense_weights
from manyheads.recovery.layers.rotary import RotaryLayer

RANK_TOLERANCE = 1e-6  # a singular value below this share of the largest one does not count towards a rank


@dataclass(frozen=True)
class Head:
    """One head in figures."""

    # Numbers of singular values above a share of the largest one
    theta_rank: int
    projection_rank: int
    # Frobenius norms
    theta_norm: float
    projection_norm: float
    key_bias_norm: float


def describe_heads(layer: AttentionLayer, tolerance: float = RANK_TOLERANCE) -> tuple[Head, ...]:
    """Return ranks and norms of every head, heads in the order of the layer."""
    theta, projection, key_bias, _ = dense_weights(layer)
    spectra = [np.linalg.svd(stack, compute_uv=False) for stack in (theta, projection)]  # (m, d) each
    ranks = [np.sum(values > tolerance * values[:, :1], axis=1) for values in spectra]
    norms = [np.sqrt((values**2).sum(1)) for values in spectra]
    rows = zip(*ranks, *norms, np.linalg.norm(key_bias, axis=1), strict=True)
    return tuple(Head(int(a), int(b), float(c), float(d), float(e)) for a, b, c, d, e in rows)


def say_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in few words."""
    low, high = min(found := list(ranks)), max(found)
    return str(low) if low == high else f"{low} to {high}"


def at_offset_one(layer: AttentionLayer | RotaryLayer) -> AttentionLayer:
    """Return a layer with merged weights: itself, or what a layer with rotary positions does one token back."""
    return layer.at_offset(1) if isinstance(layer, RotaryLayer) else layer


def rank_tolerance(error: float) -> float:
    """Return the share of the largest singular value that counts: well above a squared error of the recovery."""
    return float(min(max(RANK_TOLERANCE, 10 * math.sqrt(error)), 0.1)) if math.isfinite(error) else 0.1


def free_parameters(dim: int, heads: Iterable[Head]) -> int:
    """Return how many numbers determine a layer of matrices of given ranks.

    A matrix of rank r has r (rows + columns - r): [Theta; beta^T] with d + 1 rows, W with d; and d for the bias.

    Examples
    --------
    >>> free_parameters(8, [Head(2, 2, 1.0, 1.0, 1.0)])
    66
    """
    pairs = [(head.theta_rank, head.projection_rank) for head in heads]
    return dim + sum(a * (2 * dim + 1 - a) + b * (2 * dim - b) for a, b in pairs)
