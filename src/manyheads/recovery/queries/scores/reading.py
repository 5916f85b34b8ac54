r"""Scores of any attention layer whose projections are known, from the weights of its last row.

Once the projections W_i are known, the answer of a row is linear in its attention weights,

.. math:: y_r - c = \sum_i \sum_j a_i(r, j)\, x_j W_i ,

and they follow by least squares as long as fewer tokens than the rank of a head are not zero. Ratios of weights are
differences of scores. A query q stands last, and a reference token y_0 at a fixed offset before it, so that

.. math:: \ln a_i(q, x) - \ln a_i(q, y_0) = s_i(q, x, t) - s_i(q, y_0, t_0)

is the score of (q, x) up to a function of the query, which no softmax sees and which is the same at all offsets. Tokens
between are zero: they take weight, and pass on nothing. Derived here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.rotary.logits import LEAST, Ledger, solve_weights
from manyheads.recovery.queries.sigmoid_network import Array


@dataclass(frozen=True)
class ScoreReader:
    """Conversion of last rows into scores: the oracle, c (d,), the projections W (m, d, d), and the reference y_0."""

    oracle: Oracle
    bias: Array
    projection: Array
    reference: Array

    def weights(self, tokens: Array, positions: np.ndarray, length: int) -> Array:
        """Return the weights (n, k, m) of `tokens` (n, k, d) at `positions` (k,) in the last row; zeros elsewhere."""
        x = np.zeros((len(tokens), length, tokens.shape[2]))
        x[:, positions] = tokens
        y = self.oracle(x, read="last") - self.bias
        values = np.einsum("nkd,mde->nkme", tokens, self.projection, optimize=True)
        return solve_weights(values, y)

    def scores(
        self, tokens: Array, query: np.ndarray, keys: np.ndarray, offsets: Sequence[int], anchor: int = 1
    ) -> Ledger:
        """Read scores of queries (n,) with keys (n, k) at `offsets` (k,), less those with the reference at `anchor`.

        Queries and keys are rows of `tokens`. Scores of the queries with themselves, offset 0, are read as well.
        """
        length = max(*offsets, anchor) + 1
        positions = length - 1 - np.array([*offsets, anchor, 0])
        count = len(query)
        whole = np.concatenate([tokens[keys], np.tile(self.reference, (count, 1, 1)), tokens[query][:, None]], axis=1)
        logs = np.log(np.maximum(self.weights(whole, positions, length), LEAST))
        logits = np.delete(logs, -2, axis=1) - logs[:, -2:-1]  # (n, k + 1, m)
        against = np.concatenate([keys, query[:, None]], axis=1)
        apart = np.broadcast_to([*offsets, 0], against.shape)
        queries = np.repeat(query, against.shape[1])
        return Ledger(tokens, queries, against.ravel(), apart.ravel(), logits.reshape(-1, logits.shape[2]))

    def follow(self, keys: Array, queries: Array) -> Array:
        """Read scores (n, N, m) of every key (N, d) with queries (n, d) that follow it in one sequence.

        Sequences are the reference, a key, and the queries. Query b has the offset b + 1 to the key; the score of the
        reference is subtracted, so that rows are known up to a constant.
        """
        count = len(keys)
        front = np.stack([np.tile(self.reference, (count, 1)), keys], axis=1)
        x = np.concatenate([front, np.tile(queries, (count, 1, 1))], axis=1)
        y = self.oracle(x, read="all") - self.bias
        values = np.einsum("nkd,mde->nkme", x, self.projection, optimize=True)
        tables = []
        for row in range(2, x.shape[1]):
            logs = np.log(np.maximum(solve_weights(values[:, : row + 1], y[:, row]), LEAST))
            tables.append(logs[:, 1] - logs[:, 0])
        return np.stack(tables)
