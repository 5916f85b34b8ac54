r"""Gradient noise of a batch: the covariance of the attention and value gradients.

For a query :math:`k` let :math:`r = f - e_y` be the residual, :math:`D = \mathrm{diag}\mu`, :math:`S = D -
\mu\mu^\top`, and

.. math:: C_W = W D W^\top, \quad C_{PW} = \tilde P D W^\top, \quad
          R_k = \mathbb E[rr^\top|k] = S - (q\cdot a)(C_{PW} + C_{PW}^\top) + |a|^2 C_W .

* **Attention.** At a position :math:`t` off the support of the query, :math:`x_t` is independent of the target, and
  of the residual up to :math:`a_t`. The gradients there have mean nearly zero, are uncorrelated because :math:`W\mu=0`,
  and have the variance :math:`\sigma_k^2 = \operatorname{tr}(C_WR_k)/(B\mu_k)`, before their mean is removed.
* **Values.** The gradient is a mean of :math:`r\,(z - s\mu)^\top D^{-1}`, and to leading order the residual is
  independent of the histogram, which gives :math:`\bar R\otimes(D^{-1} - 11^\top)/B` with
  :math:`\bar R = \sum_k\mu_k|a^{(k)}|^2R_k`.

**A square root without factoring.** :math:`\bar R = e\,C_W - c\,(C_{PW} + C_{PW}^\top) + m\,S` with
:math:`e = \sum_k\mu_k|a|^4`, :math:`c = \sum_k\mu_k|a|^2(q\cdot a)`, :math:`m = \sum_k\mu_k|a|^2`. With
:math:`g = c^2/e`, completing the square,

.. math:: \bar R = e\,(W - \tfrac ce\tilde P)D(W - \tfrac ce\tilde P)^\top + (m - g)\,S
          + g\,(S - \tilde PD\tilde P^\top),

and :math:`g\le m` by Cauchy's inequality and :math:`|q|\le 1`, while :math:`S - \tilde PD\tilde P^\top = \sum_j\mu_j
(\mathrm{diag}P_j - P_jP_j^\top)` is a constant covariance. So a draw costs a product of matrices.

Derived here. Measured at N = 4, T = 40: the total variance of the values is within .5% at initialization and 3-5% too
large later, at equal frequencies; with a rare token it was up to 40% too small, because the residual of a rare token
depends on its own column of the histogram. Use it at nearly equal frequencies.
"""

from typing import NamedTuple

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads.errors import UsageError
from manyheads.theory.bigram.task import BigramTask


class RowCoefficients(NamedTuple):
    """Squared norm of each attention row and its product with the true weights, (..., N) each."""

    squared_norms: np.ndarray  # (..., N)
    overlaps: np.ndarray  # (..., N)


@takes_arrays
def attention_noise(task: BigramTask, value: np.ndarray, rows: RowCoefficients, batch: int) -> np.ndarray:
    r"""Return the standard deviation :math:`\sigma_k` of a batch's attention gradient, off the true positions.

    For value matrices (..., N, N) with :math:`W\mu = 0` and rows (..., N) of the same leading dimensions: (..., N), the
    standard deviation of :math:`(W^\top r)[x_t]`, averaged over the samples of a query and divided by :math:`\mu_k`,
    before the mean over positions is removed. Exact up to terms of the size of one attention weight.
    """
    check_batch_size(batch)
    mu = task.stationary
    square = (value * mu) @ np.swapaxes(value, -1, -2)  # C_W
    cross = (task.centred * mu) @ np.swapaxes(value, -1, -2)  # C_PW
    first = np.einsum("...ii,i->...", square, mu) - np.einsum("i,...ij,j->...", mu, square, mu)  # tr C_W S
    second = 2 * (square * cross).sum((-2, -1))  # tr C_W (C_PW + C_PW^T): C_W is symmetric
    third = (square**2).sum((-2, -1))
    traces = first[..., None] - rows.overlaps * second[..., None] + rows.squared_norms * third[..., None]
    return np.sqrt(np.maximum(traces, 0.0) / (batch * mu))


class ValueNoise:
    r"""Gaussian noise of a batch's value gradient, of covariance :math:`\bar R\otimes(D^{-1}-11^\top)/B`."""

    def __init__(self, task: BigramTask, batch: int):
        check_batch_size(batch)
        mu = task.stationary
        self.task, self.batch = task, batch
        self._root = np.sqrt(mu)
        targets = np.diag(mu) - (task.transition * mu) @ task.transition.T  # S - Pt D Pt^T, as P mu = mu
        values, vectors = np.linalg.eigh(targets)
        factor = vectors * np.sqrt(np.maximum(values, 0.0))
        self._given_tokens = factor - factor.mean(0)  # targets sum to one: remove the rounding error along 1

    @takes_arrays
    def draw(self, rng: np.random.Generator, value: np.ndarray, rows: RowCoefficients) -> np.ndarray:
        """Draw one matrix for every value matrix, (..., N, N), centred on both sides; zero without attention."""
        mu, root = self.task.stationary, self._root
        mean, cross, square = self._coefficients(rows)
        white = rng.standard_normal(value.shape)
        noise = root[:, None] * white
        noise -= mu[:, None] * noise.sum(-2, keepdims=True)  # covariance S in every column
        # without attention there is no noise: all three coefficients are zero
        ratio = np.divide(cross, square, out=np.zeros_like(square), where=square > 0)
        shared = cross * ratio
        noise *= np.sqrt(np.maximum(mean - shared, 0.0))
        noise += np.sqrt(shared) * (self._given_tokens @ rng.standard_normal(value.shape))
        factor = (value - ratio * self.task.centred) * root
        noise += np.sqrt(square) * (factor @ rng.standard_normal(value.shape))
        # from the right D^(-1/2) minus the part along mu: covariance D^-1 - 1 1^T
        along = (noise * root).sum(-1, keepdims=True)
        noise /= root
        noise -= along
        noise /= self.batch**0.5
        return noise

    def _coefficients(self, rows: RowCoefficients) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return m, c and e of the module's text, as (..., 1, 1)."""
        mu = self.task.stationary
        mean = rows.squared_norms @ mu
        cross = (rows.squared_norms * rows.overlaps) @ mu
        square = (rows.squared_norms**2) @ mu
        return mean[..., None, None], cross[..., None, None], square[..., None, None]


def check_batch_size(batch: int) -> None:
    """Refuse a batch without samples."""
    if batch < 1:
        raise UsageError(f"batch={batch}: at least one sample")
