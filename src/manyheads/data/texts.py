"""Texts for character models: Python's own documentation, or a file of the user's."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from manyheads._overview import ArraysAsShapes
from manyheads.errors import FileRefused, UsageError

DEFAULT_NAME = "pydoc_data.topics"


@dataclass(frozen=True, repr=False)
class Text(ArraysAsShapes):
    """A text with the name and the digest by which a run records what it was trained on."""

    name: str  # of the module for the default text, of the file for any other
    content: str
    sha256: str  # hexadecimal, of the content in UTF-8


def load_text(path: str | Path | None = None) -> Text:
    """Read a text file, or the default text that every Python installation carries.

    The default is the concatenation of the pages of `pydoc_data.topics` (the language reference behind `help()`) in
    the order of their sorted keys. It changes slightly from one Python release to the next, which its digest shows.

    Raises
    ------
    UsageError
        The path names no file that can be read, or the file is empty.
    FileRefused
        The file is not text in UTF-8: it does not decode, or holds a null character.

    Examples
    --------
    >>> text = load_text()
    >>> text.name, len(text.content) > 300_000, len(text.sha256)
    ('pydoc_data.topics', True, 64)
    """
    if path is None:
        from pydoc_data.topics import topics  # here: half a megabyte of strings that only a training run needs

        return make_text(DEFAULT_NAME, "".join(topics[key] for key in sorted(topics)))
    if Path(path).exists() and not Path(path).is_file():
        raise UsageError(f"the text {str(path)!r} cannot be read: it is no regular file; give a file in UTF-8")
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"the text {str(path)!r} cannot be read ({error.strerror}): give a file in UTF-8") from error
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        given = f"the text {str(path)!r} is not UTF-8 (byte {error.start} of {len(raw)})"
        raise FileRefused(f"{given}: convert it to UTF-8 first") from error
    if "\0" in content:
        raise FileRefused(f"the text {str(path)!r} holds a null character at {content.index(chr(0))}: give a text")
    return make_text(Path(path).name, content)


def make_text(name: str, content: str) -> Text:
    """Name a string and take its digest."""
    if not content.strip():
        raise UsageError(f"the text {name!r} is empty: give one with something to learn in it")
    return Text(name, content, hashlib.sha256(content.encode()).hexdigest())
