r"""Heads at a pair of tokens of a table, from copies alone, and their order from triangles of tokens.

No probe can be moved and no two queries share a difference of tokens. But copies shift the logits of all heads at once:
in sequences of j copies of a and k of b, what a row at b and a row at a show is

.. math:: z_s = y_b - b W_S - c = \sum_i \sigma(l_i - s) w_i, \qquad
          z'_s = a W_S + c - y_a = \sum_i \sigma(l'_i + s) w_i, \qquad s = \ln(k/j),\ w_i = (a - b) W_i,

with l_i = b^T Theta_i (a - b) + beta_i^T (a - b), l'_i = -a^T Theta_i (a - b) - beta_i^T (a - b), and sum_i w_i
known. The columns of all these rows span m dimensions, and g(l, l') = (sigma(l - s), sigma(l' + s), 1) lies in their
span exactly where (l, l') are the logits of a head: m zeros of a distance in two variables, which a grid finds. The
rows at b alone leave one variable, in which m sigmoids are nearly dependent: for logits of random layers noise was
multiplied by 1e6 at 8 heads, by 7e2 with both kinds of rows, and by 2e4 at 12.

One pair shows all heads whose logits differ, in no order. Three tokens order them: for each head

.. math:: (a - b) W_i + (b - c) W_i = (a - c) W_i .

Derived here.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from manyheads.recovery._types import Array, Generator
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.gates.pairs import repeat_pair
from manyheads.recovery.queries.nets.sigmoid_network import EPS, TINY, NetDesign, fit_nets, net_amplification
from manyheads.recovery.queries.values.output_spaces import Sums
from manyheads.recovery.refusals import FitError

COPIES = 24  # copies of either token, if the longest sequence has room: the more, the wider the range of shifts
FEWER = 5  # copies of the first token, where the rows at all copies of the second are shown by one call
ASKED = 14  # shifts of pairs whose number of heads is not known, where every one is a call
SPARE = 2  # shifts beyond the number of heads
WORST = 1e6  # amplification of noise by a pair, above which it is left out
CLOSE = 1e-3  # error of a triangle, relative to its values, up to which it is one
TRIES = 12  # pairs of the first hubs, at most
SAME = 4  # pairs with the same number of heads, and none with more, after which no further one is tried
REACH, GRID = 6.0, 25  # largest logit at which heads are looked for, and how many are tried from there to its negative
APART = 1e-2  # logits of two heads differ by more
STEPS = 30  # Gauss-Newton steps from each of them


@dataclass(frozen=True)
class TablePairs:
    """Asks about pairs of tokens of a table (V, d), by their rows."""

    oracle: Oracle
    sums: Sums
    table: Array
    noise: float

    def copies(self, heads: int | None) -> list[tuple[int, int]]:
        """Return the copies (j, k) of the tokens that a row has seen, for so many heads or for an unknown number."""
        most = int(min(COPIES, self.oracle.longest // 2))
        if self.oracle.causal and not self.oracle.limits.last_row:
            first = min(FEWER, most)
            return [(first, k) for k in range(1, most + 1)]
        count = ASKED if heads is None else heads + SPARE
        shifts = np.linspace(-np.log(most), np.log(most), count)
        counts = np.maximum(np.rint(np.exp(np.abs(shifts))).astype(int), 1)
        return [(1, int(n)) if s > 0 else (int(n), 1) for s, n in zip(shifts, counts, strict=True)]

    def design(self, heads: int | None) -> NetDesign:
        """Return the net of the rows: one logit at b and one at a for each head; the last row is the sum."""
        shifts = np.array([np.log(k / j) for j, k in self.copies(heads)])
        # Where rows of a causal layer are read, a has the place of b
        other = shifts if self.oracle.causal else -shifts
        features = np.kron(np.eye(2), np.ones((len(shifts), 1)))
        return NetDesign.of(features, np.concatenate([shifts, other])).with_sum()

    def respond(self, near: Array, own: Array, heads: int | None = None) -> Array:
        """Return z (n, rows, d) of pairs a (n, d) and b (n, d): at b, at a, and their sum."""
        copies = self.copies(heads)
        if self.oracle.causal:
            at_own, at_near = (self._last(*pair, copies) for pair in ((near, own), (own, near)))
        else:
            parts = [self.oracle(repeat_pair(near, own, j, k), read=(-1, 0)) for j, k in copies]
            at_own, at_near = np.moveaxis(np.stack(parts, axis=1), 2, 0)
        rows = [at_own - self.sums.read(own)[:, None], self.sums.read(near)[:, None] - at_near]
        rows.append(((near - own) @ self.sums.projection)[:, None])
        return np.concatenate(rows, axis=1)

    def _last(self, first: Array, second: Array, copies: list[tuple[int, int]]) -> Array:
        """Return the rows (n, shifts, d) at the second token, of a causal layer."""
        if self.oracle.limits.last_row:
            return np.stack([self.oracle(repeat_pair(first, second, j, k)) for j, k in copies], axis=1)
        j, k = copies[-1]
        return self.oracle(repeat_pair(first, second, j, k), read=tuple(range(j, j + k)))


class PairHeads(NamedTuple):
    """Heads of one pair in no order: values (m, d), and the error of a row of them."""

    values: Array
    error: float


def find_pair_heads(pairs: TablePairs, answers: Array, heads: int | None = None) -> PairHeads | None:
    """Find the heads in the answers z (rows, d) of a pair; None where they do not fit or are too uncertain."""
    level = max(pairs.noise, 2 * EPS) * 4 * float(np.sqrt(np.mean(answers**2)) + np.abs(pairs.sums.bias).max())
    spectrum = np.linalg.svd(answers, compute_uv=False)
    seen = int((spectrum > 8 * level * (np.sqrt(len(answers)) + np.sqrt(answers.shape[1]))).sum())
    allowed = 30 * level * np.sqrt(answers.size) / np.linalg.norm(answers)
    design = pairs.design(heads)
    for count in range(seen, max(seen - 2, 0), -1) if heads is None else [heads]:
        if count > seen:
            return None
        start = find_logits(answers, count, design)
        if start is None:
            continue
        net = fit_nets(design, answers, start, iterations=200, tolerance=1e-9)
        if net.residual <= allowed:
            gain = float(net_amplification(design, net)[1].max())
            return PairHeads(net.values, level * gain * np.sqrt(answers.shape[1])) if gain < WORST else None
    return None


def find_logits(answers: Array, heads: int, design: NetDesign) -> Array | None:
    """Return the logits (m, 2) at which units of the design lie in the span of the answers (rows, d)."""
    span = np.linalg.svd(answers, full_matrices=False)[0][:, :heads]
    axis = np.linspace(-REACH, REACH, GRID)
    points = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    damping = np.full(len(points), 1e-3)

    def rest(logits: Array) -> tuple[Array, Array]:
        units = design.units(logits).T  # (points, rows)
        return units - (units @ span) @ span.T, units

    off, units = rest(points)
    for _ in range(STEPS):
        slopes = (units * (1 - units))[:, :, None] * design.features  # (points, rows, 2)
        slopes -= span @ (span.T @ slopes)
        normal = np.swapaxes(slopes, 1, 2) @ slopes
        scale = np.trace(normal, axis1=1, axis2=2)[:, None, None] * np.eye(2)
        right = np.swapaxes(slopes, 1, 2) @ off[:, :, None]
        moved = np.linalg.solve(normal + damping[:, None, None] * scale + TINY * np.eye(2), right)[..., 0]
        trial = np.clip(points - np.clip(moved, -1, 1), -2 * REACH, 2 * REACH)
        further, seen = rest(trial)
        better = (further**2).sum(1) < (off**2).sum(1)
        points, off, units = (
            np.where(better[:, None], a, b) for a, b in ((trial, points), (further, off), (seen, units))
        )
        damping = np.where(better, damping / 10, damping * 8)
    found: list[Array] = []
    for place in np.argsort((off**2).sum(1)):
        if all(np.abs(points[place] - other).max() > APART for other in found):
            found.append(points[place])
        if len(found) == heads:
            return np.array(found)
    return None


def order_triangle(first: Array, second: Array, third: Array) -> tuple[Array, Array] | None:
    """Return `second` and `third` (m, d) in the order that makes first + second = third; None if there is none."""
    rest = first[:, None, None] + second[None, :, None] - third[None, None]  # (i, j, k, d)
    cost = np.linalg.norm(rest, axis=-1)
    heads = len(first)
    chosen = [np.unravel_index(int(np.argmin(cost[head])), (heads, heads)) for head in range(heads)]
    left, right = (np.array([pair[side] for pair in chosen]) for side in (0, 1))
    size = float(np.linalg.norm(third) / np.sqrt(heads))
    if len(set(left)) < heads or len(set(right)) < heads:
        return None
    if max(cost[head][chosen[head]] for head in range(heads)) > CLOSE * size:
        return None
    return second[left], third[right]


class Hubs(NamedTuple):
    """Two tokens with which every other one makes a triangle, and the heads between them."""

    first: int
    second: int
    heads: PairHeads


def find_hubs(pairs: TablePairs, rng: Generator) -> Hubs:
    """Find the pair that shows the most heads with the least error, among a few."""
    best: Hubs | None = None
    same = 0
    for _ in range(TRIES):
        first, second = (int(one) for one in rng.choice(len(pairs.table), 2, replace=False))
        answers = pairs.respond(pairs.table[[first]], pairs.table[[second]])[0]
        found = find_pair_heads(pairs, answers)
        if found is None:
            continue
        count = 0 if best is None else len(best.heads.values)
        same = same + 1 if len(found.values) == count else 1 if len(found.values) > count else same
        if best is None or (len(found.values), -found.error) > (len(best.heads.values), -best.heads.error):
            best = Hubs(first, second, found)
        if same == SAME:
            break
    if best is None:
        raise FitError("no pair of tokens shows its heads: logits too large or alike, or noisy answers", np.inf, WORST)
    return best
