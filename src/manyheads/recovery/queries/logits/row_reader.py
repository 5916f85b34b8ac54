r"""Logits of pairs of tokens, relative to a base token in front, from all rows of sequences.

Sequences are [x_0, U_g, A_p, U_g] with a base token x_0, a group U_g of sketch tokens and a group A_p of fresh ones:
rows of A_p show the logits of fresh queries, the second copy of U_g those of sketch queries on all of A_p. Not causal,
every row sees all tokens and [x_0, U_g, A_p] does. Tokens that occur n times have n times the weight.

Where x_0 is zero its logit is zero for every query, and as a query it shows beta_i alone: a last zero token is asked
where later tokens are not seen.

Heads of rank one show no two weights of a row. With v W_i known for all heads, and linearly independent, the answer to
copies of q + v and q is a linear system for the gates, whose logits are q^T Theta_i v + beta_i^T v, for any rank.

Groups of heads whose attention is read from the same sequences, and the tokens of these sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from manyheads.recovery._types import Array, Generator, Indices
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import Effort
from manyheads.recovery.queries.gates.pairs import Pairs
from manyheads.recovery.queries.logits.ledger import log_ratios, solve_weights
from manyheads.recovery.queries.logits.sketches import SPARE
from manyheads.recovery.queries.nets.sigmoid_network import EPS, read_gates
from manyheads.recovery.queries.values.output_spaces import Projections, Sums
from manyheads.recovery.refusals import FitError

FEWEST = 4  # distinct tokens beside the zero, if the rank allows it: with two or three, calls are many
PILOT = 4  # sequences that the choice of a scale takes, mostly


@dataclass(frozen=True)
class Group:
    """Heads that are read together, with tokens whose values are zero in all of them where there is a plan for it."""

    heads: Indices
    plan: "UnseenPlan | None" = None


@dataclass(frozen=True)
class UnseenPlan:
    """Numbers of a reading with tokens whose values are zero in all heads of the group."""

    seen: int  # tokens of a sequence with values, T
    space: int  # dimensions of the values of the group together
    queries: int  # sketch tokens
    keys: int  # sequences of the first part
    rounds: int  # how often every query is asked in the second part
    parts: int  # sequences of a round

    @classmethod
    def of(cls, ranks: Indices, dim: int, effort: Effort) -> "UnseenPlan | None":
        """Return the plan for heads of these ranks; None where too few tokens are unseen, or a head sees one token."""
        space, widest, least = int(ranks.sum()), int(ranks.max()), int(ranks.min())
        queries = sketch_tokens(widest, dim, effort)
        if least < 2 or widest + SPARE > dim - space:
            return None
        seen = tokens_of_row(least, effort)
        # d - 1 directions, the one that the first parts leave out, and a spare one that shows errors
        keys = -(-(dim - 1) // (seen - 1)) + (1 if seen > 2 else 2)
        return cls(seen, space, queries, keys, -(-queries // (seen - 1)), -(-space // seen))

    @property
    def sequences(self) -> int:
        """Sequences of both parts."""
        return self.keys + self.rounds * self.parts

    def longest(self, dim: int, causal: bool) -> int:
        """Return the length of the longest sequence."""
        most = -(-(dim - self.space) // self.parts)
        return 1 + max(self.seen + self.queries + causal, (1 + causal) * self.seen + most)


def plan_groups(oracle: Oracle, heads: Projections, dim: int, effort: Effort) -> list[Group]:
    """Divide heads by their ranks, and choose how each group is read, so that sequences are fewest."""
    order = np.argsort(heads.ranks, kind="stable")
    if heads.splits is None:
        return [Group(order)]

    def cost(group: Indices) -> tuple[float, Group]:
        ranks = heads.ranks[group]
        ways = [(_count_sequences(ranks, dim, effort), Group(group))]
        plan = UnseenPlan.of(ranks, dim, effort)
        if plan is not None and plan.longest(dim, oracle.causal) <= oracle.longest:
            ways.append((float(plan.sequences), Group(group, plan)))
        return min(ways, key=lambda way: way[0])

    best: list[tuple[float, list[Group]]] = [(0.0, [])]  # of the first heads in order
    for end in range(1, len(order) + 1):
        options = []
        for start in range(end):
            sequences, group = cost(order[start:end])
            options.append((best[start][0] + sequences + PILOT, [*best[start][1], group]))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]


def _count_sequences(ranks: Indices, dim: int, effort: Effort) -> float:
    """Return how many sequences are asked where all tokens have values."""
    least, widest = int(ranks[ranks > 0].min(initial=dim)), int(ranks.max())
    wanted = sketch_tokens(widest, dim, effort)
    if least < 2:
        return 2.0 * wanted * dim + dim
    sketched, fresh = split_tokens(least, effort)
    return float(np.ceil(wanted / sketched) * np.ceil(dim / fresh))


def sketch_tokens(widest: int, dim: int, effort: Effort) -> int:
    """Return the number of sketch tokens for heads of this rank."""
    return min(dim, int(np.ceil(effort.sketch * widest)) + SPARE)


def tokens_of_row(most: int, effort: Effort) -> int:
    """Return the distinct tokens of a sequence of which a row shows at most so many weights."""
    return max(2, min(most, FEWEST), round(effort.share * most))


def split_tokens(most: int, effort: Effort) -> tuple[int, int]:
    """Return the sketch tokens and the fresh ones of a sequence of which a row shows at most so many weights."""
    kept = tokens_of_row(most, effort)
    sketched = max(1, round((np.sqrt(2) - 1) * kept))
    return sketched, max(1, kept - sketched)


# Where the 98% quantile of the pilot's logits has to lie: larger ones hide weights, smaller ones drown in noise
LOGITS = (1.0, 3.2)
SMALLEST = 1e-9  # weights are read down to this size
FARTHEST = 6.0  # largest logit of the pilot: trained layers have directions of their own, far beyond the quantile
# Error of a logit, at most, in units of the error of what the heads read: weights near 1/100 and below divide it
AGREEMENT = 1e4
ROUGHEST = 0.05  # disagreement of logits of order one that no noise excuses


class Attentions(NamedTuple):
    """Theta (m, d, d), beta (m, d), and the figures of their measurement."""

    theta: Array
    key_bias: Array
    ranks: Indices
    noise: float
    scale: float
    smallest: float


class Rows(NamedTuple):
    """One way of reading a sequence: rows to read, the distinct tokens each sees, and how often."""

    row: int
    seen: int
    copies: Array
    zeros: int


def check_agreement(apart: float, heads: Projections, noise: float) -> None:
    """Refuse logits that two sequences disagree on: they are not bilinear in the tokens."""
    allowed = min(ROUGHEST, AGREEMENT * (max(noise, EPS) * heads.condition + heads.row_error))
    FitError.if_above(apart, allowed, "two sequences disagree on logits: not bilinear in the tokens, or rough values")


@dataclass
class RowReader:
    """Asks sequences and turns rows into logits."""

    oracle: Oracle
    origin: Array  # (d,) the answer to the base token alone
    heads: Projections
    base: Array  # x_0 (d,)
    # Sketch tokens and fresh tokens of a sequence
    sketched: int
    fresh: int
    joint: bool = True  # whether the weights of all heads are solved for together, or each in its own coordinates
    smallest: float = field(default=1.0, init=False)  # smallest weight that was read

    @classmethod
    def of(cls, oracle: Oracle, bias: Array, heads: Projections, effort: Effort) -> "RowReader":
        """Return the reader of logits relative to the zero token, with as many tokens as rows show weights."""
        joint, dim = heads.splits is None, len(bias)
        most = dim // len(heads.projection) if joint else int(heads.ranks[heads.ranks > 0].min(initial=dim))
        sketched, fresh = split_tokens(most, effort)
        longest = oracle.longest - (2 if oracle.causal else 1)  # beside the zeros
        while fresh + (2 if oracle.causal else 1) * sketched > longest:
            if sketched > 1 and sketched >= fresh:
                sketched -= 1
            else:
                fresh -= 1
        return cls(oracle, bias, heads, np.zeros(dim), sketched, fresh, joint)

    def find_scale(self, rng: Generator) -> float:
        """Return the scale of tokens at which the logits of a pilot are moderate."""
        dim, length = len(self.base), self.sketched + self.fresh
        pilot = rng.standard_normal((4, length + 1, dim))
        pilot[:, 0] = 0
        most = self.oracle.limits.reach / max(np.sqrt(dim), float(np.linalg.norm(pilot, axis=-1).max()))
        low, high, scale = 0.0, np.inf, min(1.0, most)
        for _ in range(30):
            weights = self.weights(scale * pilot, [Rows(length, length, np.ones(length), 1)])[0]
            with np.errstate(all="ignore"):
                logits = np.abs(np.log(weights) - np.log(1 - weights.sum(1, keepdims=True)))
            largest = max(float(np.quantile(logits, 0.98)), float(logits.max()) * LOGITS[1] / FARTHEST)
            if not np.isfinite(largest) or largest > LOGITS[1]:
                high = scale
            elif largest < LOGITS[0]:
                low = scale
            else:
                return scale
            if scale == most and low == most:
                return scale  # logits are as large as the largest norm allows
            if high < np.inf and low > 0:
                scale = np.sqrt(low * high)
            else:
                scale = min(most, scale * (2.0 if high == np.inf else 0.5))
            if (high < np.inf and high < low * 1.01) or scale > 1e4:
                return scale  # no logits at all, or so few heads that the quantile jumps
        raise FitError("no scale of tokens gave moderate logits", scale, 1.0)

    def ask(self, group: Array, fresh: Array) -> tuple[Array, Array, Array]:
        """Ask one group of sketch tokens against all fresh ones.

        Returns logits (m, N, g) of fresh queries and (m, g, N) of sketch queries; where the base is zero, less those of
        the zero token as a query, which are returned for the fresh keys, (m, N).
        """
        heads, count, many = len(self.heads.projection), len(fresh), len(group)
        parts = [np.arange(first, first + self.fresh) % count for first in range(0, count, self.fresh)]
        base, alone = self.base[None], not self.base.any()
        tail = [group, *([base] if alone else [])] if self.oracle.causal else []
        tokens = np.stack([np.concatenate([base, group, fresh[part], *tail]) for part in parts])
        seen = many + self.fresh
        if self.oracle.causal:
            read = [Rows(many + j, many + j, np.ones(many + j), 1) for j in range(1, self.fresh + 1)]
            for j in range(1, many + 1):
                copies = np.concatenate([np.full(j, 2.0), np.ones(many - j), np.ones(self.fresh)])
                read.append(Rows(seen + j, seen, copies, 1))
            last = Rows(seen + many + 1, seen, np.concatenate([np.full(many, 2.0), np.ones(self.fresh)]), 2)
        else:
            read = [Rows(row, seen, np.ones(seen), 1) for row in (*range(many + 1, seen + 1), *range(1, many + 1))]
            last = Rows(0, seen, np.ones(seen), 1)
        read += [last] if alone else []
        logits = [self.logits(weights, row) for weights, row in zip(self.weights(tokens, read), read, strict=True)]
        columns, rows, biases = np.empty((heads, count, many)), np.empty((heads, many, count)), np.zeros((heads, count))
        for index, part in enumerate(parts):
            for j in range(self.fresh):
                columns[:, part[j]] = logits[j][index, :many].T
            for j in range(many):
                rows[:, j, part] = logits[self.fresh + j][index, many:].T
            if alone:
                biases[:, part] = logits[-1][index, many:].T
        if alone:  # beta . u, over all sequences
            columns -= logits[-1][:, :many].mean(0).T[:, None]
        return columns, rows - biases[:, None], biases

    def logits(self, weights: Array, row: Rows) -> Array:
        """Logits from the weights (n, tokens, m), relative to the base token and to the copies."""
        self._check(weights, 1 - weights.sum(1))
        return log_ratios(weights, row.copies, row.zeros, SMALLEST)

    def centred_logits(self, weights: Array, row: Rows) -> Array:
        """Logarithms of the weights (n, tokens, m), relative to the copies and less their mean over the tokens."""
        self._check(weights)
        logits = np.log(np.maximum(weights, SMALLEST) / row.copies[:, None])
        return logits - logits.mean(1, keepdims=True)

    def _check(self, *weights: Array) -> None:
        self.smallest = min(self.smallest, *(float(part.min()) for part in weights))
        what = "rows gave attention weights below zero: no attention layer, or accurate=True helps"
        FitError.if_below(self.smallest, -0.01, what)

    def weights(self, tokens: Array, read: Sequence[Rows]) -> list[Array]:
        """Weights (n, tokens, m) of the distinct tokens after the base, for every row that is read."""
        answers = self.oracle(tokens, read=tuple(row.row for row in read)) - self.origin
        seen, projection = [row.seen for row in read], self.heads.projection
        distinct = tokens[:, 1 : max(seen) + 1] - self.base
        if not self.joint:
            pairs = list(zip(self.heads.readers, self.heads.splits or (), strict=True))
            each = [solve_weights((distinct @ one)[:, :, None], answers @ other, seen) for one, other in pairs]
            return [np.concatenate(parts, axis=2) for parts in zip(*each, strict=True)]
        step = max(1, 2**25 // (len(projection) * distinct[0].size))
        parts = []
        for first in range(0, len(distinct), step):
            some = slice(first, first + step)
            values = np.einsum("nkd,mde->nkme", distinct[some], projection, optimize=True)
            parts.append(solve_weights(values, answers[some], seen))
        return [np.concatenate(each) for each in zip(*parts, strict=True)]


def read_logits(answers: Array, values: Array, shifts: Array, least: float = 1e-3) -> Array:
    """Read the logits (n, m) off answers (n, K, d) to heads of known values, at the shift nearest to half a gate."""
    gates = answers @ np.linalg.pinv(values) + expit(-shifts)[:, None]  # (n, K, m)
    return read_gates(gates, shifts, least)


class PairReader:
    """Reads logits off pairs: at known values v W_i the gates of all heads follow from one answer."""

    sketched = 8

    def __init__(self, oracle: Oracle, bias: Array, heads: Projections, chosen: Indices):
        self.heads, self.base, self.smallest = heads.take(chosen), np.zeros(len(bias)), 1.0
        self.chosen, self.projection = chosen, heads.projection
        self.pairs = Pairs.within(oracle, Sums(heads.projection.sum(0), bias), 1, 4, 0.0)

    def find_scale(self, rng: Generator) -> float:
        """Return the scale of tokens at which the logits of random pairs are moderate."""
        dim = len(self.base)
        queries, probe = rng.standard_normal((16, dim)), rng.standard_normal((1, dim))
        # queries and probes stand together in one token
        norms = np.linalg.norm(np.concatenate([queries, probe]), axis=1)
        most = self.pairs.reach / 2 / max(np.sqrt(dim), float(norms.max()))
        scale = min(1.0, most)
        for _ in range(12):
            size = float(np.quantile(np.abs(self.logits(scale * queries, scale * probe)), 0.98))
            if LOGITS[0] <= size <= LOGITS[1]:
                break
            # Logits are bilinear: beyond what can be read they are at least this large.
            scale = min(most, scale * float(np.clip(np.sqrt(0.6 * LOGITS[1] / max(size, 1e-9)), 1 / 8, 8)))
        return scale

    def ask(self, group: Array, basis: Array) -> tuple[Array, Array, Array]:
        """Return what `RowReader.ask` does."""
        zero = self.base[None]
        biases = self.logits(zero, basis)[:, 0]  # (d, m): beta . v
        sketched = self.logits(zero, group)[:, 0]  # (g, m)
        columns = self.logits(basis, group) - sketched[:, None]  # (g, d, m)
        rows = self.logits(group, basis) - biases[:, None]  # (d, g, m)
        return columns.transpose(2, 1, 0), rows.transpose(2, 1, 0), biases.T

    def logits(self, queries: Array, probes: Array) -> Array:
        """Read q^T Theta_i v + beta_i^T v (b, n, m) of all queries (n, d) and probes (b, d)."""
        answers = self.pairs.respond(queries, probes)  # (b, n, K, d)
        values = np.swapaxes(probes @ self.projection, 0, 1)  # (b, m, d)
        shifts = self.pairs.shifts
        found = [read_logits(one, value, shifts, SMALLEST) for one, value in zip(answers, values, strict=True)]
        return np.array(found)[..., self.chosen]
