"""`bigram/sparsity`: samples by the number Q of attended positions, from scratch, with pretrained values, by screening.

All positions of a query have equal weight 1/Q. From scratch the samples follow from the squared norm K_Q = 1/Q - 1/T of
the attention; scores and chi-square statistics see one position at a time, whose signal is 1/Q.
"""

import math
from dataclasses import replace

import numpy as np

import manyheads.study as st
from manyheads.theory.bigram.screening import chi_square, predict_screening
from manyheads.theory.bigram.searches import GRAIN, geometric_mean, search
from manyheads.theory.bigram.setups import balanced_steps, replicate_seed, signal_system
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems.sample_complexity import STAGE_ONE_OFFSET
from manyheads.theory.bigram.theorems.signal import predict_escape
from manyheads.theory.bigram.training.plateau_escape import median_escape
from manyheads.theory.bigram.training.reduced_model import find_escape
from manyheads.theory.bigram.transfer import predict_transfer
from manyheads.theory.papers import REN

NAMES = {
    "escaped": "from scratch: plateau escape",
    "transferred": "pretrained values: positions rank first",
    "screened": "screening: positions rank first",
}
FIRST_GROWTH = 0.05  # growth per step of the training from scratch


class Sparsity(st.Study):
    """Samples by the number of attended positions, at one length."""

    name = "bigram/sparsity"
    claim = "Samples grow as Q from scratch, and as Q^2 where positions are scored one by one"
    source = REN.at("abstract: poly(N, Q) samples; the powers of Q are derived here")
    grid = {"sparsity": "sparsities"}

    sparsities: tuple[int, ...] = st.sweep((1, 2, 4, 8), "numbers of positions Q", small=(1, 2), full=(1, 2, 4, 8, 16))
    length: int = st.setting(1000, "T", small=30, full=8000)
    vocabulary: int = st.setting(3, "N")
    noise: float = st.setting(4.0, "noise-to-signal ratio kappa_2 of the training from scratch")
    runs: int = st.setting(100, "trainings in the reduced model, whose median is a replicate", small=8)
    searches: int = st.setting(8, "searches, whose geometric means are a replicate", small=1)
    task: int = st.setting(4, "seed of the transition")

    def check(self) -> None:
        if self.length < 2 * self.sparsities[-1] + 3:
            raise st.UsageError(f"length={self.length}: give more than twice the largest of {self.sparsities}")

    def predict(self, key: st.Key) -> st.Record:
        tasks = [self._task(sparsity, np.random.default_rng(0)) for sparsity in self.sparsities]
        steps = [balanced_steps(task, FIRST_GROWTH, self.noise) for task in tasks]
        systems = [signal_system(task, settings) for task, settings in zip(tasks, steps, strict=True)]
        figures = {
            "escaped": [predict_escape(system) * system.batch for system in systems],
            "transferred": [predict_transfer(task, task.centred) for task in tasks],
            "screened": [predict_screening(task) for task in tasks],
        }
        axis = {"sparsity": ("sparsity", list(self.sparsities), "attended positions Q")}
        return axis | {name: ("sparsity", figures[name], label, "samples") for name, label in NAMES.items()}

    def train(self, key: st.Key, sparsity: int) -> st.Record:
        rng = np.random.default_rng([*replicate_seed(key), sparsity])
        task = self._task(sparsity, rng)
        settings = balanced_steps(task, FIRST_GROWTH, self.noise)
        most = int(4 * (np.log(self.length) + STAGE_ONE_OFFSET) / FIRST_GROWTH)
        escape = find_escape(task, settings, self.runs, rng, most_steps=most)
        steps = np.where(escape.outcome == "escaped", escape.steps, most)

        def scores(counts: np.ndarray) -> np.ndarray:
            by_values = np.einsum("ktyx,yx->kt", counts, task.centred, optimize=True)
            return np.stack([by_values, chi_square(counts)[0]])

        found = np.array([search(stream, self._task(sparsity, stream), scores) for stream in rng.spawn(self.searches)])
        figures = [median_escape(steps, escape.flipped, most) * settings.batch, *map(geometric_mean, found.T)]
        return {name: ((), value, NAMES[name], "samples") for name, value in zip(NAMES, figures, strict=True)}

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        q = self.sparsities
        doublings = math.log2(q[-1] / q[0])
        half = 0.5 / doublings
        extremes = [math.sqrt(2 * math.log(self.vocabulary * entries)) for entries in (self.length, q[0], q[-1])]
        logarithm = 2 * math.log2((extremes[0] + extremes[2]) / (extremes[0] + extremes[1])) / doublings
        above = f"above, {logarithm:.2f} for the largest of NQ entries"
        more = f"a factor of 1.4 over {doublings:g} doublings of Q; {above}"
        yield st.Claim(
            "From scratch the samples of the plateau escape grow no faster than Q, at a fixed noise-to-signal ratio "
            "(exponent)",
            st.exponent(trained["escaped"], "sparsity", "Q"),
            st.below(1),
            "K_Q is 1/Q - 1/T, and the drift 1/(T K_Q) from which the signals grow is larger for more positions",
        )
        yield st.Claim(
            "With pretrained values of correlation one the samples grow as Q^2 up to logarithms (exponent)",
            st.exponent(trained["transferred"], "sparsity", "Q"),
            st.near(2, (half, half + logarithm)),
            f"a position has the signal 1/Q; {more}",
        )
        yield st.Claim(
            "The samples of screening grow as Q^2 up to logarithms (exponent)",
            st.exponent(trained["screened"], "sparsity", "Q"),
            st.near(2, (half, half + logarithm)),
            f"the statistic of a position has the signal 1/Q^2 and the noise of its root; {more}",
        )
        for name, words in (("escaped", "of the plateau escape"), ("transferred", "with pretrained values")):
            yield st.Claim(
                f"The samples {words} follow from the task at every Q, without a fitted constant (log ratio)",
                st.log_ratio(trained[name], theory[name], "sparsity"),
                st.near(0, 2 * GRAIN),
                "two evaluations, each with 12% more samples than the previous one",
                "samples, measured over predicted (ln)",
                resolution=GRAIN / 2,
            )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        title = f"Samples by the number of attended positions, {self.length:,} tokens"
        curves = [{label: data[name] for name, label in NAMES.items()} for data in (trained, theory)]
        note = "Bands: replicates. Dashed: predictions without a fitted constant."
        shows = "From scratch the samples", "With pretrained values of"
        yield st.lines(title, "sparsity", "samples", *curves, log="xy", note=note, shows=shows)

    def _task(self, sparsity: int, rng: np.random.Generator) -> BigramTask:
        """Return one transition with equal weights at random positions."""
        drawn = draw_bigram_task(np.random.default_rng(self.task), self.vocabulary, self.length, 1)
        positions = [np.sort(rng.choice(self.length, sparsity, replace=False)) for _ in range(self.vocabulary)]
        weights = np.full((self.vocabulary, sparsity), 1 / sparsity)
        return replace(drawn, positions=np.stack(positions), weights=weights)
