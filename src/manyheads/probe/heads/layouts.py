"""Positions of the heads in the projections of a PyTorch model, and sums over the entries of each head."""

from typing import Any, NamedTuple

from manyheads.models.torch.attention_modules import head_count, head_size
from manyheads.probe.heads.head_weights import FUSED, OUTPUTS, SEPARATE

INPUTS = ("query", "key", "value")


class HeadLayout(NamedTuple):
    """Order of the heads along one axis of a two-dimensional weight.

    Attributes
    ----------
    layer
        Number of the attention module.
    axis
        That of the heads.
    parts
        "query", "key", "value" or "output", as they follow each other.
    heads, size
        Number of heads of each part, and components of a head.
    by_head
        Whether the parts follow each other within every head.
    """

    layer: int
    axis: int
    parts: tuple[str, ...]
    heads: int
    size: int
    by_head: bool = False

    def sums(self, tensor: Any) -> dict[str, list[float]]:
        """Return part -> sums of the entries of a tensor of the weight's shape over each head."""
        totals = tensor.sum(1 - self.axis).view(-1, self.size).sum(1)
        parts = totals.view(self.heads, -1).T if self.by_head else totals.view(len(self.parts), self.heads)
        return {part: row.tolist() for part, row in zip(self.parts, parts, strict=True)}


def head_layouts(model: Any) -> dict[int, HeadLayout]:
    """Return the id of a parameter -> its layout, for the projections of attention whose order is known."""
    modules = dict(model.named_modules())
    found: dict[int, HeadLayout] = {}
    layer = 0
    for name, module in modules.items():
        size, heads = head_size(module), head_count(module)
        if size is None or heads is None:
            continue
        inputs = _separate(module, heads, size, layer) or _joint(module, heads, size, layer)
        if not inputs:
            continue
        found |= inputs
        places = [(module, each) for each in OUTPUTS] + [(modules.get(name.rpartition(".")[0] + ".output"), "dense")]
        for place, each in places:
            weight, axis = _weight(getattr(place, each, None))
            if weight is not None and id(weight) not in found:
                if weight.shape[1 - axis] == heads * size:
                    found[id(weight)] = HeadLayout(layer, 1 - axis, ("output",), heads, size)
                break
        layer += 1
    return found


def _separate(module: Any, heads: int, size: int, layer: int) -> dict[int, HeadLayout]:
    for names in SEPARATE:
        weights = [_weight(getattr(module, each, None)) for each in names]
        (query, axis), (key, _) = weights[:2]
        if query is None or key is None:
            continue
        if query.shape[axis] != heads * size:
            return {}  # such as gates beside the queries
        return {
            id(weight): HeadLayout(layer, axis, (part,), weight.shape[axis] // size, size)
            for part, (weight, axis) in zip(INPUTS, weights, strict=True)
            if weight is not None and weight.shape[axis] % size == 0
        }
    return {}


def _joint(module: Any, heads: int, size: int, layer: int) -> dict[int, HeadLayout]:
    for name, order in FUSED.items():
        weight, axis = _weight(getattr(module, name, None))
        if weight is not None and weight.shape[axis] == 3 * heads * size:
            return {id(weight): HeadLayout(layer, axis, INPUTS, heads, size, order == "heads")}
    return {}


def _weight(projection: Any) -> tuple[Any, int]:
    """Return the weight of a projection and its axis of outputs; (None, 0) if there is none of two axes."""
    weight = getattr(projection, "weight", None)
    if weight is None or weight.dim() != 2 or hasattr(weight, "device_mesh"):
        return None, 0
    return weight, 1 if type(projection).__name__ == "Conv1D" else 0
