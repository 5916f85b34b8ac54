"""Model shapes from files: the `config.json` of Hugging Face models, or our own fields as JSON."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from manyheads.costs.shapes import ModelShape
from manyheads.errors import FileRefused, UsageError

# A configuration is a page of text; whatever is longer is something else.
LARGEST_FILE = 4 * 2**20

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


class _Reader:
    """The fields of one configuration: absent, wrong and unreadable ones are refused by name."""

    def __init__(self, config: dict[str, Any], origin: str):
        self.config = config
        self.origin = origin

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise FileRefused(f"{self.origin}: {name} is {value!r}, expected an integer")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise FileRefused(f"{self.origin}: {name} is {value!r}, expected true or false")
        return value

    def activation(self, name: str, default: str) -> str:
        value = self.config.get(name) or default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise FileRefused(f"{self.origin}: {name} is {value!r}, known are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def built(self, suffix: str) -> bool:
        names = self.config.get("architectures")
        names = [] if names is None else names
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise FileRefused(f"{self.origin}: architectures is {names!r}, expected a list of class names")
        return any(name.endswith(suffix) for name in names)

    def biases(self, **parts: bool) -> str:
        """Name the parts of a block that have biases."""
        names = [name for name, biased in parts.items() if biased]
        return {0: "none", 3: "all"}.get(len(names), "+".join(names))

    def common(self) -> dict[str, Any]:
        """Fields that all families share: bytes of a number, tied tables."""
        dtype = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        if not isinstance(dtype, str) or dtype not in ITEMSIZES:
            raise FileRefused(f"{self.origin}: dtype is {dtype!r}, known are {', '.join(ITEMSIZES)}")
        return {"itemsize": ITEMSIZES[dtype]}


def _gpt2(read: _Reader) -> dict[str, Any]:
    width = read.integer("n_embd", 768)
    return {
        "layers": read.integer("n_layer", 12),
        "width": width,
        "heads": read.integer("n_head", 12),
        "mlp_hidden": read.integer("n_inner", 4 * width),
        "vocabulary": read.integer("vocab_size", 50257),
        "tied": read.flag("tie_word_embeddings", True),
        "activation": read.activation("activation_function", "gelu_new"),
    }


def _gpt_neox(read: _Reader) -> dict[str, Any]:
    return {
        "layers": read.integer("num_hidden_layers", 44),
        "width": read.integer("hidden_size", 6144),
        "heads": read.integer("num_attention_heads", 64),
        "mlp_hidden": read.integer("intermediate_size", 24576),
        "vocabulary": read.integer("vocab_size", 50432),
        "tied": read.flag("tie_word_embeddings", False),
        "activation": read.activation("hidden_act", "gelu"),
        "biases": read.biases(qkv=(biased := read.flag("attention_bias", True)), output=biased, mlp=True),
        "positions": "rotary",
        "notes": ("rotary positions are counted on every dimension of a head",),
    }


def _opt(read: _Reader) -> dict[str, Any]:
    width = read.integer("hidden_size", 768)
    return {
        "layers": read.integer("num_hidden_layers", 12),
        "width": width,
        "heads": read.integer("num_attention_heads", 12),
        "mlp_hidden": read.integer("ffn_dim", 3072),
        "vocabulary": read.integer("vocab_size", 50272),
        "embedding_width": read.integer("word_embed_proj_dim", width),
        "tied": read.flag("tie_word_embeddings", True),
        "activation": read.activation("activation_function", "relu"),
        "biases": "all" if read.flag("enable_bias", True) else "none",
    }


def _llama(read: _Reader) -> dict[str, Any]:
    heads = read.integer("num_attention_heads", 32)
    width = read.integer("hidden_size", 4096)
    return {
        "layers": read.integer("num_hidden_layers", 32),
        "width": width,
        "heads": heads,
        "kv_heads": read.integer("num_key_value_heads", heads),
        "head_dim": read.integer("head_dim", width // heads if heads else 0),
        "mlp_hidden": read.integer("intermediate_size", 11008),
        "gated": True,
        "vocabulary": read.integer("vocab_size", 32000),
        "tied": read.flag("tie_word_embeddings", False),
        "activation": read.activation("hidden_act", "silu"),
        "norm": "rmsnorm",
        "biases": read.biases(
            qkv=(biased := read.flag("attention_bias", False)), output=biased, mlp=read.flag("mlp_bias", False)
        ),
        "positions": "rotary",
    }


def _mistral(read: _Reader) -> dict[str, Any]:
    shape = _llama(read)
    heads = shape["heads"]
    return {
        **shape,
        "kv_heads": read.integer("num_key_value_heads", min(8, heads)),
        "mlp_hidden": read.integer("intermediate_size", 14336),
        "window": read.integer("sliding_window", 0) if "sliding_window" in read.config else 4096,
        "biases": "none",
    }


def _qwen2(read: _Reader) -> dict[str, Any]:
    if read.flag("use_sliding_window", False):
        raise FileRefused(
            f"{read.origin}: use_sliding_window gives layers of different cost, which one shape cannot describe"
        )
    shape = _llama(read)
    return {
        **shape,
        "kv_heads": read.integer("num_key_value_heads", 32),
        "mlp_hidden": read.integer("intermediate_size", 22016),
        "vocabulary": read.integer("vocab_size", 151936),
        "biases": "qkv",
    }


def _bert(read: _Reader) -> dict[str, Any]:
    masked = read.built("ForMaskedLM") or read.built("ForPreTraining")
    note = "masked-language head on every position" if masked else "body only: pooler and task heads are not counted"
    return {
        "layers": read.integer("num_hidden_layers", 12),
        "width": read.integer("hidden_size", 768),
        "heads": read.integer("num_attention_heads", 12),
        "mlp_hidden": read.integer("intermediate_size", 3072),
        "vocabulary": read.integer("vocab_size", 30522),
        "unembedding": masked,
        "head_transform": masked,
        "tied": read.flag("tie_word_embeddings", True),
        "causal": False,
        "activation": read.activation("hidden_act", "gelu"),
        "notes": (note,),
    }


def _vit(read: _Reader) -> dict[str, Any]:
    patch = read.integer("patch_size", 16)
    image = read.integer("image_size", 224)
    if not patch or image % patch:
        raise FileRefused(f"{read.origin}: image_size {image} is no multiple of patch_size {patch}")
    labels = read.config.get("id2label")
    classes = len(labels) if isinstance(labels, dict) else read.integer("num_labels", 2)
    return {
        "layers": read.integer("num_hidden_layers", 12),
        "width": read.integer("hidden_size", 768),
        "heads": read.integer("num_attention_heads", 12),
        "mlp_hidden": read.integer("intermediate_size", 3072),
        "patch_features": patch * patch * read.integer("num_channels", 3),
        "special_tokens": 1,
        "classes": classes if read.built("ForImageClassification") else 0,
        "biases": read.biases(qkv=read.flag("qkv_bias", True), output=True, mlp=True),
        "causal": False,
        "activation": read.activation("hidden_act", "gelu"),
        "fixed_length": (image // patch) ** 2 + 1,
    }


FAMILIES: dict[str, Callable[[_Reader], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "bert": _bert,
    "vit": _vit,
}


def shape_from_config(config: dict[str, Any], origin: str = "config") -> ModelShape:
    """Turn a configuration into a shape.

    Parameters
    ----------
    config
        The content of a Hugging Face `config.json` (it has a `model_type`), or the fields of `ModelShape`.
    origin
        What to call it in an error.

    Raises
    ------
    FileRefused
        The `model_type` is none of the known families, or a field is absent, unknown or of the wrong kind.

    Examples
    --------
    >>> shape_from_config({"model_type": "gpt2"}).vocabulary
    50257
    >>> shape_from_config({"layers": 2, "width": 64, "heads": 4}).mlp_hidden
    256
    """
    if not isinstance(config, dict):
        raise FileRefused(f"{origin}: expected a JSON object, found {type(config).__name__}")
    if "model_type" in config:
        family = config["model_type"]
        if not isinstance(family, str) or family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise FileRefused(
                f"{origin}: model_type {family!r} is not known; known are {known}. Give the shape by its fields"
            )
        read = _Reader(config, origin)
        values = {**read.common(), **FAMILIES[family](read)}
    else:
        known_fields = {field.name for field in fields(ModelShape)}
        if unknown := sorted(set(config) - known_fields):
            raise FileRefused(f"{origin}: no model_type, and {', '.join(unknown)} is no field of ModelShape")
        if missing := [name for name in ("layers", "width", "heads") if name not in config]:
            raise FileRefused(f"{origin}: no model_type, and {', '.join(missing)} is missing")
        notes = config.get("notes", [])
        if not isinstance(notes, list | tuple) or not all(isinstance(note, str) for note in notes):
            raise FileRefused(f"{origin}: notes is {notes!r}, expected a list of sentences")
        try:
            "".join(notes).encode()
        except UnicodeEncodeError as error:  # half of a character, legal as an escape in JSON, and no text
            raise FileRefused(f"{origin}: notes is {notes!r}, which has no UTF-8 form") from error
        values = {**config, "notes": tuple(notes)}
    try:
        return ModelShape(**values)
    except (UsageError, TypeError) as error:
        raise FileRefused(f"{origin}: {error}") from error


def read_config(path: str | Path) -> ModelShape:
    """Read a model's shape from a `config.json`, or from the folder that holds one.

    Known families: gpt2, gpt_neox, opt, llama, mistral, qwen2, bert, vit. Absent fields take the family's defaults.

    Raises
    ------
    FileRefused
        The file is absent, too large, not JSON, of an unknown family, or a field cannot be read.

    Notes
    -----
    The text is parsed as JSON and nothing else; transformers is not needed.
    """
    return shape_from_config(*load_config(path))


def load_config(path: str | Path) -> tuple[Any, str]:
    """Return what a `config.json`, or that of a folder, holds, and what to call the file in an error.

    Raises
    ------
    FileRefused
        The file is absent, too large, or not JSON.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise FileRefused(f"{path}: {path.stat().st_size:,} bytes, a configuration has at most {LARGEST_FILE:,}")
        return json.loads(path.read_text(encoding="utf-8")), str(path)
    except FileRefused:
        raise
    # ValueError: no UTF-8, no JSON, or a number of more digits than Python converts.
    except (OSError, ValueError, RecursionError) as error:
        raise FileRefused(f"{path}: cannot be read as JSON ({error})") from error
