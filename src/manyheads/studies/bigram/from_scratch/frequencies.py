"""`bigram/frequencies`: other token frequencies, and transfer across frequencies, structures and transitions.

Tokens that are not equally frequent, or not distributed as the transition's stationary distribution, from scratch; and
how many samples values need that were pretrained elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.study import Cell, Claim, Lines, Listing, Study
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cell, select_cells
from manyheads.theory.bigram.searches import GROWTH as SAMPLE_GROWTH
from manyheads.theory.bigram.searches import geometric_mean, search
from manyheads.theory.bigram.setups import (
    balanced_steps,
    replicate_seed,
    share_of_right_positions,
    signal_system,
)
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task, draw_correlated
from manyheads.theory.bigram.theorems.frequencies import ShiftedTask, effective_vocabulary
from manyheads.theory.bigram.theorems.signal import predict_escape
from manyheads.theory.bigram.training.plateau_escape import sgd_escape
from manyheads.theory.bigram.training.proximal_sgd import State, descend, initial_state
from manyheads.theory.bigram.transfer import predict_transfer
from manyheads.theory.papers import REN

KINDS = ("equal", "unequal", "shifted", "uniform-values")
SOURCES = ("structure", "frequencies", "transition")
GROWTH, SPACING = 0.05, 2  # growth per step; steps between two records
REACH = 30  # e-foldings allowed
QUIET = 0.1  # noise of the pretraining over that of the training from scratch
LATER = 3  # e-foldings that pretraining goes on after the escape


@dataclass(frozen=True)
class Frequencies(Study):
    """Signs, escape and positions by token frequencies, and samples of transferred values by where they come from.

    Attributes
    ----------
    length, vocabulary, sparsity
        T, N and Q of the task; the weights of a query's positions are equal.
    source_length
        Context length of the pretraining, on one position a query.
    noise
        Noise-to-signal ratio kappa2.
    correlation
        Of the other transition with the task's.
    runs, searches
        Trainings from scratch, and searches with transferred values, of a replicate and a cell.
    task
        Seed of the transitions; every replicate draws its own positions.
    """

    name: ClassVar[str] = "bigram/frequencies"
    claim: ClassVar[str] = "The laws hold at any token frequencies; values transfer across frequencies and structures"
    source: ClassVar = replace(REN, locus="reviews and answers: other stationary distributions; derived here")

    length: int = 500
    vocabulary: int = 3
    sparsity: int = 2
    source_length: int = 60
    noise: float = 4.0
    correlation: float = 0.5
    runs: int = 64
    searches: int = 8
    task: int = 4

    def __post_init__(self) -> None:
        if min(self.runs, self.searches) < 1 or not 0 < self.correlation < 1 or self.vocabulary < 3:
            raise UsageError(
                f"runs={self.runs}, searches={self.searches}, correlation={self.correlation}, "
                f"vocabulary={self.vocabulary}: give a run or more, a correlation between 0 and 1, and three tokens"
            )

    @classmethod
    def full(cls) -> Frequencies:
        """Return the study at 4,000 tokens with five symbols."""
        return cls(length=4000, vocabulary=5, source_length=500)

    @classmethod
    def small(cls) -> Frequencies:
        """Return the smallest configuration in which every claim can change."""
        return cls(length=100, source_length=20, noise=8.0, runs=32, searches=1)

    def cells(self) -> tuple[Cell, ...]:
        """Return training from scratch for every kind of frequencies, and transfer from every source."""
        pairs = [*(("scratch", kind) for kind in KINDS), *(("transfer", kind) for kind in SOURCES)]
        return tuple(Cell(training=training, kind=kind) for training, kind in pairs)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the probability of flipped signs and the escape, and the samples at correlation one."""
        rng, systems = np.random.default_rng(0), {}
        for kind in KINDS:
            task = self._task(kind, rng)
            mean = _initial(task, kind).value @ task.stationary
            systems[kind] = replace(
                signal_system(task, balanced_steps(task, GROWTH, self.noise)),
                vocabulary=effective_vocabulary(task, mean),  # type: ignore[arg-type]
            )
        times = [predict_escape(system) * np.log1p(system.growth) for system in systems.values()]
        target = self._task("equal", rng)
        return dataset(
            {
                "flipped": ("kind", [each.flip_probability for each in systems.values()], "probability of sign flips"),
                "time": ("kind", times, "plateau escape, in e-foldings"),
                "samples": ((), predict_transfer(target, target.centred), "samples of the exact transition", "samples"),
            },
            coords={"kind": list(KINDS)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train from scratch to the escape, or pretrain and search for the samples that rank the positions."""
        seed, number = replicate_seed(key), [candidate.slug for candidate in self.cells()].index(cell.slug)
        rng = np.random.default_rng([*seed, number])
        figures = dict.fromkeys(("time", "flipped", "support", "moved", "offset", "samples", "correlation"), np.nan)
        if cell["training"] == "scratch":
            task = self._task(str(cell["kind"]), rng)
            settings, start = balanced_steps(task, GROWTH, self.noise), _initial(task, str(cell["kind"]))
            most = round(REACH / np.log1p(GROWTH))
            found = [
                sgd_escape(task, settings, SPACING, most, seed=[*seed, number, run], init=start)
                for run in range(self.runs)
            ]
            steps, flipped = np.array([(run.steps, run.flipped) for run in found]).T
            kept = np.minimum(steps[flipped == 0] if (flipped == 0).any() else steps, most)
            mean = start.value @ task.stationary
            figures |= {
                "time": float(np.median(kept)) * float(np.log1p(GROWTH)),
                "flipped": float(flipped.mean()),
                "support": float(np.mean([share_of_right_positions(task, run) for run in found])),
                "moved": max(float(np.abs(run.state.value @ task.stationary - mean).max()) for run in found),
                "offset": float(((mean + task.stationary - task.transition @ task.stationary) ** 2).sum()) / 2,
            }
        else:
            target, source = self._task("equal", rng), self._source(str(cell["kind"]), rng)
            value = self._pretrain(source, [*seed, number]) if source else target.centred
            value = value - (value @ target.stationary)[:, None]
            norm = float(target.stationary @ (value**2).sum(0)) * target.transition_squared_norm
            inner = float(target.stationary @ (value * target.centred).sum(0))

            def score(counts: np.ndarray) -> np.ndarray:
                return np.einsum("ktyx,yx->kt", counts, value, optimize=True)[None]

            streams = rng.spawn(self.searches)
            found_samples = [search(each, self._task("equal", each), score)[0] for each in streams]
            figures |= {"samples": geometric_mean(found_samples), "correlation": inner / norm**0.5}
        return dataset({name: ((), figures[name], label, *unit) for name, (label, *unit) in LABELS.items()})

    def claims(self) -> tuple[Claim, ...]:
        """Compare signs and times with the system of each kind, and samples with the correlation."""

        def gap(name: str) -> Any:
            def measured(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                rows = [select_cell(trained, kind=kind)[name].values for kind in KINDS]
                return (np.stack(rows) - predicted[name].sel(kind=list(KINDS)).values[:, None]).mean(0)

            return measured

        def of(name: str, kind: str) -> Any:
            return lambda predicted, trained: select_cell(trained, kind=kind)[name].values

        def level(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            found = select_cells(trained, training="transfer")
            scaled = found["samples"] * found["correlation"] ** 2 / float(predicted["samples"])
            return np.log(scaled.transpose("replicate", "cell").values).mean(1)

        def between(kind: str) -> Any:
            def measured(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                rows = [select_cell(trained, kind=each)["samples"].values for each in (kind, "structure")]
                return np.log(rows[0] / rows[1])

            return measured

        grain = float(np.log(SAMPLE_GROWTH)) / self.searches
        same: dict[str, Any] = {"target": 0.0, "tolerance": float(np.log(1.5)), "resolution": grain}
        return (
            Claim(
                "Under SGD the probability of flipped signs is Phi(-1/rho) with the effective vocabulary, for equal, "
                "unequal and shifted frequencies, and from uniform values (mean gap)",
                gap("flipped"),
                quantity="share of sign flips, measured minus predicted",
                bounds=(-1.0, 1.0),
                target=0.0,
                tolerance=0.05,
                resolution=1 / (self.runs * len(KINDS)),
                basis="noise after the first e-folding is weaker by the growth per step, .05",
            ),
            Claim(
                "The signal system with the squared norms under the tokens' frequencies predicts the plateau escape "
                "(mean gap in e-foldings)",
                gap("time"),
                quantity="escape time, measured minus predicted (e-foldings)",
                target=0.0,
                tolerance=0.5,
                resolution=GROWTH,
                basis="half an e-folding",
            ),
            Claim(
                "The right positions have the largest weights at the escape for all frequencies, signs corrected "
                "(share of queries with wrong ones)",
                lambda predicted, trained: 1 - select_cells(trained, training="scratch")["support"].mean("cell").values,
                quantity="share of queries with wrong positions",
                bounds=(0.0, 1.0),
                target=0.0,
                tolerance=(0.0, 0.05),
                resolution=1 / (self.runs * self.vocabulary * len(KINDS)),
                basis="one query in twenty",
            ),
            Claim(
                "From uniform values 1/N the mean of the predictions never moves, so at unequal frequencies the excess "
                "loss keeps |1/N - mu|^2 / 2",
                lambda predicted, trained: float(select_cell(trained, kind="uniform-values")["moved"].max()),
                quantity="largest change of the mean prediction",
                target=0.0,
                tolerance=1e-6,
                basis="an equality of the projected gradients: rounding of the sum of float32 attention, 1e-7",
            ),
            Claim(
                "From uniform values at unequal frequencies training reaches the Bayes loss (what remains, over the "
                "initial excess of centred values)",
                lambda predicted, trained: (
                    float(select_cell(trained, kind="uniform-values")["offset"].min())
                    / self._initial_excess("uniform-values")
                ),
                quantity="excess loss that remains, relative",
                target=0.0,
                tolerance=0.05,
                expected="refuted",
                basis="the claim as a bound: one twentieth",
            ),
            Claim(
                "Values pretrained on another structure, under other frequencies, or on another transition need the "
                "samples of their correlation, C / rho^2 (mean log ratio)",
                level,
                quantity="samples rho^2, measured over predicted (ln)",
                target=0.0,
                tolerance=2 * float(np.log(SAMPLE_GROWTH)),
                resolution=grain,
                basis="two evaluations, each with 12% more samples than the previous one",
            ),
            Claim(
                "Values pretrained under other token frequencies need no more samples than under the task's own (log "
                "ratio)",
                between("frequencies"),
                quantity="samples over those after pretraining under the same frequencies (ln)",
                basis="a factor of 1.5, for the noise of both pretrainings: centred anew, both solutions are the same",
                **same,
            ),
            Claim(
                f"Values pretrained on another transition, of correlation {self.correlation:g}, need no more samples "
                "either (log ratio)",
                between("transition"),
                quantity="samples over those after pretraining on the same transition (ln)",
                basis="as above; 1/rho^2 makes the factor four",
                expected="refuted",
                **same,
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show flips and samples beside their predictions, and all cells as two tables."""
        scratch, transfer = [], []
        for kind in KINDS:
            here, theory = select_cell(trained, kind=kind), predicted.sel(kind=kind)
            pairs = [f"{float(here[name].mean()):.2f} ({float(theory[name]):.2f})" for name in ("flipped", "time")]
            rest = [f"{float(here[name].mean()):.3f}" for name in ("support", "offset")]
            scratch.append((kind, *pairs, *rest))
        for kind in SOURCES:
            here = select_cell(trained, kind=kind)
            samples, correlation = (here[name].values for name in ("samples", "correlation"))
            expected = float(predicted["samples"]) / (correlation**2).mean()
            transfer.append((kind, f"{correlation.mean():.2f}", f"{geometric_mean(samples):.0f}", f"{expected:.0f}"))
        return (
            *self._pictures(predicted, trained),
            Listing(
                "From scratch, by frequencies of the tokens",
                (
                    "frequencies",
                    "flipped (predicted)",
                    "e-foldings (predicted)",
                    "right positions",
                    "excess that stays",
                ),
                tuple(scratch),
                note="shifted: not the transition's stationary distribution; uniform-values: unequal, from V = 1/N.",
            ),
            Listing(
                "Transfer, by what differs in the pretraining",
                ("differs", "correlation", "samples", "predicted"),
                tuple(transfer),
                note="structure: length, positions and their number; the others differ in that as well.",
            ),
        )

    def _pictures(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        def measured(names: tuple[str, ...], variable: str) -> np.ndarray:
            return np.stack([select_cell(trained, kind=name)[variable].values for name in names], axis=1)

        def picture(x: str, names: tuple[str, ...], variable: str, theory: np.ndarray, claim: str) -> Panel:
            here = spread_curve(range(len(names)), measured(names, variable), "measured")
            there = spread_curve(range(len(names)), theory[None], "predicted", "predicted", 0)
            note = "Bars range over replicates."
            return Lines(variable, x, LABELS[variable][0], (here, there), note=note, shows=(claim,), x_ticks=names)

        flips = predicted["flipped"].sel(kind=list(KINDS)).values
        samples = float(predicted["samples"]) / (measured(SOURCES, "correlation") ** 2).mean(0)
        return (
            picture("frequencies of the tokens", KINDS, "flipped", flips, "Under SGD the probability of flipped signs"),
            picture(
                "difference of the pretraining", SOURCES, "samples", samples, "Values pretrained on another struct"
            ),
        )

    def _drawn(self, uniform: bool) -> BigramTask:
        rng = np.random.default_rng(self.task)
        return draw_bigram_task(rng, self.vocabulary, self.length, self.sparsity, uniform=uniform)

    def _task(self, kind: str, rng: np.random.Generator) -> BigramTask:
        """Return the task of a kind with equal weights at positions drawn anew."""
        drawn = self._drawn(kind in ("equal", "shifted"))
        mu = _increasing(self.vocabulary) if kind == "shifted" else drawn.stationary
        return _place(ShiftedTask if kind == "shifted" else BigramTask, drawn.transition, mu, self, rng)

    def _source(self, kind: str, rng: np.random.Generator) -> BigramTask:
        """Return the task of the pretraining: short, one position a query."""
        drawn = self._drawn(True)
        transition, mu = drawn.transition, drawn.stationary
        if kind == "transition":
            away = draw_correlated(np.random.default_rng(self.task), drawn, self.correlation)
            transition = mu[:, None] + away * 0.9 * min(mu.min() / -away.min(), (1 - mu.max()) / away.max())
        if kind != "structure":
            mu = _increasing(self.vocabulary)
        shape = replace(self, length=self.source_length, sparsity=1)
        return _place(ShiftedTask, transition, mu, shape, rng)

    def _pretrain(self, task: BigramTask, seed: list[int]) -> np.ndarray:
        """Train to the escape and somewhat on; return values of the right sign."""
        settings = balanced_steps(task, GROWTH, QUIET * self.noise)
        most = round(REACH / np.log1p(GROWTH))
        escape = sgd_escape(task, settings, SPACING, most, seed=seed)
        end = descend(task, escape.state, settings, round(LATER / GROWTH), seed=seed, first_step=most + SPACING)
        return -end.value if escape.flipped else end.value

    def _initial_excess(self, kind: str) -> float:
        """Return half the squared norm of the weights times that of the transition."""
        task = self._task(kind, np.random.default_rng(0))
        return task.weight_squared_norm * task.transition_squared_norm / 2


LABELS = {
    "time": ("plateau escape, in e-foldings",),
    "flipped": ("share of runs with flipped signs",),
    "support": ("share of queries with the right positions, signs corrected",),
    "moved": ("largest change of the mean prediction",),
    "offset": ("excess loss of the mean prediction",),
    "samples": ("samples until all positions rank first", "samples"),
    "correlation": ("correlation of the values with the transition",),
}


def _increasing(vocabulary: int) -> np.ndarray:
    """Return frequencies in proportion to 1, 2, ..., N."""
    ranks = np.arange(1.0, vocabulary + 1)
    return ranks / ranks.sum()


def _place(
    kind: type[BigramTask], transition: np.ndarray, mu: np.ndarray, shape: Frequencies, rng: np.random.Generator
) -> BigramTask:
    places = [np.sort(rng.choice(shape.length, shape.sparsity, replace=False)) for _ in mu]
    weights = np.full((len(mu), shape.sparsity), 1 / shape.sparsity)
    return kind(transition, mu, np.stack(places), weights, shape.length)


def _initial(task: BigramTask, kind: str) -> State:
    """Return zero values, or those of V = 1/N."""
    start = initial_state(task)
    if kind != "uniform-values":
        return start
    away = 1 / task.vocabulary - task.stationary
    return start._replace(value=np.tile(away[:, None], task.vocabulary))
