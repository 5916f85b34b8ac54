r"""Logits of all pairs of tokens of a sequence, by offset, at known output-value circuits.

The first token of every sequence is zero, and what the others leave is the weight of the zeros:

.. math:: \ell_i(x_r, x_j, r - j) = \ln a_{ij} - \ln\Big(1 - \sum_k a_{ik}\Big) + \ln n_r

with n_r the number of zeros in front, whose logits are 0 at every offset. One sequence of k tokens shows k (k + 1) / 2
logits, at the offsets 0 .. k - 1: all of them go into one ledger. Derived here.

Attention weights of rows from their answers, at known output-value circuits, and logits as log-ratios of weights.

Answers are linear in the weights: y_r - c = sum_i sum_j a_i(r, j) x_j W_i. Values may be relative to a token x_0, which
is left out then: the weights of a row sum to one, so that

.. math:: y_r - c - x_0 W_S = \sum_i \sum_j a_i(r, j)\, (x_j - x_0)\, W_i, \qquad a_i(r, 0) = 1 - \sum_j a_i(r, j).

The logit of a token is then known relative to that of x_0. What serves as x_0 is all that readers of logits differ in:
a zero token, which has no value and, without biases, no logit; a base token in front; the token of the row itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manyheads.recovery._types import Array, Ask, Indices
from manyheads.recovery.refusals import FitError

LEAST = 1e-12  # weights below are put here: their logits are lost, and the checks that follow see it


def solve_weights(values: Array, answers: Array, seen: Sequence[int]) -> list[Array]:
    """Solve answers (n, rows, d) = sum weights values (n, k, m, d) for the weights (n, seen, m) of every row.

    A row sees the first `seen` of the k tokens. Columns are scaled to norm one; one decomposition serves all rows.
    """
    count, _, heads, dim = values.shape
    columns = values.reshape(count, -1, dim)
    size = np.linalg.norm(columns, axis=2, keepdims=True) + np.finfo(np.float64).tiny
    basis, triangle = np.linalg.qr(np.swapaxes(columns / size, 1, 2))
    right = np.swapaxes(basis, 1, 2) @ np.swapaxes(answers, 1, 2)
    found: list[Array] = [np.empty((count, width, heads)) for width in seen]
    for width in sorted(set(seen)):
        rows, k = [row for row, other in enumerate(seen) if other == width], width * heads
        try:
            weights = np.linalg.solve(triangle[:, :k, :k], right[:, :k, rows]) / size[:, :k]
        except np.linalg.LinAlgError as error:
            raise FitError("the values of different heads are linearly dependent: weights cannot be read") from error
        for place, row in enumerate(rows):
            found[row][:] = weights[:, :, place].reshape(count, width, heads)
    return found


def log_ratios(weights: Array, copies: Array | float = 1.0, others: float = 1.0, least: float = LEAST) -> Array:
    """Return logarithms of weights (n, k, m) of tokens, less that of what they leave of one.

    Both are divided by how many tokens share them: `copies` (k,) and `others`.
    """
    rest = 1 - weights.sum(1, keepdims=True)
    weights = np.maximum(weights, least) / np.reshape(copies, (-1, 1))
    return np.log(weights) - np.log(np.maximum(rest, least) / others)


@dataclass(frozen=True)
class Ledger:
    """Logits that were read: the query (N,) and the key (N,) among the tokens, the offset (N,), and logits (N, m).

    `weight` (N, m) multiplies them in least squares: small where the attention weights were so small that digits are
    lost.
    """

    tokens: Array
    query: Indices
    key: Indices
    offset: Indices
    logits: Array
    weight: Array

    @classmethod
    def of_row(
        cls, tokens: Array, pieces: Indices, positions: Indices, row: int, logits: Array, weight: Array | None = None
    ) -> "Ledger":
        """Return the logits (n, seen, m) of a row of tokens[pieces] (n, k), which sees the first of them."""
        seen, heads = logits.shape[1:]
        query = np.repeat(pieces[:, row : row + 1], seen, axis=1)
        offset = np.broadcast_to(positions[row] - positions[:seen], query.shape)
        weight = np.ones_like(logits) if weight is None else weight
        flat = (one.reshape(-1, heads) for one in (logits, weight))
        return cls(tokens, query.ravel(), pieces[:, :seen].ravel(), offset.ravel(), *flat)

    @classmethod
    def join(cls, parts: Sequence["Ledger"]) -> "Ledger":
        """Join several ledgers; neighbours of the same tokens share them."""
        tokens: list[Array] = []
        starts = []
        for part in parts:
            tokens += [] if tokens and part.tokens is tokens[-1] else [part.tokens]
            starts.append(sum(map(len, tokens[:-1])))
        places = ([getattr(p, name) + s for p, s in zip(parts, starts, strict=True)] for name in ("query", "key"))
        others = ([getattr(part, name) for part in parts] for name in ("offset", "logits", "weight"))
        return cls(tokens[0] if len(tokens) == 1 else np.concatenate(tokens), *map(np.concatenate, (*places, *others)))

    def at(self, offset: int) -> tuple[Array, Array, Array, Array]:
        """Return queries (N, d), keys (N, d), logits and weights (N, m) at one offset."""
        rows = self.offset == offset
        return self.tokens[self.query[rows]], self.tokens[self.key[rows]], self.logits[rows], self.weight[rows]


@dataclass(frozen=True)
class LedgerReader:
    """Conversion of answers into logits: the oracle, c (d,), and the projections W (m, d, d)."""

    ask: Ask
    bias: Array
    projection: Array

    def read(self, tokens: Array, pieces: Indices, positions: Indices) -> Ledger:
        """Ask about the sequences that hold tokens[pieces] (n, k) at `positions` (k,) >= 1, and zeros elsewhere."""
        count, kept = pieces.shape
        x = np.zeros((count, positions[-1] + 1, tokens.shape[1]))
        x[:, positions] = tokens[pieces]
        y = self.ask(x, read="all")[:, positions] - self.bias  # (n, k, d)
        parts = []
        values = np.einsum("nkd,mde->nkme", tokens[pieces], self.projection, optimize=True)  # W_i^T x_j
        for row, weights in enumerate(solve_weights(values, y, range(1, kept + 1))):
            logits = log_ratios(weights, others=positions[row] - row)  # zeros in front
            parts.append(Ledger.of_row(tokens, pieces, positions, row, logits))
        return Ledger.join(parts)


def alternate(first: int, second: int, length: int) -> Indices:
    """Return walks (n, length) in which every token of one list is once before, once after each of another."""
    orbits = int(np.gcd(first, second))
    cycle = first * second // orbits
    step = np.arange(cycle)
    pieces = []
    for orbit in range(orbits):
        walk = np.stack([step % first, first + (step + orbit) % second], axis=1).ravel()
        starts = np.arange(0, len(walk), length - 1)
        pieces.append(walk[(starts[:, None] + np.arange(length)) % len(walk)])
    return np.concatenate(pieces)


def spread(offset: int, tokens: int) -> Indices:
    """Return positions (tokens,) at which as many pairs as possible stand `offset` apart, in a short sequence.

    Examples
    --------
    >>> spread(2, 4), spread(9, 4)
    (array([1, 2, 3, 4]), array([ 1,  2, 10, 11]))
    """
    half = tokens // 2
    if offset <= half:
        return np.arange(1, tokens + 1)
    return np.concatenate([np.arange(1, half + 1), np.arange(offset + 1, offset + half + 1)])


def plan(needed: dict[int, int], tokens: int) -> list[tuple[Indices, int]]:
    """Plan sequences that show at least `needed[t]` pairs at every offset t: positions, and how many sequences."""
    missing, chosen = dict(needed), []
    for offset in sorted(needed, reverse=True):
        positions = spread(offset, tokens)
        apart = (positions[:, None] - positions[None, :])[np.tril_indices(len(positions))]
        count = -(-max(missing[offset], 0) // int((apart == offset).sum()))
        if not count:
            continue
        chosen.append((positions, count))
        for other in missing:
            missing[other] -= count * int((apart == other).sum())
    return chosen
