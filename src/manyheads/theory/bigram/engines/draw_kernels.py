"""Compiled draws of keys, queries and tokens: the words of `manyheads.theory.bigram.engines.generator`, bit for bit."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from manyheads.theory.bigram.engines.generator import FIRST, OTHER, QUERY, SECOND, WEYL

Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
Words: TypeAlias = NDArray[np.uint32]
Ints: TypeAlias = NDArray[np.int64]
Word: TypeAlias = np.uint32
Tokens: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16]

HALF, SHIFT = np.uint32(16), np.uint32(15)
FOR_QUERY = np.uint32(QUERY[0])
CHUNK = 512  # words of a pass of `fill_guided`


def finish(h: Word, second: Word) -> Word:
    """Return the word of a counter times multiplier plus first key word."""
    h = np.uint32(np.uint32(np.uint32(h ^ (h >> HALF)) * FIRST) ^ second)
    h = np.uint32(np.uint32(h ^ (h >> SHIFT)) * SECOND)
    return np.uint32(h ^ (h >> SHIFT))


def one_word(counter: int | Word, first: Word, second: Word, multiplier: Word) -> Word:
    """Return one word of `manyheads.theory.bigram.engines.generator.mix`."""
    return finish(np.uint32(np.uint32(np.uint32(counter) * multiplier) + first), second)


def fill_even(tokens: Tokens, outcomes: np.uint64, first: Word, second: Word) -> None:
    """Fill with equally frequent tokens."""
    h = np.uint32(first)
    for t in range(tokens.shape[0]):
        tokens[t] = (np.uint64(finish(h, second)) * outcomes) >> np.uint64(32)
        h = np.uint32(h + WEYL)


def fill_few(tokens: Tokens, bounds: Words, first: Word, second: Word) -> None:
    """Fill with up to four tokens of any distribution: every bound is compared."""
    h = np.uint32(first)
    last = bounds.shape[0] - 1
    one, two, three = bounds[0], bounds[min(1, last)], bounds[min(2, last)]
    has_two, has_three = np.uint8(last >= 1), np.uint8(last >= 2)
    for t in range(tokens.shape[0]):
        word = finish(h, second)
        tokens[t] = np.uint8(word >= one) + (np.uint8(word >= two) & has_two) + (np.uint8(word >= three) & has_three)
        h = np.uint32(h + WEYL)


def fill_guided(
    tokens: Tokens, words: Words, bounds: Words, guide: NDArray[np.uint16], shift: Word, first: Word, second: Word
) -> None:
    """Fill with tokens of any distribution: the guide names the least token of a bucket, comparisons do the rest."""
    h = np.uint32(first)
    for begin in range(0, tokens.shape[0], CHUNK):
        size = min(CHUNK, tokens.shape[0] - begin)
        for i in range(size):
            words[i] = finish(h, second)
            h = np.uint32(h + WEYL)
        for i in range(size):
            token = np.int64(guide[words[i] >> shift])
            while token < bounds.shape[0] and words[i] >= bounds[token]:
                token += 1
            tokens[begin + i] = token


def count_reached(bounds: Words, word: Word) -> int:
    """Return the outcome of one word by bisection: the number of bounds not above it."""
    low, high, target = 0, bounds.shape[0], np.uint64(word)
    while low < high:
        middle = (low + high) // 2
        if bounds[middle] <= target:
            low = middle + 1
        else:
            high = middle
    return low


def draw_keys(roots: Words, step: int, keys: Words, queries: Ints, order: Ints, starts: Ints, bounds: Words) -> None:
    """Draw the keys and queries of a batch, and list its samples query by query: those of k from starts[k] on."""
    counter = np.uint32(step)
    one = one_word(counter, roots[0], roots[1], WEYL)
    two = one_word(counter, roots[2], roots[3], OTHER)
    starts[:] = 0
    for b in range(keys.shape[0]):
        keys[b, 0] = one_word(b, one, np.uint32(roots[2] ^ two), WEYL)
        keys[b, 1] = one_word(b, two, np.uint32(roots[0] ^ one), OTHER)
        queries[b] = count_reached(bounds, one_word(FOR_QUERY, keys[b, 0], keys[b, 1], WEYL))
        starts[queries[b] + 1] += 1
    for k in range(1, starts.shape[0]):
        starts[k] += starts[k - 1]
    for b in range(keys.shape[0] - 1, -1, -1):  # backwards, from the end of each group: a stable order
        starts[queries[b] + 1] -= 1
        order[starts[queries[b] + 1]] = b
    for k in range(starts.shape[0] - 1):
        starts[k] = starts[k + 1]
    starts[-1] = keys.shape[0]
