r"""Heads at a pair of tokens of a table, from copies alone, and their order from triangles of tokens.

No probe can be moved and no two queries share a difference of tokens. But copies shift the logits of all heads at once:
after j copies of a, the row of the k-th copy of b is

.. math:: z_s = y - b W_S - c = \sum_i \sigma(l_i - s) w_i, \qquad s = \ln(k/j),\ w_i = (a - b) W_i,\
          l_i = b^\top \Theta_i (a - b) + \beta_i^\top (a - b)

with z = sum_i w_i known at s = -inf. As a function of e^s this is rational, and

.. math:: e^s z_s = (z_{-\infty} - z_s) M, \qquad M = \sum_i e^{l_i} w_i^+ w_i

is linear in M, whose eigenvalues are e^l and whose left eigenvectors are the w_i. One pair shows all heads whose logits
differ, in no order. Three tokens order them: for each head

.. math:: (a - b) W_i + (b - c) W_i = (a - c) W_i .

Derived here.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.projection_sum import Sums
from manyheads.recovery.queries.sigmoid_network import EPS, Array, NetDesign, fit_nets, net_amplification
from manyheads.recovery.refusals import FitError

COPIES = 24  # copies of either token, if the longest sequence has room: the more, the wider the range of shifts
WORST = 1e6  # amplification of noise by a pair, above which it is left out
CLOSE = 1e-3  # error of a triangle, relative to its values, up to which it is one
TRIES = 12  # pairs of the first hubs


@dataclass(frozen=True)
class TablePairs:
    """Asks about pairs of tokens of a table (V, d), by their rows."""

    oracle: Oracle
    sums: Sums
    table: Array
    noise: float

    @property
    def copies(self) -> int:
        """Copies of either token."""
        return int(min(COPIES, self.oracle.longest // 2))

    @property
    def shifts(self) -> Array:
        """Shifts of the rows of a pair: of one copy of a, and of all copies, against 1 .. K copies of b; then open."""
        counts = np.log(np.arange(1, self.copies + 1))
        return np.concatenate([counts, counts - np.log(self.copies), [-np.inf]])

    def respond(self, near: Array, own: Array) -> Array:
        """Return z (n, rows, d) of pairs a (n, d) and b (n, d)."""
        many = self.copies
        after = np.repeat(own[:, None], many, axis=1)
        short = np.concatenate([near[:, None], after], axis=1)
        long = np.concatenate([np.repeat(near[:, None], many, axis=1), after], axis=1)
        parts = [
            self.oracle(short, read=tuple(range(1, many + 1))),
            self.oracle(long, read=tuple(range(many, 2 * many))),
        ]
        moved = ((near - own) @ self.sums.projection)[:, None]
        rest: Array = np.concatenate([*(part - self.sums.read(own)[:, None] for part in parts), moved], axis=1)
        return rest


class PairHeads(NamedTuple):
    """Heads of one pair in no order: values (m, d), and the error of a row of them."""

    values: Array
    error: float


def find_pair_heads(pairs: TablePairs, answers: Array, heads: int | None = None) -> PairHeads | None:
    """Find the heads in the answers z (rows, d) of a pair; None where they do not fit or are too uncertain.

    With `heads` given, only so many of them count.
    """
    level = max(pairs.noise, 2 * EPS) * 4 * float(np.sqrt(np.mean(answers**2)) + np.abs(pairs.sums.bias).max())
    _, spectrum, axes = np.linalg.svd(answers, full_matrices=False)
    seen = int((spectrum > 8 * level * (np.sqrt(len(answers)) + np.sqrt(answers.shape[1]))).sum())
    allowed = 30 * level * np.sqrt(answers.size) / np.linalg.norm(answers)
    shifts = pairs.shifts
    design = NetDesign.of(np.ones((len(shifts), 1)), shifts)
    for count in range(1, seen + 1) if heads is None else [heads]:
        if count > seen:
            return None
        start = _start(answers @ axes[:count].T, shifts)
        if start is None:
            continue
        net = fit_nets(design, answers, start[:, None], iterations=200, tolerance=1e-9)
        if net.residual <= allowed:
            gain = float(net_amplification(design, net)[1].max())
            return PairHeads(net.values, level * gain * np.sqrt(answers.shape[1])) if gain < WORST else None
    return None


def _start(answers: Array, shifts: Array) -> Array | None:
    """Return logits (m,) from the pencil of answers (rows, m)."""
    odds = np.exp(shifts[:-1])[:, None]
    weight = 1 / (1 + odds)
    pencil = np.linalg.lstsq(weight * (answers[-1] - answers[:-1]), weight * odds * answers[:-1], rcond=None)[0]
    found = np.linalg.eigvals(pencil)
    if np.abs(found.imag).max() > 0.2 * np.abs(found).max():
        return None
    logits: Array = np.log(np.clip(found.real, 1e-4, 1e4))
    return logits + 1e-3 * np.arange(len(logits))


def order_triangle(first: Array, second: Array, third: Array) -> tuple[Array, Array] | None:
    """Return `second` and `third` (m, d) in the order of `first`, so that first + second = third; None if they do not.

    All three hold one row a head.
    """
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


def find_hubs(pairs: TablePairs, rng: np.random.Generator) -> Hubs:
    """Find the pair that shows the most heads with the least error, among a few."""
    best: Hubs | None = None
    for _ in range(TRIES):
        first, second = (int(one) for one in rng.choice(len(pairs.table), 2, replace=False))
        answers = pairs.respond(pairs.table[[first]], pairs.table[[second]])[0]
        found = find_pair_heads(pairs, answers)
        if found is None:
            continue
        if best is None or (len(found.values), -found.error) > (len(best.heads.values), -best.heads.error):
            best = Hubs(first, second, found)
    if best is None:
        raise FitError(
            "no pair of tokens of the vocabulary shows its heads: their logits are too large or too alike, the answers "
            "too noisy, or the function is no attention layer",
            measured=np.inf,
            threshold=WORST,
        )
    return best
