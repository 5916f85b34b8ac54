"""Result of `fit_lags`: lags and weights by symbol, losses, tests, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from manyheads._arrays import takes_labels
from manyheads._extras import Figure, pd
from manyheads._overview import Overview, Shown
from manyheads.errors import ShapeError, UsageError
from manyheads.theory.bigram.lags.held_out import HeldOutLoss
from manyheads.theory.bigram.lags.shared_table import SharedTable

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
        Held-out losses of the fit and of three simpler predictions, without the samples that were held out, and the
        short explanation: the fewest lags that predict about as well. All other attributes are of the fit to all
        samples, which starts from that one.
    pvalue
        Of independence: twice the smaller p-value of the predictions of held-out samples and of single lags in all
        samples, the latter corrected for the number of lags.
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
    table
        Test of the assumption, one transition table for all lags: its p-value, the lag that contradicts it most, and
        the strongest lag that was rejected (`left`), with its p-value.
    own
        Where that assumption is rejected, conditional mutual information in bits of symbol and lag, (N, L), given the
        lags selected before, with a table of its own for each; None where it is not.
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
    table: SharedTable
    own: np.ndarray | None

    def __repr__(self) -> str:
        """Show the strongest lags, the held-out losses and the p-value."""
        order = [lag for lag in np.argsort(-self.importance, kind="stable")[:5] if self.importance[lag] > 0]
        loss = self.loss
        return "\n".join(
            [
                f"LagFit of {len(self.labels)} symbols and {self.attention.shape[1]} lags",
                "  weight by lag: " + ", ".join(f"{lag}: {self.importance[lag]:.2f}" for lag in order),
                f"  held-out loss: {loss.fitted:.4f}; unigram {loss.unigram:.4f}, bigram {loss.bigram:.4f}",
                f"  independence: p = {self.pvalue:.2g}; one table for all lags: p = {self.table.pvalue:.2g}, "
                f"separate tables add {self.table.share:.0%} of the information"
                + (", rejected: lags have tables of their own" if self.own is not None else ""),
                *(
                    [f"  strongest rejected lag: {self.table.left}, p = {self.table.left_pvalue:.2g}"]
                    if not self.importance[self.table.left]  # where all are chosen, it has a weight
                    else []
                ),
                *([f"  short explanation: lags {loss.short}, loss {loss.short_loss:.4f}"] if loss.short else []),
                *(() if self.better_than_unigram else ("  no better than unigram in squared error",)),
            ]
        )

    def to_dataframe(self) -> pd.DataFrame:
        """Return the weights that are not zero as a pandas data frame, one row a symbol and lag."""
        symbols, lags = np.nonzero(self.weights)
        labels, counts = self.labels[symbols].tolist(), self.counts[symbols].tolist()
        rows = list(zip(labels, lags.tolist(), self.weights[symbols, lags].tolist(), counts, strict=True))
        return Overview("", ("symbol", "lag", "weight", "count"), rows).frame()

    def plot(self) -> Figure:
        """Draw the weights as an image: one row a symbol, the most frequent on top, one column a lag."""
        from manyheads.study.panels import Picture
        from manyheads.study.reporting.charts import draw_titled

        order = np.argsort(-self.counts, kind="stable")[:MOST_DRAWN]
        lags = self.attention.shape[1]
        return draw_titled(
            Picture(
                "Attention by symbol and lag",
                "lag",
                "symbol",
                tuple(map(tuple, self.weights[order].tolist())),
                value_label="weight",
                x_ticks=tuple(str(lag) if lag % (1 + lags // 20) == 0 else "" for lag in range(lags)),
                y_ticks=tuple(repr(label) for label in self.labels[order].tolist()),
            )
        )

    def _overview(self) -> Overview:
        kind = "shared table" if self.own is None else "table of its own"
        reasons = {
            lag: kind for lag in np.argsort(-self.importance, kind="stable").tolist() if self.importance[lag] > 0
        }
        reasons.setdefault(self.table.left, f"strongest rejected, p = {self.table.left_pvalue:.2g}")
        rows = [
            (lag, float(self.importance[lag]), int((self.weights[:, lag] > 0).sum()), float(self.information[lag]), why)
            for lag, why in reasons.items()
        ]
        headline, _, *notes = repr(self).splitlines()
        return Overview(headline, ("lag", "weight", "symbols", "information_bits", "reason"), rows, tuple(notes))

    @property
    def weights(self) -> np.ndarray:
        """Weights of the lags, (N, L), mean row sum one: `attention`, or the roots of `own` where it is not None."""
        if self.own is None:
            return self.attention
        roots = np.sqrt(self.own)
        return np.asarray(roots * self.counts.sum() / max(float(self.counts @ roots.sum(1)), 1e-300))

    @property
    def better_than_unigram(self) -> bool:
        """Whether the held-out squared error is below that of the frequencies; lags may be right where it is not."""
        return self.loss.fitted < self.loss.unigram

    def lags_of(self, symbol: object) -> list[tuple[int, float]]:
        """Return the lags that a symbol looks at with their weights, the largest first."""
        row = self.weights[self._number([symbol])[0]]
        return [(int(lag), float(row[lag])) for lag in np.argsort(-row, kind="stable") if row[lag] > 0]

    def top(self, count: int) -> np.ndarray:
        """Return the `count` strongest lags of every symbol, (N, count), sorted; -1 where fewer were found."""
        order = np.argsort(-self.weights, axis=1, kind="stable")[:, :count]
        found = np.take_along_axis(self.weights, order, 1) > 0
        return np.sort(np.where(found, order, -1), axis=1)

    @property
    def importance(self) -> np.ndarray:
        """Weight of every lag, averaged over the stream, (L,)."""
        return self.counts @ self.weights / self.counts.sum()

    @property
    def unresolved(self) -> np.ndarray:
        """Symbols that occur as queries but for which no lag stood out from the noise: too rare, or independent."""
        return np.asarray(self.labels[(self.counts > 0) & ~(self.weights > 0).any(1)])

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

    def _number(self, labels: list[object]) -> np.ndarray:
        """Return the rows of labels."""
        numbers = {label: number for number, label in enumerate(self.labels.tolist())}
        try:
            return np.asarray([numbers[label] for label in labels])
        except KeyError as error:
            raise UsageError(f"{error.args[0]!r} is none of the {len(numbers)} symbols of the stream") from None
