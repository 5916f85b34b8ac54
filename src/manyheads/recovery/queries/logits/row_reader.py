r"""Logits of pairs of tokens, relative to a base token in front, from all rows of sequences.

Sequences are [x_0, U_g, A_p, U_g] with a base token x_0, a group U_g of sketch tokens and a group A_p of fresh ones:
rows of A_p show the logits of fresh queries, the second copy of U_g those of sketch queries on all of A_p. Not causal,
every row sees all tokens and [x_0, U_g, A_p] does. Tokens that occur n times have n times the weight.

Where x_0 is zero its logit is zero for every query, and as a query it shows beta_i alone: a last zero token is asked
where later tokens are not seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from manyheads.recovery._types import Array, Generator, Indices
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import Effort
from manyheads.recovery.queries.logits.attention_weights import log_ratios, solve_weights
from manyheads.recovery.queries.logits.pair_logits import LOGITS, SMALLEST
from manyheads.recovery.queries.logits.row_plan import split_tokens
from manyheads.recovery.queries.nets.sigmoid_network import EPS
from manyheads.recovery.queries.values.projection_sum import Projections
from manyheads.recovery.refusals import FitError

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
