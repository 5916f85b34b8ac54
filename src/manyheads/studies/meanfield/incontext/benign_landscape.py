"""`meanfield/benign-landscape`: saddle levels, fixed points, negative curvature, and training from random starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study
from manyheads.study.panels import Panel
from manyheads.study.tables import dataset
from manyheads.theory.meanfield.incontext.landscape import attention_fixed_point, escape_direction, saddle_levels
from manyheads.theory.meanfield.incontext.particles import Particles, particle_flow
from manyheads.theory.meanfield.incontext.prompt_length import solve_attention
from manyheads.theory.meanfield.incontext.task import FeatureTask, circle_task
from manyheads.theory.papers import KIM

DEGREES, AMPLITUDES = (1, 2, 2), (1.0, 0.7, 0.4)  # eigenvalues 1, 0.49, 0.16
FOREIGN = (3, 3, 4)  # degrees of the foreign features
SHIFT = 1e-3  # of the second difference, relative to the scale of the curvature
GLOBAL = 2e-6  # loss below which a start has reached the global minimum
STEP = 0.2  # of the Runge-Kutta method, in mean-field time


@dataclass(frozen=True)
class BenignLandscape(Study):
    """Random saddles beside the statements of the paper, and MLPs trained from Gaussian starts.

    Attributes
    ----------
    saddles
        Random saddles of a replicate: features that are missed, foreign features in their place, mixed at random.
    width, nodes
        Neurons of the trained MLP, and nodes of the circle.
    duration, records
        Last time of the training of both layers, and recorded times. The flow is integrated in Runge-Kutta steps of one
        size, because ReLU neurons have a kink at every node.
    """

    name: ClassVar[str] = "meanfield/benign-landscape"
    claim: ClassVar[str] = "Saddles lie at half sums of missed eigenvalues; each has negative curvature"
    source: ClassVar[Source] = replace(
        KIM,
        locus="C W = C S^-1 at fixed points; critical points: loss at least r/2, curvature at most -4 L^2/(k R_1^2). "
        "Levels and the bound -4 L^2/E|h|^2 are derived here",
    )

    revision: ClassVar[int] = 3

    saddles: int = 20
    width: int = 256
    nodes: int = 64
    duration: float = 600.0
    records: int = 120

    def __post_init__(self) -> None:
        if min(self.saddles, self.width, self.records) < 1 or self.duration <= 0:
            raise UsageError("saddles, width, records and duration: expected positive numbers")

    @classmethod
    def full(cls) -> BenignLandscape:
        """Return the study on 256 nodes."""
        return cls(nodes=256)

    @classmethod
    def small(cls) -> BenignLandscape:
        """Return the smallest configuration in which every claim can change."""
        return cls(saddles=2, width=16, nodes=24, duration=0.2, records=3)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the saddle levels."""
        levels = saddle_levels(self._task().covariance)
        return dataset({"level": ("saddle", levels, "loss of the saddles")})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Measure random saddles, and train an MLP from a Gaussian start."""
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        task = self._task()
        found = np.array([_measure_saddle(task, rng) for _ in range(self.saddles)])
        times = np.linspace(0.0, self.duration, self.records + 1)[1:]
        start = Particles(rng.normal(size=(self.width, task.features)), rng.normal(size=(self.width, 2)))
        trained = particle_flow(task, start, times, layers="both", step=STEP)
        names = ("saddle loss", "second derivative over 4 L^2/(k R_1^2)", "second derivative over 4 L^2/E|h|^2")
        return dataset(
            {
                "saddle_loss": ("draw", found[:, 0], names[0]),
                "paper": ("draw", found[:, 1], names[1]),
                "bound": ("draw", found[:, 2], names[2]),
                "fixed_point": ("draw", found[:, 3], "largest entry of C W S - C, over sqrt(tr S tr S_o)"),
                "loss": ("moment", trained.loss, "loss of an MLP"),
                "condition": ((), trained.condition.max(), "largest condition number of S"),
            },
            {"moment": (times, "time")},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare saddles with the statements of the paper, and the end of training with zero."""

        def over(name: str, worst: Any) -> Any:
            return lambda predicted, trained: float(worst(trained[name].values))  # over all draws: one number

        def distance(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            found = trained["saddle_loss"].isel(cell=0).transpose("replicate", "draw").values
            return float(np.abs(found[..., None] - predicted["level"].values).min(2).max())

        def final(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return float(trained["loss"].isel(moment=-1).max())

        half = 0.5 * min(AMPLITUDES) ** 2
        return (
            Claim(
                "Fixed points of the attention satisfy C W = C S^-1, also where C is singular "
                "(relative error of C W S = C)",
                over("fixed_point", np.max),
                quantity="relative error",
                target=0.0,
                tolerance=1e-8,
                basis="rounding, times the largest condition number of a drawn representation",
            ),
            Claim(
                "Critical points that are not global have a loss of at least r/2 (smallest loss)",
                over("saddle_loss", np.min),
                quantity="smallest loss of a saddle",
                target=half,
                tolerance=(1e-9, np.inf),
                basis="the paper's bound, and rounding",
            ),
            Claim(
                "Losses of saddles are half sums of the missed eigenvalues (largest distance from a level)",
                distance,
                quantity="largest distance from a level",
                target=0.0,
                tolerance=1e-9,
                basis="rounding",
            ),
            Claim(
                "Saddles have a direction of curvature of at most -4 L^2/(k R_1^2) (largest ratio to its size)",
                over("paper", np.max),
                quantity="curvature over the size of the bound",
                target=-1.0,
                tolerance=(np.inf, 1e-3),
                basis="the paper's bound, and the error of a second difference",
            ),
            Claim(
                "Saddles have a direction of curvature of at most -4 L^2/E|h|^2 (largest ratio to its size)",
                over("bound", np.max),
                quantity="curvature over the size of the bound",
                target=-1.0,
                tolerance=(np.inf, 1e-3),
                basis="the same with the mean square of h in the place of k times its bound's square",
            ),
            Claim(
                "MLPs trained from Gaussian starts reach the global minimum (largest final loss)",
                final,
                quantity="largest final loss",
                target=0.0,
                tolerance=GLOBAL,
                basis="the lowest saddle lies at 0.08; the loss falls algebraically, to 1e-6 at time 600",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show training from every start with the saddle levels, and the curvature of the saddles."""
        losses = trained["loss"].isel(cell=0).transpose("replicate", "moment").values
        times = trained["moment"].values
        ends = (float(times[0]), float(times[-1]))
        levels = [
            Curve(ends, (float(each),) * 2, "saddle levels" if not place else "", "reference")
            for place, each in enumerate(predicted["level"].values)
        ]
        starts = [
            Curve(tuple(times.tolist()), tuple(loss.tolist()), "Gaussian starts" if not place else "", group=0)
            for place, loss in enumerate(losses)
        ]
        height = trained["saddle_loss"].isel(cell=0).values.ravel()
        levels_at = predicted["level"].values
        nearest = np.abs(height[:, None] - levels_at).argmin(1)
        met = np.flatnonzero(np.bincount(nearest, minlength=len(levels_at)))
        ratios = [-trained[name].isel(cell=0).values.ravel() for name in ("paper", "bound")]
        return (
            Lines(
                f"Training of both layers: {(losses[:, -1] < GLOBAL).sum()} of {len(losses)} starts reach a loss of "
                f"{GLOBAL:g}",
                "mean-field time",
                "loss",
                (*starts, *levels),
                log_y=True,
                note=f"The largest final loss is {losses[:, -1].max():.2g}.",
            ),
            Lines(
                f"Curvature of {height.size} random saddles: at least {min(map(np.min, ratios)):.3g} times the bounds",
                "loss of the saddle",
                "curvature over the bound",
                tuple(
                    _ranges(levels_at[met], [each[nearest == place] for place in met], label, group)
                    for group, (each, label) in enumerate(zip(ratios, ("4 L^2/(k R_1^2)", "4 L^2/E|h|^2"), strict=True))
                ),
                log_y=True,
                note="Lines: the smallest ratio at a level; bands: up to the largest. Both bounds say 1 or more; the "
                f"smallest are {ratios[0].min():.3g} and {ratios[1].min():.3g}.",
            ),
        )

    def _task(self) -> FeatureTask:
        return circle_task(DEGREES, AMPLITUDES, self.nodes)


def _ranges(levels: np.ndarray, ratios: list[np.ndarray], label: str, group: int) -> Curve:
    """Return the smallest ratio at every level, with a band up to the largest."""
    low, high = (tuple(float(extreme(each)) for each in ratios) for extreme in (np.min, np.max))
    return Curve(tuple(levels.tolist()), low, label, group=group, low=low, high=high)


def _measure_saddle(task: FeatureTask, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """Return the loss of a random saddle, its curvature over the two bounds' sizes, and the error at a fixed point."""
    missed = rng.permutation(task.features) < rng.integers(1, task.features + 1)
    foreign = circle_task(FOREIGN, nodes=len(task.inputs)).targets
    h = np.where(missed, foreign, task.targets) @ rng.normal(size=(task.features, task.features))
    escape = escape_direction(task, h)
    along = task.targets @ escape.rotation.T
    step = SHIFT * np.sqrt(escape.loss / abs(escape.curvature))
    before, here, after = (solve_attention(task, h + shift * along).loss for shift in (-step, 0.0, step))
    curvature = (before - 2 * here + after) / step**2  # without the closed form
    sizes = 4 * here**2 / np.array([task.features * np.abs(h).max() ** 2, (h**2).sum(1).mean()])
    second, cross = h.T @ h / len(h), task.targets.T @ h / len(h)
    limit = attention_fixed_point(task, h, rng.normal(size=second.shape))
    error = np.abs(cross @ limit @ second - cross).max() / np.sqrt((h**2).sum(1).mean() * np.trace(task.covariance))
    return here, *(curvature / sizes).tolist(), float(error)
