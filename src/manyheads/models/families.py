"""Which family a set of names belongs to, and what each name means: explained completely, or refused."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manyheads.models import refusals
from manyheads.models.tables import MAYBE, NEVER, TABLES, Condition, Module, Role, Table


@dataclass(frozen=True, slots=True)
class Part:
    """What one name of a family means.

    Attributes
    ----------
    role
        What the weight does.
    kind
        "weight", "bias", "gain" (of a norm) or "buffer".
    layer
        Number of the layer, None outside the layers.
    layout
        "out,in" or "in,out" for matrices that multiply a vector, "" for tables, vectors and bare tensors.
    """

    role: Role
    kind: str
    layer: int | None
    layout: str


@dataclass(frozen=True)
class Family:
    """A table of a family, fitted to one configuration and one set of names by `recognise`.

    Attributes
    ----------
    table
        The family.
    prefix
        What stands before the names of the body here.
    figures
        Canonical figure → value of this configuration (width, heads, layers, eps, ...).
    config
        The configuration itself.
    parts
        Name → its meaning; only names that are present.
    tied
        Weight of a head → weight that it shares its values with, whether the first is stored or not.
    unembedding
        The stored weight that turns the residual stream into logits over tokens; None when the model has no such head.
    path
        Where the configuration comes from, for messages.
    """

    table: Table
    prefix: str
    figures: Mapping[str, Any]
    config: Mapping[str, Any]
    parts: Mapping[str, Part]
    tied: Mapping[str, str]
    unembedding: str | None
    path: Path

    def names(self, role: Role, kind: str = "weight", layer: int | None = None) -> tuple[str, ...]:
        """Return the names of one role, kind and layer; none when the checkpoint has no such weight."""
        return tuple(
            name for name, part in self.parts.items() if (part.role, part.kind, part.layer) == (role, kind, layer)
        )


def recognise(config: Mapping[str, Any], names: Iterable[str], path: Path | str = "config.json") -> Family:
    """Explain every name of a checkpoint, or refuse.

    Parameters
    ----------
    config
        The configuration, as in `config.json` of Hugging Face transformers.
    names
        The names of the tensors.
    path
        Where they come from, for messages.

    Returns
    -------
    Family
        With a meaning for each of `names`.

    Raises
    ------
    UnknownFamily
        No table describes this `model_type`.
    ConfigInvalid
        A figure is absent or cannot be.
    UnexplainedNames
        The table does not explain some names (adapters, quantised weights, wrappers, cross-attention).
    WeightsMissing
        The configuration requires weights that are absent.

    Examples
    --------
    >>> config = {"model_type": "gpt2", "n_embd": 4, "n_head": 2, "n_layer": 0}
    >>> family = recognise(config, ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"])
    >>> family.parts["ln_f.weight"]
    Part(role=<Role.FINAL_NORM: 'final_norm'>, kind='gain', layer=None, layout='')
    """
    path, names = Path(path), list(names)
    table, figures = read_figures(config, path)
    model_type = table.model_type
    if figures["layers"] > len(names):
        raise refusals.WeightsMissing(
            path, f"{figures['layers']:,} layers in {len(names):,} tensors", figures["layers"]
        )
    prefix = _find_prefix(table, names, path)
    known = set(names)
    parts: dict[str, Part] = {}
    absent = []
    for name, part, required in _expected(table, prefix, figures, known):
        if name in known:
            parts[name] = part
        elif required:
            absent.append(name)
    if strangers := [name for name in names if name not in parts]:
        raise refusals.UnexplainedNames(
            path,
            f"the family {model_type} does not explain {len(strangers)} of {len(names)} names: "
            f"{refusals.shorten(strangers)}",
            strangers,
        )
    if absent:
        raise refusals.WeightsMissing(
            path, f"the family {model_type} also needs {len(absent)} tensors: {', '.join(absent[:5])}", absent
        )
    tied, unembedding = _tie(table, prefix, figures, config, known, path)
    return Family(
        table=table,
        prefix=prefix,
        figures=MappingProxyType(figures),
        config=config,
        parts=MappingProxyType({name: parts[name] for name in names}),
        tied=MappingProxyType(tied),
        unembedding=unembedding,
        path=path,
    )


def read_figures(config: Mapping[str, Any], path: Path | str = "config.json") -> tuple[Table, dict[str, Any]]:
    """Look up the family and its canonical figures, with the family's defaults, and refuse those that cannot be.

    Raises
    ------
    UnknownFamily
        No table describes this `model_type`.
    ConfigInvalid
        A figure is absent or cannot be.

    Examples
    --------
    >>> table, figures = read_figures({"model_type": "gpt2", "n_embd": 4, "n_head": 2, "n_layer": 1})
    >>> table.fused, figures["key_dim"]
    ('parts', 2)
    """
    path, model_type = Path(path), config.get("model_type")
    if not isinstance(model_type, str) or model_type not in TABLES:
        raise refusals.UnknownFamily(
            path, f"model_type {str(model_type)[:80]!r} is none of {', '.join(TABLES)}", model_type
        )
    table = TABLES[model_type]
    figures: dict[str, Any] = {}
    for figure, (key, default) in table.keys.items():
        value = config.get(key) if key else None
        value = default if value is None else value
        if default is None or (isinstance(default, int) and not isinstance(default, bool)):
            fits = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            kind = "a whole number"
        elif isinstance(default, bool):
            fits, kind = isinstance(value, bool), "true or false"
        else:
            fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
            kind = "a positive number"
        if not fits:
            raise refusals.ConfigInvalid(path, f"{key} is {str(value)[:80]!r}, not {kind}", value)
        figures[figure] = value
    width, heads = figures["width"], figures["heads"]
    figures["key_dim"] = figures.get("key_dim") or (width // heads if heads else 0)
    figures["key_value_heads"] = figures.get("key_value_heads") or heads
    if not (width and heads and figures["key_dim"]):
        raise refusals.ConfigInvalid(path, f"width {width} and {heads} heads", (width, heads))
    if width % heads and not config.get(table.keys.get("key_dim", ("", 0))[0]):
        raise refusals.ConfigInvalid(path, f"the width {width} is no multiple of the {heads} heads", (width, heads))
    if heads % figures["key_value_heads"]:
        groups = figures["key_value_heads"]
        raise refusals.ConfigInvalid(path, f"{heads} heads cannot share {groups} key-value heads", groups)
    return table, figures


def _find_prefix(table: Table, names: Iterable[str], path: Path) -> str:
    """Find the prefix under which the first module of the body, which every model has, is present."""
    first = table.body[0]
    known = set(names)
    anchors = {prefix: prefix + first.path + ("" if first.sort == "bare" else ".weight") for prefix in table.prefixes}
    found = [prefix for prefix, anchor in anchors.items() if anchor in known]
    if not found:
        raise refusals.UnexplainedNames(
            path,
            f"the family {table.model_type} begins with {' or '.join(anchors.values())}, none of which is among "
            f"{refusals.shorten(sorted(known)) or 'no names'}",
            sorted(known),
        )
    return found[0]


def _holds(condition: Condition, figures: Mapping[str, Any]) -> bool:
    return condition != NEVER and all(
        not figures[key[1:]] if key.startswith("!") else figures[key] for key in condition
    )


def _expected(
    table: Table, prefix: str, figures: Mapping[str, Any], known: set[str]
) -> Iterator[tuple[str, Part, bool]]:
    """Go through every name the family may hold: the name, its meaning, and whether it has to be there."""
    for module in table.body:
        for layer in range(figures["layers"]) if "{layer}" in module.path else [None]:
            path = prefix + module.path.replace("{layer}", str(layer))
            yield from _tensors(module, path, layer, table, figures, known)
    for module in table.heads:
        yield from _tensors(module, module.path, None, table, figures, known)


def _tensors(
    module: Module, path: str, layer: int | None, table: Table, figures: Mapping[str, Any], known: set[str]
) -> Iterator[tuple[str, Part, bool]]:
    kind, gain, bias = ("gain" if module.sort == "norm" else "weight"), ".weight", ".bias"
    if module.sort == "norm" and table.renamed_norms and path + ".gamma" in known:
        gain, bias = ".gamma", ".beta"
    if module.sort == "bare":
        gain, kind = "", "buffer" if module.role is Role.BUFFER else "bias" if path.endswith("bias") else "weight"
    layout = ""
    if module.sort == "linear":  # a table's layout is that of its blocks; heads and patches are always (out, in, ...)
        layout = table.layout if "{layer}" in module.path else "out,in"
    # A module that may be absent is absent as a whole: its weight without its bias is half a download.
    open_ended = module.when == MAYBE and not {path + gain, path + bias} & known
    if module.when == MAYBE or _holds(module.when, figures):
        yield path + gain, Part(module.role, kind, layer, layout if kind == "weight" else ""), not open_ended
    if module.sort in ("linear", "norm") and (module.bias == MAYBE or _holds(module.bias, figures)):
        yield path + bias, Part(module.role, "bias", layer, ""), not (open_ended or module.bias == MAYBE)


def _tie(
    table: Table, prefix: str, figures: Mapping[str, Any], config: Mapping[str, Any], known: set[str], path: Path
) -> tuple[dict[str, str], str | None]:
    """Say which weights of heads share the values of others, and which stored weight is the unembedding."""
    architectures = config.get("architectures")
    architectures = architectures if isinstance(architectures, list) else []
    speaks = any(isinstance(name, str) and name.endswith(table.language_heads) for name in architectures)
    tied: dict[str, str] = {}
    unembedding = None
    for number, (head, source) in enumerate(table.ties.items()):
        source = source if source in known else prefix + source
        if figures["tied"] and source in known and (speaks or head in known):
            tied[head] = source
        if number == 0:
            unembedding = tied.get(head, head if head in known else None)
            if speaks and unembedding is None:
                raise refusals.WeightsMissing(path, f"{head} is neither stored nor tied", head)
    return tied, unembedding
