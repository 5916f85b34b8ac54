r"""Attention weights of rows from their answers, at known output-value circuits, and logits as log-ratios of weights.

Answers are linear in the weights: y_r - c = sum_i sum_j a_i(r, j) x_j W_i. Values may be relative to a token x_0, which
is left out then: the weights of a row sum to one, so that

.. math:: y_r - c - x_0 W_S = \sum_i \sum_j a_i(r, j)\, (x_j - x_0)\, W_i, \qquad a_i(r, 0) = 1 - \sum_j a_i(r, j).

The logit of a token is then known relative to that of x_0. What serves as x_0 is all that readers of logits differ in:
a zero token, which has no value and, without biases, no logit; a base token in front; the token of the row itself.
"""

from collections.abc import Sequence

import numpy as np

from manyheads.recovery._types import Array
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
