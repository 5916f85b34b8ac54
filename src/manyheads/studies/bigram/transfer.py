"""`bigram/transfer`: samples of transfer by the correlation rho of a pretrained value matrix, and its pilot test."""

import math

import numpy as np

import manyheads.study as st
from manyheads.theory.bigram.screening import predict_screening
from manyheads.theory.bigram.searches import GRAIN, draw_uniform_batch, search
from manyheads.theory.bigram.setups import redraw_positions
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task, draw_correlated
from manyheads.theory.bigram.transfer import TransferSettings, predict_transfer, transfer_test
from manyheads.theory.papers import REN


class TransferCost(st.Study):
    """Samples until the scores of a pretrained value matrix rank all positions first, by correlation and length.

    A search has the same matrices, queries, targets and attended tokens at every length: the comparison is paired.
    """

    name = "bigram/transfer"
    claim = "A value matrix of correlation rho finds the positions in C/rho^2 samples"
    source = REN.at(
        "abstract: a positive correlation suffices for transfer; the dependence on rho and the test are derived here"
    )
    revision = 2
    grid = {"length": "lengths"}

    correlations: tuple[float, ...] = st.sweep(
        (1.0, 0.7, 0.5, 0.35, 0.25),
        "correlations rho with the new task",
        above=0,
        most=1,
        falling=True,
        small=(1.0, 0.7),
    )
    lengths: tuple[int, ...] = st.sweep(
        (250, 2000, 16_000), "context lengths T", small=(20, 40), full=(250, 1000, 4000, 16_000, 64_000)
    )
    pilot: int = st.setting(8000, "samples of `transfer_test`", small=400)
    searches: int = st.setting(12, "searches, whose geometric mean is a replicate", small=1)
    vocabulary: int = st.setting(3, "N of the task")
    sparsity: int = st.setting(2, "Q of the task")
    task: int = st.setting(4, "seed of the transition and the weights")

    def predict(self, key: st.Key) -> st.Record:
        tasks = [self._task(length, np.random.default_rng(0)) for length in self.lengths]
        needed = [predict_transfer(task, task.centred) for task in tasks]
        return {
            "length": ("length", list(self.lengths), "context length", "tokens"),
            "constant": ("length", needed, "samples at a correlation of one", "samples"),
            "screening": ("length", [predict_screening(task) for task in tasks], "screening", "samples"),
        }

    def train(self, key: st.Key, length: int) -> st.Record:
        """Draw samples until the scores of every matrix rank all positions first, and test every matrix on a pilot."""
        figures: list[np.ndarray] = []
        tested: list[tuple[float, float, float]] = []
        for stream in st.generator(key).spawn(self.searches):  # the same at every length
            places, matrices, samples, pilots = stream.spawn(4)
            task = self._task(length, places)
            values = np.stack([draw_correlated(matrices, task, rho) for rho in self.correlations])  # (R, N, N)

            def score(counts: np.ndarray, values: np.ndarray = values) -> np.ndarray:
                return np.einsum("ktyx,ryx->rkt", counts, values, optimize=True)

            figures.append(search(samples, task, score))
            tested = tested or self._test(pilots, task, values)  # one pilot a replicate
        estimates, deviations, strongest = np.transpose(tested)
        along = "correlation"
        return {
            along: (along, list(self.correlations), "correlation of the old with the new task"),
            "samples": (along, np.exp(np.log(figures).mean(0)), "samples until all positions rank first", "samples"),
            "estimate": (along, estimates, "correlation estimated by the pilot"),
            "screened": (along, deviations, "the same with the right positions"),
            "strongest": (along, strongest, "largest score of the pilot", "standard deviations"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        samples, rho = trained["samples"], trained["correlation"]
        constant = (samples * rho**2).prod("correlation", skipna=False) ** (1 / len(rho))  # geometric means
        constant = constant.assign_attrs(long_name="samples times rho^2")
        typical = samples.prod("length", skipna=False) ** (1 / len(self.lengths))
        tasks = [self._task(length, np.random.default_rng(0)) for length in (250, 64_000)]
        ends = [predict_transfer(task, task.centred) for task in tasks]
        allowed = math.log(2.5) / math.log(ends[1] / ends[0])
        slope = float(st.slope(st.log(theory["constant"]), "length", np.log(self.lengths)))
        strong = [each for each in self.correlations if each >= 0.5]
        error = math.sqrt(2 * self.sparsity / self.pilot) * self.vocabulary / strong[-1]
        yield st.Claim(
            "The samples scale as the inverse square of the correlation (exponent of rho)",
            st.exponent(typical, "correlation", "rho"),
            st.near(-2, math.log(1.6) / math.log(self.correlations[0] / self.correlations[-1])),
            "samples times rho^2 within a factor 1.6 from the largest to the smallest correlation",
        )
        yield st.Claim(
            "The constant C follows from the task without a fit, from normal scores (log ratio)",
            st.log_ratio(constant, theory["constant"], "length"),
            st.near(0, 2 * GRAIN),
            "two evaluations, each with 12% more samples than the previous one, for repeated evaluation and for scores "
            "of few samples that are not normal",
            "samples, measured over predicted (ln)",
            resolution=GRAIN / 2,
        )
        yield st.Claim(
            "The constant C grows no faster than the logarithm of the length (log-log slope)",
            st.exponent(constant, "length", "T"),
            st.near(slope, (math.inf, (allowed - 1) * slope)),
            f"the predicted slope at these lengths, and {allowed:.2f} times as much above: the prediction grows by "
            f"{ends[1] / ends[0]:.2f} from 250 to 64,000 tokens, 2.5 is allowed",
        )
        yield st.Claim(
            "A pilot estimates correlations of a half or more without bias (estimate over truth)",
            (trained["estimate"] / rho).sel(correlation=strong).mean(["length", "correlation"]),
            st.near(1, max(0.1, error)),
            "the standard error of a half pilot at a correlation of a half, at least a tenth for wrong positions "
            "picked by the first half",
            "estimated over true correlation",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        rho, constant, screening = trained["correlation"], theory["constant"], theory["screening"]
        title, what = "Samples until all positions are right", "samples until all positions rank first [samples]"
        found = {f"{length:,} tokens": trained["samples"].sel(length=length) for length in self.lengths}
        law = {f"{length:,} tokens": constant.sel(length=length) / rho**2 for length in self.lengths}
        note = "Bands: replicates. Dashed: C/rho^2 with C from the task, no fitted constant."
        yield st.lines(title, "correlation", what, found, law, log="xy", note=note, shows=("inverse square",))
        last, what = trained.isel(length=-1), "estimated correlation"
        title = f"Estimate of a pilot of {self.pilot:,} samples, {self.lengths[-1]:,} tokens"
        found = {"positions picked by the pilot": last["estimate"], "right positions": last["screened"]}
        note, shows = "Bands: replicates. Grey: the true correlation.", ("A pilot estimates",)
        yield st.lines(title, "correlation", what, found, reference={"truth": rho}, note=note, shows=shows)
        rows = (
            {
                "tokens": f"{length:,}",
                "predicted C": f"{float(constant[place]):,.0f}",
                "predicted screening": f"{float(screening[place]):,.0f}",
                "break-even rho": f"{float((constant / screening)[place] ** 0.5):.2f}",
            }
            for place, length in enumerate(self.lengths)
        )
        note = "At the break-even correlation both predictions agree; below, that of screening is smaller."
        yield st.table("Pretrained matrix or screening", rows, note)

    def _test(self, rng: np.random.Generator, task: BigramTask, values: np.ndarray) -> list[tuple[float, float, float]]:
        """Return rho at the picked positions, at the right ones, and the largest score of every matrix on a pilot."""
        pilot = draw_uniform_batch(rng, task, self.pilot)
        settings = TransferSettings(squared_norm=task.transition_squared_norm)
        right = pilot.tokens[np.arange(self.pilot)[:, None], task.positions[pilot.queries]]  # (B, Q)
        found = []
        for value in values:
            test = transfer_test(value, pilot, self.sparsity, settings=settings)
            norm = float(task.stationary @ (value**2).sum(0)) ** 0.5
            known = float(value[pilot.targets[:, None], right].sum(1).mean()) / norm / task.transition_squared_norm**0.5
            found.append((test.correlation, known, test.strongest))
        return found

    def _task(self, length: int, rng: np.random.Generator) -> BigramTask:
        drawn = draw_bigram_task(np.random.default_rng(self.task), self.vocabulary, 64, self.sparsity)
        return redraw_positions(drawn, length, rng)
