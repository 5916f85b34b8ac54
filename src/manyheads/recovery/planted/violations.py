"""Violated assumptions: planted layers that each break one assumption of the proofs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery._types import Generator
from manyheads.recovery.planted.hard_instances import parity_layer
from manyheads.recovery.planted.task import Inputs, gpt_layer, normal_matrix, planted_layer

Recipe = Callable[[Generator, int, int], AttentionLayer]
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


def _benign_layer(rng: Generator, dim: int, heads: int) -> AttentionLayer:
    return planted_layer(rng, dim, heads, scale=SCALE)


def _close_heads(cosine: float) -> Recipe:
    def build(rng: Generator, dim: int, heads: int) -> AttentionLayer:
        layer = _benign_layer(rng, dim, heads)
        first, last = layer.theta[0], layer.theta[-1]
        across = last - np.sum(last * first) / SCALE**2 * first  # orthogonal to the first, so that the cosine is exact
        across *= SCALE / np.linalg.norm(across)
        theta = layer.theta.copy()
        theta[-1] = cosine * first + (1 - cosine**2) ** 0.5 * across
        return AttentionLayer(theta, layer.projection)

    return build


def _scale(theta: float = 1.0, projection: float = 1.0, everywhere: bool = False) -> Recipe:
    def build(rng: Generator, dim: int, heads: int) -> AttentionLayer:
        layer = _benign_layer(rng, dim, heads)
        chosen = np.full(heads, everywhere) | (np.arange(heads) == heads - 1)
        factors = np.where(chosen, theta, 1.0)[:, None, None], np.where(chosen, projection, 1.0)[:, None, None]
        return AttentionLayer(layer.theta * factors[0], layer.projection * factors[1])

    return build


def _mixed_projection(others: float, own: float) -> Recipe:
    def build(rng: Generator, dim: int, heads: int) -> AttentionLayer:
        layer = _benign_layer(rng, dim, heads)
        projection = layer.projection.copy()
        projection[-1] = others * projection[:-1].sum(axis=0) + own * projection[-1]
        return AttentionLayer(layer.theta, projection)

    return build


def _equal_projections(rng: Generator, dim: int, heads: int) -> AttentionLayer:
    layer = _benign_layer(rng, dim, heads)
    projection = layer.projection.copy()
    projection[-1] = projection[0]
    return AttentionLayer(layer.theta, projection)


def _rank_one(rng: Generator, dim: int, heads: int) -> AttentionLayer:
    return planted_layer(rng, dim, heads, scale=SCALE, rank=1)


def _rank_two(rng: Generator, dim: int, heads: int) -> AttentionLayer:
    theta = np.stack([normal_matrix(rng, dim, SCALE, 2) for _ in range(heads)])
    return AttentionLayer(theta, np.stack([normal_matrix(rng, dim, dim**0.5, 2) for _ in range(heads)]))


def _heavy_diagonal(rng: Generator, dim: int, heads: int) -> AttentionLayer:
    layer = _benign_layer(rng, dim, heads)
    signs = (-1.0) ** np.arange(heads)[:, None, None]
    return AttentionLayer(layer.theta / 2 + 1.5 * signs * np.eye(dim) / dim**0.5, layer.projection)


def _heavy_column(rng: Generator, dim: int, heads: int) -> AttentionLayer:
    layer = _benign_layer(rng, dim, heads)
    theta = 0.3 * layer.theta
    theta[:, :, 0] *= 6
    return AttentionLayer(theta, layer.projection)


def _lattice(rng: Generator, dim: int, heads: int) -> AttentionLayer:
    layer = _benign_layer(rng, dim, heads)
    spacing = SCALE / dim / 2  # half the standard deviation of an entry
    return AttentionLayer(np.round(layer.theta / spacing) * spacing, layer.projection)


def _gpt(rng: Generator, dim: int, heads: int) -> AttentionLayer:
    return gpt_layer(rng, dim, heads, key_bias=False, bias=False, causal=False)


def _parity(rng: Generator, dim: int, heads: int) -> AttentionLayer:
    return parity_layer(dim, heads, 1 + rng.permutation(dim - 1)[:heads])


# Deformations of a layer, by name
DEFORMATIONS: Mapping[str, Deformation] = MappingProxyType(
    {
        "benign": Deformation("nothing", "", _benign_layer),
        "close-heads": Deformation("two attention matrices at cosine .95", "", _close_heads(0.95)),
        "closer-heads": Deformation(
            "two attention matrices at cosine .995", "coherence of attention", _close_heads(0.995)
        ),
        "weak-attention": Deformation("attention norms 5 : 1", "", _scale(theta=1 / 5)),
        "weak-projection": Deformation("projection norms 10 : 1", "ratio of projection norms", _scale(projection=0.1)),
        "cancelling": Deformation("projections that nearly cancel", "effective sum", _mixed_projection(-0.9, 0.1)),
        "cancelled": Deformation("projections that sum to zero", "effective sum", _mixed_projection(-1.0, 0.0)),
        "equal-projections": Deformation("two projections are equal", "coherence of projections", _equal_projections),
        "rank-one": Deformation("attention matrices of rank one", "stable rank of attention", _rank_one),
        "rank-two": Deformation("all matrices of rank two", "", _rank_two),
        "heavy-diagonal": Deformation("heavy diagonals of opposite signs", "diagonal share", _heavy_diagonal),
        "heavy-column": Deformation("one heavy column", "", _heavy_column),
        "lattice": Deformation("entries on a lattice", "distance from lattices", _lattice),
        "saturated": Deformation("logits of standard deviation 8", "", _scale(theta=4.0, everywhere=True)),
        "flat": Deformation(
            "logits of standard deviation .25", "smallest logits", _scale(theta=1 / 8, everywhere=True)
        ),
        "gpt": Deformation("low-rank heads as in GPT, Gaussian tokens", "", _gpt, "gaussian"),
        "parity": Deformation("a parity layer", "stable rank of attention", _parity),
    }
)
