"""`bigram/transfer`: a value matrix of correlation rho saves work in proportion to rho squared, and a pilot says so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.bigram.screening import predict_screening
from manyheads.bigram.setups import SOURCE, scatter
from manyheads.bigram.studies.screening import GROWTH, draw_even, search
from manyheads.bigram.task import Batch, BigramTask, draw_correlated, draw_task
from manyheads.bigram.transfer import TransferSettings, predict_transfer, transfer_test
from manyheads.errors import UsageError
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Curve, Lines, Listing, Source, Study, Verdict, grid
from manyheads.study.reporting.panels import Panel, spread_curve


@dataclass(frozen=True)
class TransferCost(Study):
    """The samples that a pretrained value matrix needs go like 1/rho^2, and `transfer_test` foretells them.

    Attributes
    ----------
    correlations
        Correlations rho with the new task, falling from one.
    lengths
        Context tokens, rising.
    pilot
        Samples that `transfer_test` sees.
    searches
        Searches of a replicate; their geometric mean is its figure. The same search at another length sees the same
        matrices, queries, answers and tokens that count, so that the luck of those does not blur the growth.
    vocabulary, sparsity
        Tokens, and positions that each of them looks at.
    task
        Which transition and weights: the number of a draw.
    """

    name: ClassVar[str] = "bigram/transfer"
    claim: ClassVar[str] = "a value matrix of correlation rho finds the positions in C/rho^2 samples"
    source: ClassVar[Source] = replace(
        SOURCE,
        locus="abstract: a positive correlation suffices for transfer; the law in rho and the test are derived here",
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
            raise UsageError(f"correlations={self.correlations}: two or more in (0, 1], falling")
        if len(self.lengths) < 2 or list(self.lengths) != sorted(set(self.lengths)):
            raise UsageError(f"lengths={self.lengths}: give two or more, rising")

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
        """Return C for every length, and what counting without a pretrained matrix needs: closed forms, no constant."""
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
        """Draw samples until the scores of every matrix put all positions first, and test every matrix on a pilot."""
        length = int(cell["length"])
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))  # the same at every length
        figures: list[np.ndarray] = []
        looked: list[tuple[float, float, float]] = []
        for turn in rng.spawn(self.searches):
            places, matrices, told, pilots = turn.spawn(4)
            task = self._task(length, places)
            values = np.stack([draw_correlated(matrices, task, rho) for rho in self.correlations])  # (R, N, N)

            def score(counts: np.ndarray, values: np.ndarray = values) -> np.ndarray:
                return np.einsum("ktyx,ryx->rkt", counts, values, optimize=True)

            figures.append(search(told, task, score))
            looked = looked or self._look(pilots, task, values)  # one pilot a replicate
        samples = np.exp(np.log(figures).mean(0))
        estimates, deviations, strongest = np.transpose(looked)
        along = "correlation"
        return xr.Dataset(
            {
                "samples": (along, samples, _label("samples until the scores put all positions first", "samples")),
                "estimate": (along, estimates, _label("correlation that the pilot shows", "1")),
                "screened": (along, deviations, _label("the same with the right positions", "1")),
                "strongest": (along, strongest, _label("largest score of the pilot", "standard deviations")),
            },
            coords={along: (along, list(self.correlations), _label("correlation", "1"))},
        )

    def _look(self, rng: np.random.Generator, task: BigramTask, values: np.ndarray) -> list[tuple[float, float, float]]:
        """Return what a pilot says of every matrix: rho at the picked positions, at the right ones, largest score."""
        pilot = Batch(*draw_even(rng, task, self.pilot))
        settings = TransferSettings(energy=task.transition_energy)
        right = pilot.tokens[np.arange(self.pilot)[:, None], task.positions[pilot.queries]]  # (B, Q)
        found = []
        for value in values:
            test = transfer_test(value, pilot, self.sparsity, settings=settings)
            norm = float(task.stationary @ (value**2).sum(0)) ** 0.5
            known = float(value[pilot.targets[:, None], right].sum(1).mean()) / norm / task.transition_energy**0.5
            found.append((test.correlation, known, test.strongest))
        return found

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare the power of rho, the level C, its growth with the length, and the pilot's estimate."""
        samples = trained["samples"].transpose("replicate", "cell", "correlation").values
        rho, lengths = np.asarray(self.correlations), np.asarray(self.lengths, float)
        power = fit_exponent(rho, np.exp(np.log(samples).mean(1)))
        constant = np.log(samples * rho**2).mean(2)  # (replicates, lengths)
        tasks = [self._task(length, np.random.default_rng(0)) for length in (250, 64_000)]
        ends = [predict_transfer(task, task.centred) for task in tasks]
        allowed = float(np.log(2.5) / np.log(ends[1] / ends[0]))
        growth = fit_exponent(lengths, np.exp(constant))
        slope = float(np.polyfit(np.log(lengths), np.log(predicted["constant"].values), 1)[0])
        estimate = trained["estimate"].transpose("replicate", "cell", "correlation").values
        strong = np.flatnonzero(rho >= 0.5)
        half = estimate[:, :, strong] / rho[strong]
        error = float(np.sqrt(2 * self.sparsity / self.pilot) * self.vocabulary / rho[strong[-1]])
        return (
            Verdict.from_interval(
                "the samples go like the inverse square of the correlation",
                power.interval,
                figure=power.exponent,
                target=-2.0,
                tolerance=np.log(1.6) / np.log(rho[0] / rho[-1]),
                basis="samples times rho^2 within a factor 1.6 from the largest to the smallest correlation",
            ),
            Verdict.from_samples(
                "the constant follows from the task: normal scores, nothing fitted",
                (constant - np.log(predicted["constant"].values)).mean(1),
                target=0.0,
                tolerance=2 * np.log(GROWTH),
                resolution=np.log(GROWTH) / 2,
                basis="log of measured over predicted: two looks, each 12% more samples than the one before, for "
                "looking more than once and for scores of few samples that are not normal",
            ),
            Verdict.from_interval(
                "the constant grows no faster than the logarithm of the length",
                growth.interval,
                figure=growth.exponent,
                target=slope,
                tolerance=(float("inf"), (allowed - 1) * slope),
                basis=f"the law's slope at these lengths, and {allowed:.2f} times as much above: the law grows by "
                f"{ends[1] / ends[0]:.2f} from 250 to 64,000 tokens, 2.5 is what is allowed",
            ),
            Verdict.from_samples(
                "a pilot shows the correlation, where it is a half or more",
                half.mean((1, 2)),
                target=1.0,
                tolerance=max(0.1, error),
                basis="estimate over truth: the standard error of a half pilot at a correlation of a half, at least a "
                "tenth for positions that the first half picked wrongly",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show samples against rho, the pilot's estimate, and where counting is cheaper."""
        samples = trained["samples"].transpose("replicate", "cell", "correlation").values
        estimate = trained["estimate"].transpose("replicate", "cell", "correlation").values
        known = trained["screened"].transpose("replicate", "cell", "correlation").values
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
                "correlation of the pretrained matrix with the new task",
                "samples",
                tuple(curves),
                log_x=True,
                log_y=True,
                note="Bands reach over replicates. Dashed: C/rho^2 with C from the task, no fitted constant.",
            ),
            Lines(
                f"What a pilot of {self.pilot:,} samples says, {self.lengths[last]:,} tokens",
                "true correlation",
                "estimated correlation",
                (
                    spread_curve(rho, estimate[:, last], "positions picked by the pilot", group=0),
                    spread_curve(rho, known[:, last], "right positions", group=2),
                    Curve(straight, straight, "truth", "reference"),
                ),
                note="Bands range over replicates. Grey: the true correlation.",
            ),
            Listing(
                "Pretrained matrix or plain counting",
                ("tokens", "samples times rho^2", "law C", "screening without a matrix", "break-even rho"),
                rows,
                note="Below the break-even correlation, counting finds the positions in fewer samples than the matrix.",
            ),
        )

    def _task(self, length: int, rng: np.random.Generator) -> BigramTask:
        return scatter(draw_task(np.random.default_rng(self.task), self.vocabulary, 64, self.sparsity), length, rng)


def _label(name: str, units: str) -> dict[str, str]:
    return {"long_name": name, "units": units}
