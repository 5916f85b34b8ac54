"""`bigram/sparsity`: samples by the number Q of attended positions, from scratch, with pretrained values, by screening.

All positions of a query have equal weight 1/Q. From scratch the samples follow from the squared norm K_Q = 1/Q - 1/T of
the attention; scores and chi-square statistics see one position at a time, whose signal is 1/Q.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.studies.bigram.screening import GROWTH, by_replicate, geometric_mean, search
from manyheads.study import Cell, Claim, Curve, Lines, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.theory.bigram.screening import chi_square, predict_screening
from manyheads.theory.bigram.setups import replicate_seed, signal_system
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems.sample_complexity import STAGE_ONE_OFFSET
from manyheads.theory.bigram.theorems.signal import predict_escape
from manyheads.theory.bigram.training.proximal_sgd import StepSettings
from manyheads.theory.bigram.training.reduced_model import find_escape
from manyheads.theory.bigram.transfer import predict_transfer
from manyheads.theory.papers import REN

NAMES = {
    "escaped": "from scratch: plateau escape",
    "transferred": "pretrained values: positions rank first",
    "screened": "screening: positions rank first",
}
FIRST_GROWTH = 0.05  # growth per step of the training from scratch


@dataclass(frozen=True)
class Sparsity(Study):
    """Samples by the number of attended positions, at one length.

    Attributes
    ----------
    sparsities
        Numbers of positions Q, increasing.
    length, vocabulary
        T and N.
    noise
        Noise-to-signal ratio kappa_2 of the training from scratch.
    runs
        Trainings of a replicate, in the reduced model; the figure is the median of those with the right signs.
    searches
        Searches of a replicate with pretrained values and by screening; the figures are geometric means.
    task
        Seed of the transition.
    """

    name: ClassVar[str] = "bigram/sparsity"
    claim: ClassVar[str] = "Samples grow as Q from scratch, and as Q^2 where positions are scored one by one"
    source: ClassVar = replace(REN, locus="abstract: poly(N, Q) samples; the powers of Q are derived here")

    sparsities: tuple[int, ...] = (1, 2, 4, 8)
    length: int = 1000
    vocabulary: int = 3
    noise: float = 4.0
    runs: int = 100
    searches: int = 8
    task: int = 4

    def __post_init__(self) -> None:
        check_rising("sparsities", self.sparsities)
        if len(self.sparsities) < 2 or self.length < 2 * self.sparsities[-1] + 3:
            raise UsageError(
                f"sparsities={self.sparsities}, length={self.length}: give two numbers or more, and a context of more "
                "than twice the largest"
            )

    @classmethod
    def full(cls) -> Sparsity:
        """Return the study up to sixteen positions of 8,000 tokens."""
        return cls(sparsities=(1, 2, 4, 8, 16), length=8000)

    @classmethod
    def small(cls) -> Sparsity:
        """Return the smallest configuration in which every claim can change."""
        return cls(sparsities=(1, 2), length=30, runs=8, searches=1)

    def cells(self) -> tuple[Cell, ...]:
        """Return every number of positions."""
        return grid(sparsity=self.sparsities)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the predicted samples, none of them with a fitted constant."""
        tasks = [self._task(sparsity, np.random.default_rng(0)) for sparsity in self.sparsities]
        steps = [self._steps(task) for task in tasks]
        escaped = [
            predict_escape(signal_system(task, settings)) * settings.batch
            for task, settings in zip(tasks, steps, strict=True)
        ]
        figures = {
            "escaped": escaped,
            "transferred": [predict_transfer(task, task.centred) for task in tasks],
            "screened": [predict_screening(task) for task in tasks],
        }
        return dataset(
            {name: ("sparsity", figures[name], label, "samples") for name, label in NAMES.items()},
            coords={"sparsity": list(self.sparsities)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train from scratch in the reduced model, and draw samples until both scores rank all positions first."""
        seed, sparsity = replicate_seed(key), int(cell["sparsity"])
        rng = np.random.default_rng([*seed, sparsity])
        task = self._task(sparsity, rng)
        settings = self._steps(task)
        most = int(4 * (np.log(self.length) + STAGE_ONE_OFFSET) / FIRST_GROWTH)
        escape = find_escape(task, settings, self.runs, rng, most_steps=most)
        steps = np.where(escape.outcome == "escaped", escape.steps, most)
        right = steps[~escape.flipped] if not escape.flipped.all() else steps

        def scores(counts: np.ndarray) -> np.ndarray:
            by_values = np.einsum("ktyx,yx->kt", counts, task.centred, optimize=True)
            return np.stack([by_values, chi_square(counts)[0]])

        found = np.array([search(stream, self._task(sparsity, stream), scores) for stream in rng.spawn(self.searches)])
        figures = {
            "escaped": float(np.median(right)) * settings.batch,
            "transferred": geometric_mean(found[:, 0]),
            "screened": geometric_mean(found[:, 1]),
        }
        return dataset({name: ((), figures[name], label, "samples") for name, label in NAMES.items()})

    def claims(self) -> tuple[Claim, ...]:
        """Compare the powers of Q, and the level of the samples of pretrained values."""
        q = np.asarray(self.sparsities, float)
        doublings = float(np.log2(q[-1] / q[0]))

        def power(name: str) -> Any:
            def measured(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                fit = fit_exponent(q, by_replicate(trained, name))
                return fit.exponent, fit.interval

            return measured

        def level(name: str) -> Any:
            return lambda predicted, trained: np.log(by_replicate(trained, name) / predicted[name].values).mean(1)

        def of_power(text: str, name: str, target: float, tolerance: tuple[float, float], basis: str) -> Claim:
            return Claim(text, power(name), quantity="exponent of Q", target=target, tolerance=tolerance, basis=basis)

        half = 0.5 / doublings
        extremes = [np.sqrt(2 * np.log(self.vocabulary * entries)) for entries in (self.length, q[0], q[-1])]
        logarithm = 2 * float(np.log2((extremes[0] + extremes[2]) / (extremes[0] + extremes[1]))) / doublings
        more = (
            f"a factor of 1.4 over {doublings:g} doublings of Q; above, {logarithm:.2f} for the largest of NQ entries"
        )
        return (
            of_power(
                "From scratch the samples of the plateau escape grow no faster than Q, at a fixed noise-to-signal "
                "ratio (exponent)",
                "escaped",
                1.0,
                (float("inf"), 0.0),
                "K_Q is 1/Q - 1/T, and the drift 1/(T K_Q) from which the signals grow is larger for more positions",
            ),
            of_power(
                "With pretrained values of correlation one the samples grow as Q^2 up to logarithms (exponent)",
                "transferred",
                2.0,
                (half, half + logarithm),
                f"a position has the signal 1/Q; {more}",
            ),
            of_power(
                "The samples of screening grow as Q^2 up to logarithms (exponent)",
                "screened",
                2.0,
                (half, half + logarithm),
                f"the statistic of a position has the signal 1/Q^2 and the noise of its root; {more}",
            ),
            *(
                Claim(
                    f"The samples {words} follow from the task at every Q, without a fitted constant (log ratio)",
                    level(name),
                    quantity="samples, measured over predicted (ln)",
                    target=0.0,
                    tolerance=2 * float(np.log(GROWTH)),
                    resolution=float(np.log(GROWTH)) / 2,
                    basis="two evaluations, each with 12% more samples than the previous one",
                )
                for name, words in (
                    ("escaped", "of the plateau escape"),
                    ("transferred", "with pretrained values"),
                )
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show samples by the number of positions."""
        curves: list[Curve] = []
        for group, (name, label) in enumerate(NAMES.items()):
            curves.append(spread_curve(self.sparsities, by_replicate(trained, name), label, group=group))
            curves.append(spread_curve(self.sparsities, predicted[name].values[None], "", "predicted", group))
        return (
            Lines(
                f"Samples by the number of attended positions, {self.length:,} tokens",
                "attended positions Q",
                "samples",
                tuple(curves),
                log_x=True,
                log_y=True,
                note="Bands: replicates. Dashed: predictions without a fitted constant.",
                shows=("From scratch the samples", "With pretrained values of"),
            ),
        )

    def _task(self, sparsity: int, rng: np.random.Generator) -> BigramTask:
        """Return one transition with equal weights at random positions."""
        drawn = draw_bigram_task(np.random.default_rng(self.task), self.vocabulary, self.length, 1)
        positions = [np.sort(rng.choice(self.length, sparsity, replace=False)) for _ in range(self.vocabulary)]
        weights = np.full((self.vocabulary, sparsity), 1 / sparsity)
        return replace(drawn, positions=np.stack(positions), weights=weights)

    def _steps(self, task: BigramTask) -> StepSettings:
        """Return rates and batch of one growth per step and noise-to-signal ratio."""
        transition, attention = task.transition_squared_norm, task.attention_squared_norm
        batch = FIRST_GROWTH * self.length / (self.noise * transition * attention)
        return StepSettings(max(1, round(batch)), FIRST_GROWTH / attention, FIRST_GROWTH / transition)
