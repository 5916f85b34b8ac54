"""Text as wide as the terminal: paragraphs, lists of two columns, and command lines that can still be pasted."""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

NARROWEST, WIDEST = 40, 100
HEAD = re.compile(r"\w+ {2,}|  --|\s*")  # of a line that goes on under its text: a word before a column, or a flag


def terminal_width(widest: int = WIDEST) -> int:
    """Return the columns that text may take: those of the terminal, within limits."""
    return max(NARROWEST, min(widest, shutil.get_terminal_size().columns))


def wrap(text: str, indent: str = "", first: str | None = None) -> str:
    """Wrap one paragraph; words longer than a line, such as paths, stay whole."""
    return _fill(text, terminal_width(), indent if first is None else first, indent)


def wrap_lines(text: str) -> str:
    """Wrap every line that is too long, and go on under its text."""
    lines = []
    for line in text.splitlines():
        found = HEAD.match(line)
        head = found[0] if found else ""
        indent = " " * (6 if head == "  --" else len(head))
        lines.append(line if len(line) <= terminal_width() else wrap(line[len(head) :], indent, head))
    return "\n".join(lines)


def fits(table: str) -> bool:
    """Tell whether the head of a table is as narrow as the terminal, if a person reads it."""
    return not is_watched() or len(table.partition("\n")[0]) <= terminal_width(200)


def wrap_output(text: str) -> str:
    """Wrap a result on a terminal, and stack the columns of tables that are too wide; elsewhere keep it for grep."""
    if not is_watched():
        return text
    lines, shown = text.splitlines(), []
    while lines:
        header, *rest = lines
        count = len(re.split(" {2,}", header))
        if rest and set(rest[0]) == {"-"} and len(header) > terminal_width(200):
            body = next((place for place, row in enumerate(rest) if place and not _is_row(row, count)), len(rest))
            shown += [_stacked(header, row) for row in rest[1:body]]
            lines = rest[body:]
        else:
            shown.append(wrap_lines(header))
            lines = rest
    return "\n".join(shown)


def _is_row(line: str, count: int) -> bool:
    return 1 < len(re.split(" {2,}", line)) <= count


def _stacked(header: str, row: str) -> str:
    (_, name), *cells = zip(*(re.split(" {2,}", line.strip()) for line in (header, row)), strict=False)
    return f"{name}\n{two_columns(cells, '    ')}"


def two_columns(rows: Iterable[Sequence[str]], indent: str = "") -> str:
    """Return names with a text beside each, or below it where the terminal is narrow."""
    rows = list(rows)
    watched, room = is_watched(), terminal_width(200)
    width = max((len(name) for name, _ in rows), default=0)
    margin = f"{indent}{' ' * (width + 3)}"
    beside = not watched or room - len(margin) >= min(30, max((len(text) for _, text in rows), default=0))
    lines = []
    for name, text in rows:
        head = f"{indent}{name:<{width}}   "
        if beside:
            lines.append(_fill(text, room, head, margin) if watched else head + text)
        else:
            lines += [f"{indent}{name}", _fill(text.strip(), room, f"{indent}    ", f"{indent}    ")]
    return "\n".join(lines)


def command_line(line: str, indent: str = "  ") -> str:
    """Return a command, continued after a backslash where it is longer than the terminal is wide."""
    if len(indent) + len(line) <= terminal_width():
        return f"{indent}{line}"
    lines = _fill(line, terminal_width() - 2, indent, f"{indent}    ").splitlines()
    return " \\\n".join(lines)


def is_watched() -> bool:
    """Tell whether a person reads standard output: on a terminal, or at a width that was asked for."""
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def _fill(text: str, width: int, first: str, indent: str) -> str:
    wrapper = textwrap.TextWrapper(width, first, indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)
