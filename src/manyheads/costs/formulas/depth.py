"""Sequential depth of an architecture, and the length at which attention costs as much as the rest of a block."""

from fractions import Fraction

from manyheads.costs.shapes import ModelShape, PooledShape, RecurrentShape
from manyheads.errors import check_integer


def sequential_depth(shape: ModelShape | RecurrentShape | PooledShape, length: int) -> int:
    """Count the layers that must run one after the other for a sequence of `n` positions.

    A recurrent network takes `n L_c`, the pooled MLP `L` and a tree of `ceil(log2 n)` sums, a transformer `L` blocks.
    Heads and embeddings are left out.

    Examples
    --------
    >>> [sequential_depth(shape, 1024) for shape in (RecurrentShape(8, 8), PooledShape(8, 8), ModelShape(2, 8, 2))]
    [1024, 11, 2]
    """
    length = check_integer("length", length)
    if isinstance(shape, RecurrentShape):
        return length * shape.cell_layers
    if isinstance(shape, PooledShape):
        return shape.layers + (length - 1).bit_length()
    return shape.layers


def crossover_length(shape: ModelShape) -> Fraction:
    """Return the length at which the attention core costs as much as the rest of a block: `n = (2 + r) d`.

    In dense FLOPs: `2 n h d_k` multiply-adds a token against those of projections and MLP. The causal core, counted
    exactly, gets there at about twice the length. Layers that differ are added up.

    Examples
    --------
    >>> crossover_length(ModelShape(layers=12, width=768, heads=12)) == 6 * 768
    True
    """
    kinds = [(kind.layers if shape.kinds else 1, kind) for kind in shape.blocks]
    rest = sum(layers * (kind.projection_macs + kind.mlp_macs) for layers, kind in kinds)
    return Fraction(rest, sum(layers * (kind.query_width + kind.mixture_width) for layers, kind in kinds))
