r"""`bigram/stage-two`: from an initialization with signal, the samples of proximal SGD are independent of the length.

Both runs are initialized with four tenths of the solution. Without a penalty every other position carries noise, and
their number is the length. A threshold above the noise of one coordinate keeps them at zero at any length.

A constant threshold decreases in units of the noise: the penalty shrinks the attention, the values compensate along the
curve of minima :math:`\alpha_A\alpha_V = 1`, and the noise of the attention's gradient grows with them. r standard
deviations at the solution become :math:`r/\alpha_V`, 4.2 become about 2.5, and the loss at long contexts rises again
after its minimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.study import Cell, Claim, Curve, Lines, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import unstack
from manyheads.theory.bigram import setups as shared
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.training.proximal_sgd import State, StepSettings
from manyheads.theory.bigram.training.record import measure_rounded, record
from manyheads.theory.papers import REN

INIT = 0.4  # of the solution, in values and attention
RECORDS = 24
METHODS = {"plain": "without penalty", "penalty": "with penalty"}


@dataclass(frozen=True)
class StageTwo(Study):
    """Excess loss of stage two by context length, with and without an l1 penalty.

    Attributes
    ----------
    lengths
        Context lengths T, increasing.
    vocabulary, sparsity
        N and Q of the task.
    batch, samples
        Of a step, and of a run.
    growth
        Growth per step: learning rates are `growth` / K_Q for values and `growth` / K_P for attention.
    ratio
        The penalty in standard deviations of one coordinate of the gradient at the solution.
    weight_seed
        Seed of the weights of the positions; every replicate draws its own transition, positions and samples.
    """

    name: ClassVar[str] = "bigram/stage-two"
    revision: ClassVar[int] = 3
    claim: ClassVar[str] = "Initialized with signal, proximal SGD needs samples independent of the length"
    source: ClassVar = REN

    lengths: tuple[int, ...] = (125, 500, 2000)
    vocabulary: int = 3
    sparsity: int = 2
    batch: int = 4096
    samples: int = 196_608
    growth: float = 0.2
    ratio: float = 4.2
    weight_seed: int = 0

    def __post_init__(self) -> None:
        check_rising("lengths", self.lengths)
        if self.samples < self.batch * RECORDS:
            raise UsageError(f"samples={self.samples}: give at least {RECORDS} steps, {RECORDS * self.batch}")

    @classmethod
    def full(cls) -> StageTwo:
        """Return the study up to 32,000 tokens: minutes with the extra `fast`, an hour or more without."""
        return cls(lengths=(500, 2000, 8000, 32000))

    @classmethod
    def small(cls) -> StageTwo:
        """Return the smallest configuration in which every claim can change."""
        return cls(lengths=(40, 80), batch=64, samples=1536, growth=0.05, ratio=1.0)

    def cells(self) -> tuple[Cell, ...]:
        """Return both methods at every length."""
        return grid(descent=tuple(METHODS), length=self.lengths)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the signal system with noise without a penalty, and noiseless descent with it."""
        found = [self._predict(length) for length in self.lengths]
        curves, signals = (np.stack(part, axis=1) for part in zip(*found, strict=True))
        dims = ("descent", "length", "progress")
        return xr.Dataset(
            {"excess": (dims, curves, shared.EXCESS), "value_signal": (dims, signals, shared.VALUES)},
            coords={"descent": list(METHODS), "length": list(self.lengths), "progress": self._progress()},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train from the common initialization and record the loss, and the support after rounding."""
        task = shared.lengthen(shared.redraw(self._task(self.lengths[0]), key), int(cell["length"]))
        settings = self._settings(task, str(cell["descent"]))
        seen = record(task, _init(task), settings, self._steps(), RECORDS, seed=shared.replicate_seed(key))
        rounded = measure_rounded(task, seen.state)
        return xr.Dataset(
            {
                "excess": ("progress", seen.excess, shared.EXCESS),
                "value_signal": ("progress", seen.value_signal, shared.VALUES),
                "nonzero": ("progress", seen.nonzero, {"long_name": "share of positions with attention", "units": "1"}),
                "support": ((), rounded.support, shared.SUPPORT),
                "rounded": ((), rounded.excess, shared.EXCESS | {"long_name": "excess loss after rounding"}),
            },
            coords={"progress": ("progress", self._progress(), {"long_name": "samples drawn"})},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare the smallest loss of a run across lengths and methods, and with the predictions."""
        first, last = self.lengths[0], self.lengths[-1]

        def doublings(method: str) -> Any:
            def measured(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                best = _best(trained).sel(descent=method)
                return np.log2(best.sel(length=last).values / best.sel(length=first).values)

            return measured

        def final_signal(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return unstack(trained, "value_signal").sel(descent="penalty", length=last).isel(progress=-1).values

        def against_plain(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            at_last = _best(trained).sel(length=last)
            return np.log2(at_last.sel(descent="penalty").values / at_last.sel(descent="plain").values)

        def wrong_support(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return 1 - unstack(trained, "support").sel(descent="plain", length=last).values

        def predicted_doublings(predicted: xr.Dataset) -> float:
            best = predicted["excess"].sel(descent="plain").min("progress")
            return float(np.log2(best.sel(length=last) / best.sel(length=first)))

        return (
            Claim(
                f"With the penalty the smallest excess loss is the same at T = {first} and T = {last} (in doublings)",
                doublings("penalty"),
                quantity="excess loss at the largest T over that at the smallest (log2)",
                target=0.0,
                tolerance=float(np.log2(1.6)),
                resolution=shared.ROUNDING,
                basis="a factor of 1.6 between the ends: of the squared norm of thresholded noise, which grows "
                "with the length while the threshold is below sqrt(2 ln T) standard deviations, and of two runs' noise",
            ),
            Claim(
                f"With a penalty of {self.ratio:g} standard deviations alpha_V increases as in noiseless descent",
                final_signal,
                quantity="alpha_V at the end",
                target=self._final_signal,
                tolerance=lambda predicted: 0.1 * self._final_signal(predicted),
                basis="a tenth: noise of the attention reduces the values by half of its share of the attention's "
                "squared norm, a few percent above the threshold",
            ),
            Claim(
                f"Without a penalty the smallest excess loss grows from T = {first} to T = {last} as the signal system "
                "with noise predicts (in doublings)",
                doublings("plain"),
                quantity="excess loss at the largest T over that at the smallest (log2)",
                target=predicted_doublings,
                tolerance=0.3,
                resolution=shared.ROUNDING,
                basis="a quarter of the factor: the smallest of a fluctuating curve lies below its mean's smallest",
            ),
            Claim(
                f"At T = {last} the penalty reduces the smallest excess loss (in doublings)",
                against_plain,
                quantity="excess loss with the penalty over that without (log2)",
                target=-1.0,
                tolerance=(float("inf"), 1.0),
                resolution=shared.ROUNDING,
                basis="an inequality: the ratio is below one",
            ),
            Claim(
                "With the penalty the excess loss of the raw iterate falls below 3.5% at every length",
                lambda predicted, trained: _best(trained).sel(descent="penalty").max("length").values,
                quantity="relative excess loss, largest over lengths",
                target=0.0,
                tolerance=(0.0, 0.035),
                basis="the bias of the penalty, that of noiseless descent, and room for noise on the true positions",
            ),
            Claim(
                "Without a penalty the attended positions are not the largest weights of most queries",
                wrong_support,
                quantity="share of queries with wrong positions",
                bounds=(0.0, 1.0),
                target=1.0,
                tolerance=0.5,
                resolution=0.5 / self.vocabulary,
                expected="refuted",
                basis="one minus the share of queries with the right largest weights, in more than half",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the smallest loss against the length, and loss and signal over samples at the longest."""
        longest, progress = self.lengths[-1], self._progress()
        lowest, best = _best(trained), predicted["excess"].min("progress")
        by_length, over, signals = [], [], []
        for group, (method, label) in enumerate(METHODS.items()):

            def both(x: Any, name: str, method: str = method, label: str = label, group: int = group) -> list[Curve]:
                chosen = {"descent": method, "length": longest}
                rows = unstack(trained, name).sel(chosen).transpose("replicate", "progress").values
                theory = spread_curve(x, predicted[name].sel(chosen).values, f"{label}, predicted", "predicted", group)
                return [spread_curve(x, rows, label, group=group), theory]

            by_length.append(spread_curve(self.lengths, lowest.sel(descent=method).values.T, label, group=group))
            theory = best.sel(descent=method).values
            by_length.append(spread_curve(self.lengths, theory, f"{label}, predicted", "predicted", group))
            over += both(progress, "excess")
            signals += both(progress, "value_signal")
        note = "Raw iterates. Dashed: the signal system with noise, and noiseless descent with the penalty."
        return (
            Lines(
                "Smallest loss of a run",
                "context length [tokens]",
                shared.EXCESS_AXIS,
                tuple(by_length),
                log_x=True,
                log_y=True,
                note=note,
                shows=("With the penalty the smallest",),
            ),
            Lines(
                f"Over samples, {longest} tokens",
                "samples drawn",
                shared.EXCESS_AXIS,
                tuple(over),
                log_y=True,
                note=note,
                shows=("the penalty reduces",),
            ),
            Lines(
                f"Signal of the values, {longest} tokens",
                "samples drawn",
                "overlap with the transition",
                tuple(signals),
                note="One at the solution without a penalty.",
                shows=("alpha_V increases",),
            ),
        )

    def _final_signal(self, predicted: xr.Dataset) -> float:
        signal = predicted["value_signal"].sel(descent="penalty", length=self.lengths[-1])
        return float(signal.isel(progress=-1))

    def _predict(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the predicted loss and signal of the values of both methods, (2, records) each."""
        task = self._task(length)
        steps, every = self._steps(), self._steps() // RECORDS
        path = shared.predict_signals(task, self._settings(task, "plain"), np.arange(0, steps + 1, every), (INIT, INIT))
        plain = shared.excess_with_noise(task, path)
        penalty = shared.noiseless_descent(task, _init(task), self._settings(task, "penalty"), steps)
        return (
            np.stack([plain, penalty.excess[::every]]),
            np.stack([path.value_signal, penalty.value_signal[::every]]),
        )

    def _task(self, length: int) -> BigramTask:
        shortest = draw_bigram_task(
            np.random.default_rng(self.weight_seed), self.vocabulary, self.lengths[0], self.sparsity
        )
        return shared.lengthen(shortest, length)

    def _settings(self, task: BigramTask, method: str) -> StepSettings:
        rates = self.growth / task.attention_squared_norm, self.growth / task.transition_squared_norm
        penalty = self.ratio * (task.transition_squared_norm / self.batch) ** 0.5 if method == "penalty" else 0.0
        return StepSettings(self.batch, *rates, penalty=penalty)

    def _steps(self) -> int:
        return RECORDS * (self.samples // (RECORDS * self.batch))

    def _progress(self) -> np.ndarray:
        return np.arange(RECORDS + 1) * (self._steps() // RECORDS) * self.batch


def _best(trained: xr.Dataset) -> xr.DataArray:
    """Return the smallest loss of every run, (method, length, replicate)."""
    return unstack(trained, "excess").min("progress")


def _init(task: BigramTask) -> State:
    """Return the common initialization: a part of the solution, without noise."""
    uniform = 1 / task.length
    return State(INIT * task.centred, (uniform + INIT * (task.attention - uniform)).astype(np.float32))
