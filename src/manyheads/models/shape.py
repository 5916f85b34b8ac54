"""Shape of a model from its `config.json`: the integers that costs depend on."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from manyheads.costs import ModelShape
from manyheads.errors import UsageError
from manyheads.models.config import ModelConfig, load_config, read_config, shown
from manyheads.models.counts import describe_assumed, module_sizes
from manyheads.models.families.heads import describe_head, has_language_head, head_layers
from manyheads.models.modules import Role
from manyheads.models.refusals import ConfigInvalid

# The names that families give to the same elementwise functions.
ACTIVATIONS = {
    **{name: name for name in ("relu", "tanh", "silu", "gelu")},
    "swish": "silu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu-tanh"),
}
OTHER_ACTIVATIONS = {"relu2": "relu", "xielu": "silu", "quick_gelu": "silu"}
"""Activations without a row of their own: counted as one like them, and noted."""
FLOAT32_TAKEN = "no dtype is given: float32 is taken"
ITEMSIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def shape_from_config(source: Mapping[str, Any] | Path | str) -> ModelShape:
    """Turn a configuration into the shape that costs depend on.

    Parameters
    ----------
    source
        A `config.json`, the folder that holds one, or its content. What it leaves out is taken from the family and
        stated in the notes of the shape.

    Raises
    ------
    FileMissing, FileUnreadable, FileDamaged
        The file is absent, no regular file, or no strict JSON.
    FamilyUnknown
        The `model_type` is none of the known families.
    ConfigInvalid
        A value is absent, unknown or of the wrong kind; or layers differ in cost, have experts or latent attention:
        those are counted by `manyheads.models.counts`.

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
    family, values, counted, path = config.family, config.values, config.counted, config.path
    modules = {module.role: module for module in (*family.body, *family.heads)}
    language = has_language_head(config)
    if beyond := [role for role in (Role.EXPERT_IN, Role.KEY_VALUE_DOWN) if role in modules]:
        what = "experts" if beyond[0] is Role.EXPERT_IN else "latent attention"
        raise ConfigInvalid(
            path,
            f"the family {family.model_type} has {what}, which a ModelShape does not hold",
            "count its parameters and matrix FLOPs: manyheads.models.counts, `manyheads count config.json`",
        )
    sizes = config.sizes
    if sizes.get("hidden_patches"):
        raise ConfigInvalid(
            path,
            f"mask_ratio is {shown(counted['mask_ratio'])}: a ModelShape cannot leave patches out of the blocks",
            "count it by `manyheads count config.json`, or set mask_ratio to 0",
        )
    narrow = counted.get("embedding_width") not in (None, values["width"])
    if narrow and Role.UNEMBEDDING_PROJECTION in modules and not language:
        raise ConfigInvalid(
            path,
            "a projection to the narrower embedding without an unembedding, which a ModelShape does not hold",
            "count it by `manyheads count config.json`",
        )
    query = modules.get(Role.QUERY, modules.get(Role.QUERY_KEY_VALUE))
    joint = modules.get(Role.MLP_GATE_IN)
    biased = {"qkv": query, "output": modules[Role.OUTPUT], "mlp": joint or modules[Role.MLP_IN]}
    biases = [name for name, module in biased.items() if module and config.holds(module.bias)]
    windows = config.windows()
    if len(windows) > 1:
        raise ConfigInvalid(
            path,
            "windows in some layers give layers of different cost, which one shape cannot describe",
            "count its parameters and matrix FLOPs by `manyheads count config.json`, or the layers of each kind "
            "apart, by the fields of ModelShape",
        )
    dtype = config_dtype(config.raw, path)
    rotary = "rotary_theta" in values and not values.get("alibi")
    shape = {
        "layers": values["layers"],
        "width": values["width"],
        "heads": values["heads"],
        "kv_heads": values["key_value_heads"],
        "head_dim": values["key_dim"],
        "mlp_hidden": sizes["hidden"],
        "gated": joint is not None or Role.MLP_GATE in modules,
        "tied": values.get("tied", False),
        "causal": config.causal,
        "window": windows.pop() or 0,
        "embedding_width": counted.get("embedding_width"),
        "activation": _choose("activation", counted["activation"], ACTIVATIONS | OTHER_ACTIVATIONS, path),
        "norm": {"layer": "layernorm", "rms": "rmsnorm"}[family.norm],
        "biases": {0: "none", 3: "all"}.get(len(biases), "+".join(biases)),
        "positions": "rotary" if rotary else "learned" if Role.POSITION in modules else "none",
        "itemsize": ITEMSIZES[dtype or "float32"],
    }
    if "patch" in counted:
        if counted["image"] % counted["patch"]:
            found = f"image_size {counted['image']} is no multiple of patch_size {counted['patch']}"
            raise ConfigInvalid(path, found)
        shape |= {"patch_features": sizes["patch_features"], "fixed_length": sizes["positions"]}
        shape["special_tokens"] = sizes["positions"] - sizes["patches"]
    else:  # to a narrower embedding the transform of a head is the projection
        shape |= {"vocabulary": counted["vocabulary"], "unembedding": language}
        shape["head_transform"] = Role.HEAD_TRANSFORM in modules and language and not narrow
    # What stands above the body beside an unembedding, by the layers of the head.
    dense = [each.once for each in head_layers(config) or () if each.role in (Role.POOLER, Role.HEAD_TRANSFORM)]
    classifiers = [size for size in module_sizes(config) if size.role is Role.CLASSIFIER and size.sides[0]]
    shape |= {
        "classes": sum(size.sides[0] for size in classifiers if size.once),
        "class_width": next((size.sides[1] for size in classifiers), None),
        "token_classes": sum(size.sides[0] for size in classifiers if not size.once),
        "pooled": True in dense,
    }
    if False in dense:
        shape["head_transform"] = True
    assumed = (*describe_assumed(config), *(() if dtype else (FLOAT32_TAKEN,)), *describe_head(config))
    return shape | {"notes": (*assumed, *_describe_differences(config, modules))}


def config_dtype(raw: Mapping[str, Any], path: Path | str = "config.json") -> str | None:
    """Return the dtype that a configuration names, None if it names none."""
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    _choose("dtype", dtype or "float32", ITEMSIZES, Path(path))
    return dtype


def _describe_differences(config: ModelConfig, modules: Mapping[Role, Any]) -> list[str]:
    """Return notes on elementwise work that is counted as a plain block's."""
    notes = []
    if (activation := config.counted["activation"]) in OTHER_ACTIVATIONS:
        notes.append(f"the activation {activation} is counted as {OTHER_ACTIVATIONS[activation]}")
    more = (Role.QUERY_NORM, Role.ATTENTION_POST_NORM, Role.MIXED_NORM, Role.ATTENTION_SCALE, Role.EMBEDDING_NORM)
    if any(role in modules and config.holds(modules[role].when) for role in more) and not config.post_norm:
        notes.append("elementwise work of norms beside the two of a block is left out")
    if config.values.get("rotary_fraction", 1.0) < 1 or "rotary_dims" in config.values:
        notes.append("rotary positions are counted on every dimension of a head")
    if Role.HEAD_TRANSFORM in modules and has_language_head(config):
        notes.append("masked-language head on every position")
    return notes


def _choose(name: str, value: Any, known: Mapping[str, Any], path: Path) -> Any:
    if not isinstance(value, str) or value not in known:
        raise ConfigInvalid(path, f"{name} is {shown(value)}, known are {', '.join(known)}", "give one of these")
    return known[value]


def _own_fields(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Check the names of the fields of `ModelShape`, and the notes."""
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
