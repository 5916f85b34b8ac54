"""`bigram/l1-against-sgd`: what an l1 penalty buys, for the raw iterate and after rounding, over batch sizes.

All runs share rates, budget and, up to the switch, samples. Plain descent goes on as it is; two others take a penalty
of a given share of a weight 1/Q. Every answer is measured raw, rounded, and rounded with its scale fitted to fresh
samples, where the loss on held-out samples was smallest and at the end: conclusions differ between the six.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.bigram import setups as shared
from manyheads.bigram.task import BigramTask, draw_task
from manyheads.bigram.training.proximal_sgd import State
from manyheads.bigram.training.record import measure_distances
from manyheads.bigram.training.rounding import find_support, glimpse, refit_scale, round_attention
from manyheads.bigram.training.settings import FirstStage, SecondStage, TrainingSettings
from manyheads.bigram.training.two_stages import boost, refine
from manyheads.errors import UsageError
from manyheads.study import Cell, Lines, Listing, Study, Verdict, grid
from manyheads.study.reporting.panels import Panel, spread_curve

DESCENTS = {"sgd": "SGD", "weak": "weak l1", "strong": "strong l1"}
MOMENTS = {"best": "smallest held-out loss", "last": "end of the budget"}
STAGES = {"raw": "raw", "rounded": "rounded", "refit": "rounded, scale fitted"}
LOOKS = 40
ROUNDING = 1e-6  # of a ratio of losses: the attention is float32
FRESH = 50_000  # samples of the fitted scale: its error costs a ten-thousandth of the loss, what is left ten times that
GENTLE = 1 / 3  # share of the values that a step renews; above it the signal system, a flow, is no description


@dataclass(frozen=True)
class L1AgainstSGD(Study):
    """SGD's raw loss decays slowly along a valley; the penalty helps the raw iterate; rounding needs neither.

    Attributes
    ----------
    batches
        Samples of a step, rising.
    length, vocabulary, sparsity
        T, N and Q of the task.
    samples
        Budget of a run, both stages together.
    rate
        Growth per step, the same for all batch sizes.
    weak, strong
        The penalty, as the share of a weight 1/Q by which it shrinks it at the solution.
    weight_seed
        Which weights the positions have; every replicate draws its own transition, positions and samples.
    """

    name: ClassVar[str] = "bigram/l1-against-sgd"
    claim: ClassVar[str] = "an l1 penalty improves the raw iterate; after rounding plain SGD is right as well"
    source: ClassVar = shared.SOURCE

    batches: tuple[int, ...] = (32, 128, 512)
    length: int = 500
    vocabulary: int = 3
    sparsity: int = 2
    samples: int = 262_144
    rate: float = 0.03
    weak: float = 0.05
    strong: float = 0.2
    weight_seed: int = 0

    def __post_init__(self) -> None:
        if len(self.batches) < 2 or list(self.batches) != sorted(set(self.batches)):
            raise UsageError(f"batches={self.batches}: two or more, in rising order")
        if not 0 < self.weak < self.strong < 0.5:
            raise UsageError(f"weak={self.weak}, strong={self.strong}: shares of a weight, 0 < weak < strong < .5")
        needed = (np.log(self.length) + 1.3) / self.rate * self.batches[-1]
        if self.samples < 1.2 * needed:
            raise UsageError(
                f"samples={self.samples}: a batch of {self.batches[-1]} needs {needed:.0f} to get off the start"
            )

    @classmethod
    def full(cls) -> L1AgainstSGD:
        """Return the study at 5,000 tokens: half an hour with the extra `fast`, many hours without."""
        return cls(batches=(64, 256), length=5000, samples=1_280_000, rate=0.016)

    @classmethod
    def small(cls) -> L1AgainstSGD:
        """Return the smallest configuration in which every claim can change."""
        return cls(batches=(64, 128), length=80, samples=18_432, rate=0.05)

    def cells(self) -> tuple[Cell, ...]:
        """Return every descent at every batch size."""
        return grid(descent=tuple(DESCENTS), batch=self.batches)

    def predict(self, key: jax.Array) -> xr.Dataset:
        r"""Return the loss of plain descent at the end, from the signal system with its noise, and how large steps are.

        A step keeps :math:`1 - \eta|A|^2/K_Q` of the values: it renews a share that grows with the attention's noise.
        """
        task, losses, renewed = self._task(), [], []
        for batch in self.batches:
            steps = self.samples // batch
            path = shared.predict_signals(task, self._first(task, batch).steps(self.length), np.array([0.0, steps]))
            losses.append(shared.dressed_excess(task, path)[-1])
            norm = path.attention_signal**2 * task.attention_energy + 1 / task.length + path.attention_noise
            renewed.append(self.rate * norm[-1] / task.attention_energy)
        step = {"long_name": "share of the values that a step renews", "units": "1"}
        return xr.Dataset(
            {"excess": ("batch", np.array(losses), shared.EXCESS), "renewed": ("batch", np.array(renewed), step)},
            coords={"batch": list(self.batches)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train to the switch and beyond, and measure both moments in all three ways."""
        batch, descent = int(cell["batch"]), str(cell["descent"])
        task, seed = shared.redraw(self._task(), key), shared.seed_of(key)
        first = self._first(task, batch)
        for_held_out, for_fit = (np.random.default_rng([*seed, number]) for number in (1, 2))
        boosted = boost(task, first, seed=seed)
        share = {"sgd": 0.0, "weak": self.weak, "strong": self.strong}[descent]
        left = max(self.samples - boosted.samples, batch)
        second = SecondStage(
            kind="proximal" if share else "plain",
            batch=batch,
            rate=self.rate,
            ratio=share * (task.transition_energy * batch) ** 0.5 / self.sparsity or 1.0,
            samples=left,
            every=max(1, left // batch // LOOKS),
        )
        settings = TrainingSettings(first, second)
        refined = refine(task, boosted, settings, for_held_out, seed=seed)
        rows = [self._measure(task, state, for_fit) for state in (refined.state, refined.last)]
        table = np.array(rows)  # (moments, stages, measures)
        dims = ("moment", "stage")
        return xr.Dataset(
            {
                "excess": (dims, table[..., 0], shared.EXCESS),
                "value_distance": (dims, table[..., 1], {"long_name": "distance of the values", "units": "1"}),
                "attention_distance": (dims, table[..., 2], {"long_name": "distance of the attention", "units": "1"}),
                "support": (dims, table[..., 3], shared.SUPPORT),
                "switched": ((), boosted.samples, {"long_name": "samples to the switch", "units": "1"}),
                "flipped": ((), float(boosted.flipped), {"long_name": "landed in the mirror", "units": "1"}),
            },
            coords={"moment": list(MOMENTS), "stage": list(STAGES)},
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare raw and rounded losses of the three descents, and SGD with the signal system."""
        excess, support = shared.unstack(trained, "excess"), shared.unstack(trained, "support")
        smallest, largest = self.batches[0], self.batches[-1]
        last = excess.sel(moment="last")
        plain = last.sel(descent="sgd", stage="raw")
        gentle = [number for number, share in enumerate(predicted["renewed"].values) if share < GENTLE] or [-1]
        named = ", ".join(str(self.batches[number]) for number in gentle)
        ratios = np.log2(plain.values / predicted["excess"].values[:, None])[gentle]  # (batches, replicate)
        best_gain = self._gain(excess.sel(moment="best", stage="raw"), "strong")
        refit_gain = self._gain(last.sel(stage="refit"), "strong").isel(batch=gentle).mean("batch")
        return (
            Verdict.from_samples(
                f"the raw loss of SGD at the end is that of the signal system with its noise, at batches of {named}",
                ratios[np.abs(ratios.mean(1)).argmax()],
                target=0.0,
                tolerance=0.5,
                basis="a factor of 1.4 at the worst of these: where a step renews less than a third of the values, "
                "eta |A|^2/K_Q < 1/3 by prediction, the noise that it leaves is at most a fifth above that of a flow",
            ),
            Verdict.from_samples(
                f"with early stopping the penalty improves the raw loss at a batch of {largest}",
                best_gain.sel(batch=largest).values,
                target=1.0,
                tolerance=(1.0, float("inf")),
                resolution=ROUNDING,
                basis="an inequality between paired runs: the doublings of the loss that SGD has more are above zero",
            ),
            Verdict.from_samples(
                "without early stopping the strong penalty still improves the raw loss at every batch size",
                self._gain(last.sel(stage="raw"), "strong").min("batch").values,
                target=1.0,
                tolerance=(1.0, float("inf")),
                resolution=ROUNDING,
                expected="refuted",
                basis="an inequality at the worst batch size: the bias of the penalty goes on growing where its "
                "threshold is below the noise of one coordinate",
            ),
            Verdict.from_samples(
                "vanilla SGD fails to recover the positions: share of queries with wrong ones, worst batch size",
                1 - support.sel(descent="sgd", moment="last", stage="rounded").min("batch").values,
                target=1.0,
                tolerance=0.5,
                resolution=0.5 / self.vocabulary,
                expected="refuted",
                basis="most queries must have a wrong one for the claim to hold",
            ),
            Verdict.from_samples(
                "vanilla SGD fails to recover the raw attention: its distance from the truth at the smallest batch",
                shared.unstack(trained, "attention_distance")
                .sel(descent="sgd", moment="last", stage="raw", batch=smallest)
                .values,
                target=1.0,
                tolerance=(0.5, float("inf")),
                basis="the truth itself has a norm of about .7: an answer further away than a half is none",
            ),
            Verdict.from_samples(
                f"after rounding and a fitted scale the strong penalty still improves the loss, mean over {named}",
                refit_gain.values,
                target=1.0,
                tolerance=(1.0, float("inf")),
                resolution=ROUNDING,
                expected="refuted",
                basis="an inequality between paired runs, in doublings: noise of a weight at a true position is, in "
                "proportion, as large as the values, which a penalty moves up the valley and the noise of SGD down; "
                "and the penalty takes the same amount off large and small weights",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the loss against the batch size in four ways, and all distances."""
        excess = shared.unstack(trained, "excess")
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
            y_label = "excess loss, of that at the start"
            panels.append(Lines(title, "batch size", y_label, tuple(curves), log_x=True, log_y=True))
        names = ("excess", "value_distance", "attention_distance", "support")
        tables = {name: shared.unstack(trained, name).median("replicate") for name in names}
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
        """Return the doublings that SGD's loss is above that of another descent, pair by pair."""
        ratio = losses.sel(descent="sgd", drop=True) / losses.sel(descent=descent, drop=True)
        return ratio.copy(data=np.log2(ratio.values))

    def _measure(self, task: BigramTask, raw: State, rng: np.random.Generator) -> list[tuple[float, ...]]:
        """Return loss, distances and support of a state: raw, rounded, and with its scale fitted."""
        rounded = round_attention(raw, task.stationary)
        seen = glimpse(rng, task, find_support(rounded.attention), FRESH)
        fitted = refit_scale(rounded, task.stationary, seen)
        found = [measure_distances(task, state) for state in (raw, rounded, fitted)]
        return [(part.excess, part.value, part.attention, part.support) for part in found]

    def _task(self) -> BigramTask:
        return draw_task(np.random.default_rng(self.weight_seed), self.vocabulary, self.length, self.sparsity)

    def _first(self, task: BigramTask, batch: int) -> FirstStage:
        """Return stage one with the study's own growth per step."""
        spread = 1 / self.sparsity - 1 / self.length
        growth = self.rate * self.length / (batch * task.transition_energy * spread)
        return FirstStage(task.transition_energy, self.sparsity, batch, growth)
