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
without any penalty, on the lags that were found and still stand out. Losses are measured on samples that were held out
(`held_out`). Independence is tested on their predictions, by permuted streams, and on all samples lag
by lag; if either rejects, all samples give the final fit.

In the words of Raftery's mixture transition distribution (MTD), P(next | past) is a mixture over lags of one transition
matrix, with weights that depend on the present symbol. That one matrix is an assumption, and it is tested
(`shared_table`). Where it is rejected, the lags are those of a selection by conditional mutual information with a
matrix for each of them, as in the MTDg (`forward_selection`).

The penalty's form, its calibration, the algorithm and the tests are derived here and not in the paper, whose model this
is: Ren, Wang and Lee (NeurIPS 2024, arXiv 2410.23438).

Test of independence for `fit_lags`: predictions from earlier samples against permutations of later ones.

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

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from manyheads._arrays import takes_labels
from manyheads._constraints import Constrained, Constraint, constrained
from manyheads.errors import CertificateError, UsageError
from manyheads.theory.bigram.lags import alternating_least_squares as als
from manyheads.theory.bigram.lags.forward_selection import Selection, present_pvalue, rotated_pvalue, select_lags
from manyheads.theory.bigram.lags.held_out import Additive, measure_losses
from manyheads.theory.bigram.lags.initial_tables import minimize
from manyheads.theory.bigram.lags.result import LagFit
from manyheads.theory.bigram.lags.shared_table import check_shared_table
from manyheads.theory.bigram.lags.streams import Lagged, information_of, read_streams

ENOUGH = 10  # permutations at least as large as the stream's own value, after which no more are drawn


@dataclass(frozen=True, eq=False)
class Forecast:
    """Samples that were held out, and the predictions of a fit to those before."""

    data: Lagged  # the samples; their symbols are cut to what they see
    response: np.ndarray  # the statistic by target and attended symbol, (N, N)
    chosen: np.ndarray  # lags of every query, (N, M)
    weights: np.ndarray  # (N, M)

    @classmethod
    def of(cls, data: Lagged, start: int, fit: als.Minimum) -> "Forecast":
        """Take the samples from `start` on."""
        held = data.part(start, len(data))
        low = int(held.places[0]) - data.lags + 1
        held = replace(held, symbols=data.symbols[low:], places=held.places - low)
        mean = np.bincount(held.targets, minlength=data.vocabulary) / len(held)
        chosen = als.list_chosen(fit.attention)
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
        added = np.concatenate([als.attended(block, attention) @ self.response.T for block in self.data.blocks()])
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


@dataclass(frozen=True)
class LagSettings(Constrained):
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
    """

    strength: float | None = constrained(None, Constraint(above=0))
    iterations: int = constrained(60, Constraint(least=1))
    tolerance: float = constrained(0.02, Constraint(above=0, below=1))
    held_out: float = constrained(0.2, Constraint(above=0, below=1))
    false_alarm: float = constrained(0.005, Constraint(least=1e-5, below=1))  # 1e-5 takes 400,000 permutations
    seed: int = 0


DEFAULT = LagSettings()
INITIAL = 8  # lags of the additive model that gives an initial value, at least


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
        and `LagFit.labels` says which row is whose. NaN, NaT, None, `pandas.NA` and masked entries are gaps, in every
        dtype: a gap is no symbol, and ends a session.
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
        *No better than unigram*: independence is not rejected. A stream of independent symbols is given lags with the
        probability `settings.false_alarm`. Or the alternation did not converge.

    Warns
    -----
    UserWarning
        One transition table for all lags is rejected.

    Notes
    -----
    Its assumption is one shared transition: a symbol has the same effect at whichever lag it is looked up. Event logs
    with references, copied fields and repeating records are like that; running text is only in part, and there `loss`
    says how much of the bigram and of an additive model it reaches. The assumption is tested, and counts as rejected if
    tables of their own also add more than 5% of the information; then `own` and `weights` hold the lags of these
    tables, `attention` and `value` are still of the shared one. It is a detector of lags, no language model: to
    predict, and where symbols at several lags have effects of their own, multinomial logistic regression on one-hot
    symbols is the better tool. Neither sees what only two lags together say, such as the XOR of two symbols.

    The certificate covers A for the W that was fitted. The objective is not convex, and global optimality is not
    claimed: initial values are the fits to single lags, to equal weights and to an additive model.

    A round costs about as much as there are different pairs of symbols at pairs of lags, at most :math:`nL^2/2`.

    Examples
    --------
    >>> from manyheads.theory.bigram import plant_lags
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
    rng, level = np.random.default_rng(settings.seed), settings.false_alarm
    earlier, information = als.LagProblem.of(data, settings.strength), information_of(data)
    path = select_lags(data, level / 2).order
    ranked = list(dict.fromkeys([*path, *np.argsort(-information, kind="stable").tolist()]))
    additive = Additive.fit(data, earlier.mean, ranked[: max(len(path), INITIAL)])
    together = select_lags(everything, level / 2)
    alone = together.pvalue
    if targets is not None and alone <= level / 2:
        alone = max(alone, rotated_pvalue(everything, rng))
    chosen, predicted, failure = earlier.without_lags(), 1.0, None
    try:
        matrices = additive.matrices(len(additive.lags))
        chosen = minimize(earlier, matrices, information, settings.iterations, settings.tolerance)
        forecast = Forecast.of(everything, len(data), chosen)
        rate = level if alone > level / 2 else min(4 * level, 0.5)  # where independence is rejected already, fewer do
        predicted = independence_test(forecast, own=targets is None, rate=rate, rng=rng)
    except CertificateError as error:
        failure = error
    pvalue = min(1.0, 2 * min(alone, predicted))
    if pvalue > level:
        raise failure or CertificateError(
            f"no better than unigram: neither predictions of {len(tested)} held-out samples nor single lags of all "
            f"samples differ from chance, lag {together.left} the most; give more samples or other lags: p-value",
            measured=pvalue,
            threshold=level,
        )
    problem = als.LagProblem.of(everything, settings.strength)
    loss = measure_losses(data, tested, *refit(earlier, chosen.attention), additive, len(path))
    if predicted <= level:
        chosen = als.certified(
            als.alternate(problem, chosen.value, settings.iterations, settings.tolerance),
            settings.tolerance,
        )
    else:  # the lags of this fit are guesses
        chosen = problem.without_lags()
    value, attention = refit(problem, chosen.attention)
    table = check_shared_table(everything, value, attention, problem.mean)
    own = None
    if predicted > level or table.rejected(level):
        own, left = _select_own(everything, together, level)
        table = replace(table, left=left.left, left_pvalue=left.left_pvalue)
        warnings.warn(
            f"one transition table for all lags is rejected (lag {table.lag}, p = {table.pvalue:.2g}): the result has "
            "lags with tables of their own (LagFit.own); do not rely on `predict`, which uses the shared one",
            stacklevel=3,
        )
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
        table,
        own,
    )


def _select_own(data: Lagged, together: Selection, level: float) -> tuple[np.ndarray, Selection]:
    """Select lags for every symbol with tables of their own: information in bits, (N, L), and the selection.

    Within the samples of a symbol lag 0 is constant, so that it is tested on all samples, beside the other lags.
    """
    found = select_lags(data, level, data.queries)
    own = np.zeros((data.vocabulary, data.lags))
    own[: len(found.information)] = found.information
    lags = [0] if own.any() else np.arange(data.lags)
    if not own.any() or (0 in together.order and present_pvalue(data, own > 0) <= level):
        own[:, lags] = (
            together.information[0, lags] * (np.bincount(data.queries, minlength=data.vocabulary) > 0)[:, None]
        )
    return own, found if found.order else together


def refit(problem: als.LagProblem, selection: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit W and the chosen weights once more, without penalty: (W, A), A with mean row sum one.

    All of them by turns, and again those that `eliminate` keeps.
    """
    none = np.zeros(len(selection))
    attention, value, _ = als.settle(problem, selection, none, als.ROUNDS // 2)
    kept = eliminate(problem, value, attention)
    if kept.any() and (kept != (attention > 0)).any():
        attention, value, _ = als.settle(problem, np.where(kept, attention, 0.0), none, als.ROUNDS // 2)
    return value, attention


def eliminate(problem: als.LagProblem, value: np.ndarray, attention: np.ndarray) -> np.ndarray:
    """Drop the weight with the least standard score, query by query, until all reach the strength: (N, L) of bools.

    The lasso also chooses lags whose symbols depend on those at the right lags.
    """
    tables = als.tables_of(problem, attention)
    weights = np.take_along_axis(attention, tables.chosen, 1)
    gram, correlation = tables.attention_sums(value, problem.mean)
    noise = problem.norm(value) ** 2 / max(float(problem.frequencies @ (value**2).sum(0)), 1e-300)  # of one sample
    for query in range(len(weights)):
        while len(rows := np.flatnonzero(weights[query])):
            part = gram[query][np.ix_(rows, rows)]
            inverse = np.linalg.inv(part + als.RIDGE_OF_LAGS * np.diag(part).max() * np.eye(len(rows)))
            scores = inverse @ correlation[query, rows] / np.sqrt(noise * np.diag(inverse))
            if scores.min() >= problem.strength:
                break
            weights[query, rows[scores.argmin()]] = 0.0
    return tables.spread(weights, attention.shape[1]) > 0
