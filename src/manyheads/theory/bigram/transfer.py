r"""Transfer test: does a pretrained value matrix help on another task? Decided on a small pilot before training.

With the value matrix :math:`W` of the old task, centred in both directions, every query and position get the score

.. math:: S_{kt} = \frac1{n_k}\sum_{b:k_b=k} W_{y_b,\,x_{bt}}, \qquad
          \mathbb E\,S_{kt} = w_{kt}\,\langle W,\tilde P\rangle_\mu, \qquad
          \operatorname{Var} S_{kt} \approx \sigma^2/n_k,\quad \sigma^2 = \sum_{ij}\mu_i\mu_j W_{ij}^2,

which is zero except at the attended positions. The first gradient step of a training initialized with :math:`W` moves
the attention along these scores. Their sum over the positions
of a query is :math:`\langle W,\tilde P\rangle_\mu = \rho\,|W|_\mu|\tilde P|_\mu`, and the samples that rank all
positions first are :math:`C/\rho^2`. Transfer from a value matrix of positive correlation is the paper's setting (Ren,
Wang and Lee, NeurIPS 2024, arXiv 2410.23438); the test, its calibration and C are derived here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from manyheads._arrays import takes_arrays
from manyheads._constraints import Constrained, Constraint, constrained
from manyheads._extras import Figure, Float, Int
from manyheads._overview import Overview, Shown
from manyheads.errors import ShapeError, UsageError
from manyheads.statistics import Interval
from manyheads.theory.bigram.screening import check_samples, count_chunks, find_least_samples
from manyheads.theory.bigram.task import Batch, BigramTask

Decision = Literal["helps", "does not", "undecided"]
VERBS = {"helps": "helps", "does not": "does not help", "undecided": "helps or not is undecided"}
SIGNIFICANT = 4.5  # standard deviations that the largest score must reach, however few the tests
BLOCKS = 20  # of the second half, for the jackknife
FEWEST = 8  # samples of a block: below, its mean is not approximately normal


@dataclass(frozen=True)
class TransferSettings(Constrained):
    """Decision rule of `transfer_test`.

    Attributes
    ----------
    squared_norm
        K_P of the new task if known; by default it is estimated at the picked positions, and the answer is never "does
        not", because the estimate is meaningless where these positions are wrong.
    least
        The smallest useful correlation: a pilot must be able to detect it before the answer is "does not". At a quarter
        and four thousand positions training from scratch costs the same.
    level
        Confidence of the interval and of "does not"; one minus it is the probability of a wrong "helps", over all
        positions.
    """

    squared_norm: float | None = constrained(None, Constraint(above=0, most=1))
    least: float = constrained(0.25, Constraint(above=0, most=1))
    level: float = constrained(0.99, Constraint(above=0.5, below=1))


DEFAULT = TransferSettings()


@dataclass(frozen=True, eq=False, repr=False)
class TransferTest(Shown):
    r"""Result of `transfer_test`.

    Attributes
    ----------
    decision
        "helps", "does not" or "undecided".
    correlation, interval
        Estimated rho and its confidence interval, from the second half of the pilot at the positions that the first
        half picked. With a given squared norm, wrong positions bias it towards zero while the pilot is small. Without
        one, K_P is estimated at these positions; where that estimate does not exceed its error, only
        :math:`K_P\ge\langle W,\tilde P\rangle_\mu^2/|W|_\mu^2` is known: the interval extends to 1, or to -1, and
        `correlation` is NaN if that product may be zero as well.
    strongest, threshold, null_level
        Largest score of all queries and positions in standard deviations; its threshold; and its expected size under
        independence, the square root of 2 ln(2 N T).
    flip
        Whether the correlation is negative, by the sign of the largest score: initialize with -W.
    positions
        (N, Q), picked by the first half.
    samples, samples_range
        Predicted samples until the scores rank all positions first, C/rho^2, and the same at the ends of the interval;
        for equal weights. `samples` is finite if the decision is "helps"; it is infinite where the correlation is zero
        or NaN, as is the end of the range where rho may be zero.
    pilot_needed
        Samples of a pilot that detects the smallest useful correlation with the required confidence; NaN without the
        squared norm if no score is significant.
    """

    decision: Decision
    correlation: float
    interval: Interval
    strongest: float
    threshold: float
    null_level: float
    flip: bool
    positions: Int[np.ndarray, "query attended"]
    samples: float
    samples_range: tuple[float, float]
    pilot_needed: float

    def plot(self) -> Figure:
        """Draw the correlation with its interval, over the correlations of the sign of the largest score."""
        from manyheads.study.reporting.charts import Estimate, draw_intervals

        sign = (-1.0, 0.0) if self.flip else (0.0, 1.0)
        row = Estimate("", self.correlation, (self.interval.low, self.interval.high), sign)
        return draw_intervals(self._overview().title, "correlation with the new task's transition", [row])

    def _overview(self) -> Overview:
        columns = ("correlation", "low", "high", "strongest", "threshold", "flip", "samples", "pilot_needed")
        figures = (self.strongest, self.threshold, self.flip, self.samples, self.pilot_needed)
        row = (self.correlation, self.interval.low, self.interval.high, *figures)
        return Overview(f"Transfer test: the value matrix {VERBS[self.decision]}", columns, [row])


@takes_arrays
def transfer_test(
    value: Float[ArrayLike, "token token"], pilot: Batch, sparsity: int, *, settings: TransferSettings = DEFAULT
) -> TransferTest:
    r"""Decide whether a pretrained value matrix helps on the task of a pilot.

    *helps* if the largest :math:`|S_{kt}|\sqrt{n_k}/\sigma` exceeds 4.5 and Bonferroni's threshold for all positions,
    and the estimated correlation has the same sign; *does not* if no score does, although the pilot would detect
    `settings.least` with the required confidence; *undecided* otherwise, with the size of a deciding pilot in
    `pilot_needed`.

    Parameters
    ----------
    value
        W, (N, N), target before token. It is centred here, so V may be given as well.
    pilot
        Samples of the new task: tokens (B, T), queries (B,), targets (B,).
    sparsity
        Q: assumed number of attended positions of a query.
    settings
        Squared norm of the new task, smallest correlation, confidence.

    Returns
    -------
    TransferTest

    Raises
    ------
    ShapeError, UsageError
        A value matrix that is not square or constant, a pilot that is too small or does not fit it.

    Notes
    -----
    `screen` needs no pretrained matrix: where it finds the positions in fewer samples than `samples`, the matrix saves
    nothing.

    Examples
    --------
    >>> from manyheads.theory.bigram import draw_bigram_task
    >>> from manyheads.theory.bigram.task import draw_correlated
    >>> task = draw_bigram_task(np.random.default_rng(0), 3, 500, 2)
    >>> old = draw_correlated(np.random.default_rng(1), task, -0.8)
    >>> found = transfer_test(old, task.draw(np.random.default_rng(2), 4000), 2)
    >>> found.decision, found.flip, bool(found.interval.contains(-0.8))
    ('helps', True, True)
    """
    tokens, queries, targets, size = check_samples(*pilot, np.shape(value)[0] if np.ndim(value) else 0)
    _check_pilot(np.asarray(value, float), tokens, queries, size, sparsity)
    mu = np.bincount(np.concatenate([tokens[:, :: max(1, tokens.shape[1] // 64)].ravel(), queries]), minlength=size)
    mu = mu / mu.sum()
    outcomes = np.bincount(targets, minlength=size) / len(targets)
    centred = np.asarray(value, float) - outcomes @ np.asarray(value, float)
    centred = centred - (centred @ mu)[:, None]
    noise = float(outcomes @ (centred**2) @ mu) ** 0.5
    if not noise > 1e-12 * float(np.abs(value).max()):
        raise UsageError("value is constant up to its means and carries no information on tokens: give another matrix")
    half = len(tokens) // 2
    early, early_counts = transfer_scores(centred, tokens[:half], queries[:half], targets[:half])
    late, late_counts = transfer_scores(centred, tokens[half:], queries[half:], targets[half:])
    counts = early_counts + late_counts
    whole = (early * early_counts[:, None] + late * late_counts[:, None]) / np.sqrt(counts)[:, None] / noise  # (N, T)
    strongest = float(np.abs(whole).max())
    first = early * np.sqrt(early_counts)[:, None]
    sign = float(np.sign(first.flat[np.abs(first).argmax()])) or 1.0
    largest = float(np.sign(whole.flat[np.abs(whole).argmax()]))
    positions = np.sort(np.argpartition(-sign * early, sparsity - 1, axis=1)[:, :sparsity], axis=1)
    seen = tokens[half:][np.arange(len(tokens) - half)[:, None], positions[queries[half:]]]  # (B/2, Q)
    norm = float(mu @ (centred**2).sum(0)) ** 0.5
    correlation, interval, squared_norm = _estimate(centred / norm, seen, targets[half:], (outcomes, mu), settings)
    agrees = correlation * largest > 0  # false for NaN: without an estimate the gain is unknown
    tests = 2 * early.size
    threshold = max(SIGNIFICANT, float(stats.norm.isf((1 - settings.level) / tests)))
    # Added to a score by one sample of its query, at a correlation of one.
    step = squared_norm**0.5 * norm / noise / sparsity

    def samples(rho: float) -> float:
        if not abs(rho) * step > 0:
            return float("inf")
        return find_samples(np.tile(mu[:, None] ** 0.5 * abs(rho) * step, sparsity), tokens.shape[1])

    ends = sorted((abs(interval.low), abs(interval.high)))
    pilot_needed = np.nan
    if step and (settings.squared_norm is not None or strongest > threshold):
        pilot_needed = _pilot_needed(mu, settings.least * step, sparsity, threshold, settings.level)
    decision: Decision = "undecided"
    if strongest > threshold:
        decision = "helps" if agrees else "undecided"
    elif settings.squared_norm is not None and len(tokens) >= pilot_needed:
        decision = "does not"
    return TransferTest(
        decision,
        correlation,
        interval,
        strongest,
        threshold,
        (2 * np.log(tests)) ** 0.5,
        largest < 0,
        positions,
        samples(correlation),
        (samples(ends[1]), float("inf") if interval.contains(0.0) else samples(ends[0])),
        pilot_needed,
    )


def _check_pilot(value: np.ndarray, tokens: np.ndarray, queries: np.ndarray, size: int, sparsity: int) -> None:
    if value.shape != (size, size) or not np.isfinite(value).all():
        raise ShapeError(f"value of shape {value.shape}: give a finite (N, N) matrix, target before token")
    if not 1 <= sparsity <= tokens.shape[1]:
        raise UsageError(f"sparsity={sparsity}: between 1 and the {tokens.shape[1]} positions")
    needed = 2 * BLOCKS * FEWEST
    if len(tokens) < needed:
        raise UsageError(
            f"a pilot of {len(tokens)} samples is too small: {needed} are the least, a half to pick positions and "
            f"{BLOCKS} blocks to estimate the correlation; some thousand are usual"
        )
    half = len(tokens) // 2
    fewest = min(np.bincount(part, minlength=size).min() for part in (queries[:half], queries[half:]))
    if fewest < FEWEST:
        raise UsageError(
            f"one query occurs {fewest} times in half of the pilot: every query needs {FEWEST}; give more samples, or "
            "drop rare queries"
        )


def transfer_scores(
    value: np.ndarray, tokens: np.ndarray, queries: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores S, (N, T), and the samples of every query, (N,); a query without samples scores zero."""
    size = len(value)
    scores, counts = np.zeros((size, tokens.shape[1])), np.bincount(queries, minlength=size)
    for part, table in count_chunks(tokens, queries, targets, size):
        scores[:, part] = np.einsum("ktyx,yx->kt", table, value)
    return scores / np.maximum(counts, 1)[:, None], counts


def _estimate(
    unit: np.ndarray,
    seen: np.ndarray,
    targets: np.ndarray,
    marginals: tuple[np.ndarray, np.ndarray],
    settings: TransferSettings,
) -> tuple[float, Interval, float]:
    """Return rho, its interval and K_P, from tables of targets and the tokens at the picked positions."""
    size = len(unit)
    codes = targets[:, None] * size + seen
    counted = [np.bincount(part.ravel(), minlength=size**2) / len(part) for part in np.array_split(codes, BLOCKS)]
    tables = np.stack(counted).reshape(-1, size, size)  # (blocks, target, token): summed over the positions
    tables = (tables - seen.shape[1] * np.outer(*marginals)) / marginals[1]  # each estimates P without its mean
    gains = np.einsum("byx,yx,x->b", tables, unit, marginals[1])  # <W, P>/|W|
    inner = np.einsum("ayx,byx,x->ab", tables, tables, marginals[1])

    def jackknife(figures: np.ndarray) -> float:  # Tukey's error, as half an interval
        error = float((BLOCKS - 1) / BLOCKS * ((figures - figures.mean()) ** 2).sum()) ** 0.5
        return error * float(stats.t.isf((1 - settings.level) / 2, BLOCKS - 1))

    def norm_of(kept: np.ndarray) -> float:  # without its own noise
        part = inner[np.ix_(kept, kept)]
        return settings.squared_norm or float(part.sum() - np.trace(part)) / (len(kept) * (len(kept) - 1))

    def ratio(kept: np.ndarray) -> float:
        return float(gains[kept].mean()) / max(norm_of(kept), 1e-12) ** 0.5

    everything = np.arange(BLOCKS)
    others = [np.delete(everything, block) for block in everything]
    squared_norm, doubt = norm_of(everything), jackknife(np.asarray([norm_of(kept) for kept in others]))
    if squared_norm > doubt:
        figure, half = ratio(everything), jackknife(np.asarray([ratio(kept) for kept in others]))
        return figure, Interval(figure - half, figure + half, settings.level), squared_norm
    gain, half = float(gains.mean()), jackknife(np.asarray([gains[kept].mean() for kept in others]))
    if abs(gain) <= half:  # no dependence at the picked positions: the correlation is undefined
        return float("nan"), Interval(-1.0, 1.0, settings.level), 0.0
    sign, squared_norm = float(np.sign(gain)), max(squared_norm, gain**2)  # Cauchy and Schwarz: K_P >= gain^2
    low, high = sorted((sign * min(1.0, (abs(gain) - half) / (squared_norm + doubt) ** 0.5), sign))
    return gain / squared_norm**0.5, Interval(low, high, settings.level), squared_norm


def _pilot_needed(mu: np.ndarray, step: float, sparsity: int, threshold: float, level: float) -> float:
    """Return the samples at which one of the N Q scores passes the threshold with a probability, for equal weights."""

    def missed(samples: float) -> float:
        return float(stats.norm.cdf(threshold - np.sqrt(samples * mu) * step).prod() ** sparsity)

    samples = 1.0
    while missed(samples) > 1 - level:
        samples *= 1.02
    return samples


def find_samples(shift: np.ndarray, length: int, probability: float = 0.5) -> float:
    r"""Return the samples at which normal scores rank the right positions of every query first, with a probability.

    .. math:: \prod_k\int\prod_m \Pr[Z+\sqrt n\,s_{km} > x]\,\mathrm d\Phi(x)^{T-Q} = \text{probability}

    with the mean s, (N, Q), of a score in standard deviations, for one sample.
    """

    def exceed(places: np.ndarray, samples: float) -> np.ndarray:
        return np.asarray(stats.norm.sf(places - samples**0.5 * shift[..., None]))

    return find_least_samples(stats.norm.isf, exceed, length - shift.shape[1], probability)


@takes_arrays
def predict_transfer(task: BigramTask, value: Float[ArrayLike, "token token"], probability: float = 0.5) -> float:
    r"""Return the samples at which the scores of a value matrix rank all positions of a task first.

    `find_samples` with :math:`s_{km} = \sqrt{\mu_k}\,w_{km}|\langle W,\tilde P\rangle_\mu|/\sigma`: it is C/rho^2
    with a constant that follows from the task. To leading order, at equal frequencies,

    .. math:: C = \frac{(\sqrt{2\ln NT} + \sqrt{2\ln NQ})^2}{K_P\,\min w^2} ,

    logarithmic in T; typical extremes overstate the median, which makes this 1.7 times too large at 500 positions and
    1.4 times at five million. Derived here. The value matrix W, (N, N), is centred in both directions; its scale and
    its sign do not matter. `probability` is that all positions come first.

    Raises `ShapeError` or `UsageError`: a matrix that is not (N, N) or not correlated with the task.

    Examples
    --------
    >>> from manyheads.theory.bigram import draw_bigram_task
    >>> from manyheads.theory.bigram.task import draw_correlated
    >>> task = draw_bigram_task(np.random.default_rng(0), 3, 4000, 2)
    >>> old = [draw_correlated(np.random.default_rng(1), task, rho) for rho in (1.0, 0.5)]
    >>> round(predict_transfer(task, old[1]) / predict_transfer(task, old[0]), 1)
    4.0
    """
    if np.shape(value) != task.transition.shape:
        raise ShapeError(f"value of shape {np.shape(value)}: this task needs {task.transition.shape}")
    mu, matrix = task.stationary, np.asarray(value)
    gain = abs(float(mu @ (matrix * task.centred).sum(0)))
    noise = float(mu @ matrix**2 @ mu) ** 0.5
    if not gain > 1e-9 * noise:
        raise UsageError(
            "value is not correlated with the task's transition, so no number of samples suffices: give another matrix"
        )
    return find_samples(np.sqrt(mu)[:, None] * task.weights * gain / noise, task.length, probability)
