r"""Heads from sequences of one repeated token, with or without a norm in front, and with positions of any kind.

Where all tokens of a sequence are z, all values are equal, and what moving one of them changes in the weights changes
no answer. So the derivative of row n with respect to the token t places before, along e, is exactly

.. math:: \sum_i p_i(n, t) \; e W_i, \qquad p_i(n, t) = \frac{b_i(t)}{\sum_{s<n} b_i(s)},
          \qquad b_i(t) = e^{z^\top \Theta_i^{(t)} z},

whatever the logits depend on. z is moved on a sphere, so that e is tangent at z: a norm may stand in front. As a table
over n and t every head has rank one, u_i(n) b_i(t): two rows n, with more offsets than heads, are a pencil whose
eigenvalues are ratios of the u_i and whose eigenvectors are the e W_i, and since the p_i(n, .) sum to one their scale
is known. Heads that share a value matrix (grouped queries) are told apart as well. With p known, one moved token shows
e W_i at any e. Derived here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from manyheads.recovery._types import Array, Ask, Generator, Indices
from manyheads.recovery.queries.values.probes import Stacks
from manyheads.recovery.queries.values.ranks import gap_rank
from manyheads.recovery.refusals import FitError, RankBudgetError

STEP = 2e-3  # angle between the points of a difference, in radians
STENCIL = (3 / 4, -3 / 20, 1 / 60)  # central differences of order 6
OFFSETS, MOST = 8, 64  # offsets at first, and at most; heads must be fewer by two
RANK = 1e-7  # singular values below are the error of the differences
ROUGH = 1e-5  # relative error of the rank-one tables from which a token is not used
LEAK = 30.0  # of a head in another, relative to the misfit of the tables times their condition: 3 to 30 measured
COARSEST = 1e-2  # floor of singular values, at most
TRIES = 4  # tokens z that are tried
GOOD = 10.0  # amplification of errors by a token, for each head, below which no other is tried
USABLE = 1e3  # amplification below which two tokens are enough


def difference(
    ask: Ask, sequences: Callable[[float], Array], step: float, stencil: tuple[float, ...] = STENCIL
) -> Array:
    """Return the derivatives (n, k, d) of the answers to sequences(s) (n, k, d) at s = 0."""
    sides = [
        [ask(sequences(sign * place * step), read="all") for sign in (1, -1)] for place in range(1, len(stencil) + 1)
    ]
    parts = [weight / step * (above - below) for weight, (above, below) in zip(stencil, sides, strict=True)]
    return np.asarray(sum(parts))


@dataclass(frozen=True)
class RepeatedToken:
    """Asks about sequences of one token z in which one place is moved on the sphere through z."""

    ask: Ask
    basis: Array  # orthonormal rows (b, d) that span the tokens
    axis: Array  # z, of norm one (d,)
    radius: float  # |z|

    def directions(self, count: int, rng: Generator) -> Array:
        """Draw orthonormal directions (count, d) at right angles to z."""
        drawn = rng.standard_normal((count, len(self.basis))) @ self.basis
        drawn -= np.outer(drawn @ self.axis, self.axis)
        return np.linalg.qr(drawn.T)[0].T

    def derivatives(self, directions: Array, places: Indices, length: int) -> Array:
        """Return the derivatives (a, p, length, d) of all rows, each place moved along each direction (a, d)."""
        moved = np.repeat(directions, len(places), axis=0)
        where, z = np.tile(places, len(directions)), self.radius * self.axis

        def sequences(angle: float) -> Array:
            x = np.tile(z, (len(moved), length, 1))
            x[np.arange(len(moved)), where] = np.cos(angle) * z + self.radius * np.sin(angle) * moved
            return x

        found = difference(self.ask, sequences, STEP) / self.radius
        return found.reshape(len(directions), len(places), length, -1)


@dataclass(frozen=True)
class RepeatedHeads:
    """The heads at one token z: shares p_i(n, n - 1) of the first token in rows n = 1 .. T, (T, m)."""

    token: RepeatedToken
    shares: Array
    condition: float  # multiplies errors of answers
    residual: float  # relative error of the tables of rank one

    def values(self, directions: Array) -> Array:
        """Return e W_i, (m, a, d), at directions (a, d), from one moved token each."""
        rows = self.token.derivatives(directions, np.array([0]), len(self.shares))[:, 0]  # (a, T, d)
        return np.einsum("mt,atd->mad", np.linalg.pinv(self.shares), rows)

    @property
    def leak(self) -> float:
        """How much of a head is in the values of another, relative: heads that attend nearly alike are mixed."""
        return LEAK * self.residual * self.condition

    def floor(self, least: float) -> float:
        """Return the singular value of a head's values, relative, below which it is not the head's own."""
        return min(max(10 * self.residual, self.leak, least), COARSEST)

    def output_rows(self, extra: int, floor: float, rng: Generator) -> Stacks:
        """Return e W_i at as many directions e as exhaust the output spaces, and the ranks of these."""
        dim, heads = len(self.token.axis), self.shares.shape[1]
        most, wanted = len(self.token.basis) - 1, max(4, dim // heads + extra)
        directions = self.token.directions(most, rng)
        rows: Array = np.zeros((heads, 0, dim))
        while True:
            count = min(wanted, most)
            rows = np.concatenate([rows, self.values(directions[rows.shape[1] : count])], axis=1)
            spectra: list[Array] = [np.linalg.svd(one, compute_uv=False) for one in rows]
            ranks = np.array([gap_rank(one, floor) for one in spectra], np.intp)
            if ranks.max() + min(extra, 2) <= count:
                levels = max(floor, 1e-9) * np.linalg.norm(rows, axis=(1, 2)) / np.sqrt(count)
                return Stacks(directions[:count], rows, levels, ranks)
            if count == most:
                raise RankBudgetError(f"{count} directions do not exhaust {heads} output spaces", ranks.max(), most)
            wanted *= 2


def find_repeated_heads(
    ask: Ask, basis: Array, radius: float, noise: float, rng: Generator, tries: int = TRIES
) -> RepeatedHeads:
    """Find the heads at the best of a few random tokens of a norm."""
    best: RepeatedHeads | None = None
    offsets, rest = OFFSETS, np.inf
    for turn in range(tries):
        axis = rng.standard_normal(len(basis)) @ basis
        token = RepeatedToken(ask, basis, axis / np.linalg.norm(axis), radius)
        while True:
            found = _heads_at(token, offsets, max(RANK, 1e2 * noise / STEP), rng)
            if not isinstance(found, int):
                break
            offsets *= 2
            if offsets > MOST:
                what = f"moved tokens show {found} dimensions, for {MOST} offsets: too many heads"
                raise RankBudgetError(what, found, MOST - 2)
        if found is None:
            continue
        rest = min(rest, found.residual)
        if found.residual > ROUGH:
            continue
        rank = (found.shares.shape[1], -found.condition)
        if best is None or rank > (best.shares.shape[1], -best.condition):
            best = found
        if best.condition < (USABLE if turn else GOOD * rank[0]):
            break
    if best is None:
        raise FitError("repeated tokens show no heads: weights of more than positions, or noisy answers", rest, ROUGH)
    return best


def _heads_at(token: RepeatedToken, offsets: int, cut: float, rng: Generator) -> RepeatedHeads | int | None:
    """Return the heads at a token; how many there seem to be, where offsets are too few; None if they do not split."""
    length = 2 * offsets
    moved = token.derivatives(token.directions(1, rng), np.arange(length), length)  # (1, place, row, d)
    rows, back = np.arange(offsets - 1, length), np.arange(offsets)
    table = moved[:, rows[:, None] - back, rows[:, None]]  # (1, n, t, d)
    table = np.moveaxis(table, 0, 2).reshape(len(rows), offsets, -1)
    flat = table.reshape(-1, table.shape[2])
    spectrum, frame = np.linalg.svd(flat, full_matrices=False)[1:]
    heads = gap_rank(spectrum, cut)
    FitError.if_below(heads, 1, "moved tokens change no answer: no head reads the tokens")
    if heads > offsets - 2:
        return heads
    small = table @ frame[:heads].T  # (n, t, m)
    pencil = np.linalg.lstsq(small[-1], small[0], rcond=None)[0]
    values, vectors = np.linalg.eig(pencil)
    if np.abs(values.imag).max() > 1e-6 * np.abs(values).max():
        return None
    tables = small @ vectors.real  # u(n) b(t), scaled
    weights, worst = [], 0.0
    for head in range(heads):
        size, right = np.linalg.svd(tables[:, :, head])[1:]
        worst = max(worst, float(size[1] / size[0]))
        weights.append(right[0] * np.sign(right[0].sum()))
    odds = np.array(weights)  # b_i(t), (m, T), each up to a factor
    if (odds <= 0).any():
        return None
    shares = (odds / np.cumsum(odds, axis=1)).T  # (T, m)
    condition = float(np.linalg.cond(shares) * np.linalg.cond(vectors.real))
    return RepeatedHeads(token, shares, condition, worst)
