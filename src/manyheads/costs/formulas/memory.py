"""Memory: weights of matrices, and the activations that a backward pass keeps."""

from typing import Literal

from manyheads.costs.shapes import ModelShape
from manyheads.errors import UsageError, check_integer


def matrix_parameters(shape: ModelShape) -> int:
    """Count the weights that are multiplied with a token: projections, MLP, unembedding, patch projection and heads.

    A table of embeddings that is looked up is not among them, nor are biases, norm gains and learned positions; a table
    that is tied to the unembedding is.

    Examples
    --------
    >>> matrix_parameters(ModelShape(layers=12, width=768, heads=12, vocabulary=50257, tied=True))
    123532032
    """
    inner = shape.embedding_width or shape.width
    weights = shape.layers * (shape.projection_macs + shape.mlp_macs)
    if shape.unembedding:
        weights += embedding_table(shape)
    if inner != shape.width:
        weights += inner * shape.width * (2 if shape.unembedding else 1)
    weights += (shape.class_width or shape.width) * shape.classes
    dense = shape.head_transform + shape.pooled
    return weights + shape.width * (shape.patch_features + shape.token_classes + dense * shape.width)


def embedding_table(shape: ModelShape) -> int:
    """Count the numbers of the table of token embeddings, `V d`, or `V d_e` with an embedding width of its own.

    A tied unembedding is the same table; an untied one is another of this size. Learned positions are left out.
    """
    return shape.vocabulary * (shape.embedding_width or shape.width)


def stored_matrices(shape: ModelShape) -> int:
    """Count the weights that a call reads: `matrix_parameters`, and the table of embeddings where it is another one."""
    return matrix_parameters(shape) + (0 if shape.unembedding and shape.tied else embedding_table(shape))


def activation_bytes(
    shape: ModelShape, length: int, batch: int = 1, recompute: Literal["none", "scores", "block"] = "none"
) -> int:
    r"""Count the bytes that the backward pass of the blocks needs and that a forward pass must therefore keep.

    .. math:: L \left[(8 + 2r)\, b n d + b h n^2\right]

    numbers in the plain case: input, normed input, queries, keys, values, mixture, middle state, normed middle state,
    `2 r` for the MLP before and after its activation, and the probabilities (all `n^2`: an implementation that keeps
    them keeps the masked ones too). Gated, the MLP keeps `3 r`.

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
    heads = 2 * (shape.query_width + shape.key_width)  # q, k, v and the mixture
    mlp = (3 if shape.gated else 2) * (shape.mlp_hidden or 0)
    states = 4 if shape.mlp_hidden else 2
    softmax = batch * shape.heads * length * (length if recompute == "none" else 1)
    return shape.layers * shape.itemsize * (tokens * (states * shape.width + heads + mlp) + softmax)
