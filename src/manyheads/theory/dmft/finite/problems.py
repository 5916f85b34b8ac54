"""Problems for the limits from real data: few samples and tokens, so that they can be solved and trained many times."""

from pathlib import Path
from typing import Any

import numpy as np

from manyheads.data import characters, digits, load_digits, load_text
from manyheads.errors import UsageError
from manyheads.theory.dmft.problem import Problem

PATCH = 4  # pixels: an image of 8 x 8 becomes 4 tokens of 16 numbers


def digits_problem(samples: int = 4, tests: int = 2, seed: int = 0, **fields: Any) -> Problem:
    """Tell threes from fives: pooled tokens, squared loss, targets -1 and +1; further fields are those of `Problem`.

    `samples` images are in the loss, `tests` outside it; half of each digit where their number is even.
    """
    pair = digits.select_pair(load_digits(), 3, 5)
    if samples < 1 or tests < 0 or samples + tests > len(pair.labels):
        raise UsageError(f"samples={samples}, tests={tests}: from 1 and 0, together at most {len(pair.labels)}")
    order = np.random.default_rng(seed).permutation(len(pair.labels))
    sides = [order[pair.labels[order] == label] for label in (-1, 1)]
    chosen = np.array([sides[place % 2][place // 2] for place in range(samples + tests)])
    patches = digits.cut_patches(digits.normalize(pair.images[chosen], np.float64), PATCH)
    weights = np.where(np.arange(samples + tests) < samples, 1 / samples, 0.0)
    return Problem(_unit(patches), pair.labels[chosen].astype(np.float64), weights, **fields)


def text_problem(
    samples: int = 3, length: int = 4, vocabulary: int = 8, text: Path | None = None, seed: int = 0, **fields: Any
) -> Problem:
    """Predict the next character: one-hot tokens with their positions, causal, every token reads out, cross-entropy.

    Windows of a UTF-8 file, or of Python's documentation; all but the most frequent characters are one symbol.

    Examples
    --------
    >>> problem = text_problem(steps=4)
    >>> problem.outputs, problem.classes == problem.targets.shape[-1], problem.loss, problem.causal
    (12, True, 'cross-entropy', True)
    """
    words = load_text(text).content
    symbols = characters.build_vocabulary(words, vocabulary)
    tokens = symbols.encode(words)
    if min(samples, length) < 1 or len(tokens) - length < samples:
        raise UsageError(
            f"samples={samples}, length={length}: from 1, and no more windows than a text of {len(tokens)} has"
        )
    starts = np.random.default_rng(seed).choice(len(tokens) - length, samples, replace=False)
    windows = tokens[starts[:, None] + np.arange(length + 1)]  # (samples, length + 1)
    one_hot = np.eye(len(symbols))
    places = np.broadcast_to(np.eye(length), (samples, length, length))
    inputs = np.concatenate([one_hot[windows[:, :-1]], places], axis=-1)
    return Problem(
        _unit(inputs), one_hot[windows[:, 1:]], loss="cross-entropy", read_out="token", causal=True, **fields
    )


def _unit(tokens: np.ndarray) -> np.ndarray:
    """Scale all tokens alike to a mean square of one."""
    return tokens / np.sqrt(np.mean(tokens**2))
