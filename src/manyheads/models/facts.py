"""What the weights do not say about an attention layer: its scale, mask, positions and norms."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manyheads.errors import UsageError
from manyheads.models import refusals
from manyheads.models.families import Family


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
class AttentionFacts:
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


def state_facts(family: Family, layer: int) -> AttentionFacts:
    """State the facts of one attention layer, from the configuration and the family's defaults.

    Raises
    ------
    UsageError
        No such layer.
    ConfigInvalid
        The configuration contradicts itself.
    """
    table, figures = family.table, family.figures
    if not 0 <= layer < figures["layers"]:
        raise UsageError(f"layer {layer} of a model with layers 0 to {figures['layers'] - 1}")
    scale = figures["key_dim"] ** -0.5 if figures.get("scaled", True) else 1.0
    if figures.get("scaled_by_layer"):
        scale /= layer + 1
    pre = table.norm_place == "pre" or bool(figures.get(table.norm_place, False))
    return AttentionFacts(
        width=figures["width"],
        heads=figures["heads"],
        key_value_heads=figures["key_value_heads"],
        key_dim=figures["key_dim"],
        scale=scale,
        causal=table.causal if isinstance(table.causal, bool) else figures[table.causal],
        window=_window(family, layer),
        rotary=_rotary(family),
        norm=table.norm,
        norm_eps=float(figures["eps"]),
        norm_place="pre" if pre else "post",
        parallel=figures.get("parallel", False),
    )


def _window(family: Family, layer: int) -> int | None:
    figures = family.figures
    if not figures.get("windowed"):
        return None
    types = family.config.get("layer_types")
    if types is None:
        sliding = layer >= figures["window_from_layer"]
    elif (
        isinstance(types, list)
        and len(types) == figures["layers"]
        and set(types) <= {"full_attention", "sliding_attention"}
    ):
        sliding = types[layer] == "sliding_attention"
    else:
        raise refusals.ConfigInvalid(family.path, f"layer_types is {str(types)[:200]}", types)
    return figures["window"] if sliding else None


def _rotary(family: Family) -> Rotary | None:
    figures = family.figures
    if "rotary_theta" not in figures:
        return None
    # transformers 5 gathers everything in rope_parameters; before, rope_scaling held what departs from the default.
    given = family.config.get("rope_parameters") or family.config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise refusals.ConfigInvalid(family.path, f"the rotary parameters are {str(given)[:200]}", given)
    fraction = given.get("partial_rotary_factor", figures["rotary_fraction"])
    theta = given.get("rope_theta", figures["rotary_theta"])
    for value in (fraction, theta):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise refusals.ConfigInvalid(family.path, f"a rotary parameter is {value!r}", value)
    dims = int(figures["key_dim"] * fraction)
    if dims % 2 or dims > figures["key_dim"]:
        raise refusals.ConfigInvalid(
            family.path, f"{dims} rotated components of {figures['key_dim']}; an even number not above it", dims
        )
    kind = given.get("rope_type", given.get("type", "default"))
    return Rotary(dims, float(fraction), float(theta), {} if kind == "default" else dict(given))
