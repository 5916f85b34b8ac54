"""Shape of a model from its `config.json`: the integers that costs depend on."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from manyheads.costs import ModelShape
from manyheads.costs.shapes import Experts, Latent
from manyheads.errors import UsageError
from manyheads.models.config import ModelConfig, load_config, read_config, shown
from manyheads.models.counts import describe_assumed, layer_sizes, module_sizes
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
PARTS: dict[str, Any] = {"experts": Experts, "latent": Latent}  # fields of `ModelShape` that have fields of their own
MOST_UNEVEN = 10_000  # layers that are gone through one by one
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
        A value is absent, unknown or of the wrong kind.

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
    try:
        values = _family_fields(read_config(raw, path)) if "model_type" in raw else _own_fields(raw, path)
        return ModelShape(**values)
    except (UsageError, TypeError, RecursionError) as error:
        raise ConfigInvalid(path, str(error), "give sizes that a model can have") from error


def _family_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `ModelShape` that a family and its configuration give."""
    family, values, counted, path = config.family, config.values, config.counted, config.path
    modules = {module.role: module for module in (*family.body, *family.heads)}
    language, sizes = has_language_head(config), config.sizes
    narrow = counted.get("embedding_width") not in (None, values["width"])
    dtype = config_dtype(config.raw, path)
    rotary = "rotary_theta" in values and not values.get("alibi")
    shape = {
        "layers": values["layers"],
        "width": values["width"],
        "heads": values["heads"],
        "kv_heads": values["key_value_heads"],
        "head_dim": values["key_dim"],
        "value_dim": sizes["value_dim"],
        "tied": values.get("tied", False),
        "causal": config.causal,
        "embedding_width": counted.get("embedding_width"),
        "projects_back": narrow and (language or any(m.role is Role.UNEMBEDDING_PROJECTION for m in family.body)),
        "activation": _choose("activation", counted["activation"], ACTIVATIONS | OTHER_ACTIVATIONS, path),
        "norm": {"layer": "layernorm", "rms": "rmsnorm"}[family.norm],
        "positions": "rotary" if rotary else "learned" if Role.POSITION in modules else "none",
        "itemsize": ITEMSIZES[dtype or "float32"],
    }
    if "patch" in counted:
        if counted["image"] % counted["patch"]:
            found = f"image_size {counted['image']} is no multiple of patch_size {counted['patch']}"
            raise ConfigInvalid(path, found)
        hidden = sizes["hidden_patches"]
        shape |= {"patch_features": sizes["patch_features"], "fixed_length": sizes["positions"] - hidden}
        shape |= {"dropped_patches": hidden}
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
    shape["notes"] = (*assumed, *_describe_differences(config, modules))
    kinds = [shape | _block_fields(config, layers) for layers in _layers_alike(config)]
    uneven = {"kinds": tuple(ModelShape(**kind) for kind in kinds)} if len(kinds) > 1 else {}
    return kinds[0] | uneven | {"layers": values["layers"], "name": ""}


def _layers_alike(config: ModelConfig) -> list[Sequence[int]]:
    """Return the layers of each kind: of one window, with or without experts; the first layer's first."""
    layers = config.values["layers"]
    sparse = any(module.only in ("dense", "sparse") for module in config.family.body)
    turned = "rotary_period" in config.values
    if not layers or not (sparse or turned or len(config.windows()) > 1):
        return [range(layers)]
    if layers > MOST_UNEVEN:
        raise ConfigInvalid(config.path, f"{layers} layers that may differ, expected at most {MOST_UNEVEN}")
    found: dict[tuple[Any, ...], list[int]] = {}
    for layer in range(layers):
        kind = config.window(layer), sparse and config.is_sparse(layer), turned and config.is_rotary(layer)
        found.setdefault(kind, []).append(layer)
    return list(found.values())


def _block_fields(config: ModelConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Return the fields of `ModelShape` that the modules of a layer give, of those that are alike."""
    first = layers[0] if layers else 0
    found = list(layer_sizes(config, first))
    by_role = {module.role: size.sides for module, size in found if any(size.sides)}
    biased = {module.role for module, size in found if size.bias}
    parts = {"qkv": {Role.QUERY, Role.QUERY_KEY_VALUE, Role.KEY_VALUE_DOWN}, "output": {Role.OUTPUT}}
    parts["mlp"] = {Role.MLP_IN, Role.MLP_GATE_IN, Role.EXPERT_IN}
    biases = [name for name, roles in parts.items() if roles & biased]
    rank, size = by_role.get(Role.QUERY_DOWN, (0,))[0], config.sizes
    experts, latent = Role.EXPERT_IN in by_role, Role.KEY_VALUE_DOWN in by_role
    turned = {"positions": "rotary" if config.is_rotary(first) else "none"} if "rotary_period" in config.values else {}
    return turned | {
        "name": _name_layers(layers),
        "layers": len(layers),
        "window": (config.window(first) or 0) if layers else 0,
        "mlp_hidden": by_role.get(Role.MLP_OUT, (0, 0))[1],
        "gated": any(role in by_role for role in (Role.MLP_GATE, Role.MLP_GATE_IN, Role.EXPERT_IN)),
        "biases": {0: "none", 3: "all"}.get(len(biases), "+".join(biases)),
        "latent": Latent(size["key_value_rank"], size["rotary_key_dim"], rank) if latent else None,
        "experts": Experts(size["experts"], size["active_experts"], size["expert_hidden"], Role.SHARED_GATE in by_role)
        if experts
        else None,
    }


def _name_layers(layers: Sequence[int]) -> str:
    """Write layers as ranges, such as "0-4, 6-10"; of more than five the first ones."""
    starts = [layer for layer in layers if layer == layers[0] or layer - 1 not in layers]
    ends = [layer for layer in layers if layer == layers[-1] or layer + 1 not in layers]
    ranges = [f"{start}-{end}" if end > start else f"{start}" for start, end in zip(starts, ends, strict=True)]
    return ", ".join([*ranges[:5], "..."] if len(ranges) > 6 else ranges)


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
    if any(config.has("sparse", layer) for layer in range(config.values["layers"])) and Role.EXPERT_IN in modules:
        notes.append("elementwise work of routers, which choose experts, is left out")
        notes.append("bytes take as many experts as tokens can visit at most")
    if Role.KEY_VALUE_DOWN in modules:
        notes.append("decoding multiplies cached latent vectors; some keep keys and values of all heads instead")
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
    parts = {name: kind(**raw[name]) for name, kind in PARTS.items() if isinstance(raw.get(name), Mapping)}
    if isinstance(kinds := raw.get("kinds"), list) and all(isinstance(kind, Mapping) for kind in kinds):
        parts["kinds"] = tuple(ModelShape(**_own_fields(kind, path)) for kind in kinds)
    return {**raw, **parts, "notes": tuple(notes)}
