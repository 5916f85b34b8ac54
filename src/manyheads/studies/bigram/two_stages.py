"""`bigram/two-stages`: the two-stage algorithm `train_bigram` from scratch, beside plain SGD and the signal system.

Plain SGD continues stage one without a penalty; the signal system with noise predicts its growth and escape, and the
minimum after it. The algorithm is trained on samples alone: switch, proximal steps with early stopping, rounding and a
refit, whose excess loss has a closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.study import Cell, Claim, Lines, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.bigram import setups as shared
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems.population import excess
from manyheads.theory.bigram.theorems.sample_complexity import refit_excess, stage_one_samples
from manyheads.theory.bigram.theorems.signal import predict_escape
from manyheads.theory.bigram.training.proximal_sgd import StepSettings, initial_state
from manyheads.theory.bigram.training.record import measure_distances, record
from manyheads.theory.bigram.training.reduced_model import ESCAPED
from manyheads.theory.bigram.training.settings import FirstStage, SecondStage, TrainingSettings, balanced_settings
from manyheads.theory.bigram.training.two_stages import fit_support, train_bigram
from manyheads.theory.papers import REN

RUNS = ("sgd", "algorithm")
RECORDS = 60
LOW, HIGH = 0.05, 0.3  # signals of the attention between which its growth is measured


@dataclass(frozen=True)
class TwoStages(Study):
    """Growth, escape and minimum of plain SGD, and samples, support and excess loss of the two-stage algorithm.

    Attributes
    ----------
    length, vocabulary, sparsity
        T, N and Q of the task.
    batch
        Samples of a step, in both stages.
    noise_ratio
        Noise-to-signal ratio of stage one; it determines the learning rates.
    duration
        Steps of SGD, in units of the predicted samples of stage one.
    ratio
        The penalty in standard deviations of one coordinate of the gradient.
    budget
        Samples of stage two.
    fresh, refits
        Samples of the refit, and refits on independent samples for its mean excess loss.
    weight_seed
        Seed of the weights of the positions; every replicate draws its own transition, positions and samples.
    """

    name: ClassVar[str] = "bigram/two-stages"
    claim: ClassVar[str] = "The two-stage algorithm recovers all positions; the refit error is of order 1/n"
    source: ClassVar = REN
    revision: ClassVar[int] = 4

    length: int = 500
    vocabulary: int = 3
    sparsity: int = 2
    batch: int = 2048
    noise_ratio: float = 0.25
    duration: float = 2.5
    ratio: float = 2.5
    budget: int = 204_800
    fresh: int = 20_000
    refits: int = 32
    weight_seed: int = 0

    def __post_init__(self) -> None:
        if self.duration < 1.5 or not self.ratio > 0 or self.refits < 1:
            raise UsageError(
                f"duration={self.duration}, ratio={self.ratio}, refits={self.refits}: give at least 1.5, a positive "
                "number and one or more"
            )
        if self._steps(self._task()) < RECORDS:
            raise UsageError(
                f"batch={self.batch}, noise_ratio={self.noise_ratio}: stage one has fewer than {RECORDS} steps; "
                "lower either"
            )

    @classmethod
    def full(cls) -> TwoStages:
        """Return the study at 5,000 tokens."""
        return cls(length=5000)

    @classmethod
    def small(cls) -> TwoStages:
        """Return the smallest configuration in which every claim can change."""
        return cls(length=60, batch=128, noise_ratio=0.5, duration=1.5, ratio=1.0, budget=1280, fresh=2000, refits=2)

    def cells(self) -> tuple[Cell, ...]:
        """Return plain SGD and the two-stage algorithm."""
        return grid(run=RUNS)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the typical run of the signal system with noise, its escape, and the excess loss of the refit."""
        task = self._task()
        settings, steps = self._settings(task), self._record_steps(task)
        system = shared.signal_system(task, settings)
        pace = np.log1p(system.growth) / system.growth  # a step multiplies by 1 + eta, a unit of time by e^eta
        path = shared.predict_signals(task, settings, steps * pace, system.typical_init())
        fine = np.linspace(0, steps[-1], 4001)
        dense = shared.predict_signals(task, settings, fine * pace, system.typical_init())
        growth = _crossing(fine, dense.attention_signal, HIGH) - _crossing(fine, dense.attention_signal, LOW)
        checked = self.fresh - self.fresh // 4  # a quarter of the samples finds the positions
        scalars = {
            "escape": (predict_escape(system, ESCAPED), "steps to the plateau escape"),
            "growth": (growth, "steps of growth"),
            "growth_per_step": (system.growth, "growth per step"),
            "stage_one": (stage_one_samples(task, self.noise_ratio), "samples of stage one"),
            "refit": (2 * refit_excess(task, checked) / self._initial(task), "excess loss after the refit"),
        }
        return xr.Dataset(
            {
                "excess": ("progress", shared.excess_with_noise(task, path), shared.EXCESS),
                "value_signal": ("progress", path.value_signal, shared.VALUES),
                "attention_signal": ("progress", path.attention_signal, shared.WEIGHTS),
                **{name: ((), value, _label(text)) for name, (value, text) in scalars.items()},
            },
            coords={"progress": ("progress", steps * self.batch, {"long_name": "samples drawn"})},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train by plain SGD, or by the two-stage algorithm and several refits."""
        task, seed = shared.redraw(self._task(), key), shared.replicate_seed(key)
        steps = self._record_steps(task)
        curves = dict.fromkeys(("excess", "value_signal", "attention_signal"), np.full(len(steps), np.nan))
        found = dict.fromkeys(SCALARS, np.nan)
        if cell["run"] == "sgd":
            seen = record(task, initial_state(task), self._settings(task), int(steps[-1]), RECORDS, seed=seed)
            sizes = np.abs(seen.attention_signal)
            curves = {
                "excess": seen.excess,
                "value_signal": np.abs(seen.value_signal),
                "attention_signal": sizes,
            }
            found["growth"] = _crossing(steps, sizes, HIGH) - _crossing(steps, sizes, LOW)
            found["escape"] = _crossing(steps, seen.value_signal * seen.attention_signal, ESCAPED)
            found["raw"] = float(seen.excess[-1])
        else:
            found |= self._run_algorithm(task, seed)
        dims = {"excess": shared.EXCESS, "value_signal": shared.VALUES, "attention_signal": shared.WEIGHTS}
        return xr.Dataset(
            {name: ("progress", curves[name], label) for name, label in dims.items()}
            | {name: ((), found[name], _label(text)) for name, text in SCALARS.items()},
            coords={"progress": ("progress", steps * self.batch, {"long_name": "samples drawn"})},
        )

    def _run_algorithm(self, task: BigramTask, seed: list[int]) -> dict[str, float]:
        """Train by the algorithm; the mean excess loss is that of several refits of its raw iterate."""
        growth = self._settings(task).value_learning_rate * task.attention_squared_norm
        first = FirstStage(task.transition_squared_norm, self.sparsity, self.batch, self.noise_ratio)
        second = SecondStage(batch=self.batch, growth=growth, ratio=self.ratio, samples=self.budget)
        settings = TrainingSettings(first, second, fresh=self.fresh)
        done = train_bigram(task, settings, seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
        rngs = np.random.default_rng([*seed, 4]).spawn(self.refits)
        refits = [excess(task, *fit_support(task, done.raw, self.sparsity, rng, samples=self.fresh)) for rng in rngs]
        right = [np.array_equal(row, true) for row, true in zip(done.support, task.positions, strict=True)]
        return {
            "switch": done.samples["first"],
            "support": float(np.mean(right)),
            "raw": measure_distances(task, done.raw).excess,
            "refit": 2 * float(np.mean(refits)) / self._initial(task),
            "flipped": float(done.flipped),
        }

    def claims(self) -> tuple[Claim, ...]:
        """Compare SGD with the signal system, and the algorithm with SGD and with closed forms."""

        def of(run: str, name: str) -> Any:
            return lambda trained: trained[name].isel(cell=RUNS.index(run)).values

        def scalar(name: str) -> Any:
            return lambda predicted: float(predicted[name])

        def final_signal(predicted: xr.Dataset) -> float:
            return float(predicted["attention_signal"].isel(progress=-1))

        def measured(run: str, name: str) -> Measure:
            return lambda predicted, trained: of(run, name)(trained)

        return (
            Claim(
                f"Under SGD alpha_A grows from {LOW} to {HIGH} in the number of steps that the signal system predicts",
                measured("sgd", "growth"),
                quantity="time of growth (steps)",
                target=scalar("growth"),
                tolerance=lambda predicted: 0.15 * float(predicted["growth"]),
                basis="15%: finite steps beyond first order, and the distance of the two records around a crossing",
            ),
            Claim(
                "The plateau escape of SGD is at the predicted step (difference in growth times)",
                lambda predicted, trained: (
                    float(predicted["growth_per_step"]) * (of("sgd", "escape")(trained) - float(predicted["escape"]))
                ),
                quantity="delay of the escape (growth times)",
                target=0.0,
                tolerance=1.0,
                basis="one growth time: the logarithm of an initial drift plus normal noise of its size",
            ),
            Claim(
                "After the escape alpha_A drifts along alpha_A alpha_V = 1 as the signal system predicts",
                lambda predicted, trained: trained["attention_signal"].isel(cell=0, progress=-1).values,
                quantity="alpha_A at the end",
                target=final_signal,
                tolerance=lambda predicted: 0.1 * final_signal(predicted),
                basis="a tenth: it grows as the fourth root of the time since the escape, known to one growth time",
            ),
            Claim(
                "The switch of the algorithm is reached before the predicted samples of stage one (ratio)",
                lambda predicted, trained: of("algorithm", "switch")(trained) / float(predicted["stage_one"]),
                quantity="samples to the switch over the bound",
                target=0.5,
                tolerance=(float("inf"), 0.5),
                resolution=10 * self.batch / stage_one_samples(self._task(), self.noise_ratio),
                basis="an inequality, a ratio below one: weights are significant while both signals are small",
            ),
            Claim(
                "The two-stage algorithm recovers all attended positions (share of queries)",
                measured("algorithm", "support"),
                quantity="share of queries with the right positions",
                bounds=(0.0, 1.0),
                target=1.0,
                tolerance=0.5 / self.vocabulary,
                resolution=0.3 / self.vocabulary,
                basis="less than half a query wrong",
            ),
            Claim(
                "The raw iterate of the algorithm has a smaller excess loss than plain SGD (in doublings)",
                lambda predicted, trained: np.log2(of("algorithm", "raw")(trained) / of("sgd", "raw")(trained)),
                quantity="excess loss of the algorithm over that of SGD (log2)",
                target=-1.0,
                tolerance=(float("inf"), 1.0),
                resolution=shared.ROUNDING,
                basis="an inequality between runs on the same task",
            ),
            Claim(
                "The excess loss after the refit is that of least squares at the true positions, of order 1/n (ratio)",
                lambda predicted, trained: of("algorithm", "refit")(trained) / float(predicted["refit"]),
                quantity="excess loss, measured over predicted",
                target=1.0,
                tolerance=0.25,
                basis="a quarter: next order in 1/n, rows that are normalized not fitted under a constraint, and "
                "transitions of replicates that share K_P alone",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show both signals and the loss of SGD over samples."""
        titles = {
            "value_signal": ("Signal of the values", "overlap with the transition", "plateau escape of SGD"),
            "attention_signal": ("Signal of the attention", "overlap with the weights", "Under SGD alpha_A grows"),
            "excess": ("Loss of the raw iterate of SGD", shared.EXCESS_AXIS, ""),
        }
        samples = predicted["progress"].values
        panels: list[Panel] = []
        for name, (title, label, claim) in titles.items():
            # the initial signals are zero, which a logarithmic axis cannot show
            theory = spread_curve(samples[1:], predicted[name].values[1:], "signal system with noise", "predicted", 0)
            rows = trained[name].isel(cell=0).transpose("replicate", "progress").values[:, 1:]
            curves = (theory, spread_curve(samples[1:], rows, "SGD", group=0))
            note = "" if name == "excess" else "Absolute values: a run may reach the sign-flipped solution."
            panels.append(
                Lines(title, "samples drawn", label, curves, log_y=True, note=note, shows=(claim,) if claim else ())
            )
        return tuple(panels)

    def _task(self) -> BigramTask:
        return draw_bigram_task(np.random.default_rng(self.weight_seed), self.vocabulary, self.length, self.sparsity)

    def _settings(self, task: BigramTask) -> StepSettings:
        return balanced_settings(task, self.batch, noise_ratio=self.noise_ratio)

    def _initial(self, task: BigramTask) -> float:
        """Return twice the initial excess loss."""
        return task.transition_squared_norm * task.weight_squared_norm

    def _steps(self, task: BigramTask) -> int:
        return int(self.duration * stage_one_samples(task, self.noise_ratio) / self.batch)

    def _record_steps(self, task: BigramTask) -> np.ndarray:
        return np.arange(RECORDS + 1) * (self._steps(task) // RECORDS)


SCALARS = {
    "growth": "steps of growth",
    "escape": "steps to the plateau escape",
    "raw": "excess loss of the raw iterate",
    "switch": "samples to the switch",
    "support": "share of queries with the right positions",
    "refit": "excess loss after the refit",
    "flipped": "sign-flipped solution",
}


def _label(text: str) -> dict[str, str]:
    return {"long_name": text, "units": "1"}


def _crossing(steps: np.ndarray, rising: np.ndarray, level: float) -> float:
    """Return the steps at which a positive curve first exceeds a level, by geometric interpolation."""
    above = np.flatnonzero(rising >= level)
    if not above.size:
        return float(steps[-1])
    right = max(int(above[0]), 1)
    low, high = np.log(np.maximum(rising[right - 1 : right + 1], 1e-12))
    share = (np.log(level) - low) / (high - low) if high > low else 1.0
    return float(steps[right - 1] + np.clip(share, 0, 1) * (steps[right] - steps[right - 1]))
