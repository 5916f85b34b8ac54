r"""Scores of any attention layer whose projections are known, from the weights of its rows.

Once the projections W_i are known, the answer of a row is linear in its attention weights,

.. math:: y_r - c = \sum_i \sum_j a_i(r, j)\, x_j W_i ,

and they follow by least squares as long as fewer tokens than the rank of a head are not zero. Ratios of weights are
differences of scores. There are two references:

* a zero token, where its score is zero at every offset (no biases, no position terms): what the other weights leave of
  1 belongs to the zeros, and scores are absolute;
* otherwise a token y_0 at a fixed offset t_0 before the query:

.. math:: \ln a_i(q, x) - \ln a_i(q, y_0) = s_i(q, x, t) - s_i(q, y_0, t_0)

  is the score of (q, x) up to a function of the query, which no softmax sees and which is the same at all offsets.

Tokens between are zero: they take weight, and pass on nothing. Derived here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manyheads.recovery._types import Array, Indices
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.logits.ledger import LEAST, Ledger, log_ratios, solve_weights


@dataclass(frozen=True)
class ScoreReader:
    """Conversion of rows into scores: the oracle, c (d,), the projections W (m, d, d), and the reference y_0 (d,).

    Without a reference the scores are relative to those of zero tokens. Biases of the values v (m, d) pass on something
    of zero tokens too.
    """

    oracle: Oracle
    bias: Array
    projection: Array
    reference: Array | None
    value_bias: Array | None = None

    def scores(self, tokens: Array, query: Indices, keys: Indices, offsets: Sequence[int], anchor: int = 1) -> Ledger:
        """Read scores of queries (n,) with keys (n, k) at `offsets` (k,), and of the queries with themselves."""
        length = max(*offsets, anchor) + 1 + (self.reference is None)
        against = np.concatenate([keys, query[:, None]], axis=1)
        places = [*offsets, 0]
        whole = tokens[against]
        if self.reference is not None:
            places = [*places, anchor]
            whole = np.concatenate([whole, np.tile(self.reference, (len(query), 1, 1))], axis=1)
        x = np.zeros((len(query), length, tokens.shape[1]))
        x[:, length - 1 - np.array(places)] = whole
        weights = self.weights(whole, self.oracle(x, read="last"), zeros=length > whole.shape[1])
        logits = self._relative_logits(weights, length - whole.shape[1])[:, : against.shape[1]]
        apart = np.broadcast_to([*offsets, 0], against.shape).ravel()
        queries, flat = np.repeat(query, against.shape[1]), logits.reshape(-1, logits.shape[2])
        return Ledger(tokens, queries, against.ravel(), apart, flat, np.ones_like(flat))

    def follow(self, keys: Array, queries: Array) -> Array:
        """Read scores (n, N, m) of every key (N, d) with queries (n, d) that follow it in one sequence."""
        count = len(keys)
        front = np.zeros_like(keys) if self.reference is None else np.tile(self.reference, (count, 1))
        x = np.concatenate([np.stack([front, keys], axis=1), np.tile(queries, (count, 1, 1))], axis=1)
        first = int(self.reference is None)  # a zero in front has no value
        seen = range(3 - first, x.shape[1] + 1 - first)
        weights = self._solve(x[:, first:], self.oracle(x, read="all")[:, 2:], seen)
        return np.stack([self._relative_logits(one, 1, 0)[:, 1 - first] for one in weights])

    def weights(self, tokens: Array, answers: Array, *, zeros: bool = False) -> Array:
        """Return the weights (n, k, m) of tokens (n, k, d) in rows (n, d); `zeros`: there were zero tokens besides."""
        if zeros and self.value_bias is not None:
            tokens = np.concatenate([tokens, np.zeros_like(tokens[:, :1])], axis=1)
            return self._solve(tokens, answers[:, None], [tokens.shape[1]])[0][:, :-1]
        return self._solve(tokens, answers[:, None], [tokens.shape[1]])[0]

    def _solve(self, tokens: Array, answers: Array, seen: Sequence[int]) -> list[Array]:
        values = np.einsum("nkd,mde->nkme", tokens, self.projection, optimize=True)
        values = values if self.value_bias is None else values + self.value_bias
        return solve_weights(values, answers - self.bias, seen)

    def _relative_logits(self, weights: Array, zeros: int, reference: int = -1) -> Array:
        """Return logarithms of weights (n, k, m), less that of a zero token, or of the reference where it is none."""
        if self.reference is None:
            return log_ratios(weights, others=zeros)
        logs = np.log(np.maximum(weights, LEAST))
        return logs - logs[:, [reference]]
