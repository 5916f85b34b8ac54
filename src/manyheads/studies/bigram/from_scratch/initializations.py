"""`bigram/initializations`: training from scratch from uniform, perturbed and small random values and attention.

How often do the signs come out wrong, when does the plateau end, and are the positions right? The reduced model at a
long context, SGD at a short one, and softmax attention, whose weights cannot be negative, are held against the closed
forms of `manyheads.theory.bigram.theorems.initialization`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Study
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cell, select_cells
from manyheads.theory.bigram.setups import (
    balanced_steps,
    replicate_seed,
    share_of_right_positions,
    signal_system,
)
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems import initialization as theory
from manyheads.theory.bigram.theorems.signal import predict_escape
from manyheads.theory.bigram.training.initial_states import (
    exact_softmax_escape,
    perturbed_runs,
    perturbed_state,
    softmax_escape,
)
from manyheads.theory.bigram.training.plateau_escape import SgdEscape, sgd_escape
from manyheads.theory.bigram.training.proximal_sgd import StepSettings
from manyheads.theory.bigram.training.reduced_model import find_escape
from manyheads.theory.papers import REN

SPREADS = {"uniform": 0.0, "values-1": 1.0, "values-3": 3.0, "attention-1": 1.0}  # in drifts
LINEAR = ("reduced", "sgd")  # engines of linear attention
KINDS = ("uniform", "values-1", "values-3", "attention-1", "normal")
GROWTH = 0.05  # per step
SPACING, SPACING_SOFTMAX = 2, 20  # steps between two records of SGD
REACH = 60  # e-foldings allowed; linear attention needs less than 20


@dataclass(frozen=True)
class Initializations(Study):
    """Signs, escape time and positions by initialization.

    Attributes
    ----------
    length, longest, exact
        Context lengths T of SGD, of the reduced model, and of softmax attention under exact gradients.
    vocabulary, sparsity
        N and Q; the weights of a query's positions are equal.
    noise
        Noise-to-signal ratio kappa2.
    std
        Standard deviation of the entries of the value matrix in the initialization "normal".
    wrong
        Initial values of the wrong sign, in drifts 1 / (T K_Q), increasing; SGD starts from the middle one.
    runs
        Runs of SGD with linear attention and of the reduced model in a replicate and a cell.
    heads
        Runs of SGD with softmax attention.
    """

    name: ClassVar[str] = "bigram/initializations"
    claim: ClassVar[str] = "Initial values above the drift 1/(T K_Q) flip half of the signs; softmax corrects them"
    source: ClassVar = replace(REN, locus="reviews and answers: other initializations; all predictions derived here")

    length: int = 500
    longest: int = 100_000
    exact: int = 8000
    vocabulary: int = 3
    sparsity: int = 2
    noise: float = 4.0
    std: float = 0.02
    wrong: tuple[float, ...] = (1.0, 1.5, 2.0)
    runs: int = 64
    heads: int = 32

    def __post_init__(self) -> None:
        check_rising("wrong", self.wrong, least=0)
        if not self.std > 0 or min(self.runs, self.heads) < 1 or self.length < 2 * self.sparsity + 3:
            raise UsageError(
                f"std={self.std}, runs={self.runs}, heads={self.heads}, length={self.length}: give a positive std, a "
                "run or more, and a context of more than twice the positions"
            )

    @classmethod
    def full(cls) -> Initializations:
        """Return the study at 4,000 tokens for SGD and a hundred million for the reduced model."""
        return cls(length=4000, longest=100_000_000, runs=128)

    @classmethod
    def small(cls) -> Initializations:
        """Return the smallest configuration in which every claim can change."""
        return cls(length=40, longest=100, exact=100, wrong=(0.5, 1.0), runs=6, heads=2)

    def cells(self) -> tuple[Cell, ...]:
        """Return linear attention from every initialization, and both kinds of attention from the wrong sign."""
        linear = [(engine, kind) for engine in LINEAR for kind in KINDS]
        pairs = [*linear, ("sgd", "wrong-sign"), ("softmax", "wrong-sign"), ("softmax", "normal"), ("exact", "softmax")]
        return tuple(Cell(engine=engine, init=kind) for engine, kind in pairs)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the probability of flipped signs and the escape time of linear attention, and those of softmax."""
        shares, times = [], []
        for cell in self.cells():
            task = self._task(np.random.default_rng(0), self._length(cell))
            system = signal_system(task, balanced_steps(task, GROWTH, self.noise))
            spread = self._spread(task, str(cell["init"]))
            shift = -self._middle if cell["init"] == "wrong-sign" else 0.0
            linear = cell["engine"] in LINEAR
            shares.append(system.flip_probability_from(spread, shift) if linear else 0.0)
            known = linear and not shift
            times.append(predict_escape(system, spread=spread) * np.log1p(GROWTH) if known else np.nan)
        task = self._task(np.random.default_rng(0), self.exact)
        return dataset(
            {
                "flipped": ("setting", shares, "probability of flipped signs"),
                "time": ("setting", times, "plateau escape, in e-foldings"),
                "exact_time": (
                    "wrong",
                    [self._softmax_time(task, c) for c in self.wrong],
                    "plateau escape of softmax attention without noise, in e-foldings",
                ),
            },
            coords={"setting": [cell.slug for cell in self.cells()], "wrong": list(self.wrong)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train to the plateau escape; return its median time, the share of flipped signs, and of right positions."""
        seed, number = replicate_seed(key), [candidate.slug for candidate in self.cells()].index(cell.slug)
        rng = np.random.default_rng([*seed, number])
        task = self._task(np.random.default_rng([*seed, 3]), self._length(cell))
        settings, exact, support = balanced_steps(task, GROWTH, self.noise), np.full(len(self.wrong), np.nan), np.nan
        steps, flipped = np.full(1, np.nan), np.zeros(1, bool)
        if cell["engine"] == "exact":
            starts = [-c * self._drift(task) * task.centred for c in self.wrong]
            escapes = [exact_softmax_escape(task, value, settings, self._most) for value in starts]
            exact = np.array(escapes) * np.log1p(GROWTH)
        elif cell["engine"] == "reduced":
            init = perturbed_runs(rng, task, *self._stds(task, str(cell["init"])), self.runs)
            escape = find_escape(task, settings, self.runs, rng, most_steps=self._most, init=init)
            steps, flipped = np.where(escape.outcome == "escaped", escape.steps, np.inf), escape.flipped
        else:
            count = self.heads if cell["engine"] == "softmax" else self.runs
            found = [self._sgd(rng, task, settings, cell, [*seed, number, run]) for run in range(count)]
            steps, flipped = np.array([(run.steps, run.flipped) for run in found]).T
            support = float(np.mean([share_of_right_positions(task, run) for run in found]))
        wrong = flipped.astype(bool)
        # a run without escape counts with its budget, a lower bound; if all signs are flipped their times count
        kept = np.minimum(steps[~wrong] if not wrong.all() else steps, self._most)
        return dataset(
            {
                "time": ((), float(np.median(kept)) * np.log1p(GROWTH), "plateau escape, in e-foldings"),
                "flipped": ((), float(wrong.mean()), "share of runs with flipped signs"),
                "escaped": ((), float(np.isfinite(steps).mean()), "share of runs that escaped"),
                "support": ((), support, "share of queries with the right positions, signs corrected"),
                "exact_time": ("wrong", exact, "plateau escape of softmax attention without noise, in e-foldings"),
            },
            coords={"wrong": (list(self.wrong), "initial values of the wrong sign, in drifts")},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare signs and times with the closed forms, and positions and softmax with what follows from them."""

        def of(name: str, engine: str, kind: str) -> Any:
            return lambda predicted, trained: select_cell(trained, engine=engine, init=kind)[name].values

        def gap(name: str, engine: str, kinds: tuple[str, ...]) -> Any:
            def measured(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                slugs = [Cell(engine=engine, init=kind).slug for kind in kinds]
                rows = [select_cell(trained, engine=engine, init=kind)[name].values for kind in kinds]
                return (np.stack(rows) - predicted[name].sel(setting=slugs).values[:, None]).mean(0)

            return measured

        def exact(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            found = select_cell(trained, engine="exact")["exact_time"].values
            return (found - predicted["exact_time"].values).mean(1)

        def wrong_positions(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return 1 - select_cells(trained, engine="sgd")["support"].mean("cell").values

        def on_plateau(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return 1 - select_cell(trained, engine="softmax", init="normal")["escaped"].values

        middle = f"{self._middle:g}"
        share: dict[str, Any] = {"quantity": "share of sign flips", "bounds": (0.0, 1.0), "target": 0.0}
        gaps: dict[str, Any] = {"quantity": "share of sign flips, measured minus predicted", "bounds": (-1.0, 1.0)}
        return (
            Claim(
                f"In the reduced model at T = {self.longest:,} initial signals of s drifts lead to flipped signs with "
                "probability Phi(-1 / sqrt(rho^2 + s^2)), the noise that they add included (mean gap)",
                gap("flipped", "reduced", KINDS),
                target=0.0,
                tolerance=0.05,
                resolution=1 / (self.runs * len(KINDS)),
                basis="noise after the first e-folding is weaker by the growth per step, .05",
                **gaps,
            ),
            Claim(
                f"Under SGD at T = {self.length:,} the share of flipped signs is Phi(-1 / sqrt(rho^2 + s^2)), "
                "values of the wrong sign included (mean gap)",
                gap("flipped", "sgd", (*KINDS, "wrong-sign")),
                target=0.0,
                tolerance=0.1,
                resolution=1 / (self.runs * (len(KINDS) + 1)),
                basis="at lengths of hundreds noise of order 1/ln T is added: a tenth",
                **gaps,
            ),
            *(
                Claim(
                    f"{words} the signal system predicts the plateau escape from every initialization "
                    "(gap in e-foldings)",
                    gap("time", engine, KINDS),
                    quantity="escape time, measured minus predicted (e-foldings)",
                    target=0.0,
                    tolerance=0.5,
                    resolution=GROWTH,
                    basis="half an e-folding",
                )
                for engine, words in (
                    ("reduced", f"In the reduced model at T = {self.longest:,}"),
                    ("sgd", f"Under SGD at T = {self.length:,}"),
                )
            ),
            Claim(
                "Under SGD the right positions have the largest weights at the escape, from every initialization, once "
                "the sign is corrected (share of queries with wrong ones)",
                wrong_positions,
                quantity="share of queries with wrong positions",
                bounds=(0.0, 1.0),
                target=0.0,
                tolerance=(0.0, 0.05),
                resolution=1 / (self.runs * self.vocabulary * (len(KINDS) + 1)),
                basis="one query in twenty",
            ),
            Claim(
                f"Under SGD values of standard deviation {self.std:g} reach the right signs (share of flips)",
                of("flipped", "sgd", "normal"),
                tolerance=0.05,
                expected="refuted",
                resolution=1 / self.runs,
                basis="the claim as a bound: one run in twenty",
                **share,
            ),
            Claim(
                f"From values of the wrong sign, {middle} drifts, linear attention reaches the right signs (share of "
                "flips)",
                of("flipped", "sgd", "wrong-sign"),
                tolerance=0.05,
                expected="refuted",
                resolution=1 / self.runs,
                basis="the claim as a bound: one run in twenty",
                **share,
            ),
            Claim(
                f"From values of the wrong sign, {middle} drifts, softmax attention reaches the right signs (share of "
                "flips)",
                of("flipped", "softmax", "wrong-sign"),
                tolerance=0.05,
                resolution=1 / self.heads,
                basis="one run in twenty as above; none is expected: weights of the sign-flipped solution are negative",
                **share,
            ),
            Claim(
                f"From values of standard deviation {self.std:g} softmax heads leave the plateau within {REACH} "
                "e-foldings (share that stays)",
                on_plateau,
                quantity="share of heads on the plateau",
                bounds=(0.0, 1.0),
                target=0.0,
                tolerance=0.05,
                expected="refuted",
                resolution=1 / self.heads,
                basis="the claim as a bound; a wrong sign of 2.5 drifts takes longer to correct",
            ),
            Claim(
                "Without noise a softmax head corrects a wrong sign of c drifts in 2 int_0^c exp((c^2 - s^2)/2) ds "
                "e-foldings, and goes on as from the right sign (gap in e-foldings)",
                exact,
                quantity="escape time, measured minus predicted (e-foldings)",
                target=0.0,
                tolerance=0.25,
                resolution=GROWTH / 10,
                basis="the growth per step, .05, times the e-foldings of turning around and of saturation",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the escape of softmax attention from the wrong sign, and a table of all cells."""
        found = select_cell(trained, engine="exact")["exact_time"].values
        curves: tuple[Curve, ...] = (
            spread_curve(self.wrong, found, "softmax, exact gradients"),
            spread_curve(self.wrong, predicted["exact_time"].values[None], "predicted", "predicted", 0),
        )
        rows = []
        for cell in self.cells():
            here, slug = select_cell(trained, **dict(cell)), cell.slug
            if cell["engine"] != "exact":
                pairs = [(here[name].values, float(predicted[name].sel(setting=slug))) for name in ("flipped", "time")]
                cells = [f"{values.mean():.2f} {_bracket(expected)}".strip() for values, expected in pairs]
                rows.append((str(cell["engine"]), str(cell["init"]), *cells, _blank(float(here["support"].mean()))))
        return (
            Lines(
                "Softmax attention from values of the wrong sign",
                "initial values, in drifts",
                "e-foldings until the escape",
                curves,
                note="Linear attention ends at flipped signs beyond one drift.",
                shows=("Without noise a softmax head",),
            ),
            Listing(
                "Flipped signs, escape and positions by initialization",
                ("engine", "initialization", "flipped (predicted)", "e-foldings (predicted)", "right positions"),
                tuple(rows),
                note=f"Values, attention: standard deviation in drifts. normal: values of {self.std:g}.",
            ),
        )

    @property
    def _middle(self) -> float:
        return self.wrong[len(self.wrong) // 2]

    @property
    def _most(self) -> int:
        return round(REACH / np.log1p(GROWTH))

    def _length(self, cell: Cell) -> int:
        return {"reduced": self.longest, "exact": self.exact}.get(str(cell["engine"]), self.length)

    def _task(self, rng: np.random.Generator, length: int) -> BigramTask:
        drawn = draw_bigram_task(rng, self.vocabulary, length, self.sparsity)
        return replace(drawn, weights=np.full((self.vocabulary, self.sparsity), 1 / self.sparsity))

    def _stds(self, task: BigramTask, kind: str) -> tuple[float, float]:
        """Return the standard deviations of values and, relative to 1/T, of the attention."""
        if kind == "normal":
            return self.std, 0.0
        size = SPREADS.get(kind, 0.0)
        values, attention = theory.value_spread(task, 1.0), theory.attention_spread(task, 1.0, 0.0)
        return (0.0, size / attention) if kind.startswith("attention") else (size / values, 0.0)

    def _spread(self, task: BigramTask, kind: str) -> float:
        """Return the standard deviation of the initial signals in drifts, with the noise that they add."""
        values, attention = self._stds(task, kind)
        noise = signal_system(task, balanced_steps(task, GROWTH, self.noise)).init_noise
        return float(np.hypot(theory.value_spread(task, values), theory.attention_spread(task, attention, noise)))

    def _sgd(
        self, rng: np.random.Generator, task: BigramTask, settings: StepSettings, cell: Cell, seed: list[int]
    ) -> SgdEscape:
        """Train one run of linear or softmax attention, and return linear weights."""
        state = perturbed_state(rng, task, *self._stds(task, str(cell["init"])))
        if cell["init"] == "wrong-sign":
            state = state._replace(value=-self._middle * self._drift(task) * task.centred)
        if cell["engine"] == "sgd":
            return sgd_escape(task, settings, SPACING, self._most, seed=seed, init=state)
        return softmax_escape(task, state.value, settings, SPACING_SOFTMAX, self._most, seed=seed)

    def _softmax_time(self, task: BigramTask, wrong: float) -> float:
        """Return the e-foldings of a softmax head without noise, from values of the wrong sign."""
        system = replace(signal_system(task, balanced_steps(task, GROWTH, self.noise)), batch=float("inf"))
        right = predict_escape(system, init=(wrong * system.drift, 0.0)) * float(np.log1p(GROWTH))
        return theory.sign_correction(wrong) + right + theory.saturation_delay()

    @staticmethod
    def _drift(task: BigramTask) -> float:
        return 1 / (task.length * task.attention_squared_norm)


def _bracket(value: float) -> str:
    return "" if np.isnan(value) else f"({value:.2f})"


def _blank(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.2f}"
