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
from pathlib import Path

from manyheads.models.config import ModelConfig
from manyheads.models.families import FAMILIES
from manyheads.models.families.codebases import CODEBASES, USUAL
from manyheads.models.modules import ALWAYS, MAYBE, NEVER, Family, Module, Role
from manyheads.models.parameters import expected_names, match_names
from manyheads.models.parts import PARTS, UNDERIVED

ENDINGS = ("weight", "bias", "")
OPTIONAL = (Role.POSITION, Role.SEGMENT, Role.EMBEDDING_NORM, Role.FINAL_NORM, Role.UNEMBEDDING)


@dataclass(frozen=True)
class NamedParts:
    """Parts of parameters by name, and what a table says of the blocks."""

    family: Family
    parts: Mapping[str, tuple[str, ...]]  # of the names that are explained
    strangers: int  # how many are not
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
    return list(readings.values())[::-1] or sorted(found, key=lambda each: each.strangers + len(each.absent))[:1]


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


def _config(family: Family, layers: int = 1) -> ModelConfig:
    return ModelConfig(family, {"layers": layers, "tied": False}, {}, Path("model"))


def _match(family: Family, names: Sequence[str]) -> NamedParts | None:
    """Read all names by one family; None if its embedding is not there."""
    blocks = next(each.path for each in family.body if "{layer}" in each.path).partition("{layer}")[0]
    anchor = next(expected_names(_config(family), "", set()))[0]
    anchors = [each + anchor for each in sorted({"", *family.prefixes}, key=len, reverse=True)]
    ends = ((name, each) for each in anchors for name in names if f".{name}".endswith(f".{each}"))
    if (found := next(ends, None)) is None:
        return None
    # What stands before all names, such as the attribute of a module that holds the model, says nothing.
    outer, prefix = found[0].removesuffix(found[1]), found[1].removesuffix(anchor)
    short = {family.saved_name(name.removeprefix(outer)): name for name in names}
    layers = {layer[1] for name in short if (layer := re.match(rf"{re.escape(prefix + blocks)}(\d+)\.", name))}
    roles, absent = match_names(_config(family, len(layers)), prefix, set(short))
    parts = {short[name]: role.parts(name) for name, role in roles.items()}
    known = {name: each for name, each in parts.items() if all(part in PARTS or part in UNDERIVED for part in each)}
    normed = any(role.layer is not None and role.role.sort == "norm" for role in roles.values())
    needed = [join_layers(name) for name, role in absent.items() if normed or role.role.sort != "norm"]
    last = any(role.role is Role.FINAL_NORM for role in roles.values())
    post = family.norm_place == "post" or (family.norm_place != "pre" and not last)
    return NamedParts(family, known, len(names) - len(known), tuple(dict.fromkeys(needed)), post)


@cache
def _tails() -> dict[str, dict[str, str]]:
    """Return the last pieces of the modules of all families, two or one, and their parts, by the ending of a name."""
    found: dict[str, dict[str, str]] = {ending: {} for ending in ENDINGS}
    for family in (USUAL, *_open_families()):
        for name, role, _ in expected_names(_config(family), "", set()):
            part = "+".join(role.parts(name))
            if part.partition("+")[0] in PARTS:
                ending, *tails = _split(name)
                for tail in tails:
                    found[ending].setdefault(tail, part)
    return found


def _split(name: str) -> tuple[str, str, str]:
    """Return the ending of a name, and the last pieces before it, two and one."""
    *pieces, ending = name.split(".")
    pieces, ending = (pieces, ending) if ending in ENDINGS else ([*pieces, ending], "")
    return ending, ".".join(pieces[-2:]), ".".join(pieces[-1:])


def guess_part(name: str) -> str:
    """Return the part of the nearest name of a family; empty if none is near."""
    ending, *tails = _split(name)
    known = _tails()[ending]
    near = [each for tail in tails for each in get_close_matches(tail, known, 1, 0.75)]
    found = [tail for tail in tails if tail in known] or near
    return "" if tails[1].isdigit() or not found else known[found[0]]  # a place in a sequence says nothing


def propose_roles(names: Iterable[str], known: Mapping[str, Sequence[str]]) -> str:
    """Return a role map of all names, with the part of the nearest known name for others, and the list of parts."""
    lines: dict[str, str] = {}
    for name in names:
        part = "+".join(known.get(name, ())) or guess_part(name)
        remark = "" if name in known else "  # guessed" if part else "  # no name is near: choose a part, or freeze it"
        remark = f"  # {UNDERIVED[part]}" if part in UNDERIVED else remark
        joined = re.sub(r"(?<=\.)\d+(?=\.(?!(weight|bias)$))", "*", name)  # not the places of a sequence of matrices
        lines.setdefault(joined, f'    "{joined}": "{part or "?"}",{remark}')
    return "\n".join(["roles = {", *lines.values(), "}", f"parts: {', '.join(PARTS)}"])
