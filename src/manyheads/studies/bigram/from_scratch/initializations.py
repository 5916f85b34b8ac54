"""`bigram/initializations`: training from scratch from uniform, perturbed and small random values and attention.

How often do the signs come out wrong, when does the plateau end, and are the positions right? The reduced model at a
long context, SGD at a short one, and softmax attention, whose weights cannot be negative, are held against the closed
forms of `manyheads.theory.bigram.theorems.initialization`.
"""

from dataclasses import replace

import numpy as np

import manyheads.study as st
from manyheads.theory.bigram import BigramTask, draw_bigram_task, setups
from manyheads.theory.bigram.theorems import initialization
from manyheads.theory.bigram.theorems.signal import SignalSystem, predict_escape
from manyheads.theory.bigram.training import plateau_escape, proximal_sgd, reduced_model
from manyheads.theory.bigram.training.plateau_escape import SgdEscape, median_escape, sgd_escape
from manyheads.theory.papers import REN

SPREADS = {"uniform": 0.0, "values-1": 1.0, "values-3": 3.0, "attention-1": 1.0}  # in drifts
LINEAR = ("reduced", "sgd")  # engines of linear attention
KINDS = (*SPREADS, "normal")
GROWTH = 0.05  # per step
SPACING, SPACING_SOFTMAX = 2, 20  # steps between two records of SGD
REACH = 60  # e-foldings allowed; linear attention needs less than 20
TIME = "plateau escape, in e-foldings"
EXACT = "plateau escape of softmax attention without noise, in e-foldings"


class Initializations(st.Study):
    """Signs, escape time and positions by initialization, for equal weights of a query's positions."""

    name = "bigram/initializations"
    claim = "Initial values above the drift 1/(T K_Q) flip half of the signs; softmax corrects them"
    source = REN.at("reviews and answers: other initializations; all predictions derived here")

    length: int = st.setting(500, "context length T of SGD", small=40, full=4000)
    longest: int = st.setting(100_000, "T of the reduced model", small=100, full=100_000_000)
    exact: int = st.setting(8000, "T of softmax attention under exact gradients", small=100)
    vocabulary: int = st.setting(3, "N")
    sparsity: int = st.setting(2, "Q")
    noise: float = st.setting(4.0, "noise-to-signal ratio kappa2")
    std: float = st.setting(0.02, 'std of the values in the initialization "normal"', above=0)
    wrong: tuple[float, ...] = st.sweep(
        (1.0, 1.5, 2.0), "values of the wrong sign in drifts 1/(T K_Q); SGD from the middle", least=0, small=(0.5, 1.0)
    )
    runs: int = st.setting(64, "runs of linear attention in a replicate and a cell", least=1, small=6, full=128)
    heads: int = st.setting(32, "runs of softmax attention under SGD", least=1, small=2)

    def check(self) -> None:
        if self.length < 2 * self.sparsity + 3:
            raise st.UsageError(f"length={self.length}: give more than twice the positions, {self.sparsity}")

    def cells(self) -> tuple[st.Cell, ...]:
        """Return linear attention from every initialization, and both kinds of attention from the wrong sign."""
        linear = [(engine, kind) for engine in LINEAR for kind in KINDS]
        pairs = [*linear, ("sgd", "wrong-sign"), ("softmax", "wrong-sign"), ("softmax", "normal"), ("exact", "softmax")]
        return tuple(st.Cell(engine=engine, init=kind) for engine, kind in pairs)

    def predict(self, key: st.Key) -> st.Record:
        shares, times = [], []
        for engine, init in (map(str, cell.values()) for cell in self.cells()):
            task = self._task(np.random.default_rng(0), engine)
            system = self._system(task)
            spread = self._spread(task, init)
            shift = -self._middle if init == "wrong-sign" else 0.0
            linear = engine in LINEAR
            shares.append(system.flip_probability_from(spread, shift) if linear else 0.0)
            known = linear and not shift
            times.append(predict_escape(system, spread=spread) * np.log1p(GROWTH) if known else np.nan)
        task = self._task(np.random.default_rng(0), "exact")
        return {
            "setting": ("setting", [cell.slug for cell in self.cells()], "cell", None),
            "wrong": ("wrong", list(self.wrong), "initial values of the wrong sign, in drifts"),
            "flipped": ("setting", shares, "probability of flipped signs"),
            "time": ("setting", times, TIME),
            "exact_time": ("wrong", [self._softmax_time(task, c) for c in self.wrong], EXACT),
        }

    def train(self, key: st.Key, engine: str, init: str) -> st.Record:
        """Train to the plateau escape; return its median time, the share of flipped signs, and of right positions."""
        seed, number = setups.replicate_seed(key), self.cells().index(st.Cell(engine=engine, init=init))
        rng = np.random.default_rng([*seed, number])
        task = self._task(np.random.default_rng([*seed, 3]), engine)
        settings, exact, support = (self._settings(task), np.full(len(self.wrong), np.nan), np.nan)
        steps, flipped = np.full(1, np.nan), np.zeros(1, bool)
        if engine == "exact":
            starts = [-c * self._system(task).drift * task.centred for c in self.wrong]
            escapes = [plateau_escape.exact_softmax_escape(task, value, settings, self._most) for value in starts]
            exact = np.array(escapes) * np.log1p(GROWTH)
        elif engine == "reduced":
            runs = plateau_escape.perturbed_runs(rng, task, *self._stds(task, init), self.runs)
            escape = reduced_model.find_escape(task, settings, self.runs, rng, most_steps=self._most, init=runs)
            steps, flipped = np.where(escape.outcome == "escaped", escape.steps, np.inf), escape.flipped
        else:
            count = self.heads if engine == "softmax" else self.runs
            found = [self._sgd(rng, task, engine, init, [*seed, number, run]) for run in range(count)]
            steps, flipped = np.array([(run.steps, run.flipped) for run in found]).T
            support = float(np.mean([setups.share_of_right_positions(task, run) for run in found]))
        return {
            "wrong": ("wrong", list(self.wrong), "initial values of the wrong sign, in drifts"),
            "time": ((), median_escape(steps, flipped, self._most) * np.log1p(GROWTH), TIME),
            "flipped": ((), float((flipped != 0).mean()), "share of runs with flipped signs"),
            "escaped": ((), float(np.isfinite(steps).mean()), "share of runs that escaped"),
            "support": ((), support, "share of queries with the right positions, signs corrected"),
            "exact_time": ("wrong", exact, EXACT),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        gaps = {name: trained[name] - theory[name] for name in ("flipped", "time")}
        reduced, sgd = f"In the reduced model at T = {self.longest:,}", f"Under SGD at T = {self.length:,}"
        every = [*KINDS, "wrong-sign"]
        yield st.Claim(
            f"{reduced} initial signals of s drifts lead to flipped signs with probability Phi(-1 / sqrt(rho^2 + "
            "s^2)), the noise that they add included (mean gap)",
            gaps["flipped"].sel(engine="reduced", init=list(KINDS)).mean("init"),
            st.near(0, 0.05),
            "noise after the first e-folding is weaker by the growth per step, .05",
            "share of sign flips, measured minus predicted",
            bounds=(-1, 1),
            resolution=1 / (self.runs * len(KINDS)),
        )
        yield st.Claim(
            f"{sgd} the share of flipped signs is Phi(-1 / sqrt(rho^2 + s^2)), values of the wrong sign included (mean "
            "gap)",
            gaps["flipped"].sel(engine="sgd", init=every).mean("init"),
            st.near(0, 0.1),
            "at lengths of hundreds noise of order 1/ln T is added: a tenth",
            "share of sign flips, measured minus predicted",
            bounds=(-1, 1),
            resolution=1 / (self.runs * len(every)),
        )
        for engine, words in (("reduced", reduced), ("sgd", sgd)):
            yield st.Claim(
                f"{words} the signal system predicts the plateau escape from every initialization (gap in e-foldings)",
                gaps["time"].sel(engine=engine, init=list(KINDS)).mean("init"),
                st.near(0, 0.5),
                "half an e-folding",
                "escape time, measured minus predicted (e-foldings)",
                resolution=GROWTH,
            )
        yield st.Claim(
            "Under SGD the right positions have the largest weights at the escape, from every initialization, once the "
            "sign is corrected (share of queries with wrong ones)",
            1 - trained["support"].sel(engine="sgd", init=every).mean("init"),
            st.near(0, (0, 0.05)),
            "one query in twenty",
            "share of queries with wrong positions",
            bounds=(0, 1),
            resolution=1 / (self.runs * self.vocabulary * len(every)),
        )

        wrong = f"From values of the wrong sign, {self._middle:g} drifts,"
        once = "one run in twenty"
        for text, engine, init, basis in (
            (f"Under SGD values of standard deviation {self.std:g} reach the right signs", "sgd", "normal", once),
            (f"{wrong} linear attention reaches the right signs", "sgd", "wrong-sign", once),
            (
                f"{wrong} softmax attention reaches the right signs",
                "softmax",
                "wrong-sign",
                f"{once} as above; none is expected: weights of the sign-flipped solution are negative",
            ),
        ):
            linear = engine in LINEAR
            yield st.Claim(
                f"{text} (share of flips)",
                trained["flipped"].sel(engine=engine, init=init),
                st.near(0, 0.05),
                f"the claim as a bound: {basis}" if linear else basis,
                "share of sign flips",
                "refuted" if linear else "holds",
                bounds=(0, 1),
                resolution=1 / (self.runs if linear else self.heads),
            )
        yield st.Claim(
            f"From values of standard deviation {self.std:g} softmax heads leave the plateau within {REACH} e-foldings "
            "(share that stays)",
            1 - trained["escaped"].sel(engine="softmax", init="normal"),
            st.near(0, 0.05),
            "the claim as a bound; a wrong sign of 2.5 drifts takes longer to correct",
            "share of heads on the plateau",
            "refuted",
            bounds=(0, 1),
            resolution=1 / self.heads,
        )
        yield st.Claim(
            "Without noise a softmax head corrects a wrong sign of c drifts in 2 int_0^c exp((c^2 - s^2)/2) ds "
            "e-foldings, and goes on as from the right sign (gap in e-foldings)",
            st.gap(trained["exact_time"].sel(engine="exact", init="softmax", drop=True), theory["exact_time"], "wrong"),
            st.near(0, 0.25),
            "the growth per step, .05, times the e-foldings of turning around and of saturation",
            "escape time, measured minus predicted (e-foldings)",
            resolution=GROWTH / 10,
        )

    @property
    def _middle(self) -> float:
        return self.wrong[len(self.wrong) // 2]

    @property
    def _most(self) -> int:
        return round(REACH / np.log1p(GROWTH))

    def _task(self, rng: np.random.Generator, engine: str) -> BigramTask:
        length = {"reduced": self.longest, "exact": self.exact}.get(engine, self.length)
        return setups.with_equal_weights(draw_bigram_task(rng, self.vocabulary, length, self.sparsity))

    def _settings(self, task: BigramTask) -> proximal_sgd.StepSettings:
        return setups.balanced_steps(task, GROWTH, self.noise)

    def _system(self, task: BigramTask) -> SignalSystem:
        return setups.signal_system(task, self._settings(task))

    def _stds(self, task: BigramTask, kind: str) -> tuple[float, float]:
        """Return the standard deviations of values and, relative to 1/T, of the attention."""
        if kind == "normal":
            return self.std, 0.0
        size = SPREADS.get(kind, 0.0)
        values, attention = initialization.value_spread(task, 1.0), initialization.attention_spread(task, 1.0, 0.0)
        return (0.0, size / attention) if kind.startswith("attention") else (size / values, 0.0)

    def _spread(self, task: BigramTask, kind: str) -> float:
        """Return the standard deviation of the initial signals in drifts, with the noise that they add."""
        values, attention = self._stds(task, kind)
        by_attention = initialization.attention_spread(task, attention, self._system(task).init_noise)
        return float(np.hypot(initialization.value_spread(task, values), by_attention))

    def _sgd(self, rng: np.random.Generator, task: BigramTask, engine: str, init: str, seed: list[int]) -> SgdEscape:
        """Train one run of linear or softmax attention, and return linear weights."""
        settings = self._settings(task)
        state = plateau_escape.perturbed_state(rng, task, *self._stds(task, init))
        if init == "wrong-sign":
            state = state._replace(value=-self._middle * self._system(task).drift * task.centred)
        if engine == "sgd":
            return sgd_escape(task, settings, SPACING, self._most, seed=seed, init=state)
        return plateau_escape.softmax_escape(task, state.value, settings, SPACING_SOFTMAX, self._most, seed=seed)

    def _softmax_time(self, task: BigramTask, wrong: float) -> float:
        """Return the e-foldings of a softmax head without noise, from values of the wrong sign."""
        system = replace(self._system(task), batch=float("inf"))
        right = predict_escape(system, init=(wrong * system.drift, 0.0)) * float(np.log1p(GROWTH))
        return initialization.sign_correction(wrong) + right + initialization.saturation_delay()
