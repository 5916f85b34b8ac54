"""Coherence of embeddings: mean |cos| over pairs, exact, bounded, or estimated with an interval."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from manyheads._arrays import takes_arrays
from manyheads.errors import ShapeError, UsageError
from manyheads.spectra.levels import random_coherence
from manyheads.statistics.intervals import Interval

if TYPE_CHECKING:
    from jaxtyping import Float

Array = NDArray[np.float64]

BLOCK = 1024


@dataclass(frozen=True)
class Coherence:
    """Mean |cos| over the pairs of different rows.

    Attributes
    ----------
    value
        The mean, or None for method "bound".
    interval
        Where the true mean lies: a point for "exact", [0, rms] for "bound", a confidence interval for "estimate".
    rms
        Square root of the mean of cos², exact: never below the mean of |cos|.
    random_level
        What independent random directions of this dimension have.
    method, pairs
        How, and over how many pairs.
    """

    value: float | None
    interval: Interval
    rms: float
    random_level: float
    method: str
    pairs: int


@takes_arrays
def coherence(
    vectors: "Float[ArrayLike, 'vectors d']",
    method: Literal["exact", "bound", "estimate"] = "exact",
    *,
    pairs: int = 100_000,
    rng: np.random.Generator | None = None,
    level: float = 0.99,
) -> Coherence:
    r"""Mean \|cos\| between different rows of a table of V vectors in d dimensions.

    * "exact": every pair, blockwise, :math:`V^2 d` FLOPs.
    * "bound": mean |cos| <= rms, :math:`\text{rms}^2 = (\|E^\top E\|_F^2 - V) / (V (V - 1))` with E the unit rows;
      :math:`O(V d^2)`, and exact for what it is. A claim "below 0.1" is often decided by this alone.
    * "estimate": random pairs, with cos² (whose mean over all pairs is known exactly) as a control variate.

    Parameters
    ----------
    vectors
        Shape (V, d), V >= 2, rows finite and not zero; any floating dtype.
    method
        See above.
    pairs, rng
        Number of pairs drawn (at least 1000) and their source; only for "estimate".
    level
        Coverage of the interval of "estimate"; "exact" and "bound" have level 1.

    Raises
    ------
    ShapeError
        Not a table of at least two rows.
    UsageError
        A zero row (a padding token has no direction: leave it out), entries that are not finite, or "estimate" without
        `rng`.

    Examples
    --------
    >>> found = coherence(np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]))
    >>> round(found.value, 4), round(found.rms, 4), round(found.random_level, 4)
    (0.4714, 0.5774, 0.6366)
    """
    table = np.asarray(vectors)
    if table.ndim != 2 or table.shape[0] < 2 or table.shape[1] < 1:
        raise ShapeError(f"shape {table.shape}: expected (vectors, dimension) with at least two vectors")
    if method not in ("exact", "bound", "estimate"):
        raise UsageError(f"method={method!r}: expected 'exact', 'bound' or 'estimate'")
    if method == "estimate" and (rng is None or pairs < 1000):
        raise UsageError(f"an estimate needs rng and at least 1000 pairs (given pairs={pairs})")
    norms = _norms(table)
    rms = _rms(table, norms)
    count, dimension = table.shape
    everything, random_level = count * (count - 1) // 2, random_coherence(dimension)
    if method == "bound":
        return Coherence(None, Interval(0.0, rms, 1.0), rms, random_level, method, everything)
    if method == "exact":
        value = _exact(table, norms)
        return Coherence(value, Interval(value, value, 1.0), rms, random_level, method, everything)
    assert rng is not None  # refused above
    value, half = _estimate(table, norms, (rms**2, pairs, level), rng)
    interval = Interval(max(0.0, value - half), max(min(rms, value + half), value - half, 0.0), level)
    return Coherence(value, interval, rms, random_level, method, pairs)


def _norms(table: NDArray[Any]) -> Array:
    norms = np.concatenate([np.linalg.norm(_rows(table, start), axis=1) for start in range(0, len(table), BLOCK)])
    if not np.all(np.isfinite(norms)):
        raise UsageError(f"row {int(np.argmin(np.isfinite(norms)))} holds NaN or infinite entries")
    if np.any(norms == 0):
        empty = np.flatnonzero(norms == 0)
        raise UsageError(f"{empty.size} rows are zero (first: {empty[0]}) and have no direction: leave them out")
    return norms


def _rows(table: NDArray[Any], start: int) -> Array:
    return table[start : start + BLOCK].astype(np.float64)


def _unit(table: NDArray[Any], norms: Array, start: int) -> Array:
    return _rows(table, start) / norms[start : start + BLOCK, None]


def _rms(table: NDArray[Any], norms: Array) -> float:
    count, dimension = table.shape
    gram = np.zeros((dimension, dimension))
    for start in range(0, count, BLOCK):
        block = _unit(table, norms, start)
        gram += block.T @ block
    return math.sqrt(max(0.0, float(np.sum(gram**2)) - count) / (count * (count - 1)))


def _exact(table: NDArray[Any], norms: Array) -> float:
    count = len(table)
    total = 0.0
    for start in range(0, count, BLOCK):
        block = _unit(table, norms, start)
        within = np.abs(block @ block.T)
        total += float(np.sum(within) - np.trace(within))
        for other in range(start + BLOCK, count, BLOCK):
            total += 2 * float(np.sum(np.abs(block @ _unit(table, norms, other).T)))
    return total / (count * (count - 1))


def _estimate(
    table: NDArray[Any], norms: Array, known: tuple[float, int, float], rng: np.random.Generator
) -> tuple[float, float]:
    """Mean and half-width from random pairs; `known` is (mean cos², pairs, level)."""
    mean_square, pairs, level = known
    count = len(table)
    first = rng.integers(0, count, pairs)
    second = (first + 1 + rng.integers(0, count - 1, pairs)) % count
    cosines = np.empty(pairs)
    for start in range(0, pairs, 16 * BLOCK):
        i, j = first[start : start + 16 * BLOCK], second[start : start + 16 * BLOCK]
        products = np.einsum("pd,pd->p", table[i].astype(np.float64), table[j].astype(np.float64))
        cosines[start : start + 16 * BLOCK] = products / (norms[i] * norms[j])
    size, square = np.abs(cosines), cosines**2
    centred = square - square.mean()
    spread = float(centred @ centred)
    # Where all cos² are equal their differences are rounding, and so would be the slope.
    slope = float(centred @ size) / spread if spread > 1e-24 * pairs else 0.0
    corrected = size - slope * (square - mean_square)
    half = float(stats.norm.isf((1 - level) / 2)) * float(np.std(corrected, ddof=2)) / math.sqrt(pairs)
    return float(corrected.mean()), half
