r"""Test of independence for `fit_lags`: predictions from earlier samples against permutations of later ones.

A fit (W, A) to the samples before a cut predicts :math:`f_i = m + Wz_i` after it. On the later samples i,

.. math:: T = \sum_i (e_{y_i} - \bar e_y)^\top f_i

is their covariance with the targets, which sees a dependence that is too weak to lower the squared error. If the
symbols of a stream are independent, the next symbols after the cut are exchangeable given all that came before: each of
their permutations, with the predictions made anew from the permuted stream, is as probable as the stream itself, so the
rank of T among B permutations is an exact p-value. To permute the targets alone is not enough there: a symbol that was
seen just now is rarer among those that are left, which looks like a dependence if samples are few and symbols many.

Targets that the caller gives are permuted by themselves. These may depend on each other although they are independent
of the stream; for them the mean of :math:`T_s^2` over all rotations of the targets gives a second p-value by the normal
distribution, since a rotation keeps what they are among themselves, and the larger one counts.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from manyheads.theory.bigram.lags.alternating_least_squares import Minimum, attended, list_chosen
from manyheads.theory.bigram.lags.streams import Lagged

ENOUGH = 10  # permutations at least as large as the stream's own value, after which no more are drawn


@dataclass(frozen=True, eq=False)
class Forecast:
    """Samples that were held out, and the predictions of a fit to those before."""

    data: Lagged  # the samples; their symbols are cut to what they see
    response: np.ndarray  # the statistic by target and attended symbol, (N, N)
    chosen: np.ndarray  # lags of every query, (N, M)
    weights: np.ndarray  # (N, M)

    @classmethod
    def of(cls, data: Lagged, start: int, fit: Minimum) -> "Forecast":
        """Take the samples from `start` on."""
        held = data.part(start, len(data))
        low = int(held.places[0]) - data.lags + 1
        held = replace(held, symbols=data.symbols[low:], places=held.places - low)
        mean = np.bincount(held.targets, minlength=data.vocabulary) / len(held)
        chosen = list_chosen(fit.attention)
        return cls(held, fit.value - mean @ fit.value, chosen, np.take_along_axis(fit.attention, chosen, 1))

    def statistic(self, data: Lagged) -> float:
        """Return T of the samples, or of a permutation of them."""
        queries = data.queries
        seen = data.symbols[data.places[:, None] - self.chosen[queries]]
        return float(np.vdot(self.weights[queries], self.response[data.targets[:, None], seen]))

    def permuted(self, rng: np.random.Generator, own: bool) -> Lagged:
        """Permute the targets; if they are the stream's `own` next symbols, later samples see them permuted as well."""
        targets = rng.permutation(self.data.targets)
        if not own:
            return replace(self.data, targets=targets)
        symbols = self.data.symbols.copy()
        symbols[self.data.places + 1] = targets
        return replace(self.data, symbols=symbols, targets=targets)

    def rotated_variance(self) -> float:
        """Return the mean square of T over all rotations of the targets but the identity."""
        attention = np.zeros((self.data.vocabulary, self.data.lags))
        np.put_along_axis(attention, self.chosen, self.weights, 1)
        added = np.concatenate([attended(block, attention) @ self.response.T for block in self.data.blocks()])
        added -= added.mean(0)
        sums = np.zeros(len(added))
        for symbol in np.unique(self.data.targets):
            spectrum = np.fft.rfft(added[:, symbol]).conj() * np.fft.rfft(self.data.targets == symbol)
            sums += np.fft.irfft(spectrum, len(added))
        return float((sums[1:] ** 2).mean()) if len(sums) > 1 else np.inf


def independence_test(forecast: Forecast, own: bool, rate: float, rng: np.random.Generator) -> float:
    """Return the p-value of the module's head: one-sided, small if the predictions go with the targets.

    It is at least a quarter of `rate`, the error rate of the decision; `own` targets are the stream's next symbols. The
    draws end early where the p-value is large; it is valid then as well (Besag and Clifford, "Sequential Monte Carlo
    p-values", Biometrika 1991).
    """
    total, larger = forecast.statistic(forecast.data), 0
    draws = int(np.ceil(4 / rate)) - 1
    for drawn in range(1, draws + 1):
        # equal up to rounding counts as larger
        larger += forecast.statistic(forecast.permuted(rng, own)) >= total - 1e-9 * abs(total)
        if larger == ENOUGH:
            return larger / drawn
    pvalue = (1 + larger) / (draws + 1)
    if not own and (variance := forecast.rotated_variance()) > 0:
        pvalue = max(pvalue, float(stats.norm.sf(total / variance**0.5)))
    return pvalue
