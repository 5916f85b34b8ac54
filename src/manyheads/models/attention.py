"""Configuration of an attention layer: what the weights do not say, its scale, mask, positions and norms."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manyheads.errors import UsageError
from manyheads.models.config import ModelConfig, shown
from manyheads.models.refusals import ConfigInvalid


@dataclass(frozen=True)
class Rotary:
    r"""Rotary positions: query and key components are turned by angles that grow with the position.

    Component `i < dims/2` is paired with component `i + dims/2`; at position `p` the pair turns by

        p * theta^(-2 i / dims)

    Components from `dims` on stay as they are.

    Attributes
    ----------
    dims
        How many of the N components of a head are turned; even.
    fraction
        The share of N that the configuration names; `dims = int(N * fraction)`.
    theta
        The base of the angles.
    scaling
        The configuration's own table when it changes these angles (linear, dynamic, yarn, llama3, ...); empty: none.

    Examples
    --------
    >>> Rotary(dims=4, fraction=1.0, theta=100.0).frequencies().tolist()
    [1.0, 0.1]
    """

    dims: int
    fraction: float
    theta: float
    scaling: Mapping[str, Any] = field(default_factory=dict)

    def frequencies(self) -> np.ndarray:
        """Return the angle of each pair at position 1, shape (dims/2,), float64.

        Raises
        ------
        UsageError
            The configuration rescales the angles in a way that is not implemented here.
        """
        if self.scaling:
            kind = self.scaling.get("rope_type", self.scaling.get("type"))
            raise UsageError(f"rotary scaling {kind!r} is stated, not computed: apply {dict(self.scaling)} yourself")
        return self.theta ** (-2.0 * np.arange(self.dims // 2) / self.dims)


@dataclass(frozen=True)
class AttentionConfig:
    """One attention layer, apart from its weights.

    Attributes
    ----------
    width, heads, key_value_heads, key_dim
        d, H, the number of key-value heads that the H heads share in order, and N.
    scale
        What the products of queries and keys are multiplied with before the softmax.
    causal
        Whether a position sees only itself and earlier ones.
    window
        How many positions it sees at most, itself included; None: no limit.
    rotary
        Rotary positions, or None where positions are added to the embedding.
    norm, norm_eps
        "layer" or "rms", and the number added to the variance or mean square.
    norm_place
        "pre": the layer reads the normalised stream; "post": the norm follows the residual sum.
    parallel
        Whether attention and MLP of a block read the same stream and are added together (GPT-NeoX).
    """

    width: int
    heads: int
    key_value_heads: int
    key_dim: int
    scale: float
    causal: bool
    window: int | None
    rotary: Rotary | None
    norm: str
    norm_eps: float
    norm_place: str
    parallel: bool


def attention_config(config: ModelConfig, layer: int) -> AttentionConfig:
    """Return the configuration of one attention layer.

    Raises
    ------
    UsageError
        No such layer.
    ConfigInvalid
        The configuration contradicts itself.
    """
    family, values = config.family, config.values
    if not 0 <= layer < values["layers"]:
        raise UsageError(f"layer {layer} of a model with layers 0 to {values['layers'] - 1}")
    scale = values["key_dim"] ** -0.5 if values.get("scaled", True) else 1.0
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
        rotary=_rotary(config),
        norm=family.norm,
        norm_eps=float(values["eps"]),
        norm_place="post" if config.post_norm else "pre",
        parallel=values.get("parallel", False),
    )


def _rotary(config: ModelConfig) -> Rotary | None:
    values, raw, path = config.values, config.raw, config.path
    if "rotary_theta" not in values:
        return None
    # transformers 5 gathers everything in rope_parameters; before, rope_scaling held what departs from the default.
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ConfigInvalid(path, f"the rotary parameters are {shown(given)}")
    fraction = given.get("partial_rotary_factor", values["rotary_fraction"])
    theta = given.get("rope_theta", values["rotary_theta"])
    for value in (fraction, theta):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ConfigInvalid(path, f"a rotary parameter is {shown(value)}")
    dims = int(values["key_dim"] * fraction)
    if dims % 2 or dims > values["key_dim"]:
        found = f"{dims} rotated components of {values['key_dim']}; an even number not above it"
        raise ConfigInvalid(path, found)
    kind = given.get("rope_type", given.get("type", "default"))
    return Rotary(dims, float(fraction), float(theta), {} if kind == "default" else dict(given))
