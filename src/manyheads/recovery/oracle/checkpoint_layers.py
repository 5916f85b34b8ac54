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
from manyheads.recovery._types import Array
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
    checkpoint = open_checkpoint(path, follow_links=follow_links)
    parameters = parameter_map(checkpoint)
    weights, behind = attention_weights(checkpoint, layer, parameters), through != "attention"
    config = weights.config
    gain: Array = np.ones(config.width)
    shift: Array = np.zeros(config.width)
    if behind:
        gain, shift = _norm(checkpoint, parameters, layer, config.width)
    centred = behind and config.norm == "layer"
    found: AttentionLayer | RotaryLayer
    if config.rotary is not None:
        found = _rotary_layer(weights, config.rotary, gain, shift, centred=centred)
    else:
        merged = _widen(weights).merged()
        found = projected(merged, gain, shift, centred=centred) if behind else merged
    if through != "block-with-mlp":
        return found
    names = (name for name, one in parameters.roles.items() if (one.role, one.layer) == (Role.ATTENTION_SCALE, layer))
    scale = next((checkpoint.tensor(name).astype(np.float64) for name in names), 1.0)
    return replace(found, projection=np.asarray(found.projection) * scale, bias=None)


def is_stored(path: Path | str) -> bool:
    """Tell whether a layer of a checkpoint is said by its weights alone, so that `true_layer` gives it."""
    return not unread(parameter_map(open_checkpoint(path)).config)


def _rotary_layer(
    weights: AttentionWeights, rotary: Rotary, gain: Array, shift: Array, *, centred: bool
) -> RotaryLayer:
    """Return a rotary layer in float64, on tokens before gain and shift, projected off ones if centred."""
    wide = _widen(weights)
    groups, (_, _, rank) = wide.heads // wide.groups, wide.query.shape
    # a checkpoint turns components (i, i + dims/2), the layer (i, i + N/2): both take the same new order.
    half = rotary.dims // 2
    turned, still = np.arange(rotary.dims), np.arange(rotary.dims, rank)
    middle = len(still) // 2
    order = np.concatenate([turned[:half], still[:middle], turned[half:], still[middle:]])

    def with_bias(weight: Array, bias: Array | None) -> Array:  # (m, d, N) -> (m, d + 1, N)
        row = (shift @ weight + (0.0 if bias is None else bias))[:, None, :]
        return np.concatenate([behind(weight), row], axis=1)[..., order]

    def behind(weight: Array) -> Array:
        scaled = gain[:, None] * weight
        return scaled - scaled.mean(-2, keepdims=True) if centred else scaled

    merged = wide.merged()  # projections and output bias are the same with and without positions
    projection = np.asarray(merged.projection)
    constant = (0.0 if merged.bias is None else np.asarray(merged.bias)) + (shift @ projection).sum(0)
    bias = constant if np.any(constant) else None
    query, key = wide.scale * with_bias(wide.query, wide.query_bias), with_bias(wide.key, wide.key_bias)
    key = np.repeat(key, groups, axis=0)
    return RotaryLayer.of_projections(query, key, behind(projection), rotary.frequencies(), bias=bias)


def _widen(weights: AttentionWeights) -> MultiHeadAttention:
    """Return the weights as a layer in float64."""

    def wide(array: Array | None) -> Array | None:
        return None if array is None else np.asarray(array, np.float64)

    names = ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias")
    arrays = {name: wide(getattr(weights, name)) for name in names} | {"bias": wide(weights.output_bias)}
    return MultiHeadAttention(**arrays, scale=weights.scale, causal=weights.config.causal)


def _norm(checkpoint: Checkpoint, parameters: ParameterMap, layer: int, dim: int) -> tuple[Array, Array]:
    """Return gain and shift of the norm in front of the attention, ones and zeros where it has none."""

    def read(kind: str, absent: float) -> Array:
        names = parameters.names(Role.ATTENTION_NORM, kind, layer)
        return checkpoint.tensor(names[0]).astype(np.float64) if names else np.full(dim, absent)

    return read("gain", 1.0), read("bias", 0.0)
