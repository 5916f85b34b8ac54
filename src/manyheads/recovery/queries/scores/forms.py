r"""Bilinear forms with biases, from scores that are known up to a function of the query.

With x~ = (x, 1) the scores that a reader gives are x~_r Theta^(t) x~_j with

.. math:: \Theta^{(t)} = [W_Q; b_Q^\top]\, R_t\, [W_K; b_K^\top]^\top - u\, e^\top, \qquad e = (0, \dots, 0, 1),

u a vector that is the same at all offsets. Its column space L is that of [W_Q; b_Q^T]; without their last column all
forms have the row space K of W_K. On these spaces a form is a core of few numbers. The cores without their last column
obey M^(t+1) = G M^(t), and the last columns g_t obey g_(t+1) + s = G (g_t + s): one turn G and one shift s of a head
give the forms at all offsets, and frequencies are found, not needed. Derived here.
"""

import numpy as np
import scipy.linalg

from manyheads.recovery._types import Array
from manyheads.recovery.queries.rotary.forms import CUT, NOTHING, Frame, extend
from manyheads.recovery.queries.values.ranks import gap_rank
from manyheads.recovery.refusals import RankBudgetError


def find_frame(columns: tuple[Array, Array], rows: tuple[Array, Array], noise: float) -> Frame:
    """Find the spaces of the forms of one head."""
    queries, scores = columns
    left = _range(_solve(queries, scores), scores, noise)
    keys, table = rows
    return Frame(left, beside_one(_range(_solve(keys, table.T)[:-1], table, noise)), constant=True)


def beside_one(space: Array) -> Array:
    """Return the space (d + 1, r + 1) that a space (d, r) and the last unit vector span."""
    return scipy.linalg.block_diag(space, 1.0)


def row_space(table: Array, noise: float) -> Array:
    """Return the space (d, r) that the rows of a table (n, d) span, but for noise."""
    return _range(table.T, table, noise)


def _solve(tokens: Array, scores: Array) -> Array:
    """Return what gives the scores (N, n) of tokens (N, d), as (d + 1, n)."""
    return np.linalg.lstsq(extend(tokens), scores, rcond=None)[0]


def _range(sketch: Array, scores: Array, noise: float) -> Array:
    """Return the space (rows, r) that the columns of a sketch span, but for noise."""
    if np.abs(scores).max() < max(NOTHING, 1e3 * noise):
        return np.zeros((len(sketch), 0))
    u, s, _ = np.linalg.svd(sketch, full_matrices=False)
    rank = gap_rank(s, max(CUT, 100 * noise))
    if rank == len(s) < len(sketch) - 1:
        what = f"no gap among {len(s)} sketches of a form: scores of no small rank, or of few digits"
        raise RankBudgetError(what, s[-1] / s[0], CUT)
    return u[:, :rank]
