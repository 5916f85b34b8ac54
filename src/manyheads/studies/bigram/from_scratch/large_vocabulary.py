"""`bigram/large-vocabulary`: plateau escape and overshoot at a hundred and five hundred tokens, 100,000 positions.

The simulated sizes of the source, in the reduced model, and several times longer than the escape. The signal of the
values rises to a maximum and falls again, because noise gathers in the attention and the values shrink along the valley
of equal product; the signal of the attention overshoots its solution. Both follow from the signal system with noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.study import Cell, Claim, Curve, Lines, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cell, unstack
from manyheads.theory.bigram.setups import (
    EXCESS_AXIS,
    balanced_steps,
    excess_with_noise,
    replicate_seed,
    signal_system,
)
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems.signal import predict_escape, solve_signals
from manyheads.theory.bigram.training.reduced_model import ESCAPED, ReducedChain, initial_runs, measure_reduced
from manyheads.theory.papers import REN

WEIGHTS = (0.6, 0.4)  # of the two positions of every query


@dataclass(frozen=True)
class LargeVocabulary(Study):
    """Signals and excess loss over training by the vocabulary, in the reduced model.

    Attributes
    ----------
    vocabularies
        N, increasing.
    length
        T.
    noise
        Noise-to-signal ratio kappa2, which determines the batch.
    growth
        Growth per step.
    horizon
        Duration in e-foldings of small signals; the escape takes about ln T.
    """

    name: ClassVar[str] = "bigram/large-vocabulary"
    claim: ClassVar[str] = "At N = 100 and 500 the values peak and fall, and the attention overshoots, as predicted"
    source: ClassVar = replace(REN, locus="figures: simulated runs at N = 100 and 500; the overshoot is derived here")

    vocabularies: tuple[int, ...] = (100, 500)
    length: int = 100_000
    noise: float = 4.0
    growth: float = 0.1
    horizon: float = 30.0

    def __post_init__(self) -> None:
        check_rising("vocabularies", self.vocabularies, least=2)
        if not 0 < self.growth <= 0.2 or not self.horizon > 2 * np.log(self.length):
            raise UsageError(
                f"growth={self.growth}, horizon={self.horizon}: give a growth of at most .2 per step, and more than "
                f"twice ln T = {np.log(self.length):.1f} e-foldings"
            )

    @classmethod
    def full(cls) -> LargeVocabulary:
        """Return the study with four times the duration."""
        return cls(horizon=120.0)

    @classmethod
    def small(cls) -> LargeVocabulary:
        """Return the smallest configuration in which every claim can change."""
        return cls(vocabularies=(3, 5), length=100, horizon=10.0)

    def cells(self) -> tuple[Cell, ...]:
        """Return every vocabulary."""
        return grid(vocabulary=self.vocabularies)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Solve the signal system with its noise."""
        rows, escapes = [], []
        for vocabulary in self.vocabularies:
            task = self._task(np.random.default_rng(0), vocabulary)
            system = signal_system(task, balanced_steps(task, self.growth, self.noise))
            path = solve_signals(
                system, self._steps_done() * np.log1p(self.growth) / self.growth, system.typical_init()
            )
            rows.append((path.value_signal, path.attention_signal, excess_with_noise(task, path)))
            escapes.append(predict_escape(system) * np.log1p(self.growth))
        curves = np.swapaxes(rows, 0, 1)
        return dataset(
            {
                **{name: (("vocabulary", "time"), curves[i], label) for i, (name, label) in enumerate(CURVES.items())},
                "escape": ("vocabulary", escapes, "plateau escape, in e-foldings"),
            },
            coords={"vocabulary": list(self.vocabularies), "time": (self._times(), "e-foldings")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one run of the reduced model, signs corrected; record every step."""
        rng = np.random.default_rng([*replicate_seed(key), int(cell["vocabulary"])])
        task = self._task(rng, int(cell["vocabulary"]))
        settings = balanced_steps(task, self.growth, self.noise)
        chain, state = ReducedChain(task, settings), initial_runs(task, 1)
        rows = []
        for _ in self._steps_done():
            found = measure_reduced(task, state)
            rows.append([float(part[0]) for part in found])
            state = chain.step(rng, state)
        values, attention, value_signal, weight_signal = np.array(rows).T
        sign = -1.0 if value_signal[-1] < 0 else 1.0
        transition, weights, uniform = task.transition_squared_norm, task.attention_squared_norm, 1 / task.length
        overlap = (weight_signal * weights + uniform) * value_signal * transition
        excess = (attention * values - 2 * overlap) / (task.weight_squared_norm * transition) + 1
        above = np.flatnonzero(value_signal * weight_signal > ESCAPED)
        noise = np.sqrt(state.residual[0] / chain.others) * np.sqrt(2 * np.log(task.vocabulary * task.length))
        curves = (sign * value_signal, sign * weight_signal, excess)
        return dataset(
            {
                **{name: ("time", curves[i], label) for i, (name, label) in enumerate(CURVES.items())},
                "escape": ((), self._times()[above[0] if above.size else -1], "plateau escape, in e-foldings"),
                "margin": (
                    (),
                    float((sign * state.on_support[0] / noise[:, None]).min()),
                    "smallest attended weight, over the largest of the others",
                ),
            },
            coords={"time": (self._times(), "e-foldings")},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare escape, peak, fall and overshoot with the signal system, at every vocabulary."""
        last = self.vocabularies[-1]

        def ratio(figure: Any) -> Any:
            def measured(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                rows = [
                    figure(select_cell(trained, vocabulary=n)) / float(figure(predicted.sel(vocabulary=n)))
                    for n in self.vocabularies
                ]
                return np.mean(rows, axis=0)

            return measured

        def gap(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return (unstack(trained, "escape") - predicted["escape"]).mean("vocabulary").values

        law: dict[str, Any] = {"target": 1.0, "tolerance": 0.1, "quantity": "measured over predicted"}
        basis = f"the growth per step, {self.growth:g}: terms of that relative order separate steps from the system"
        times = f"{self.horizon:g} e-foldings"
        return (
            Claim(
                "The signal system predicts the plateau escape at every vocabulary (mean gap in e-foldings)",
                gap,
                quantity="escape time, measured minus predicted (e-foldings)",
                target=0.0,
                tolerance=0.5,
                resolution=self.growth,
                basis="half an e-folding",
            ),
            Claim("The signal of the values peaks at the predicted height (ratio)", ratio(_peak), basis=basis, **law),
            Claim(
                f"Within {times} the signal of the values falls from its peak by the predicted factor (ratio)",
                ratio(_fall),
                basis=basis,
                **law,
            ),
            Claim(
                f"The signal of the attention overshoots to the predicted height after {times} (ratio)",
                ratio(_end),
                basis=basis,
                **law,
            ),
            Claim(
                f"At N = {last} training without a penalty ends at the solution, the signals at one (signal of the "
                "attention)",
                lambda predicted, trained: _end(select_cell(trained, vocabulary=last)),
                quantity="signal of the attention",
                target=1.0,
                tolerance=0.5,
                expected="refuted",
                basis="the claim with a margin of a half",
            ),
            Claim(
                "All attended positions rank first at the end, at every vocabulary (smallest attended weight over the "
                "largest of the others)",
                lambda predicted, trained: unstack(trained, "margin").min("vocabulary").values,
                quantity="ratio of weights",
                target=1.0,
                tolerance=(0.0, float("inf")),
                basis="an inequality; the largest of NT normal weights",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show both signals and the excess loss over training."""
        titles = ("Signal of the values", "Signal of the attention", "Loss")
        axes = ("overlap with the transition", "overlap with the weights", EXCESS_AXIS)
        shows = ("signal of the values peaks", "signal of the attention overshoots", "The signal system predicts")
        panels = []
        for name, title, axis, claim in zip(CURVES, titles, axes, shows, strict=True):
            curves: list[Curve] = []
            for group, vocabulary in enumerate(self.vocabularies):
                found = select_cell(trained, vocabulary=vocabulary)[name].values
                theory = predicted[name].sel(vocabulary=vocabulary).values
                curves.append(spread_curve(self._times(), found, f"N = {vocabulary}", group=group))
                curves.append(spread_curve(self._times(), theory[None], "", "predicted", group))
            note = "Dashed: the signal system with noise. One is the solution."
            panels.append(Lines(title, "e-foldings of small signals", axis, tuple(curves), note=note, shows=(claim,)))
        return tuple(panels)

    def _task(self, rng: np.random.Generator, vocabulary: int) -> BigramTask:
        drawn = draw_bigram_task(rng, vocabulary, self.length, 2)
        return replace(drawn, weights=np.tile(WEIGHTS, (vocabulary, 1)))

    def _steps_done(self) -> np.ndarray:
        return np.arange(round(self.horizon / np.log1p(self.growth)) + 1)

    def _times(self) -> np.ndarray:
        """Return e-foldings: a step multiplies small signals by one and the growth."""
        return self._steps_done() * np.log1p(self.growth)


CURVES = {
    "value_signal": "signal of the values",
    "attention_signal": "signal of the attention",
    "excess": "excess loss over the initial one",
}


def _peak(found: xr.Dataset) -> np.ndarray:
    return found["value_signal"].max("time").values


def _fall(found: xr.Dataset) -> np.ndarray:
    return found["value_signal"].isel(time=-1).values / _peak(found)


def _end(found: xr.Dataset) -> np.ndarray:
    return found["attention_signal"].isel(time=-1).values
