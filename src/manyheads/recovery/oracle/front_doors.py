"""Front doors of an extraction: a function, a module of PyTorch, a model of transformers, a folder, a saved layer."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from manyheads._extras import require
from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.models.torch.extractable_attention import WIDE, widen
from manyheads.recovery._types import Array
from manyheads.recovery.layers import evaluation, files, rotary, scores
from manyheads.recovery.oracle.answers import LayerOracle
from manyheads.recovery.oracle.checkpoint_oracles import Floats, Through, attention_module_oracle, checkpoint_oracle

# Attributes by which a function states its properties
STATED = ("causal", "residual", "normalized", "rotary", "scores", "mlp", "dtype")


def open_oracle(
    given: Any, dim: int | None = None, layer: int | None = None, dtype: str = "float64", through: Through = "attention"
) -> LayerOracle:
    """Return what is asked, `given` as in `extract_layer`, as a function of sequences with its properties."""
    floats: Any = dtype  # checked by `checkpoint_oracle`
    if isinstance(given, str | os.PathLike):
        if not os.fspath(given):
            raise UsageError("the path is empty: give a checkpoint folder with layer=, or the file of a saved layer")
        found = _of_path(Path(given), layer, floats, through)
    elif is_module(given):
        found = _of_module(given, dim, layer, floats, through)
    else:
        if not callable(given) or isinstance(given, type):
            remedy = "a function (n, k, d) -> (n, k, d), a module of PyTorch, a model with layer=, or a saved layer"
            named = isinstance(given, type)
            what = f"the class {given.__name__}, not an object of it" if named else f"a {type(given).__name__}"
            raise UsageError(f"the oracle is {what}: give {remedy}")
        if layer is not None:
            raise UsageError(f"layer = {layer}: of models only; a function is one layer, leave it out")
        found = _of_function(given, dim)
    if through != "attention" and layer is None:
        raise UsageError(f"through = {through!r}: of a layer of a model. Of a function, ExtractionOptions says so")
    if dim is not None and dim != found.dim:
        raise UsageError(f"dim = {dim}, and {found.about} takes tokens of dimension {found.dim}: leave dim out")
    return found


def _of_function(given: Callable[[Any], Any], dim: int | None) -> LayerOracle:
    """Return a function with the properties that its attributes state."""
    if isinstance(given, LayerOracle):
        return given
    if isinstance(given, AttentionLayer | rotary.RotaryLayer):
        return _of_layer(given, f"a layer of {given.heads} heads")
    dim = getattr(given, "dim", None) if dim is None else dim
    if dim is None:
        raise UsageError("the function has no attribute dim: give the token dimension, dim=")
    return LayerOracle(given, dim, about=getattr(given, "__qualname__", type(given).__name__), **_statements(given))


def _statements(given: Any) -> dict[str, Any]:
    """Return the properties that attributes state."""
    return {name: value for name in STATED if isinstance(value := getattr(given, name, None), bool | str)}


def _of_path(path: Path, layer: int | None, dtype: Floats, through: Through) -> LayerOracle:
    if path.is_dir():
        if layer is None:
            raise UsageError(f"no layer of {path} is named: give its number, from 0")
        return checkpoint_oracle(path, layer, through=through, dtype=dtype)
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if path.suffix == ".safetensors" and not files.is_layer_file(path):
        raise UsageError(f"{path} holds no saved layer; for a checkpoint give its folder, and the number of a layer")
    if layer is not None:
        raise UsageError(f"layer = {layer}: {path} holds one layer, leave it out")
    return _of_layer(files.load_layer(path), str(path))


def _of_layer(layer: AttentionLayer | rotary.RotaryLayer, about: str) -> LayerOracle:
    if isinstance(layer, rotary.RotaryLayer):
        return LayerOracle(
            layer, layer.dim, causal=layer.causal, rotary=True, scores=isinstance(layer, scores.ScoreLayer), about=about
        )
    return LayerOracle(lambda x: evaluation.apply_layer(layer, x), layer.dim, causal=bool(layer.causal), about=about)


def is_module(given: Any) -> bool:
    """Tell modules of PyTorch, without importing it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.nn.Module)


def _of_module(module: Any, dim: int | None, layer: int | None, dtype: Floats, through: Through) -> LayerOracle:
    """Return a model of transformers, a part of one, or a module of the user."""
    if hasattr(module, "config") and hasattr(module, "base_model"):
        if layer is None:
            raise UsageError(f"no layer of {type(module).__name__} is named: give its number, from 0, layer=")
        return checkpoint_oracle(module, layer, through=through, dtype=dtype)
    if layer is not None:
        raise UsageError(f"layer = {layer}: {type(module).__name__} is no model of transformers, leave it out")
    if type(module).__module__.startswith("transformers.models."):
        return attention_module_oracle(module, dtype)
    function = _module_function(module, dtype)
    width = _width(module, function) if dim is None else dim
    stated = _statements(module) | {"dtype": dtype}
    kind = next((str(one.dtype).removeprefix("torch.") for one in module.parameters()), dtype)
    itself = None if kind == dtype else (_module_function(module, kind), kind)
    return LayerOracle(function, width, about=f"{type(module).__name__}, in {dtype}", itself=itself, **stated)


def _module_function(module: Any, dtype: str) -> Callable[[Any], Array]:
    """Return a copy of a module in the precision as a function of arrays; of a tuple, the first entry answers."""
    torch = require("torch")
    copy = widen(module, dtype)
    device = next((tensor.device for tensor in copy.parameters()), torch.device("cpu"))
    several = isinstance(copy, torch.nn.MultiheadAttention)  # queries, keys and values are given one by one
    turned = several and not copy.batch_first

    def answer(x: Array) -> Array:
        with torch.inference_mode():
            tokens = torch.from_numpy(np.array(x)).to(device, getattr(torch, dtype))
            tokens = tokens.transpose(0, 1) if turned else tokens
            found = copy(tokens, tokens, tokens, need_weights=False) if several else copy(tokens)
            found = found[0] if isinstance(found, tuple | list) else found
            found = found.transpose(0, 1) if turned else found
            return np.asarray(found.cpu() if dtype in WIDE else found.double().cpu())

    return answer


def _width(module: Any, function: Callable[[Any], Array]) -> int:
    """Return the token dimension of a module: the one input width of its linear maps that it takes and returns."""
    torch = require("torch")
    if isinstance(module, torch.nn.MultiheadAttention):
        return int(module.embed_dim)
    linear = [part.in_features for part in module.modules() if isinstance(part, torch.nn.Linear)]
    fitting = []
    for width in dict.fromkeys(linear):
        try:
            answered = function(np.zeros((1, 2, width)))
        except Exception:  # whatever a module raises, it does not take tokens of this width
            continue
        if answered.shape == (1, 2, width):
            fitting.append(width)
    if len(fitting) != 1:
        tried = f"of the widths {sorted(set(linear))} of its linear maps, it takes and returns {fitting or 'none'}"
        raise UsageError(f"{type(module).__name__} does not show its token dimension: {tried}. Give it, dim=")
    return fitting[0]
