"""`meanfield/saddle-to-saddle`: one drop with merged key-query weights, one per eigenvector with separate ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import CertificateError, UsageError, check_integers
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, grid
from manyheads.study.panels import Panel, Role, spread_curve
from manyheads.study.tables import dataset
from manyheads.theory.meanfield.incontext.crossings import first_crossing
from manyheads.theory.meanfield.incontext.linear_attention.drops import count_drops, half_times
from manyheads.theory.meanfield.incontext.linear_attention.heads import draw_heads, train_heads
from manyheads.theory.meanfield.incontext.linear_attention.plateau_escape import Drop
from manyheads.theory.meanfield.incontext.linear_attention.regression import InContextRegression
from manyheads.theory.meanfield.incontext.linear_attention.time_course import predict_drops

KINDS = ("separate", "merged")
TIME = "steps x learning rate"
TAIL = 12.0  # widths of the last drop for which training goes on after it


@dataclass(frozen=True)
class SaddleToSaddle(Study):
    """Linear attention trained on sampled prompts of in-context regression, with merged and with separate weights.

    Attributes
    ----------
    eigenvalues, prompt_length
        The task, see `InContextRegression`.
    heads
        Heads; separate keys and queries have rank one.
    stds
        Standard deviations of the initial weights, decreasing.
    batch, learning_rate
        New prompts of a step, and its length.
    records
        Recorded circuits.
    """

    name: ClassVar[str] = "meanfield/saddle-to-saddle"
    claim: ClassVar[str] = "Merged key-query weights learn in one drop, separate ones in one per eigenvector"
    source: ClassVar[Source] = Source(
        "zhang2025incontext",
        "Training Dynamics of In-Context Learning in Linear Attention",
        "Yedi Zhang and Aaditya K. Singh and Peter E. Latham and Andrew Saxe",
        2025,
        identifier="2501.16265",
        locus="abstract: one drop, saddle-to-saddle dynamics; the times from random initial weights are derived here",
    )
    revision: ClassVar[int] = 3

    eigenvalues: tuple[float, ...] = (1.0, 0.6, 0.36)
    prompt_length: int = 10
    heads: int = 8
    stds: tuple[float, ...] = (0.1, 0.05, 0.025)
    batch: int = 200
    learning_rate: float = 0.03
    records: int = 800

    def __post_init__(self) -> None:
        task = InContextRegression(self.eigenvalues, self.prompt_length)  # which checks both
        check_integers(self, "batch", "heads", "records")
        if self.heads < task.dim:
            raise UsageError(f"heads={self.heads}: {task.dim} eigenvectors need as many heads of rank one")
        if task.dim < 2 or len(self.stds) < 2 or not all(a > b > 0 for a, b in pairwise(self.stds)):
            raise UsageError(
                f"stds={self.stds}: give two or more, decreasing and positive, and two or more eigenvalues"
            )

    @classmethod
    def full(cls) -> SaddleToSaddle:
        """Return the study with four eigenvectors and a smaller initialization."""
        return cls(eigenvalues=(1.0, 0.7, 0.5, 0.35), heads=12, stds=(0.1, 0.05, 0.025, 0.0125), batch=128)

    @classmethod
    def small(cls) -> SaddleToSaddle:
        """Return the smallest configuration in which every claim can change."""
        return cls(eigenvalues=(1.0, 0.5), heads=4, stds=(0.1, 0.05), batch=8, learning_rate=0.1, records=50)

    @property
    def task(self) -> InContextRegression:
        """The task."""
        return InContextRegression(self.eigenvalues, self.prompt_length)

    def cells(self) -> tuple[Cell, ...]:
        """Return every kind of key-query weights at every size of the initialization."""
        return grid(attention=KINDS, std=self.stds)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return what does not depend on the initial weights: levels of the saddles, optimum, widths of the drops."""
        task = self.task
        widths = task.optimum ** (-1 / 3) / task.spectrum**2
        return dataset(
            {
                "level": ("saddle", task.levels, "population loss at the saddles"),
                "optimum": ("direction", task.optimum, "optimal circuit"),
                "width": ("direction", widths, "width of the drops", TIME),
                "growth": ((), float(np.linalg.norm(task.spectrum**2)), "growth rate of merged heads"),
            }
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train on new prompts in every step; predict the time course from the same initial weights."""
        task, std = self.task, float(cell["std"])
        first, second = jax.random.split(key)
        heads = draw_heads(first, task.dim, self.heads, std, rank=1 if cell["attention"] == "separate" else None)
        try:
            theory = predict_drops(task, heads)
            expected = theory.half_times
        except CertificateError:  # drops overlap: data, left out where the prediction is compared
            theory, expected = None, np.full(task.dim, np.nan)
        slowest = task.optimum[-1] ** (-1 / 3) / task.spectrum[-1] ** 2
        last = 3 * slowest / std if theory is None else float(expected.max())
        found = train_heads(
            task,
            heads,
            second,
            duration=1.5 * last + TAIL * slowest,
            learning_rate=self.learning_rate,
            batch=self.batch,
            records=self.records,
        )
        learned = np.einsum("tdd->td", found.circuits) / task.optimum
        courses = np.full_like(learned, np.nan) if theory is None else theory.learned(found.times)
        halves = half_times(found.times, learned)
        quarter = learned[-len(learned) // 4 :].mean(0)
        return dataset(
            {
                "time": ("record", found.times, "time", TIME),
                "loss": ("record", found.losses, "population loss"),
                "learned": (("record", "direction"), learned, "circuit over its optimum"),
                "theory": ("record", _loss(task, courses), "loss predicted from the initial weights"),
                "half": ("direction", np.minimum(halves, found.times[-1]), "half time", TIME),
                "expected": ("direction", expected, "half time predicted from the initial weights", TIME),
                "drops": ((), float(count_drops(found.times, found.losses)), "drops of the loss"),
                "final": ("direction", quarter, "circuit over its optimum, mean of the last quarter"),
            }
        )

    def claims(self) -> tuple[Claim, ...]:
        """Count drops, compare levels, times, order and end with the predictions."""
        smallest, dims = self.stds[-1], len(self.eigenvalues)
        logs = np.log(1 / np.asarray(self.stds))

        def drops(kind: str) -> Any:
            return lambda predicted, trained: _last(trained, kind)["drops"].values

        def order(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return (np.diff(_rows(trained, "half", "separate"), axis=2) > 0).all(2).mean(1)

        def plateau(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return np.abs(_plateau_gaps(predicted, _last(trained, "separate"))).mean(1)

        def first(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            gaps = _rows(trained, "half", "separate") - _rows(trained, "expected", "separate")
            return _valid(gaps[:, :, 0].mean(1) / predicted["width"].values[0])

        def course(kind: str) -> Any:
            def measure(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                part = _last(trained, kind)
                error = np.sqrt(((part["loss"] - part["theory"]).values ** 2).mean(1))
                steps, delays = -np.diff(predicted["level"].values), np.cumsum(predicted["width"].values)
                return _valid(error / np.sqrt((steps**2 * delays).sum() / part["time"].values.max(1)))

            return measure

        def exponent(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            offset = Drop(0, 0, divergence=0.0, width=float(predicted["width"][0])).half_time
            return -np.polyfit(logs, np.log(_rows(trained, "half", "separate")[:, :, 0] - offset).T, 1)[0]

        def logarithm(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            halves = _rows(trained, "half", "merged")[:, :, 0]
            return np.polyfit(logs, halves.T, 1)[0] * float(predicted["growth"])

        def end(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            final = np.concatenate([_rows(trained, "final", kind) for kind in KINDS], 1)
            optimum = predicted["optimum"].values
            return ((final - 1) * optimum / (1 / np.asarray(self.eigenvalues) - optimum)).mean((1, 2))

        return (
            Claim(
                f"With separate rank-one keys and queries the loss falls in {dims} drops, std {smallest:g}",
                drops("separate"),
                quantity="number of drops",
                target=float(dims),
                tolerance=0.5,
                resolution=0.25,
                basis="a count: half a drop on average; two drops merge where a plateau happens to be short",
            ),
            Claim(
                f"With merged key-query weights the loss falls in one drop, std {smallest:g}",
                drops("merged"),
                quantity="number of drops",
                target=1.0,
                tolerance=0.5,
                resolution=0.25,
                basis="a count: half a drop",
            ),
            Claim(
                "Separate heads learn the eigenvectors in the order of decreasing eigenvalues (share of trainings)",
                order,
                quantity="share of trainings in that order",
                bounds=(0.0, 1.0),
                target=1.0,
                tolerance=0.25,
                resolution=0.25 / len(self.stds),
                basis="exceptions need an initial weight below std^(1 - ratio of squared eigenvalues) along the larger "
                "eigenvector; more than one in four would refute the order",
            ),
            Claim(
                f"Plateaus lie at the levels of the saddles, std {smallest:g} (distance over step, mid-plateau)",
                plateau,
                quantity="distance over the step of the loss",
                target=0.0,
                tolerance=0.05,
                basis="mid-plateau the growing head has x = 2 width/duration, which lowers the loss by 2x^3 of a step: "
                "under 0.05 for plateaus of seven widths",
            ),
            Claim(
                "The first drop is when the scalar equation says (difference in widths of the drop, mean over std)",
                first,
                quantity="delay of the drop (widths)",
                target=0.0,
                tolerance=0.5,
                basis="the prediction is matched up to terms smaller than the width; half a width for steps of finite "
                "length, which delay a drop by learning rate x ln(1/std), and for the noise of the batch",
            ),
            Claim(
                "The loss curve follows the staircase predicted from the initial weights up to the widths of drops, "
                f"std {smallest:g} (log ratio of rms errors)",
                lambda predicted, trained: np.log(course("separate")(predicted, trained)),
                quantity="rms error over that of the delayed staircase (ln)",
                target=0.0,
                tolerance=(float("inf"), 0.0),
                basis="an inequality: smaller than the rms error of a staircase in which every drop is delayed by its "
                "width, the order of what the matching neglects, and by the widths of those before it",
            ),
            Claim(
                f"The loss curve of merged heads follows the reduced equation, std {smallest:g}",
                course("merged"),
                quantity="rms error over that of the delayed curve",
                target=0.0,
                tolerance=(float("inf"), 0.25),
                basis="rms error in the same unit; the reduction is exact up to powers of the initial weights, so a "
                "sixteenth of the delays is left for the noise of the batch",
            ),
            Claim(
                "The first plateau of separate heads lasts in proportion to 1/std of the initialization (exponent)",
                exponent,
                quantity="exponent of the std",
                target=-1.0,
                tolerance=0.05,
                basis="the divergence, which is the half time plus .85 widths, scales exactly; a third of a width, of "
                "about ten at the largest std, moves the exponent by less than this",
            ),
            Claim(
                "The drop of merged heads is delayed by ln(1/std) over the growth rate (slope times rate)",
                logarithm,
                quantity="slope times the growth rate",
                target=1.0,
                tolerance=0.1,
                basis="growth is exponential until the circuit is of order std^2 from saturation; corrections of order "
                "std at the largest std",
            ),
            Claim(
                "Both end at the inverse covariance regularized by the prompt length (distance over that to the "
                "inverse covariance)",
                end,
                quantity="relative distance",
                target=0.0,
                tolerance=0.1,
                basis="stationary noise of gradient descent averages out over the last quarter; its mean effect is of "
                "order learning rate/batch",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the staircase beside the single drop, the half times, and the growth of the plateaus."""
        return (
            *(_curves_panel(predicted, _last(trained, kind), kind, self.stds[-1]) for kind in KINDS),
            self._delays(trained),
            self._times(trained),
        )

    def _delays(self, trained: xr.Dataset) -> Panel:
        curves = []
        for group, kind in enumerate(KINDS):
            for name, role in (("half", "trained"), ("expected", "predicted")):
                means = np.nanmean(_rows(trained, name, kind), 2)
                shown = means[np.isfinite(means).all(1)]
                label = kind if role == "trained" else f"{kind}, predicted"
                if len(shown):
                    curves.append(spread_curve(self.stds, shown, label, role, group))  # type: ignore[arg-type]
        return Lines(
            "Duration of the plateaus",
            "std of the initial weights",
            f"mean half time [{TIME}]",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Mean over eigenvectors; bands: replicates. Dashed: predictions from the initial weights.",
            shows=("first plateau of separate heads",),
        )

    def _times(self, trained: xr.Dataset) -> Panel:
        rows = []
        for kind in KINDS:
            part = _last(trained, kind)
            for replicate in range(part.sizes["replicate"]):
                half, expected = (part[name].values[replicate] for name in ("half", "expected"))
                drops = f"{float(part['drops'][replicate]):.0f}"
                rows.append((kind, str(replicate), drops, *map(_pair, half, expected)))
        names = tuple(f"eigenvalue {value:g}" for value in self.eigenvalues)
        return Listing(
            f"Half times, measured / predicted, std {self.stds[-1]:g}",
            ("weights", "replicate", "drops", *names),
            tuple(rows),
            note="Time at which the circuit has half of its final value along each eigenvector.",
        )


def _loss(task: InContextRegression, learned: np.ndarray) -> np.ndarray:
    """Return the population loss of diagonal circuits from the shares of their optimum, (T, D)."""
    return task.levels[0] + (-np.diff(task.levels) * (learned**2 - 2 * learned)).sum(1)


def _rows(trained: xr.Dataset, name: str, kind: str) -> np.ndarray:
    """Return a variable of one kind as (replicates, stds, ...)."""
    part = trained.isel(cell=np.flatnonzero(trained["attention"].values == kind))
    return part[name].transpose("replicate", "cell", ...).values


def _last(trained: xr.Dataset, kind: str) -> xr.Dataset:
    """Return the replicates of one kind at the smallest std."""
    return trained.isel(cell=int(np.flatnonzero(trained["attention"].values == kind)[-1])).transpose("replicate", ...)


def _valid(values: np.ndarray) -> np.ndarray:
    """Drop replicates without a prediction."""
    return values[np.isfinite(values)]


def _plateau_gaps(predicted: xr.Dataset, part: xr.Dataset) -> np.ndarray:
    """Return (loss - level)/step halfway between consecutive half times, (replicates, D - 1)."""
    levels, times = predicted["level"].values, np.sort(part["half"].values, axis=1)
    middles = (times[:, 1:] + times[:, :-1]) / 2
    rows = [np.interp(*row) for row in zip(middles, part["time"].values, part["loss"].values, strict=True)]
    return (np.asarray(rows) - levels[1:-1]) / (levels[:-2] - levels[1:-1])


def _curves_panel(predicted: xr.Dataset, part: xr.Dataset, kind: str, std: float) -> Panel:
    """Show the loss of three replicates with the predicted curves and levels, until it has settled."""
    curves, shown = [], [part.isel(replicate=replicate) for replicate in range(min(3, part.sizes["replicate"]))]
    lines = [(row["time"].values, row[name].values) for row in shown for name in ("loss", "theory")]
    end = 1.25 * max(_settled(*line) for line in lines) or float(part["time"].values.max())
    for place, (times, loss) in enumerate(lines):
        if np.isfinite(loss).all():
            replicate, predicted_line = divmod(place, 2)
            label = ("predicted" if not replicate else "") if predicted_line else f"replicate {replicate}, trained"
            role: Role = "predicted" if predicted_line else "trained"
            x, y = (tuple(each[times <= end].tolist()) for each in (times, loss))
            curves.append(Curve(x, y, label, role, replicate))
    for number, level in enumerate(predicted["level"].values.tolist()):
        curves.append(Curve((0.0, end), (level, level), "levels of the saddles" if number == 0 else "", "reference"))
    drops = part["drops"].values.astype(int).tolist()
    count = (
        f"{min(drops)} to {max(drops)} drops" if min(drops) < max(drops) else f"{drops[0]} drop" + "s" * (drops[0] != 1)
    )
    return Lines(
        f"Loss with {kind} key-query weights, std {std:g}: {count}",
        f"time [{TIME}]",
        "population loss",
        tuple(curves),
        note=f"Drops in the replicates: {', '.join(map(str, drops))}. Dashed: predicted from the same initial weights, "
        "nothing fitted. Grey: loss with the d largest eigenvectors known.",
    )


def _settled(times: np.ndarray, loss: np.ndarray) -> float:
    """Return when a loss has come within 2% of its fall of its end; 0 where it is not known."""
    time = first_crossing(times, loss, loss[-1] + 0.02 * (loss[0] - loss[-1]))
    return time if np.isfinite(time) else 0.0


def _pair(measured: float, expected: float) -> str:
    return f"{measured:.1f} / {expected:.1f}"
