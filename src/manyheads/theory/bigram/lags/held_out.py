r"""Squared errors on the samples that were held out, of the fit and of simpler predictions.

The strongest of them is additive, a matrix for every lag, on lags that forward selection found among all. The fewest of
these lags that predict about as well as anything does are the short explanation (the one-standard-error rule of
Breiman, Friedman, Olshen and Stone, 1984).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import linalg, sparse

from manyheads.theory.bigram.lags.alternating_least_squares import attended, one_hot
from manyheads.theory.bigram.lags.streams import Lagged

LARGEST_BASELINE = 4096  # unknowns in a row of the additive baseline; with more symbols it sees fewer lags
TOLERATED = 0.05  # of what the best prediction explains, that a short explanation may miss
RIDGE = 5.0  # of the additive baseline, in samples


@dataclass(frozen=True)
class HeldOutLoss:
    r"""Mean squared error :math:`\tfrac12|f - e_y|^2` on the samples that were held out, for four predictions.

    The short explanation is the fewest lags of the additive model whose loss exceeds the least of all by one standard
    error of the difference, or 5% of what that explains, at most.
    """

    unigram: float  # the frequencies of the targets
    bigram: float  # the table of what follows the present symbol
    additive: float  # the best of linear models with a matrix for each of the first lags of forward selection
    fitted: float  # the fit
    samples: int  # how many there were
    short: tuple[int, ...] = ()  # lags of the short explanation; empty if there are none
    short_loss: float = float("nan")  # its loss


@dataclass(frozen=True, eq=False)
class Additive:
    """One matrix a lag, by least squares with a slight ridge, for the first of some lags, any number of them.

    `factor` is the Cholesky factor of the normal equations, `solved` its inverse times their right side.
    """

    lags: tuple[int, ...]
    factor: np.ndarray
    solved: np.ndarray

    @classmethod
    def fit(cls, data: Lagged, mean: np.ndarray, lags: Sequence[int]) -> "Additive":
        """Sum the normal equations; with many symbols of fewer lags."""
        size = data.vocabulary
        lags = tuple(lags[: max(1, LARGEST_BASELINE // size)])
        second, cross = np.zeros((len(lags) * size,) * 2), np.zeros((len(lags) * size, size))
        for block in data.blocks():
            inputs = _one_hot(block, lags)
            second += (inputs.T @ inputs).toarray()
            cross += (inputs.T @ one_hot(block.targets, size)).toarray()
        cross -= np.outer(second.sum(1) / len(lags), mean)  # every sample holds a one for each lag
        factor = np.linalg.cholesky(second + RIDGE * np.eye(len(second)))
        return cls(lags, factor, linalg.solve_triangular(factor, cross, lower=True))

    def matrices(self, count: int) -> np.ndarray:
        """Return the matrices of the first lags, (count, N, N), answer before token."""
        size = self.solved.shape[1]
        part = slice(0, count * size)
        found = linalg.solve_triangular(self.factor[part, part], self.solved[part], lower=True, trans="T")
        return np.asarray(found.reshape(count, size, size).transpose(0, 2, 1))


def measure_losses(
    data: Lagged, tested: Lagged, value: np.ndarray, attention: np.ndarray, additive: Additive, selected: int
) -> HeldOutLoss:
    """Test the fit and the simpler predictions, additive of up to `selected` lags, on samples that were held out."""
    size = data.vocabulary
    mean = np.bincount(data.targets, minlength=size) / len(data)
    table = np.zeros((size, size))  # (query, target)
    np.add.at(table, (data.queries, data.targets), 1.0)
    table = (table + mean) / (table.sum(1, keepdims=True) + 1)
    counts = range(1, max(1, min(selected, len(additive.lags))) + 1)
    matrices = [additive.matrices(count) for count in counts]
    found = []
    for block in tested.blocks():
        predictions = [
            np.broadcast_to(mean, (len(block), size)),
            table[block.queries],
            mean + attended(block, attention) @ value.T,
            *(
                mean + _one_hot(block, additive.lags[: len(each)]) @ each.transpose(0, 2, 1).reshape(-1, size)
                for each in matrices
            ),
        ]
        rows = np.arange(len(block))
        found.append([0.5 * ((p**2).sum(1) - 2 * p[rows, block.targets] + 1) for p in predictions])
    errors = np.concatenate(found, axis=1)  # (predictions, samples)
    losses = errors.mean(1)
    best = int(losses[2:].argmin()) + 2
    worse = errors[3:] - errors[best]
    allowed = np.maximum(worse.std(1) / len(tested) ** 0.5, TOLERATED * (losses[0] - losses[best]))
    enough = np.flatnonzero((worse.mean(1) <= allowed) & (selected > 0))
    short = additive.lags[: int(enough[0]) + 1] if len(enough) else ()
    short_loss = float(losses[2 + len(short)]) if short else float("nan")
    unigram, bigram, fitted = losses[:3].tolist()
    linear = float(losses[3:].min())
    return HeldOutLoss(unigram, bigram, linear, fitted, len(tested), tuple(sorted(short)), short_loss)


def _one_hot(block: Lagged, lags: Sequence[int]) -> sparse.csr_array:
    """Return the symbols at some lags as ones, (m, lags N)."""
    columns = block.symbols[block.places[:, None] - np.asarray(lags)] + np.arange(len(lags)) * block.vocabulary
    return one_hot(columns, len(lags) * block.vocabulary)
