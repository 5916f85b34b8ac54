"""`bigram/two-stages`: both stages of the algorithm beside the signal system, from nothing to all positions found.

One run goes on without penalty to the end; the other, with the same samples, takes a penalty when an entry of every row
stands out of the noise. The signal system with its noise says what the first does: growth, valley, drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.bigram import setups as shared
from manyheads.bigram.task import BigramTask, draw_task
from manyheads.bigram.theory.laws import balanced_settings, stage_one_samples
from manyheads.bigram.theory.population import excess, measure_overlaps
from manyheads.bigram.theory.signal import predict_boost
from manyheads.bigram.training.proximal_sgd import State, StepSettings, descend, observe, start
from manyheads.bigram.training.record import measure_distances
from manyheads.bigram.training.settings import SWITCH
from manyheads.bigram.training.two_stages import estimate_noise, is_mirrored, measure_salience, mirror
from manyheads.errors import UsageError
from manyheads.study import Cell, Lines, Study, Verdict, grid
from manyheads.study.reporting.panels import Panel, spread_curve

RUNS = {"plain": "no penalty", "two-stages": "penalty after the switch"}
LOOKS = 60
BOOSTED = 0.3  # product of both signals
LOW, HIGH = 0.05, 0.3  # of the attention's signal, between which growth is measured


@dataclass(frozen=True)
class TwoStages(Study):
    """Signals grow, the switch fires on what is seen, and the second stage removes the noise.

    Attributes
    ----------
    length, vocabulary, sparsity
        T, N and Q of the task.
    batch
        Samples of a step, in both stages.
    noise_ratio
        Noise against signal of stage one; it fixes the rates.
    duration
        Steps, in units of the time of the boost.
    ratio
        The penalty in standard deviations of one coordinate of the gradient.
    weight_seed
        Which weights the positions have; every replicate draws its own transition, positions and samples.
    """

    name: ClassVar[str] = "bigram/two-stages"
    claim: ClassVar[str] = "signals grow as the reduced system says; a visible switch; then a penalty removes the noise"
    source: ClassVar = shared.SOURCE

    length: int = 500
    vocabulary: int = 3
    sparsity: int = 2
    batch: int = 2048
    noise_ratio: float = 0.25
    duration: float = 2.5
    ratio: float = 2.5
    weight_seed: int = 0

    def __post_init__(self) -> None:
        if self.duration < 1.5 or not self.ratio > 0:
            raise UsageError(f"duration={self.duration}, ratio={self.ratio}: at least 1.5, and positive")
        if self._steps(self._task()) < LOOKS:
            raise UsageError(
                f"batch={self.batch}, noise_ratio={self.noise_ratio}: stage one takes fewer than {LOOKS} steps; "
                "lower either"
            )

    @classmethod
    def full(cls) -> TwoStages:
        """Return the study at 5,000 tokens."""
        return cls(length=5000)

    @classmethod
    def small(cls) -> TwoStages:
        """Return the smallest configuration in which every claim can change."""
        return cls(length=60, batch=8, noise_ratio=2.0, duration=1.5)

    def cells(self) -> tuple[Cell, ...]:
        """Return the run without and the run with a second stage."""
        return grid(run=tuple(RUNS))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the typical run of the signal system with its noise, and its boost."""
        task = self._task()
        settings, looks = self._settings(task), self._looks(task)
        system = shared.signal_system(task, settings)
        pace = np.log1p(system.growth) / system.growth  # a step multiplies by 1 + eta, a unit of time by e^eta
        path = shared.predict_signals(task, settings, looks * pace, system.typical_start())
        fine = np.linspace(0, looks[-1], 4001)
        dense = shared.predict_signals(task, settings, fine * pace, system.typical_start())
        law = stage_one_samples(task, self.noise_ratio)
        growth = _crossing(fine, dense.attention_signal, HIGH) - _crossing(fine, dense.attention_signal, LOW)
        samples = looks * self.batch
        return xr.Dataset(
            {
                "excess": ("progress", shared.dressed_excess(task, path), shared.EXCESS),
                "value_signal": ("progress", path.value_signal, VALUES),
                "attention_signal": ("progress", path.attention_signal, WEIGHTS),
                "boost": ((), predict_boost(system, BOOSTED), {"long_name": "steps to the boost", "units": "1"}),
                "growth": ((), growth, {"long_name": "steps of growth", "units": "1"}),
                "rate": ((), system.growth, {"long_name": "growth per step", "units": "1"}),
                "law": ((), law, {"long_name": "samples of stage one", "units": "1"}),
            },
            coords={"progress": ("progress", samples, {"long_name": "samples drawn"})},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Run look by look; turn the mirror at the switch, whether a penalty follows or not."""
        task, seed = shared.redraw(self._task(), key), shared.seed_of(key)
        plain, looks = self._settings(task), self._looks(task)
        every, zero = int(looks[1]), excess(task, *start(task))
        state, rows, switched, right = start(task), [], 0, 0.0
        for look in looks:
            if look:
                settings = plain
                if switched and cell["run"] == "two-stages":
                    settings = self._with_penalty(task, state, plain, seed, int(look) - every)
                state = descend(task, state, settings, every, seed=seed, first_step=int(look) - every)
            if not switched and look:
                mirrored, (high, low) = is_mirrored(state.attention), measure_salience(state.attention)
                if (low if mirrored else high).min() > SWITCH:
                    state = mirror(state) if mirrored else state
                    switched, right = int(look), measure_distances(task, state).support
            found = measure_overlaps(task, state.value, state.attention)
            loss = excess(task, state.value, state.attention) / zero
            rows.append((loss, found.value_signal, found.attention_signal))
        losses, values, weights = np.array(rows).T
        sizes = np.abs(weights)
        growth = _crossing(looks, sizes, HIGH) - _crossing(looks, sizes, LOW)
        return xr.Dataset(
            {
                "excess": ("progress", losses, shared.EXCESS),
                "value_signal": ("progress", np.abs(values), VALUES),
                "attention_signal": ("progress", sizes, WEIGHTS),
                "boost": ((), _crossing(looks, values * weights, BOOSTED), {"long_name": "boost", "units": "1"}),
                "growth": ((), growth, {"long_name": "steps of growth", "units": "1"}),
                # a run in which it never fires has the whole budget, which is above the law's samples
                "switch": (
                    (),
                    (switched or int(looks[-1])) * self.batch,
                    {"long_name": "samples to the switch", "units": "1"},
                ),
                "at_switch": ((), right, shared.SUPPORT),
                "support": ((), measure_distances(task, state).support, shared.SUPPORT),
            },
            coords={"progress": ("progress", looks * self.batch, {"long_name": "samples drawn"})},
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare growth, boost and valley with the system, and both runs with each other."""
        plain, both = (trained.isel(cell=trained["run"].values.tolist().index(run)) for run in RUNS)
        rate = float(predicted["rate"])
        last = plain["attention_signal"].isel(progress=-1).values
        losses = both["excess"].isel(progress=-1).values / plain["excess"].isel(progress=-1).values
        return (
            Verdict.from_samples(
                f"the attention's signal grows from {LOW} to {HIGH} in the steps that the signal system says",
                plain["growth"].values,
                target=float(predicted["growth"]),
                tolerance=0.15 * float(predicted["growth"]),
                basis="15%: finite steps beyond the first order, and the two looks between which a crossing lies",
            ),
            Verdict.from_samples(
                "the boost comes when the system with its early kicks says, in units of the growth time",
                rate * (plain["boost"].values - float(predicted["boost"])),
                target=0.0,
                tolerance=1.0,
                basis="one growth time: the logarithm of a start that is a drift and a normal kick of its size",
            ),
            Verdict.from_samples(
                "after the boost the attention's signal is where the noise has pushed it along the valley",
                last,
                target=float(predicted["attention_signal"].isel(progress=-1)),
                tolerance=0.1 * float(predicted["attention_signal"].isel(progress=-1)),
                basis="a tenth: it goes like the fourth root of the time since the boost, known to one growth time",
            ),
            Verdict.from_samples(
                "the switch fires before the law's samples for the full boost are spent",
                both["switch"].values / float(predicted["law"]),
                target=0.5,
                tolerance=(float("inf"), 0.5),
                basis="an inequality, a share below one: it is seen while both signals are small",
            ),
            Verdict.from_samples(
                "at the end of stage two all positions are right",
                both["support"].values,
                target=1.0,
                tolerance=0.5 / self.vocabulary,
                resolution=0.3 / self.vocabulary,
                basis="less than half a query wrong",
            ),
            Verdict.from_samples(
                "the raw loss at the end is smaller with the penalty than without, in doublings",
                np.log2(losses),
                target=-1.0,
                tolerance=(float("inf"), 1.0),
                resolution=1e-6,
                basis="an inequality between paired runs",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show both signals and the loss over samples."""
        panels: list[Panel] = []
        titles = {
            "value_signal": ("Signal of the values", "overlap with the transition"),
            "attention_signal": ("Signal of the attention", "overlap with the weights"),
            "excess": ("Loss of the raw iterate", "excess loss, of that at the start"),
        }
        samples = predicted["progress"].values
        for name, (title, label) in titles.items():
            # at the start the signals are zero, which no logarithmic axis has
            curves = [spread_curve(samples[1:], predicted[name].values[1:], "signal system with noise", "predicted", 0)]
            for group, (run, legend) in enumerate(RUNS.items()):
                rows = trained.isel(cell=trained["run"].values.tolist().index(run))[name].values[:, 1:]
                curves.append(spread_curve(samples[1:], rows, legend, group=group))
            note = "Absolute values, since a run may grow on the mirror side before the switch."
            panels.append(
                Lines(title, "samples drawn", label, tuple(curves), log_y=True, note=note if name != "excess" else "")
            )
        return tuple(panels)

    def _with_penalty(
        self, task: BigramTask, state: State, plain: StepSettings, seed: list[int], step: int
    ) -> StepSettings:
        noise = estimate_noise(observe(task, state, self.batch, seed=seed, step=step).attention, task.stationary)
        return StepSettings(
            self.batch, plain.value_rate, plain.attention_rate, strength=self.ratio * noise, constrained=False
        )

    def _task(self) -> BigramTask:
        return draw_task(np.random.default_rng(self.weight_seed), self.vocabulary, self.length, self.sparsity)

    def _settings(self, task: BigramTask) -> StepSettings:
        return balanced_settings(task, self.batch, noise_ratio=self.noise_ratio)

    def _steps(self, task: BigramTask) -> int:
        return int(self.duration * stage_one_samples(task, self.noise_ratio) / self.batch)

    def _looks(self, task: BigramTask) -> np.ndarray:
        return np.arange(LOOKS + 1) * (self._steps(task) // LOOKS)


VALUES = {"long_name": "signal of the values", "units": "1"}
WEIGHTS = {"long_name": "signal of the attention", "units": "1"}


def _crossing(steps: np.ndarray, rising: np.ndarray, level: float) -> float:
    """Return the steps at which a positive curve first passes a level, between two looks geometrically."""
    above = np.flatnonzero(rising >= level)
    if not above.size:
        return float(steps[-1])
    right = max(int(above[0]), 1)
    low, high = np.log(np.maximum(rising[right - 1 : right + 1], 1e-12))
    share = (np.log(level) - low) / (high - low) if high > low else 1.0
    return float(steps[right - 1] + np.clip(share, 0, 1) * (steps[right] - steps[right - 1]))
