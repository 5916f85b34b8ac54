r"""Bilinear forms with biases, from scores that are known up to a function of the query.

With x~ = (x, 1) the scores that a reader gives are x~_r Theta^(t) x~_j with

.. math:: \Theta^{(t)} = [W_Q; b_Q^\top]\, R_t\, [W_K; b_K^\top]^\top - u\, e^\top, \qquad e = (0, \dots, 0, 1),

u a vector that is the same at all offsets. Its column space L is that of [W_Q; b_Q^T]; without their last column all
forms have the row space K of W_K. On these spaces a form is a core of few numbers. The cores without their last column
obey M^(t+1) = G M^(t), and the last columns g_t obey g_(t+1) + s = G (g_t + s): one turn G and one shift s of a head
give the forms at all offsets, and frequencies are found, not needed. Derived here.
"""

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from manyheads.recovery._types import Array
from manyheads.recovery.layers.rotary import Turns
from manyheads.recovery.queries.ranks import gap_rank
from manyheads.recovery.queries.rotary.forms import CUT, NOTHING, extend, find_turn, solve_scaled
from manyheads.recovery.queries.rotary.logits import Ledger
from manyheads.recovery.refusals import RankBudgetError


@dataclass(frozen=True)
class Frame:
    """Column space L (d + 1, l) of the forms of one head, and row space (d + 1, k + 1): that of W_K, and e."""

    left: Array
    right: Array

    def features(self, queries: Array, keys: Array) -> Array:
        """Return what multiplies the core in the scores of pairs of tokens (N, d), as (N, l (k + 1))."""
        left, right = extend(queries) @ self.left, extend(keys) @ self.right
        return (left[:, :, None] * right[:, None, :]).reshape(len(left), -1)

    def form(self, core: Array) -> Array:
        """Return the form (d + 1, d + 1) of a core."""
        return self.left @ core @ self.right.T


def find_frame(columns: tuple[Array, Array], rows: tuple[Array, Array], noise: float) -> Frame:
    """Find the spaces of the forms of one head."""
    queries, scores = columns
    left = _range(_solve(queries, scores), scores, noise)
    keys, table = rows
    return Frame(left, beside_one(_range(_solve(keys, table.T)[:-1], table, noise)))


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
        raise RankBudgetError(
            f"no gap among {len(s)} sketches of a form: scores of no small rank, or of few digits", s[-1] / s[0], CUT
        )
    return u[:, :rank]


def find_core(frame: Frame, ledger: Ledger, head: int, offset: int) -> tuple[Array, float]:
    """Return the core (l, k + 1) of one head that explains its scores at one offset, and the relative residual."""
    queries, keys, scores = ledger.at(offset)
    scores = scores[:, head]
    core, rest = solve_scaled(frame.features(queries, keys), scores)
    rest /= float(np.linalg.norm(scores - scores.mean()) + NOTHING * np.sqrt(len(scores)))
    return core.reshape(frame.left.shape[1], frame.right.shape[1]), rest


def find_turns(frames: list[Frame], cores: list[dict[int, Array]]) -> Turns:
    """Return how heads turn, from their cores at consecutive offsets t, ..., the first of them at least 1."""
    left, turn, first, shift = [], [], [], []
    for frame, known in zip(frames, cores, strict=True):
        offsets = sorted(known)
        step = find_turn([known[t][:, :-1] for t in offsets], 1e10)
        # last columns: g_(t+1) - G g_t = (G - 1) s
        moved = [known[t + 1][:, -1] - step @ known[t][:, -1] for t in offsets[:-1]]
        back = np.linalg.pinv(step - np.eye(len(step)), rcond=1e-6)
        constant = back @ np.mean(moved, axis=0)
        start = known[offsets[0]].copy()
        start[:, -1] += constant
        start = np.linalg.matrix_power(np.linalg.inv(step), offsets[0] - 1) @ start
        left.append(frame.left)
        turn.append(step)
        first.append(start @ frame.right.T)
        shift.append(constant)
    return Turns(tuple(left), tuple(turn), tuple(first), tuple(shift))
