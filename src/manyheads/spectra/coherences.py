"""Coherence of embeddings: mean |cos| over pairs, exact, bounded, or estimated with an interval."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from manyheads._arrays import takes_arrays
from manyheads._extras import Float
from manyheads._namespaces import Floats
from manyheads.errors import ShapeError, UsageError
from manyheads.spectra.bidiagonal import Matrix, as_table
from manyheads.spectra.levels import random_coherence
from manyheads.statistics.intervals import Interval

BLOCK = 1024


@dataclass(frozen=True)
class Coherence:
    """Mean |cos| over the pairs of different rows."""

    value: float | None  # the mean; None for method "bound"
    interval: Interval  # of the true mean: a point for "exact", [0, rms] for "bound", of confidence for "estimate"
    rms: float  # root of the mean of cos², exact: never below the mean of |cos|
    random_level: float  # what independent random directions of this dimension have
    method: str
    pairs: int
    zero_rows: int = 0  # left out, as they have no direction


@takes_arrays
def coherence(
    vectors: "Float[ArrayLike, 'vectors d']",
    method: Literal["exact", "bound", "estimate"] = "exact",
    *,
    rows: int = 256,
    rng: np.random.Generator | None = None,
    level: float = 0.99,
    omit_zeros: bool = False,
) -> Coherence:
    r"""Mean \|cos\| between different rows of a table of V vectors in d dimensions.

    * "exact": every pair, blockwise, :math:`V^2 d` FLOPs.
    * "bound": mean |cos| <= rms, :math:`\text{rms}^2 = (\|E^\top E\|_F^2 - V) / (V (V - 1))` with E the unit rows;
      :math:`O(V d^2)`, and exact for what it is. A claim "below 0.1" is often decided by this alone.
    * "estimate": all pairs of a random sample of rows with any other row. With the means :math:`a_i` of |cos| and
      :math:`c_i` of cos² over the pairs of row i, it is the regression estimate
      :math:`\bar a - b (\bar c - \text{rms}^2)` of sampling without replacement; :math:`O(V d\,(d + \text{rows}))`.

    Parameters
    ----------
    vectors
        Shape (V, d), V >= 2, rows finite and not zero; any floating dtype. What has `shape`, `dtype` and rows
        `vectors[a:b]` and `vectors[indices]` that are read when indexed is read block by block.
    method
        See above.
    rows, rng
        Number of rows drawn (at least 30; all of them where there are no more) and their source; only for "estimate".
    level
        Coverage of the interval of "estimate"; "exact" and "bound" have level 1.
    omit_zeros
        Whether rows of zeros are left out instead of refused.

    Raises
    ------
    ShapeError
        Not a table of at least two rows.
    UsageError
        A zero row (a padding token has no direction), entries that are not finite, fewer than two rows that are not
        zero, or "estimate" without `rng`.

    Examples
    --------
    >>> found = coherence(np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]))
    >>> round(found.value, 4), round(found.rms, 4), round(found.random_level, 4)
    (0.4714, 0.5774, 0.6366)
    """
    table = as_table(vectors)
    if len(table.shape) != 2 or table.shape[0] < 2 or table.shape[1] < 1:
        raise ShapeError(f"shape {table.shape}: expected (vectors, dimension) with at least two vectors")
    if method not in ("exact", "bound", "estimate"):
        raise UsageError(f"method={method!r}: expected 'exact', 'bound' or 'estimate'")
    if method == "estimate" and (rng is None or rows < 30):
        raise UsageError(f"an estimate needs rng and at least 30 rows (given rows={rows})")
    norms = _norms(table, omit_zeros)
    directed = np.flatnonzero(np.isfinite(norms))  # a row of zeros has the norm infinity: its unit row is zero
    count, rms = directed.size, _rms(table, norms, directed.size)
    about, empty = (rms, random_coherence(table.shape[1]), method), len(norms) - count
    if rng is None or method != "estimate":
        value = _exact(table, norms, count) if method == "exact" else None
        interval = Interval(0.0, rms, 1.0) if value is None else Interval(value, value, 1.0)
        return Coherence(value, interval, *about, count * (count - 1) // 2, empty)
    sample = np.sort(rng.choice(directed, min(rows, count), replace=False))
    value, half = _estimate(table, norms, sample, (rms**2, count, level))
    interval = Interval(max(0.0, value - half), max(min(rms, value + half), value - half, 0.0), level)
    seen = len(sample) * (2 * count - len(sample) - 1) // 2
    return Coherence(value, interval, *about, seen, empty)


def _norms(table: Matrix, omit_zeros: bool) -> Floats:
    """Return the norms of the rows, infinity for a row of zeros that is to be left out."""
    blocks = range(0, table.shape[0], BLOCK)
    norms = np.concatenate([np.linalg.norm(_rows(table, start), axis=1) for start in blocks])
    if not np.all(np.isfinite(norms)):
        raise UsageError(f"row {int(np.argmin(np.isfinite(norms)))} holds NaN or infinite entries")
    empty = np.flatnonzero(norms == 0)
    if empty.size and not omit_zeros:
        raise UsageError(f"{empty.size} rows are zero (first: {empty[0]}) and have no direction: pass omit_zeros=True")
    if norms.size - empty.size < 2:
        raise UsageError(f"{empty.size} of {norms.size} rows are zero and have no direction: no pair is left")
    norms[empty] = np.inf
    return norms


def _rows(table: Matrix, start: int) -> Floats:
    return table[start : start + BLOCK].astype(np.float64)


def _unit(table: Matrix, norms: Floats, start: int) -> Floats:
    return _rows(table, start) / norms[start : start + BLOCK, None]


def _rms(table: Matrix, norms: Floats, count: int) -> float:
    gram = np.zeros((table.shape[1], table.shape[1]))
    for start in range(0, len(norms), BLOCK):
        block = _unit(table, norms, start)
        gram += block.T @ block
    return math.sqrt(max(0.0, float(np.sum(gram**2)) - count) / (count * (count - 1)))


def _exact(table: Matrix, norms: Floats, count: int) -> float:
    total = 0.0
    for start in range(0, len(norms), BLOCK):
        block = _unit(table, norms, start)
        within = np.abs(block @ block.T)
        total += float(np.sum(within) - np.trace(within))
        for other in range(start + BLOCK, len(norms), BLOCK):
            total += 2 * float(np.sum(np.abs(block @ _unit(table, norms, other).T)))
    return total / (count * (count - 1))


def _estimate(table: Matrix, norms: Floats, sample: np.ndarray, known: tuple[float, int, float]) -> tuple[float, float]:
    """Mean and half-width from the pairs of sampled rows with all others; `known` is (mean cos², rows, level)."""
    mean_square, count, level = known
    size = len(sample)
    chosen = table[sample].astype(np.float64) / norms[sample, None]
    sums = np.full((2, size), -1.0)  # a row with itself is no pair
    for start in range(0, len(norms), BLOCK):
        cosines = np.abs(chosen @ _unit(table, norms, start).T)
        sums += cosines.sum(axis=1), np.einsum("ij,ij->i", cosines, cosines)
    mean, square = sums / (count - 1)
    centred = square - square.mean()
    spread = float(centred @ centred)
    # Where all cos² are equal their differences are rounding, and so would be the slope.
    slope = float(centred @ mean) / spread if spread > 1e-24 * size else 0.0
    corrected = mean - slope * (square - mean_square)
    if size == count:
        return float(corrected.mean()), 0.0
    quantile = -float(special.stdtrit(size - 2, (1 - level) / 2))
    error = float(np.std(corrected, ddof=2)) * math.sqrt((1 - size / count) / size)
    return float(corrected.mean()), quantile * error
