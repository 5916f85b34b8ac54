"""`meanfield/prompt-training`: an MLP and attention trained by SGD on drawn prompts, beside the mean-field flow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import CertificateError, UsageError, check_integers
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study
from manyheads.study.panels import Panel, Role, spread_curve
from manyheads.study.tables import dataset
from manyheads.theory.meanfield.incontext.crossings import first_crossing
from manyheads.theory.meanfield.incontext.gaussian_points import gaussian_points
from manyheads.theory.meanfield.incontext.particles import particle_flow
from manyheads.theory.meanfield.incontext.prompt_length import length_coefficient
from manyheads.theory.meanfield.incontext.prompt_training import (
    ACTIVATION,
    draw_prompts,
    joint_flow,
    missed_growth_rates,
    saddle_start,
    train_on_prompts,
)
from manyheads.theory.meanfield.incontext.task import FeatureTask, ridge_task
from manyheads.theory.papers import KIM

FOREIGN, SIGNAL = 0.5, 0.2  # g, and the overlap of every target with its slot at the start, relative to g
LARGEST_DIFFERENCE = 0.05  # of two mean-field flows: over the initial loss, and at the end over the final one


@dataclass(frozen=True)
class PromptTraining(Study):
    """Loss of 500 sigmoid neurons and linear attention, trained on 10,000 prompts of 1000 pairs.

    Attributes
    ----------
    dim, nodes
        Dimension of the inputs, and inputs that pairs are drawn from.
    eigenvalues
        Of the covariance of the target features: a leading group of equal ones, then a second group.
    width, prompts, length, batch
        Neurons, prompts trained on, pairs of a prompt, and prompts of a step.
    learning_rate, attention_speed
        Step of SGD in mean-field time, and speed of the attention relative to it.
    records, record_every
        Number of recorded times and steps between them.
    reference, step
        Neurons of the mean-field flow at points of low discrepancy, a power of two, and its largest Runge-Kutta step.
    """

    name: ClassVar[str] = "meanfield/prompt-training"
    claim: ClassVar[str] = "SGD on 10,000 prompts waits at the saddle level and escapes as the mean field says"
    source: ClassVar[Source] = replace(
        KIM,
        locus="sizes of the numerical experiment: d = 20, k = 5, 500 sigmoid neurons, 10,000 prompts of 1000 pairs; "
        "features, initial weights and all predictions are derived here",
    )
    revision: ClassVar[int] = 4

    dim: int = 20
    nodes: int = 512
    eigenvalues: tuple[float, ...] = (1.0, 1.0, 0.1, 0.1, 0.1)
    width: int = 500
    prompts: int = 10_000
    length: int = 1000
    batch: int = 1000
    learning_rate: float = 0.00125
    attention_speed: float = 4000.0
    records: int = 100
    record_every: int = 16
    reference: int = 512
    step: float = 0.005

    def __post_init__(self) -> None:
        check_integers(self, "width", "prompts", "length", "batch", "records", "record_every")
        values = self.eigenvalues
        if len(set(values)) != 2 or list(values) != sorted(values, reverse=True):
            raise UsageError(f"eigenvalues={values}: expected two different numbers, the larger ones first")

    @classmethod
    def small(cls) -> PromptTraining:
        """Return the smallest configuration in which every claim can change."""
        return cls(
            dim=4,
            nodes=32,
            eigenvalues=(1.0, 0.4),
            width=16,
            prompts=400,
            length=200,
            batch=100,
            learning_rate=0.005,
            attention_speed=100.0,
            records=5,
            record_every=128,
            reference=128,
            step=0.05,
        )

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return growth rates, and flows at finite and at infinite attention speed: means of two sets of neurons.

        Raises
        ------
        CertificateError
            Losses of the two flows that differ by more than a twentieth of the initial loss at any time, or by more
            than a twentieth of the final loss at the last one.
        """
        task, times = self._task(), self._times()
        flows, limits, rates = [], [], []
        for seed in (0, 1):
            points = gaussian_points(self.dim, self.reference, np.random.default_rng(seed))
            start = saddle_start(task, points / self.dim**0.5, FOREIGN, SIGNAL)
            rates.append(missed_growth_rates(task, start))
            flow = joint_flow(
                task, start, times, length=self.length, attention_speed=self.attention_speed, step=self.step
            )
            limit = particle_flow(
                task, start[:2], times, activation=ACTIVATION, layers="both", length=self.length, step=self.step
            )
            flows.append(flow)
            limits.append(limit.loss)
        first, second = (flow.loss for flow in flows)
        discrepancy = float(np.abs(first - second).max() / first[0])
        final = float(abs(first[-1] - second[-1]) / min(first[-1], second[-1]))
        if not max(discrepancy, final) <= LARGEST_DIFFERENCE:
            raise CertificateError(
                f"two mean-field flows of {self.reference} neurons differ too much; raise reference",
                measured=max(discrepancy, final),
                threshold=LARGEST_DIFFERENCE,
            )
        share = length_coefficient(task, task.targets, np.linalg.inv(task.covariance))
        return dataset(
            {
                "loss": ("time", np.mean([flow.loss for flow in flows], 0), "loss of the mean-field flow"),
                "explained": (("time", "feature"), np.mean([flow.explained for flow in flows], 0), "explained share"),
                "overlap": (
                    ("time", "feature"),
                    np.mean([np.diagonal(flow.cross, axis1=1, axis2=2) for flow in flows], 0),
                    "overlap with its slot",
                ),
                "fast": ("time", np.mean(limits, 0), "loss of the two-timescale flow"),
                "rate": ("feature", np.mean(rates, 0), "growth rate of a missed feature", "1/time"),
                "discrepancy": ((), discrepancy, "largest difference of two flows, over the initial loss"),
                "final_discrepancy": ((), final, "difference of the final losses of two flows, relative"),
                "coefficient": ((), share, "n times the excess of finite prompts where all features are learned"),
            },
            {"time": (times, "mean-field time"), "feature": list(range(1, task.features + 1))},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train on drawn prompts from drawn neurons."""
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
        task = self._task()
        inner = rng.standard_normal((self.width, self.dim)) / self.dim**0.5
        start = saddle_start(task, inner, FOREIGN, SIGNAL)
        found = train_on_prompts(
            task,
            start,
            draw_prompts(task, self.prompts, self.length, rng),
            rng,
            length=self.length,
            attention_speed=self.attention_speed,
            learning_rate=self.learning_rate,
            batch=self.batch,
            records=self.records,
            record_every=self.record_every,
        )
        return dataset(
            {
                "loss": ("time", found.loss, "loss over all tasks, prompts and queries"),
                "limit_loss": ("time", found.limit_loss, "loss of the same weights at infinite prompts"),
                "sample_loss": ("time", found.sample_loss, "loss on the prompts trained on"),
                "explained": (("time", "feature"), found.explained, "explained share"),
                "overlap": (("time", "feature"), np.diagonal(found.cross, axis1=1, axis2=2), "overlap with its slot"),
            },
            {"time": (self._times(), "mean-field time"), "feature": list(range(1, task.features + 1))},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare plateau, escape times, growth, and the end of training with the mean field."""
        end, leading = self.length, self._leading()

        def plateau(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            return _plateau(trained["time"].values, _rows(trained, "loss"), *self._levels()) / self._levels()[1] - 1

        def order(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            half = _half_times(trained["time"].values, _rows(trained, "explained"))
            return (half[:, leading].max(1) < half[:, ~leading].min(1)).astype(float)

        def escape(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            return (self._escapes(_rows(trained, "explained")) / self._escapes(predicted["explained"].values)).mean(1)

        def growth(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            overlap, expected = _rows(trained, "overlap")[..., leading], predicted["overlap"].values[:, leading]
            ratio = np.maximum(overlap[:, 1] / overlap[:, 0], 1e-6)
            return (np.log(ratio) / np.log(expected[1] / expected[0])).mean(1)

        def excess(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            gap = _rows(trained, "loss")[:, -1] - _rows(trained, "limit_loss")[:, -1]
            return end * gap / float(predicted["coefficient"])

        def final(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            return _rows(trained, "loss")[:, -1] / float(predicted["loss"][-1])

        def fast(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            times, level = predicted["time"].values, self._levels()[1] / 2
            crossing = _crossings(times, predicted["fast"].values[None], level)
            return _crossings(times, _rows(trained, "loss"), level) / crossing

        width = f"relative fluctuations N^(-1/2) of the growth rates of {self.width} drawn neurons"
        return (
            Claim(
                "The loss pauses at the level of the saddle that knows the leading features (distance over the level)",
                plateau,
                quantity="relative distance from the level",
                target=0.0,
                tolerance=0.1,
                basis="a hundredth of the learned features is not linear and learned late; the others grow meanwhile",
            ),
            Claim(
                "Features are learned in the order of the eigenvalues (share of trainings)",
                order,
                quantity="share of trainings in that order",
                bounds=(0.0, 1.0),
                target=1.0,
                tolerance=0.1,
                resolution=0.1,
                basis="rates in the ratio of the eigenvalues, from the same relative overlap",
            ),
            Claim(
                "Missed features grow at first as in the mean-field flow (ratio of logarithms, leading features)",
                growth,
                quantity="growth (ln), measured over predicted",
                target=1.0,
                tolerance=0.1,
                basis=f"steps of finite size lower a rate by half of its product with the step, 0.02; {width}",
            ),
            Claim(
                "Both groups are learned when the mean-field flow says (ratio of times, mean)",
                escape,
                quantity="time, measured over predicted",
                target=1.0,
                tolerance=0.15,
                basis=f"{width}, and the weakest of the drawn features, which sets the time; noise of batches",
            ),
            Claim(
                "The final loss is that of the mean-field flow (ratio)",
                final,
                quantity="loss, measured over predicted",
                target=1.0,
                tolerance=0.15,
                basis=f"{width}; noise of the attention under SGD; two flows differ by a third of it at most",
            ),
            Claim(
                f"The final excess of prompts of {end} pairs over infinite ones is c/n with c of the target features "
                "(ratio)",
                excess,
                quantity="excess, measured over predicted",
                target=1.0,
                tolerance=0.15,
                basis="c belongs to perfectly learned features; what is still missed changes it in the same proportion",
            ),
            Claim(
                f"The two-timescale limit gives the time at which the second group is learned at attention speed "
                f"{self.attention_speed:g} (ratio)",
                fast,
                quantity="time, measured over predicted",
                target=1.0,
                tolerance=0.15,
                basis=f"{width}, and corrections of order 1/r",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show losses with the saddle levels, the share explained of every feature, and the gap of finite prompts."""
        times = trained["time"].values
        losses, samples, limits = (_rows(trained, name) for name in ("loss", "sample_loss", "limit_loss"))
        flow, fast = predicted["loss"].values, predicted["fast"].values
        levels = [
            Curve(
                (float(times[0]), float(times[-1])),
                (level, level),
                "levels of the saddles" if not at else "",
                "reference",
            )
            for at, level in enumerate(self._levels())
        ]
        shares, expected = _rows(trained, "explained"), predicted["explained"].values
        features = []
        for at, value in enumerate(self.eigenvalues):
            group = int(not self._leading()[at])
            label = f"eigenvalue {value:g}" if at in (0, int(self._leading().sum())) else ""
            features.append(replace(spread_curve(times, shares[..., at], label), group=group))
            features.append(Curve(tuple(times.tolist()), tuple(expected[:, at].tolist()), "", "predicted", group))

        def line(values: np.ndarray, label: str, role: Role, group: int = 0) -> Curve:
            return Curve(tuple(times.tolist()), tuple(values.tolist()), label, role, group)

        return (
            Lines(
                f"Loss on prompts of {self.length} pairs: SGD ends at {losses[:, -1].mean():.3g}, the flow at "
                f"{flow[-1]:.3g}",
                "mean-field time",
                "loss",
                (
                    spread_curve(times, losses, f"SGD, {self.width} neurons"),
                    line(flow, "mean-field flow", "predicted"),
                    line(fast, "two-timescale flow", "predicted", 1),
                    *levels,
                ),
                log_y=True,
                note=f"Band: replicates. Flows of {self.reference} neurons differ by "
                f"{float(predicted['discrepancy']):.2g} of the initial loss, at the end by "
                f"{float(predicted['final_discrepancy']):.2g} of the final one.",
            ),
            Lines(
                "Share of every target feature that is explained",
                "mean-field time",
                "explained share",
                tuple(features),
                note="Bands: replicates of SGD. Dashed: mean-field flow. Growth rates of missed features at infinite "
                f"prompts: {', '.join(f'{rate:.3g}' for rate in predicted['rate'].values)}.",
                shows=("Features are learned in the order",),
            ),
            Lines(
                f"Cost of finite prompts: {(losses - limits)[:, -1].mean():.3g} at the end",
                "mean-field time",
                "loss",
                (
                    line(losses.mean(0), f"{self.length} pairs", "trained"),
                    line(samples.mean(0), f"the {self.prompts} prompts trained on", "trained", 1),
                    line(limits.mean(0), "infinite prompts, same weights", "trained", 2),
                ),
                log_y=True,
                note=f"Means over replicates. The cost c/n is {float(predicted['coefficient']) / self.length:.3g}. "
                f"The prompts trained on have {samples[:, -1].mean() / losses[:, -1].mean():.3g} of the exact loss.",
            ),
        )

    def _task(self) -> FeatureTask:
        return ridge_task(self.dim, self.eigenvalues, self.nodes, np.random.default_rng(0))

    def _times(self) -> np.ndarray:
        return self.learning_rate * self.record_every * np.arange(self.records + 1)

    def _leading(self) -> np.ndarray:
        return np.asarray(self.eigenvalues) == self.eigenvalues[0]

    def _levels(self) -> tuple[float, float]:
        """Return the loss at which all features are missed, and that of the saddle which knows the leading group."""
        values = np.asarray(self.eigenvalues)
        return 0.5 * float(values.sum()), 0.5 * float(values[~self._leading()].sum())

    def _escapes(self, explained: np.ndarray) -> np.ndarray:
        """Return the mean half time of each group, (..., 2), of shares (..., time, feature)."""
        half = _half_times(self._times(), np.atleast_3d(explained.T).T)
        return np.stack([half[:, self._leading()].mean(1), half[:, ~self._leading()].mean(1)], 1)


def _rows(trained: xr.Dataset, name: str) -> np.ndarray:
    """Return a variable as (replicates, ...)."""
    return trained[name].isel(cell=0).transpose("replicate", ...).values


def _crossings(times: np.ndarray, values: np.ndarray, level: float) -> np.ndarray:
    """Return the first times at which rows of values fall to a level; the last time if never."""
    return np.array([min(first_crossing(times, row, level), float(times[-1])) for row in values])


def _half_times(times: np.ndarray, explained: np.ndarray) -> np.ndarray:
    """Return when each feature is explained by half, (replicates, features)."""
    return np.stack([_crossings(times, -explained[..., at], -0.5) for at in range(explained.shape[-1])], 1)


def _plateau(times: np.ndarray, losses: np.ndarray, first: float, second: float) -> np.ndarray:
    """Return the losses where they fall least in relative terms, between the middles of the two drops."""
    found = []
    for row, start, stop in zip(
        losses, _crossings(times, losses, (first + second) / 2), _crossings(times, losses, second / 2), strict=True
    ):
        inside = np.flatnonzero((times >= start) & (times <= stop))
        slopes = np.gradient(np.log(row), times)
        found.append(row[inside[np.argmax(slopes[inside])]] if inside.size else row[-1])
    return np.asarray(found)
