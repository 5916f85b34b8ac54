"""`bigram/frequencies`: other token frequencies, and transfer across frequencies, structures and transitions.

Tokens that are not equally frequent, or not distributed as the transition's stationary distribution, from scratch; and
how many samples values need that were pretrained elsewhere.
"""

from dataclasses import replace

import numpy as np

import manyheads.study as st
from manyheads.theory.bigram.searches import GRAIN, geometric_mean, search
from manyheads.theory.bigram.setups import balanced_steps, replicate_seed, share_of_right_positions, signal_system
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task, draw_correlated
from manyheads.theory.bigram.theorems import frequencies as theorem
from manyheads.theory.bigram.theorems.signal import predict_escape
from manyheads.theory.bigram.training.plateau_escape import median_escape, sgd_escape, uniform_values
from manyheads.theory.bigram.training.proximal_sgd import State, descend, initial_state
from manyheads.theory.bigram.transfer import predict_transfer
from manyheads.theory.papers import REN

KINDS = ("equal", "unequal", "shifted", "uniform-values")
SOURCES = ("structure", "frequencies", "transition")
GROWTH, SPACING = 0.05, 2  # growth per step; steps between two records
REACH = 30  # e-foldings allowed
QUIET = 0.1  # noise of the pretraining over that of the training from scratch
LATER = 3  # e-foldings that pretraining goes on after the escape


LABELS = {
    "time": ("plateau escape, in e-foldings",),
    "flipped": ("share of runs with flipped signs",),
    "support": ("share of queries with the right positions, signs corrected",),
    "moved": ("largest change of the mean prediction",),
    "offset": ("excess loss of the mean prediction",),
    "samples": ("samples until all positions rank first", "samples"),
    "correlation": ("correlation of the values with the transition",),
}


class Frequencies(st.Study):
    """Signs, escape and positions by token frequencies, and samples of transferred values by where they come from.

    The weights of a query's positions are equal; every replicate draws its own positions.
    """

    name = "bigram/frequencies"
    claim = "The laws hold at any token frequencies; values transfer across frequencies and structures"
    source = REN.at("reviews and answers: other stationary distributions; derived here")

    length: int = st.setting(500, "T of the task", small=100, full=4000)
    vocabulary: int = st.setting(3, "N of the task", least=3, full=5)
    sparsity: int = st.setting(2, "Q of the task")
    source_length: int = st.setting(60, "length of the pretraining, on one position a query", small=20, full=500)
    noise: float = st.setting(4.0, "noise-to-signal ratio kappa2", small=8.0)
    correlation: float = st.setting(0.5, "of the other transition with the task's", above=0, below=1)
    runs: int = st.setting(64, "trainings from scratch of a replicate and a cell", least=1, small=32)
    searches: int = st.setting(8, "searches with transferred values of a replicate and a cell", least=1, small=1)
    task: int = st.setting(4, "seed of the transitions")

    def cells(self) -> tuple[st.Cell, ...]:
        """Return training from scratch for every kind of frequencies, and transfer from every source."""
        pairs = [*(("scratch", kind) for kind in KINDS), *(("transfer", kind) for kind in SOURCES)]
        return tuple(st.Cell(training=training, kind=kind) for training, kind in pairs)

    def predict(self, key: st.Key) -> st.Record:
        rng, systems = np.random.default_rng(0), {}
        for kind in KINDS:
            task = self._task(kind, rng)
            mean = _initial(task, kind).value @ task.stationary
            systems[kind] = replace(
                signal_system(task, balanced_steps(task, GROWTH, self.noise)),
                vocabulary=theorem.effective_vocabulary(task, mean),  # type: ignore[arg-type]
            )
        times = [predict_escape(system) * np.log1p(system.growth) for system in systems.values()]
        target = self._task("equal", rng)
        samples = predict_transfer(target, target.centred)
        return {
            "kind": ("kind", list(KINDS), "frequencies of the tokens", None),
            "flipped": ("kind", [each.flip_probability for each in systems.values()], "probability of sign flips"),
            "time": ("kind", times, "plateau escape, in e-foldings"),
            "samples": ((), samples, "samples of the exact transition", "samples at a correlation of one"),
        }

    def train(self, key: st.Key, training: str, kind: str) -> st.Record:
        """Train from scratch to the escape, or pretrain and search for the samples that rank the positions."""
        seed, number = replicate_seed(key), self.cells().index(st.Cell(training=training, kind=kind))
        rng = np.random.default_rng([*seed, number])
        figures = dict.fromkeys(LABELS, np.nan)
        if training == "scratch":
            task = self._task(kind, rng)
            settings, start = balanced_steps(task, GROWTH, self.noise), _initial(task, kind)
            most = round(REACH / np.log1p(GROWTH))
            found = [
                sgd_escape(task, settings, SPACING, most, seed=[*seed, number, run], init=start)
                for run in range(self.runs)
            ]
            steps, flipped = np.array([(run.steps, run.flipped) for run in found]).T
            mean = start.value @ task.stationary
            figures |= {
                "time": median_escape(steps, flipped, most) * float(np.log1p(GROWTH)),
                "flipped": float(flipped.mean()),
                "support": float(np.mean([share_of_right_positions(task, run) for run in found])),
                "moved": max(float(np.abs(run.state.value @ task.stationary - mean).max()) for run in found),
                "offset": float(((mean + task.stationary - task.transition @ task.stationary) ** 2).sum()) / 2,
            }
        else:
            target, source = self._task("equal", rng), self._source(kind, rng)
            value = self._pretrain(source, [*seed, number])
            value = value - (value @ target.stationary)[:, None]
            norm = float(target.stationary @ (value**2).sum(0)) * target.transition_squared_norm
            inner = float(target.stationary @ (value * target.centred).sum(0))

            def score(counts: np.ndarray) -> np.ndarray:
                return np.einsum("ktyx,yx->kt", counts, value, optimize=True)[None]

            streams = rng.spawn(self.searches)
            found_samples = [search(each, self._task("equal", each), score)[0] for each in streams]
            figures |= {"samples": geometric_mean(found_samples), "correlation": inner / norm**0.5}
        return {name: ((), figures[name], *label) for name, label in LABELS.items()}

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        scratch, transfer = trained.sel(training="scratch", kind=list(KINDS)), trained.sel(training="transfer")
        yield st.Claim(
            "Under SGD the probability of flipped signs is Phi(-1/rho) with the effective vocabulary, for equal, "
            "unequal and shifted frequencies, and from uniform values (mean gap)",
            st.gap(scratch["flipped"], theory["flipped"]),
            st.near(0, 0.05),
            "noise after the first e-folding is weaker by the growth per step, .05",
            "share of sign flips, measured minus predicted",
            bounds=(-1, 1),
            resolution=1 / (self.runs * len(KINDS)),
        )
        yield st.Claim(
            "The signal system with the squared norms under the tokens' frequencies predicts the plateau escape (mean "
            "gap in e-foldings)",
            st.gap(scratch["time"], theory["time"]),
            st.near(0, 0.5),
            "half an e-folding",
            "escape time, measured minus predicted (e-foldings)",
            resolution=GROWTH,
        )
        yield st.Claim(
            "The right positions have the largest weights at the escape for all frequencies, signs corrected (share of "
            "queries with wrong ones)",
            1 - scratch["support"].mean("kind"),
            st.near(0, (0, 0.05)),
            "one query in twenty",
            "share of queries with wrong positions",
            bounds=(0, 1),
            resolution=1 / (self.runs * self.vocabulary * len(KINDS)),
        )
        uniform, task = scratch.sel(kind="uniform-values"), self._task("uniform-values", np.random.default_rng(0))
        yield st.Claim(
            "From uniform values 1/N the mean of the predictions never moves, so at unequal frequencies the excess "
            "loss keeps |1/N - mu|^2 / 2",
            uniform["moved"].max(),
            st.near(0, 1e-6),
            "an equality of the projected gradients: rounding of the sum of float32 attention, 1e-7",
            "largest change of the mean prediction",
        )
        yield st.Claim(
            "From uniform values at unequal frequencies training reaches the Bayes loss (what remains, over the "
            "initial excess of centred values)",
            uniform["offset"].min() / (task.weight_squared_norm * task.transition_squared_norm / 2),
            st.near(0, 0.05),
            "the claim as a bound: one twentieth",
            "excess loss that remains, relative",
            "refuted",
        )
        samples = transfer["samples"].sel(kind=list(SOURCES))
        yield st.Claim(
            "Values pretrained on another structure, under other frequencies, or on another transition need the "
            "samples of their correlation, C / rho^2 (mean log ratio)",
            st.log_ratio(samples * transfer["correlation"] ** 2, theory["samples"]),
            st.near(0, 2 * GRAIN),
            "two evaluations, each with 12% more samples than the previous one",
            "samples rho^2, measured over predicted (ln)",
            resolution=GRAIN / self.searches,
        )
        structure = samples.sel(kind="structure")
        yield st.Claim(
            "Values pretrained under other token frequencies need no more samples than under the task's own (log "
            "ratio)",
            st.log_ratio(samples.sel(kind="frequencies"), structure),
            st.near(0, np.log(1.5)),
            "a factor of 1.5, for the noise of both pretrainings: centred anew, both solutions are the same",
            "samples over those after pretraining under the same frequencies (ln)",
            resolution=GRAIN / self.searches,
        )
        yield st.Claim(
            f"Values pretrained on another transition, of correlation {self.correlation:g}, need no more samples "
            "either (log ratio)",
            st.log_ratio(samples.sel(kind="transition"), structure),
            st.near(0, np.log(1.5)),
            "as above; 1/rho^2 makes the factor four",
            "samples over those after pretraining on the same transition (ln)",
            "refuted",
            resolution=GRAIN / self.searches,
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        law = theory["samples"] / (trained["correlation"].sel(training="transfer") ** 2).mean("replicate")
        for training, kinds, name, label, predicted, shows in (
            ("scratch", KINDS, "flipped", "frequencies of the tokens", theory["flipped"], "Under SGD the probability"),
            ("transfer", SOURCES, "samples", "difference of the pretraining", law, "Values pretrained on another str"),
        ):
            measured, expected = (
                values.sel(kind=list(kinds)).assign_coords(kind=range(len(kinds)))
                for values in (trained[name].sel(training=training), predicted)
            )
            what, curves = LABELS[name][0], ({"measured": measured}, {"predicted": expected})
            title, note = f"{what.capitalize()}, by {label}", "Bars range over replicates."
            yield st.lines(title, "kind", what, *curves, x_label=label, x_ticks=kinds, note=note, shows=(shows,))

    def _drawn(self, uniform: bool) -> BigramTask:
        rng = np.random.default_rng(self.task)
        return draw_bigram_task(rng, self.vocabulary, self.length, self.sparsity, uniform=uniform)

    def _task(self, kind: str, rng: np.random.Generator) -> BigramTask:
        """Return the task of a kind with equal weights at positions drawn anew."""
        drawn = self._drawn(kind in ("equal", "shifted"))
        mu = theorem.increasing_frequencies(self.vocabulary) if kind == "shifted" else drawn.stationary
        shifted = theorem.ShiftedTask if kind == "shifted" else BigramTask
        return theorem.place_equally(shifted, drawn.transition, mu, self.length, self.sparsity, rng)

    def _source(self, kind: str, rng: np.random.Generator) -> BigramTask:
        drawn = self._drawn(True)
        transition, mu = drawn.transition, drawn.stationary
        if kind == "transition":
            away = draw_correlated(np.random.default_rng(self.task), drawn, self.correlation)
            transition = mu[:, None] + away * 0.9 * min(mu.min() / -away.min(), (1 - mu.max()) / away.max())
        if kind != "structure":
            mu = theorem.increasing_frequencies(self.vocabulary)
        return theorem.place_equally(theorem.ShiftedTask, transition, mu, self.source_length, 1, rng)

    def _pretrain(self, task: BigramTask, seed: list[int]) -> np.ndarray:
        """Train to the escape and somewhat on; return values of the right sign."""
        settings = balanced_steps(task, GROWTH, QUIET * self.noise)
        most = round(REACH / np.log1p(GROWTH))
        escape = sgd_escape(task, settings, SPACING, most, seed=seed)
        end = descend(task, escape.state, settings, round(LATER / GROWTH), seed=seed, first_step=most + SPACING)
        return -end.value if escape.flipped else end.value


def _initial(task: BigramTask, kind: str) -> State:
    return uniform_values(task) if kind == "uniform-values" else initial_state(task)
