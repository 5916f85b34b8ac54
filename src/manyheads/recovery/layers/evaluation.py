"""Evaluation of a layer in plain NumPy, without compilation."""

import numpy as np
from numpy.typing import ArrayLike

from manyheads._arrays import takes_arrays
from manyheads._extras import Float
from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Array, ArrayFunction
from manyheads.recovery.fit.variable_projection import Examples

TOKENS = 1 << 14  # tokens that are worked on at once


@takes_arrays
def evaluate_layer(layer: AttentionLayer, x: "Float[ArrayLike, 'n k d']") -> "Float[np.ndarray, 'n k d']":
    """Apply a layer with merged weights to sequences in float64, without compiling anything.

    y = sum_i softmax_rows(x Theta_i x^T + 1 (x beta_i)^T + mask) x W_i + 1 c^T

    The same function as calling the layer, which compiles once per shape and is the faster one for few shapes.

    Parameters
    ----------
    layer
        Theta, W (m, d, d), the key bias (m, d) and the output bias (d,), or None; causal or not.
    x
        Sequences (n, k, d).

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.attention import AttentionLayer
    >>> from manyheads.recovery.layers.evaluation import evaluate_layer
    >>> average = AttentionLayer(theta=np.zeros((1, 2, 2)), projection=np.eye(2)[None], causal=True)
    >>> evaluate_layer(average, np.array([[[0.0, 0.0], [2.0, 4.0]]]))
    array([[[0., 0.],
            [1., 2.]]])
    """
    x = np.asarray(x, np.float64)
    count, length = x.shape[:2]
    projection = np.asarray(layer.projection, np.float64)
    y = np.zeros_like(x)
    step = max(1, TOKENS // max(length, 1))
    for start in range(0, count, step):
        part = x[start : start + step]
        for head in range(len(projection)):
            weights = softmax(attention_logits(layer, part, head))
            y[start : start + step] += (weights @ part) @ projection[head]
    return y if layer.bias is None else y + np.asarray(layer.bias, np.float64)


def dense_weights(layer: AttentionLayer) -> tuple[Array, Array, Array, Array]:
    """Return Theta, W (m, d, d), the key bias (m, d) and the output bias (d,) in float64, zeros for what is absent."""
    theta, projection = np.asarray(layer.theta, np.float64), np.asarray(layer.projection, np.float64)
    key_bias = np.zeros(theta.shape[:2]) if layer.key_bias is None else np.asarray(layer.key_bias, np.float64)
    bias = np.zeros(layer.dim) if layer.bias is None else np.asarray(layer.bias, np.float64)
    return theta, projection, key_bias, bias


def apply_layer(layer: AttentionLayer | ArrayFunction, x: Array) -> Array:
    """Apply a layer of any kind to sequences (n, k, d), without compiling anything."""
    return evaluate_layer(layer, x) if isinstance(layer, AttentionLayer) else layer(x)


def sequence_errors(layer: AttentionLayer | ArrayFunction, examples: Examples) -> Array:
    """Return the squared error of a layer on each sequence, summed over rows and columns, (n,)."""
    return ((apply_layer(layer, examples.x) - examples.y) ** 2).sum((1, 2))


def relative_error(layer: AttentionLayer | ArrayFunction, examples: Examples) -> float:
    """Return the squared error of a layer relative to the variance of the labels; infinite for NaN."""
    plain = isinstance(layer, AttentionLayer)
    squares = sequence_errors(layer, examples) if plain else (layer(examples.x) - examples.y) ** 2
    error = float(squares.sum()) / examples.power
    return error if np.isfinite(error) else np.inf


def attention_logits(layer: AttentionLayer, x: Array, head: int | None = None) -> Array:
    """Return the logits (n, k, k) of one head on sequences (n, k, d), or (m, n, k, k) of all; -inf where masked."""
    if head is None:
        return np.stack([attention_logits(layer, x, i) for i in range(layer.heads)])
    logits = (x @ np.asarray(layer.theta[head], np.float64)) @ x.transpose(0, 2, 1)
    if layer.key_bias is not None:
        logits += (x @ np.asarray(layer.key_bias[head], np.float64))[:, None, :]
    if layer.causal:
        logits = np.where(np.tril(np.ones(logits.shape[1:], bool)), logits, -np.inf)
    return logits


def softmax(logits: Array) -> Array:
    """Return the softmax over the last axis."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights
