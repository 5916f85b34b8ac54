"""Attention layers of a checkpoint: configuration and weights in one layout for all families.

    q_h = x query_h + query_bias_h            x: (n, d),  q_h: (n, N),   h = 1..H
    k_g = x key_g + key_bias_g                g = 1..H_kv;  head h reads g = h // (H / H_kv), counted from 0
    v_g = x value_g + value_bias_g
    y = sum_h softmax(scale q_h k_g^T + mask) v_g output_h + output_bias

Weights are reshaped, sliced and transposed, never recomputed: each number is the stored one in its stored dtype.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.errors import UsageError
from manyheads.models.checkpoints.checkpoint import Checkpoint
from manyheads.models.config import ModelConfig, shown
from manyheads.models.families.gated import CAPPED, FIXED, NEIGHBOURS
from manyheads.models.families.plain import SLOPES
from manyheads.models.modules import Role
from manyheads.models.parameters import ParameterMap, parameter_map
from manyheads.models.refusals import ConfigInvalid, WeightsMismatch

Array = NDArray[Any]


@dataclass(frozen=True)
class Rotary:
    r"""Rotary positions: query and key components are turned by angles that grow with the position.

    Component `i < dims/2` is paired with component `i + dims/2`; at position `p` the pair turns by

        p * theta^(-2 i / dims)

    Components from `dims` on stay as they are.
    """

    dims: int  # how many of the N components of a head are turned; even
    fraction: float  # the share of N that the configuration names; `dims = int(N * fraction)`
    theta: float  # the base of the angles
    scaling: Mapping[str, Any] = field(default_factory=dict)  # the configuration's table that changes these angles

    def frequencies(self) -> Array:
        """Return the angle of each pair at position 1, shape (dims/2,), float64."""
        if self.scaling:
            kind = self.scaling.get("rope_type", self.scaling.get("type"))
            raise UsageError(f"rotary scaling {kind!r} is stated, not computed: apply {dict(self.scaling)} yourself")
        return self.theta ** (-2.0 * np.arange(self.dims // 2) / self.dims)


@dataclass(frozen=True)
class AttentionConfig:
    """One attention layer, apart from its weights."""

    width: int  # d
    heads: int  # H
    key_value_heads: int  # that the H heads share in order
    key_dim: int  # N
    scale: float  # factor of the products of queries and keys before the softmax
    causal: bool
    window: int | None  # how many positions a position sees at most, itself included; None: no limit
    rotary: Rotary | None  # None where positions are added to the embedding
    norm: str  # "layer" or "rms"
    norm_eps: float  # added to the variance or mean square
    norm_place: str  # "pre": the layer reads the normalized stream; "post": the norm follows the residual sum
    parallel: bool  # whether attention and MLP of a block read the same stream and are added together (GPT-NeoX)


def attention_config(config: ModelConfig, layer: int, *, any_score: bool = False) -> AttentionConfig:
    """Return the configuration of one attention layer; `any_score` where its weights are not asked for."""
    family, values = config.family, config.values
    if reason := unread(config, any_score=any_score):
        found = f"attention of the family {family.model_type} is not read: {reason}"
        raise ConfigInvalid(
            config.path, found, "read its weights by `Checkpoint.tensor`, and their roles by parameter_roles"
        )
    if not 0 <= layer < values["layers"]:
        raise UsageError(f"layer {layer} of a model with layers 0 to {values['layers'] - 1}")
    scale = values.get("scale_dim", values["key_dim"]) ** -0.5 if values.get("scaled", True) else 1.0
    if values.get("scaled_by_layer"):
        scale /= layer + 1
    return AttentionConfig(
        width=values["width"],
        heads=values["heads"],
        key_value_heads=values["key_value_heads"],
        key_dim=values["key_dim"],
        scale=scale,
        causal=config.causal,
        window=config.window(layer),
        rotary=_rotary(config, layer),
        norm=family.norm,
        norm_eps=float(values["eps"]),
        norm_place="post" if config.post_norm else "pre",
        parallel=config.parallel,
    )


_BEYOND = {
    Role.QUERY_NORM: "norms stand behind queries and keys",
    Role.SINK: "its logits have sinks",
    Role.RELATIVE_POSITION: "its logits have terms of position",
    Role.MIXED_NORM: "a norm stands before the output projection",
    Role.KEY_VALUE_DOWN: "keys and values have a common low-rank factor",
}
"""Role → why a layer with it is not of the form of `AttentionWeights`."""

_OF_SCORES = (CAPPED, SLOPES, NEIGHBOURS, FIXED)
_SCORE_ROLES = (Role.QUERY_NORM, Role.SINK)  # reasons, and roles, that are of the scores alone


def unread(config: ModelConfig, *, any_score: bool = False, norms: bool = True) -> str:
    """Return why attention is not of the form of `AttentionWeights`, or is in more than its scores; empty where it is.

    Norms in front of a layer do not matter to its scores, nor where `norms` is False.
    """
    family = config.family
    roles = [module.role for module in family.body if module.role in _BEYOND and config.holds(module.when)]
    if any_score:
        beyond = "" if family.beyond in _OF_SCORES else family.beyond
        return beyond or next((_BEYOND[role] for role in roles if role not in _SCORE_ROLES), "")
    if family.beyond or config.values.get("alibi"):
        return family.beyond or SLOPES
    if norms and family.gain_offset:
        return "its norms multiply by 1 + w"
    if norms and all(module.role is not Role.ATTENTION_NORM for module in family.body):
        return "no norm with gains stands before it"
    return _BEYOND[roles[0]] if roles else ""


def _rotary(config: ModelConfig, layer: int) -> Rotary | None:
    values, raw, path = config.values, config.raw, config.path
    if not config.is_rotary(layer):
        return None
    # transformers 5 gathers everything in rope_parameters; before, rope_scaling held what departs from the default.
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if isinstance(given, dict) and (types := config.layer_types()):
        given = given.get(types[layer], given)  # windowed layers may turn by other angles than full ones (Gemma 3)
    if not isinstance(given, dict):
        raise ConfigInvalid(path, f"the rotary parameters are {shown(given)}")
    fraction = given.get("partial_rotary_factor", values["rotary_fraction"])
    theta = given.get("rope_theta", values["rotary_theta"])
    for value in (fraction, theta):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ConfigInvalid(path, f"a rotary parameter is {shown(value)}")
    dims = values.get("rotary_dims") or int(values["key_dim"] * fraction)
    if dims % 2 or dims > values["key_dim"]:
        found = f"{dims} rotated components of {values['key_dim']}; an even number not above it"
        raise ConfigInvalid(path, found)
    kind = given.get("rope_type", given.get("type", "default"))
    return Rotary(dims, float(fraction), float(theta), {} if kind == "default" else dict(given))


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """The weights of one attention layer as NumPy arrays.

    `config` holds scale, mask, positions and norms.
    """

    query: Array  # (H, d, N)
    key: Array  # (H_kv, d, N)
    value: Array  # (H_kv, d, N)
    output: Array  # (H, N, d)
    query_bias: Array | None  # (H, N)
    key_bias: Array | None  # (H_kv, N)
    value_bias: Array | None  # (H_kv, N)
    output_bias: Array | None  # (d,)
    config: AttentionConfig

    @property
    def scale(self) -> float:
        """Factor of the products of queries and keys before the softmax."""
        return self.config.scale


def attention_weights(checkpoint: Checkpoint, layer: int, found: ParameterMap | None = None) -> AttentionWeights:
    """Read the attention weights of one layer; the others stay on the disk.

    Parameters
    ----------
    checkpoint
        An open checkpoint.
    layer
        From 0.
    found
        What `parameter_map` returned, so that a loop over layers explains the names only once.

    Returns
    -------
    AttentionWeights
        Arrays in the dtype of the file; they may share memory with each other where the file fuses them.

    Raises
    ------
    UsageError
        No such layer.
    WeightsMismatch
        A weight does not have the shape that the configuration gives it.
    CheckpointRefused
        The family is unknown or does not explain every name.

    Examples
    --------
    >>> import tempfile, safetensors.numpy
    >>> from pathlib import Path
    >>> from manyheads.models import open_checkpoint
    >>> names = {"wte.weight": (5, 4), "wpe.weight": (3, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}
    >>> block = {"ln_1.weight": (4,), "ln_1.bias": (4,), "ln_2.weight": (4,), "ln_2.bias": (4,)}
    >>> block |= {"attn.c_attn.weight": (4, 12), "attn.c_attn.bias": (12,), "attn.c_proj.weight": (4, 4)}
    >>> block |= {"attn.c_proj.bias": (4,), "mlp.c_fc.weight": (4, 16), "mlp.c_fc.bias": (16,)}
    >>> block |= {"mlp.c_proj.weight": (16, 4), "mlp.c_proj.bias": (4,)}
    >>> names |= {f"h.0.{name}": shape for name, shape in block.items()}
    >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> safetensors.numpy.save_file({name: np.zeros(shape, np.float32) for name, shape in names.items()}, file)
    >>> config = {"model_type": "gpt2", "n_embd": 4, "n_head": 2, "n_layer": 1}
    >>> weights = attention_weights(open_checkpoint(file, config=config), layer=0)
    >>> weights.query.shape, weights.output.shape, weights.config.causal
    ((2, 4, 2), (2, 2, 4), True)
    """
    found = parameter_map(checkpoint) if found is None else found
    config = attention_config(found.config, layer)
    d, N, H, H_kv = config.width, config.key_dim, config.heads, config.key_value_heads

    def read(role: Role, size: int) -> Array | None:
        return _read(checkpoint, found, (role, "bias", layer), (size,))

    *weights, output = head_weights(checkpoint, layer, found)
    query, key, value = (weight.swapaxes(1, 2) for weight in weights)  # (heads, N, d) -> (heads, d, N)
    query_bias, key_bias, value_bias = _read_heads(read, (H, H_kv, N), found.config.family.fused)
    output_bias = read(Role.OUTPUT, d)
    return AttentionWeights(query, key, value, output, query_bias, key_bias, value_bias, output_bias, config)


def head_weights(checkpoint: Checkpoint, layer: int, found: ParameterMap) -> list[Array]:
    """Read query (H, N, d), key and value (H_kv, N, d) and output (H, N, d) of a layer, whatever stands between them.

    Raises
    ------
    WeightsMismatch
        A weight is absent, or does not have the shape that the configuration gives it.
    """
    family, values = found.config.family, found.config.values
    d, N, H, H_kv = (values[name] for name in ("width", "key_dim", "heads", "key_value_heads"))

    def read(role: Role, rows: int, columns: int = d) -> Array:
        # As (out, in), whichever way it is stored.
        turned = family.layout == "in,out"
        shape = (columns, rows) if turned else (rows, columns)
        stored = _read(checkpoint, found, (role, "weight", layer), shape)
        if stored is None:
            raise WeightsMismatch(checkpoint.path, f"layer {layer} has no {role} weight")
        return stored.T if turned else stored

    weights = _read_heads(read, (H, H_kv, N), family.fused)
    return [*weights, read(Role.OUTPUT, d, H * N).T.reshape(H, N, d)]  # (d, H N) -> (H N, d)


def _read(
    checkpoint: Checkpoint, found: ParameterMap, which: tuple[Role, str, int], shape: tuple[int, ...]
) -> Array | None:
    """Read a parameter of a role, kind and layer; None if there is none."""
    names = found.names(*which)
    if not names:
        return None
    given = checkpoint.entry(names[0]).shape  # before a byte of it is read
    if given != shape:
        raise WeightsMismatch(checkpoint.path, f"{names[0]} has shape {given}; the configuration gives {shape}")
    return checkpoint.tensor(names[0])


def _read_heads(read: Callable[[Role, int], Any], sizes: tuple[int, int, int], fused: str) -> list[Any]:
    """Read query, key and value, (heads, N, ...) each or None, from matrices or biases of their own or a joint one."""
    H, H_kv, N = sizes
    if not fused:
        stored = [(read(role, n * N), n) for role, n in ((Role.QUERY, H), (Role.KEY, H_kv), (Role.VALUE, H_kv))]
        return [None if each is None else each.reshape(n, N, *each.shape[1:]) for each, n in stored]
    if (joint := read(Role.QUERY_KEY_VALUE, (H + 2 * H_kv) * N)) is None:
        return [None] * 3
    heads = joint.reshape(H + 2 * H_kv, N, *joint.shape[1:])
    if fused == "parts":  # all queries, all keys, all values
        return np.split(heads, [H, H + H_kv])
    if fused == "quarters":  # of the heads, each: its queries, values, keys
        query, value, key = joint.reshape(4, 3, H // 4, N, *joint.shape[1:]).swapaxes(0, 1)
        return [each.reshape(H, N, *joint.shape[1:]) for each in (query, key, value)]
    groups = heads.reshape(H_kv, H // H_kv + 2, *heads.shape[1:])  # group after group: its queries, key, value
    return [groups[:, :-2].reshape(H, *heads.shape[1:]), groups[:, -2], groups[:, -1]]
