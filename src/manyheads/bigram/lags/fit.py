r"""Lags on which the next symbol depends: alternating least squares with one shared transition.

The model of the sparse contextual bigram, fitted to a stream without any gradient descent:

.. math:: \mathbb E[e_{y_i}] = m + W \sum_{j<L} A_{k_i j}\, e_{x_{i-j}}, \qquad A \ge 0,

with :math:`m` the frequencies of the targets, :math:`k_i = x_i` the symbol at the place, one matrix :math:`W` that all
symbols and lags share, and a row of weights over lags for every symbol. The objective is the squared error and a
penalty on A, scale-free, in which a lag must stand out by :math:`r` standard deviations of the gradient at a lag on
which nothing depends; with :math:`r = \sqrt{2\ln L}` the largest of L such gradients hardly passes
(`alternating_least_squares`). For fixed :math:`W` it is a lasso of L weights for every symbol; for fixed :math:`A` a
ridge regression whose strength solves one scalar equation. Both are solved exactly, so the objective falls. It is not
convex: the fit is the best minimum from several initial values (`initialization`). Then W and A are fitted once more,
without any penalty, on the lags that were found. Losses are measured on samples that were held out (`held_out`), and a
test of independence compares the predictions of these with those of permuted streams (`independence`); if it rejects,
all samples give the final fit. The penalty's form, its calibration, the algorithm and the test are derived
here and not in the paper, whose model this is: Ren, Wang and Lee (NeurIPS 2024, arXiv 2410.23438).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads._arrays import takes_labels
from manyheads._overview import Overview, Shown
from manyheads.bigram.lags.alternating_least_squares import LagProblem, alternate, certified, refit
from manyheads.bigram.lags.held_out import HeldOutLoss, fit_additive, measure_losses
from manyheads.bigram.lags.independence import Forecast, independence_test
from manyheads.bigram.lags.initialization import minimize
from manyheads.bigram.lags.streams import information_of, read_streams
from manyheads.errors import CertificateError, ShapeError, UsageError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike


@dataclass(frozen=True)
class LagSettings:
    """Settings of `fit_lags`.

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
        Share of the samples, the last ones, on which losses are measured and independence is tested.
    false_alarm
        Probability that a stream of independent symbols, or one whose targets are independent of it, is given lags.
    seed
        Of the permutations of the test.
    baseline_lags
        Lags that the additive baseline sees.
    """

    strength: float | None = None
    iterations: int = 60
    tolerance: float = 0.02
    held_out: float = 0.2
    false_alarm: float = 0.005
    seed: int = 0
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
        if not 1e-5 <= self.false_alarm < 1:
            raise UsageError(
                f"false_alarm={self.false_alarm}: a probability from 1e-5, which takes 400,000 permutations, to below 1"
            )


DEFAULT = LagSettings()
MOST_DRAWN = 40  # symbols in the picture of a fit


@dataclass(frozen=True, eq=False, repr=False)
class LagFit(Shown):
    """Result of `fit_lags`.

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
        Held-out losses of the fit and of three simpler predictions, without the samples that were held out. All other
        attributes are of the fit to all samples, which starts from that one.
    pvalue
        Probability that earlier samples predict later ones as well if these are independent of their past; at least
        `LagSettings.false_alarm` / 4, the resolution of the permutations.
    strength
        r that was used.
    violation
        The certificate: largest violation of the optimality conditions in A for the fitted W, as a share of the
        penalty. It says that no other weights are better with this W; it says nothing of other W, and global optimality
        is not claimed.
    objective
        F after every round; it never rises.
    labels
        What the symbols are in the stream, (N,).
    """

    attention: np.ndarray
    selection: np.ndarray
    value: np.ndarray
    mean: np.ndarray
    counts: np.ndarray
    information: np.ndarray
    loss: HeldOutLoss
    pvalue: float
    strength: float
    violation: float
    objective: tuple[float, ...]
    labels: np.ndarray

    def __repr__(self) -> str:
        """Show the strongest lags, the held-out losses and the p-value."""
        order = [lag for lag in np.argsort(-self.importance, kind="stable")[:5] if self.importance[lag] > 0]
        loss = self.loss
        return "\n".join(
            [
                f"LagFit of {len(self.labels)} symbols and {self.attention.shape[1]} lags",
                "  weight by lag: " + ", ".join(f"{lag}: {self.importance[lag]:.2f}" for lag in order),
                f"  held-out loss: {loss.fitted:.4f}; unigram {loss.unigram:.4f}, bigram {loss.bigram:.4f}",
                f"  independence: p = {self.pvalue:.2g}",
                *(() if self.better_than_unigram else ("  no better than unigram in squared error",)),
            ]
        )

    def to_dataframe(self) -> pd.DataFrame:
        """Return the weights that are not zero as a pandas data frame, one row a symbol and lag."""
        symbols, lags = np.nonzero(self.attention)
        labels, counts = self.labels[symbols].tolist(), self.counts[symbols].tolist()
        rows = list(zip(labels, lags.tolist(), self.attention[symbols, lags].tolist(), counts, strict=True))
        return Overview("", ("symbol", "lag", "weight", "count"), rows).frame()

    def plot(self) -> Figure:
        """Draw the weights as an image: one row a symbol, the most frequent on top, one column a lag."""
        from manyheads.study.reporting.charts import draw_titled
        from manyheads.study.reporting.panels import Picture

        order = np.argsort(-self.counts, kind="stable")[:MOST_DRAWN]
        lags = self.attention.shape[1]
        return draw_titled(
            Picture(
                "Attention by symbol and lag",
                "lag",
                "symbol",
                tuple(map(tuple, self.attention[order].tolist())),
                value_label="weight",
                x_ticks=tuple(str(lag) if lag % (1 + lags // 20) == 0 else "" for lag in range(lags)),
                y_ticks=tuple(repr(label) for label in self.labels[order].tolist()),
            )
        )

    def _overview(self) -> Overview:
        order = np.argsort(-self.importance, kind="stable").tolist()
        rows = [
            (lag, float(self.importance[lag]), int((self.attention[:, lag] > 0).sum()), float(self.information[lag]))
            for lag in order
            if self.importance[lag] > 0
        ]
        headline, _, *notes = repr(self).splitlines()
        return Overview(headline, ("lag", "weight", "symbols", "information_bits"), rows, tuple(notes))

    @property
    def better_than_unigram(self) -> bool:
        """Whether the held-out squared error is below that of the frequencies; lags may be right where it is not."""
        return self.loss.fitted < self.loss.unigram

    def lags_of(self, symbol: Any) -> list[tuple[int, float]]:
        """Return the lags that a symbol looks at with their weights, the largest first."""
        row = self.attention[self._number([symbol])[0]]
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
        return np.asarray(self.labels[(self.counts > 0) & ~(self.attention > 0).any(1)])

    @takes_labels
    def predict(self, windows: ArrayLike) -> np.ndarray:
        """Predict the target's distribution for contexts (m, L), column j the symbol at lag j: (m, N), rows sum to one.

        The prediction is linear and may leave [0, 1] by a little: it is no probability model.
        """
        context = np.asarray(windows)
        if context.ndim != 2 or context.shape[1] != self.attention.shape[1]:
            raise ShapeError(f"windows of shape {context.shape}: give (m, {self.attention.shape[1]}), lag 0 first")
        seen = self._number(context.ravel().tolist()).reshape(context.shape)
        weights = self.attention[seen[:, 0]]
        return self.mean + np.einsum("ml,mln->mn", weights, self.value.T[seen])

    def _number(self, labels: list[Any]) -> np.ndarray:
        """Return the rows of labels."""
        numbers = {label: number for number, label in enumerate(self.labels.tolist())}
        try:
            return np.asarray([numbers[label] for label in labels])
        except KeyError as error:
            raise UsageError(f"{error.args[0]!r} is none of the {len(numbers)} symbols of the stream") from None


@takes_labels
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
        Symbols (n,) of any type, or a list of such arrays, sessions that do not continue one another; a `str` is a
        stream of its characters. Integers from 0 to 4095 are rows of the result as they stand; other labels are sorted,
        and `LagFit.labels` says which row is whose.
    lags
        Number of lags L; lag 0 is the present symbol.
    targets
        What is to be predicted at every place; by default the next symbol.
    vocabulary
        Number of symbols N, for integers; by default one more than the largest.
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
        *No better than unigram*: no lag passes the penalty, or independence is not rejected. A stream of independent
        symbols is given lags with the probability `settings.false_alarm`. Or the alternation did not converge.

    Notes
    -----
    Its assumption is one shared transition: a symbol has the same effect at whichever lag it is looked up. Event logs
    with references, copied fields and repeating records are like that; running text is only in part, and there `loss`
    says how much of the bigram and of an additive model it reaches. It is a detector of lags, no language model: to
    predict, and where symbols at several lags have effects of their own, multinomial logistic regression on one-hot
    symbols is the better tool. Neither sees what only two lags together say, such as the XOR of two symbols.

    The certificate covers A for the W that was fitted. The objective is not convex, and global optimality is not
    claimed: initial values are the fits to single lags, to equal weights and to an additive model.

    A round costs about as much as there are different pairs of symbols at pairs of lags, at most :math:`nL^2/2`.

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
    everything = read_streams(streams, lags, targets, vocabulary)
    data, tested = everything.split(settings.held_out)
    if len(data) <= data.vocabulary or not len(tested):
        raise UsageError(
            f"{len(data)} samples to fit and {len(tested)} to test for {data.vocabulary} symbols at {lags} lags: "
            f"give a longer stream, some hundred samples for every symbol"
        )
    problem = LagProblem.of(data, settings.strength)
    matrices = fit_additive(data, problem.mean, settings.baseline_lags)
    chosen = minimize(problem, matrices, information_of(data), settings.iterations, settings.tolerance)
    pvalue = independence_test(
        Forecast.of(everything, len(data), chosen),
        own=targets is None,
        rate=settings.false_alarm,
        rng=np.random.default_rng(settings.seed),
    )
    if pvalue > settings.false_alarm:
        raise CertificateError(
            f"no better than unigram: on {len(everything) - len(data)} held-out samples the targets are independent of "
            "what the lags predict; give more samples, or look for other lags: probability of so good a prediction by "
            "chance",
            measured=pvalue,
            threshold=settings.false_alarm,
        )
    loss = measure_losses(data, tested, *refit(problem, chosen.attention), matrices)
    problem = LagProblem.of(everything, settings.strength)
    chosen = certified(alternate(problem, chosen.value, settings.iterations, settings.tolerance), settings.tolerance)
    value, attention = refit(problem, chosen.attention)
    return LagFit(
        attention,
        chosen.attention,
        value,
        problem.mean,
        problem.counts,
        information_of(everything),
        loss,
        pvalue,
        problem.strength,
        chosen.violation,
        chosen.objective,
        everything.labels,
    )
