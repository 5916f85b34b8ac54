"""`bigram/l1-against-sgd`: effect of an l1 penalty on the raw iterate and after rounding, over batch sizes.

All runs share learning rates, budget and, up to the switch, samples. Plain SGD continues unchanged; two others add a
penalty that shrinks a weight 1/Q by a given share. Every result is measured raw, rounded, and rounded with a refit of
the scale, at the smallest held-out loss and at the end: the conclusions differ between the six.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.study import Cell, Claim, Lines, Listing, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import unstack
from manyheads.theory.bigram import setups as shared
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.training.proximal_sgd import State
from manyheads.theory.bigram.training.record import measure_distances
from manyheads.theory.bigram.training.rounding import find_support, refit_scale, round_attention, sample_support
from manyheads.theory.bigram.training.settings import FirstStage, SecondStage, TrainingSettings
from manyheads.theory.bigram.training.two_stages import run_stage_one, run_stage_two
from manyheads.theory.papers import REN

DESCENTS = {"sgd": "SGD", "weak": "weak l1", "strong": "strong l1"}
MOMENTS = {"best": "smallest held-out loss", "last": "end of the budget"}
STAGES = {"raw": "raw", "rounded": "rounded", "refit": "rounded, scale refitted"}
RECORDS = 40
FRESH = (
    50_000  # samples of the refitted scale: its error is a ten-thousandth of the loss, the remaining one ten times that
)
SLOW = 1 / 3  # share of the values that a step renews; above it the signal system, a flow, does not apply


@dataclass(frozen=True)
class L1AgainstSGD(Study):
    """Excess loss with and without an l1 penalty: raw, rounded and refitted, by batch size.

    Attributes
    ----------
    batches
        Samples of a step, increasing.
    length, vocabulary, sparsity
        T, N and Q of the task.
    samples
        Budget of a run, both stages together.
    growth
        Growth per step, the same at all batch sizes.
    weak, strong
        The penalty, as the share of a weight 1/Q by which it shrinks it at the solution.
    weight_seed
        Seed of the weights of the positions; every replicate draws its own transition, positions and samples.
    """

    name: ClassVar[str] = "bigram/l1-against-sgd"
    revision: ClassVar[int] = 3
    claim: ClassVar[str] = "An l1 penalty lowers the raw loss; rounded, plain SGD recovers the task too"
    source: ClassVar = REN

    batches: tuple[int, ...] = (32, 128, 512)
    length: int = 500
    vocabulary: int = 3
    sparsity: int = 2
    samples: int = 262_144
    growth: float = 0.03
    weak: float = 0.05
    strong: float = 0.2
    weight_seed: int = 0

    def __post_init__(self) -> None:
        check_rising("batches", self.batches)
        if not 0 < self.weak < self.strong < 0.5:
            raise UsageError(f"weak={self.weak}, strong={self.strong}: give shares of a weight, 0 < weak < strong < .5")
        needed = (np.log(self.length) + 1.3) / self.growth * self.batches[-1]
        if self.samples < 1.2 * needed:
            raise UsageError(
                f"samples={self.samples}: give at least {1.2 * needed:.0f}, the plateau escape at a batch of "
                f"{self.batches[-1]}"
            )

    @classmethod
    def full(cls) -> L1AgainstSGD:
        """Return the study at 5,000 tokens: half an hour with the extra `fast`, many hours without."""
        return cls(batches=(64, 256), length=5000, samples=1_280_000, growth=0.016)

    @classmethod
    def small(cls) -> L1AgainstSGD:
        """Return the smallest configuration in which every claim can change."""
        return cls(batches=(64, 128), length=80, samples=18_432, growth=0.05)

    def cells(self) -> tuple[Cell, ...]:
        """Return every descent at every batch size."""
        return grid(descent=tuple(DESCENTS), batch=self.batches)

    def predict(self, key: jax.Array) -> xr.Dataset:
        r"""Return the final loss of plain SGD, from the signal system with noise, and the share renewed by a step.

        A step keeps :math:`1 - \eta|A|^2/K_Q` of the values; the renewed share grows with the attention's noise.
        """
        task, losses, renewed = self._task(), [], []
        for batch in self.batches:
            steps = self.samples // batch
            path = shared.predict_signals(task, self._first(task, batch).steps(self.length), np.array([0.0, steps]))
            losses.append(shared.excess_with_noise(task, path)[-1])
            norm = path.attention_signal**2 * task.attention_squared_norm + 1 / task.length + path.attention_noise
            renewed.append(self.growth * norm[-1] / task.attention_squared_norm)
        step = {"long_name": "share of the values that a step renews", "units": "1"}
        return xr.Dataset(
            {"excess": ("batch", np.array(losses), shared.EXCESS), "renewed": ("batch", np.array(renewed), step)},
            coords={"batch": list(self.batches)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train to the switch and beyond, and measure both moments raw, rounded and refitted."""
        batch, descent = int(cell["batch"]), str(cell["descent"])
        task, seed = shared.redraw(self._task(), key), shared.replicate_seed(key)
        first = self._first(task, batch)
        for_held_out, for_fit = (np.random.default_rng([*seed, number]) for number in (1, 2))
        stage_one = run_stage_one(task, first, seed=seed)
        share = {"sgd": 0.0, "weak": self.weak, "strong": self.strong}[descent]
        left = max(self.samples - stage_one.samples, batch)
        second = SecondStage(
            kind="proximal" if share else "plain",
            batch=batch,
            growth=self.growth,
            ratio=share * (task.transition_squared_norm * batch) ** 0.5 / self.sparsity or 1.0,
            samples=left,
            every=max(1, left // batch // RECORDS),
        )
        settings = TrainingSettings(first, second)
        found = run_stage_two(task, stage_one, settings, for_held_out, seed=seed)
        rows = [self._measure(task, state, for_fit) for state in (found.state, found.last)]
        table = np.array(rows)  # (moments, stages, measures)
        dims = ("moment", "stage")
        return xr.Dataset(
            {
                "excess": (dims, table[..., 0], shared.EXCESS),
                "value_distance": (dims, table[..., 1], {"long_name": "distance of the values", "units": "1"}),
                "attention_distance": (dims, table[..., 2], {"long_name": "distance of the attention", "units": "1"}),
                "support": (dims, table[..., 3], shared.SUPPORT),
                "switched": ((), stage_one.samples, {"long_name": "samples to the switch", "units": "1"}),
                "flipped": ((), float(stage_one.flipped), {"long_name": "sign-flipped solution", "units": "1"}),
            },
            coords={"moment": list(MOMENTS), "stage": list(STAGES)},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare raw and rounded losses of the three descents, and SGD with the signal system."""
        infinity, smallest, largest = float("inf"), self.batches[0], self.batches[-1]

        def largest_deviation(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            plain = _final(trained).sel(descent="sgd", stage="raw")
            ratios = np.log2(plain.values / predicted["excess"].values[:, None])[_slow(predicted)]
            return ratios[np.abs(ratios.mean(1)).argmax()]

        def early_gain(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            losses = unstack(trained, "excess").sel(moment="best", stage="raw")
            return self._gain(losses, "strong").sel(batch=largest).values

        def final_gain(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return self._gain(_final(trained).sel(stage="raw"), "strong").min("batch").values

        def wrong_support(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            support = unstack(trained, "support").sel(descent="sgd", moment="last", stage="rounded")
            return 1 - support.min("batch").values

        def attention_distance(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            chosen = {"descent": "sgd", "moment": "last", "stage": "raw", "batch": smallest}
            return unstack(trained, "attention_distance").sel(chosen).values

        def refit_gain(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            gain = self._gain(_final(trained).sel(stage="refit"), "strong")
            return gain.isel(batch=_slow(predicted)).mean("batch").values

        return (
            Claim(
                "The raw excess loss of SGD at the end is that of the signal system with noise, at batch sizes for "
                "which a step renews less than a third of the values (log2 ratio, worst of these)",
                largest_deviation,
                quantity="excess loss, measured over predicted (log2), worst batch size",
                target=0.0,
                tolerance=0.5,
                basis="a factor of 1.4: where eta |A|^2/K_Q < 1/3 by prediction, the remaining noise is at "
                "most a fifth above that of gradient flow",
            ),
            Claim(
                f"With early stopping the l1 penalty reduces the raw excess loss at a batch of {largest} (in "
                "doublings)",
                early_gain,
                quantity="excess loss of SGD over that with the penalty (log2)",
                target=1.0,
                tolerance=(1.0, infinity),
                resolution=shared.ROUNDING,
                basis="an inequality between paired runs: the log2 ratio of the losses is above zero",
            ),
            Claim(
                "Without early stopping the strong l1 penalty reduces the raw excess loss at every batch size",
                final_gain,
                quantity="excess loss of SGD over that with the penalty (log2), worst batch size",
                target=1.0,
                tolerance=(1.0, infinity),
                resolution=shared.ROUNDING,
                expected="refuted",
                basis="an inequality at the worst batch size: the bias of the penalty keeps growing where its "
                "threshold is below the noise of one coordinate",
            ),
            Claim(
                "Plain SGD does not recover the positions (share of queries with wrong ones, worst batch size)",
                wrong_support,
                quantity="share of queries with wrong positions, worst batch size",
                bounds=(0.0, 1.0),
                target=1.0,
                tolerance=0.5,
                resolution=0.5 / self.vocabulary,
                expected="refuted",
                basis="the claim requires a wrong position in most queries",
            ),
            Claim(
                f"Plain SGD does not recover the raw attention (distance from Q at a batch of {smallest})",
                attention_distance,
                quantity="relative distance of the attention from Q",
                target=1.0,
                tolerance=(0.5, infinity),
                basis="the weights themselves have a norm of about .7: a distance above a half is no recovery",
            ),
            Claim(
                "After rounding and a refit of the scale the strong l1 penalty still reduces the excess loss (in "
                "doublings, mean over the same batch sizes)",
                refit_gain,
                quantity="excess loss of SGD over that with the penalty (log2), mean over batch sizes",
                target=1.0,
                tolerance=(1.0, infinity),
                resolution=shared.ROUNDING,
                expected="refuted",
                basis="an inequality between paired runs: relative noise of a true weight grows with the "
                "values, which a penalty increases along the minima alpha_A alpha_V = 1 and the noise of SGD "
                "decreases; and the penalty shrinks large and small weights by the same amount",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show four losses against the batch size, and all distances."""
        excess = unstack(trained, "excess")
        panels: list[Panel] = []
        for moment, stage in (("last", "raw"), ("best", "raw"), ("last", "rounded"), ("last", "refit")):
            curves = [
                spread_curve(
                    self.batches, excess.sel(descent=d, moment=moment, stage=stage).values.T, label, group=group
                )
                for group, (d, label) in enumerate(DESCENTS.items())
            ]
            if (moment, stage) == ("last", "raw"):
                curves.append(spread_curve(self.batches, predicted["excess"].values, "SGD, predicted", "predicted"))
            title = f"Loss: {STAGES[stage]}, {MOMENTS[moment]}"
            shows = SHOWN.get((moment, stage), ())
            panels.append(
                Lines(title, "batch size", shared.EXCESS_AXIS, tuple(curves), log_x=True, log_y=True, shows=shows)
            )
        names = ("excess", "value_distance", "attention_distance", "support")
        tables = {name: unstack(trained, name).median("replicate") for name in names}
        rows = tuple(
            (
                f"{label}, {batch}",
                f"{STAGES[stage]}, {moment}",
                *(
                    f"{float(tables[name].sel(descent=d, batch=batch, moment=moment, stage=stage)):.3g}"
                    for name in names
                ),
            )
            for d, label in DESCENTS.items()
            for batch in self.batches
            for moment in MOMENTS
            for stage in STAGES
        )
        columns = ("descent, batch", "measured", "excess loss", "distance of values", "of attention", "positions right")
        return (*panels, Listing("All distances, medians over replicates", columns, rows))

    def _gain(self, losses: xr.DataArray, descent: str) -> xr.DataArray:
        """Return the log2 ratio of SGD's loss and that of another descent, pair by pair."""
        ratio = losses.sel(descent="sgd", drop=True) / losses.sel(descent=descent, drop=True)
        return ratio.copy(data=np.log2(ratio.values))

    def _measure(self, task: BigramTask, raw: State, rng: np.random.Generator) -> list[tuple[float, ...]]:
        """Return loss, distances and support of a state: raw, rounded, and with its scale refitted."""
        rounded = round_attention(raw, task.stationary)
        seen = sample_support(rng, task, find_support(rounded.attention), FRESH)
        fitted = refit_scale(rounded, task.stationary, seen)
        found = [measure_distances(task, state) for state in (raw, rounded, fitted)]
        return [(part.excess, part.value, part.attention, part.support) for part in found]

    def _task(self) -> BigramTask:
        return draw_bigram_task(np.random.default_rng(self.weight_seed), self.vocabulary, self.length, self.sparsity)

    def _first(self, task: BigramTask, batch: int) -> FirstStage:
        """Return stage one with the study's own growth per step."""
        uniform = 1 / self.sparsity - 1 / self.length
        noise_ratio = self.growth * self.length / (batch * task.transition_squared_norm * uniform)
        return FirstStage(task.transition_squared_norm, self.sparsity, batch, noise_ratio)


SHOWN = {  # claims by the loss that they compare
    ("last", "raw"): ("Without early stopping",),
    ("best", "raw"): ("With early stopping",),
    ("last", "refit"): ("After rounding and a refit",),
}


def _final(trained: xr.Dataset) -> xr.DataArray:
    """Return the excess loss at the end of the budget."""
    return unstack(trained, "excess").sel(moment="last")


def _slow(predicted: xr.Dataset) -> list[int]:
    """Return the places of the batch sizes to which the signal system applies; the largest if there is none."""
    return [number for number, share in enumerate(predicted["renewed"].values) if share < SLOW] or [-1]
