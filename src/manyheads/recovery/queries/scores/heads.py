r"""Heads of a layer with any attention score, from the Jacobians of sequences of one repeated token.

Let all k tokens be z. All values are equal, so that a change of the attention weights moves nothing, and

.. math:: \frac{\partial y_r}{\partial x_j} = \sum_i a_i(r, j)\, W_i, \qquad
          a_i(r, j) = \frac{E_i(r - j)}{Z_i(r)}, \quad E_i(t) = e^{s_i(z, z, t)},

whatever the score s_i is, as long as it depends on positions by their offset. Stacked over the rows r, the Jacobians at
two offsets t and t' are P O and P D O with O the output spaces of the heads and D = E_i(t') / E_i(t) on head i: the
eigenvalues of (P O)^+ (P D O) come in groups, one for each head, as large as its rank. Heads that share their value
matrix (grouped queries) are told apart as well, since their columns of P differ. Random rows refine the spaces
(`refined_heads`).

No parameter of the score is needed, and no token has to have a known score. Derived here.
"""

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from manyheads.recovery._types import Array, Generator
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.repeated_tokens import difference, find_repeated_heads
from manyheads.recovery.queries.scores.refined_heads import refine_spaces
from manyheads.recovery.queries.values.projection_sum import Sums
from manyheads.recovery.queries.values.ranks import gap_rank
from manyheads.recovery.refusals import FitError, RankBudgetError

LENGTHS = (1.0, 2.0, 0.5, 1.0, 1.5)  # of the repeated tokens that are tried, relative to the first
LONGER = (1.0, 2.0, 4.0, 8.0, 16.0)  # of the first one, relative to sqrt(d)
BENT = 0.1  # relative deviation of answers from linear ones at which heads are told apart well
RIGHT = 1e-9  # of random rows, that the heads may leave before another token is tried
STENCIL = (4 / 5, -1 / 5, 4 / 105, -1 / 280)  # central differences of order 8
ROOM = 0.9  # of the largest norm, which leaves room for these differences
STEP = 1.0  # of differences, times the ninth root of the noise
SEEN = 5.0  # smallest singular value of the Jacobians at one offset, relative to their error
COMPLETE = 1e-6  # of the sum of the projections, that the heads may leave
EXTRA = 4  # directions beyond the rank of a head
APART = 1e-3  # eigenvalues, relative to their head's, that are nearer belong to one head
SPREAD = 10.0  # groups are this much farther apart than wide


@dataclass(frozen=True)
class Heads:
    """Projections W (m, d, d) of the heads, their ranks, and how well they were told apart."""

    projection: Array
    ranks: list[int]
    separation: float  # smallest distance of two heads, in relative weights
    residual: float  # what the heads leave of random rows, relative
    condition: float  # of all output spaces together
    sum_error: float = 0.0  # what the projections lack of their sum, relative

    @classmethod
    def of(cls, sums: Sums, spaces: list[Array], separation: float, rest: float) -> "Heads":
        """Take the projections of the heads out of their sum."""
        found = sums.split(spaces)
        return cls(found.projection, found.ranks.tolist(), separation, rest, found.condition, found.sum_error)


def find_heads(oracle: Oracle, sums: Sums, noise: float, rng: Generator) -> Heads:
    """Find the projections of all heads from a few directions of one repeated token, or from its whole Jacobians."""
    dim = oracle.dim
    length = int(np.clip(dim // 4, 6, 10))
    found: Heads | None = None
    refusal: FitError | RankBudgetError = FitError("no token was tried")
    first = first_length(oracle, rng)
    try:
        few = find_repeated_heads(oracle, np.eye(dim), first * np.sqrt(dim), noise, rng, tries=2)
        spaces = few.output_rows(EXTRA, few.floor(1e-7), rng).spaces()
        check_room(spaces)
        spaces, rest = refine_spaces(oracle, sums, spaces, first, rng)
        one = Heads.of(sums, spaces, 1 / few.condition, rest)
        if one.sum_error < COMPLETE:
            found = one
            if rest < max(RIGHT, 1e3 * noise):
                return found
    except (FitError, RankBudgetError) as error:
        refusal = error
    for scale in LENGTHS:
        z = repeated_token(oracle, scale * first, rng)
        jacobians = jacobians_at(oracle, z, length, step_at(z, noise))
        wrong = np.linalg.norm(jacobians.sum(1) - sums.projection, axis=(1, 2)).max()  # weights of a row add up to one
        try:
            spaces, separation = output_spaces(jacobians, float(wrong / np.linalg.norm(sums.projection)), rng)
            check_room(spaces)
            spaces, rest = refine_spaces(oracle, sums, spaces, first, rng)
        except (FitError, RankBudgetError) as error:
            refusal = error
            continue
        if found is None or rest < found.residual:
            found = Heads.of(sums, spaces, separation, rest)
        if found.residual < max(RIGHT, 1e3 * noise):
            break
    if found is None:
        raise refusal
    return found


def first_length(oracle: Oracle, rng: Generator) -> float:
    """Return the least length of tokens, relative to sqrt(d), at which answers are far from linear in them."""
    x, other = rng.standard_normal((2, 4, oracle.dim))
    most = min(np.sqrt(oracle.dim), oracle.limits.reach)
    x, other = (one * (most / 2 / np.linalg.norm(one, axis=1, keepdims=True)) for one in (x, other))
    longer = [scale for scale in LONGER if scale == LONGER[0] or scale * most < oracle.limits.reach]
    scales = np.array(longer)[:, None, None]
    zero = oracle(np.zeros((1, *x.shape)), read="all")
    one, two, both = (oracle(scales * tokens, read="all") - zero for tokens in (x, other, x + other))
    bent = np.linalg.norm(both - one - two, axis=(1, 2)) / np.linalg.norm(both, axis=(1, 2))
    if bent.max() < 2 * bent[0]:
        return longer[0]
    return longer[int(np.argmax(bent > min(BENT, bent.max() / 2)))]


def repeated_token(oracle: Oracle, scale: float, rng: Generator) -> Array:
    """Draw a token of norm `scale` sqrt(d), or less where the server takes no longer one with steps of differences."""
    z = rng.standard_normal(oracle.dim)
    return z * (min(scale * np.sqrt(oracle.dim), ROOM * oracle.limits.reach) / np.linalg.norm(z))


def step_at(z: Array, noise: float) -> float:
    """Return the step of differences in one coordinate at which noise and curvature err about as much."""
    return STEP * max(noise, 1e-16) ** (1 / 9) * float(np.linalg.norm(z)) / float(np.sqrt(len(z)))


def jacobians_at(oracle: Oracle, z: Array, length: int, step: float) -> Array:
    """Return dy_r / dx_j (r, j, d, d) at the sequence of `length` tokens z, zero for r < j."""

    def moved(place: int, shift: float) -> Array:
        x = np.tile(z, (len(z), length, 1))
        x[:, place] += shift * np.eye(len(z))
        return x

    places = [difference(oracle, functools.partial(moved, place), step, STENCIL) for place in range(length)]
    return np.moveaxis(np.array(places), 2, 0)


def output_spaces(jacobians: Array, wrong: float, rng: Generator) -> tuple[list[Array], float]:
    """Return output spaces (r_i, d) and how far heads are apart, from Jacobians (k, k, a, d) that err by `wrong`."""
    dim = jacobians.shape[-1]
    size = np.linalg.norm(jacobians[-1], axis=(1, 2))
    reach = int((size > 1e-6 * size.max()).sum())  # tokens that the last row sees
    FitError.if_below(reach, 2, "a token sees itself only: nothing tells heads apart")
    floor = max(1e-10, 3 * wrong)
    stacked = jacobians.reshape(-1, dim)
    rank = gap_rank(np.linalg.svd(stacked, compute_uv=False), max(1e-6, 10 * floor))
    space = np.linalg.svd(stacked, full_matrices=False)[2][:rank]  # (R, d)
    pencils = []
    for offsets in itertools.combinations(range(min(reach, 4)), 2):
        rows = np.arange(offsets[1], len(jacobians))
        one, two = (jacobians[rows, rows - offset].reshape(-1, dim) @ space.T for offset in offsets)
        pencil, _, seen_rank, values = np.linalg.lstsq(one, two, rcond=None)
        if seen_rank == rank and values[-1] > SEEN * floor * values[0]:
            pencils.append(pencil)
    if not pencils:
        what = "Jacobians of no offset reach the output spaces of all heads: heads share values, or answers are noisy"
        raise FitError(what, rank, dim)
    groups, separation = _groups(pencils, floor, rng)
    return [group @ space for group in groups], separation


def _groups(pencils: list[Array], floor: float, rng: Generator) -> tuple[list[Array], float]:
    """Return the common invariant row spaces (r_i, R) of all pencils, and the least distance of two of them."""
    mixed: Array = np.sum([rng.uniform(0.5, 1.0) * one / float(np.linalg.norm(one, 2)) for one in pencils], axis=0)
    values, vectors = np.linalg.eig(mixed.T)  # columns: left eigenvectors of the pencils
    order = np.argsort(values.real)
    values, vectors = values[order], vectors[:, order]
    gaps = np.diff(values.real)
    cuts = np.flatnonzero(gaps > max(APART * np.abs(values).max(), floor)) + 1
    parts = np.split(np.arange(len(values)), cuts)
    columns = (np.concatenate([vectors[:, part].real, vectors[:, part].imag], axis=1) for part in parts)
    groups = [np.linalg.svd(one, full_matrices=False)[0][:, : len(p)].T for one, p in zip(columns, parts, strict=True)]
    width = max(float(np.ptp(values[part].real) + np.abs(values[part].imag).max()) for part in parts)
    separation = float(gaps[cuts - 1].min() / np.abs(values).max()) if len(cuts) else 1.0
    if width * SPREAD > separation * float(np.abs(values).max()):
        raise FitError("weights on a repeated token are too close to tell the heads apart", width, separation)
    return groups, separation


def check_room(spaces: list[Array]) -> None:
    """Refuse output spaces that do not fit beside each other."""
    ranks, whole = [len(space) for space in spaces], np.concatenate(spaces)
    condition = float(np.linalg.cond(whole))
    if len(whole) > whole.shape[1] or condition > 1e10:
        what = f"output spaces of {len(ranks)} heads overlap: ranks {ranks} in dimension {whole.shape[1]}"
        raise RankBudgetError(what, condition, 1e10)
