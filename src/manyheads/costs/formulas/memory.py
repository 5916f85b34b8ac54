"""Memory: weights of matrices, and the activations that a backward pass keeps."""

from typing import Literal

from manyheads.costs.shapes import ModelShape
from manyheads.errors import UsageError, check_integer


def matrix_parameters(shape: ModelShape) -> int:
    """Count the weights that are multiplied with a token: projections, MLP, unembedding, patch projection and heads.

    Of experts those that a token visits.

    A table of embeddings that is looked up is not among them, nor are biases, norm gains and learned positions; a table
    that is tied to the unembedding is.

    Examples
    --------
    >>> matrix_parameters(ModelShape(layers=12, width=768, heads=12, vocabulary=50257, tied=True))
    123532032
    """
    inner = shape.embedding_width or shape.width
    weights = sum(kind.layers * (kind.projection_macs + kind.mlp_macs) for kind in shape.blocks)
    if shape.unembedding:
        weights += embedding_table(shape)
    if inner != shape.width:
        weights += inner * shape.width * (2 if shape.projects_back else 1)
    weights += (inner if shape.projects_back else shape.width) * shape.token_classes
    weights += (shape.class_width or shape.width) * shape.classes
    dense = shape.head_transform + shape.pooled
    return weights + shape.width * (shape.patch_features + dense * shape.width)


def embedding_table(shape: ModelShape) -> int:
    """Count the numbers of the table of token embeddings, `V d`, or `V d_e` with an embedding width of its own.

    A tied unembedding is the same table; an untied one is another of this size. Learned positions are left out.
    """
    return shape.vocabulary * (shape.embedding_width or shape.width)


def stored_matrices(shape: ModelShape, tokens: int | None = None) -> int:
    """Count the weights that a call reads: `matrix_parameters`, and the table of embeddings where it is another one.

    Of experts all, or as many as so many `tokens` visit at most.
    """
    idle = 0
    for kind in shape.blocks:
        if experts := kind.experts:
            visited = experts.count if tokens is None else min(experts.count, tokens * experts.active)
            idle += kind.layers * (visited - experts.active) * kind.expert_macs
    return matrix_parameters(shape) + idle + (0 if shape.unembedding and shape.tied else embedding_table(shape))


def activation_bytes(
    shape: ModelShape, length: int, batch: int = 1, recompute: Literal["none", "scores", "block"] = "none"
) -> int:
    r"""Count the bytes that the backward pass of the blocks needs and that a forward pass must therefore keep.

    .. math:: L \left[(8 + 2r)\, b n d + b h n^2\right]

    numbers in the plain case: input, normed input, queries, keys, values, mixture, middle state, normed middle state,
    `2 r` for the MLP before and after its activation, and the probabilities (all `n^2`: an implementation that keeps
    them keeps the masked ones too). Gated, the MLP keeps `3 r`; of experts those count that a token visits, and latent
    vectors before and after their norms.

    With `recompute` ``"scores"`` probabilities are recreated from one log-sum-exp a row, and with ``"block"`` only the
    input of each block is kept. A minimum by hand, not what a framework uses: JAX 0.10.2 keeps about twice that, since
    its derivatives of norm and GELU keep their own intermediates.
    """
    if recompute not in ("none", "scores", "block"):
        raise UsageError(f"activation memory: recompute={recompute!r} is none of none, scores, block")
    length, batch = check_integer("length", length), check_integer("batch", batch)
    tokens = batch * length
    if recompute == "block":
        return shape.layers * tokens * shape.width * shape.itemsize
    kept = 0
    for kind in shape.blocks:
        heads = kind.query_width + kind.cached_numbers + kind.mixture_width  # q, k, v and the mixture
        if latent := kind.latent:  # keys and values of every head; latent vectors before and after their norms
            heads += kind.query_width + kind.mixture_width - kind.heads * latent.rotary_dim
            heads += latent.key_value_rank + 2 * latent.query_rank
        hidden = (kind.mlp_hidden or 0) + (kind.experts.active * kind.experts.hidden if kind.experts else 0)
        mlp = (3 if kind.gated else 2) * hidden + kind.routed
        states = 4 if hidden else 2
        softmax = batch * kind.heads * length * (length if recompute == "none" else 1)
        kept += kind.layers * (tokens * (states * kind.width + heads + mlp) + softmax)
    return kept * shape.itemsize
