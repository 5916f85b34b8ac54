"""Planted layers and sequences: every weight is known, so every error can be measured.

Two families. A planted layer has dense random matrices of stated norms, the setting in which learning from examples
is proved. A GPT-shaped layer has the products of random query, key, value and output matrices, the setting of
extraction by queries. What violates the assumptions of the proofs is in `manyheads.recovery.planted.violations`, what
is hard to learn at all in `manyheads.recovery.planted.hard_instances`.
"""

from typing import Literal, TypeAlias

import numpy as np

from manyheads._extras import Float
from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError, check_integer
from manyheads.recovery._types import Array, Generator

Inputs: TypeAlias = Literal["boolean", "gaussian"]
# Standard deviation of the query bias of a GPT-shaped layer, beside query entries of standard deviation one
QUERY_BIAS = 0.3
OUTPUT_BIAS = 0.1  # standard deviation of the output bias of a GPT-shaped layer


def planted_layer(
    rng: Generator,
    dim: int,
    heads: int,
    *,
    scale: float = 2.0,
    rank: int | None = None,
    key_bias: bool = False,
    bias: bool = False,
    causal: bool = False,
) -> AttentionLayer:
    r"""Return a layer with independent normal matrices, scaled to exact norms.

    :math:`\|\Theta_i\|_F` = scale and :math:`\|W_i\|_F = \sqrt d`. The logit between two independent tokens with
    centred, independent entries of variance one then has standard deviation `scale`, and what a head reads from one
    such token has entries of mean square one.

    Parameters
    ----------
    rng
        Source of the weights.
    dim, heads
        d and m.
    scale
        Frobenius norm of every attention matrix.
    rank
        Rank of every attention matrix: products of (d, rank) and (rank, d) normal matrices. None for full rank.
        Projections always have full rank.
    key_bias
        Whether heads have key biases: normal directions of norm scale / 2.
    bias
        Whether there is an output bias: d normal numbers of variance one.
    causal
        Whether a token sees itself and earlier ones only.

    Returns
    -------
    The layer, float64.

    Raises
    ------
    UsageError
        No dimension, no head, a scale that is not positive, or a rank outside 1..d.

    Examples
    --------
    >>> import numpy as np
    >>> layer = planted_layer(np.random.default_rng(0), dim=8, heads=2, rank=3)
    >>> layer.theta.shape, np.linalg.matrix_rank(layer.theta).tolist()
    ((2, 8, 8), [3, 3])
    >>> np.linalg.norm(layer.theta, axis=(1, 2)).round(12).tolist()
    [2.0, 2.0]
    """
    _check_sizes(dim, heads, rank)
    if not (np.isfinite(scale) and scale > 0):
        raise UsageError(f"scale={scale}: give a positive norm")
    theta, projection = np.empty((heads, dim, dim)), np.empty((heads, dim, dim))
    for head in range(heads):
        theta[head] = normal_matrix(rng, dim, scale, rank)
        projection[head] = normal_matrix(rng, dim, dim**0.5)
    beta = rng.standard_normal((heads, dim)) if key_bias else None  # (m, d)
    if beta is not None:
        beta *= scale / 2 / np.linalg.norm(beta, axis=1, keepdims=True)
    return AttentionLayer(theta, projection, beta, rng.standard_normal(dim) if bias else None, causal)


def equal_spectrum_layer(rng: Generator, dim: int, heads: int, rank: int, *, scale: float = 1.0) -> AttentionLayer:
    r"""Return a layer whose attention matrices have `rank` equal singular values: their stable rank is exactly that.

    :math:`\Theta_i = (\beta / \sqrt r)\, U_i V_i^\top` with beta = `scale`, r = `rank` and independent uniform frames
    U_i, V_i (d, r), so that :math:`\|\Theta_i\|_F = \beta` and :math:`\|\Theta_i\|_{op} = \beta / \sqrt r`. Projections
    are uniform orthogonal matrices.

    Examples
    --------
    >>> import numpy as np
    >>> layer = equal_spectrum_layer(np.random.default_rng(0), dim=6, heads=2, rank=4)
    >>> np.linalg.svd(layer.theta[1])[1].round(12).tolist()
    [0.5, 0.5, 0.5, 0.5, 0.0, 0.0]
    """
    _check_sizes(dim, heads, rank)
    frames = np.linalg.qr(rng.standard_normal((3, heads, dim, dim)))[0]  # (3, m, d, d)
    signs = rng.integers(0, 2, (3, heads, 1, dim)) * 2.0 - 1  # QR fixes signs of columns: draw them
    left, right, projection = frames * signs
    theta = scale / rank**0.5 * left[..., :rank] @ right[..., :rank].transpose(0, 2, 1)
    return AttentionLayer(theta, projection)


def gpt_layer(
    rng: Generator,
    dim: int,
    heads: int,
    *,
    rank: int | None = None,
    key_bias: bool = True,
    bias: bool = True,
    causal: bool = True,
    gain: float = 1.0,
) -> AttentionLayer:
    r"""Return a layer of the shape of GPT's: products of random query, key, value and output matrices.

    .. math:: \Theta_i = g W_{Q,i} W_{K,i}^\top / \sqrt r, \quad W_i = W_{V,i} W_{O,i}, \quad
              \beta_i = g W_{K,i} b_{Q,i} / \sqrt r

    with r = `rank`, g = `gain`, all four matrices independent normal of variance 1/d, query bias normal of standard
    deviation 0.3, output bias of 0.1. For tokens with entries of variance one the logits have variance about g².

    Parameters
    ----------
    rng
        Source of the weights.
    dim, heads
        d and m.
    rank
        Key and value dimension r; None means dim // heads.
    key_bias, bias, causal
        Whether the layer has them.
    gain
        Factor on all logits.

    Returns
    -------
    The layer, float64.

    Raises
    ------
    UsageError
        No dimension, no head, a rank outside 1..d (more heads than dimensions and no rank given included), or a gain
        that is not positive.

    Examples
    --------
    >>> import numpy as np
    >>> layer = gpt_layer(np.random.default_rng(0), dim=12, heads=3)
    >>> np.linalg.matrix_rank(layer.projection).tolist(), layer.causal
    ([4, 4, 4], True)
    """
    rank = dim // max(heads, 1) if rank is None else rank
    _check_sizes(dim, heads, rank)
    if not (np.isfinite(gain) and gain > 0):
        raise UsageError(f"gain={gain}: give a positive factor")
    theta, projection, beta = np.empty((heads, dim, dim)), np.empty((heads, dim, dim)), np.empty((heads, dim))
    for head in range(heads):
        query, key, value = (rng.standard_normal((dim, rank)) / dim**0.5 for _ in range(3))
        output = rng.standard_normal((rank, dim)) / dim**0.5
        theta[head] = gain * query @ key.T / rank**0.5
        projection[head] = value @ output
        beta[head] = gain * QUERY_BIAS * key @ rng.standard_normal(rank) / rank**0.5
    shift = OUTPUT_BIAS * rng.standard_normal(dim)
    return AttentionLayer(theta, projection, beta if key_bias else None, shift if bias else None, causal)


def sequences(
    rng: Generator, count: int, length: int, dim: int, *, distribution: Inputs = "boolean"
) -> "Float[np.ndarray, 'n k d']":
    """Draw sequences with independent entries of mean zero and variance one.

    Parameters
    ----------
    rng
        Source of the entries.
    count, length, dim
        Number of sequences N, tokens k of each, entries d of a token.
    distribution
        "boolean": -1 or +1, each with probability one half. "gaussian": standard normal.

    Returns
    -------
    (N, k, d), float64.

    Raises
    ------
    UsageError
        Another distribution, or an empty axis.

    Examples
    --------
    >>> import numpy as np
    >>> x = sequences(np.random.default_rng(0), 2, 3, 4)
    >>> x.shape, np.unique(x).tolist()
    ((2, 3, 4), [-1.0, 1.0])
    """
    shape = (count, length, dim)
    if min(shape) < 1:
        raise UsageError(f"sequences of shape {shape}: every axis needs at least 1")
    if distribution == "boolean":
        return rng.integers(0, 2, shape).astype(np.float64) * 2 - 1
    if distribution == "gaussian":
        return rng.standard_normal(shape)
    raise UsageError(f"distribution={distribution!r}: expected 'boolean' or 'gaussian'")


def normal_matrix(rng: Generator, dim: int, norm: float, rank: int | None = None) -> Array:
    """Return a (d, d) matrix of independent normal entries, or of normal factors, scaled to a Frobenius norm."""
    matrix = rng.standard_normal((dim, dim if rank is None else rank))
    matrix = matrix if rank is None else matrix @ rng.standard_normal((rank, dim))
    return matrix * (norm / np.linalg.norm(matrix))


def _check_sizes(dim: int, heads: int, rank: int | None) -> None:
    check_integer("dim", dim)
    check_integer("heads", heads)
    if rank is not None:
        check_integer("rank", rank, 1, dim)
