r"""Random words that are a pure function of (seed, step, sample, counter): the same bits in every engine.

A word is 32 bits. The seed is scrambled into four words once; from them each sample of each step gets a key of two
words; the key and a counter give the word:

.. math:: h_0 = c\,g + k_1, \quad h_1 = m_1\,(h_0 \oplus h_0 \gg 16) \oplus k_2, \quad
          h_2 = m_2\,(h_1 \oplus h_1 \gg 15), \quad \mathrm{word} = h_2 \oplus h_2 \gg 15,

all modulo :math:`2^{32}`, where :math:`c` is the counter, :math:`g, m_1, m_2` are odd constants. Nothing is kept
between two words, so any sample can be drawn again, in any order, by NumPy, JAX or compiled code.

A token is the number of thresholds that its word reaches, so the law of the tokens is rounded to multiples of
:math:`2^{-32}`: every frequency is right to :math:`2.4\cdot 10^{-10}`.

Seeds are scrambled by `numpy.random.SeedSequence`. Multiplying a seed by an odd constant instead would make the
streams of two seeds shifted copies of one another, since the counter is multiplied by one as well.

Source: counter-based generators are those of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011. The multipliers 0x21F0AAAD and 0x735A2D97 are those of Wellons, "Prospecting for hash functions" (2018);
the key between the two rounds is ours.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from manyheads.bigram.task import Batch, BigramTask
from manyheads.errors import UsageError

WEYL = np.uint32(0x9E3779B9)  # odd; its multiples are spread evenly
FIRST = np.uint32(0x21F0AAAD)
SECOND = np.uint32(0x735A2D97)
OTHER = np.uint32(0x85EBCA6B)  # a second odd constant, so that the two words of a key are not shifts of one another
QUERY, SLOT, TARGET = np.array([[0xFFFFFFFF], [0xFFFFFFFE], [0xFFFFFFFD]], np.uint32)  # tokens count from 0
# log(1 + t) = t (..) on [0, 1], and z = w (..) with w = -log u and x = sqrt(w) OF_ROOT - 1: least largest error
LOGARITHM = (0.0107642735, -0.0551443718, 0.134673421, -0.225897276, 0.328241956, -0.499471746, 0.999981136)
OF_ROOT = np.float32(0.42466091)  # puts sqrt(32 log 2), the largest root, at x = 1
QUANTILE = (
    *(0.0443449962, -0.0812782526, -0.0665926576, 0.233392789, -0.141099334, -0.0100747212, 0.0190862558),
    *(-0.0194299033, 0.0915120792, -0.190446931, 0.297212277, -0.411265554, 0.520382008),
)
LONGEST = 1 << 31  # contexts stay clear of the three counters above
LAST_STEP = 1 << 32
Seed = int | Sequence[int]


def mix(counter: Any, first: Any, second: Any, multiplier: np.uint32 = WEYL) -> Any:
    """Return the words of `counter` under the key (`first`, `second`): uint32 arrays of NumPy or JAX that broadcast.

    Examples
    --------
    >>> key = np.array([1], np.uint32), np.array([2], np.uint32)
    >>> [hex(word) for word in mix(np.arange(3, dtype=np.uint32), *key)]
    ['0x6d888812', '0x7779a109', '0x2e300a6b']
    """
    h = counter * multiplier + first
    h = ((h ^ (h >> np.uint32(16))) * FIRST) ^ second
    h = (h ^ (h >> np.uint32(15))) * SECOND
    return h ^ (h >> np.uint32(15))


def scramble(seed: Seed) -> np.ndarray:
    """Turn a seed, any non-negative integer or several, into the four words that all keys derive from.

    Raises
    ------
    UsageError
        A seed that is negative or no integer.

    Examples
    --------
    >>> scramble(0).dtype, scramble(0).tolist() == scramble([0, 1]).tolist()
    (dtype('uint32'), False)
    """
    try:
        return np.random.SeedSequence(seed).generate_state(4)
    except (ValueError, TypeError) as error:
        raise UsageError(f"seed={seed!r}: give a non-negative integer, or several") from error


def sample_keys(roots: Any, step: Any, samples: Any) -> tuple[Any, Any]:
    """Return the two key words of every sample of a step.

    Parameters
    ----------
    roots
        (4,) uint32 of `scramble`.
    step
        (1,) uint32.
    samples
        (B,) uint32: numbers of the samples within the step.

    Returns
    -------
    tuple
        Two uint32 arrays (B,).

    Examples
    --------
    >>> first, second = sample_keys(scramble(0), np.zeros(1, np.uint32), np.arange(5, dtype=np.uint32))
    >>> len(set(first.tolist()) | set(second.tolist()))
    10
    """
    one = mix(step, roots[0:1], roots[1:2])
    two = mix(step, roots[2:3], roots[3:4], OTHER)
    return mix(samples, one, roots[2:3] ^ two), mix(samples, two, roots[0:1] ^ one, OTHER)


def thresholds(law: np.ndarray) -> np.ndarray:
    """Return where the words of one outcome end and those of the next begin, uint64, one fewer than outcomes.

    The last axis of `law` holds probabilities. An outcome without probability is never drawn.

    Examples
    --------
    >>> [hex(bound) for bound in thresholds(np.array([0.25, 0.5, 0.25]))]
    ['0x40000000', '0xc0000000']
    """
    sums = np.cumsum(law, axis=-1)
    sums /= sums[..., -1:]  # exactly one from the last possible outcome on
    return np.ceil(sums[..., :-1] * 2.0**32 - 1e-4).astype(np.uint64)  # the margin is for the rounding of the sums


def pick(bounds: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return the outcomes of `words` (B,) under one row of `bounds` each, (B, outcomes - 1), or one row for all.

    Examples
    --------
    >>> pick(thresholds(np.array([0.25, 0.5, 0.25])), np.array([0, 1 << 31, (1 << 32) - 1], np.uint32))
    array([0, 1, 2])
    """
    return (words[:, None].astype(np.uint64) >= bounds).sum(-1)


def to_normal(words: Any) -> Any:
    r"""Turn words into standard normal numbers, float32: the inverse of the distribution function as a polynomial.

    The last bit is the sign; the others give the two-sided probability :math:`u = (k + 1/2)/2^{31}`. With
    :math:`w = -\log u`, the quantile is :math:`z = w\,p(\sqrt w)` with a polynomial of degree 12, right to
    :math:`3\cdot 10^{-5}` (measured) as far as it goes: 6.3.

    Parameters
    ----------
    words
        uint32 array of NumPy or JAX.

    Examples
    --------
    >>> to_normal(np.array([0, 1, 0x513B42EC], np.uint32)).round(3).tolist()
    [6.3379998207092285, -6.3379998207092285, 1.0]
    """
    xp = words.__array_namespace__()
    tail = ((words >> np.uint32(1)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)
    logarithm = -xp.log(tail)
    x = xp.sqrt(logarithm) * OF_ROOT - np.float32(1)
    quantile = xp.full_like(x, QUANTILE[0])
    for coefficient in QUANTILE[1:]:
        quantile = quantile * x + np.float32(coefficient)
    sign = np.float32(1) - np.float32(2) * (words & np.uint32(1)).astype(np.float32)
    return sign * logarithm * quantile


def draw_at(task: BigramTask, size: int, *, seed: Seed, step: int = 0) -> Batch:
    """Return the samples that a step of `proximal_sgd.descend` sees: the same tokens, bit for bit.

    Parameters
    ----------
    task
        What is drawn from.
    size
        Number of samples B. The first samples of a larger batch are those of a smaller one.
    seed, step
        Which step of which run.

    Returns
    -------
    Batch
        Tokens (B, T) as uint8 or uint16, queries (B,) and targets (B,) as int64.

    Raises
    ------
    UsageError
        A seed that is none, or a step outside 0 to 2^32 - 1.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), vocabulary=3, length=8, sparsity=2)
    >>> draw_at(task, 2, seed=0).tokens.shape
    (2, 8)
    """
    if size < 1 or not 0 <= step < LAST_STEP:
        raise UsageError(f"size={size}, step={step}: one sample or more, and a step from 0 to 2^32 - 1")
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
