r"""Output-value circuits W_i from their sum and their output spaces (`projection_sum`), stage S3.

No query is needed. What is measured checks it: sum_i W_i = W_S, and v_b W_i is what head i was seen to read. Derived
here.
"""

from collections.abc import Callable

import numpy as np

from manyheads.recovery._types import Array
from manyheads.recovery.queries.values.probes import Stacks
from manyheads.recovery.queries.values.projection_sum import Projections, Sums
from manyheads.recovery.queries.values.ranks import CLEAR, gap_rank, rank_by_gap
from manyheads.recovery.refusals import FitError, RankBudgetError
from manyheads.recovery.result.results import StageLog

CUT = 0.01  # share of the largest singular value of a projection below which there may be noise alone


def read_projections(
    log: StageLog, sums: Sums, read: Callable[[], Stacks], noise: float, *, alone: bool, whole: bool = False
) -> Projections:
    """Return the projection of the only head, or those of all heads from what they read at some probes."""
    if alone:
        return single_projection(sums, noise)
    with log.stage("values") as figures:
        stacks = read()
        figures |= stacks.figures()
    with log.stage("subspaces") as figures:
        found = split_projections(sums, stacks, whole=whole)
        figures |= found.figures()
    return found


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
        found = sums.split(stacks.spaces())
        found = found._replace(row_error=_row_error(found.projection, stacks))
    elif len(stacks.probes) >= dim:
        found = _fit_probes(sums, stacks)
    elif ranks is None:  # probes were dropped, so that d of them were asked and fewer are left
        probes = len(stacks.probes)
        why = f"{probes} probes leave output spaces open: another seed, or method='bounded'"
        raise RankBudgetError(why, probes, dim)
    else:
        why = f"{len(ranks)} heads write {ranks.sum()} dimensions together, of {dim}: take method='bounded'"
        raise RankBudgetError(why, ranks.sum(), dim)
    # Errors of the spaces pass through O^+; what is checked is of the size of the rows.
    sizes = np.linalg.norm(stacks.values, axis=(1, 2)) / np.sqrt(len(stacks.probes))
    explained = float(np.max(stacks.levels / np.maximum(sizes, np.finfo(float).tiny)))
    allowed = min(0.1, CLEAR * explained * max(found.condition, 1.0) + 1e-9)
    why = "the projections contradict their answers: try another seed"
    FitError.if_above(max(found.sum_error, found.row_error), allowed, why)
    return found


def single_projection(sums: Sums, noise: float) -> Projections:
    """Return the projection of the only head: W_S."""
    _, singular, right = np.linalg.svd(sums.projection)
    rank = rank_by_gap(singular, noise * float(singular[0]) * np.sqrt(len(singular)))
    splits = None if rank is None else (right[:rank].T,)
    ranks = np.array([len(singular) if rank is None else rank], np.intp)
    return Projections(sums.projection[None], splits, ranks, 1.0, 0.0)


def _fit_probes(sums: Sums, stacks: Stacks) -> Projections:
    """Least squares over the probes, which span the space; what is left of W_S is shared out."""
    projection = np.stack([np.linalg.lstsq(stacks.probes, rows, rcond=None)[0] for rows in stacks.values])
    errors = sums.error_of(projection), _row_error(projection, stacks)
    projection += (sums.projection - projection.sum(0)) / len(projection)
    full = np.full(len(projection), len(sums.bias), np.intp)
    return Projections(projection, None, full, float(np.linalg.cond(stacks.probes)), *errors)


def _cut_at_gaps(found: Projections) -> Projections:
    """Cut every projection at the widest gap of its singular values that ends in what may be noise."""
    left, singular, right = np.linalg.svd(found.projection)
    ranks = np.array([gap_rank(values, CUT) for values in singular], np.intp)
    kept = np.arange(singular.shape[1]) < ranks[:, None]
    return found._replace(projection=(left * (kept * singular)[:, None]) @ right, ranks=ranks)


def _row_error(projection: Array, stacks: Stacks) -> float:
    rest = np.linalg.norm(stacks.probes @ projection - stacks.values, axis=2)  # (m, b)
    sizes = np.median(np.linalg.norm(stacks.values, axis=2), axis=1)
    return float((rest / np.maximum(sizes, np.finfo(float).tiny)[:, None]).max())
