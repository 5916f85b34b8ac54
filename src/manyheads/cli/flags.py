"""Flags of commands and studies as data: names, values, defaults and one line on each, read off dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from manyheads.cli.help.wrapping import terminal_width


class Flag(NamedTuple):
    """One flag: its name, what follows it, its default (None: none is shown), and one line on it."""

    name: str
    value: str
    default: Any
    help: str

    @property
    def shown(self) -> str:
        """Name and value, as typed."""
        return f"{self.name} {self.value}".strip()


WORDS = {"int": "INT", "float": "FLOAT", "str": "TEXT", "Path": "PATH", "bool": "", "Switch": ""}


def flags_of(kind: Any, default: Any = None) -> list[Flag]:
    """Return the flags of a dataclass; those of nested ones are ``--outer.inner``."""
    texts, found = _attributes(kind.__doc__), []
    for field in dataclasses.fields(kind):
        if field.name in positionals(kind):
            continue
        value = getattr(default, field.name, None)
        name = f"--{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value):
            inner = flags_of(type(value), value)
            found += [flag._replace(name=f"{name}.{flag.name[2:]}") for flag in inner]
        else:
            found.append(Flag(name, _value(str(field.type)), value, texts.get(field.name, "")))
    return found


def positionals(kind: Any) -> set[str]:
    """Return the names of what a command takes without a flag."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name for field in fields if "Positional" in str(field.type)}


def list_flags(flags: Sequence[Flag]) -> str:
    """Return one line a flag, cut to the width of the terminal, the default in brackets."""
    room = terminal_width(120)
    width = min(max(len(flag.shown) for flag in flags), 30)
    return "\n".join(_line(flag, width, room) for flag in flags)


def suggest(typed: str, known: Iterable[str]) -> str:
    """Return the hint on what was meant: the nearest known words, or nothing.

    Examples
    --------
    >>> suggest("--optimzer", ["--optimizer", "--json"]), suggest("zebra", ["--json"])
    ('; did you mean --optimizer?', '')
    """
    names = sorted(set(known))
    near = [name for name in names if name.startswith(typed)][:3] or difflib.get_close_matches(typed, names, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def without_markup(text: str) -> str:
    """Return the text of a docstring as a terminal shows it: without backticks, words that belong together in quotes.

    Examples
    --------
    >>> print(without_markup('``"digits"`` for `images`; see `manyheads study list`'))
    "digits" for images; see 'manyheads study list'
    """
    text = re.sub(r"``(.+?)``", r"\1", text)
    return re.sub(r"`([^`]+)`", lambda found: f"'{found[1]}'" if " " in found[1] else found[1], text)


def written(default: Any) -> str | None:
    """Return a default as it is typed; None for that of a flag that is absent or off."""
    if default is None or default is False:
        return None
    return " ".join(map(str, default)) if isinstance(default, tuple | list) else str(default)


def _line(flag: Flag, width: int, room: int) -> str:
    default = f" [{written(flag.default)}]" if written(flag.default) is not None else ""
    head = f"  {flag.shown:<{width}}  "
    text = flag.help if len(head) + len(flag.help) + len(default) <= room else flag.help.partition(". ")[0]
    space = room - len(head) - len(default)
    if len(text) > space:
        text = f"{text[: max(space - 1, 0)]}…"
    return f"{head}{text}{default}"[:room]


def _value(annotation: str) -> str:
    """Return the word for the value of a flag, from its annotation as it is written."""
    if choices := re.search(r"Literal\[(.*?)\]", annotation):
        return "|".join(re.findall(r"""["'](.*?)["']""", choices[1]))
    several = " ..." if "tuple[" in annotation else ""
    kinds = [word for name, word in WORDS.items() if re.search(rf"\b{name}\b", annotation)]
    return f"{kinds[0]}{several}" if kinds else "VALUE"


def _attributes(documented: str | None) -> dict[str, str]:
    """Return the first paragraph on each attribute of a docstring; attributes may share an entry."""
    _, _, entries = inspect.cleandoc(documented or "").partition("\nAttributes\n----------\n")
    found = {}
    for names, text in re.findall(r"(?m)^(\S.*)\n((?:(?: .*)?(?:\n|$))*)", entries):
        for name in names.split(", "):
            found[name] = without_markup(" ".join(text.split()))
    return found
