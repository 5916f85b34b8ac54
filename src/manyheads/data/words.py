"""Words as tokens: words and marks of a text, a vocabulary of the most frequent, and the split of a file."""

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np

from manyheads.data.characters import Split, split_tokens
from manyheads.data.texts import load_text
from manyheads.errors import UsageError

WORD = re.compile(r"\w+|[^\w\s]")


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
