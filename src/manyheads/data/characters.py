"""Characters or words as tokens: a vocabulary by frequency, the split into training and validation, both of a file.

Texts for character models: Python's own documentation, or a file of the user's.
"""

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from manyheads._arrays import as_integers, takes_arrays
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


UNKNOWN = "\ufffd"  # Unicode's replacement character, always token 0
WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Vocabulary:
    """Characters and the tokens that stand for them."""

    symbols: tuple[str, ...]  # by token; the first is the replacement character and stands for every other one

    def __len__(self) -> int:
        return len(self.symbols)

    @cached_property
    def _token_of(self) -> np.ndarray:
        points = [ord(symbol) for symbol in self.symbols]
        table = np.zeros(max(points) + 1, np.int32)
        table[points] = np.arange(len(points), dtype=np.int32)
        return table

    def encode(self, content: str) -> np.ndarray:
        """Turn characters into tokens, shape (len(content),), int32; an unknown character becomes token 0.

        Examples
        --------
        >>> Vocabulary(("\ufffd", "a", "b")).encode("abba?").tolist()
        [1, 2, 2, 1, 0]
        """
        points, table = np.frombuffer(content.encode("utf-32-le", "surrogatepass"), "<u4"), self._token_of
        known = points < len(table)
        return np.where(known, table[np.where(known, points, 0)], np.int32(0))

    @takes_arrays
    def decode(self, tokens: np.ndarray) -> str:
        """Turn tokens into characters.

        Examples
        --------
        >>> Vocabulary(("\ufffd", "a", "b")).decode(np.array([2, 1, 0]))
        'ba\ufffd'
        """
        flat = as_integers(tokens, "tokens").ravel()
        if flat.size and not (flat.min() >= 0 and flat.max() < len(self)):
            raise UsageError(f"tokens run from {flat.min()} to {flat.max()}: this vocabulary has 0 to {len(self) - 1}")
        return "".join(self.symbols[token] for token in flat)


def build_vocabulary(content: str, size: int | None = None) -> Vocabulary:
    """Order the characters of a text by falling frequency, ties by code point, and keep `size` - 1, or all of them."""
    if size is not None and size < 2:
        raise UsageError(f"size={size}: a vocabulary holds the unknown symbol and at least one more")
    counts = Counter(content)
    counts.pop(UNKNOWN, None)
    order = sorted(counts, key=lambda symbol: (-counts[symbol], ord(symbol)))
    return Vocabulary((UNKNOWN, *order[: None if size is None else size - 1]))


class Split(NamedTuple):
    """Two contiguous parts of a text, so that no window of one overlaps a window of the other."""

    train: np.ndarray
    validation: np.ndarray


@takes_arrays
def split_tokens(tokens: np.ndarray, fraction: float = 0.1) -> Split:
    """Cut off the last `fraction` of the tokens for validation."""
    if not 0 < fraction < 1:
        raise UsageError(f"fraction={fraction}: the part for validation lies between 0 and 1")
    cut = len(tokens) - round(fraction * len(tokens))
    if cut == 0 or cut == len(tokens):
        raise UsageError(f"{len(tokens)} tokens leave one part empty at fraction={fraction}: give a longer text")
    return Split(tokens[:cut], tokens[cut:])


@lru_cache(maxsize=4)
def read_characters(path: Path | None = None, most: int = 96) -> tuple[Vocabulary, Split]:
    """Read a text as tokens, once in a process: nine tenths to train on, the last tenth to be tested on.

    The vocabulary is that of the part that is trained on; beyond `most` tokens characters become the unknown one.

    Examples
    --------
    >>> vocabulary, (train, validation) = read_characters()
    >>> len(vocabulary), round(len(train) / len(validation))
    (96, 9)
    """
    content = load_text(path).content
    cut = int(0.9 * len(content))
    vocabulary = build_vocabulary(content[:cut], most)
    return vocabulary, split_tokens(vocabulary.encode(content), 0.1)


def cut_words(content: str) -> list[str]:
    """Cut a text into words, in lower case, and single marks; white space is dropped.

    Examples
    --------
    >>> cut_words("A list, x[0].")
    ['a', 'list', ',', 'x', '[', '0', ']', '.']
    """
    return WORD.findall(content.lower())


@lru_cache(maxsize=2)
def read_words(path: Path | None = None, most: int = 512) -> tuple[tuple[str, ...], Split]:
    """Read a text as words, once in a process: nine tenths to train on, the last tenth to be tested on.

    The vocabulary is that of the part that is trained on; beyond `most` tokens words become token 0.

    Examples
    --------
    >>> vocabulary, (train, validation) = read_words(most=100)
    >>> len(vocabulary), int(train.max()), round(len(train) / len(validation))
    (100, 99, 9)
    """
    if most < 2:
        raise UsageError(f"most={most}: expected two tokens or more, of which one stands for rarer words")
    words = cut_words(load_text(path).content)
    counts = Counter(words[: int(0.9 * len(words))])
    kept = sorted(counts, key=lambda word: (-counts[word], word))[: most - 1]
    number = {word: token for token, word in enumerate(kept, start=1)}
    tokens = np.array([number.get(word, 0) for word in words], np.int32)
    return ("", *kept), split_tokens(tokens, 0.1)
