r"""Counter-based random words, a pure function of (seed, step, sample, counter): the same bits in every engine.

A word is 32 bits. The seed is scrambled into four words once; from them each sample of each step gets a key of two
words; the key and a counter give the word:

.. math:: h_0 = c\,g + k_1, \quad h_1 = m_1\,(h_0 \oplus h_0 \gg 16) \oplus k_2, \quad
          h_2 = m_2\,(h_1 \oplus h_1 \gg 15), \quad \mathrm{word} = h_2 \oplus h_2 \gg 15,

all modulo :math:`2^{32}`, where :math:`c` is the counter, :math:`g, m_1, m_2` are odd constants. There is no
state between two words, so any sample can be drawn again, in any order, by NumPy, JAX or compiled code.

A token is the number of thresholds not above its word, so the distribution of the tokens is rounded to multiples of
:math:`2^{-32}`: every frequency is accurate to :math:`2.4\cdot 10^{-10}`.

Seeds are scrambled by `numpy.random.SeedSequence`. Multiplied by an odd constant, as the counter is, two seeds would
have shifted copies of one stream.

Source: counter-based generators are those of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011. The multipliers 0x21F0AAAD and 0x735A2D97 are those of Wellons, "Prospecting for hash functions" (2018);
the key between the two rounds is added here.
"""

from collections.abc import Sequence

import numpy as np

from manyheads._namespaces import Array
from manyheads.errors import UsageError
from manyheads.theory.bigram.task import Batch, BigramTask

WEYL = np.uint32(0x9E3779B9)  # odd; its multiples are spread evenly
FIRST = np.uint32(0x21F0AAAD)
SECOND = np.uint32(0x735A2D97)
OTHER = np.uint32(0x85EBCA6B)  # a second odd constant, so that the two words of a key are not shifts of one another
QUERY, SLOT, TARGET = np.array([[0xFFFFFFFF], [0xFFFFFFFE], [0xFFFFFFFD]], np.uint32)  # tokens count from 0
LONGEST = 1 << 31  # contexts stay clear of the three counters above
LAST_STEP = 1 << 32
Seed = int | Sequence[int]


def mix(counter: Array, first: Array, second: Array, multiplier: np.uint32 = WEYL) -> Array:
    """Return the words of `counter` under the key (`first`, `second`): uint32 arrays of NumPy or JAX that broadcast."""
    h = counter * multiplier + first
    h = ((h ^ (h >> np.uint32(16))) * FIRST) ^ second
    h = (h ^ (h >> np.uint32(15))) * SECOND
    return h ^ (h >> np.uint32(15))


def scramble(seed: Seed) -> np.ndarray:
    """Return the four words that all keys derive from, for a seed of one non-negative integer or several."""
    try:
        return np.random.SeedSequence(seed).generate_state(4)
    except (ValueError, TypeError) as error:
        raise UsageError(f"seed={seed!r}: give a non-negative integer, or several") from error


def sample_keys(roots: Array, step: Array, samples: Array) -> tuple[Array, Array]:
    """Return the two key words, uint32 (B,) each, of samples (B,) of a step (1,), for the four words of `scramble`."""
    one = mix(step, roots[0:1], roots[1:2])
    two = mix(step, roots[2:3], roots[3:4], OTHER)
    return mix(samples, one, roots[2:3] ^ two), mix(samples, two, roots[0:1] ^ one, OTHER)


def thresholds(distribution: np.ndarray) -> np.ndarray:
    """Return the words that separate the outcomes, uint64; the last axis of `distribution` holds probabilities."""
    sums = np.cumsum(distribution, axis=-1)
    sums /= sums[..., -1:]  # exactly one from the last possible outcome on
    return np.ceil(sums[..., :-1] * 2.0**32 - 1e-4).astype(np.uint64)  # the margin is for the rounding of the sums


def pick(bounds: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return the outcomes of `words` (B,) under bounds (B, outcomes - 1), or one row for all."""
    return (words[:, None].astype(np.uint64) >= bounds).sum(-1)


def draw_step_batch(task: BigramTask, size: int, *, seed: Seed, step: int = 0) -> Batch:
    """Return the samples of a step of `proximal_sgd.descend`: the same tokens, bit for bit.

    The first samples of a larger batch are those of a smaller one.
    """
    if size < 1 or not 0 <= step < LAST_STEP:
        raise UsageError(f"size={size}, step={step}: give one sample or more, and a step from 0 to 2^32 - 1")
    samples = np.arange(size, dtype=np.uint32)
    first, second = sample_keys(scramble(seed), np.array([step], np.uint32), samples)
    counters = np.arange(task.length, dtype=np.uint32)
    words = mix(counters, first[:, None], second[:, None])  # (B, T)
    tokens = np.searchsorted(thresholds(task.stationary), words.ravel().astype(np.uint64), side="right")
    kind = np.uint8 if task.vocabulary <= 256 else np.uint16
    tokens = tokens.reshape(words.shape).astype(kind)
    queries = pick(thresholds(task.stationary), mix(QUERY, first, second))
    slots = pick(thresholds(task.weights)[queries], mix(SLOT, first, second))
    attended = tokens[samples, task.positions[queries, slots]]
    targets = pick(thresholds(task.transition.T)[attended], mix(TARGET, first, second))
    return Batch(tokens, queries, targets)
