"""Flags of commands and studies as data: names, values, defaults and one line on each, read off dataclasses."""

import dataclasses
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from manyheads._constraints import Constraint, constrained
from manyheads.cli.help.wrapping import terminal_width

ANY = Constraint()


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


WORDS = {"(Optional)?[iI]nt": "INT", "float": "FLOAT", "str": "TEXT", "Path": "PATH", "bool": "", "Switch": ""}


def flag(default: Any, about: str = "", **rules: Any) -> Any:
    """Declare a flag with one line on it, without a full stop, and what its value may be: rules of a `Constraint`."""
    return constrained(default, Constraint(**rules) if rules else None, about=about)


def check_flags(command: Any) -> None:
    """Check the flags that are declared with rules, apart from those that are absent; UsageError for the first."""
    for each in dataclasses.fields(command):
        value, rule = getattr(command, each.name), each.metadata.get("constraint", ANY)
        if value is not None and rule != ANY:
            kind = get_args(each.type)[0] if get_origin(each.type) is Annotated else each.type
            rule.kept(f"--{each.name.replace('_', '-')}", value, kind)


def flags_of(kind: Any, default: object = None) -> list[Flag]:
    """Return the flags of a dataclass; those of nested ones are ``--outer.inner``."""
    found = []
    for field in (each for each in dataclasses.fields(kind) if each.name not in positionals(kind)):
        value, about = getattr(default, field.name, None), without_markup(field.metadata.get("about", ""))
        name = f"--{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value):
            inner = flags_of(type(value), value)
            found += [flag._replace(name=f"{name}.{flag.name[2:]}") for flag in inner]
        else:
            text = f"{about[0].upper()}{about[1:]}." if about else ""
            found.append(Flag(name, _value(str(field.type)), value, text))
    return found


def positionals(kind: Any) -> set[str]:
    """Return the names of what a command takes without a flag."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    named = vars(sys.modules[kind.__module__])  # where an annotation may be the name of a type
    return {each.name for each in fields if "Positional" in str(named.get(str(each.type), each.type))}


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
    names = sorted(set(known)) if typed else []
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


def written(default: object) -> str | None:
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
