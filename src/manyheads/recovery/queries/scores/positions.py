r"""How scores depend on positions otherwise than by rotations: windows, and terms of the offset (ALiBi, T5).

Where forms do not change with the offset, the scores are x~_r^T Theta x~_j + b(r - j), and b is read offset by offset,
up to a constant: ln a(q, x, t) less that of the reference gives b(t) - b(t_0) once Theta is known. Terms that are
linear in the offset (ALiBi) go on beyond what was read; others are known as far as they were read.
"""

from collections.abc import Callable

import numpy as np

from manyheads.recovery._types import Array, Generator
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.rotary.forms import extend
from manyheads.recovery.queries.scores.reading import ScoreReader

FARTHEST = 128  # offsets at which terms are read: the longest sequences of a verification
LONGEST, MOST = 160, 1 << 14  # tokens of the sequences in which a window shows, and most where longer ones are taken
UNSEEN = 1e-13  # change of a row, relative to the largest, of a token that it does not see
UNHEARD = 30.0  # the same, relative to the noise of answers
LOWEST = -9.0  # scores, relative to the reference, below which a weight is too small to be read
LOST = 1e3  # noise relative to which the same weights are too small
FADED = 1e-9  # the same of the last row that sees it, below which the weights of far tokens fade away without a window
REPEATS = 3  # readings of each term


def find_window(oracle: Oracle, noise: float, rng: Generator) -> int | None:
    """Return how many tokens a row sees, itself included; None where the longest see all."""
    length = min(oracle.limits.max_length or LONGEST, MOST)
    x = np.zeros((2, length, oracle.dim))
    x[:, 0] = oracle.limits.shortened(rng.standard_normal((2, oracle.dim)))
    y = oracle(x, read="all")
    change = np.linalg.norm(y[0] - y[1], axis=1)
    last = int(np.flatnonzero(change > max(UNSEEN, UNHEARD * noise) * change.max()).max())
    if last == length - 1 or change[last] < max(FADED, 1e2 * UNHEARD * noise) * change.max():
        return None
    return last + 1


def zeros_attend_evenly(oracle: Oracle, bias: Array, total: Array, noise: float, rng: Generator) -> bool:
    """Tell whether a zero token attends evenly to all tokens: no biases, no position terms, no sinks."""
    x = np.zeros((1, 4, oracle.dim))
    x[0, 0] = rng.standard_normal(oracle.dim)
    y = oracle(x, read="all")[0] - bias
    expected = (x[0, 0] @ total) / np.arange(1, 5)[:, None]
    return bool(np.linalg.norm(y - expected) < max(1e-5, 1e2 * noise) * np.linalg.norm(expected))


def relative_change(one: Array, two: Array) -> float:
    """Return the largest relative change of a form (m, d + 1, d + 1), but for its constant, the last entry."""
    apart = one - two
    apart[:, -1, -1] = 0.0
    size = np.linalg.norm(one[:, :-1, :-1], axis=(1, 2)) + np.finfo(np.float64).tiny
    return float((np.linalg.norm(apart, axis=(1, 2)) / size).max())


def read_terms(
    reader: ScoreReader, form: Array, draw: Callable[[int], Array], kept: int, window: int | None, noise: float
) -> tuple[Array, Array | None, float]:
    """Return the terms b (m, T) up to a constant of each head, their slopes if they are linear, and the worst misfit.

    `form` (m, d + 1, d + 1) gives the scores at one offset, less those with the reference; `draw`
    gives random tokens (n, d), of which a sequence takes `kept` keys.
    """
    length = int(min(window or FARTHEST, FARTHEST, reader.oracle.longest))
    lowest = max(LOWEST, float(np.log(LOST * noise)))
    terms, seen, spread = np.zeros((len(form), length)), np.zeros((len(form), length), bool), 0.0
    reference = None if reader.reference is None else extend(reader.reference[None])[0]

    def predict(queries: Array, keys: Array) -> Array:
        return np.einsum("nd,mde,ne->nm", extend(queries), form, extend(keys), optimize=True)

    def note(t: int, values: Array, raw: Array) -> None:
        nonlocal spread
        terms[:, t], seen[:, t] = values.mean(0), raw.min(0) > lowest
        spread = max(spread, float(np.where(seen[:, t], np.ptp(values, axis=0), 0.0).max()))

    shown = [t for t in range(1, length) if reference is None or t > 1]
    last = length - 1 - (reference is None)  # a zero token stands before the first
    shown = [t for t in shown if t <= last or window is None]
    for start in range(0, len(shown), kept):
        some = shown[start : start + kept]
        pieces = np.arange(REPEATS * (len(some) + 1)).reshape(REPEATS, -1)
        found = reader.scores(draw(pieces.size), pieces[:, 0], pieces[:, 1:], some)
        for t in [0, *some] if start == 0 else some:
            queries, keys, values, _ = found.at(t)
            note(t, values - predict(queries, keys), values)
    if reference is not None:
        pieces = np.arange(2 * REPEATS).reshape(REPEATS, 2)
        queries, keys, values, _ = reader.scores(draw(pieces.size), pieces[:, 0], pieces[:, 1:], [1], anchor=2).at(1)
        known = np.einsum("nd,mde,e->nm", extend(queries), form, reference)
        note(1, values - predict(queries, keys) + known + terms[:, 2], values)
    steps = np.arange(length)
    slopes, uneven = np.zeros(len(form)), 0.0
    for head, (term, known_at) in enumerate(zip(terms, seen, strict=True)):
        if known_at.sum() < 2:
            continue
        slopes[head], start = np.polyfit(steps[known_at], term[known_at], 1)
        uneven = max(uneven, float(np.abs(start + slopes[head] * steps - term)[known_at].max()))
    if uneven > 1e-6 + 10 * spread:
        return terms, None, spread
    return slopes[:, None] * steps, slopes, spread
