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
from manyheads.checkpoints import (
    AttentionWeights,
    Checkpoint,
    Family,
    Rotary,
    attention_weights,
    fit_family,
    open_checkpoint,
)
from manyheads.checkpoints.tables import Role
from manyheads.errors import UsageError
from manyheads.recovery.checkpoint_oracles import Through
from manyheads.recovery.rotary_layer import RotaryLayer


def true_layer(
    path: Path | str, layer: int, *, through: Through = "attention", follow_links: bool = False
) -> AttentionLayer | RotaryLayer:
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

    Returns
    -------
    AttentionLayer, or RotaryLayer where queries and keys are turned by their positions.

    Raises
    ------
    UsageError
        No such layer; a block whose attention has rotary positions; rotary angles that the configuration rescales.
    CheckpointRefused
        The folder cannot be read safely, or its family is unknown.
    """
    with open_checkpoint(path, follow_links=follow_links) as checkpoint:
        family = fit_family(checkpoint)
        weights = attention_weights(checkpoint, layer, family)
        if weights.facts.rotary is not None:
            if through == "block":
                raise UsageError(f"layer {layer} of {path}: no layer is defined behind a norm and rotary positions")
            return _turned(weights, weights.facts.rotary)
        found = _widened(weights).merged()
        if through == "attention":
            return found
        gain, shift = _norm(checkpoint, family, layer, found.dim)
    return layer_behind_norm(found, gain, shift)


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


def _turned(weights: AttentionWeights, rotary: Rotary) -> RotaryLayer:
    """Return a layer with rotary positions in float64."""
    wide = _widened(weights)
    groups, (_, _, rank) = wide.heads // wide.groups, wide.query.shape
    # A checkpoint turns components (i, i + dims/2), the layer (i, i + N/2): both take the same new order.
    half = rotary.dims // 2
    turned, still = np.arange(rotary.dims), np.arange(rotary.dims, rank)
    middle = len(still) // 2
    order = np.concatenate([turned[:half], still[:middle], turned[half:], still[middle:]])

    def biased(weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:  # (m, d, N) -> (m, d + 1, N)
        row = np.zeros((len(weight), 1, rank)) if bias is None else bias[:, None, :]
        return np.concatenate([weight, row], axis=1)[..., order]

    merged = wide.merged()  # projections and output bias are the same with and without positions
    return RotaryLayer.of_projections(
        wide.scale * biased(wide.query, wide.query_bias),
        np.repeat(biased(wide.key, wide.key_bias), groups, axis=0),
        np.asarray(merged.projection),
        rotary.frequencies(),
        bias=None if merged.bias is None else np.asarray(merged.bias),
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
