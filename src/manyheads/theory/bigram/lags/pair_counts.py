r"""Counts of pairs of symbols at two lags: the sums of a round of alternation without another pass over the stream.

For every query k and lags j, l they hold how often symbols x and x' stand at these lags, and how often target y comes
with symbol x at lag j. Every sum that depends on the stream is then one product of a sparse matrix and a vector:

.. math:: G^k_{jl} = \sum_{x,x'} c^k_{jl}(x,x')\,K_{xx'},\qquad
          S_{xx'} = \tfrac1n\sum_{kjl} c^k_{jl}(x,x')\,A_{kj}A_{kl}.
"""

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from manyheads.theory.bigram.lags.streams import Lagged


@dataclass(frozen=True, eq=False)
class PairCounts:
    """Counts at some lags of every query."""

    chosen: np.ndarray  # (N, M): the lags
    used: np.ndarray  # (N, M): which of them count; the others only fill a row
    pairs: sparse.csr_array  # sparse, (M(M+1)/2 N, N^2): row (j, l <= j, k), column (x, x')
    answers: sparse.csr_array  # sparse, (M N, N^2): row (j, k), column (y, x)
    samples: int  # number of samples n

    @classmethod
    def of(cls, data: Lagged, chosen: np.ndarray, used: np.ndarray) -> "PairCounts":
        """Count the pairs at the lags `chosen` of each query where `used`."""
        size, queries, places = data.vocabulary, data.queries, data.places
        rows = [np.flatnonzero(used[queries, column]) for column in range(chosen.shape[1])]
        pairs, answers = [], []
        for one, samples in enumerate(rows):
            asked = queries[samples]
            seen = data.symbols[places[samples] - chosen[asked, one]]
            answers.append(_count((asked * size + data.targets[samples]) * size + seen, size))
            for other in range(one + 1):
                both = used[asked, other]
                part = asked[both]
                beside = data.symbols[places[samples[both]] - chosen[part, other]]
                pairs.append(_count((part * size + seen[both]) * size + beside, size))
        return cls(chosen, used, _stack(pairs, size), _stack(answers, size), len(data))

    def attention_sums(self, value: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return G (N, M, M) and h (N, M) for a value matrix and the mean of the targets."""
        size, most = self.chosen.shape
        one, other = np.tril_indices(most)
        sums = (self.pairs @ (value.T @ value).ravel()).reshape(-1, size)  # (pairs of lags, N)
        gram = np.zeros((size, most, most))
        gram[:, one, other] = gram[:, other, one] = sums.T
        correlation = (self.answers @ (value - mean @ value).ravel()).reshape(most, size).T
        return gram, correlation

    def value_sums(self, weights: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return S and C (N, N) for weights (N, M), zero where not `used`."""
        size, most = self.chosen.shape
        one, other = np.tril_indices(most)
        products = np.where(one == other, 0.5, 1.0)[:, None] * weights.T[one] * weights.T[other]
        half = (self.pairs.T @ products.ravel()).reshape(size, size)
        cross = (self.answers.T @ weights.T.ravel()).reshape(size, size)  # (target, symbol)
        return (half + half.T) / self.samples, (cross - np.outer(mean, cross.sum(0))) / self.samples

    def spread(self, weights: np.ndarray, lags: int) -> np.ndarray:
        """Return weights (N, M) as attention, (N, L)."""
        attention = np.zeros((len(weights), lags))
        np.add.at(attention, (np.arange(len(weights))[:, None], self.chosen), np.where(self.used, weights, 0.0))
        return attention


def _count(codes: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes that occur, sorted, and how often."""
    if size**3 <= 4 * len(codes):
        counts = np.bincount(codes, minlength=size**3)
        seen = np.flatnonzero(counts)
        return seen, counts[seen]
    return np.unique(codes, return_counts=True)


def _stack(tables: list[tuple[np.ndarray, np.ndarray]], size: int) -> sparse.csr_array:
    """Put tables of codes (k, cell) below each other: a row for every table and k."""
    cells = size * size
    rows = np.concatenate([np.bincount(codes // cells, minlength=size) for codes, _ in tables])
    columns = np.concatenate([codes % cells for codes, _ in tables])
    counts = np.concatenate([counts for _, counts in tables]).astype(float)
    starts = np.concatenate([[0], np.cumsum(rows)])
    return sparse.csr_array((counts, columns.astype(np.int32), starts), (len(rows), cells))
