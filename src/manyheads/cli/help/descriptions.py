"""Descriptions of studies and of their flags, kept in a file: to import a study takes seconds."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from manyheads.cli.flags import Flag, flags_of, written
from manyheads.errors import UsageError
from manyheads.study.registry import STUDIES, load

if TYPE_CHECKING:
    from manyheads.study.base import Study

DESCRIPTIONS = Path(__file__).with_name("descriptions.json")  # renewed by tests/studies/test_registered_studies.py


class Description(NamedTuple):
    """Text that shows a study, its flags with the defaults as written, and its claims at the smallest size."""

    text: str
    flags: list[Flag]
    claims: list[str]


def kept_description(name: str) -> Description | None:
    """Return what is kept of a registered study, whose import takes seconds; None if its file has changed."""
    kept = json.loads(DESCRIPTIONS.read_text(encoding="utf-8")).get(name)
    if not kept or kept["file"] != hash_of_file(name):
        return None
    return Description(kept["text"], [Flag(*each) for each in kept["flags"]], kept["claims"])


def description_to_keep(name: str, claims: list[str]) -> dict[str, Any]:
    """Return what is kept of a registered study and its claims, with the hash of the file that defines it."""
    kind = load(name)
    flags = [flag._replace(default=written(flag.default)) for flag in flags_of(kind, default_of(kind))]
    kept = {"text": describe(kind), "flags": [list(flag) for flag in flags], "claims": claims}
    return {"file": hash_of_file(name)} | kept


def hash_of_file(name: str) -> str:
    """Return the hash of the file that defines a registered study."""
    import hashlib  # takes longer than what `study list` reads

    module = STUDIES[name].place.partition(":")[0].split(".")[1:]
    path = Path(__file__).parents[2].joinpath(*module).with_suffix(".py")
    return hashlib.sha256(path.read_text(encoding="utf-8").encode()).hexdigest()[:16]


def describe(cls: type[Study]) -> str:
    """Return claim, source, flags and size of a study, a paragraph a line."""
    from manyheads.study.base import configuration
    from manyheads.study.store.identity import plain

    study, full = default_of(cls), default_of(cls, full=True)
    lines = [study.name, "", f"claim    {study.claim}", f"source   {study.source}", ""]
    texts = {flag.name[2:].replace("-", "_"): flag.help for flag in flags_of(cls, study)}
    for text, group in groupby(configuration(study).items(), lambda setting: texts.get(setting[0], "")):
        for name, value in group:
            paper = plain(getattr(full, name), name)
            extra = "" if paper == plain(value, name) else f"   (--full: {paper})"
            lines.append(f"  --{name.replace('_', '-')} = {plain(value, name)}{extra}")
        if text:  # flags may share one
            lines.append(f"{' ' * 6}{text}")
    lines.append(f"\ncells    {len(study.cells())} (--full: {len(full.cells())})")
    costs = [study.flops(cell) for cell in study.cells()]
    if known := [cost for cost in costs if cost is not None]:
        lines.append(f"cost     {sum(known):.3g} matrix-multiply FLOPs for each replicate of all cells")
    return "\n".join(lines)


def default_of(kind: type[Study], full: bool = False) -> Study:
    """Return a study with its default configuration, or at full size."""
    try:
        return kind.full() if full else kind()
    except TypeError as error:
        if full and "full" in vars(kind):
            raise
        raise UsageError(
            f"{kind.__name__} cannot be constructed without arguments ({error}): give every field a default"
        ) from error
