"""Squared errors on the samples that were held out, of the fit and of simpler predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from manyheads.bigram.lags.alternating_least_squares import attended, one_hot
from manyheads.bigram.lags.streams import Lagged

LARGEST_BASELINE = 4096  # unknowns in a row of the additive baseline; with more symbols it sees fewer lags
RIDGE = 5.0  # of the additive baseline, in samples


@dataclass(frozen=True)
class HeldOutLoss:
    r"""Mean squared error :math:`\tfrac12|f - e_y|^2` on the samples that were held out, for four predictions.

    Attributes
    ----------
    unigram
        The frequencies of the targets.
    bigram
        The table of what follows the present symbol.
    additive
        A linear model with a matrix for every lag, which sees the first `baseline_lags` lags.
    fitted
        The fit.
    samples
        How many there were.
    """

    unigram: float
    bigram: float
    additive: float
    fitted: float
    samples: int


def fit_additive(data: Lagged, mean: np.ndarray, lags: int) -> np.ndarray:
    """Fit one matrix a lag by least squares with a slight ridge: (lags that it sees, N, N), answer before token."""
    size = data.vocabulary
    reach = max(1, min(lags, data.lags, LARGEST_BASELINE // size))
    second, cross = np.zeros((reach * size, reach * size)), np.zeros((reach * size, size))
    for block in data.blocks():
        inputs = _one_hot(block, reach)
        second += (inputs.T @ inputs).toarray()
        cross += (inputs.T @ one_hot(block.targets, size)).toarray()
    cross -= np.outer(second.sum(1) / reach, mean)  # every sample holds `reach` ones
    matrices = np.linalg.solve(second + RIDGE * np.eye(len(second)), cross)
    return matrices.reshape(reach, size, size).transpose(0, 2, 1)


def measure_losses(
    data: Lagged, tested: Lagged, value: np.ndarray, attention: np.ndarray, matrices: np.ndarray
) -> HeldOutLoss:
    """Test the fit and the simpler predictions on the samples that were held out."""
    size = data.vocabulary
    mean = np.bincount(data.targets, minlength=size) / len(data)
    table = np.zeros((size, size))  # (query, target)
    np.add.at(table, (data.queries, data.targets), 1.0)
    table = (table + mean) / (table.sum(1, keepdims=True) + 1)
    stacked = matrices.transpose(0, 2, 1).reshape(-1, size)
    sums = np.zeros(4)
    for block in tested.blocks():
        hidden = attended(block, attention)  # (m, N)
        predictions = (
            np.broadcast_to(mean, hidden.shape),
            table[block.queries],
            mean + _one_hot(block, len(matrices)) @ stacked,
            mean + hidden @ value.T,
        )
        for place, predicted in enumerate(predictions):
            right = predicted[np.arange(len(block)), block.targets]
            sums[place] += 0.5 * float((predicted**2).sum() - 2 * right.sum() + len(block))
    unigram, bigram, additive, fitted = (sums / len(tested)).tolist()
    return HeldOutLoss(unigram, bigram, additive, fitted, len(tested))


def _one_hot(block: Lagged, reach: int) -> sparse.csr_array:
    """Return the symbols at the first lags as ones, (m, reach N)."""
    lags = np.arange(reach)
    columns = block.symbols[block.places[:, None] - lags] + lags * block.vocabulary  # (m, reach)
    starts = np.arange(0, columns.size + 1, reach)
    return sparse.csr_array((np.ones(columns.size), columns.ravel(), starts), (len(block), reach * block.vocabulary))
