"""The small transformers of characters that are watched while they learn a text, and what the text must hold."""

from __future__ import annotations

from pathlib import Path

from manyheads.data import load_text, read_characters
from manyheads.errors import UsageError
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.inputs import TokenInput
from manyheads.transformer.shape import Shape


def character_config(shape: Shape, vocabulary: int, length: int) -> TransformerConfig:
    """Return a causal pre-norm transformer with ReLU that predicts the next of `vocabulary` characters in a window.

    Examples
    --------
    >>> character_config(Shape(4, 2, 1), 30, length=16).read_out
    'token'
    """
    return TransformerConfig(
        shape,
        TokenInput(vocabulary),
        length=length,
        outputs=vocabulary,
        causal=True,
        read_out="token",
        activation="relu",
    )


def digest_text(path: Path | None, length: int, before: int = 0) -> dict[str, str]:
    """Return what a study on a text depends on: its SHA-256, the default text included, which Python's releases change.

    Parameters
    ----------
    path
        As for `manyheads.data.load_text`.
    length
        Characters of a window.
    before
        Characters that must lie before the first window to be tested on.

    Raises
    ------
    UsageError
        The text cannot be read, or the tenth of it that is tested on holds no window and the character that follows.

    Examples
    --------
    >>> list(digest_text(None, length=64))
    ['text']
    """
    text, reach = load_text(path), length + before
    held_out = len(read_characters(path)[1].validation)
    if held_out <= reach:
        raise UsageError(
            f"{text.name} leaves {held_out} characters to test on: give a text of more than {10 * (reach + 1)} "
            "characters, or a shorter --length"
        )
    return {"text": text.sha256}
