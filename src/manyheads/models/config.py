"""Configurations of models of Hugging Face transformers, read by the table of their family.

Values that a configuration leaves out are the family's defaults in transformers. The text is parsed as JSON and nothing
else; transformers is not needed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from manyheads.models.checkpoints.files import read_json
from manyheads.models.families import FAMILIES, UNSUPPORTED
from manyheads.models.modules import ALWAYS, MAYBE, NEVER, Condition, Family, Key, Role
from manyheads.models.refusals import ConfigInvalid, FamilyUnknown, shorten

SIZES = ("width", "heads", "layers")


@dataclass(frozen=True)
class ModelConfig:
    """A configuration, read by the table of its family."""

    family: Family
    values: Mapping[str, Any]  # by canonical name: width, heads, layers, key_dim, key_value_heads, eps, ...
    raw: Mapping[str, Any]
    path: Path  # where it comes from, for messages
    whole: str = ""  # the `model_type` of a model of images and text whose text part this is

    @classmethod
    def of(cls, source: "ModelConfig | Mapping[str, Any] | Path | str") -> "ModelConfig":
        """Return a configuration as it is, or read its content, a `config.json` or the folder that holds one."""
        if isinstance(source, cls):
            return source
        return read_config(*load_config(source)) if isinstance(source, (str, Path)) else read_config(source, "config")  # type: ignore[arg-type]

    def _fact(self, stated: bool | str) -> bool:
        """Return a property of the family, or what the key says that it names."""
        return stated if isinstance(stated, bool) else bool(self.values[stated])

    @property
    def causal(self) -> bool:
        """Whether a position sees only itself and earlier ones."""
        return self._fact(self.family.causal)

    @property
    def post_norm(self) -> bool:
        """Whether norms follow the residual sums instead of reading the stream."""
        place = self.family.norm_place
        return not self.values.get(place, place == "pre")

    @property
    def parallel(self) -> bool:
        """Whether attention and MLP of a block read the same stream and are added together."""
        return self._fact(self.family.parallel)

    @property
    def root_width(self) -> bool:
        """Whether embeddings are multiplied by the root of the width."""
        return self._fact(self.family.root_width)

    @cached_property
    def counted(self) -> dict[str, Any]:
        """Canonical name → value of what only counts of operations need."""
        return {name: read_value(key, self.raw, self.path) for name, key in self.family.counted.items()}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes that sides of modules are written in, by name."""
        values, counted = self.values, self.counted
        width, key_dim, hidden = values["width"], values["key_dim"], counted.get("mlp_hidden")
        found = {name: value for name, value in {**values, **counted}.items() if isinstance(value, int)}
        found |= {"queries": values["heads"] * key_dim, "keys": values["key_value_heads"] * key_dim}
        found["hidden"] = counted.get("mlp_ratio", 4) * width if hidden is None else hidden
        found["embedding_width"] = counted.get("embedding_width") or width
        found["value_dim"] = values.get("value_dim", key_dim)
        found["positions"] = counted.get("positions", 0) + self.family.position_offset
        labels, count = self.raw.get("id2label"), read_value(Key("num_labels", 2), self.raw, self.path)
        found["labels"] = len(labels) if isinstance(labels, dict) else count
        if "patch" in counted:
            image, patch = counted["image"], counted["patch"]
            if not 0 < patch <= image:
                raise ConfigInvalid(self.path, f"patch_size is {patch}, expected 1 to the image_size, {image}")
            found["patch_features"] = patch**2 * counted["channels"]
            found["patches"] = (image // patch) ** 2
            found["positions"] = found["patches"] + counted.get("markers", 1)
            # Masked autoencoders show the rest to their blocks.
            found["hidden_patches"] = found["patches"] - int(found["patches"] * (1 - counted.get("mask_ratio", 0)))
        if "experts" in found and not 1 <= found["active_experts"] <= found["experts"]:
            what = f"a token visits {found['active_experts']} experts, expected 1 to their number, {found['experts']}"
            raise ConfigInvalid(self.path, what)
        if "shared_experts" in counted:
            found["shared_hidden"] = counted["expert_hidden"] * (counted["shared_experts"] or 0)
        return found

    def leaves_out(self, key: Key) -> bool:
        """Tell whether the default stands in: no name is there, or its value is null where null means the default."""
        stated = [self.raw[name] for name in key.name.split("|") if name in self.raw]
        return not stated or (stated[0] is None and key.null is ... and key.default is not None)

    def holds(self, condition: Condition) -> bool:
        """Tell whether a module, or its bias, is there under this configuration."""
        return condition == ALWAYS or (
            condition != NEVER
            and all(not self.values[key[1:]] if key.startswith("!") else self.values[key] for key in condition.split())
        )

    def may_hold(self, condition: Condition) -> bool:
        """Tell whether a module, or its bias, is there or may be."""
        return condition == MAYBE or self.holds(condition)

    def has_biases(self, *roles: Role) -> bool:
        """Tell whether some module of the body with one of these roles has a bias, or may have one."""
        return any(self.may_hold(module.bias) for module in self.family.body if module.role in roles)

    def built_with(self, *endings: str) -> bool:
        """Tell whether a class that the configuration names ends so: which head stands on the body."""
        names = self.raw.get("architectures")
        names = [] if names is None else names
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigInvalid(self.path, f"architectures is {shown(names)}, expected a list of class names")
        return any(name.endswith(endings) for name in names)

    def window(self, layer: int) -> int | None:
        """Return how many positions a position of this layer sees at most; None: no limit."""
        types, window = self.layer_types(), self.values.get("window")
        if not self.values.get("windowed") or not window:
            return None
        if types is not None:
            slides = types[layer] == "sliding_attention"
        elif self.values.get("rotary_period"):  # the layers without positions
            slides = not self.is_rotary(layer)
        elif period := self.values.get("window_period"):
            # The last layer of a period sees all positions; the first one, where the period is negative.
            slides = layer % abs(period) != (0 if period < 0 else period - 1)
            slides = slides and layer < self.values.get("window_until_layer", layer + 1)
        else:
            slides = layer >= self.values.get("window_from_layer", 0)
        return window if slides else None

    def is_rotary(self, layer: int) -> bool:
        """Tell whether a layer turns queries and keys by their positions."""
        if not (period := self.values.get("rotary_period")):
            return "rotary_theta" in self.values
        turned, layers = self.raw.get("no_rope_layers"), self.values["layers"]  # 1 where they are turned
        if turned is None:  # the last layer of a period has no positions
            return (layer + 1) % period != 0
        if not isinstance(turned, list) or len(turned) != layers or any(each not in (0, 1) for each in turned):
            raise ConfigInvalid(self.path, f"no_rope_layers is {shown(turned)}, expected {layers} numbers 0 or 1")
        return bool(turned[layer])

    def windows(self) -> set[int | None]:
        """Return the windows that occur in some layer."""
        types, layers = self.layer_types(), self.values["layers"]
        first = self.values.get("window_from_layer", 0)
        periodic = types is not None or self.values.get("window_period") or self.values.get("rotary_period")
        changes = range(layers) if periodic else {0, min(first, layers), max(layers - 1, 0)}
        return {self.window(layer) for layer in changes if layer < max(layers, 1)}

    def has(self, only: str, layer: int | None) -> bool:
        """Tell whether a layer is of those that have a module: "dense" or "sparse", "later", or all."""
        if not only or layer is None:
            return True
        return layer > 0 if only == "later" else (only == "sparse") == self.is_sparse(layer)

    def is_sparse(self, layer: int) -> bool:
        """Tell whether a layer has experts, if the family has."""
        values, kinds = self.values, self.raw.get("mlp_layer_types")
        if isinstance(kinds, list) and len(kinds) == values["layers"]:
            return kinds[layer] == "sparse"
        if layer < values.get("dense_layers", 0) or layer in values.get("dense_list", ()):
            return False
        return (layer + 1) % (values.get("sparse_step", 1) or 1) == 0

    def layer_types(self) -> list[str] | None:
        """Return "full_attention" or "sliding_attention" of every layer; None where the configuration has no list."""
        types = self.raw.get("layer_types") if self.values.get("windowed") else None
        if types is None or (
            isinstance(types, list)
            and len(types) == self.values["layers"]
            and all(kind in ("full_attention", "sliding_attention") for kind in types)
        ):
            return types
        raise ConfigInvalid(self.path, f"layer_types is {shown(types)}")


def read_config(raw: Mapping[str, Any], path: Path | str = "config.json", *, complete: bool = False) -> ModelConfig:
    """Read a configuration by the table of its family, with the family's defaults, and refuse what cannot be.

    `path` is where it comes from, for messages. If it is to be `complete`, width, heads and layers have to be stated,
    as they are beside weights.
    """
    raw, whole = text_part(raw)
    path, model_type = Path(path), raw.get("model_type")
    if isinstance(model_type, str) and model_type in UNSUPPORTED:
        raise FamilyUnknown(path, f"model_type {model_type!r} is not described: {UNSUPPORTED[model_type]}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise FamilyUnknown(
            path, f"model_type {shown(model_type)} is none of {shorten(FAMILIES)} and {len(FAMILIES) - 5} more"
        )
    family = FAMILIES[model_type]
    for name in SIZES:
        key = family.keys[name]
        if complete and not any(raw.get(given) is not None for given in key.name.split("|")):
            raise ConfigInvalid(path, f"{key.name.replace('|', ' or ')} is missing")
    for name, (value, why) in family.refused.items():
        given = raw.get(name, None)
        if given is not None and (value is ... or given == value):
            raise ConfigInvalid(path, f"{name} is {shown(given)}: {why}", "give a model without it")
    values = {name: read_value(key, raw, path) for name, key in family.keys.items()}
    width, heads, key_dim = values["width"], values["heads"], values.get("key_dim")
    if "plain_key_dim" in values:  # latent attention: positions have dimensions of their own
        key_dim = values["plain_key_dim"] + values["rotary_key_dim"]
    if key_dim is None and heads and width % heads:
        raise ConfigInvalid(path, f"the width {width} is no multiple of the {heads} heads")
    values["key_dim"] = key_dim = width // heads if key_dim is None and heads else key_dim
    groups = values.get("key_value_heads")
    if "multi_query" in values and not values.get("grouped"):
        groups = 1 if values["multi_query"] else heads
    values["key_value_heads"] = groups = heads if groups is None else groups
    if not (width and heads and key_dim):
        raise ConfigInvalid(path, f"width {width} and {heads} heads of {key_dim}")
    if not groups or heads % groups:
        raise ConfigInvalid(path, f"{heads} heads cannot share {groups} key-value heads")
    return ModelConfig(family, values, raw, path, whole)


def text_part(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the text part of a configuration of images and text, and its `model_type`; of others all, and nothing."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping) or "model_type" not in text or raw.get("model_type") in (*FAMILIES,):
        return raw, ""
    tied = {"tie_word_embeddings": raw["tie_word_embeddings"]} if "tie_word_embeddings" in raw else {}
    return {**text, **tied}, shown(raw.get("model_type"))


def read_value(key: Key, raw: Mapping[str, Any], path: Path) -> Any:
    """Read one value, of the type of its default."""
    value = next((raw[name] for name in key.name.split("|") if name in raw), key.default)
    if not key.name:  # a constant of the family
        return value
    if value is None and key.null is not ...:
        return key.null
    value = key.default if value is None else value
    if value is None:  # it follows from others
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    match key.default:
        case bool():
            fits, kind = isinstance(value, bool), "true or false"
        case str():
            fits, kind = isinstance(value, str), "a name"
        case list():
            fits = isinstance(value, list) and all(isinstance(each, int) for each in value)
            kind = "a list of layers"
        case float() if key.name == "mask_ratio":
            fits, kind = number and 0 <= value <= 1, "a number from 0 to 1"
        case float():
            fits, kind = number and 0 < value < float("inf"), "a positive number"
        case _:
            fits, kind = number and isinstance(value, int) and value >= 0, "a whole number"
    if not fits:
        raise ConfigInvalid(path, f"{key.name} is {shown(value)}, expected {kind}")
    return value


def shown(value: Any) -> str:
    """Show a value from outside in at most 80 characters; Python writes no integer of thousands of digits."""
    if isinstance(value, int) and abs(value) > 10**18:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:80]


def load_config(path: Path | str) -> tuple[dict[str, Any], Path]:
    """Read a `config.json`, or that of a folder; return its content and its path. Links are followed."""
    path = Path(path, "config.json") if os.path.isdir(path) else Path(path)
    return read_json(path, follow_links=True), path
