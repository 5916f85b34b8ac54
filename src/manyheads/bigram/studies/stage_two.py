r"""`bigram/stage-two`: from a start with some signal, descent with a penalty does not feel the length, without it does.

Both start with four tenths of the solution. Without penalty every position that does not count carries noise, and their
number is the length. A threshold above the noise of one coordinate keeps them at zero, whatever their number.

A threshold that is set once does not stay there. The penalty is smaller where the attention is smaller, and along the
valley the values make up for it: they grow past the solution, and with them the noise of the attention's gradient.
What was r standard deviations at the solution is :math:`r/\alpha_V` of them later. Bias shrinks as noise grows, so a
threshold of 4.2 ends near 2.5, and the loss at long contexts turns up again; the smallest loss of a run comes before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.bigram import setups as shared
from manyheads.bigram.task import BigramTask, draw_task
from manyheads.bigram.training.proximal_sgd import State, StepSettings
from manyheads.bigram.training.record import measure_rounded, record
from manyheads.errors import UsageError
from manyheads.study import Cell, Lines, Study, Verdict, grid
from manyheads.study.reporting.panels import Panel, spread_curve

START = 0.4  # of the solution, in values and attention
LOOKS = 24
VALUES = {"long_name": "signal of the values", "units": "1"}
METHODS = {"plain": "without penalty", "penalty": "with penalty"}


@dataclass(frozen=True)
class StageTwo(Study):
    """With a penalty above the noise the loss does not depend on the length; without, it grows with it.

    Attributes
    ----------
    lengths
        Context lengths T, rising.
    vocabulary, sparsity
        N and Q of the task.
    batch, samples
        Of a step, and of a run.
    rate
        Growth per step: rates are `rate` / K_Q for values and `rate` / K_P for attention.
    ratio
        The penalty in standard deviations of one coordinate of the gradient at the solution.
    weight_seed
        Which weights the positions have; every replicate draws its own transition, positions and samples.
    """

    name: ClassVar[str] = "bigram/stage-two"
    claim: ClassVar[str] = (
        "from a start with signal, descent with an l1 penalty needs samples independent of the length"
    )
    source: ClassVar = shared.SOURCE

    lengths: tuple[int, ...] = (125, 500, 2000)
    vocabulary: int = 3
    sparsity: int = 2
    batch: int = 4096
    samples: int = 196_608
    rate: float = 0.2
    ratio: float = 4.2
    weight_seed: int = 0

    def __post_init__(self) -> None:
        if len(self.lengths) < 2 or list(self.lengths) != sorted(set(self.lengths)):
            raise UsageError(f"lengths={self.lengths}: two or more, in rising order")
        if self.samples < self.batch * LOOKS:
            raise UsageError(f"samples={self.samples}: at least {LOOKS} steps, {LOOKS * self.batch}")

    @classmethod
    def full(cls) -> StageTwo:
        """Return the study up to 32,000 tokens: minutes with the extra `fast`, an hour or more without."""
        return cls(lengths=(500, 2000, 8000, 32000))

    @classmethod
    def small(cls) -> StageTwo:
        """Return the smallest configuration in which every claim can change."""
        return cls(lengths=(40, 80), batch=64, samples=1536, rate=0.05, ratio=1.0)

    def cells(self) -> tuple[Cell, ...]:
        """Return both methods at every length."""
        return grid(descent=tuple(METHODS), length=self.lengths)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the signal system with its noise without penalty, and the noiseless descent with it."""
        found = [self._predict(length) for length in self.lengths]
        curves, signals = (np.stack(part, axis=1) for part in zip(*found, strict=True))
        dims = ("descent", "length", "progress")
        return xr.Dataset(
            {"excess": (dims, curves, shared.EXCESS), "value_signal": (dims, signals, VALUES)},
            coords={"descent": list(METHODS), "length": list(self.lengths), "progress": self._progress()},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Descend from the common start and look at the loss and at the rounded answer."""
        task = shared.lengthen(shared.redraw(self._task(self.lengths[0]), key), int(cell["length"]))
        settings = self._settings(task, str(cell["descent"]))
        steps = self._steps()
        seen = record(task, _begin(task), settings, steps, LOOKS, seed=shared.seed_of(key))
        rounded = measure_rounded(task, seen.state)
        return xr.Dataset(
            {
                "excess": ("progress", seen.excess, shared.EXCESS),
                "value_signal": ("progress", seen.value_signal, VALUES),
                "nonzero": ("progress", seen.nonzero, {"long_name": "share of positions with attention", "units": "1"}),
                "support": ((), rounded.support, shared.SUPPORT),
                "rounded": ((), rounded.excess, shared.EXCESS | {"long_name": "excess loss after rounding"}),
            },
            coords={"progress": ("progress", self._progress(), {"long_name": "samples drawn"})},
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare the smallest loss of a run across lengths, and with the signal system."""
        best = shared.unstack(trained, "excess").min("progress")  # (method, length, replicate)
        theory = predicted["excess"].min("progress")
        first, last = self.lengths[0], self.lengths[-1]
        plain, penalty = best.sel(descent="plain"), best.sel(descent="penalty")
        up = shared.unstack(trained, "value_signal").sel(descent="penalty", length=last).isel(progress=-1)
        valley = float(predicted["value_signal"].sel(descent="penalty", length=last).isel(progress=-1))
        expected = float(np.log2(theory.sel(descent="plain", length=last) / theory.sel(descent="plain", length=first)))
        return (
            Verdict.from_samples(
                f"with the penalty the loss at {last} tokens is that at {first}: doublings in between",
                np.log2(penalty.sel(length=last).values / penalty.sel(length=first).values),
                target=0.0,
                tolerance=float(np.log2(1.6)),
                resolution=1e-6,
                basis="a factor of 1.6 between the ends: of the energy of thresholded noise, which grows with the "
                "length as long as the threshold is below sqrt(2 ln T) standard deviations, and of two runs' noise",
            ),
            Verdict.from_samples(
                f"the penalty moves the values up the valley as descent without noise does: {self.ratio:g} standard "
                "deviations at the solution are fewer at the end",
                up.values,
                target=valley,
                tolerance=0.1 * valley,
                basis="a tenth: noise of the attention shortens the values by half of its share of the attention's "
                "energy, which the threshold keeps to a few percent",
            ),
            Verdict.from_samples(
                f"without it the loss grows from {first} to {last} tokens as the signal system with its noise says, in "
                "doublings",
                np.log2(plain.sel(length=last).values / plain.sel(length=first).values),
                target=expected,
                tolerance=0.3,
                resolution=1e-6,
                basis="a quarter of the factor: the smallest of a fluctuating curve lies below its mean's smallest",
            ),
            Verdict.from_samples(
                f"at {last} tokens the loss is smaller with the penalty, in doublings",
                np.log2(penalty.sel(length=last).values / plain.sel(length=last).values),
                target=-1.0,
                tolerance=(float("inf"), 1.0),
                resolution=1e-6,
                basis="an inequality: the ratio is below one",
            ),
            Verdict.from_samples(
                "with the penalty the loss, not rounded, comes below .035 of that of the start at all lengths",
                penalty.max("length").values,
                target=0.0,
                tolerance=(0.0, 0.035),
                basis=f"noiseless descent with this penalty reaches {float(theory.sel(descent='penalty').max()):.3f} "
                "at the most; the rest is room for noise on the true positions",
            ),
            Verdict.from_samples(
                "without penalty the positions cannot be read off",
                1 - shared.unstack(trained, "support").sel(descent="plain", length=last).values,
                target=1.0,
                tolerance=0.5,
                resolution=0.5 / self.vocabulary,
                expected="refuted",
                basis="one minus the share of queries whose largest entries are the right ones, in more than half",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the smallest loss against the length, and the loss over samples at the longest."""
        best, theory = shared.unstack(trained, "excess"), predicted["excess"]
        lowest, lines, longest = best.min("progress"), [], self.lengths[-1]
        over = []
        for group, (method, label) in enumerate(METHODS.items()):
            lines.append(spread_curve(self.lengths, lowest.sel(descent=method).values.T, label, group=group))
            bottom = theory.sel(descent=method).min("progress").values
            lines.append(spread_curve(self.lengths, bottom, f"{label}, predicted", "predicted", group))
            rows = best.sel(descent=method, length=longest).transpose("replicate", "progress").values
            over.append(spread_curve(self._progress(), rows, label, group=group))
            curve = theory.sel(descent=method, length=longest).values
            over.append(spread_curve(self._progress(), curve, f"{label}, predicted", "predicted", group))
        note = (
            "Raw iterates, not rounded. Dashed: the signal system with its noise, and noiseless descent with penalty."
        )
        signals = [
            curve
            for group, (method, label) in enumerate(METHODS.items())
            for curve in (
                spread_curve(
                    self._progress(),
                    shared.unstack(trained, "value_signal")
                    .sel(descent=method, length=longest)
                    .transpose("replicate", "progress")
                    .values,
                    label,
                    group=group,
                ),
                spread_curve(
                    self._progress(),
                    predicted["value_signal"].sel(descent=method, length=longest).values,
                    f"{label}, predicted",
                    "predicted",
                    group,
                ),
            )
        ]
        return (
            Lines(
                "Smallest loss of a run",
                "context length [tokens]",
                "excess loss, of that at the start of training",
                tuple(lines),
                log_x=True,
                log_y=True,
                note=note,
            ),
            Lines(
                f"Over samples, {longest} tokens",
                "samples drawn",
                "excess loss, of that at the start of training",
                tuple(over),
                log_y=True,
                note=note,
            ),
            Lines(
                f"Signal of the values, {longest} tokens",
                "samples drawn",
                "overlap with the transition",
                tuple(signals),
                note="One at the solution without a penalty.",
            ),
        )

    def _predict(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the predicted loss and signal of the values of both methods, (2, looks) each."""
        task = self._task(length)
        steps, every = self._steps(), self._steps() // LOOKS
        path = shared.predict_signals(
            task, self._settings(task, "plain"), np.arange(0, steps + 1, every), (START, START)
        )
        plain = shared.dressed_excess(task, path)
        penalty = shared.descend_noiselessly(task, _begin(task), self._settings(task, "penalty"), steps)
        return (
            np.stack([plain, penalty.excess[::every]]),
            np.stack([path.value_signal, penalty.value_signal[::every]]),
        )

    def _task(self, length: int) -> BigramTask:
        shortest = draw_task(np.random.default_rng(self.weight_seed), self.vocabulary, self.lengths[0], self.sparsity)
        return shared.lengthen(shortest, length)

    def _settings(self, task: BigramTask, method: str) -> StepSettings:
        rates = self.rate / task.attention_energy, self.rate / task.transition_energy
        strength = self.ratio * (task.transition_energy / self.batch) ** 0.5 if method == "penalty" else 0.0
        return StepSettings(self.batch, *rates, strength=strength, constrained=False)

    def _steps(self) -> int:
        return LOOKS * (self.samples // (LOOKS * self.batch))

    def _progress(self) -> np.ndarray:
        return np.arange(LOOKS + 1) * (self._steps() // LOOKS) * self.batch


def _begin(task: BigramTask) -> State:
    """Return the common start: a part of the solution, without noise."""
    uniform = 1 / task.length
    return State(START * task.centred, (uniform + START * (task.attention - uniform)).astype(np.float32))
