"""Configurations of models of Hugging Face transformers, read by the table of their family.

Values that a configuration leaves out are the family's defaults in transformers. The text is parsed as JSON and nothing
else; transformers is not needed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.models.families import FAMILIES
from manyheads.models.files import read_json
from manyheads.models.modules import NEVER, Condition, Family, Key
from manyheads.models.refusals import ConfigInvalid, FamilyUnknown

SIZES = ("width", "heads", "layers")


@dataclass(frozen=True)
class ModelConfig:
    """A configuration, read by the table of its family.

    Attributes
    ----------
    family
        The family.
    values
        Canonical name → value (width, heads, layers, key_dim, key_value_heads, eps, ...).
    raw
        The configuration itself.
    path
        Where it comes from, for messages.
    """

    family: Family
    values: Mapping[str, Any]
    raw: Mapping[str, Any]
    path: Path

    @property
    def causal(self) -> bool:
        """Whether a position sees only itself and earlier ones."""
        causal = self.family.causal
        return causal if isinstance(causal, bool) else bool(self.values[causal])

    @property
    def post_norm(self) -> bool:
        """Whether norms follow the residual sums instead of reading the stream."""
        place = self.family.norm_place
        return not self.values.get(place, place == "pre")

    def holds(self, condition: Condition) -> bool:
        """Tell whether a module, or its bias, is there under this configuration."""
        return condition != NEVER and all(
            not self.values[key[1:]] if key.startswith("!") else self.values[key] for key in condition
        )

    def built_with(self, *endings: str) -> bool:
        """Tell whether a class that the configuration names ends so: which head stands on the body."""
        names = self.raw.get("architectures")
        names = [] if names is None else names
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigInvalid(self.path, f"architectures is {shown(names)}, expected a list of class names")
        return any(name.endswith(endings) for name in names)

    def window(self, layer: int) -> int | None:
        """Return how many positions a position of this layer sees at most; None: no limit."""
        types, window = self._layer_types(), self.values.get("window")
        if not self.values.get("windowed") or not window:
            return None
        if types is None:
            return window if layer >= self.values["window_from_layer"] else None
        return window if types[layer] == "sliding_attention" else None

    def windows(self) -> set[int | None]:
        """Return the windows that occur in some layer."""
        types, layers = self._layer_types(), self.values["layers"]
        first = self.values.get("window_from_layer", 0)
        changes = range(layers) if types is not None else {0, min(first, layers), max(layers - 1, 0)}
        return {self.window(layer) for layer in changes if layer < max(layers, 1)}

    def _layer_types(self) -> list[str] | None:
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

    Parameters
    ----------
    raw
        The content of a `config.json`.
    path
        Where it comes from, for messages.
    complete
        Whether width, heads and layers have to be stated, as they are beside weights.
    """
    path, model_type = Path(path), raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise FamilyUnknown(path, f"model_type {shown(model_type)} is none of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    for name in SIZES:
        if complete and raw.get(family.keys[name].name) is None:
            raise ConfigInvalid(path, f"{family.keys[name].name} is missing")
    values = {name: read_value(key, raw, path) for name, key in family.keys.items()}
    width, heads, key_dim = values["width"], values["heads"], values.get("key_dim")
    if key_dim is None and heads and width % heads:
        raise ConfigInvalid(path, f"the width {width} is no multiple of the {heads} heads")
    values["key_dim"] = key_dim = width // heads if key_dim is None and heads else key_dim
    groups = values.get("key_value_heads")
    values["key_value_heads"] = groups = heads if groups is None else groups
    if not (width and heads and key_dim):
        raise ConfigInvalid(path, f"width {width} and {heads} heads of {key_dim}")
    if not groups or heads % groups:
        raise ConfigInvalid(path, f"{heads} heads cannot share {groups} key-value heads")
    return ModelConfig(family, values, raw, path)


def read_value(key: Key, raw: Mapping[str, Any], path: Path) -> Any:
    """Read one value, of the type of its default."""
    value = raw.get(key.name, key.default) if key.name else key.default
    if value is None and key.null is not ...:
        return key.null
    value = key.default if value is None else value
    if value is None:  # it follows from others
        return None
    if isinstance(key.default, bool):
        fits, kind = isinstance(value, bool), "true or false"
    elif isinstance(key.default, str):
        fits, kind = isinstance(value, str), "a name"
    elif isinstance(key.default, float):
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
        kind = "a positive number"
    else:
        fits, kind = isinstance(value, int) and not isinstance(value, bool) and value >= 0, "a whole number"
    if not fits:
        raise ConfigInvalid(path, f"{key.name} is {shown(value)}, expected {kind}")
    return value


def shown(value: Any) -> str:
    """Show a value from outside in at most 80 characters; Python writes no integer of thousands of digits."""
    if isinstance(value, int) and abs(value) > 10**18:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:80]


def load_config(path: Path | str) -> tuple[dict[str, Any], Path]:
    """Read a `config.json`, or that of a folder; links are followed, since only JSON is read.

    Returns
    -------
    dict, Path
        Its content, and the path of the file.
    """
    path = Path(path)
    if os.path.isdir(path):
        path = path / "config.json"
    return read_json(path, follow_links=True), path
