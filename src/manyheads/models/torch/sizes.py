"""Shape of a model of one's own: widths from the tensors of known parts, heads from the attributes of its modules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from manyheads.errors import UsageError
from manyheads.models.modules import Role
from manyheads.models.torch.lazy_torch import Module, Tensor, torch
from manyheads.transformer.shape import Shape

HEADS = ("n_head", "n_heads", "num_heads", "num_attention_heads")
KEY_DIMS = ("head_dim", "head_size", "d_head", "attention_head_size")
SIDES: dict[str, list[str]] = {
    role.part + "_gain" * (role.sort == "norm"): role.sides.replace("embedding_width", "width").split(",")
    for role in reversed(Role)  # of roles of one part the first
    if role.part and "width" in role.sides and role.sort != "bare"
}
"""Part → sides of its weight on the stream, fan-out first."""
SIDES["mlp_gate"] = SIDES["mlp_in"]
MATRICES = ("output", "query", "key", "value", "mlp_in", "mlp_out")  # as many in all blocks
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
    sizes.pop("vocabulary", None)  # tables differ in it
    if missing := [each for each in ("width", "queries", "keys") if sizes.get(each, 0) < 1]:
        raise UsageError(f"the {missing[0]} cannot be read off the parameters: {BESIDE}Shape(N, H, L) (--to)")
    for name, each in sides.items():
        _check_sides(name, parts[name], each, sizes)
    depth, *counts = (sum(part in parts[name] for name in sides) for part in MATRICES)
    if any(count % depth for count in counts):
        raise UsageError(f"matrices {', '.join(MATRICES)}: there are {[depth, *counts]}, not as many of each: {BESIDE}")
    queries, keys = sizes["queries"], sizes["keys"]
    heads = _find_heads(model, [name for name in sides if "query" in parts[name]], queries, heads)
    key_dim = queries // heads
    if queries % heads or keys % key_dim or heads % (keys // key_dim):
        raise UsageError(f"{heads} heads, and {queries} queries, {keys} keys: heads= has to divide them, or {BESIDE}")
    for name in [name for name in sides if re.fullmatch("(query|key)_(gain|shift)", parts[name][0])]:
        if (entries := tensors[name].numel()) not in (key_dim, queries, keys):
            raise UsageError(f"{name} has {entries} entries, and N is {key_dim}: correct heads=, or {BESIDE}")
    stream = None if sizes["width"] == queries else sizes["width"]
    return Shape(key_dim, heads, depth, stream, keys // key_dim, sizes.get("hidden"))


def _read_sides(model: Module, name: str, tensor: Tensor) -> list[tuple[int, ...]]:
    """Return the sides of a tensor, fan-out first, by its module; in both orders where that is not known."""
    module, sides = model.get_submodule(name.rpartition(".")[0]), tuple(tensor.shape)
    if isinstance(module, torch.nn.Linear | torch.nn.Embedding) or len(sides) != 2:
        return [sides]
    return [sides[::-1]] if type(module).__name__ == "Conv1D" else [sides, sides[::-1]]


def _check_sides(name: str, parts: Sequence[str], read: Sequence[tuple[int, ...]], sizes: Mapping[str, int]) -> None:
    """Refuse a tensor that does not have the sides of its parts; 0 is any size."""
    named = [SIDES.get(each.removesuffix("_bias").replace("_shift", "_gain"), []) for each in parts]
    if not all(named) or (parts[0] in ("embedding", "positional") and len(read[0]) > 2):  # of pixels, or one more axis
        return
    out, *rest = (sum(sizes.get(each, 0) for each in side) for side in zip(*named, strict=True))
    wanted = [out] if parts[0].endswith("_bias") else [out, *(each // len(parts) for each in rest)]
    if any(len(each) == len(wanted) and all(b in (0, a) for a, b in zip(each, wanted, strict=True)) for each in read):
        return
    has, needs = (" x ".join(str(each or "any") for each in some) for some in (read[0], wanted))
    said = f"{name} ({'+'.join(parts)}) has the sides {has}, and its role has {needs} here"
    raise UsageError(f"{said}: its name means another thing, or its layer has another size; {BESIDE}")


def _find_heads(model: Module, queries: Sequence[str], rows: int, heads: int | None) -> int:
    """Return the number of heads: as given, and as the modules above all queries state it."""
    stated = [_stated_heads(model, name, rows) for name in queries]
    found = {*([heads] if heads else []), *(each for some in stated for each in some)}
    if len(found) == 1 and (heads or all(stated)):
        return int(found.pop())
    if not found:
        words = f"no module above {queries[0]} states its heads ({', '.join(HEADS)} or {KEY_DIMS[0]})"
        raise UsageError(f"{words}, and tensors do not tell them: give heads= (--heads)")
    said = f"heads={heads}, and modules" if heads else "modules"
    shown = " and ".join(dict.fromkeys(f"{each:g}" for some in stated for each in some or [0]))
    raise UsageError(f"{said} state {shown} heads for {rows} rows of queries: {BESIDE}")


def _stated_heads(model: Module, name: str, rows: int) -> list[float]:
    """Return the heads that the nearest module above a parameter states, itself or by its configuration."""
    while name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        for owner in (module, getattr(module, "config", None)):
            numbers = {word: getattr(owner, word, 0) for word in (*HEADS, *KEY_DIMS)}
            known = {word: each for word, each in numbers.items() if type(each) is int and each > 0}
            if known:
                return [rows / each if word in KEY_DIMS else float(each) for word, each in known.items()]
    return []
