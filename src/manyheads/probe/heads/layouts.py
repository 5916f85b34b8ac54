"""Positions of the heads in the projections of a PyTorch model, and sums over the entries of each head."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads.models.torch.attention_modules import head_count, head_size
from manyheads.models.torch.lazy_torch import Module, Tensor

INPUTS = ("query", "key", "value")
# Names of the projections of an attention module to queries, keys and values, weights (out, in).
SEPARATE = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"))
# Name of a joint projection → its rows: all queries, all keys, all values; or query, key, value head after head.
FUSED = {"query_key_value": "heads", "Wqkv": "parts", "c_attn": "parts"}
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "Wo", "o")  # names of the output projection of an attention module


class HeadLayout(NamedTuple):
    """Order of the heads along one axis of a two-dimensional weight."""

    layer: int  # number of the attention module
    axis: int  # that of the heads
    parts: tuple[str, ...]  # "query", "key", "value" or "output", as they follow each other
    heads: int  # of each part
    size: int  # components of a head
    by_head: bool = False  # whether the parts follow each other within every head

    def sums(self, tensor: Tensor) -> dict[str, list[float]]:
        """Return part -> sums of the entries of a tensor of the weight's shape over each head."""
        totals = tensor.sum(1 - self.axis).view(-1, self.size).sum(1)
        parts = totals.view(self.heads, -1).T if self.by_head else totals.view(len(self.parts), self.heads)
        return {part: row.tolist() for part, row in zip(self.parts, parts, strict=True)}

    def matrices(self, weight: Tensor) -> dict[str, NDArray[np.float64]]:
        """Return part -> the matrices (heads, size, width) of the weight in float64."""
        array = weight.detach().double().cpu().numpy()
        array = array.T if self.axis else array
        order = (self.heads, len(self.parts)) if self.by_head else (len(self.parts), self.heads)
        parts = array.reshape(*order, self.size, -1)
        return dict(zip(self.parts, parts.swapaxes(0, 1) if self.by_head else parts, strict=True))


def head_layouts(model: Module) -> dict[int, HeadLayout]:
    """Return the id of a parameter -> its layout, for the projections of attention whose order is known."""
    modules = dict(model.named_modules())
    found: dict[int, HeadLayout] = {}
    layer = 0
    for name in modules:
        if layouts := attention_layouts(modules, name, layer):
            found = {id(weight): layout for weight, layout in layouts} | found
            layer += 1
    return found


def attention_layouts(modules: Mapping[str, Module], name: str, layer: int = 0) -> list[tuple[Tensor, HeadLayout]]:
    """Return the weights of a module with their layouts; none if it is no attention of known projections."""
    module = modules[name]
    size, heads = head_size(module), head_count(module)
    if size is None or heads is None:
        return []
    found = _separate(module, heads, size, layer) or _joint(module, heads, size, layer)
    # BERT keeps the output projection beside the module that holds the others.
    places = [(module, each) for each in OUTPUTS] + [(modules.get(name.rpartition(".")[0] + ".output"), "dense")]
    outputs = (_weight(getattr(place, each, None)) for place, each in places)
    output, axis = next((each for each in outputs if each[0] is not None), (None, 0))
    if found and output is not None and output.shape[1 - axis] == heads * size:
        found.append((output, HeadLayout(layer, 1 - axis, ("output",), heads, size)))
    return found


def _separate(module: Module, heads: int, size: int, layer: int) -> list[tuple[Tensor, HeadLayout]]:
    for names in SEPARATE:
        weights = [_weight(getattr(module, each, None)) for each in names]
        (query, axis), (key, _) = weights[:2]
        if query is None or key is None:
            continue
        if query.shape[axis] != heads * size:
            return []  # such as gates beside the queries
        return [
            (weight, HeadLayout(layer, axis, (part,), weight.shape[axis] // size, size))
            for part, (weight, axis) in zip(INPUTS, weights, strict=True)
            if weight is not None and weight.shape[axis] % size == 0
        ]
    return []


def _joint(module: Module, heads: int, size: int, layer: int) -> list[tuple[Tensor, HeadLayout]]:
    for name, order in FUSED.items():
        weight, axis = _weight(getattr(module, name, None))
        if weight is not None and weight.shape[axis] == 3 * heads * size:
            return [(weight, HeadLayout(layer, axis, INPUTS, heads, size, order == "heads"))]
    return []


def _weight(projection: Module | None) -> tuple[Tensor | None, int]:
    """Return the weight of a projection and its axis of outputs; (None, 0) if there is none of two axes."""
    weight = getattr(projection, "weight", None)
    if weight is None or weight.dim() != 2 or hasattr(weight, "device_mesh"):
        return None, 0
    return weight, 1 if type(projection).__name__ == "Conv1D" else 0
