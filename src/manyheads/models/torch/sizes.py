"""Shape of a model of one's own: widths from the tensors of known parts, heads from the attributes of its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from manyheads.errors import UsageError
from manyheads.models.parts import LATENT
from manyheads.models.torch.lazy_torch import Module, Tensor, torch
from manyheads.transformer.shape import Shape

HEADS = ("n_head", "n_heads", "num_heads", "num_attention_heads", "nhead", "heads")
KEY_DIMS = ("head_dim", "head_size", "d_head", "dim_head", "key_dim", "attention_head_size")
SIDES: Mapping[str, tuple[str, str]] = {
    "query": ("queries", "width"),
    "key": ("keys", "width"),
    "value": ("keys", "width"),
    "output": ("width", "queries"),
    **dict.fromkeys(("mlp_in", "mlp_gate"), ("hidden", "width")),
    "mlp_out": ("width", "hidden"),
    **dict.fromkeys(("embedding", "positional", "unembedding"), ("", "width")),
}
"""Part → sides of its matrix, fan-out first; empty for any."""
FIRST = (
    ("width", "query", 1),
    ("width", "key", 1),
    ("queries", "output", 1),
    ("hidden", "mlp_out", 1),
    ("keys", "key", 0),
)
"""What is read off which matrix, and off which of its sides; the others have to agree."""
VECTORS: Mapping[str, str] = {
    "query_bias": "queries",
    **dict.fromkeys(("key_bias", "value_bias"), "keys"),
    **dict.fromkeys(("mlp_in_bias", "mlp_gate_bias"), "hidden"),
    **{
        f"{part}_{kind}": "width"
        for part in ("attention", "mlp", "final", "embedding", "attention_post", "mlp_post")
        for kind in ("gain", "shift")
    },
    **dict.fromkeys(("output_bias", "mlp_out_bias", "branch_gain"), "width"),
}


def read_shape(
    model: Module, parts: Mapping[str, tuple[str, ...]], tensors: Mapping[str, Tensor], heads: int | None = None
) -> Shape:
    """Read N, H, L and what else a shape holds off the tensors, and refuse tensors that do not fit their parts."""
    names = {name: each for name, each in parts.items() if name in tensors}
    if latent := [name for name, each in names.items() if each[0] in LATENT]:
        raise UsageError(f"{latent[0]} is of latent attention, whose key dimension tensors do not tell: give shape=")
    matrices = {name: (each, _readings(model, name, tensors[name])) for name, each in names.items() if each[0] in SIDES}
    count = sum("output" in each for each in names.values())
    sizes: dict[str, int] = {}
    for size, part, side in FIRST:
        for each, readings in matrices.values():
            if part in each and len(readings) == 1 and len(readings[0]) == 2 and size not in sizes:
                total = readings[0][side]
                sizes[size] = (total - sizes.get("queries", 0)) // 2 if size == "keys" and len(each) == 3 else total
    if missing := [size for size in ("width", "queries", "keys") if sizes.get(size, 0) < 1] or [""] * (not count):
        raise UsageError(
            f"the {missing[0] or 'depth'} cannot be read off the parameters: give shape=Shape(N, H, L) (--to)"
        )
    for name, each in names.items():
        _check(name, each, matrices.get(name, (each, [tuple(tensors[name].shape)]))[1], sizes)
    if any(sum(part in each for each in names.values()) % count for part in ("query", "key", "value", "mlp_out")):
        raise UsageError(f"{count} output matrices, and not as many queries, keys, values or MLPs: give shape=")
    heads = _find_heads(model, [name for name, each in names.items() if "query" in each], sizes["queries"], heads)
    key_dim, width = sizes["queries"] // heads, sizes["width"]
    if sizes["queries"] % heads or sizes["keys"] % key_dim:
        raise UsageError(
            f"{heads} heads, and {sizes['queries']} queries, {sizes['keys']} keys: give heads= that divide them"
        )
    for name, each in names.items():
        wide = {"query": sizes["queries"], "key": sizes["keys"]}.get(each[0].partition("_")[0])
        if each[0].endswith(("_gain", "_shift")) and wide and tensors[name].numel() not in (key_dim, wide):
            raise UsageError(
                f"{name} ({each[0]}) has {tensors[name].numel()} entries, and N is {key_dim}: correct heads="
            )
    stream = None if width == heads * key_dim else width
    return Shape(key_dim, heads, count, stream, sizes["keys"] // key_dim, sizes.get("hidden"))


def _readings(model: Module, name: str, tensor: Tensor) -> list[tuple[int, ...]]:
    """Return the sides of a tensor, fan-out first, by its module; in both orders where that is not known."""
    module = model.get_submodule(name.rpartition(".")[0])
    sides = tuple(tensor.shape)
    if isinstance(module, torch.nn.Linear | torch.nn.Embedding) or len(sides) != 2:
        return [sides]
    return [sides[::-1]] if type(module).__name__ == "Conv1D" else list(dict.fromkeys((sides, sides[::-1])))


def _check(name: str, parts: Sequence[str], readings: Sequence[tuple[int, ...]], sizes: Mapping[str, int]) -> None:
    """Refuse a tensor that does not have the sides of its parts."""
    if parts[0] in VECTORS:
        wanted: tuple[int | None, ...] = (sum(sizes.get(VECTORS[part], 0) for part in parts),)
    elif parts[0] in SIDES and len(readings[0]) == 2:
        out, into = ([sizes.get(SIDES[part][place]) for part in parts] for place in (0, 1))
        wanted = (None if None in out else sum(each or 0 for each in out), into[0])
    else:
        return
    if not any(all(b in (None, a) for a, b in zip(sides, wanted, strict=True)) for sides in readings):
        shown = " x ".join("any" if each is None else str(each) for each in wanted)
        raise UsageError(
            f"{name} ({'+'.join(parts)}) has the sides {' x '.join(map(str, readings[0]))}, and its role has {shown} "
            "here: its name means another thing, or its layer has another size; give roles= and shape="
        )


def _find_heads(model: Module, queries: Sequence[str], rows: int, heads: int | None) -> int:
    """Return the number of heads: as given, and as every module above queries states it."""
    stated = {name: number for name in queries for number in [_stated_heads(model, name, rows)] if number}
    found = dict.fromkeys([*([heads] if heads else []), *stated.values()])
    if len(found) == 1 and not (heads is None and len(stated) < len(queries)):
        return next(iter(found))
    if not found:
        raise UsageError(
            f"no module above {queries[0]} states its heads ({', '.join(HEADS[:4])} or {', '.join(KEY_DIMS[:2])}), and "
            "tensors do not tell them: give heads= (--heads on the command line)"
        )
    given = f"heads={heads}, and " if heads else ""
    raise UsageError(
        f"{given}modules state {' and '.join(str(each) for each in dict.fromkeys(stated.values()))} heads, of "
        f"{len(stated)} of {len(queries)} layers: one number for all layers is described; give shape= and roles="
    )


def _stated_heads(model: Module, name: str, rows: int) -> int | None:
    """Return the heads that the nearest module above a parameter states, itself or by its configuration."""
    pieces = name.split(".")[:-1]
    for length in range(len(pieces), -1, -1):
        module = model.get_submodule(".".join(pieces[:length]))
        for owner in (module, getattr(module, "config", None)):
            found = set(_numbers(owner, HEADS)) | {rows / number for number in _numbers(owner, KEY_DIMS)}
            if len(found) == 1 and (number := found.pop()) == int(number):
                return int(number)
            if len(found) > 1:
                who, shown = type(module).__name__, " and ".join(f"{each:g}" for each in found)
                raise UsageError(f"{who} states {shown} heads for the {rows} rows of {name}: give roles= and shape=")
    return None


def _numbers(owner: Any, words: Sequence[str]) -> Iterator[int]:
    for word in words:
        value = getattr(owner, word, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield value
