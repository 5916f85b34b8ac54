"""Flags from dataclasses (tyro), with wrong use said in one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from typing import Any

from manyheads.errors import UsageError


def parse_flags(kind: Any, arguments: Sequence[str], program: str, description: str | None = None) -> Any:
    """Return an instance of a dataclass from command-line words.

    Raises
    ------
    UsageError
        Words that do not parse; the message is tyro's, without its frame.
    SystemExit
        Help was asked for and has been printed.
    """
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=list(arguments), prog=program, description=description)
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
        if not line or set(line) <= {"─"}:
            break
        paragraph.append(line)
    return " ".join(paragraph) or "these arguments cannot be read"
