"""Roles of parameters by their names alone: the tables of all families, whatever the settings of a model are.

A family explains a model if it has a module for every parameter, and the model has what makes its blocks. Tables of
positions and the last norm may be missing, and norms if blocks have none: an own model differs there. Biases are
optional everywhere. What a name cannot tell, the init and the forward pass, is left open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from pathlib import Path

from manyheads.models.config import ModelConfig
from manyheads.models.families import FAMILIES
from manyheads.models.families.codebases import CODEBASES
from manyheads.models.modules import ALWAYS, MAYBE, NEVER, Family, Module, Role
from manyheads.models.parameters import ParameterRole, match_names
from manyheads.models.parts import PARTS, UNDERIVED

OPTIONAL = (Role.POSITION, Role.SEGMENT, Role.EMBEDDING_NORM, Role.FINAL_NORM, Role.UNEMBEDDING)


@dataclass(frozen=True)
class NamedParts:
    """Parts of parameters by name, and what a table says of the blocks."""

    family: Family
    parts: Mapping[str, tuple[str, ...]]  # of the names that are explained
    strangers: tuple[str, ...]  # names that are not
    absent: tuple[str, ...]  # names that have to be there and are not
    post_norm: bool  # whether the family's blocks normalize after adding to the stream


def join_layers(name: str) -> str:
    """Replace the numbers of layers in a name.

    Examples
    --------
    >>> join_layers("transformer.h.11.attn.c_proj")
    'transformer.h.*.attn.c_proj'
    """
    return re.sub(r"(?<=[.\[])\d+(?=[.\]]|$)", "*", name)


def match_families(names: Iterable[str]) -> list[NamedParts]:
    """Return what explains every name, one for each distinct reading; else the family that comes nearest."""
    names = list(names)
    found = [each for family in _open_families() if (each := _match(family, names))]
    complete = [each for each in found if not each.strangers and not each.absent]
    readings = {tuple(sorted(each.parts.items())): each for each in reversed(complete)}
    return list(readings.values())[::-1] or sorted(found, key=lambda each: len(each.strangers) + len(each.absent))[:1]


@cache
def _open_families() -> tuple[Family, ...]:
    """Return the families whose shapes tensors tell, with all conditions of their settings open."""
    return tuple(
        replace(family, body=tuple(map(_open, family.body)), heads=tuple(map(_open, family.heads)))
        for family in (*CODEBASES, *FAMILIES.values())
        if "experts" not in family.settings
    )


def _open(module: Module) -> Module:
    when = module.when if module.when in (ALWAYS, NEVER) and module.role not in OPTIONAL else MAYBE
    return replace(module, bias=MAYBE, when=when)


def _match(family: Family, names: Sequence[str]) -> NamedParts | None:
    """Read all names by one family; None if its embedding is not there."""
    first, blocks = family.body[0], next(each.path for each in family.body if "{layer}" in each.path)
    anchor = first.path + ("" if first.sort == "bare" else ".weight")
    # What stands before all names, such as the attribute of a module that holds the model, says nothing.
    shared = _shared_prefix(names)
    short = {family.saved_name(name[len(shared) :]): name for name in names}
    prefix = next((each for each in ("", *family.prefixes) if each + anchor in short), None)
    if prefix is None:
        return None
    stem = re.escape(prefix + blocks.partition("{layer}")[0])
    layers = {found[1] for name in short if (found := re.match(rf"{stem}(\d+)\.", name))}
    config = ModelConfig(family, {"layers": len(layers), "tied": False}, {}, Path("model"))
    roles, absent = match_names(config, prefix, set(short))
    parts = {short[name]: role.parts(name) for name, role in roles.items()}
    known = {name: each for name, each in parts.items() if all(part in PARTS or part in UNDERIVED for part in each)}
    normed = any(role.layer is not None and role.role.sort == "norm" for role in roles.values())
    needed = [name for name, role in absent.items() if normed or role.role.sort != "norm"]
    place, last = family.norm_place, any(role.role is Role.FINAL_NORM for role in roles.values())
    post = place == "post" or (place != "pre" and not last)
    strangers = tuple(each for each in names if each not in known)
    return NamedParts(family, known, strangers, tuple(dict.fromkeys(map(join_layers, needed))), post)


def _shared_prefix(names: Sequence[str]) -> str:
    """Return the pieces, with their dots, that all names begin with."""
    pairs = zip(*(name.split(".")[:-1] for name in (min(names), max(names))), strict=False)
    return "".join(f"{one}." for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@cache
def _tails() -> dict[str, dict[str, str]]:
    """Return the last pieces of the modules of all families, two or one, and their parts, by the ending of a name."""
    found: dict[str, dict[str, str]] = {"weight": {}, "bias": {}, "": {}}
    for family in _open_families():
        for module in (*family.body, *family.heads):
            kind = "gain" if module.sort == "norm" else "bias" if module.is_bias else "weight"
            kinds = {"": kind} if module.sort == "bare" else {"weight": kind, "bias": "bias"}
            for ending, each in kinds.items():
                pieces = re.sub(r".*\{layer\}\.", "", module.path).split(".")
                part = "+".join(ParameterRole(module.role, each, None, "").parts(module.path))
                if part.partition("+")[0] in PARTS:
                    for length in (2, 1):
                        found[ending].setdefault(".".join(pieces[-length:]), part)
    return found


def guess_part(name: str) -> str:
    """Return the part of the nearest name of a family; empty if none is near.

    Examples
    --------
    >>> guess_part("blocks.3.attention.out_proj.weight"), guess_part("rotary.scale")
    ('output', '')
    """
    path, _, ending = name.rpartition(".")
    tails = _tails().get(ending, {})
    path, tails = (path, tails) if tails else (name, _tails()[""])
    for tail in (".".join(path.split(".")[-length:]) for length in (2, 1)):
        if near := get_close_matches(tail, tails, 1, 0.75):  # the same one first
            return tails[near[0]]
    return ""


def propose_roles(names: Iterable[str], known: Mapping[str, Sequence[str]]) -> str:
    """Return a role map of all names, with the part of the nearest known name for others, and the list of parts."""
    lines: dict[str, str] = {}
    for name in names:
        parts = known.get(name)
        part = "+".join(parts) if parts else guess_part(name)
        remark = "" if parts else "  # guessed" if part else "  # no name is near: choose a part, or freeze it"
        remark = f"  # {UNDERIVED[part]}" if part in UNDERIVED else remark
        lines.setdefault(join_layers(name), f'    "{join_layers(name)}": "{part or "?"}",{remark}')
    return "\n".join(["roles = {", *lines.values(), "}", f"parts: {', '.join(PARTS)}"])
