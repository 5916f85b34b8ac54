r"""Which earlier positions does the next symbol depend on? Alternating least squares with one shared transition.

The model of the sparse contextual bigram, fitted to a stream without any gradient descent:

.. math:: \mathbb E[e_{y_i}] = m + W \sum_{j<L} A_{k_i j}\, e_{x_{i-j}}, \qquad A \ge 0,

with :math:`m` the frequencies of the targets, :math:`k_i = x_i` the symbol at the place, one matrix :math:`W` that all
symbols and lags share, and a row of weights over lags for every symbol. What is minimised, scale-free, is

.. math:: F(W, A) = \frac1{2n}\sum_i |e_{y_i} - m - W z_i|^2
                    + |W|_\nu \sum_k \frac{n_k}{n}\lambda_k |A_k|_1, \qquad
          \lambda_k = r\,\varphi/\sqrt{n_k},

where :math:`|W|_\nu^2=\sum_j\nu_j|W_j|^2`, :math:`\nu` the frequencies of the symbols, and
:math:`\varphi|W|_\nu/\sqrt{n_k}` is the standard deviation of the gradient at a lag on which nothing depends: with
:math:`r = \sqrt{2\ln L}` the largest of L such gradients hardly passes. For fixed :math:`W` this is a lasso of L
weights for every symbol; for fixed :math:`A` a ridge regression whose strength solves one scalar equation. Both
are solved exactly, so :math:`F` falls. Then both are fitted once more, without any penalty, on the lags that were
found. The penalty's form, its calibration and the algorithm are derived here and not in the paper, whose model this is:
Ren, Wang and Lee (NeurIPS 2024, arXiv 2410.23438).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from manyheads._arrays import takes_arrays
from manyheads.bigram.alternating_least_squares import Problem, alternate, attended, refit
from manyheads.bigram.streams import Lagged, information_of, read_streams
from manyheads.errors import ShapeError, UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

LARGEST_BASELINE = 4096  # unknowns in a row of the additive baseline; with more symbols it sees fewer lags


@dataclass(frozen=True)
class LagSettings:
    """How `fit_lags` fits.

    Attributes
    ----------
    strength
        r: how many standard deviations of the noise a lag must stand out by; None for the square root of 2 ln L,
        at least 2. With many symbols, the square root of 2 ln(N L) leaves hardly a false lag and finds a little less.
    iterations
        Most rounds of alternation.
    tolerance
        Largest violation of the optimality conditions in A that still counts as converged, as a share of the penalty.
    held_out
        Share of the samples, the last ones, on which the fit is tested.
    baseline_lags
        Lags that the additive baseline sees.
    """

    strength: float | None = None
    iterations: int = 60
    tolerance: float = 0.02
    held_out: float = 0.2
    baseline_lags: int = 8

    def __post_init__(self) -> None:
        if self.strength is not None and not 0 < self.strength < np.inf:
            raise UsageError(f"strength={self.strength}: a positive number of standard deviations, 2 to 5 in practice")
        if self.iterations < 1 or not 0 < self.tolerance < 1 or self.baseline_lags < 1:
            raise UsageError(
                f"iterations={self.iterations}, tolerance={self.tolerance}, baseline_lags={self.baseline_lags}: at "
                "least 1, between 0 and 1, at least 1"
            )
        if not 0 < self.held_out < 1:
            raise UsageError(f"held_out={self.held_out}: a share of the samples between 0 and 1")


DEFAULT = LagSettings()


@dataclass(frozen=True)
class HeldOutLoss:
    r"""Mean squared error :math:`\tfrac12|f - e_y|^2` on the samples that were held out, for five predictions.

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


@dataclass(frozen=True, eq=False)
class LagFit:
    """What `fit_lags` found.

    Attributes
    ----------
    attention
        A, (N, L): row k holds the weights of the lags for symbol k, fitted without penalty; zero where nothing was
        found. The mean of the row sums over the stream is one, which fixes the scale of `value`.
    selection
        The same under the penalty: what chose the lags, and by how much each passed.
    value
        W, (N, N): what the symbol at an attended lag adds to the prediction; columns sum to zero.
    mean
        Frequencies of the targets, (N,).
    counts
        How often each symbol was the query, (N,).
    information
        Mutual information of target and lag in bits, (L,), on the same samples.
    loss
        Held-out losses of the fit and of four simpler predictions.
    strength
        r that was used.
    violation
        The certificate: largest violation of the optimality conditions, as a share of the penalty.
    objective
        F after every round; it never rises.
    """

    attention: np.ndarray
    selection: np.ndarray
    value: np.ndarray
    mean: np.ndarray
    counts: np.ndarray
    information: np.ndarray
    loss: HeldOutLoss
    strength: float
    violation: float
    objective: tuple[float, ...]

    def lags_of(self, symbol: int) -> list[tuple[int, float]]:
        """Return the lags that a symbol looks at with their weights, the largest first."""
        row = self.attention[symbol]
        return [(int(lag), float(row[lag])) for lag in np.argsort(-row, kind="stable") if row[lag] > 0]

    def top(self, count: int) -> np.ndarray:
        """Return the `count` strongest lags of every symbol, (N, count), sorted; -1 where fewer were found."""
        order = np.argsort(-self.attention, axis=1, kind="stable")[:, :count]
        found = np.take_along_axis(self.attention, order, 1) > 0
        return np.sort(np.where(found, order, -1), axis=1)

    @property
    def importance(self) -> np.ndarray:
        """Weight of every lag, averaged over the stream, (L,)."""
        return self.counts @ self.attention / self.counts.sum()

    @property
    def unresolved(self) -> np.ndarray:
        """Symbols that occur as queries but for which no lag stood out from the noise: too rare, or independent."""
        return np.flatnonzero((self.counts > 0) & ~(self.attention > 0).any(1))

    @takes_arrays
    def predict(self, windows: ArrayLike) -> np.ndarray:
        """Predict the target's law for contexts (m, L), column j the symbol at lag j: (m, N), rows sum to one.

        The prediction is linear and may leave [0, 1] by a little: it is no probability model.
        """
        context = np.asarray(windows)
        if context.ndim != 2 or context.shape[1] != self.attention.shape[1]:
            raise ShapeError(f"windows of shape {context.shape}: give (m, {self.attention.shape[1]}), lag 0 first")
        weights = self.attention[context[:, 0]]
        return self.mean + np.einsum("ml,mln->mn", weights, self.value.T[context])


@takes_arrays
def fit_lags(
    streams: ArrayLike | Sequence[ArrayLike],
    lags: int,
    *,
    targets: ArrayLike | Sequence[ArrayLike] | None = None,
    vocabulary: int | None = None,
    settings: LagSettings = DEFAULT,
) -> LagFit:
    r"""Find the lags on which the next symbol depends, for every present symbol, with their weights.

    Parameters
    ----------
    streams
        Symbols (n,), integers from 0 on; or a list of such arrays, sessions that do not continue one another.
    lags
        Number of lags L; lag 0 is the present symbol.
    targets
        What is to be predicted at every place; by default the next symbol.
    vocabulary
        Number of symbols N; by default one more than the largest.
    settings
        Strength of the penalty, iterations, held-out share.

    Returns
    -------
    LagFit

    Raises
    ------
    UsageError, ShapeError
        An empty stream, lags beyond its length, symbols out of range, targets that never change, fewer samples than
        symbols.
    CertificateError
        No dependence stands out from the noise, or the alternation did not converge.

    Notes
    -----
    Its assumption is one shared transition: that a symbol has the same effect at whichever lag it is looked up. Event
    logs with references, copied fields and repeating records are like that; running text is only in part, and there
    `loss` says how much of the bigram and of an additive model it reaches. It is a detector of lags, no language model.
    One pass over n places costs about :math:`n L^2` additions; memory does not grow with n.

    Examples
    --------
    >>> from manyheads.bigram import plant_lags
    >>> rng = np.random.default_rng(0)
    >>> stream = rng.integers(0, 4, 6000)
    >>> table = 0.7 * np.eye(4) + 0.3 / 4  # mostly a copy of the symbol that is looked up
    >>> planted = plant_lags(rng, stream, table, [[3], [5], [1], [6]], np.ones((4, 1)))
    >>> fit_lags(stream, 8, targets=planted).top(1).ravel().tolist()
    [3, 5, 1, 6]
    """
    data, tested = read_streams(streams, lags, targets, vocabulary).split(settings.held_out)
    if len(data) <= data.vocabulary or not len(tested):
        raise UsageError(
            f"{len(data)} samples to fit and {len(tested)} to test for {data.vocabulary} symbols at {lags} lags: "
            f"give a longer stream, some hundred samples for every symbol"
        )
    problem = Problem.of(data, settings.strength)
    chosen = alternate(problem, settings.iterations, settings.tolerance)
    value, attention = refit(problem, chosen.attention)
    loss = _losses(data, tested, problem.mean, value, attention, settings.baseline_lags)
    return LagFit(
        attention,
        chosen.attention,
        value,
        problem.mean,
        problem.counts,
        information_of(data),
        loss,
        problem.strength,
        chosen.violation,
        chosen.objective,
    )


def _losses(
    data: Lagged, tested: Lagged, mean: np.ndarray, value: np.ndarray, attention: np.ndarray, baseline_lags: int
) -> HeldOutLoss:
    """Test the fit and the simpler predictions on the samples that were held out."""
    size = data.vocabulary
    table = np.zeros((size, size))  # (query, target)
    np.add.at(table, (data.queries, data.targets), 1.0)
    table = (table + mean) / (table.sum(1, keepdims=True) + 1)
    reach = max(1, min(baseline_lags, data.lags, LARGEST_BASELINE // size))
    matrices = _fit_additive(data, mean, reach)
    sums = np.zeros(4)
    for block in tested.blocks():
        hidden = attended(block, attention)  # (m, N)
        predictions = (
            np.broadcast_to(mean, hidden.shape),
            table[block.queries],
            mean + _one_hot(block, reach) @ matrices,
            mean + hidden @ value.T,
        )
        for place, law in enumerate(predictions):
            right = law[np.arange(len(block)), block.targets]
            sums[place] += 0.5 * float((law**2).sum() - 2 * right.sum() + len(block))
    unigram, bigram, additive, fitted = (sums / len(tested)).tolist()
    return HeldOutLoss(unigram, bigram, additive, fitted, len(tested))


def _fit_additive(data: Lagged, mean: np.ndarray, reach: int) -> np.ndarray:
    """Fit one matrix a lag by least squares with a slight ridge, (reach N, N)."""
    size = data.vocabulary
    second, cross = np.zeros((reach * size, reach * size)), np.zeros((reach * size, size))
    for block in data.blocks():
        inputs = _one_hot(block, reach)
        second += (inputs.T @ inputs).toarray()
        targets = sparse.csr_array((np.ones(len(block)), (np.arange(len(block)), block.targets)), (len(block), size))
        cross += (inputs.T @ targets).toarray()
    cross -= np.outer(second.sum(1) / reach, mean)  # every sample holds `reach` ones
    return np.linalg.solve(second + 5.0 * np.eye(len(second)), cross)


def _one_hot(block: Lagged, reach: int) -> sparse.csr_array:
    """Return the symbols at the first lags as ones, (m, reach N)."""
    lags = np.arange(reach)
    columns = block.symbols[block.places[:, None] - lags] + lags * block.vocabulary  # (m, reach)
    starts = np.arange(0, columns.size + 1, reach)
    return sparse.csr_array((np.ones(columns.size), columns.ravel(), starts), (len(block), reach * block.vocabulary))
