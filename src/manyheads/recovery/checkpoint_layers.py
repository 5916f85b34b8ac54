r"""The layer that the weights of a checkpoint say, to score what was extracted; extraction itself never reads it.

Behind a LayerNorm, :math:`\mathrm{norm}(x) = \gamma \odot u + \delta` with
:math:`u = (x - \bar x)/\sqrt{\mathrm{var}(x) + \epsilon}`, queries see the layer only through u, which lies in the
hyperplane :math:`1^\perp`. With :math:`G = \mathrm{diag}(\gamma)` and P the projector on that hyperplane, the layer
that acts on u is

    Theta' = P G Theta G P,  beta' = P (G beta + G Theta^T delta),  W' = P G W,  c' = c + sum_i W_i^T delta

Gains and shifts on their own, and whatever acts along 1, are not determined by any query.
"""

from pathlib import Path

import numpy as np

from manyheads.attention import AttentionLayer, MultiHeadAttention
from manyheads.checkpoints import AttentionWeights, Checkpoint, Family, attention_weights, fit_family, open_checkpoint
from manyheads.checkpoints.tables import Role
from manyheads.errors import UsageError
from manyheads.recovery.checkpoint_oracles import Through


def true_layer(
    path: Path | str, layer: int, *, through: Through = "attention", follow_links: bool = False
) -> AttentionLayer:
    """Return the layer that the stored weights of a checkpoint say, in float64.

    Parameters
    ----------
    path
        A checkpoint folder.
    layer
        Which layer, from 0.
    through
        "attention": acting on the tokens; "block": acting on u, what a LayerNorm makes of the tokens before its gain
        and shift.
    follow_links
        Whether files may be symbolic links.

    Raises
    ------
    UsageError
        The layer has rotary positions, and so no single Theta: see `rotary_theta`.
    CheckpointRefused
        The folder cannot be read safely, or its family is unknown.
    """
    with open_checkpoint(path, follow_links=follow_links) as checkpoint:
        family = fit_family(checkpoint)
        weights = attention_weights(checkpoint, layer, family)
        if weights.facts.rotary is not None:
            raise UsageError(f"layer {layer} of {path} has rotary positions: its Theta depends on the offset")
        found = _widened(weights).merged()
        if through == "attention":
            return found
        gain, shift = _norm(checkpoint, family, layer, found.dim)
    return layer_behind_norm(found, gain, shift)


def rotary_theta(path: Path | str, layer: int, offset: int, *, follow_links: bool = False) -> np.ndarray:
    """Return Theta at one offset of a layer with rotary positions, (m, d, d).

    The logit of a query x that stands `offset` places after a key y is x^T Theta y.

    Raises
    ------
    UsageError
        The layer has no rotary positions, or a configuration that rescales their angles.
    """
    with open_checkpoint(path, follow_links=follow_links) as checkpoint:
        weights = attention_weights(checkpoint, layer)
    rotary = weights.facts.rotary
    if rotary is None:
        raise UsageError(f"layer {layer} of {path} has no rotary positions: see true_layer")
    half = rotary.dims // 2
    turned = np.array(_widened(weights).query)  # (H, d, N)
    angles = offset * rotary.frequencies()
    cosine, sine = np.cos(angles), np.sin(angles)
    first, second = turned[..., :half].copy(), turned[..., half : 2 * half].copy()
    # A query at p and a key at p - offset: q R(p)^T R(p - offset) k. Turning the query by `offset` does the same.
    turned[..., :half] = first * cosine - second * sine
    turned[..., half : 2 * half] = second * cosine + first * sine
    groups = weights.query.shape[0] // weights.key.shape[0]
    key = np.repeat(np.asarray(weights.key, np.float64), groups, 0)
    return weights.scale * turned @ key.swapaxes(1, 2)


def layer_behind_norm(layer: AttentionLayer, gain: np.ndarray, shift: np.ndarray) -> AttentionLayer:
    """Return the layer that acts on u in 1's complement where `layer` acts on gain * u + shift.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> layer = AttentionLayer(rng.normal(size=(2, 4, 4)), rng.normal(size=(2, 4, 4)))
    >>> gain, shift, u = rng.normal(size=4), rng.normal(size=4), rng.normal(size=(3, 4))
    >>> u -= u.mean(-1, keepdims=True)
    >>> bool(np.allclose(layer_behind_norm(layer, gain, shift)(u), layer(gain * u + shift)))
    True
    """
    theta, projection = np.asarray(layer.theta), np.asarray(layer.projection)
    heads, dim, _ = theta.shape
    beta = np.zeros((heads, dim)) if layer.key_bias is None else np.asarray(layer.key_bias)
    bias = np.zeros(dim) if layer.bias is None else np.asarray(layer.bias)

    def project(rows: np.ndarray) -> np.ndarray:  # the last axis onto 1's complement
        return rows - rows.mean(-1, keepdims=True)

    inner = project((gain[:, None] * theta * gain).swapaxes(1, 2)).swapaxes(1, 2)
    return AttentionLayer(
        theta=project(inner),
        projection=project((gain[:, None] * projection).swapaxes(1, 2)).swapaxes(1, 2),
        key_bias=project(gain * (beta + np.einsum("d,mde->me", shift, theta))),
        bias=bias + np.einsum("d,mde->e", shift, projection),
        causal=layer.causal,
    )


def _widened(weights: AttentionWeights) -> MultiHeadAttention:
    """Return the weights as a layer in float64."""

    def wide(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else np.asarray(array, np.float64)

    return MultiHeadAttention(
        query=np.asarray(weights.query, np.float64),
        key=np.asarray(weights.key, np.float64),
        value=np.asarray(weights.value, np.float64),
        output=np.asarray(weights.output, np.float64),
        query_bias=wide(weights.query_bias),
        key_bias=wide(weights.key_bias),
        value_bias=wide(weights.value_bias),
        bias=wide(weights.output_bias),
        scale=weights.scale,
        causal=weights.facts.causal,
    )


def _norm(checkpoint: Checkpoint, family: Family, layer: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return gain and shift of the norm in front of the attention, ones and zeros where it has none."""

    def read(kind: str, absent: float) -> np.ndarray:
        names = family.names(Role.ATTENTION_NORM, kind, layer)
        return checkpoint.tensor(names[0]).astype(np.float64) if names else np.full(dim, absent)

    return read("gain", 1.0), read("bias", 0.0)
