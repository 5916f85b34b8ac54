"""`bigram/stability`: the largest learning rate of batches of 64, 128 and 256, and the penalty of the authors' theory.

SGD from scratch is run at rising learning rates until it diverges; stage two is run with the authors' penalty
epsilon K_P / (Q^2 N^3), with one calibrated to the noise, and without.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Study
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cell, select_cells
from manyheads.theory.bigram import setups as shared
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems import stability as theory
from manyheads.theory.bigram.training.proximal_sgd import Diverged, State, StepSettings, descend, initial_state
from manyheads.theory.bigram.training.record import record
from manyheads.theory.papers import REN

PENALTIES = {"none": "no penalty", "theory": "the authors' penalty", "noise": "calibrated to the noise"}
INIT, RECORDS = 0.4, 24  # of the solution, for stage two; records of a run
GRAIN = 1.03  # factor to which the threshold is found


@dataclass(frozen=True)
class Stability(Study):
    """Largest stable learning rate by batch and length, and smallest loss by penalty.

    Attributes
    ----------
    batches
        Samples of a step, increasing, at the first length.
    lengths
        Context lengths T, increasing, at the first batch.
    vocabulary, sparsity
        N and Q; the weights of a query's positions are equal.
    duration
        E-foldings within which a run diverges or not.
    precision
        epsilon of the authors' penalty.
    ratio
        The calibrated penalty, in standard deviations of a coordinate of the gradient.
    penalty_batch, penalty_length, growth, steps
        Batch, length, growth per step and number of steps of stage two.
    """

    name: ClassVar[str] = "bigram/stability"
    claim: ClassVar[str] = "The largest rate grows as sqrt(B / T); the penalty of the theory is below the noise"
    source: ClassVar = replace(
        REN, locus="reviews and answers: batches and the size of the penalty; the thresholds are derived here"
    )

    batches: tuple[int, ...] = (64, 128, 256)
    lengths: tuple[int, ...] = (500, 1000, 2000)
    vocabulary: int = 3
    sparsity: int = 2
    duration: float = 100.0
    precision: float = 0.1
    ratio: float = 4.2
    penalty_batch: int = 4096
    penalty_length: int = 2000
    growth: float = 0.2
    steps: int = 48

    def __post_init__(self) -> None:
        check_rising("batches", self.batches)
        check_rising("lengths", self.lengths, least=2 * self.sparsity + 3)
        if not self.duration > 0 or not self.precision > 0 or not self.ratio > 0 or self.steps < RECORDS:
            raise UsageError(
                f"duration={self.duration}, precision={self.precision}, ratio={self.ratio}, steps={self.steps}: give "
                f"positive numbers, and {RECORDS} steps or more"
            )

    @classmethod
    def full(cls) -> Stability:
        """Return the study with batches up to 1,024 and lengths up to 8,000."""
        return cls(batches=(64, 128, 256, 512, 1024), lengths=(500, 1000, 2000, 4000, 8000))

    @classmethod
    def small(cls) -> Stability:
        """Return the smallest configuration in which every claim can change."""
        return cls(
            batches=(8, 16),
            lengths=(30, 60),
            duration=20.0,
            penalty_batch=256,
            penalty_length=40,
            growth=0.05,
            ratio=1.0,
        )

    def cells(self) -> tuple[Cell, ...]:
        """Return SGD along both axes, and stage two with every penalty."""
        pairs = [(batch, self.lengths[0]) for batch in self.batches]
        pairs += [(self.batches[0], length) for length in self.lengths[1:]]
        divergence = [("divergence", "none", batch, length) for batch, length in pairs]
        second = [("stage two", name, self.penalty_batch, self.penalty_length) for name in PENALTIES]
        rows = (*divergence, *second)
        return tuple(Cell(part=p.replace(" ", "-"), penalty=name, batch=b, length=t) for p, name, b, t in rows)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the threshold of every batch and length, and the noise that the authors' penalty leaves."""
        growths = []
        for cell in self.cells():
            task = self._task(np.random.default_rng(0), int(cell["length"]))
            found = theory.divergence_growth(task, int(cell["batch"]), self.duration)
            growths.append(found if cell["part"] == "divergence" else np.nan)
        task = self._task(np.random.default_rng(0), self.penalty_length)
        ratio = theory.penalty_ratio(task, theory.theory_penalty(task, self.precision), self.penalty_batch)
        plain = self._steps(task, self.penalty_batch, self.growth)
        path = shared.predict_signals(task, plain, np.arange(0, self.steps + 1, self.steps // RECORDS), (INIT, INIT))
        signal = float(path.value_signal[-1])
        return dataset(
            {
                "growth": ("setting", growths, "smallest growth per step that diverges"),
                "ratio": ((), ratio, "the authors' penalty, in standard deviations of the gradient"),
                "noise": (
                    (),
                    theory.remaining_noise(ratio, self.growth, signal),
                    "noise of the attention under it, over that without",
                ),
            },
            coords={"setting": [cell.slug for cell in self.cells()]},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Find the smallest growth that diverges, or train stage two and return its smallest loss."""
        seed = shared.replicate_seed(key)
        task = self._task(np.random.default_rng([*seed, 3]), int(cell["length"]))
        growth, lowest, noise = np.nan, np.nan, np.nan
        if cell["part"] == "divergence":
            growth = self._threshold(task, int(cell["batch"]), seed)
        else:
            settings = replace(self._steps(task, self.penalty_batch, self.growth), penalty=self._penalty(task, cell))
            uniform = 1 / task.length
            attention = (uniform + INIT * (task.attention - uniform)).astype(np.float32)
            start = State(INIT * task.centred, attention)
            seen = record(task, start, settings, self.steps, RECORDS, seed=seed)
            away = np.array(seen.state.attention, float)
            np.put_along_axis(away, task.positions, 0.0, axis=1)
            lowest, noise = float(seen.excess.min()), float((away**2).sum(1).mean())
        return dataset(
            {
                "growth": ((), growth, "smallest growth per step that diverges"),
                "excess": ((), lowest, "smallest excess loss over the initial one"),
                "noise": ((), noise, "squared norm of the other positions' weights, at the end"),
            }
        )

    def _threshold(self, task: BigramTask, batch: int, seed: list[int]) -> float:
        """Bisect the growth per step between one that trains and one that diverges."""
        scale = (batch * task.transition_squared_norm * task.attention_squared_norm / task.length) ** 0.5
        low, high = scale / 8, 8 * scale
        while high > GRAIN * low:
            middle = (low * high) ** 0.5
            try:
                steps = int(np.ceil(self.duration / middle))
                descend(task, initial_state(task), self._steps(task, batch, middle), steps, seed=seed)
                low = middle
            except Diverged:
                high = middle
        return (low * high) ** 0.5

    def claims(self) -> tuple[Claim, ...]:
        """Compare powers and level of the threshold, and the losses of the penalties."""

        def growths(trained: xr.Dataset, axis: str) -> np.ndarray:
            fixed = {"length": self.lengths[0]} if axis == "batch" else {"batch": self.batches[0]}
            cells = select_cells(trained, part="divergence", **fixed)
            return cells["growth"].transpose("replicate", "cell").values

        def power(axis: str, sizes: tuple[int, ...]) -> Any:
            def measured(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                fit = fit_exponent(np.asarray(sizes), growths(trained, axis))
                return fit.exponent, fit.interval

            return measured

        def level(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            found = select_cells(trained, part="divergence")["growth"].transpose("replicate", "cell").values
            expected = predicted["growth"].values
            return (found / expected[np.isfinite(expected)]).mean(1)

        def against_none(name: str) -> Any:
            def measured(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                rows = [select_cell(trained, penalty=p, part="stage-two")["excess"].values for p in (name, "none")]
                return np.log2(rows[0] / rows[1])

            return measured

        def noise(name: str, trained: xr.Dataset) -> np.ndarray:
            return select_cell(trained, penalty=name, part="stage-two")["noise"].values

        half = {"target": -1.0, "tolerance": (float("inf"), 0.0), "resolution": shared.ROUNDING}
        losses: dict[str, Any] = {"quantity": "excess loss with the penalty over that without (log2)", **half}
        grain = float(np.log2(GRAIN))
        return (
            Claim(
                f"From scratch the largest stable learning rate grows as the root of the batch, {self.batches[0]} to "
                f"{self.batches[-1]} samples (exponent)",
                power("batch", self.batches),
                quantity="exponent of the batch",
                target=0.5,
                tolerance=0.1,
                basis=f"the growth per step, up to a fifth, shifts the ends by a tenth; the search by {grain:.2f}",
            ),
            Claim(
                "The largest stable learning rate does not depend on the batch (exponent)",
                power("batch", self.batches),
                quantity="exponent of the batch",
                target=0.0,
                tolerance=0.1,
                expected="refuted",
                basis="as above",
            ),
            Claim(
                f"The largest stable learning rate falls as the root of the length, {self.lengths[0]} to "
                f"{self.lengths[-1]} tokens (exponent)",
                power("length", self.lengths),
                quantity="exponent of the length",
                target=-0.5,
                tolerance=0.1,
                basis="as above",
            ),
            Claim(
                "The mean squares of signals and noise predict the threshold (ratio)",
                level,
                quantity="threshold, measured over predicted",
                target=1.0,
                tolerance=0.25,
                resolution=GRAIN - 1,
                basis="the residual's own noise is taken as isotropic over the values' directions, an order-one part "
                "of the noise at the threshold; and single runs diverge before their mean",
            ),
            Claim(
                f"In stage two the authors' penalty, epsilon = {self.precision:g}, halves the smallest excess loss at "
                f"batches of {self.penalty_batch} (in doublings)",
                against_none("theory"),
                expected="refuted",
                basis="the claim as a bound",
                **losses,
            ),
            Claim(
                "The authors' penalty reduces the noise of the attention as a penalty of so many standard deviations "
                "does (ratio of squared norms)",
                lambda predicted, trained: noise("theory", trained) / noise("none", trained),
                quantity="squared norm of the noise with the penalty over that without",
                target=lambda predicted: float(predicted["noise"]),
                tolerance=0.05,
                resolution=shared.ROUNDING,
                basis="a twentieth: the signal of the values enters squared, and is predicted to a fiftieth",
            ),
            Claim(
                f"A penalty of {self.ratio:g} standard deviations halves the smallest excess loss (in doublings)",
                against_none("noise"),
                basis="an inequality",
                **losses,
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the threshold by batch and by length, and the losses of stage two."""
        panels: list[Panel] = []
        for axis, sizes, claim in (
            ("batch", self.batches, "grows as the root of the batch"),
            ("length", self.lengths, "falls as the root of the length"),
        ):
            fixed = {"length": self.lengths[0]} if axis == "batch" else {"batch": self.batches[0]}
            found = select_cells(trained, part="divergence", **fixed)
            slugs = [cell.slug for cell in self.cells() if cell["part"] == "divergence" and _at(cell, fixed)]
            curves: tuple[Curve, ...] = (
                spread_curve(sizes, found["growth"].transpose("replicate", "cell").values, "SGD"),
                spread_curve(sizes, predicted["growth"].sel(setting=slugs).values[None], "predicted", "predicted", 0),
            )
            words = {"batch": "samples of a step", "length": "context length [tokens]"}[axis]
            title = f"Smallest growth that diverges, by {axis}"
            panels.append(
                Lines(
                    title,
                    words,
                    "smallest growth per step that diverges",
                    curves,
                    log_x=True,
                    log_y=True,
                    shows=(claim,),
                )
            )
        rows = []
        task = self._task(np.random.default_rng(0), self.penalty_length)
        for name, label in PENALTIES.items():
            cell = next(each for each in self.cells() if each["part"] == "stage-two" and each["penalty"] == name)
            penalty, values = self._penalty(task, cell), select_cell(trained, **dict(cell))["excess"].values
            ratio = theory.penalty_ratio(task, penalty, self.penalty_batch)
            rows.append((label, f"{penalty:.2g}", f"{ratio:.3g}", f"{values.mean():.3f}"))
        columns = ("penalty", "lambda", "standard deviations", "smallest excess loss")
        panels.append(
            Listing("Stage two by penalty", columns, tuple(rows), note="Means over replicates, raw iterates.")
        )
        return tuple(panels)

    def _penalty(self, task: BigramTask, cell: Cell) -> float:
        if cell["penalty"] == "theory":
            return theory.theory_penalty(task, self.precision)
        noise = (task.transition_squared_norm / self.penalty_batch) ** 0.5
        return self.ratio * noise if cell["penalty"] == "noise" else 0.0

    def _task(self, rng: np.random.Generator, length: int) -> BigramTask:
        drawn = draw_bigram_task(rng, self.vocabulary, length, self.sparsity)
        return replace(drawn, weights=np.full((self.vocabulary, self.sparsity), 1 / self.sparsity))

    @staticmethod
    def _steps(task: BigramTask, batch: int, growth: float) -> StepSettings:
        return StepSettings(batch, growth / task.attention_squared_norm, growth / task.transition_squared_norm)


def _at(cell: Cell, values: dict[str, int]) -> bool:
    return all(cell[name] == value for name, value in values.items())
