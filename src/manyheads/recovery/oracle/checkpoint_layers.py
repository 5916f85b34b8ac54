"""Reference layer from the weights of a checkpoint, to score an extraction, which never reads it."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from manyheads.attention import AttentionLayer, MultiHeadAttention
from manyheads.models import attention_weights, open_checkpoint
from manyheads.models.attention_layers import AttentionWeights, Rotary, unread
from manyheads.models.checkpoints.checkpoint import Checkpoint
from manyheads.models.modules import Role
from manyheads.models.parameters import ParameterMap, parameter_map
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.oracle.checkpoint_oracles import Through
from manyheads.recovery.oracle.normalization import projected


def true_layer(
    path: Path | str, layer: int, *, through: Through = "attention", follow_links: bool = False
) -> AttentionLayer | RotaryLayer:
    """Return the layer that the stored weights of a checkpoint say, in float64.

    "attention" acts on the tokens; "block" on u, what the norm makes of the tokens before its gain and shift, projected
    on what u can show (`manyheads.recovery.oracle.normalization`); "block-with-mlp" as well, without the output bias,
    which the MLP absorbs, and with the layer scale. A `RotaryLayer` where queries and keys are turned.
    """
    found = _true_layer(path, layer, through, follow_links)
    if through != "block-with-mlp":
        return found
    checkpoint = open_checkpoint(path, follow_links=follow_links)
    roles = parameter_map(checkpoint).roles
    scales = [name for name, one in roles.items() if (one.role, one.layer) == (Role.ATTENTION_SCALE, layer)]
    scale = checkpoint.tensor(scales[0]).astype(np.float64) if scales else 1.0
    return replace(found, projection=np.asarray(found.projection) * scale, bias=None)


def _true_layer(path: Path | str, layer: int, through: Through, follow_links: bool) -> AttentionLayer | RotaryLayer:
    checkpoint = open_checkpoint(path, follow_links=follow_links)
    parameters = parameter_map(checkpoint)
    weights = attention_weights(checkpoint, layer, parameters)
    if weights.config.rotary is not None:
        gain, shift = np.ones(weights.config.width), np.zeros(weights.config.width)
        if through != "attention":
            gain, shift = _norm(checkpoint, parameters, layer, len(gain))
        centred = through != "attention" and weights.config.norm == "layer"
        return _turned(weights, weights.config.rotary, gain, shift, centred=centred)
    found = _widened(weights).merged()
    if through == "attention":
        return found
    gain, shift = _norm(checkpoint, parameters, layer, found.dim)
    return projected(found, gain, shift, centred=weights.config.norm == "layer")


def is_stored(path: Path | str) -> bool:
    """Tell whether a layer of a checkpoint is said by its weights alone, so that `true_layer` gives it."""
    return not unread(parameter_map(open_checkpoint(path)).config)


def _turned(
    weights: AttentionWeights, rotary: Rotary, gain: np.ndarray, shift: np.ndarray, *, centred: bool
) -> RotaryLayer:
    """Return a layer with rotary positions in float64, on tokens before gain and shift, projected off ones if centred.

    What queries and keys make of the shift are biases of theirs.
    """
    wide = _widened(weights)
    groups, (_, _, rank) = wide.heads // wide.groups, wide.query.shape
    # a checkpoint turns components (i, i + dims/2), the layer (i, i + N/2): both take the same new order.
    half = rotary.dims // 2
    turned, still = np.arange(rotary.dims), np.arange(rotary.dims, rank)
    middle = len(still) // 2
    order = np.concatenate([turned[:half], still[:middle], turned[half:], still[middle:]])

    def biased(weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:  # (m, d, N) -> (m, d + 1, N)
        row = (shift @ weight + (0.0 if bias is None else bias))[:, None, :]
        return np.concatenate([behind(weight), row], axis=1)[..., order]

    def behind(weight: np.ndarray) -> np.ndarray:
        scaled = gain[:, None] * weight
        return scaled - scaled.mean(-2, keepdims=True) if centred else scaled

    merged = wide.merged()  # projections and output bias are the same with and without positions
    projection = np.asarray(merged.projection)
    constant = (0.0 if merged.bias is None else np.asarray(merged.bias)) + (shift @ projection).sum(0)
    return RotaryLayer.of_projections(
        wide.scale * biased(wide.query, wide.query_bias),
        np.repeat(biased(wide.key, wide.key_bias), groups, axis=0),
        behind(projection),
        rotary.frequencies(),
        bias=constant if np.any(constant) else None,
    )


def _widened(weights: AttentionWeights) -> MultiHeadAttention:
    """Return the weights as a layer in float64."""

    def wide(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else np.asarray(array, np.float64)

    names = ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias")
    arrays = {name: wide(getattr(weights, name)) for name in names} | {"bias": wide(weights.output_bias)}
    return MultiHeadAttention(**arrays, scale=weights.scale, causal=weights.config.causal)


def _norm(checkpoint: Checkpoint, parameters: ParameterMap, layer: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return gain and shift of the norm in front of the attention, ones and zeros where it has none."""

    def read(kind: str, absent: float) -> np.ndarray:
        names = parameters.names(Role.ATTENTION_NORM, kind, layer)
        return checkpoint.tensor(names[0]).astype(np.float64) if names else np.full(dim, absent)

    return read("gain", 1.0), read("bias", 0.0)
