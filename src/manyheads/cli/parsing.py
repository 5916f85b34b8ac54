"""Flags from dataclasses (tyro), with wrong use said in one line."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from manyheads.errors import UsageError

# Flags that may be left out are annotated `Annotated[Optional[X], ABSENT]`: then no help ends in "(default: None)".
# Optional[X] and not X | None, and for a tuple Union[None, tuple[X, ...]] with None in front: elsewise tyro checks the
# default with typeguard, which imports asyncio and unittest.mock, a third of the time that a help may take.
ABSENT = tyro.conf.arg(help_behavior_hint="")


def parse_command(kind: Any, arguments: Sequence[str], program: str) -> Any:
    """Return a command of ours from its words: `--flag` without a `--no-flag`, and None is left out, not written."""
    return parse_flags(kind, arguments, program, config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone))


def parse_flags(
    kind: Any, arguments: Sequence[str], program: str, description: str | None = None, config: Sequence[Any] = ()
) -> Any:
    """Return an instance of a dataclass from command-line words.

    Raises
    ------
    UsageError
        Words that do not parse; the message is tyro's, without its frame.
    SystemExit
        Help was asked for and has been printed.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=list(arguments), prog=program, description=description, config=tuple(config))
    except SystemExit as leaving:
        if leaving.code in (0, None):
            raise
        text = _first_paragraph(complaint.getvalue())
        raise UsageError(f"{text}; '{program} --help' shows the flags") from None


def _first_paragraph(framed: str) -> str:
    """Return the first paragraph inside tyro's frame as one line."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip(" │╭╮╰╯") for line in framed.splitlines()[1:]]
    paragraph: list[str] = []
    for line in lines:
        if line and not set(line) <= {"─", "-"}:  # in a terminal without Unicode the heading has a rule of its own
            paragraph.append(line)
        elif paragraph:
            break
    return _without_none(" ".join(paragraph)) or "these arguments cannot be read"


def _without_none(complaint: str) -> str:
    """Leave out the choice 'None' that tyro adds for a flag that may be absent, and the random order that it brings."""

    def choices(found: re.Match[str]) -> str:
        names = re.findall(r"'([^']*)'", found[1])
        names = sorted(set(names) - {"None"}) if "None" in names else names
        return f"; choose one of {', '.join(names)}"

    return re.sub(r"\. Expected one of \((.*)\)\.?$", choices, complaint)


def existing(store: Path) -> Path:
    """Return the folder of a store.

    Raises
    ------
    UsageError
        It does not exist.
    """
    if not store.exists():
        raise UsageError(f"{store}: no such folder; give the one that was passed as --store, or one run's own folder")
    return store


def load_function(target: str) -> Any:
    """Return the function that package.module:function names.

    Raises
    ------
    UsageError
        It cannot be imported, or is no function.
    """
    module, _, path = target.partition(":")
    # As with `python -m`, modules of the current folder can be named; the folder is not left on the path.
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{target}: cannot be imported ({error}); expected package.module:function") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise UsageError(f"{target}: {type(found).__name__} cannot be called")
    return found
