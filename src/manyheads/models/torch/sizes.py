"""Shape of a model of one's own: widths from the tensors of known parts, heads from the attributes of its modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from manyheads.errors import UsageError
from manyheads.models.torch.lazy_torch import Module, Tensor, torch
from manyheads.transformer.shape import Shape

HEADS = ("n_head", "n_heads", "num_heads", "num_attention_heads")
KEY_DIMS = ("head_dim", "head_size", "d_head", "attention_head_size")
SIDES: Mapping[str, tuple[str, ...]] = {
    "query": ("queries", "width"),
    **dict.fromkeys(("key", "value"), ("keys", "width")),
    "output": ("width", "queries"),
    **dict.fromkeys(("mlp_in", "mlp_gate"), ("hidden", "width")),
    "mlp_out": ("width", "hidden"),
    **dict.fromkeys(("embedding", "positional", "unembedding"), ("any", "width")),
}
"""Part → sides of its matrix, fan-out first."""
MATRICES = ("output", "query", "key", "value", "mlp_in", "mlp_out")  # as many in all blocks
TABLES = ("embedding", "positional")  # may have more axes: of pixels, or one of size one
BESIDE = "give roles= and shape="


def read_shape(
    model: Module, parts: Mapping[str, tuple[str, ...]], tensors: Mapping[str, Tensor], heads: int | None = None
) -> Shape:
    """Read N, H, L and what else a shape holds off the tensors, and refuse tensors that do not fit their parts."""
    sides = {name: _read_sides(model, name, tensors[name]) for name in parts if name in tensors}
    sizes: dict[str, int] = {}
    # The other side of an output matrix is N H; of one that holds queries, keys and values, keys are half of the rest.
    for part in ("embedding", "output", "mlp_out", "key"):
        for name in [name for name in sides if part in parts[name] and len(sides[name][0]) == 2]:
            width = SIDES[part].index("width")
            sizes.setdefault("width", sides[name][0][width])
            other = next((each[1 - width] for each in sides[name] if each[width] == sizes["width"]), 0)
            other = (other - sizes.get("queries", 0)) // 2 if len(parts[name]) == 3 else other
            sizes.setdefault(SIDES[part][1 - width], other)
    sizes["any"] = 0
    if missing := [each for each in ("width", "queries", "keys") if sizes.get(each, 0) < 1]:
        raise UsageError(f"the {missing[0]} cannot be read off the parameters: {BESIDE}Shape(N, H, L) (--to)")
    for name, each in sides.items():
        _check_sides(name, parts[name], each, sizes)
    depth, *counts = (sum(part in parts[name] for name in sides) for part in MATRICES)
    if any(count % depth for count in counts):
        raise UsageError(f"matrices {', '.join(MATRICES)}: there are {[depth, *counts]}, not as many of each: {BESIDE}")
    heads = _find_heads(model, [name for name in sides if "query" in parts[name]], sizes["queries"], heads)
    key_dim = sizes["queries"] // heads
    if sizes["queries"] % heads or sizes["keys"] % key_dim:
        raise UsageError(
            f"{heads} heads, and {sizes['queries']} queries, {sizes['keys']} keys: heads= has to divide them"
        )
    for name in sides:
        part, _, kind = parts[name][0].rpartition("_")
        wide = sizes["queries" if part == "query" else "keys"]
        if part in ("query", "key") and kind in ("gain", "shift") and tensors[name].numel() not in (key_dim, wide):
            raise UsageError(
                f"{name} has {tensors[name].numel()} entries, and N is {key_dim}: correct heads=, or {BESIDE}"
            )
    stream = None if sizes["width"] == sizes["queries"] else sizes["width"]
    return Shape(key_dim, heads, depth, stream, sizes["keys"] // key_dim, sizes.get("hidden"))


def _read_sides(model: Module, name: str, tensor: Tensor) -> list[tuple[int, ...]]:
    """Return the sides of a tensor, fan-out first, by its module; in both orders where that is not known."""
    module, sides = model.get_submodule(name.rpartition(".")[0]), tuple(tensor.shape)
    if isinstance(module, torch.nn.Linear | torch.nn.Embedding) or len(sides) != 2:
        return [sides]
    return [sides[::-1]] if type(module).__name__ == "Conv1D" else [sides, sides[::-1]]


def _check_sides(name: str, parts: Sequence[str], read: Sequence[tuple[int, ...]], sizes: Mapping[str, int]) -> None:
    """Refuse a tensor that does not have the sides of its parts."""
    part, _, kind = parts[0].rpartition("_")
    if parts[0] in SIDES:
        named = [SIDES[each] for each in parts]
    elif kind == "bias" and part in SIDES:
        named = [SIDES[each.removesuffix("_bias")][:1] for each in parts]
    elif kind in ("gain", "shift") and part not in ("query", "key", "inner"):
        named = [("width",)]
    else:
        return
    wanted = [sum(sizes.get(each[0], 0) for each in named), *(sizes.get(each, 0) for each in named[0][1:])]
    fits = any(
        len(each) == len(wanted) and all(b in (0, a) for a, b in zip(each, wanted, strict=True)) for each in read
    )
    if not fits and not (parts[0] in TABLES and len(read[0]) > 2):
        has, needs = (" x ".join(str(each or "any") for each in some) for some in (read[0], wanted))
        raise UsageError(
            f"{name} ({'+'.join(parts)}) has the sides {has}, and its role has {needs} here: its name means another "
            f"thing, or its layer has another size; {BESIDE}"
        )


def _find_heads(model: Module, queries: Sequence[str], rows: int, heads: int | None) -> int:
    """Return the number of heads: as given, and as the modules above all queries state it."""
    stated = {_stated_heads(model, name, rows) for name in queries}
    found = {*(each for each in stated if each), *([heads] if heads else [])}
    if len(found) == 1 and (heads or None not in stated):
        return int(found.pop())
    if not found:
        raise UsageError(
            f"no module above {queries[0]} states its heads ({', '.join(HEADS)} or {KEY_DIMS[0]}), and tensors do not "
            "tell them: give heads= (--heads)"
        )
    said = f"heads={heads}, and modules" if heads else "modules"
    raise UsageError(f"{said} state {' and '.join(f'{each or 0:g}' for each in stated)} heads, in layers: {BESIDE}")


def _stated_heads(model: Module, name: str, rows: int) -> float | None:
    """Return the heads that the nearest module above a parameter states, itself or by its configuration."""
    pieces = name.split(".")[:-1]
    for length in range(len(pieces), -1, -1):
        module = model.get_submodule(".".join(pieces[:length]))
        for owner in (module, getattr(module, "config", None)):
            values = {word: getattr(owner, word, None) for word in (*HEADS, *KEY_DIMS)}
            numbers = {word: each for word, each in values.items() if type(each) is int and each > 0}
            found = {rows / each if word in KEY_DIMS else float(each) for word, each in numbers.items()}
            if len(found) > 1:
                raise UsageError(f"{type(module).__name__} states {numbers}, and {name} has {rows} rows: {BESIDE}")
            if found:
                return found.pop()
    return None
