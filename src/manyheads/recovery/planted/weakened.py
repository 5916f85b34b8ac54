"""Weakened assumptions: families of layers from one that satisfies an assumption to one that does not at all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery._types import Array
from manyheads.recovery.layers.evaluation import dense_weights

Weaken: TypeAlias = Callable[[Array, Array, float], tuple[Array, Array]]


@dataclass(frozen=True)
class Weakening:
    """One assumption, and how it is given up."""

    title: str  # what is violated at strength one, for tables
    diagnostic: str  # name of the diagnostic of `manyheads.recovery.assumptions`
    change: Weaken  # weights (m, d, d) of a layer and a strength; the matrices that are scaled again keep their norm


def weakened_layer(layer: AttentionLayer, name: str, strength: float) -> AttentionLayer:
    r"""Return a layer of two heads with one assumption given up to a strength t from 0, as it is, to 1.

    By name, a key of `WEAKENINGS`; attention matrices are scaled back to their norms unless norms are what is changed:

    * coherence: the cosine of the attention matrices is t;
    * cancellation: :math:`W_2 = -t W_1 + (1 - t) W_2`;
    * rank: singular values but the first, times 1 - t;
    * diagonal: :math:`(1 - t) \Theta_i \pm t \|\Theta_i\|_F I/\sqrt d`, signs alternating;
    * column: all columns but the first, times 1 - t;
    * norms: :math:`\Theta_2`, times 1 - t;
    * lattice: entries moved a share t of the way to one size, with their signs.
    """
    if name not in WEAKENINGS:
        raise UsageError(f"name={name!r}: expected one of {', '.join(WEAKENINGS)}")
    if layer.heads != 2 or not 0 <= strength <= 1:
        raise UsageError(f"{layer.heads} heads, strength={strength}: give two heads, and a strength from 0 to 1")
    return AttentionLayer(*WEAKENINGS[name].change(*dense_weights(layer)[:2], strength))


def _rescale(theta: Array, like: Array) -> Array:
    norms = [np.linalg.norm(one, axis=(1, 2), keepdims=True) for one in (theta, like)]
    return theta * (norms[1] / norms[0])


def _coherence(theta: Array, projection: Array, strength: float) -> tuple[Array, Array]:
    first, last = theta / np.linalg.norm(theta, axis=(1, 2), keepdims=True)
    across = last - np.vdot(last, first) * first
    mixed = strength * first + (1 - strength**2) ** 0.5 * across / np.linalg.norm(across)
    return _rescale(np.stack([first, mixed]), theta), projection


def _cancellation(theta: Array, projection: Array, strength: float) -> tuple[Array, Array]:
    return theta, np.stack([projection[0], -strength * projection[0] + (1 - strength) * projection[1]])


def _rank(theta: Array, projection: Array, strength: float) -> tuple[Array, Array]:
    left, values, right = np.linalg.svd(theta)
    values[:, 1:] *= 1 - strength
    return _rescale((left * values[:, None]) @ right, theta), projection


def _diagonal(theta: Array, projection: Array, strength: float) -> tuple[Array, Array]:
    signs = np.array([1.0, -1.0])[:, None, None]
    identity = np.linalg.norm(theta, axis=(1, 2), keepdims=True) * np.eye(theta.shape[1]) / theta.shape[1] ** 0.5
    return _rescale((1 - strength) * theta + strength * signs * identity, theta), projection


def _column(theta: Array, projection: Array, strength: float) -> tuple[Array, Array]:
    factors = np.where(np.arange(theta.shape[2]) == 0, 1.0, 1 - strength)
    return _rescale(theta * factors, theta), projection


def _norms(theta: Array, projection: Array, strength: float) -> tuple[Array, Array]:
    return theta * np.array([1.0, 1 - strength])[:, None, None], projection


def _lattice(theta: Array, projection: Array, strength: float) -> tuple[Array, Array]:
    size = np.linalg.norm(theta, axis=(1, 2), keepdims=True) / theta.shape[1]
    return _rescale((1 - strength) * theta + strength * np.copysign(size, theta), theta), projection


# Weakenings of a layer, by name
WEAKENINGS: Mapping[str, Weakening] = MappingProxyType(
    {
        "coherence": Weakening("equal attention matrices", "coherence of attention", _coherence),
        "cancellation": Weakening("projections that sum to zero", "effective sum", _cancellation),
        "rank": Weakening("attention matrices of rank one", "stable rank of attention", _rank),
        "diagonal": Weakening("diagonal attention matrices", "diagonal share", _diagonal),
        "column": Weakening("a single column", "column share", _column),
        "norms": Weakening("an attention matrix of norm zero", "ratio of attention norms", _norms),
        "lattice": Weakening("entries of one size", "distance from lattices", _lattice),
    }
)
