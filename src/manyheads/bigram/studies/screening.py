"""`bigram/screening`: the positions are found by counting, at a cost that hardly knows how long the context is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.bigram.screening import chi_square, count_pairs, predict_screening
from manyheads.bigram.setups import SOURCE, scatter
from manyheads.bigram.task import BigramTask, draw_task
from manyheads.bigram.theory.laws import stage_one_samples
from manyheads.bigram.training.proximal_sgd import Diverged, descend, start
from manyheads.bigram.training.settings import FirstStage
from manyheads.errors import UsageError
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Curve, Lines, Listing, Source, Study, Verdict, grid
from manyheads.study.reporting.panels import Panel, spread_curve

GROWTH = 1.12  # of the samples from one look to the next
FIRST = 32  # samples at the first look
MOST = 1_000_000  # samples at which a search gives up
ENTRIES = 1 << 23  # tokens that are drawn at a time
GRADIENT_GROWTH = 4.0  # signal against noise of the gradient training, half of what is safe
PATIENCE = 6.0  # gradient training gives up after so many times what its law promises

Scores = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class ScreeningCost(Study):
    """Chi-square screening finds all positions in a number of samples that grows with the logarithm of the length.

    Attributes
    ----------
    lengths
        Context tokens, rising.
    trained_length
        Contexts up to this length are trained by gradient descent as well.
    vocabulary, sparsity
        Tokens, and positions that each of them looks at.
    searches
        Searches of a replicate, each with positions and samples of its own; their geometric mean is its figure. The
        same search at another length sees the same queries, answers and tokens that count, so that the luck of those
        does not blur the growth.
    task
        Which transition and weights: the number of a draw.
    """

    name: ClassVar[str] = "bigram/screening"
    claim: ClassVar[str] = "counting finds the positions of a sparse contextual bigram in O(log T) samples, not poly(T)"
    source: ClassVar[Source] = replace(
        SOURCE,
        locus="abstract: training from scratch is polynomial in the length; screening and its law are derived here",
    )
    revision: ClassVar[int] = 2

    lengths: tuple[int, ...] = (250, 1000, 4000, 16_000)
    trained_length: int = 1000
    vocabulary: int = 3
    sparsity: int = 2
    searches: int = 16
    task: int = 4

    def __post_init__(self) -> None:
        if len(self.lengths) < 2 or list(self.lengths) != sorted(set(self.lengths)):
            raise UsageError(f"lengths={self.lengths}: give two or more, rising")
        if not self.lengths[0] <= self.trained_length:
            raise UsageError(f"trained_length={self.trained_length}: at least the shortest context, {self.lengths[0]}")

    @classmethod
    def full(cls) -> ScreeningCost:
        """Return the study up to 64,000 tokens, with gradient training up to 4,000."""
        return cls(lengths=(250, 1000, 4000, 16_000, 64_000), trained_length=4000)

    @classmethod
    def small(cls) -> ScreeningCost:
        """Return the smallest configuration in which every claim can change."""
        return cls(lengths=(20, 40), trained_length=20, searches=1)

    def cells(self) -> tuple[Cell, ...]:
        """Return every length."""
        return grid(length=self.lengths)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the samples that screening needs, without a fitted constant, and those of the gradient's law."""
        tasks = [self._task(length, np.random.default_rng(0)) for length in self.lengths]
        law = [stage_one_samples(task, GRADIENT_GROWTH) for task in tasks]
        return xr.Dataset(
            {
                "samples": ("length", [predict_screening(task) for task in tasks], _label("samples of screening")),
                "gradient": ("length", law, _label("samples of gradient training")),
            },
            coords={"length": list(self.lengths)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Draw samples until screening puts all positions first; train by gradient descent where that is affordable."""
        length = int(cell["length"])
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))  # the same at every length
        turns = [turn.spawn(2) for turn in rng.spawn(self.searches)]
        figures = [search(samples, self._task(length, places), _screened)[0] for places, samples in turns]
        samples = float(np.exp(np.log(figures).mean()))
        trained = length <= self.trained_length
        gradient = self._train(self._task(length, rng), int(rng.integers(2**31))) if trained else np.nan
        return xr.Dataset(
            {
                "samples": ((), samples, _label("samples until screening puts all positions first")),
                "gradient": ((), gradient, _label("samples until gradient training puts all positions first")),
            }
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare growth, level and the cost of training."""
        samples = trained["samples"].transpose("replicate", "cell").values  # (replicates, lengths)
        gradient = trained["gradient"].transpose("replicate", "cell").values
        lengths = np.asarray(self.lengths, float)
        fit = fit_exponent(lengths, samples)
        ends = [predict_screening(self._task(length, np.random.default_rng(0))) for length in (250, 64_000)]
        allowed = float(np.log(2.5) / np.log(ends[1] / ends[0]))
        ratio = np.log(samples / predicted["samples"].values).mean(1)
        longest = int(np.flatnonzero(np.isfinite(gradient).all(0))[-1])
        slope = float(np.polyfit(np.log(lengths), np.log(predicted["samples"].values), 1)[0])
        return (
            Verdict.from_interval(
                "the samples of screening grow no faster than the logarithm of the length",
                fit.interval,
                figure=fit.exponent,
                target=slope,
                tolerance=(float("inf"), (allowed - 1) * slope),
                basis=f"the law's slope at these lengths, and {allowed:.2f} times as much above: the law grows by "
                f"{ends[1] / ends[0]:.2f} from 250 to 64,000 tokens, 2.5 is what is allowed",
            ),
            Verdict.from_samples(
                "the samples of screening follow from the task, no constant fitted",
                ratio,
                target=0.0,
                tolerance=2 * np.log(GROWTH),
                resolution=np.log(GROWTH) / 2,
                basis="log of measured over predicted: two looks, each 12% more samples than the one before, for the "
                "non-central law of finite tables and for looking more than once",
            ),
            Verdict.from_samples(
                f"gradient training needs more samples than screening already at {self.lengths[longest]} tokens",
                np.log(gradient[:, longest] / samples[:, longest]),
                target=0.0,
                tolerance=(0.0, float("inf")),
                resolution=np.log(GROWTH) / 2,
                basis="an inequality: the log of the ratio is positive; a training that never succeeded counts with "
                "the samples it had, which favours it",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show samples against length for counting and for gradients."""
        samples = trained["samples"].transpose("replicate", "cell").values
        gradient = trained["gradient"].transpose("replicate", "cell").values
        lengths = np.asarray(self.lengths, float)
        kept = np.flatnonzero(np.isfinite(gradient).all(0))
        known = tuple(lengths.tolist())
        curves = [
            spread_curve(known, samples, "screening", group=0),
            Curve(known, tuple(predicted["samples"].values.tolist()), "its law", "predicted", 0),
            spread_curve(lengths[kept], gradient[:, kept], "gradient training", group=1),
            Curve(known, tuple(predicted["gradient"].values.tolist()), "law of gradient training", "predicted", 1),
        ]
        table = tuple(
            (
                f"{int(length):,}",
                f"{np.median(samples[:, place]):,.0f}",
                f"{float(predicted['samples'][place]):,.0f}",
                f"{np.median(gradient[:, place]):,.0f}" if place in kept else "not run",
                f"{float(predicted['gradient'][place]):,.0f}",
            )
            for place, length in enumerate(lengths)
        )
        return (
            Lines(
                "Samples until all positions are right",
                "context length [tokens]",
                "samples",
                tuple(curves),
                log_x=True,
                log_y=True,
                note="Bands reach over replicates. Dashed: laws; that of screening has no fitted constant, that of "
                "gradient training is for the moment at which its signal is complete, after the positions are clear.",
            ),
            Listing(
                "Medians",
                ("tokens", "screening", "law", "gradient training", "law"),
                table,
                note="Medians over replicates.",
            ),
        )

    def _task(self, length: int, rng: np.random.Generator) -> BigramTask:
        return scatter(draw_task(np.random.default_rng(self.task), self.vocabulary, 64, self.sparsity), length, rng)

    def _stage(self, task: BigramTask) -> FirstStage:
        return FirstStage(task.transition_energy, self.sparsity, batch=16, growth=GRADIENT_GROWTH)

    def _train(self, task: BigramTask, seed: int) -> float:
        """Return the samples until the attention of a training from nothing puts all positions first, with any sign."""
        stage = self._stage(task)
        rate = stage.rate(task.length)
        every = max(1, round(0.1 / rate))
        state, taken = start(task), 0
        while taken * rate < PATIENCE * (np.log(task.length) + 1.3):
            taken += every
            try:
                state = descend(task, state, stage.steps(task.length), every, seed=seed, first_step=taken - every)
            except Diverged:
                break  # counted with what it had, like one that ran out of patience
            if found(task, np.abs(state.attention - 1 / task.length)[None])[0]:
                break
        return float(taken * stage.batch)


def search(rng: np.random.Generator, task: BigramTask, score: Scores) -> np.ndarray:
    """Return, for every score, the samples at which it first puts the right positions of every query first.

    Parameters
    ----------
    rng
        Where the samples come from. Tasks that differ in their lengths and positions alone see the same queries and
        answers under the same generator.
    task
        A task whose tokens are equally frequent.
    score
        Takes the counts of `count_pairs` and returns (R, N, T).

    Returns
    -------
    numpy.ndarray
        (R,): the geometric middle of the last look at which it was wrong and the first at which it is right.
    """
    counts = np.zeros((task.vocabulary, task.length, task.vocabulary, task.vocabulary), np.int32)
    told, rest = rng.spawn(2)
    drawn, before, looks = 0, 0, float(FIRST)
    result: np.ndarray | None = None
    while drawn < MOST:
        answers = draw_answers(told, task, int(looks) - drawn)
        drawn = int(looks)
        size = max(1, ENTRIES // task.length)
        for begin in range(0, len(answers[0]), size):
            queries, own, targets = (part[begin : begin + size] for part in answers)
            counts += count_pairs(draw_around(rest, task, queries, own), queries, targets, task.vocabulary)
        right = found(task, score(counts))
        result = np.full(len(right), np.nan) if result is None else result
        result[np.isnan(result) & right] = (max(before, FIRST / GROWTH) * drawn) ** 0.5
        if not np.isnan(result).any():
            return result
        before, looks = drawn, looks * GROWTH
    raise UsageError(f"{MOST} samples did not show the positions: this task is too hard for the study")


def found(task: BigramTask, scores: np.ndarray) -> np.ndarray:
    """Return whether the positions of every query have its highest scores, for scores (R, N, T): (R,)."""
    places = np.broadcast_to(task.positions, (len(scores), *task.positions.shape))
    weakest = np.take_along_axis(scores, places, 2).min(2)  # (R, N)
    others = scores.copy()
    np.put_along_axis(others, places, -np.inf, 2)
    return (weakest > others.max(2)).all(1)


def draw_even(rng: np.random.Generator, task: BigramTask, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw what `draw_batch` draws when all tokens are equally frequent, ten times as fast."""
    queries, own, targets = draw_answers(rng, task, size)
    return draw_around(rng, task, queries, own), queries, targets


def draw_answers(rng: np.random.Generator, task: BigramTask, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw queries (B,), the tokens at the positions each looks at (B, Q), and answers (B,): nothing of the length."""
    if np.ptp(task.stationary) > 1e-9:
        raise UsageError("the tokens of this task are not equally frequent: use draw_batch")
    queries = rng.integers(0, task.vocabulary, size)
    own = rng.integers(0, task.vocabulary, (size, task.sparsity), dtype=np.uint8)
    chosen = (rng.random((size, 1)) >= np.cumsum(task.weights, 1)[queries, :-1]).sum(1)
    attended = own[np.arange(size), chosen]
    targets = (rng.random((size, 1)) >= np.cumsum(task.transition, 0)[:-1, attended].T).sum(1)
    return queries, own, targets


def draw_around(rng: np.random.Generator, task: BigramTask, queries: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Draw contexts (B, T) around the tokens that the queries look at."""
    tokens = rng.integers(0, task.vocabulary, (len(queries), task.length), dtype=np.uint8)
    np.put_along_axis(tokens, task.positions[queries], own, 1)
    return tokens


def _screened(counts: np.ndarray) -> np.ndarray:
    return chi_square(counts)[0][None]


def _label(name: str) -> dict[str, str]:
    return {"long_name": name, "units": "samples"}
