r"""Row certificates: rows in which all heads have the same softmax vector (stages two and four).

Where all heads put the same weights lambda on the tokens of a row, its label is sum_j lambda_j z_j with z_j = x_j W_S,
a point of the simplex of the z. Conversely a label in that simplex comes, for projections in general position, from
heads that agree. So every row of every sequence is a test: fit lambda, with sum one, by least squares; what remains, as
a share of the spread of the z, is the *misfit*, and rows are ranked by it. With g = (z_j - z_1)_j>1 (k-1, d) the fit is

.. math:: \lambda_{2..k} = (g g^\top)^{-1} g (y_r - z_1), \qquad \lambda_1 = 1 - \sum_{j>1} \lambda_j .

A certified row says <x_r^T (x_j - x_l), Theta_i> = ln(lambda_j / lambda_l) for every head i and all tokens j, l. How
much each of these counts follows from how lambda moves with the logits, D = diag(lambda) - lambda lambda^T: with e_j
the error of logit j, D e is the change of lambda to first order. Rows of R, with R^T R the part of D^2 for j, l > 1,
make k-1 equations

.. math:: \langle x_r^\top u_s, \Theta\rangle = t_s, \quad u = R (x_j - x_1)_{j>1}, \quad
          t = R (\ln\lambda_j - \ln\lambda_1)_{j>1}

whose squared errors sum to |D e|^2, whichever token is called the first. Equations of weights near zero fade out.

References
----------
S. Chen, Y. Li, arXiv 2402.04084: certificates by an affine fit. Ranking, and the equations' weights, are worked out
here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from manyheads.recovery._types import Array, Indices

BLOCK = 20_000  # sequences that are worked on at a time


@dataclass(frozen=True)
class RowCertificates:
    """Equations on the attention matrices from rows in which the heads agree."""

    query: Array  # x_r, (n, d)
    mixes: Array  # u, (n, k - 1, d)
    targets: Array  # t, (n, k - 1): x_r Theta u_s^T = t_s for each head's Theta
    trust: Array  # weight of each row, (n,), from 1 for a perfect row to 0 for the worst that is kept

    def __len__(self) -> int:
        return len(self.query)

    def misses(self, basis: Array, heights: Array) -> Array:
        """Return x_r B_s u^T - h_s t, (n, k - 1, s), for matrices B (s, d, d) with heights h (s,)."""
        asked = np.tensordot(self.query, basis, axes=(1, 1))  # (n, s, d)
        return np.matmul(self.mixes, asked.transpose(0, 2, 1)) - self.targets[..., None] * heights


def fit_simplex(x: Array, y: Array, total: Array) -> tuple[Array, Array]:
    """Fit every label as an affine combination of the projected tokens.

    Returns lambda (N, k, k), whose rows sum to one and may have negative entries, and the misfit (N, k): the norm of
    what remains over the Frobenius norm of the z about their mean. Where tokens coincide the first one gets all of
    lambda.
    """
    z = x @ total
    across = z[:, 1:] - z[:, :1]  # (N, k-1, d)
    gram = across @ across.transpose(0, 2, 1)
    sizes = np.einsum("nss->ns", gram)
    distinct = np.linalg.det(gram) > 1e-12 * sizes.prod(-1)
    gram = np.where(distinct[:, None, None], gram, np.eye(gram.shape[1]))
    above = y - z[:, :1]  # (N, k, d)
    solved = np.linalg.solve(gram, across @ above.transpose(0, 2, 1)).transpose(0, 2, 1)  # (N, k, k-1)
    solved = np.where(distinct[:, None, None], solved, 0.0)
    left = above - solved @ across
    spread = np.sqrt(np.square(z - z.mean(1, keepdims=True)).sum((1, 2)))  # (N,)
    with np.errstate(over="ignore"):  # tokens that coincide under the sum have no spread: infinitely bad
        misfit = np.sqrt(np.square(left).sum(-1)) / np.where(spread > 0, spread, 1.0)[:, None]
    return np.concatenate([1 - solved.sum(-1, keepdims=True), solved], -1), misfit


def _blocks(x: Array, y: Array, total: Array, floor: float) -> Iterator[tuple[Array, Array, Array]]:
    """Yield tokens, lambda and the quality of rows, block by block."""
    for begin in range(0, len(x), BLOCK):
        tokens = x[begin : begin + BLOCK]
        weights, misfit = fit_simplex(tokens, y[begin : begin + BLOCK], total)
        share = np.clip(weights.min(-1) / floor - 1, 0, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            quality = np.where(share > 0, misfit / share, np.inf)
        yield tokens, weights, quality


def measure_quality(x: Array, y: Array, total: Array, floor: float) -> Array:
    """Return the misfit of every row (N, k), made worse where the smallest weight is below twice the floor."""
    return np.concatenate([quality for *_, quality in _blocks(x, y, total, floor)])


def certify_rows(x: Array, y: Array, total: Array, floor: float, threshold: float) -> RowCertificates:
    """Return the certificates of the rows whose quality is below a threshold."""
    parts = []
    for tokens, weights, quality in _blocks(x, y, total, floor):
        sequence, row = np.nonzero(quality < threshold)
        trust = (1 - (quality[sequence, row] / threshold) ** 2) ** 2
        parts.append(_equate(tokens[sequence], row, weights[sequence, row], trust))
    return join(parts)


def join(parts: list[RowCertificates]) -> RowCertificates:
    """Return all certificates of several sets."""
    names = ("query", "mixes", "targets", "trust")
    return RowCertificates(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _equate(tokens: Array, row: Indices, weights: Array, trust: Array) -> RowCertificates:
    """Return the equations of rows (n,) of sequences (n, k, d) with weights (n, k)."""
    count, length, _ = tokens.shape
    moved = weights[:, :, None] * (np.eye(length) - weights[:, None])[:, :, 1:]  # D without its first column
    square = moved.transpose(0, 2, 1) @ moved  # positive definite, as all weights are positive
    factor = np.linalg.cholesky(square).transpose(0, 2, 1)  # R
    logs = np.log(weights)
    mixes = factor @ (tokens[:, 1:] - tokens[:, :1])
    targets = np.einsum("nst,nt->ns", factor, logs[:, 1:] - logs[:, :1])
    return RowCertificates(tokens[np.arange(count), row], mixes, targets, trust)
