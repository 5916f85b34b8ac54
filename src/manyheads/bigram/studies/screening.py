"""`bigram/screening`: samples of chi-square screening and of gradient training by context length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.bigram.screening import chi_square, count_pairs, predict_screening
from manyheads.bigram.setups import SOURCE, redraw_positions, replicate_seed
from manyheads.bigram.task import BigramTask, draw_bigram_task
from manyheads.bigram.theory.sample_complexity import stage_one_samples
from manyheads.bigram.training.proximal_sgd import Diverged, State, descend, initial_state
from manyheads.bigram.training.record import trajectory
from manyheads.bigram.training.settings import FirstStage
from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, grid
from manyheads.study.reporting.panels import Panel, spread_curve

GROWTH = 1.12  # of the samples from one evaluation to the next
FIRST = 32  # samples at the first evaluation
MOST = 1_000_000  # samples of the longest search
ENTRIES = 1 << 23  # tokens drawn at a time
NOISE_RATIO = 4.0  # of the gradient training, half of the safe one
PATIENCE = 6.0  # budget of the gradient training, in multiples of its predicted samples

Scores = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class ScreeningCost(Study):
    """Samples until chi-square screening, or gradient training, ranks all positions first, by context length.

    Attributes
    ----------
    lengths
        Context lengths T, increasing.
    trained_length
        Contexts up to this length are trained by gradient descent as well.
    vocabulary, sparsity
        N and Q of the task.
    searches
        Searches of a replicate, each with its own positions and samples; the figure is their geometric mean. A search
        has the same queries, targets and attended tokens at every length: the comparison is paired.
    task
        Seed of the transition and the weights.
    """

    name: ClassVar[str] = "bigram/screening"
    claim: ClassVar[str] = "Screening finds the positions of a sparse contextual bigram in O(log T) samples"
    source: ClassVar[Source] = replace(
        SOURCE,
        locus="abstract: training from scratch is polynomial in the length; screening and its samples are derived here",
    )
    revision: ClassVar[int] = 2

    lengths: tuple[int, ...] = (250, 1000, 4000, 16_000)
    trained_length: int = 1000
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
        """Return the predicted samples of screening, without a fitted constant, and of gradient training."""
        tasks = [self._task(length, np.random.default_rng(0)) for length in self.lengths]
        trained = [stage_one_samples(task, NOISE_RATIO) for task in tasks]
        return xr.Dataset(
            {
                "samples": ("length", [predict_screening(task) for task in tasks], _label("samples of screening")),
                "gradient": ("length", trained, _label("samples of gradient training")),
            },
            coords={"length": list(self.lengths)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Draw samples until screening ranks all positions first; train by SGD as well at short lengths."""
        length = int(cell["length"])
        rng = np.random.default_rng(replicate_seed(key))  # the same at every length
        streams = [stream.spawn(2) for stream in rng.spawn(self.searches)]
        figures = [search(samples, self._task(length, places), _statistics)[0] for places, samples in streams]
        samples = float(np.exp(np.log(figures).mean()))
        trained = length <= self.trained_length
        gradient = self._train(self._task(length, rng), int(rng.integers(2**31))) if trained else np.nan
        return xr.Dataset(
            {
                "samples": ((), samples, _label("samples until screening ranks all positions first")),
                "gradient": ((), gradient, _label("samples until gradient training ranks all positions first")),
            }
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare growth and level of the samples with the prediction, and with gradient training."""
        lengths = np.asarray(self.lengths, float)
        ends = [predict_screening(self._task(length, np.random.default_rng(0))) for length in (250, 64_000)]
        allowed = float(np.log(2.5) / np.log(ends[1] / ends[0]))
        longest = max(length for length in self.lengths if length <= self.trained_length)

        def growth(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            fit = fit_exponent(lengths, by_replicate(trained, "samples"))
            return fit.exponent, fit.interval

        def slope(predicted: xr.Dataset) -> float:
            return float(np.polyfit(np.log(lengths), np.log(predicted["samples"].values), 1)[0])

        def level(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return np.log(by_replicate(trained, "samples") / predicted["samples"].values).mean(1)

        def ratio(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            place = self.lengths.index(longest)
            return np.log(by_replicate(trained, "gradient")[:, place] / by_replicate(trained, "samples")[:, place])

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
                f"Gradient training needs more samples than screening already at T = {longest} (log ratio)",
                ratio,
                quantity="samples of gradient training over those of screening (ln)",
                target=0.0,
                tolerance=(0.0, float("inf")),
                resolution=float(np.log(GROWTH)) / 2,
                basis="an inequality: the log ratio is positive; an unsuccessful training counts with the samples it "
                "had, which favours it",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show samples against length for screening and for gradient training."""
        samples = by_replicate(trained, "samples")
        gradient = by_replicate(trained, "gradient")
        lengths = np.asarray(self.lengths, float)
        kept = np.flatnonzero(np.isfinite(gradient).all(0))
        known = tuple(lengths.tolist())
        curves = [
            spread_curve(known, samples, "screening", group=0),
            Curve(known, tuple(predicted["samples"].values.tolist()), "predicted", "predicted", 0),
            spread_curve(lengths[kept], gradient[:, kept], "gradient training", group=1),
            Curve(known, tuple(predicted["gradient"].values.tolist()), "gradient training, predicted", "predicted", 1),
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
                note="Bands: replicates. Dashed: predictions; that of gradient training is the plateau escape, "
                "after the positions are ranked first.",
                shows=("grow no faster",),
            ),
            Listing(
                "Medians",
                ("tokens", "screening", "predicted", "gradient training", "predicted"),
                table,
                note="Medians over replicates.",
            ),
        )

    def _task(self, length: int, rng: np.random.Generator) -> BigramTask:
        return redraw_positions(
            draw_bigram_task(np.random.default_rng(self.task), self.vocabulary, 64, self.sparsity), length, rng
        )

    def _stage(self, task: BigramTask) -> FirstStage:
        return FirstStage(task.transition_squared_norm, self.sparsity, batch=16, noise_ratio=NOISE_RATIO)

    def _train(self, task: BigramTask, seed: int) -> float:
        """Return the samples until training from scratch ranks all positions first, with any sign."""
        stage = self._stage(task)
        growth = stage.growth(task.length)
        every = max(1, round(0.1 / growth))
        steps, taken = stage.steps(task.length), every

        def train(state: State, first_step: int) -> State:
            return descend(task, state, steps, every, seed=seed, first_step=first_step)

        try:
            for done, state in trajectory(train, initial_state(task), every):
                over = done * growth >= PATIENCE * (np.log(task.length) + 1.3)
                if done and (over or ranks_first(task, np.abs(state.attention - 1 / task.length)[None])[0]):
                    return float(done * stage.batch)
                taken = done + every
        except Diverged:  # counted with the samples it had, like a run over budget
            pass
        return float(taken * stage.batch)


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
