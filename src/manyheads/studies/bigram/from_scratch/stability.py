"""`bigram/stability`: the largest learning rate of batches of 64, 128 and 256, and the penalty of the authors' theory.

SGD from scratch is run at rising learning rates until it diverges; stage two is run with the authors' penalty
epsilon K_P / (Q^2 N^3), with one calibrated to the noise, and without.
"""

import math
from dataclasses import replace

import numpy as np

import manyheads.study as st
from manyheads.theory.bigram import BigramTask, draw_bigram_task, setups
from manyheads.theory.bigram.setups import divergence_threshold
from manyheads.theory.bigram.theorems.stability import divergence_growth, penalty_ratio, remaining_noise, theory_penalty
from manyheads.theory.bigram.training.record import record
from manyheads.theory.papers import REN

PENALTIES = {"none": "no penalty", "theory": "the authors' penalty", "noise": "calibrated to the noise"}
INIT, RECORDS = 0.4, 24  # of the solution, for stage two; records of a run
GRAIN, THRESHOLD = 1.03, "smallest growth per step that diverges"  # found to this factor


class Stability(st.Study):
    """Largest stable learning rate by batch and length, and smallest loss by penalty, for equal weights."""

    name = "bigram/stability"
    claim = "The largest rate grows as sqrt(B / T); the penalty of the theory is below the noise"
    source = REN.at("reviews and answers: batches and the size of the penalty; the thresholds are derived here")

    batches: tuple[int, ...] = st.sweep(
        (64, 128, 256), "samples of a step, at the first length", small=(8, 16), full=(64, 128, 256, 512, 1024)
    )
    lengths: tuple[int, ...] = st.sweep(
        (500, 1000, 2000), "lengths T, at the first batch", small=(30, 60), full=(500, 1000, 2000, 4000, 8000)
    )
    vocabulary: int = st.setting(3, "N")
    sparsity: int = st.setting(2, "Q")
    duration: float = st.setting(100.0, "e-foldings within which a run diverges or not", above=0, small=20.0)
    precision: float = st.setting(0.1, "epsilon of the authors' penalty", above=0)
    ratio: float = st.setting(4.2, "calibrated penalty in std of a coordinate of the gradient", above=0, small=1.0)
    penalty_batch: int = st.setting(4096, "batch of stage two", small=256)
    penalty_length: int = st.setting(2000, "length of stage two", small=40)
    growth: float = st.setting(0.2, "growth per step of stage two", small=0.05)
    steps: int = st.setting(48, "steps of stage two", least=RECORDS)

    def check(self) -> None:
        if self.lengths[0] < 2 * self.sparsity + 3:
            raise st.UsageError(f"lengths={self.lengths}: give {2 * self.sparsity + 3} or more")

    def cells(self) -> tuple[st.Cell, ...]:
        rows = [("divergence", "none", batch, self.lengths[0]) for batch in self.batches]
        rows += [("divergence", "none", self.batches[0], length) for length in self.lengths[1:]]
        rows += [("stage-two", name, self.penalty_batch, self.penalty_length) for name in PENALTIES]
        return tuple(st.Cell(part=p, penalty=name, batch=b, length=t) for p, name, b, t in rows)

    def predict(self, key: st.Key) -> st.Record:
        growths = []
        for cell in self.cells():
            task = self._task(np.random.default_rng(0), int(cell["length"]))
            found = divergence_growth(task, int(cell["batch"]), self.duration)
            growths.append(found if cell["part"] == "divergence" else np.nan)
        task = self._task(np.random.default_rng(0), self.penalty_length)
        ratio = penalty_ratio(task, self._penalty(task, "theory"), self.penalty_batch)
        plain, records = setups.steps_of(task, self.growth, self.penalty_batch), self.steps // RECORDS
        path = setups.predict_signals(task, plain, np.arange(0, self.steps + 1, records), (INIT, INIT))
        noise = remaining_noise(ratio, self.growth, float(path.value_signal[-1]))
        return {
            "setting": ("setting", [cell.slug for cell in self.cells()], "cell", None),
            "growth": ("setting", growths, THRESHOLD),
            "ratio": ((), ratio, "the authors' penalty, in standard deviations of the gradient"),
            "noise": ((), noise, "noise of the attention under it", "that without"),
        }

    def train(self, key: st.Key, part: str, penalty: str, batch: int, length: int) -> st.Record:
        seed = setups.replicate_seed(key)
        task = self._task(np.random.default_rng([*seed, 3]), length)
        growth, lowest, noise = np.nan, np.nan, np.nan
        if part == "divergence":
            growth = divergence_threshold(task, batch, self.duration, GRAIN, seed=seed)
        else:
            plain, init = setups.steps_of(task, self.growth, batch), setups.partial_solution(task, INIT)
            settings = replace(plain, penalty=self._penalty(task, penalty))
            seen = record(task, init, settings, self.steps, RECORDS, seed=seed)
            away = np.array(seen.state.attention, float)
            np.put_along_axis(away, task.positions, 0.0, axis=1)
            lowest, noise = float(seen.excess.min()), float((away**2).sum(1).mean())
        return {
            "growth": ((), growth, THRESHOLD),
            "excess": ((), lowest, "smallest excess loss over the initial one"),
            "noise": ((), noise, "squared norm of the other positions' weights, at the end"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        found, law = (data["growth"].sel(part="divergence", penalty="none", drop=True) for data in (trained, theory))
        along_batch = {"batch": list(self.batches), "length": self.lengths[0]}
        along_length = {"length": list(self.lengths), "batch": self.batches[0]}
        by_batch = st.exponent(found.sel(along_batch, drop=True), "batch", predicted=law.sel(along_batch))
        by_length = st.exponent(found.sel(along_length, drop=True), "length", predicted=law.sel(along_length))
        yield st.Claim(
            f"From scratch the largest stable learning rate grows as the root of the batch, {self.batches[0]} to "
            f"{self.batches[-1]} samples (exponent)",
            by_batch,
            st.near(0.5, 0.1),
            f"the growth per step, up to a fifth, shifts the ends by a tenth; the search by {math.log2(GRAIN):.2f}",
            "exponent of the batch",
        )
        text = "The largest stable learning rate does not depend on the batch (exponent)"
        yield st.Claim(text, by_batch, st.near(0, 0.1), "as above", "exponent of the batch", "refuted")
        ends = f"{self.lengths[0]} to {self.lengths[-1]} tokens"
        text = f"The largest stable learning rate falls as the root of the length, {ends} (exponent)"
        yield st.Claim(text, by_length, st.near(-0.5, 0.1), "as above", "exponent of the length")
        yield st.Claim(
            "The mean squares of signals and noise predict the threshold (ratio)",
            st.ratio(found, law),
            st.near(1, 0.25),
            "the residual's own noise is taken as isotropic over the values' directions, an order-one part of the "
            "noise at the threshold; and single runs diverge before their mean",
            "threshold, measured over predicted",
            resolution=GRAIN - 1,
        )
        second = trained.sel(part="stage-two", batch=self.penalty_batch, length=self.penalty_length, drop=True)
        excess, noise = (second[name] / second[name].sel(penalty="none") for name in ("excess", "noise"))
        doublings = "excess loss with the penalty over that without (log2)"
        yield st.Claim(
            f"In stage two the authors' penalty, epsilon = {self.precision:g}, halves the smallest excess loss at "
            f"batches of {self.penalty_batch} (in doublings)",
            np.log2(excess.sel(penalty="theory")),
            st.below(-1),
            "the claim as a bound",
            doublings,
            "refuted",
            resolution=setups.ROUNDING,
        )
        yield st.Claim(
            "The authors' penalty reduces the noise of the attention as a penalty of so many standard deviations does "
            "(ratio of squared norms)",
            noise.sel(penalty="theory"),
            st.near(theory["noise"], 0.05),
            "a twentieth: the signal of the values enters squared, and is predicted to a fiftieth",
            "squared norm of the noise with the penalty over that without",
            resolution=setups.ROUNDING,
        )
        text = f"A penalty of {self.ratio:g} standard deviations halves the smallest excess loss (in doublings)"
        figure = np.log2(excess.sel(penalty="noise"))
        basis = "an inequality"
        yield st.Claim(text, figure, st.below(-1), basis, doublings, resolution=setups.ROUNDING)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        task = self._task(np.random.default_rng(0), self.penalty_length)
        excess = trained["excess"].sel(part="stage-two").mean(["replicate", "batch", "length"])
        penalties = {name: self._penalty(task, name) for name in PENALTIES}
        rows = (
            {
                "penalty": label,
                "lambda": f"{penalties[name]:.2g}",
                "standard deviations": f"{penalty_ratio(task, penalties[name], self.penalty_batch):.3g}",
                "smallest excess loss": f"{float(excess.sel(penalty=name)):.3f}",
            }
            for name, label in PENALTIES.items()
        )
        yield st.table("Stage two by penalty", rows, "Means over replicates, raw iterates.")

    def _penalty(self, task: BigramTask, name: str) -> float:
        if name == "theory":
            return theory_penalty(task, self.precision)
        noise = (task.transition_squared_norm / self.penalty_batch) ** 0.5
        return self.ratio * noise if name == "noise" else 0.0

    def _task(self, rng: np.random.Generator, length: int) -> BigramTask:
        return setups.with_equal_weights(draw_bigram_task(rng, self.vocabulary, length, self.sparsity))
