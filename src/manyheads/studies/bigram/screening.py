"""`bigram/screening`: samples of chi-square screening, of the position ranking and of the plateau escape by length."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.bigram.screening import chi_square, count_pairs, predict_screening
from manyheads.theory.bigram.setups import redraw_positions, replicate_seed, signal_system
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems.position_ranking import predict_position_ranking
from manyheads.theory.bigram.theorems.sample_complexity import STAGE_ONE_OFFSET
from manyheads.theory.bigram.theorems.signal import predict_escape
from manyheads.theory.bigram.training.plateau_escape import sgd_escape
from manyheads.theory.bigram.training.proximal_sgd import Diverged, descend, initial_state
from manyheads.theory.bigram.training.settings import FirstStage
from manyheads.theory.papers import REN

GROWTH = 1.12  # of the samples from one evaluation to the next
FIRST = 32  # samples at the first evaluation
MOST = 1_000_000  # samples of the longest search
ENTRIES = 1 << 23  # tokens drawn at a time
BATCH = 16  # of the gradient training
NOISE_RATIO = 4.0  # of the gradient training, half of the safe one
LONG = 1000  # length from which the signals are small when the positions rank first
PATIENCE = 6.0  # budget of the gradient training, in multiples of its predicted samples

Scores = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class ScreeningCost(Study):
    """Samples until screening, or gradient training, ranks all positions first, and until the loss leaves its plateau.

    Attributes
    ----------
    lengths
        Context lengths T, increasing.
    trained_length
        Contexts up to this length are trained until the plateau escape; those of all lengths until the positions rank
        first.
    vocabulary, sparsity
        N and Q of the task.
    searches
        Searches, and trainings, of a replicate, each with its own positions and samples; the figure is their geometric
        mean. A search has the same queries, targets and attended tokens at every length: the comparison is paired.
    task
        Seed of the transition and the weights.
    """

    name: ClassVar[str] = "bigram/screening"
    claim: ClassVar[str] = "Screening finds the positions of a sparse contextual bigram in O(log T) samples"
    source: ClassVar[Source] = replace(
        REN,
        locus="abstract: training from scratch is polynomial in the length; screening and its samples are derived here",
    )
    revision: ClassVar[int] = 3

    lengths: tuple[int, ...] = (250, 1000, 4000, 16_000)
    trained_length: int = 4000
    vocabulary: int = 3
    sparsity: int = 2
    searches: int = 16
    task: int = 4

    def __post_init__(self) -> None:
        check_rising("lengths", self.lengths)
        if not self.lengths[0] <= self.trained_length:
            raise UsageError(
                f"trained_length={self.trained_length}: give at least the shortest context, {self.lengths[0]}"
            )

    @classmethod
    def full(cls) -> ScreeningCost:
        """Return the study up to 64,000 tokens, and up to 16,000 until the plateau escape."""
        return cls(lengths=(250, 1000, 4000, 16_000, 64_000), trained_length=16_000)

    @classmethod
    def small(cls) -> ScreeningCost:
        """Return the smallest configuration in which every claim can change."""
        return cls(lengths=(20, 40), trained_length=20, searches=1)

    def cells(self) -> tuple[Cell, ...]:
        """Return every length."""
        return grid(length=self.lengths)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the predicted samples of screening, position ranking and plateau escape, without a fit."""
        tasks = [self._task(length, np.random.default_rng(0)) for length in self.lengths]
        rng = np.random.default_rng(self.task)  # so many paths that their error is below the tolerance
        ranked = [geometric_mean(predict_position_ranking(task, NOISE_RATIO, rng, PATIENCE)) for task in tasks]
        escaped = [predict_escape(signal_system(task, self._stage(task).steps(task.length))) * BATCH for task in tasks]
        return xr.Dataset(
            {
                "samples": ("length", [predict_screening(task) for task in tasks], _label("samples of screening")),
                "ranked": ("length", ranked, _label("samples until gradient training ranks all positions first")),
                "escaped": ("length", escaped, _label("samples until the plateau escape")),
            },
            coords={"length": list(self.lengths)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Draw samples until screening ranks all positions first; train by SGD until it does, and until it escapes."""
        length = int(cell["length"])
        rng = np.random.default_rng(replicate_seed(key))  # the same at every length
        streams = [stream.spawn(2) for stream in rng.spawn(self.searches)]
        figures = [search(samples, self._task(length, places), _statistics)[0] for places, samples in streams]
        own = np.random.default_rng([*replicate_seed(key), length])  # trainings of different lengths are independent
        trainings = [(self._task(length, own), int(own.integers(2**31))) for _ in range(self.searches)]
        ranked = [self._train(*training) for training in trainings]
        escaped = self._escape(*trainings[0]) if length <= self.trained_length else np.nan
        return xr.Dataset(
            {
                "samples": ((), geometric_mean(figures), _label("samples until screening ranks all positions first")),
                "ranked": ((), geometric_mean(ranked), _label("samples until gradient training ranks them first")),
                "escaped": ((), escaped, _label("samples until the plateau escape")),
            }
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare growth and level of the samples with the predictions, and gradient training with screening."""
        return (*self._screening_claims(), *self._training_claims())

    def _screening_claims(self) -> tuple[Claim, ...]:
        lengths = np.asarray(self.lengths, float)
        ends = [predict_screening(self._task(length, np.random.default_rng(0))) for length in (250, 64_000)]
        allowed = float(np.log(2.5) / np.log(ends[1] / ends[0]))

        def growth(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            fit = fit_exponent(lengths, by_replicate(trained, "samples"))
            return fit.exponent, fit.interval

        def slope(predicted: xr.Dataset) -> float:
            return float(np.polyfit(np.log(lengths), np.log(predicted["samples"].values), 1)[0])

        def level(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return np.log(by_replicate(trained, "samples") / predicted["samples"].values).mean(1)

        def ratio(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return np.log(by_replicate(trained, "ranked")[:, -1] / by_replicate(trained, "samples")[:, -1])

        return (
            Claim(
                "The samples of screening grow no faster than the logarithm of the length (log-log slope)",
                growth,
                quantity="exponent of T",
                target=slope,
                tolerance=lambda predicted: (float("inf"), (allowed - 1) * slope(predicted)),
                basis=f"the predicted slope at these lengths, and {allowed:.2f} times as much above: the "
                f"prediction grows by {ends[1] / ends[0]:.2f} from 250 to 64,000 tokens, 2.5 is allowed",
            ),
            Claim(
                "The samples of screening follow from the task without a fitted constant (log ratio)",
                level,
                quantity="samples, measured over predicted (ln)",
                target=0.0,
                tolerance=2 * float(np.log(GROWTH)),
                resolution=float(np.log(GROWTH)) / 2,
                basis="two evaluations, each with 12% more samples than the previous one, for the non-central "
                "distribution of finite tables and for repeated evaluation",
            ),
            Claim(
                f"Gradient training needs more samples than screening to rank the positions first, at T = "
                f"{self.lengths[-1]:,} (log ratio)",
                ratio,
                quantity="samples of gradient training over those of screening (ln)",
                target=0.0,
                tolerance=(0.0, float("inf")),
                resolution=float(np.log(GROWTH)) / 2,
                basis="an inequality: the log ratio is positive; an unsuccessful training counts with the samples it "
                "had, which favours it",
            ),
        )

    def _training_claims(self) -> tuple[Claim, ...]:
        lengths = np.asarray(self.lengths, float)
        place = max(place for place, length in enumerate(self.lengths) if length <= self.trained_length)

        long = lengths >= LONG if lengths[-1] >= LONG else lengths > 0

        def level(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return np.log(by_replicate(trained, "ranked") / predicted["ranked"].values)[:, long].mean(1)

        def growth(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            fit = fit_exponent(lengths, by_replicate(trained, "ranked"))
            return fit.exponent, fit.interval

        def wait(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return np.log(by_replicate(trained, "escaped")[:, place] / by_replicate(trained, "ranked")[:, place])

        return (
            Claim(
                f"From {LONG:,} tokens on, gradient training from scratch ranks the positions first after the samples "
                "that the linearized signal system with its noise predicts, without a fitted constant (log ratio)",
                level,
                quantity="samples until the positions rank first, measured over predicted (ln)",
                target=0.0,
                tolerance=2 * float(np.log(GROWTH)),
                resolution=float(np.log(GROWTH)) / 2,
                prediction_error=0.025,
                basis="two evaluations, each with 12% more samples than the previous one, as for screening; the "
                "prediction is a mean over 1600 paths; in shorter contexts the signals are no longer small by then",
            ),
            Claim(
                "The samples until gradient training ranks the positions first grow in proportion to the length "
                "(log-log slope)",
                growth,
                quantity="exponent of T",
                target=1.0,
                tolerance=0.1,
                expected="refuted",
                basis="the exponent of the plateau escape, T ln T, is 1.14 at these lengths; that of sqrt(T ln T) is "
                ".56, and noise of the values lowers it further",
            ),
            Claim(
                f"The loss leaves its plateau only after the positions rank first, at T = {self.lengths[place]:,} "
                "(log ratio of samples)",
                wait,
                quantity="samples until the plateau escape over those until the positions rank first (ln)",
                target=0.0,
                tolerance=(0.0, float("inf")),
                resolution=float(np.log(GROWTH)) / 2,
                basis="an inequality: the log ratio is positive",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show samples against length for screening, for the position ranking and for the plateau escape."""
        lengths = np.asarray(self.lengths, float)
        names = {
            "samples": "screening",
            "ranked": "training: positions rank first",
            "escaped": "training: plateau escape",
        }
        curves: list[Curve] = []
        for group, (name, label) in enumerate(names.items()):
            measured = by_replicate(trained, name)
            kept = np.flatnonzero(np.isfinite(measured).all(0))
            curves.append(spread_curve(lengths[kept], measured[:, kept], label, group=group))
            curves.append(spread_curve(lengths, predicted[name].values[None], "", "predicted", group))
        medians = {name: np.median(by_replicate(trained, name), axis=0) for name in names}
        table = tuple(
            (
                f"{int(length):,}",
                *(
                    f"{figure:,.0f}" if np.isfinite(figure) else "not run"
                    for name in names
                    for figure in (medians[name][place], float(predicted[name][place]))
                ),
            )
            for place, length in enumerate(lengths)
        )
        return (
            Lines(
                "Samples until all positions are right, and until the plateau escape",
                "context length [tokens]",
                "samples",
                tuple(curves),
                log_x=True,
                log_y=True,
                note="Bands: replicates. Dashed: predictions without a fitted constant.",
                shows=("grow no faster", "ranks the positions first after"),
            ),
            Listing(
                "Medians",
                ("tokens", *(word for label in names.values() for word in (label, "predicted"))),
                table,
                note="Medians over replicates.",
            ),
        )

    def _task(self, length: int, rng: np.random.Generator) -> BigramTask:
        return redraw_positions(
            draw_bigram_task(np.random.default_rng(self.task), self.vocabulary, 64, self.sparsity), length, rng
        )

    def _stage(self, task: BigramTask) -> FirstStage:
        return FirstStage(task.transition_squared_norm, self.sparsity, batch=BATCH, noise_ratio=NOISE_RATIO)

    def _most_steps(self, task: BigramTask) -> int:
        return int(PATIENCE * (np.log(task.length) + STAGE_ONE_OFFSET) / self._stage(task).growth(task.length))

    def _train(self, task: BigramTask, seed: int) -> float:
        """Return the samples until training from scratch ranks all positions first, with any sign."""
        steps, state, done = self._stage(task).steps(task.length), initial_state(task), 0
        most = self._most_steps(task)
        with suppress(Diverged):  # counted with the budget, like a run that does not end
            while done < most:
                every = min(most - done, max(1, round((GROWTH - 1) * done)))
                state = descend(task, state, steps, every, seed=seed, first_step=done)
                done += every
                if ranks_first(task, np.abs(state.attention - 1 / task.length)[None])[0]:
                    return float(done * BATCH)
        return float(most * BATCH)

    def _escape(self, task: BigramTask, seed: int) -> float:
        """Return the samples until the plateau escape of the same training, its budget without one."""
        stage, most = self._stage(task), self._most_steps(task)
        every = max(1, round(0.1 / stage.growth(task.length)))
        return min(sgd_escape(task, stage.steps(task.length), every, most, seed=seed)[0], most) * BATCH


def geometric_mean(samples: Any) -> float:
    """Return the geometric mean of numbers of samples."""
    return float(np.exp(np.log(samples).mean()))


def search(rng: np.random.Generator, task: BigramTask, score: Scores) -> np.ndarray:
    """Return, for every score, the samples at which it ranks the right positions of every query first, (R,).

    `score` maps the counts of `count_pairs` to (R, N, T). The result is the geometric mean of the last evaluation
    without and the first with success. Tasks that differ in length and positions alone get the same queries and targets
    from the same generator. Tokens must be equally frequent.
    """
    counts = np.zeros((task.vocabulary, task.length, task.vocabulary, task.vocabulary), np.int32)
    for_answers, for_contexts = rng.spawn(2)
    drawn, before, wanted = 0, 0, float(FIRST)
    result: np.ndarray | None = None
    while drawn < MOST:
        answers = draw_answers(for_answers, task, int(wanted) - drawn)
        drawn = int(wanted)
        size = max(1, ENTRIES // task.length)
        for begin in range(0, len(answers[0]), size):
            queries, own, targets = (part[begin : begin + size] for part in answers)
            counts += count_pairs(fill_contexts(for_contexts, task, queries, own), queries, targets, task.vocabulary)
        right = ranks_first(task, score(counts))
        result = np.full(len(right), np.nan) if result is None else result
        result[np.isnan(result) & right] = (max(before, FIRST / GROWTH) * drawn) ** 0.5
        if not np.isnan(result).any():
            return result
        before, wanted = drawn, wanted * GROWTH
    raise UsageError(f"the positions are not found in {MOST} samples: choose a task with fewer or stronger positions")


def ranks_first(task: BigramTask, scores: np.ndarray) -> np.ndarray:
    """Return whether the positions of every query have its highest scores, for scores (R, N, T): (R,)."""
    places = np.broadcast_to(task.positions, (len(scores), *task.positions.shape))
    weakest = np.take_along_axis(scores, places, 2).min(2)  # (R, N)
    others = scores.copy()
    np.put_along_axis(others, places, -np.inf, 2)
    return (weakest > others.max(2)).all(1)


def draw_uniform_batch(
    rng: np.random.Generator, task: BigramTask, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw samples of a task of equally frequent tokens, ten times as fast as `BigramTask.draw`."""
    queries, own, targets = draw_answers(rng, task, size)
    return fill_contexts(rng, task, queries, own), queries, targets


def draw_answers(rng: np.random.Generator, task: BigramTask, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw queries (B,), their attended tokens (B, Q) and targets (B,), independent of the length."""
    if np.ptp(task.stationary) > 1e-9:
        raise UsageError("the tokens of this task are not equally frequent: use BigramTask.draw")
    queries = rng.integers(0, task.vocabulary, size)
    own = rng.integers(0, task.vocabulary, (size, task.sparsity), dtype=np.uint8)
    chosen = (rng.random((size, 1)) >= np.cumsum(task.weights, 1)[queries, :-1]).sum(1)
    attended = own[np.arange(size), chosen]
    targets = (rng.random((size, 1)) >= np.cumsum(task.transition, 0)[:-1, attended].T).sum(1)
    return queries, own, targets


def fill_contexts(rng: np.random.Generator, task: BigramTask, queries: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Draw contexts (B, T) around the attended tokens."""
    tokens = rng.integers(0, task.vocabulary, (len(queries), task.length), dtype=np.uint8)
    np.put_along_axis(tokens, task.positions[queries], own, 1)
    return tokens


def _statistics(counts: np.ndarray) -> np.ndarray:
    return chi_square(counts)[0][None]


def _label(name: str) -> dict[str, str]:
    return {"long_name": name, "units": "samples"}


def by_replicate(trained: xr.Dataset, name: str) -> np.ndarray:
    """Return a variable as (replicates, cells, ...)."""
    return trained[name].transpose("replicate", "cell", ...).values
