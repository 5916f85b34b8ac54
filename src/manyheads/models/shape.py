"""Shape of a model from its `config.json`: the integers that costs depend on."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from manyheads.costs import ModelShape
from manyheads.errors import UsageError
from manyheads.models.config import ModelConfig, load_config, read_config, read_value, shown
from manyheads.models.modules import Role
from manyheads.models.refusals import ConfigInvalid

# The names that families give to the same elementwise functions.
ACTIVATIONS = {
    "relu": "relu",
    "tanh": "tanh",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
}
ITEMSIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def shape_from_config(source: Mapping[str, Any] | Path | str) -> ModelShape:
    """Turn a configuration into the shape that costs depend on.

    Parameters
    ----------
    source
        A `config.json`, the folder that holds one, or its content: of a Hugging Face model (it has a `model_type`:
        gpt2, gpt_neox, opt, llama, mistral, qwen2, bert or vit), or the fields of `ModelShape`.

    Raises
    ------
    FileMissing, FileUnreadable, FileDamaged
        The file is absent, no regular file, or no strict JSON.
    FamilyUnknown
        The `model_type` is none of the known families.
    ConfigInvalid
        A value is absent, unknown or of the wrong kind, or layers differ in cost.

    Examples
    --------
    >>> shape_from_config({"model_type": "gpt2"}).vocabulary
    50257
    >>> shape_from_config({"layers": 2, "width": 64, "heads": 4}).mlp_hidden
    256
    """
    return shape_of(*load_config(source)) if isinstance(source, (str, Path)) else shape_of(source, Path("config"))


def shape_of(raw: Mapping[str, Any], path: Path) -> ModelShape:
    """Return the shape of a configuration that has been read from a file."""
    if not isinstance(raw, Mapping):
        raise ConfigInvalid(path, f"expected a JSON object, found {type(raw).__name__}")
    values = _family_fields(read_config(raw, path)) if "model_type" in raw else _own_fields(raw, path)
    try:
        return ModelShape(**values)
    except (UsageError, TypeError) as error:
        raise ConfigInvalid(path, str(error), "give sizes that a model can have") from error


def _family_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `ModelShape` that a family and its configuration give."""
    family, values, raw, path = config.family, config.values, config.raw, config.path
    counted = {name: read_value(key, raw, path) for name, key in family.counted.items()}
    modules = {module.role: module for module in (*family.body, *family.heads)}
    query = modules.get(Role.QUERY, modules.get(Role.QUERY_KEY_VALUE))
    biased = {"qkv": query, "output": modules[Role.OUTPUT], "mlp": modules[Role.MLP_IN]}
    biases = [name for name, module in biased.items() if module and config.holds(module.bias)]
    windows = config.windows()
    if len(windows) > 1:
        raise ConfigInvalid(
            path,
            "use_sliding_window gives layers of different cost, which one shape cannot describe",
            "count the layers with and without a window apart, by the fields of ModelShape",
        )
    shape = {
        "layers": values["layers"],
        "width": values["width"],
        "heads": values["heads"],
        "kv_heads": values["key_value_heads"],
        "head_dim": values["key_dim"],
        "mlp_hidden": counted["mlp_hidden"],
        "gated": Role.MLP_GATE in modules,
        "tied": values.get("tied", False),
        "causal": config.causal,
        "window": windows.pop() or 0,
        "embedding_width": counted.get("embedding_width"),
        "activation": _choose("activation", counted["activation"], ACTIVATIONS, path),
        "norm": {"layer": "layernorm", "rms": "rmsnorm"}[family.norm],
        "biases": {0: "none", 3: "all"}.get(len(biases), "+".join(biases)),
        "positions": "rotary" if "rotary_theta" in values else "learned",
        "itemsize": _choose("dtype", raw.get("dtype") or raw.get("torch_dtype") or "float32", ITEMSIZES, path),
    }
    return shape | (_patches(config, counted) if "patch" in counted else _text(config, counted, modules))


def _text(config: ModelConfig, counted: Mapping[str, Any], modules: Mapping[Role, Any]) -> dict[str, Any]:
    """Return what a model of tokens has at its ends."""
    body_only = config.family.causal is not True and not config.built_with(*config.family.language_heads)
    notes = []
    if config.values.get("rotary_fraction", 1.0) < 1:
        notes.append("rotary positions are counted on every dimension of a head")
    if body_only:
        notes.append("body only: pooler and task heads are not counted")
    elif Role.HEAD_TRANSFORM in modules:
        notes.append("masked-language head on every position")
    return {
        "vocabulary": counted["vocabulary"],
        "unembedding": not body_only,
        "head_transform": Role.HEAD_TRANSFORM in modules and not body_only,
        "notes": tuple(notes),
    }


def _patches(config: ModelConfig, counted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model of images has at its ends."""
    patch, image, labels = counted["patch"], counted["image"], config.raw.get("id2label")
    if not patch or image % patch:
        raise ConfigInvalid(config.path, f"image_size {image} is no multiple of patch_size {patch}")
    classes = len(labels) if isinstance(labels, dict) else counted["labels"]
    return {
        "patch_features": patch * patch * counted["channels"],
        "special_tokens": 1,
        "classes": classes if config.built_with("ForImageClassification") else 0,
        "fixed_length": (image // patch) ** 2 + 1,
    }


def _choose(name: str, value: Any, known: Mapping[str, Any], path: Path) -> Any:
    if not isinstance(value, str) or value not in known:
        raise ConfigInvalid(path, f"{name} is {shown(value)}, known are {', '.join(known)}", "give one of these")
    return known[value]


def _own_fields(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Check the fields of `ModelShape`, apart from their values."""
    remedy = "give the fields of manyheads.costs.ModelShape, or the config.json of a Hugging Face model"
    if unknown := sorted(map(str, raw.keys() - {field.name for field in fields(ModelShape)})):
        raise ConfigInvalid(path, f"no model_type, and {', '.join(unknown)[:200]} is no field of ModelShape", remedy)
    if missing := [name for name in ("layers", "width", "heads") if name not in raw]:
        raise ConfigInvalid(path, f"no model_type, and {', '.join(missing)} is missing", remedy)
    notes = raw.get("notes", [])
    if not isinstance(notes, list | tuple) or not all(isinstance(note, str) for note in notes):
        raise ConfigInvalid(path, f"notes is {shown(notes)}, expected a list of sentences", remedy)
    try:
        "".join(notes).encode()
    except UnicodeEncodeError as error:  # half of a character, legal as an escape in JSON, and no text
        raise ConfigInvalid(path, f"notes is {notes!r:.80}, which has no UTF-8 form", remedy) from error
    return {**raw, "notes": tuple(notes)}
