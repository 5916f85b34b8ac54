"""Attention weights and logits of all heads from the rows of sequences whose tokens have known values."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from manyheads.recovery._types import Array, Generator, Indices
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.sigmoid_network import EPS
from manyheads.recovery.queries.subspaces.output_spaces import Projections
from manyheads.recovery.queries.subspaces.pair_logits import LOGITS, SMALLEST
from manyheads.recovery.queries.subspaces.row_plan import split_tokens
from manyheads.recovery.queries.subspaces.settings import SubspaceSettings
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


class RowReader:
    """Asks sequences and turns rows into logits."""

    def __init__(self, oracle: Oracle, bias: Array, heads: Projections, settings: SubspaceSettings):
        self.oracle, self.bias, self.heads, self.causal = oracle, bias, heads, oracle.causal
        count, dim = len(heads.projection), len(bias)
        alive = heads.ranks[heads.ranks > 0]
        least = int(alive.min()) if len(alive) else 0
        self.direct = heads.readers is None  # heads of full rank: the weights of all heads are solved for jointly
        most = dim // count if self.direct else least
        self.sketched, self.fresh = split_tokens(most, settings)
        longest = oracle.longest - (2 if self.causal else 1)  # beside the zeros
        while self.fresh + (2 if self.causal else 1) * self.sketched > longest:
            if self.sketched > 1 and self.sketched >= self.fresh:
                self.sketched -= 1
            else:
                self.fresh -= 1
        self.smallest = 1.0

    def find_scale(self, rng: Generator) -> float:
        """Return the scale of tokens at which the logits of a pilot are moderate."""
        dim, length = len(self.bias), self.sketched + self.fresh
        pilot = rng.standard_normal((4, length + 1, dim))
        pilot[:, 0] = 0
        most = self.oracle.limits.reach / max(np.sqrt(dim), float(np.linalg.norm(pilot, axis=-1).max()))
        read = [Rows(length, length, np.ones(length), 1)]
        low, high, scale = 0.0, np.inf, min(1.0, most)
        for _ in range(30):
            weights = self.weights(scale * pilot, read)[0]
            last = 1 - weights.sum(-1, keepdims=True)
            with np.errstate(all="ignore"):
                logits = np.abs(np.log(weights) - np.log(last))
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

    def ask(self, group: Array, basis: Array) -> tuple[Array, Array, Array]:
        """Ask one group of sketch tokens against the whole basis."""
        heads, dim, many = len(self.heads.projection), len(self.bias), len(group)
        parts = [np.arange(first, first + self.fresh) % dim for first in range(0, dim, self.fresh)]
        zero = np.zeros((1, dim))
        tail = [group, zero] if self.causal else []
        tokens = np.stack([np.concatenate([zero, group, basis[part], *tail]) for part in parts])
        seen = many + self.fresh
        if self.causal:
            read = [Rows(many + j, many + j, np.ones(many + j), 1) for j in range(1, self.fresh + 1)]
            for j in range(1, many + 1):
                copies = np.concatenate([np.full(j, 2.0), np.ones(many - j), np.ones(self.fresh)])
                read.append(Rows(seen + j, seen, copies, 1))
            read.append(Rows(seen + many + 1, seen, np.concatenate([np.full(many, 2.0), np.ones(self.fresh)]), 2))
        else:
            ones = np.ones(seen)
            rows = [*range(many + 1, seen + 1), *range(1, many + 1), 0]
            read = [Rows(row, seen, ones, 1) for row in rows]
        logits = [self.logits(weights, row) for weights, row in zip(self.weights(tokens, read), read, strict=True)]
        columns, rows_, biases = np.empty((heads, dim, many)), np.empty((heads, many, dim)), np.empty((heads, dim))
        sketched = logits[-1][..., :many].mean(1)  # beta . u, over all sequences
        for index, part in enumerate(parts):
            biases[:, part] = logits[-1][:, index, many:]
            for j in range(self.fresh):
                columns[:, part[j]] = logits[j][:, index, :many] - sketched
            for j in range(many):
                rows_[:, j, part] = logits[self.fresh + j][:, index, many:]
        return columns, rows_ - biases[:, None], biases

    def logits(self, weights: Array, row: Rows) -> Array:
        """Logarithms of the weights (m, n, tokens), relative to the zero token and to the copies."""
        last = 1 - weights.sum(-1, keepdims=True)
        self._check(weights, last)
        weights, last = np.maximum(weights, SMALLEST), np.maximum(last, SMALLEST)
        return np.log(weights / row.copies) - np.log(last / row.zeros)

    def centred_logits(self, weights: Array, row: Rows) -> Array:
        """Logarithms of the weights (m, n, tokens), relative to the copies and less their mean over the tokens."""
        self._check(weights)
        logits = np.log(np.maximum(weights, SMALLEST) / row.copies)
        return logits - logits.mean(-1, keepdims=True)

    def _check(self, *weights: Array) -> None:
        self.smallest = min(self.smallest, *(float(part.min()) for part in weights))
        what = "rows gave attention weights below zero: no attention layer, or accurate=True helps"
        FitError.if_below(self.smallest, -0.01, what)

    def weights(self, tokens: Array, read: Sequence[Rows]) -> list[Array]:
        """Weights (m, n, tokens) of the distinct tokens after the zero, for every row that is read."""
        answers = self.oracle(tokens, read=tuple(row.row for row in read)) - self.bias
        seen = max(row.seen for row in read)
        distinct = tokens[:, 1 : seen + 1]
        return (
            self._joint_weights(distinct, answers, read) if self.direct else self._head_weights(distinct, answers, read)
        )

    def _head_weights(self, distinct: Array, answers: Array, read: Sequence[Rows]) -> list[Array]:
        readers, splits = self.heads.readers, self.heads.splits
        assert readers is not None
        assert splits is not None
        found: list[Array] = [np.empty((len(readers), len(distinct), row.seen)) for row in read]
        for head, rank in enumerate(self.heads.ranks):
            read_by = np.swapaxes(distinct @ readers[head, :, :rank], 1, 2)  # (n, r, tokens)
            seen_by = np.swapaxes(answers @ splits[head, :, :rank], 1, 2)  # (n, r, rows)
            turn, triangle = np.linalg.qr(read_by)
            right = np.swapaxes(turn, 1, 2) @ seen_by
            _solve_prefixes(triangle, right, [row.seen for row in read], [part[head] for part in found])
        return found

    def _joint_weights(self, distinct: Array, answers: Array, read: Sequence[Rows]) -> list[Array]:
        heads = len(self.heads.projection)
        found: list[Array] = [np.empty((heads, len(distinct), row.seen)) for row in read]
        step = max(1, 2**25 // (heads * distinct.shape[1] * distinct.shape[2]))
        for first in range(0, len(distinct), step):
            part = slice(first, first + step)
            # Columns token by token, heads inside: what an earlier row sees is a prefix.
            values = np.einsum("njd,mde->nejm", distinct[part], self.heads.projection, optimize=True)
            turn, triangle = np.linalg.qr(values.reshape(*values.shape[:2], -1))
            right = np.swapaxes(turn, 1, 2) @ np.swapaxes(answers[part], 1, 2)
            widths = [row.seen * heads for row in read]
            solved = [np.empty((len(values), width)) for width in widths]
            _solve_prefixes(triangle, right, widths, solved)
            for target, block, row in zip(found, solved, read, strict=True):
                target[:, part] = np.moveaxis(block.reshape(len(values), row.seen, heads), 2, 0)
        return found


def _solve_prefixes(triangle: Array, right: Array, widths: Sequence[int], out: Sequence[Array]) -> None:
    """Solve R[:w, :w] x = right[:w, row] for every row; rows of equal width together."""
    for width in sorted(set(widths)):
        rows = [row for row, other in enumerate(widths) if other == width]
        solved = np.linalg.solve(triangle[:, :width, :width], right[:, :width][:, :, rows])
        for place, row in enumerate(rows):
            out[row][:] = solved[:, :, place]
