r"""Heads of a layer with any attention score, from the Jacobians of sequences of one repeated token.

Let all k tokens be z. All values are equal, so that a change of the attention weights moves nothing, and

.. math:: \frac{\partial y_r}{\partial x_j} = \sum_i a_i(r, j)\, W_i, \qquad
          a_i(r, j) = \frac{E_i(r - j)}{Z_i(r)}, \quad E_i(t) = e^{s_i(z, z, t)},

whatever the score s_i is, as long as it depends on positions by their offset. Stacked over the rows r, the Jacobians at
two offsets t and t' are P O and P D O with O the output spaces of the heads and D = E_i(t') / E_i(t) on head i: the
eigenvalues of (P O)^+ (P D O) come in groups, one for each head, as large as its rank. Heads that share their value
matrix (grouped queries) are told apart as well, since their columns of P differ. Random rows refine the spaces.

No parameter of the score is needed, and no token has to have a known score. Derived here.

Output spaces of heads, refined by the answers to sequences of two random tokens.

At one repeated token the weights of two heads may be close, and then errors of the Jacobians mix their spaces. Random
tokens x_1, x_2 tell all heads apart. Since the weights of a row add up to one,

.. math:: u = y_2 - c - x_2 W_S = \sum_i a_i\, v\, \Pi_i, \qquad v = (x_1 - x_2)\, W_S,

with the projectors Pi_i = T_i O_i onto the output spaces O_i of the heads, whatever the scores are: u T_i and v T_i are
parallel for every head. Where T_i is a little wrong, what they leave, u T_i - a_i v T_i, is removed by adding to T_i
columns of the other heads, which is one linear problem for each head (Gauss-Newton). Derived here.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyheads.recovery._types import Array, Generator
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.repeated_tokens import difference, find_repeated_heads
from manyheads.recovery.queries.values.output_spaces import Sums
from manyheads.recovery.queries.values.ranks import gap_rank
from manyheads.recovery.refusals import FitError, RankBudgetError

ROUNDS = 12  # of linear problems
STEPS = 40  # of conjugate gradients in each
ENOUGH = 1e-8  # of the squared residual of a linear problem
BLIND = 1e-3  # curvature below which rows do not tell: heads that share their values are not told apart by any weights
SLOW = 0.5  # of what was left, from which another round does not help
EXCESS = 6  # sequences, relative to the dimension


def refine_spaces(
    oracle: Oracle, sums: Sums, spaces: list[Array], length: float, rng: Generator, sphere: Array | None = None
) -> tuple[list[Array], float]:
    """Return output spaces (r_i, d) that explain random rows better, and what they leave of them, relative.

    `length` is that of tokens that do not attend nearly evenly, relative to sqrt(d). With a norm in front all tokens
    have it, in the space of the orthonormal rows `sphere` (b, d).
    """
    whole = np.concatenate(spaces)
    count = EXCESS * oracle.dim + 32
    if sphere is None:
        x: Array = rng.standard_normal((count, 2, oracle.dim))
        x = oracle.limits.shortened(x * (length * np.exp(rng.uniform(np.log(0.3), np.log(1.5), (count, 1, 1)))))
    else:
        x = rng.standard_normal((count, 2, len(sphere))) @ sphere
        x *= length * oracle.dim**0.5 / np.linalg.norm(x, axis=2, keepdims=True)
    y = oracle(x, read="last")
    columns = np.linalg.pinv(whole)  # T, block by block
    cuts = np.cumsum([len(space) for space in spaces])[:-1]
    moved, along = y - sums.read(x[:, 1]), (x[:, 0] - x[:, 1]) @ sums.projection
    size = np.linalg.norm(along, axis=1, keepdims=True)
    moved, along = moved / size, along / size
    best, rest = columns, np.inf
    for _ in range(ROUNDS):
        blocks = np.split(columns, cuts, axis=1)
        left = []
        for block in blocks:
            mine, own = moved @ block, along @ block
            left.append(mine - own * ((mine * own).sum(1) / (own**2).sum(1))[:, None])
        before, now = rest, float(np.linalg.norm(np.concatenate(left, axis=1)) / np.linalg.norm(moved @ columns))
        if now < rest:
            best, rest = columns, now
        if now > SLOW * before or len(blocks) == 1:
            break
        others = (np.concatenate(blocks[:head] + blocks[head + 1 :], axis=1) for head in range(len(blocks)))
        mixtures = (_mixture(blocks, head, moved, along, rest_) for head, rest_ in enumerate(left))
        moves = (other @ mixture for other, mixture in zip(others, mixtures, strict=True))
        columns = np.concatenate([block - move for block, move in zip(blocks, moves, strict=True)], axis=1)
    return np.split(np.linalg.pinv(best), cuts), rest


def _mixture(blocks: list[Array], head: int, moved: Array, along: Array, left: Array) -> Array:
    """Return the columns of other heads (R - r, r) that a head has too much, from what it leaves (N, r)."""
    own = along @ blocks[head]
    share = ((moved @ blocks[head]) * own).sum(1) / (own**2).sum(1)
    own = own / np.linalg.norm(own, axis=1, keepdims=True)
    features = (moved - share[:, None] * along) @ np.concatenate(blocks[:head] + blocks[head + 1 :], axis=1)
    basis, triangle = np.linalg.qr(features)

    def apply(x: Array) -> Array:
        y = basis @ x
        return basis.T @ (y - own * (own * y).sum(1, keepdims=True))

    residual = basis.T @ left
    found, direction, size = np.zeros_like(residual), residual, float((residual**2).sum())
    first = size
    for _ in range(STEPS):
        if size <= ENOUGH * first:
            break
        turned = apply(direction)
        curvature = float((direction * turned).sum())
        if curvature < BLIND * float((direction**2).sum()):
            break
        step = size / curvature
        found, residual = found + step * direction, residual - step * turned
        size, before = float((residual**2).sum()), size
        direction = residual + (size / before) * direction
    return np.linalg.lstsq(triangle, found, rcond=1e-12)[0]


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
Reading = tuple[float, Any]  # what a repeated token shows, after its misfit


@dataclass(frozen=True)
class Heads:
    """Projections W (m, d, d) of the heads, their ranks, and how well they were told apart."""

    projection: Array
    ranks: list[int]
    separation: float  # smallest distance of two heads, in relative weights
    residual: float  # what the heads leave of random rows, relative
    condition: float  # of all output spaces together
    sum_error: float = 0.0  # what the projections lack of their sum, relative
    # Beside sinks biases of values v (m, d), None if absent, and c (d,)
    value_bias: Array | None = None
    bias: Array | None = None

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
    first = first_length(oracle, rng)
    with contextlib.suppress(FitError, RankBudgetError):
        few = find_repeated_heads(oracle, np.eye(dim), first * np.sqrt(dim), noise, rng, tries=2)
        spaces = few.output_rows(EXTRA, few.floor(1e-7), rng).spaces()
        check_room(spaces)
        spaces, rest = refine_spaces(oracle, sums, spaces, first, rng)
        one = Heads.of(sums, spaces, 1 / few.condition, rest)
        if one.sum_error < COMPLETE:
            found = one
            if rest < max(RIGHT, 1e3 * noise):
                return found

    def read(z: Array) -> Reading:
        jacobians = jacobians_at(oracle, z, length, step_at(z, noise))
        wrong = np.linalg.norm(jacobians.sum(1) - sums.projection, axis=(1, 2)).max()  # weights of a row add up to one
        spaces, separation = output_spaces(jacobians, float(wrong / np.linalg.norm(sums.projection)), rng)
        check_room(spaces)
        spaces, rest = refine_spaces(oracle, sums, spaces, first, rng)
        return rest, Heads.of(sums, spaces, separation, rest)

    best = None if found is None else (found.residual, found)
    heads: Heads = best_token(oracle, first, max(RIGHT, 1e3 * noise), rng, read, best)
    return heads


def best_token(
    oracle: Oracle, first: float, enough: float, rng: Generator, read: Callable[[Array], Reading], best: Reading | None
) -> Any:
    """Return what a repeated token shows with the least misfit, of tokens of several lengths until one is enough."""
    refusal: FitError | RankBudgetError | None = None
    for scale in LENGTHS:
        try:
            rest, found = read(repeated_token(oracle, scale * first, rng))
        except (FitError, RankBudgetError) as error:
            refusal = error
            continue
        if best is None or rest < best[0]:
            best = rest, found
        if best[0] < enough:
            break
    if best is None:
        raise refusal or FitError("no token was tried")
    return best[1]


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
