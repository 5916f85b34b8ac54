r"""Output-value circuits W_i from their sum and their output spaces, stage S3.

No query is needed. What is measured checks it: sum_i W_i = W_S, and v_b W_i is what head i was seen to read. Derived
here.

Sum of the output-value circuits, stage S0, and its parts: with one token attention is 1, and the layer x W_S + c.

With orthonormal bases O_i (r_i, d) of the row spaces of W_i, stacked to O with independent rows,

.. math:: W_S = \sum_i W_i = \sum_i V_i O_i, \qquad W_S O^+ = [V_1, \dots, V_m], \qquad W_i = W_S O^{+}_{[:, i]} O_i .
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from manyheads.recovery._types import Array, Ask, Figures, Generator, Indices
from manyheads.recovery.queries.values.probes import Stacks
from manyheads.recovery.queries.values.ranks import CLEAR, gap_rank, rank_by_gap
from manyheads.recovery.refusals import FitError, RankBudgetError
from manyheads.recovery.result.results import StageLog


class Projections(NamedTuple):
    """The projections of all heads, and how well they can be told apart."""

    projection: Array  # W (m, d, d)
    # O^+_i (d, r_i), which take an answer to coordinates of head i; None for heads of full rank
    splits: tuple[Array, ...] | None
    ranks: Indices  # (m,)
    condition: float  # condition number of O: errors of the output spaces reach the projections times this
    sum_error: float  # |sum_i W_i - W_S|, relative to the largest of these matrices
    # Largest |v_b W_i - row| over the norm of the head's rows: a head exchanged at one probe is near one
    row_error: float = 0.0

    @property
    def readers(self) -> list[Array]:
        """V_i (d, r_i), which take a token to the coordinates of its value in head i."""
        assert self.splits is not None
        return [part @ split for part, split in zip(self.projection, self.splits, strict=True)]

    def take(self, chosen: Indices) -> "Projections":
        """Return some of the heads."""
        splits = None if self.splits is None else tuple(self.splits[head] for head in chosen)
        return self._replace(projection=self.projection[chosen], splits=splits, ranks=self.ranks[chosen])

    def figures(self) -> Figures:
        """Return what a report shows of this stage."""
        return {"condition": self.condition, "sum error": self.sum_error, "row error": self.row_error}


class Sums(NamedTuple):
    """Sum of the projections W_S = sum_i W_i (d, d), and the output bias c (d,)."""

    projection: Array
    bias: Array

    def read(self, x: Array) -> Array:
        """Return x W_S + c, what one token (..., d) gives."""
        return x @ self.projection + self.bias

    def append(self, answers: Array, probes: Array) -> Array:
        """Append the answer v W_S of open gates to the answers (b, n, d) at probes v (b, d)."""
        return np.concatenate([answers, (probes @ self.projection)[:, None]], axis=1)

    def split(self, spaces: Sequence[Array]) -> "Projections":
        r"""Return the projections of heads with output spaces O_i (r_i, d), orthonormal rows, by the formula above."""
        ranks, whole, dim = [len(space) for space in spaces], np.concatenate(spaces), len(self.bias)
        turn, triangle = np.linalg.qr(whole.T)
        singular = np.linalg.svd(triangle, compute_uv=False)
        least = np.finfo(float).eps * dim
        if len(whole) > dim or not singular[-1] > least * singular[0]:
            what = f"output spaces of ranks {ranks} overlap in dimension {dim}: full rank, or noise"
            raise RankBudgetError(f"{what}; take method='bounded'", singular[-1] / singular[0], least)
        inverse = np.linalg.solve(triangle, turn.T).T  # O^+ = Q R^-T, (d, sum of ranks)
        splits = tuple(np.split(inverse, np.cumsum(ranks)[:-1], axis=1))
        projection = np.array([self.projection @ part @ space for part, space in zip(splits, spaces, strict=True)])
        condition = float(singular[0] / singular[-1])
        return Projections(projection, splits, np.array(ranks, np.intp), condition, self.error_of(projection))

    def error_of(self, projection: Array) -> float:
        """Return |sum_i W_i - W_S| of projections (m, d, d), relative to the largest of these matrices."""
        sizes = np.linalg.norm(self.projection), np.linalg.norm(projection, axis=(1, 2)).max()
        return float(np.linalg.norm(projection.sum(0) - self.projection) / max(*sizes, np.finfo(float).tiny))

    def curvature(self, ask: Ask, rng: Generator, count: int) -> float:
        """Return how far the answers to `count` random tokens are from affine in them, relative."""
        probe = rng.standard_normal((count, 1, len(self.bias)))
        expected = self.read(probe[:, 0])
        size = np.linalg.norm(expected - self.bias) + np.finfo(np.float64).tiny
        return float(np.linalg.norm(ask(probe, read="last") - expected) / size)


def read_sums(oracle: Ask, dim: int, reach: float = np.inf) -> Sums:
    r"""Read W_S and c from d + 1 sequences of one token, none longer than `reach`.

    .. math:: F(0) = c, \qquad F(\sqrt d\, e_a) = c + \sqrt d\, e_a W_S
    """
    scale = min(np.sqrt(dim), reach)  # the norm that tokens have in all stages
    answers = oracle(np.concatenate([np.zeros((1, dim)), scale * np.eye(dim)])[:, None], read="last")
    return Sums((answers[1:] - answers[0]) / scale, answers[0])


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
