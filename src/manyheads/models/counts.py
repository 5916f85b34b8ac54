"""Parameters of a model from its configuration alone, by the table of its family.

Every module of a family has sides in names of sizes, so that a configuration gives every parameter of the model: with E
experts of which a token visits k, the matrices of experts count k/E among the *active* ones. A forward pass multiplies
and adds once for each active weight of a matrix and token, tables that are looked up left out.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from manyheads.costs.shapes import heads_per_device
from manyheads.errors import UsageError, check_integer
from manyheads.models.config import ModelConfig
from manyheads.models.families.heads import describe_head, has_language_head, head_layers
from manyheads.models.modules import MAYBE, Module, Role

Source = ModelConfig | Mapping[str, Any] | Path | str
"""A configuration: read, its content, a `config.json`, or the folder that holds one."""

_HEAD_ROLES = (Role.UNEMBEDDING, Role.HEAD_TRANSFORM, Role.HEAD_NORM)
TABLES = (Role.EMBEDDING, Role.POSITION, Role.SEGMENT, Role.RELATIVE_POSITION)
"""Roles that are looked up or added: they take part in no matrix product."""
EXPERT_ROLES = (Role.EXPERT_IN, Role.EXPERT_OUT)
PRODUCTS = frozenset({*(role for role in Role if role.sort == "linear"), *EXPERT_ROLES})
"""Roles whose weights are multiplied with a token, as the forward passes of transformers show."""

_ROTARY = ("rotary_theta", "rotary_fraction", "rotary_dims", "rotary_period")
UNCOUNTED = ("eps", *_ROTARY, "scaled", "scaled_by_layer", "scale_dim", "scale_embedding")
"""Values of a configuration on which no count depends."""


class Size(NamedTuple):
    """Number of weights and biases of one module in one layer, and the sides of its weight.

    `once` is true for a module that acts on one position of each sequence.
    """

    role: Role
    sides: tuple[int, ...]
    bias: int
    once: bool = False

    @property
    def weight(self) -> int:
        """Number of its weights."""
        return prod(self.sides)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model."""

    total: int  # all, tied ones once
    active: int  # those that a token meets: of experts, the ones that it visits; tables in full
    embedding: int  # tables that are looked up or added, in no matrix product unless tied to the unembedding
    matrix: int  # active weights that are multiplied with a token
    predicted: int = 0  # of the blocks that predict further tokens (multi-token prediction), not in the total
    notes: tuple[str, ...] = ()  # what was assumed, and what is left out


def describe_assumed(config: ModelConfig, only: Collection[str] = ()) -> tuple[str, ...]:
    """Return the note on the values (`only` these, by canonical name) that a configuration leaves to its family."""
    family = config.family
    sizes = {**config.sizes, **config.values, "mlp_hidden": config.sizes["hidden"]}
    missing = {
        key.name.partition("|")[0]: sizes.get(name, key.default)
        for name, key in {**family.keys, **family.counted}.items()
        if (name in only if only else name not in UNCOUNTED) and key.name and config.leaves_out(key)
    }
    if not only and not {"id2label", "num_labels"} & config.raw.keys():
        labelled = any("labels" in layer.sides for layer in head_layers(config) or ())
        missing |= {"num_labels": sizes["labels"]} if labelled else {}
    listed = ", ".join(f"{name}={json.dumps(value)}" for name, value in missing.items())
    part = (f"the text part of {config.whole} alone",) if config.whole else ()
    return (*part, f"not in the configuration, taken from {family.model_type}: {listed}") if missing else part


def module_sizes(config: ModelConfig, sizes: Mapping[str, int] | None = None) -> Iterator[Size]:
    """Go through all parameters of a model, layer by layer; of tied ones through one; `sizes` instead of its own.

    Heads are those of the class that the configuration names; without a name a causal family has its language head,
    and others are counted without a head.
    """
    sizes, family = config.sizes if sizes is None else sizes, config.family
    tied = config.values.get("tied", False)
    for module in family.body:
        for layer in range(config.values["layers"]) if "{layer}" in module.path else [None]:
            if config.has(module.only, layer) and _is_present(config, module, sizes):
                yield _size(config, module, sizes)
    for module in family.heads if has_language_head(config) else ():
        if module.role in _HEAD_ROLES:
            own = _size(config, module, sizes)
            # A bias that may be tied is the head's own where it is not.
            bias = (0 if tied else own.sides[0]) if f"{module.path}.bias" in family.ties else own.bias
            yield Size(own.role, (0,) if tied and f"{module.path}.weight" in family.ties else own.sides, bias)
    for above in head_layers(config) or ():
        sides = tuple(_evaluate(side, sizes) for side in above.sides.split(","))
        yield Size(above.role, sides, sides[0] if config.holds(above.bias) else 0, above.once)


def layer_sizes(config: ModelConfig, layer: int) -> Iterator[tuple[Module, Size]]:
    """Go through the modules of one layer."""
    sizes = config.sizes
    for module in config.family.body:
        if "{layer}" in module.path and config.has(module.only, layer) and _is_present(config, module, sizes):
            yield module, _size(config, module, sizes)


def _is_present(config: ModelConfig, module: Module, sizes: Mapping[str, int]) -> bool:
    """Whether a module of the body is there; where a table leaves it open, by what usually is."""
    if module.role in (Role.EMBEDDING_PROJECTION, Role.UNEMBEDDING_PROJECTION):
        return sizes["embedding_width"] != sizes["width"]
    return module.role not in (Role.BUFFER, Role.POOLER) and module.when != MAYBE and config.holds(module.when)


def _size(config: ModelConfig, module: Module, sizes: Mapping[str, int]) -> Size:
    text = "vocabulary" if module.is_bias and module.role is Role.UNEMBEDDING else module.sides
    sides = tuple(_evaluate(side, sizes) for side in text.split(","))
    if module.is_bias:
        return Size(module.role, (0,), prod(sides))
    biased = module.sort in ("linear", "norm") and module.bias != MAYBE and config.holds(module.bias)
    return Size(module.role, sides, sides[0] if biased else 0)


def _evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """Return the number of a sum of products of names of sizes."""
    return sum(
        prod(int(name) if name.isdigit() else sizes[name] for name in term.split("*")) for term in text.split("+")
    )


def count_parameters(source: Source) -> ParameterCount:
    """Count the parameters of a model of a known family from its configuration.

    Examples
    --------
    >>> found = count_parameters({"model_type": "mixtral"})
    >>> f"{found.total / 1e9:.1f} {found.active / 1e9:.1f}"
    '46.7 12.9'
    """
    config = ModelConfig.of(source)
    sizes = config.sizes
    total = active = embedding = 0
    for each in module_sizes(config):
        whole = each.weight + each.bias
        total += whole
        active += _active_weights(each, whole, sizes)
        embedding += whole if each.role in TABLES else 0
    matrix = sum(count for _, count in _matrices(config, sizes))
    notes = (*describe_assumed(config), *describe_head(config))
    return ParameterCount(total, active, embedding, matrix, _count_predicted(config, sizes), notes)


def parameters_per_device(source: Source, tensor: int = 1, expert: int = 1) -> int:
    """Count the parameters that a device holds under tensor and expert parallelism.

    `tensor` devices share the heads, the hidden width of MLP and experts and the vocabulary (Shoeybi et al. 2019);
    fewer key-value heads than devices are held by several. `expert` devices share the experts. Routers, latent factors
    of all heads, norms (but for those over all heads) and what stands above the body beside the unembedding are held by
    each.

    Raises
    ------
    UsageError
        A number of devices that does not divide heads, hidden widths or experts.

    Examples
    --------
    >>> parameters_per_device({"model_type": "mixtral"}, tensor=2, expert=4) / 1e9
    6.440620032
    """
    config = ModelConfig.of(source)
    sizes, layers = config.sizes, range(config.values["layers"])
    held = [module for module in config.family.body if any(config.has(module.only, layer) for layer in layers)]
    used = {word for module in held for word in re.findall(r"\w+", module.sides)} | {"heads"}
    local = {"queries": sizes["queries"] // check_integer("devices", tensor)}
    shared = dict.fromkeys(("heads", "hidden", "shared_hidden", "expert_hidden"), tensor)
    for name, devices in (shared | {"experts": check_integer("devices", expert)}).items():
        if name in used and sizes[name] % devices:
            raise UsageError(f"{devices} devices do not divide {name}={sizes[name]}; give a divisor")
        local[name] = sizes.get(name, 0) // devices
    if expert > 1 and "experts" not in used:
        raise UsageError(f"{expert} devices for experts, and no layer of this {config.family.model_type} has any")
    local["keys"] = heads_per_device(config.values["key_value_heads"], tensor) * config.values["key_dim"]
    local["vocabulary"] = -(-sizes.get("vocabulary", 0) // tensor)
    whole = [each for each in module_sizes(config) if each.role is Role.ROUTER]
    parts = [each for each in module_sizes(config, {**sizes, **local}) if each.role is not Role.ROUTER]
    return sum(each.weight + each.bias for each in (*whole, *parts))


def _active_weights(size: Size, weights: int, sizes: Mapping[str, int]) -> int:
    """Return how many of the weights of a module a token meets."""
    return weights * sizes["active_experts"] // sizes["experts"] if size.role in EXPERT_ROLES else weights


def _matrices(config: ModelConfig, sizes: Mapping[str, int]) -> Iterator[tuple[Size, int]]:
    """Go through the modules that are multiplied with a token, with the active weights of each."""
    for each in module_sizes(config):
        if each.role in PRODUCTS:
            yield each, _active_weights(each, each.weight, sizes)
    if config.values.get("tied") and has_language_head(config):
        table = Size(Role.UNEMBEDDING, (sizes["vocabulary"], sizes["embedding_width"]), 0)
        yield table, table.weight


def _count_predicted(config: ModelConfig, sizes: Mapping[str, int]) -> int:
    """Count the blocks of multi-token prediction: a last layer each, a joint projection of 2 D to D and three norms."""
    if not (blocks := sizes.get("predicted", 0)):
        return 0
    width = sizes["width"]
    layer = sum(size.weight + size.bias for _, size in layer_sizes(config, config.values["layers"] - 1))
    return blocks * (layer + 2 * width * width + 3 * width)
