"""Violated assumptions: planted layers that break one assumption of the proofs, at once or by degrees."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery._types import Array, Generator
from manyheads.recovery.layers.evaluation import dense_weights
from manyheads.recovery.planted.hard_instances import parity_layer
from manyheads.recovery.planted.task import Inputs, gpt_layer, normal_matrix, planted_layer

Recipe = Callable[[Generator, int, int], AttentionLayer]
Weights = tuple[Array, Array]  # Theta and W (m, d, d)
SCALE = 2.0  # Frobenius norm of the attention matrices before they are deformed


@dataclass(frozen=True)
class Deformation:
    """One way to break an assumption."""

    title: str  # what is done, for tables
    violates: str  # name of the diagnostic of `manyheads.recovery.assumptions` that warns; empty where none does
    build: Recipe  # the layer from a generator, d and m
    inputs: Inputs = "boolean"  # distribution of the tokens that it is meant for


def deformed_layer(rng: Generator, name: str, dim: int, heads: int) -> AttentionLayer:
    r"""Return a planted layer with one assumption broken.

    The layer is `planted_layer` with :math:`\|\Theta_i\|_F = 2`, and then, by name (the last head is the one that is
    changed where one is):

    * benign: as it is;
    * close-heads, closer-heads: :math:`\Theta_m` is the combination of itself and :math:`\Theta_1` with cosine .95,
      .995;
    * weak-attention: :math:`\Theta_m / 5`; weak-projection: :math:`W_m / 10`;
    * cancelling: :math:`W_m = -0.9 \sum_{i<m} W_i + 0.1 W_m`; cancelled: :math:`W_m = -\sum_{i<m} W_i`;
    * equal-projections: :math:`W_m = W_1`;
    * rank-one: every :math:`\Theta_i`; rank-two: every :math:`\Theta_i` and :math:`W_i`;
    * heavy-diagonal: :math:`\Theta_i / 2 \pm 1.5\, I/\sqrt d`, signs alternating;
    * heavy-column: :math:`0.3\, \Theta_i` with column 0 six times as large;
    * lattice: :math:`\Theta_i` rounded to multiples of half the standard deviation of its entries;
    * saturated: :math:`4 \Theta_i`; flat: :math:`\Theta_i / 8`;
    * gpt: low-rank heads of `gpt_layer` without biases, for Gaussian tokens;
    * parity: `parity_layer` with a random hidden set.

    `name` is a key of `DEFORMATIONS`; there are two heads or more.
    """
    if name not in DEFORMATIONS:
        raise UsageError(f"name={name!r}: expected one of {', '.join(DEFORMATIONS)}")
    if heads < 2:
        raise UsageError(f"heads={heads}: deformations compare heads, give two or more")
    return DEFORMATIONS[name].build(rng, dim, heads)


def _change(change: Callable[[Array, Array], Weights]) -> Recipe:
    """Return what draws a planted layer and changes its weights."""

    def build(rng: Generator, dim: int, heads: int) -> AttentionLayer:
        layer = planted_layer(rng, dim, heads, scale=SCALE)
        return AttentionLayer(*change(layer.theta, layer.projection))

    return build


def _close_heads(cosine: float) -> Recipe:
    def change(theta: Array, projection: Array) -> Weights:
        first, last = theta[0], theta[-1]
        across = last - np.sum(last * first) / SCALE**2 * first  # orthogonal to the first, so that the cosine is exact
        across *= SCALE / np.linalg.norm(across)
        mixed = cosine * first + (1 - cosine**2) ** 0.5 * across
        return np.concatenate([theta[:-1], mixed[None]]), projection

    return _change(change)


def _scale_last(theta: float = 1.0, projection: float = 1.0) -> Recipe:
    def scale(matrices: Array, factor: float) -> Array:
        return np.concatenate([matrices[:-1], factor * matrices[-1:]])

    return _change(lambda a, w: (scale(a, theta), scale(w, projection)))


def _mix_projection(others: float, own: float) -> Recipe:
    def change(theta: Array, projection: Array) -> Weights:
        mixed = others * projection[:-1].sum(axis=0, keepdims=True) + own * projection[-1:]
        return theta, np.concatenate([projection[:-1], mixed])

    return _change(change)


def _rank_two(rng: Generator, dim: int, heads: int) -> AttentionLayer:
    theta = np.stack([normal_matrix(rng, dim, SCALE, 2) for _ in range(heads)])
    return AttentionLayer(theta, np.stack([normal_matrix(rng, dim, dim**0.5, 2) for _ in range(heads)]))


def _add_diagonal(theta: Array, projection: Array) -> Weights:
    dim, signs = theta.shape[1], (-1.0) ** np.arange(len(theta))[:, None, None]
    return theta / 2 + 1.5 * signs * np.eye(dim) / dim**0.5, projection


def _enlarge_column(theta: Array, projection: Array) -> Weights:
    return 0.3 * theta * np.where(np.arange(theta.shape[2]) == 0, 6.0, 1.0), projection


def _round(theta: Array, projection: Array) -> Weights:
    spacing = SCALE / theta.shape[1] / 2  # half the standard deviation of an entry
    return np.round(theta / spacing) * spacing, projection


# Deformations of a layer, by name
DEFORMATIONS: Mapping[str, Deformation] = MappingProxyType(
    {
        "benign": Deformation("nothing", "", _change(lambda theta, w: (theta, w))),
        "close-heads": Deformation("two attention matrices at cosine .95", "", _close_heads(0.95)),
        "closer-heads": Deformation(
            "two attention matrices at cosine .995", "coherence of attention", _close_heads(0.995)
        ),
        "weak-attention": Deformation("attention norms 5 : 1", "", _scale_last(theta=1 / 5)),
        "weak-projection": Deformation(
            "projection norms 10 : 1", "ratio of projection norms", _scale_last(projection=0.1)
        ),
        "cancelling": Deformation("projections that nearly cancel", "effective sum", _mix_projection(-0.9, 0.1)),
        "cancelled": Deformation("projections that sum to zero", "effective sum", _mix_projection(-1.0, 0.0)),
        "equal-projections": Deformation(
            "two projections are equal",
            "coherence of projections",
            _change(lambda theta, w: (theta, np.concatenate([w[:-1], w[:1]]))),
        ),
        "rank-one": Deformation(
            "attention matrices of rank one",
            "stable rank of attention",
            lambda rng, dim, heads: planted_layer(rng, dim, heads, scale=SCALE, rank=1),
        ),
        "rank-two": Deformation("all matrices of rank two", "", _rank_two),
        "heavy-diagonal": Deformation("heavy diagonals of opposite signs", "diagonal share", _change(_add_diagonal)),
        "heavy-column": Deformation("one heavy column", "", _change(_enlarge_column)),
        "lattice": Deformation("entries on a lattice", "distance from lattices", _change(_round)),
        "saturated": Deformation("logits of standard deviation 8", "", _change(lambda theta, w: (4.0 * theta, w))),
        "flat": Deformation(
            "logits of standard deviation .25", "smallest logits", _change(lambda theta, w: (theta / 8, w))
        ),
        "gpt": Deformation(
            "low-rank heads as in GPT, Gaussian tokens",
            "",
            lambda rng, dim, heads: gpt_layer(rng, dim, heads, key_bias=False, bias=False, causal=False),
            "gaussian",
        ),
        "parity": Deformation(
            "a parity layer",
            "stable rank of attention",
            lambda rng, dim, heads: parity_layer(dim, heads, 1 + rng.permutation(dim - 1)[:heads]),
        ),
    }
)


@dataclass(frozen=True)
class Weakening:
    """One assumption, and how it is given up."""

    title: str  # what is violated at strength one, for tables
    diagnostic: str  # name of the diagnostic of `manyheads.recovery.assumptions`
    # of weights (m, d, d) and a strength; the matrices that are scaled again keep their norm
    change: Callable[[Array, Array, float], Weights]


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


def _coherence(theta: Array, projection: Array, strength: float) -> Weights:
    first, last = theta / np.linalg.norm(theta, axis=(1, 2), keepdims=True)
    across = last - np.vdot(last, first) * first
    mixed = strength * first + (1 - strength**2) ** 0.5 * across / np.linalg.norm(across)
    return _rescale(np.stack([first, mixed]), theta), projection


def _cancellation(theta: Array, projection: Array, strength: float) -> Weights:
    return theta, np.stack([projection[0], -strength * projection[0] + (1 - strength) * projection[1]])


def _rank(theta: Array, projection: Array, strength: float) -> Weights:
    left, values, right = np.linalg.svd(theta)
    values[:, 1:] *= 1 - strength
    return _rescale((left * values[:, None]) @ right, theta), projection


def _diagonal(theta: Array, projection: Array, strength: float) -> Weights:
    signs = np.array([1.0, -1.0])[:, None, None]
    identity = np.linalg.norm(theta, axis=(1, 2), keepdims=True) * np.eye(theta.shape[1]) / theta.shape[1] ** 0.5
    return _rescale((1 - strength) * theta + strength * signs * identity, theta), projection


def _column(theta: Array, projection: Array, strength: float) -> Weights:
    factors = np.where(np.arange(theta.shape[2]) == 0, 1.0, 1 - strength)
    return _rescale(theta * factors, theta), projection


def _norms(theta: Array, projection: Array, strength: float) -> Weights:
    return theta * np.array([1.0, 1 - strength])[:, None, None], projection


def _lattice(theta: Array, projection: Array, strength: float) -> Weights:
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
