r"""How much the gradients of a batch scatter: the covariance that a Gaussian simulation of training draws from.

For a query :math:`k` let :math:`r = f - e_y` be the residual, :math:`D = \mathrm{diag}\mu`, :math:`S = D -
\mu\mu^\top`, and

.. math:: C_W = W D W^\top, \quad C_{PW} = \tilde P D W^\top, \quad
          R_k = \mathbb E[rr^\top|k] = S - (q\cdot a)(C_{PW} + C_{PW}^\top) + |a|^2 C_W .

* **Attention.** At a position :math:`t` that the query does not look at, :math:`x_t` is independent of the answer, and
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
(\mathrm{diag}P_j - P_jP_j^\top)` is a covariance that never changes. So a draw costs a product of matrices.

Everything here is derived here. Measured here at N = 4, T = 40: the total variance of the values is right to .5% at the
start and 3-5% too large later, at equal frequencies; with a rare token it was up to 40% too small, because a rare
token's residual depends on its own column of the histogram. Trust the dynamics at nearly equal frequencies.
"""

from typing import NamedTuple

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads.bigram.task import BigramTask
from manyheads.errors import UsageError


class RowCoefficients(NamedTuple):
    """What the noise needs of the attention: of each row its square norm and its product with the true weights."""

    energies: np.ndarray  # (..., N)
    overlaps: np.ndarray  # (..., N)


@takes_arrays
def row_coefficients(task: BigramTask, attention: np.ndarray) -> RowCoefficients:
    """Measure the rows of an attention (N, T)."""
    on_support = np.take_along_axis(attention, task.positions, axis=1).astype(float)  # (N, Q)
    energies = np.einsum("kt,kt->k", attention, attention, dtype=float)
    return RowCoefficients(energies, (on_support * task.weights).sum(1))


@takes_arrays
def attention_noise(task: BigramTask, value: np.ndarray, rows: RowCoefficients, batch: int) -> np.ndarray:
    r"""Return the standard deviation :math:`\sigma_k` of a batch's attention gradient, off the true positions.

    Parameters
    ----------
    task
        The task.
    value
        Centred value matrices, (..., N, N), with :math:`W\mu = 0`.
    rows
        Of the attention: `row_coefficients(task, attention)`, with the same leading dimensions.
    batch
        Samples B.

    Returns
    -------
    numpy.ndarray
        (..., N), one for every query: that of :math:`(W^\top r)[x_t]` averaged over the samples of that query and
        divided by :math:`\mu_k`, before the mean over positions is removed. Zero at :math:`W = 0`. Exact up to terms of
        the size of one entry of `attention`.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 10, 2)
    >>> rows = row_coefficients(task, np.full((3, 10), 0.1))
    >>> sigma = attention_noise(task, 0.1 * task.centred, rows, batch=64)
    >>> approximate = (0.1**2 * task.transition_energy / 64) ** 0.5  # sqrt(K_V / B), for small W and equal frequencies
    >>> (sigma / approximate).round(2).tolist()
    [1.0, 1.0, 1.0]
    """
    check_batch_size(batch)
    law = task.stationary
    square = (value * law) @ np.swapaxes(value, -1, -2)  # C_W
    cross = (task.centred * law) @ np.swapaxes(value, -1, -2)  # C_PW
    start = _trace_with_spread(law, square)
    second = 2 * (square * cross).sum((-2, -1))  # tr C_W (C_PW + C_PW^T): C_W is symmetric
    third = (square**2).sum((-2, -1))
    traces = start[..., None] - rows.overlaps * second[..., None] + rows.energies * third[..., None]
    return np.sqrt(np.maximum(traces, 0.0) / (batch * law))


@takes_arrays
def attention_noise_at_start(task: BigramTask, value: np.ndarray, batch: int) -> np.ndarray:
    r"""Return :math:`\sigma_k` with the residual of an untrained model, :math:`R_k = S`: cheap, and exact as W -> 0.

    :math:`\operatorname{tr}C_WS = \sum_{ij}\mu_i\mu_jW_{ij}^2 - \sum_j\mu_j(\mu\cdot W_j)^2` costs :math:`O(N^2)`.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 10, 2)
    >>> attention_noise_at_start(task, np.zeros((3, 3)), batch=64).tolist()
    [0.0, 0.0, 0.0]
    """
    check_batch_size(batch)
    law = task.stationary
    total = np.einsum("...ij,...ij,i,j->...", value, value, law, law) - np.einsum(
        "...j,j->...", np.einsum("i,...ij->...j", law, value) ** 2, law
    )
    return np.sqrt(np.maximum(total, 0.0)[..., None] / (batch * law))


class ValueNoise:
    r"""Draws of the scatter of a batch's value gradient, of covariance :math:`\bar R\otimes(D^{-1}-11^\top)/B`.

    Parameters
    ----------
    task
        The task.
    batch
        Samples B.
    at_start
        Whether to keep the residual of an untrained model, :math:`R_k = S`: :math:`O(N^2)` a draw instead of
        :math:`O(N^3)`, and too much noise once the model has learned.

    Examples
    --------
    >>> from manyheads.bigram.task import draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 10, 2)
    >>> rows = row_coefficients(task, task.attention)
    >>> noise = ValueNoise(task, batch=64).draw(np.random.default_rng(1), task.centred, rows)
    >>> noise.shape, bool(abs(noise @ task.stationary).max() < 1e-12), bool(abs(noise.sum(0)).max() < 1e-12)
    ((3, 3), True, True)
    """

    def __init__(self, task: BigramTask, batch: int, *, at_start: bool = False):
        check_batch_size(batch)
        law = task.stationary
        self.task, self.batch, self.at_start = task, batch, at_start
        self._root = np.sqrt(law)
        answers = np.diag(law) - (task.transition * law) @ task.transition.T  # S - Pt D Pt^T, as P mu = mu
        values, vectors = np.linalg.eigh(answers)
        factor = vectors * np.sqrt(np.maximum(values, 0.0))
        self._given_tokens = factor - factor.mean(0)  # answers sum to one: what rounding leaves along 1 goes

    @takes_arrays
    def draw(self, rng: np.random.Generator, value: np.ndarray, rows: RowCoefficients) -> np.ndarray:
        """Draw one matrix for every value matrix: (..., N, N), without mean from both sides; zero without attention."""
        law, root = self.task.stationary, self._root
        energy, cross, square = self._coefficients(rows)
        white = rng.standard_normal(value.shape)
        scatter = root[:, None] * white
        scatter -= law[:, None] * scatter.sum(-2, keepdims=True)  # covariance S in every column
        if self.at_start:
            scatter *= np.sqrt(energy)
        else:
            # without attention nothing is seen and nothing scatters: all three coefficients are zero
            ratio = np.divide(cross, square, out=np.zeros_like(square), where=square > 0)
            shared = cross * ratio
            scatter *= np.sqrt(np.maximum(energy - shared, 0.0))
            scatter += np.sqrt(shared) * (self._given_tokens @ rng.standard_normal(value.shape))
            factor = (value - ratio * self.task.centred) * root
            scatter += np.sqrt(square) * (factor @ rng.standard_normal(value.shape))
        # from the right D^(-1/2) minus the part along the law: covariance D^-1 - 1 1^T
        along = (scatter * root).sum(-1, keepdims=True)
        scatter /= root
        scatter -= along
        scatter /= self.batch**0.5
        return scatter

    @takes_arrays
    def total_variance(self, value: np.ndarray, rows: RowCoefficients) -> float:
        r"""Return the summed variance of all entries, :math:`\operatorname{tr}\bar R\,(\sum_j1/\mu_j - N)/B`."""
        law = self.task.stationary
        energy, cross, square = (float(part[..., 0, 0]) for part in self._coefficients(rows))
        trace = energy * (1 - float(law @ law))
        if not self.at_start:
            trace += square * float(law @ (value**2).sum(0)) - 2 * cross * float(
                law @ (value * self.task.centred).sum(0)
            )
        return trace * float((1 / law).sum() - len(law)) / self.batch

    def _coefficients(self, rows: RowCoefficients) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return m, c and e of the module's text, as (..., 1, 1)."""
        law = self.task.stationary
        energy = rows.energies @ law
        cross = (rows.energies * rows.overlaps) @ law
        square = (rows.energies**2) @ law
        return energy[..., None, None], cross[..., None, None], square[..., None, None]


def check_batch_size(batch: int) -> None:
    """Refuse a batch that holds nothing."""
    if batch < 1:
        raise UsageError(f"batch={batch}: at least one sample")


def _trace_with_spread(law: np.ndarray, square: np.ndarray) -> np.ndarray:
    """Return tr(C S) for symmetric C, (...,)."""
    return np.einsum("...ii,i->...", square, law) - np.einsum("i,...ij,j->...", law, square, law)
