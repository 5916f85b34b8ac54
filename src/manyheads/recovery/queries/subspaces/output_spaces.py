r"""Output-value circuits W_i from their sum and their output spaces, stage S3.

With orthonormal bases O_i (r_i, d) of the row spaces of W_i, stacked to O with independent rows,

.. math:: W_S = \sum_i W_i = \sum_i V_i O_i, \qquad W_S O^+ = [V_1, \dots, V_m], \qquad W_i = W_S O^{+}_{[:, i]} O_i .

No query is needed. What is measured checks it: sum_i W_i = W_S, and v_b W_i is what head i was seen to read. Derived
here.
"""

from typing import NamedTuple

import numpy as np

from manyheads.recovery._types import Array, Figures, Indices
from manyheads.recovery.queries.projection_sum import Sums
from manyheads.recovery.queries.ranks import CLEAR, gap_rank, rank_by_gap
from manyheads.recovery.queries.subspaces.head_values import Stacks
from manyheads.recovery.refusals import FitError, RankBudgetError

CUT = 0.01  # share of the largest singular value of a projection below which there may be noise alone


class Projections(NamedTuple):
    """The projections of all heads, and how well they can be told apart."""

    projection: Array  # W (m, d, d)
    readers: Array | None  # (m, d, R) V_i, with columns of zeros beyond the rank; None for heads of full rank
    splits: Array | None  # (m, d, R) O^+_i, which takes an answer to coordinates of head i; None for heads of full rank
    ranks: Indices  # (m,)
    condition: float  # condition number of O: errors of the output spaces reach the projections times this
    sum_error: float  # |sum_i W_i - W_S|, relative to the largest of these matrices
    # Largest |v_b W_i - row| over the norm of the head's rows: a head exchanged at one probe is near one
    row_error: float

    def take(self, chosen: Indices) -> "Projections":
        """Return some of the heads."""
        readers, splits = (None if part is None else part[chosen] for part in (self.readers, self.splits))
        projection, ranks = self.projection[chosen], self.ranks[chosen]
        return self._replace(projection=projection, readers=readers, splits=splits, ranks=ranks)

    def figures(self) -> Figures:
        """Return what a report shows of this stage."""
        return {"condition": self.condition, "sum error": self.sum_error, "row error": self.row_error}


def split_projections(sums: Sums, stacks: Stacks, *, whole: bool = False) -> Projections:
    """Read every W_i off W_S and the output spaces; by least squares over d probes where they are not exhausted."""
    dim = len(sums.bias)
    ranks = stacks.ranks
    if ranks is not None and not ranks.any():
        size = np.linalg.norm(stacks.values, axis=(1, 2)).max()
        what = f"what {len(ranks)} heads write is below the noise of its readings: give answers in a wider type"
        raise FitError(what, stacks.levels.max(), size)
    if whole and len(stacks.probes) >= dim:
        found = _cut_at_gaps(_fit_probes(sums, stacks))
    elif ranks is not None and ranks.sum() <= dim:
        found = _split_spaces(sums, stacks, ranks)
    elif len(stacks.probes) >= dim:
        found = _fit_probes(sums, stacks)
    elif ranks is None:  # probes were dropped, so that d of them were asked and fewer are left
        raise RankBudgetError(
            f"{len(stacks.probes)} probes leave output spaces open: another seed, or bounded", len(stacks.probes), dim
        )
    else:
        raise RankBudgetError(
            f"{len(ranks)} heads write {ranks.sum()} dimensions together, of {dim}: take bounded", ranks.sum(), dim
        )
    # Errors of the spaces pass through O^+; what is checked is of the size of the rows.
    sizes = np.linalg.norm(stacks.values, axis=(1, 2)) / np.sqrt(len(stacks.probes))
    explained = float(np.max(stacks.levels / np.maximum(sizes, np.finfo(float).tiny)))
    allowed = min(0.1, CLEAR * explained * max(found.condition, 1.0) + 1e-9)
    FitError.if_above(
        max(found.sum_error, found.row_error), allowed, "the projections contradict their answers: try another seed"
    )
    return found


def single_projection(sums: Sums, noise: float) -> Projections:
    """Return the projection of the only head: W_S."""
    left, singular, right = np.linalg.svd(sums.projection)
    rank = rank_by_gap(singular, noise * float(singular[0]) * np.sqrt(len(singular)))
    ranks = np.array([len(singular) if rank is None else rank], np.intp)
    projection = sums.projection[None]
    if rank is None:
        return Projections(projection, None, None, ranks, 1.0, 0.0, 0.0)
    basis = right[:rank].T  # O^T
    return Projections(projection, (left[:, :rank] * singular[:rank])[None], basis[None], ranks, 1.0, 0.0, 0.0)


def _split_spaces(sums: Sums, stacks: Stacks, ranks: Indices) -> Projections:
    heads, dim, widest = len(ranks), len(sums.bias), max(int(ranks.max()), 1)
    right = np.linalg.svd(stacks.values, full_matrices=False)[2]
    bases = [rows[:rank] for rows, rank in zip(right, ranks, strict=True)]
    whole = np.concatenate(bases)  # (sum of ranks, d)
    turn, triangle = np.linalg.qr(whole.T)
    singular = np.linalg.svd(triangle, compute_uv=False)
    if not singular[-1] > np.finfo(float).eps * singular[0] * dim:
        least = np.finfo(float).eps * dim
        raise RankBudgetError("the output spaces overlap: take bounded", singular[-1] / singular[0], least)
    inverse = np.linalg.solve(triangle, turn.T).T  # O^+ = Q R^-T, (d, sum of ranks)
    readers, splits = np.zeros((2, heads, dim, widest))
    projection = np.zeros((heads, dim, dim))
    parts = np.split(inverse, np.cumsum(ranks)[:-1], axis=1)
    for head, (basis, rank, part) in enumerate(zip(bases, ranks, parts, strict=True)):
        splits[head, :, :rank], readers[head, :, :rank] = part, sums.projection @ part
        projection[head] = readers[head, :, :rank] @ basis
    condition = float(singular[0] / singular[-1])
    return Projections(projection, readers, splits, ranks, condition, *_errors(projection, sums, stacks))


def _fit_probes(sums: Sums, stacks: Stacks) -> Projections:
    """Least squares over the probes, which span the space; what is left of W_S is shared out."""
    projection = np.stack([np.linalg.lstsq(stacks.probes, rows, rcond=None)[0] for rows in stacks.values])
    errors = _errors(projection, sums, stacks)
    projection += (sums.projection - projection.sum(0)) / len(projection)
    full = np.full(len(projection), len(sums.bias), np.intp)
    return Projections(projection, None, None, full, float(np.linalg.cond(stacks.probes)), *errors)


def _cut_at_gaps(found: Projections) -> Projections:
    """Cut every projection at the widest gap of its singular values that ends in what may be noise."""
    left, singular, right = np.linalg.svd(found.projection)
    ranks = np.array([gap_rank(values, CUT) for values in singular], np.intp)
    kept = np.arange(singular.shape[1]) < ranks[:, None]
    return found._replace(projection=(left * (kept * singular)[:, None]) @ right, ranks=ranks)


def _errors(projection: Array, sums: Sums, stacks: Stacks) -> tuple[float, float]:
    size = max(np.linalg.norm(sums.projection), np.linalg.norm(projection, axis=(1, 2)).max(), np.finfo(float).tiny)
    whole = np.linalg.norm(projection.sum(0) - sums.projection) / size
    rest = np.linalg.norm(stacks.probes @ projection - stacks.values, axis=2)  # (m, b)
    sizes = np.linalg.norm(stacks.values, axis=2)
    return float(whole), float((rest / np.maximum(np.median(sizes, axis=1), np.finfo(float).tiny)[:, None]).max())
