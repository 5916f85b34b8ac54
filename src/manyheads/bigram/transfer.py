r"""Will a pretrained value matrix help on another task? A test on a small pilot, before anything is trained.

With the value matrix :math:`W` of the old task, centred in both directions, every query and position get the score

.. math:: S_{kt} = \frac1{n_k}\sum_{b:k_b=k} W_{y_b,\,x_{bt}}, \qquad
          \mathbb E\,S_{kt} = w_{kt}\,\langle W,\tilde P\rangle_\mu, \qquad
          \operatorname{Var} S_{kt} \approx \sigma^2/n_k,\quad \sigma^2 = \sum_{ij}\mu_i\mu_j W_{ij}^2,

which is zero at every position that the query does not look at. The first gradient step of a training that starts at
:math:`W` moves the attention along these scores, so they tell what the training will see. Their sum over the positions
of a query is :math:`\langle W,\tilde P\rangle_\mu = \rho\,|W|_\mu|\tilde P|_\mu`, and the samples that put all
positions first are :math:`C/\rho^2`. Transfer from a value matrix of positive correlation is the paper's setting (Ren,
Wang and Lee, NeurIPS 2024, arXiv 2410.23438); the test, its calibration and C are derived here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy import stats

from manyheads._arrays import takes_arrays
from manyheads.bigram.screening import check_samples, count_chunks, find_least_samples
from manyheads.errors import ShapeError, UsageError
from manyheads.statistics import Interval

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from manyheads.bigram.task import Batch, BigramTask

Decision = Literal["helps", "does not", "undecided"]
TRUSTED = 4.5  # deviations that the largest score must stand out by, however few the tests
BLOCKS = 20  # of the second half, for the jackknife
FEWEST = 8  # samples of a block: below, the normal law of its mean is no approximation


@dataclass(frozen=True)
class TransferSettings:
    """How `transfer_test` decides.

    Attributes
    ----------
    energy
        K_P of the new task where it is known; by default it is estimated at the positions that were picked, which only
        means something where they are right: without it the answer is never "does not".
    least
        The smallest correlation that is worth having; what a pilot must be able to see before it says "does not". A
        quarter is where, at four thousand positions, training from scratch costs the same.
    level
        Confidence of the interval and of "does not"; one minus it is the chance of a wrong "helps", over all positions.
    """

    energy: float | None = None
    least: float = 0.25
    level: float = 0.99

    def __post_init__(self) -> None:
        if self.energy is not None and not 0 < self.energy <= 1:
            raise UsageError(f"energy={self.energy}: K_P lies between 0 and 1")
        if not 0 < self.least <= 1 or not 0.5 < self.level < 1:
            raise UsageError(f"least={self.least}, level={self.level}: between 0 and 1, between 1/2 and 1")


DEFAULT = TransferSettings()


@dataclass(frozen=True, eq=False)
class TransferTest:
    r"""What a pilot says of a pretrained value matrix.

    Attributes
    ----------
    decision
        "helps", "does not" or "undecided".
    correlation, interval
        Estimated rho and its confidence interval, from the second half of the pilot at the positions that the first
        half picked. With a given energy, wrong positions pull it towards zero: it is low while the pilot is small.
        Without one, K_P is estimated at these positions. Where that estimate does not exceed its error, K_P is only
        known to be at least :math:`\langle W,\tilde P\rangle_\mu^2/|W|_\mu^2`: the interval reaches to 1, or to -1, and
        `correlation` is NaN if that product may be zero as well.
    strongest, threshold, null_level
        Largest score of all queries and positions in deviations of its noise; what it must pass; and what it is
        expected to reach if nothing depends, the square root of 2 ln(2 N T).
    flip
        Whether the correlation is negative, by the sign of the largest score: start from -W.
    positions
        (N, Q), picked by the first half.
    samples, samples_range
        Predicted samples until the scores put all positions first, C/rho^2, and the same at the ends of the interval;
        for equal weights. `samples` is finite if the decision is "helps"; it is infinite where the correlation is zero
        or NaN, and so is the end of the range where rho may be zero.
    pilot_needed
        Samples of a pilot that sees the smallest correlation worth having with the confidence asked for; NaN without
        the energy where nothing was found.
    """

    decision: Decision
    correlation: float
    interval: Interval
    strongest: float
    threshold: float
    null_level: float
    flip: bool
    positions: np.ndarray
    samples: float
    samples_range: tuple[float, float]
    pilot_needed: float


@takes_arrays
def transfer_test(
    value: ArrayLike, pilot: Batch, sparsity: int, *, settings: TransferSettings = DEFAULT
) -> TransferTest:
    r"""Decide whether a pretrained value matrix helps on the task that a pilot was drawn from.

    *helps* if the largest :math:`|S_{kt}|\sqrt{n_k}/\sigma` passes 4.5 and Bonferroni's threshold for all positions,
    and the correlation has an estimate of the same sign; *does not* if no score passes, though the pilot would have
    shown `settings.least` with the confidence asked for; *undecided* otherwise, and then `pilot_needed` says how large
    a pilot decides.

    Parameters
    ----------
    value
        W, (N, N), answer before token: it is centred here, so V does as well.
    pilot
        Samples of the new task: tokens (B, T), queries (B,), targets (B,).
    sparsity
        Q: positions that a query is thought to look at.
    settings
        Energy of the new task, smallest correlation, confidence.

    Returns
    -------
    TransferTest

    Raises
    ------
    ShapeError, UsageError
        A value matrix that is not square or constant, a pilot that is too small or does not fit it.

    Notes
    -----
    Counting may be cheaper: `screen` needs no pretrained matrix, and where it finds the positions in fewer samples than
    `samples`, the matrix saves nothing.

    Examples
    --------
    >>> from manyheads.bigram import draw_batch, draw_correlated, draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 500, 2)
    >>> old = draw_correlated(np.random.default_rng(1), task, -0.8)
    >>> found = transfer_test(old, draw_batch(np.random.default_rng(2), task, 4000), 2)
    >>> found.decision, found.flip, bool(found.interval.contains(-0.8))
    ('helps', True, True)
    """
    tokens, queries, targets, size = check_samples(*pilot, np.shape(value)[0] if np.ndim(value) else 0)
    _check_pilot(np.asarray(value, float), tokens, queries, size, sparsity)
    law = np.bincount(np.concatenate([tokens[:, :: max(1, tokens.shape[1] // 64)].ravel(), queries]), minlength=size)
    law = law / law.sum()
    answers = np.bincount(targets, minlength=size) / len(targets)
    centred = np.asarray(value, float) - answers @ np.asarray(value, float)
    centred = centred - (centred @ law)[:, None]
    noise = float(answers @ (centred**2) @ law) ** 0.5
    if not noise > 1e-12 * float(np.abs(value).max()):
        raise UsageError("value is constant up to its means: it says nothing of any token")
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
    norm = float(law @ (centred**2).sum(0)) ** 0.5
    correlation, interval, energy = _estimate(centred / norm, seen, targets[half:], (answers, law), settings)
    agrees = correlation * largest > 0  # false for NaN: without an estimate, how much it helps is not known
    tests = 2 * early.size
    threshold = max(TRUSTED, float(stats.norm.isf((1 - settings.level) / tests)))

    step = energy**0.5 * norm / noise / sparsity  # added to a score by one sample of its query, at a correlation of one

    def samples(rho: float) -> float:
        if not abs(rho) * step > 0:
            return float("inf")
        return find_samples(np.tile(law[:, None] ** 0.5 * abs(rho) * step, sparsity), tokens.shape[1])

    ends = sorted((abs(interval.low), abs(interval.high)))
    known = settings.energy is not None or strongest > threshold
    pilot_needed = (
        _pilot_needed(law, settings.least * step, sparsity, threshold, settings.level) if known and step else np.nan
    )
    decision: Decision = "undecided"
    if strongest > threshold:
        decision = "helps" if agrees else "undecided"
    elif settings.energy is not None and len(tokens) >= pilot_needed:
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
        raise ShapeError(f"value of shape {value.shape}: give a finite (N, N) matrix, answer before token")
    if not 1 <= sparsity <= tokens.shape[1]:
        raise UsageError(f"sparsity={sparsity}: between 1 and the {tokens.shape[1]} positions")
    needed = 2 * BLOCKS * FEWEST
    if len(tokens) < needed:
        raise UsageError(
            f"a pilot of {len(tokens)} samples is too small: {needed} are the least that can be split into a half to "
            f"pick positions and {BLOCKS} blocks to judge them, and some thousand are usual"
        )
    half = len(tokens) // 2
    fewest = min(np.bincount(part, minlength=size).min() for part in (queries[:half], queries[half:]))
    if fewest < FEWEST:
        raise UsageError(
            f"one query occurs {fewest} times in half of the pilot: every query needs {FEWEST}; give more samples, or "
            "leave rare queries out"
        )


def transfer_scores(
    value: np.ndarray, tokens: np.ndarray, queries: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores S, (N, T), and the samples of every query, (N,); a query without samples scores zero.

    Examples
    --------
    >>> scores, counts = transfer_scores(np.eye(2), np.array([[0, 1], [1, 1]]), np.array([0, 0]), np.array([1, 1]))
    >>> scores.tolist(), counts.tolist()
    ([[0.5, 1.0], [0.0, 0.0]], [2, 0])
    """
    size = len(value)
    scores, counts = np.zeros((size, tokens.shape[1])), np.bincount(queries, minlength=size)
    for part, table in count_chunks(tokens, queries, targets, size):
        scores[:, part] = np.einsum("ktyx,yx->kt", table, value)
    return scores / np.maximum(counts, 1)[:, None], counts


def _estimate(
    unit: np.ndarray,
    seen: np.ndarray,
    targets: np.ndarray,
    laws: tuple[np.ndarray, np.ndarray],
    settings: TransferSettings,
) -> tuple[float, Interval, float]:
    """Return rho, its interval and the energy, from tables of targets and the tokens at the picked positions."""
    size = len(unit)
    codes = targets[:, None] * size + seen
    tables = np.stack(
        [
            np.bincount(part.ravel(), minlength=size * size).reshape(size, size) / len(part)
            for part in np.array_split(codes, BLOCKS)
        ]
    )  # (blocks, answer, token): sum over the positions of their joint frequencies
    tables = (tables - seen.shape[1] * np.outer(*laws)) / laws[1]  # each estimates P without its mean
    gains = np.einsum("byx,yx,x->b", tables, unit, laws[1])  # <W, P>/|W|
    inner = np.einsum("ayx,byx,x->ab", tables, tables, laws[1])

    def jackknife(figures: np.ndarray) -> float:  # Tukey's error, as half an interval
        error = float((BLOCKS - 1) / BLOCKS * ((figures - figures.mean()) ** 2).sum()) ** 0.5
        return error * float(stats.t.isf((1 - settings.level) / 2, BLOCKS - 1))

    def energy_of(kept: np.ndarray) -> float:  # without its own noise
        part = inner[np.ix_(kept, kept)]
        return settings.energy or float(part.sum() - np.trace(part)) / (len(kept) * (len(kept) - 1))

    def ratio(kept: np.ndarray) -> float:
        return float(gains[kept].mean()) / max(energy_of(kept), 1e-12) ** 0.5

    everything = np.arange(BLOCKS)
    others = [np.delete(everything, block) for block in everything]
    energy, doubt = energy_of(everything), jackknife(np.asarray([energy_of(kept) for kept in others]))
    if energy > doubt:
        figure, half = ratio(everything), jackknife(np.asarray([ratio(kept) for kept in others]))
        return figure, Interval(figure - half, figure + half, settings.level), energy
    gain, half = float(gains.mean()), jackknife(np.asarray([gains[kept].mean() for kept in others]))
    if abs(gain) <= half:  # nothing depends on the picked positions: there is nothing to be correlated with
        return float("nan"), Interval(-1.0, 1.0, settings.level), 0.0
    sign, least, energy = np.sign(gain), abs(gain) - half, max(energy, gain**2)  # Cauchy and Schwarz: K_P >= gain^2
    low, high = sorted((float(sign) * min(1.0, least / (energy + doubt) ** 0.5), float(sign)))
    return gain / energy**0.5, Interval(low, high, settings.level), energy


def _pilot_needed(law: np.ndarray, step: float, sparsity: int, threshold: float, level: float) -> float:
    """Return the samples at which one of the N Q scores passes the threshold with a probability, for equal weights."""

    def missed(samples: float) -> float:
        return float(stats.norm.cdf(threshold - np.sqrt(samples * law) * step).prod() ** sparsity)

    samples = 1.0
    while missed(samples) > 1 - level:
        samples *= 1.02
    return samples


def find_samples(shift: np.ndarray, length: int, probability: float = 0.5) -> float:
    r"""Return the samples at which normal scores put the right positions of every query first, with a probability.

    .. math:: \prod_k\int\prod_m \Pr[Z+\sqrt n\,s_{km} > x]\,\mathrm d\Phi(x)^{T-Q} = \text{probability}

    Parameters
    ----------
    shift
        s, (N, Q): mean of a score in deviations of its noise, for one sample.
    length
        T.
    """

    def exceed(places: np.ndarray, samples: float) -> np.ndarray:
        return np.asarray(stats.norm.sf(places - samples**0.5 * shift[..., None]))

    return find_least_samples(stats.norm.isf, exceed, length - shift.shape[1], probability)


@takes_arrays
def predict_transfer(task: BigramTask, value: np.ndarray, probability: float = 0.5) -> float:
    r"""Return the samples at which the scores of a value matrix put all positions of a task first.

    `find_samples` with :math:`s_{km} = \sqrt{\mu_k}\,w_{km}|\langle W,\tilde P\rangle_\mu|/\sigma`: it is C/rho^2
    with a constant that follows from the task, and nothing in it is fitted. To leading order, at equal frequencies,

    .. math:: C = \frac{(\sqrt{2\ln NT} + \sqrt{2\ln NQ})^2}{K_P\,\min w^2} ,

    logarithmic in T; typical extremes overstate the median, which makes this 1.7 times too large at 500 positions and
    1.4 times at five million. Derived here.

    Parameters
    ----------
    task
        The task to be learned.
    value
        W, (N, N), centred in both directions; its scale and its sign do not matter.
    probability
        With which all positions come first.

    Raises
    ------
    ShapeError, UsageError
        A matrix that is not (N, N), or one without any correlation with the task, which shows no position ever.

    Examples
    --------
    >>> from manyheads.bigram import draw_correlated, draw_task
    >>> task = draw_task(np.random.default_rng(0), 3, 4000, 2)
    >>> old = [draw_correlated(np.random.default_rng(1), task, rho) for rho in (1.0, 0.5)]
    >>> round(predict_transfer(task, old[1]) / predict_transfer(task, old[0]), 1)
    4.0
    """
    if np.shape(value) != task.transition.shape:
        raise ShapeError(f"value of shape {np.shape(value)}: this task needs {task.transition.shape}")
    law = task.stationary
    gain = abs(float(law @ (value * task.centred).sum(0)))
    noise = float(law @ value**2 @ law) ** 0.5
    if not gain > 1e-9 * noise:
        raise UsageError("value has no correlation with the task's transition: no number of samples shows a position")
    return find_samples(np.sqrt(law)[:, None] * task.weights * gain / noise, task.length, probability)
