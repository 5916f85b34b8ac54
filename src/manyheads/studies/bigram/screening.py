"""`bigram/screening`: samples of chi-square screening, of the position ranking and of the plateau escape by length."""

import numpy as np

import manyheads.study as st
from manyheads.theory.bigram.screening import chi_square, predict_screening
from manyheads.theory.bigram.searches import GRAIN, geometric_mean, search, search_by_training
from manyheads.theory.bigram.setups import redraw_positions, replicate_seed, signal_system
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems.sample_complexity import STAGE_ONE_OFFSET, predict_position_ranking
from manyheads.theory.bigram.theorems.signal import predict_escape
from manyheads.theory.bigram.training.plateau_escape import sgd_escape
from manyheads.theory.bigram.training.settings import FirstStage
from manyheads.theory.papers import REN

BATCH, NOISE_RATIO = 16, 4.0  # of the gradient training; the ratio is half of the safe one
PATIENCE = 6.0  # budget of the gradient training, in multiples of its predicted samples
LONG = 1000  # length from which the signals are small when the positions rank first
NAMES = {"samples": "screening", "ranked": "training: positions rank first", "escaped": "training: plateau escape"}
TWO_EVALUATIONS = "two evaluations, each with 12% more samples than the previous one, "


class ScreeningCost(st.Study):
    """Samples until screening, or gradient training, ranks all positions first, and until the loss leaves its plateau.

    A search has the same queries, targets and attended tokens at every length: the comparison is paired.
    """

    name = "bigram/screening"
    claim = "Screening finds the positions of a sparse contextual bigram in O(log T) samples"
    source = REN.at("abstract: from scratch it is polynomial in the length; screening and its samples are derived here")
    revision = 3
    grid = {"length": "lengths"}

    lengths: tuple[int, ...] = st.sweep(
        (250, 1000, 4000, 16_000), "context lengths T", small=(20, 40), full=(250, 1000, 4000, 16_000, 64_000)
    )
    trained_length: int = st.setting(4000, "longest context trained until the plateau escape", small=20, full=16_000)
    vocabulary: int = st.setting(3, "N of the task")
    sparsity: int = st.setting(2, "Q of the task")
    searches: int = st.setting(16, "searches, and trainings, whose geometric mean is a replicate", small=1)
    task: int = st.setting(4, "seed of the transition and the weights")

    def check(self) -> None:
        if not self.lengths[0] <= self.trained_length:
            raise st.UsageError(f"trained_length={self.trained_length}: give {self.lengths[0]} or more")

    def predict(self, key: st.Key) -> st.Record:
        """Return the predicted samples without a fit; ranking takes so many paths that their error is small."""
        tasks, rng = [self._screened(length) for length in self.lengths], np.random.default_rng(self.task)
        ranked = [geometric_mean(predict_position_ranking(task, NOISE_RATIO, rng, PATIENCE)) for task in tasks]
        escaped = [predict_escape(signal_system(task, self._stage(task).steps(task.length))) * BATCH for task in tasks]
        figures = {"samples": [predict_screening(task) for task in tasks], "ranked": ranked, "escaped": escaped}
        axis = {"length": ("length", list(self.lengths), "context length", "tokens")}
        return axis | {name: ("length", figures[name], label, "samples") for name, label in NAMES.items()}

    def train(self, key: st.Key, length: int) -> st.Record:
        """Draw samples until screening ranks all positions first; train by SGD until it does, and until it escapes."""
        streams = [stream.spawn(2) for stream in st.generator(key).spawn(self.searches)]  # the same at every length
        screened = [search(drawn, self._task(length, places), _statistics)[0] for places, drawn in streams]
        own = np.random.default_rng([*replicate_seed(key), length])  # trainings of different lengths are independent
        trainings = [(self._task(length, own), int(own.integers(2**31))) for _ in range(self.searches)]
        ranked = [self._train(*training) for training in trainings]
        escaped = self._escape(*trainings[0]) if length <= self.trained_length else np.nan
        figures = {"samples": geometric_mean(screened), "ranked": geometric_mean(ranked), "escaped": escaped}
        return {name: ((), figures[name], label, "samples") for name, label in NAMES.items()}

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        samples, ranked, escaped = (trained[name] for name in ("samples", "ranked", "escaped"))
        ends = [predict_screening(self._screened(length)) for length in (250, 64_000)]
        allowed = float(np.log(2.5) / np.log(ends[1] / ends[0]))
        slope = float(st.slope(st.log(theory["samples"]), "length", np.log(self.lengths)))
        last, trained_last = self.lengths[-1], max(n for n in self.lengths if n <= self.trained_length)
        long = [n for n in self.lengths if n >= min(LONG, last)] if last >= LONG else list(self.lengths)
        yield st.Claim(
            "The samples of screening grow no faster than the logarithm of the length (log-log slope)",
            st.exponent(samples, "length", "T"),
            st.near(slope, (np.inf, (allowed - 1) * slope)),
            f"the predicted slope at these lengths, and {allowed:.2f} times as much above: the prediction grows by "
            f"{ends[1] / ends[0]:.2f} from 250 to 64,000 tokens, 2.5 is allowed",
        )
        yield st.Claim(
            "The samples of screening follow from the task without a fitted constant (log ratio)",
            st.log_ratio(samples, theory["samples"], "length", "samples, measured over predicted (ln)"),
            st.near(0, 2 * GRAIN),
            f"{TWO_EVALUATIONS}for the non-central distribution of finite tables and for repeated evaluation",
            resolution=GRAIN / 2,
        )
        yield st.Claim(
            f"Gradient training needs more samples than screening to rank the positions first, at T = {last:,} (log "
            "ratio)",
            st.log_ratio(ranked.sel(length=last), samples.sel(length=last)),
            st.above(0),
            "an inequality: the log ratio is positive; an unsuccessful training counts with the samples it had, which "
            "favours it",
            "samples of gradient training over those of screening (ln)",
            resolution=GRAIN / 2,
        )
        yield st.Claim(
            f"From {LONG:,} tokens on, gradient training from scratch ranks the positions first after the samples that "
            "the linearized signal system with its noise predicts, without a fitted constant (log ratio)",
            st.log_ratio(ranked.sel(length=long), theory["ranked"].sel(length=long), "length"),
            st.near(0, 2 * GRAIN),
            f"{TWO_EVALUATIONS}as for screening; the prediction is a mean over 1600 paths; in shorter contexts the "
            "signals are no longer small by then",
            "samples until the positions rank first, measured over predicted (ln)",
            resolution=GRAIN / 2,
            prediction_error=0.025,
        )
        yield st.Claim(
            "The samples until gradient training ranks the positions first grow in proportion to the length (log-log "
            "slope)",
            st.exponent(ranked, "length", "T"),
            st.near(1, 0.1),
            "the exponent of the plateau escape, T ln T, is 1.14 at these lengths; that of sqrt(T ln T) is .56, and "
            "noise of the values lowers it further",
            expected="refuted",
        )
        yield st.Claim(
            f"The loss leaves its plateau only after the positions rank first, at T = {trained_last:,} (log ratio of "
            "samples)",
            st.log_ratio(escaped.sel(length=trained_last), ranked.sel(length=trained_last)),
            st.above(0),
            "an inequality: the log ratio is positive",
            "samples until the plateau escape over those until the positions rank first (ln)",
            resolution=GRAIN / 2,
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        title = "Samples until all positions are right, and until the plateau escape"
        curves = [{label: data[name] for name, label in NAMES.items()} for data in (trained, theory)]
        note = "Bands: replicates. Dashed: predictions without a fitted constant."
        shows = "grow no faster", "ranks the positions first after"
        yield st.lines(title, "length", "samples", *curves, log="xy", note=note, shows=shows)

    def _task(self, length: int, rng: np.random.Generator) -> BigramTask:
        task = draw_bigram_task(np.random.default_rng(self.task), self.vocabulary, 64, self.sparsity)
        return redraw_positions(task, length, rng)

    def _screened(self, length: int) -> BigramTask:
        return self._task(length, np.random.default_rng(0))

    def _stage(self, task: BigramTask) -> FirstStage:
        return FirstStage(task.transition_squared_norm, self.sparsity, batch=BATCH, noise_ratio=NOISE_RATIO)

    def _most_steps(self, task: BigramTask) -> int:
        return int(PATIENCE * (np.log(task.length) + STAGE_ONE_OFFSET) / self._stage(task).growth(task.length))

    def _train(self, task: BigramTask, seed: int) -> float:
        steps = self._stage(task).steps(task.length)
        return search_by_training(task, steps, self._most_steps(task), seed)

    def _escape(self, task: BigramTask, seed: int) -> float:
        """Return the samples until the plateau escape of the same training, its budget without one."""
        stage, most = self._stage(task), self._most_steps(task)
        every = max(1, round(0.1 / stage.growth(task.length)))
        return min(sgd_escape(task, stage.steps(task.length), every, most, seed=seed)[0], most) * BATCH


def _statistics(counts: np.ndarray) -> np.ndarray:
    return chi_square(counts)[0][None]
