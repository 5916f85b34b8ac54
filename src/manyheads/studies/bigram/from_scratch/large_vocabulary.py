"""`bigram/large-vocabulary`: plateau escape and overshoot at a hundred and five hundred tokens, 100,000 positions.

The simulated sizes of the source, in the reduced model, and several times longer than the escape. The signal of the
values rises to a maximum and falls again, because noise gathers in the attention and the values shrink along the valley
of equal product; the signal of the attention overshoots its solution. Both follow from the signal system with noise.
"""

from dataclasses import replace

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.theory.bigram import BigramTask, draw_bigram_task, setups
from manyheads.theory.bigram.theorems.signal import predict_escape, solve_signals
from manyheads.theory.bigram.training.reduced_model import ESCAPED, record_reduced
from manyheads.theory.papers import REN

WEIGHTS = (0.6, 0.4)  # of the two positions of every query
CURVES = {
    "value_signal": setups.VALUES,
    "attention_signal": setups.WEIGHTS,
    "excess": "excess loss over the initial one",
}
ESCAPE = "plateau escape, in e-foldings"


class LargeVocabulary(st.Study):
    """Signals and excess loss over training by the vocabulary, in the reduced model."""

    name = "bigram/large-vocabulary"
    claim = "At N = 100 and 500 the values peak and fall, and the attention overshoots, as predicted"
    source = REN.at("figures: simulated runs at N = 100 and 500; the overshoot is derived here")
    grid = {"vocabulary": "vocabularies"}

    vocabularies: tuple[int, ...] = st.sweep((100, 500), "N", least=2, small=(3, 5))
    length: int = st.setting(100_000, "T", small=100)
    noise: float = st.setting(4.0, "noise-to-signal ratio kappa2, which determines the batch")
    growth: float = st.setting(0.1, "growth per step", above=0, most=0.2)
    horizon: float = st.setting(30.0, "duration in e-foldings of small signals", small=10.0, full=120.0)

    def check(self) -> None:
        if self.horizon <= (least := 2 * np.log(self.length)):
            raise st.UsageError(f"horizon={self.horizon}: give more than twice ln T, {least:.1f} e-foldings")

    def predict(self, key: st.Key) -> st.Record:
        rows, escapes = [], []
        for vocabulary in self.vocabularies:
            task = self._task(np.random.default_rng(0), vocabulary)
            system = setups.signal_system(task, setups.balanced_steps(task, self.growth, self.noise))
            pace = np.log1p(self.growth) / self.growth
            path = solve_signals(system, self._steps_done() * pace, system.typical_init())
            rows.append((path.value_signal, path.attention_signal, setups.excess_with_noise(task, path)))
            escapes.append(predict_escape(system) * np.log1p(self.growth))
        curves = np.swapaxes(rows, 0, 1)
        return {
            "time": ("time", self._times(), "e-foldings of small signals"),
            "escape": ("vocabulary", escapes, ESCAPE),
            **{name: (("vocabulary", "time"), curves[i], label) for i, (name, label) in enumerate(CURVES.items())},
        }

    def train(self, key: st.Key, vocabulary: int) -> st.Record:
        """Train one run of the reduced model, signs corrected; record every step."""
        rng = np.random.default_rng([*setups.replicate_seed(key), vocabulary])
        task = self._task(rng, vocabulary)
        settings = setups.balanced_steps(task, self.growth, self.noise)
        value_signal, weight_signal, excess, state = record_reduced(task, settings, len(self._steps_done()), rng)
        sign = -1.0 if value_signal[-1] < 0 else 1.0
        above = np.flatnonzero(value_signal * weight_signal > ESCAPED)
        others = np.sqrt(state.residual[0] / (task.length - task.sparsity))  # standard deviation of their weights
        noise = others * np.sqrt(2 * np.log(task.vocabulary * task.length))
        margin = float((sign * state.on_support[0] / noise[:, None]).min())
        curves = (sign * value_signal, sign * weight_signal, excess)
        return {
            "time": ("time", self._times(), "e-foldings of small signals"),
            "escape": ((), self._times()[above[0] if above.size else -1], ESCAPE),
            "margin": ((), margin, "smallest attended weight, over the largest of the others"),
            **{name: ("time", curve, CURVES[name]) for name, curve in zip(CURVES, curves, strict=True)},
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        last, times = self.vocabularies[-1], f"{self.horizon:g} e-foldings"
        basis = f"the growth per step, {self.growth:g}: terms of that relative order separate steps from the system"
        yield st.Claim(
            "The signal system predicts the plateau escape at every vocabulary (mean gap in e-foldings)",
            st.gap(trained["escape"], theory["escape"], "vocabulary"),
            st.near(0, 0.5),
            "half an e-folding",
            "escape time, measured minus predicted (e-foldings)",
            resolution=self.growth,
        )
        texts = (
            "The signal of the values peaks at the predicted height (ratio)",
            f"Within {times} the signal of the values falls from its peak by the predicted factor (ratio)",
            f"The signal of the attention overshoots to the predicted height after {times} (ratio)",
        )
        for text, measured, predicted in zip(texts, _heights(trained), _heights(theory), strict=True):
            yield st.Claim(text, st.ratio(measured, predicted), st.near(1, 0.1), basis, "measured over predicted")
        yield st.Claim(
            f"At N = {last} training without a penalty ends at the solution, the signals at one (signal of the "
            "attention)",
            trained["attention_signal"].sel(vocabulary=last).isel(time=-1),
            st.near(1, 0.5),
            "the claim with a margin of a half",
            "signal of the attention",
            "refuted",
        )
        yield st.Claim(
            "All attended positions rank first at the end, at every vocabulary (smallest attended weight over the "
            "largest of the others)",
            trained["margin"].min("vocabulary"),
            st.above(1),
            "an inequality; the largest of NT normal weights",
            "ratio of weights",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        shows = ("signal of the values peaks", "signal of the attention overshoots", "The signal system predicts")
        note = "Dashed: the signal system with noise. One is the solution."
        for (name, label), claim in zip(CURVES.items(), shows, strict=True):
            curves = [
                {f"N = {n}": data[name].sel(vocabulary=n) for n in self.vocabularies} for data in (trained, theory)
            ]
            yield st.lines(label.capitalize(), "time", label, *curves, note=note, shows=(claim,))

    def _task(self, rng: np.random.Generator, vocabulary: int) -> BigramTask:
        drawn = draw_bigram_task(rng, vocabulary, self.length, 2)
        return replace(drawn, weights=np.tile(WEIGHTS, (vocabulary, 1)))

    def _steps_done(self) -> np.ndarray:
        return np.arange(round(self.horizon / np.log1p(self.growth)) + 1)

    def _times(self) -> np.ndarray:
        """Return e-foldings: a step multiplies small signals by one and the growth."""
        return self._steps_done() * np.log1p(self.growth)


def _heights(data: st.Data) -> tuple[xr.DataArray, ...]:
    """Return the peak of the values' signal, its share that is left at the end, and the attention's signal there."""
    values, peak = data["value_signal"], data["value_signal"].max("time")
    return peak, values.isel(time=-1) / peak, data["attention_signal"].isel(time=-1)
