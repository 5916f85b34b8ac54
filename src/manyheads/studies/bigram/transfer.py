"""`bigram/transfer`: samples of transfer by the correlation rho of a pretrained value matrix, and its pilot test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.studies.bigram.screening import GROWTH, by_replicate, draw_uniform_batch, search
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.bigram.screening import predict_screening
from manyheads.theory.bigram.setups import redraw_positions, replicate_seed
from manyheads.theory.bigram.task import Batch, BigramTask, draw_bigram_task, draw_correlated
from manyheads.theory.bigram.transfer import TransferSettings, predict_transfer, transfer_test
from manyheads.theory.papers import REN


@dataclass(frozen=True)
class TransferCost(Study):
    """Samples until the scores of a pretrained value matrix rank all positions first, by correlation and length.

    Attributes
    ----------
    correlations
        Correlations rho with the new task, decreasing from one.
    lengths
        Context lengths T, increasing.
    pilot
        Samples of `transfer_test`.
    searches
        Searches of a replicate; the figure is their geometric mean. A search has the same matrices, queries, targets
        and attended tokens at every length: the comparison is paired.
    vocabulary, sparsity
        N and Q of the task.
    task
        Seed of the transition and the weights.
    """

    name: ClassVar[str] = "bigram/transfer"
    claim: ClassVar[str] = "A value matrix of correlation rho finds the positions in C/rho^2 samples"
    source: ClassVar[Source] = replace(
        REN,
        locus="abstract: a positive correlation suffices for transfer; the dependence on rho and the test are "
        "derived here",
    )
    revision: ClassVar[int] = 2

    correlations: tuple[float, ...] = (1.0, 0.7, 0.5, 0.35, 0.25)
    lengths: tuple[int, ...] = (250, 2000, 16_000)
    pilot: int = 8000
    searches: int = 12
    vocabulary: int = 3
    sparsity: int = 2
    task: int = 4

    def __post_init__(self) -> None:
        falling = list(self.correlations) == sorted(set(self.correlations), reverse=True)
        if len(self.correlations) < 2 or not falling or not 0 < self.correlations[-1] < self.correlations[0] <= 1:
            raise UsageError(f"correlations={self.correlations}: two or more in (0, 1], decreasing")
        check_rising("lengths", self.lengths)

    @classmethod
    def full(cls) -> TransferCost:
        """Return the study up to 64,000 tokens."""
        return cls(lengths=(250, 1000, 4000, 16_000, 64_000))

    @classmethod
    def small(cls) -> TransferCost:
        """Return the smallest configuration in which every claim can change."""
        return cls(correlations=(1.0, 0.7), lengths=(20, 40), pilot=400, searches=1)

    def cells(self) -> tuple[Cell, ...]:
        """Return every length."""
        return grid(length=self.lengths)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return C for every length, and the samples of screening without a pretrained matrix, in closed form."""
        tasks = [self._task(length, np.random.default_rng(0)) for length in self.lengths]
        needed = [predict_transfer(task, task.centred) for task in tasks]
        return xr.Dataset(
            {
                "constant": ("length", needed, _label("samples at a correlation of one", "samples")),
                "screening": ("length", [predict_screening(task) for task in tasks], _label("screening", "samples")),
            },
            coords={"length": list(self.lengths)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Draw samples until the scores of every matrix rank all positions first, and test every matrix on a pilot."""
        length = int(cell["length"])
        rng = np.random.default_rng(replicate_seed(key))  # the same at every length
        figures: list[np.ndarray] = []
        tested: list[tuple[float, float, float]] = []
        for stream in rng.spawn(self.searches):
            places, matrices, samples, pilots = stream.spawn(4)
            task = self._task(length, places)
            values = np.stack([draw_correlated(matrices, task, rho) for rho in self.correlations])  # (R, N, N)

            def score(counts: np.ndarray, values: np.ndarray = values) -> np.ndarray:
                return np.einsum("ktyx,ryx->rkt", counts, values, optimize=True)

            figures.append(search(samples, task, score))
            tested = tested or self._test(pilots, task, values)  # one pilot a replicate
        needed = np.exp(np.log(figures).mean(0))
        estimates, deviations, strongest = np.transpose(tested)
        along = "correlation"
        return xr.Dataset(
            {
                "samples": (along, needed, _label("samples until the scores rank all positions first", "samples")),
                "estimate": (along, estimates, _label("correlation estimated by the pilot", "1")),
                "screened": (along, deviations, _label("the same with the right positions", "1")),
                "strongest": (along, strongest, _label("largest score of the pilot", "standard deviations")),
            },
            coords={along: (along, list(self.correlations), _label("correlation", "1"))},
        )

    def _test(self, rng: np.random.Generator, task: BigramTask, values: np.ndarray) -> list[tuple[float, float, float]]:
        """Return rho at the picked positions, at the right ones, and the largest score of every matrix on a pilot."""
        pilot = Batch(*draw_uniform_batch(rng, task, self.pilot))
        settings = TransferSettings(squared_norm=task.transition_squared_norm)
        right = pilot.tokens[np.arange(self.pilot)[:, None], task.positions[pilot.queries]]  # (B, Q)
        found = []
        for value in values:
            test = transfer_test(value, pilot, self.sparsity, settings=settings)
            norm = float(task.stationary @ (value**2).sum(0)) ** 0.5
            known = float(value[pilot.targets[:, None], right].sum(1).mean()) / norm / task.transition_squared_norm**0.5
            found.append((test.correlation, known, test.strongest))
        return found

    def claims(self) -> tuple[Claim, ...]:
        """Compare the power of rho, the level C, its growth with the length, and the pilot's estimate."""
        rho, lengths = np.asarray(self.correlations), np.asarray(self.lengths, float)
        tasks = [self._task(length, np.random.default_rng(0)) for length in (250, 64_000)]
        ends = [predict_transfer(task, task.centred) for task in tasks]
        allowed = float(np.log(2.5) / np.log(ends[1] / ends[0]))
        strong = np.flatnonzero(rho >= 0.5)
        error = float(np.sqrt(2 * self.sparsity / self.pilot) * self.vocabulary / rho[strong[-1]])

        def power(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            fit = fit_exponent(rho, np.exp(np.log(by_replicate(trained, "samples")).mean(1)))
            return fit.exponent, fit.interval

        def constant(trained: xr.Dataset) -> np.ndarray:
            return np.log(by_replicate(trained, "samples") * rho**2).mean(2)  # (replicates, lengths)

        def level(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return (constant(trained) - np.log(predicted["constant"].values)).mean(1)

        def growth(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            fit = fit_exponent(lengths, np.exp(constant(trained)))
            return fit.exponent, fit.interval

        def slope(predicted: xr.Dataset) -> float:
            return float(np.polyfit(np.log(lengths), np.log(predicted["constant"].values), 1)[0])

        def estimate(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return (by_replicate(trained, "estimate")[:, :, strong] / rho[strong]).mean((1, 2))

        return (
            Claim(
                "The samples scale as the inverse square of the correlation (exponent of rho)",
                power,
                quantity="exponent of rho",
                target=-2.0,
                tolerance=float(np.log(1.6) / np.log(rho[0] / rho[-1])),
                basis="samples times rho^2 within a factor 1.6 from the largest to the smallest correlation",
            ),
            Claim(
                "The constant C follows from the task without a fit, from normal scores (log ratio)",
                level,
                quantity="samples, measured over predicted (ln)",
                target=0.0,
                tolerance=2 * float(np.log(GROWTH)),
                resolution=float(np.log(GROWTH)) / 2,
                basis="two evaluations, each with 12% more samples than the previous one, for repeated evaluation and "
                "for scores of few samples that are not normal",
            ),
            Claim(
                "The constant C grows no faster than the logarithm of the length (log-log slope)",
                growth,
                quantity="exponent of T",
                target=slope,
                tolerance=lambda predicted: (float("inf"), (allowed - 1) * slope(predicted)),
                basis=f"the predicted slope at these lengths, and {allowed:.2f} times as much above: the "
                f"prediction grows by {ends[1] / ends[0]:.2f} from 250 to 64,000 tokens, 2.5 is allowed",
            ),
            Claim(
                "A pilot estimates correlations of a half or more without bias (estimate over truth)",
                estimate,
                quantity="estimated over true correlation",
                target=1.0,
                tolerance=max(0.1, error),
                basis="the standard error of a half pilot at a correlation of a half, at least a tenth for wrong "
                "positions picked by the first half",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show samples against rho, the pilot's estimate, and the correlation at which screening is equal."""
        samples = by_replicate(trained, "samples")
        estimate = by_replicate(trained, "estimate")
        known = by_replicate(trained, "screened")
        rho = np.asarray(self.correlations)
        curves = []
        for place, length in enumerate(self.lengths):
            level = float(predicted["constant"].values[place])
            curves.append(spread_curve(rho, samples[:, place], f"{length:,} tokens", group=place))
            curves.append(Curve(tuple(rho.tolist()), tuple((level / rho**2).tolist()), "", "predicted", place))
        last = len(self.lengths) - 1
        rows = tuple(
            (
                f"{length:,}",
                f"{float(np.exp(np.log(samples[:, place] * rho**2).mean())):,.0f}",
                f"{float(predicted['constant'][place]):,.0f}",
                f"{float(predicted['screening'][place]):,.0f}",
                f"{float(predicted['constant'][place] / predicted['screening'][place]) ** 0.5:.2f}",
            )
            for place, length in enumerate(self.lengths)
        )
        straight = tuple(rho.tolist())
        return (
            Lines(
                "Samples until all positions are right",
                "correlation rho of the old with the new task",
                "samples",
                tuple(curves),
                log_x=True,
                log_y=True,
                note="Bands: replicates. Dashed: C/rho^2 with C from the task, no fitted constant.",
                shows=("inverse square",),
            ),
            Lines(
                f"Estimate of a pilot of {self.pilot:,} samples, {self.lengths[last]:,} tokens",
                "true correlation",
                "estimated correlation",
                (
                    spread_curve(rho, estimate[:, last], "positions picked by the pilot", group=0),
                    spread_curve(rho, known[:, last], "right positions", group=2),
                    Curve(straight, straight, "truth", "reference"),
                ),
                note="Bands: replicates. Grey: the true correlation.",
                shows=("A pilot estimates",),
            ),
            Listing(
                "Pretrained matrix or screening",
                ("tokens", "samples times rho^2", "predicted C", "predicted screening", "break-even rho"),
                rows,
                note="At the break-even correlation both predictions agree; below, that of screening is smaller.",
            ),
        )

    def _task(self, length: int, rng: np.random.Generator) -> BigramTask:
        return redraw_positions(
            draw_bigram_task(np.random.default_rng(self.task), self.vocabulary, 64, self.sparsity), length, rng
        )


def _label(name: str, units: str) -> dict[str, str]:
    return {"long_name": name, "units": units}
