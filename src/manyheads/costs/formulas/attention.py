"""The attention core: scores, softmax, mixture of values."""

from dataclasses import replace

from manyheads.costs.conventions import Convention
from manyheads.costs.cost import Cost
from manyheads.costs.formulas.passes import Part, cost_of, pass_items
from manyheads.costs.shapes import ELEMENTWISE_SCORE, AttentionShape
from manyheads.costs.tally import pair


def attention_part(shape: AttentionShape) -> Part:
    """Return the core of one layer as a part."""
    keys = shape.keys or shape.queries
    pairs = shape.batch * shape.heads * pair(shape.queries, keys, shape.causal, shape.window)
    per_score = ELEMENTWISE_SCORE["forward"] + (ELEMENTWISE_SCORE["mask"] if shape.causal else 0)
    macs = (shape.head_dim + (shape.value_dim or shape.head_dim)) * pairs
    exp, backward = (ELEMENTWISE_SCORE[name] * pairs for name in ("transcendental", "backward"))
    part = Part("attention core", macs, per_score * pairs, exp, backward, again="block")
    return replace(part, scores=pairs, scores_macs=shape.head_dim * pairs)


def attention_cost(shape: AttentionShape, training: bool = False, convention: str | Convention = "exact") -> Cost:
    r"""Count the attention core, `softmax(Q K^T / sqrt(d_k) + M) V` for `b` sequences and `h` heads.

    .. math:: 2\, b h\, p\, (d_k + d_v) \;\text{FLOPs}, \qquad p = nm \;\text{or, causal,}\; nm - n(n-1)/2 .

    The backward pass takes twice as many; recreating the scores in it takes `2 b h p d_k` more. Grouped queries change
    the bytes only. In `training` the backward pass is counted too, with gradients for queries, keys and values.

    Notes
    -----
    Elementwise, a score takes 5 operations (scale, maximum, subtract, sum, divide), one more if it may be masked, and
    one exp; in the backward pass 5. Bytes are queries, keys, values and output, once; with the backward pass their
    gradients too.

    Examples
    --------
    >>> core = attention_cost(AttentionShape(queries=64, heads=4, head_dim=12, batch=2))
    >>> core.flops, attention_cost(AttentionShape(64, 4, 12, batch=2, causal=True)).flops
    (1572864, 798720)
    """
    rows = shape.queries * shape.heads + (shape.keys or shape.queries) * (shape.kv_heads or shape.heads)
    values = shape.batch * rows * (shape.head_dim + (shape.value_dim or shape.head_dim))
    moved = values * shape.itemsize * (2 if training else 1)
    return cost_of(pass_items([attention_part(shape)], training), moved, shape.itemsize, convention)
