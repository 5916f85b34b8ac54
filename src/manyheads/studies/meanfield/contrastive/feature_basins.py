"""`meanfield/feature-basins`: moments of a feature that decide its growth, its basin, and its stability."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_integers
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, grid
from manyheads.study.panels import Panel
from manyheads.study.tables import dataset, select_cell
from manyheads.theory.meanfield.contrastive.ode import overlap_trajectory
from manyheads.theory.meanfield.contrastive.quadrature import Nodes
from manyheads.theory.meanfield.contrastive.sgd import train_overlaps
from manyheads.theory.meanfield.contrastive.stationary_states import (
    StationaryState,
    basin_boundary,
    growth_rates,
    norms_without_features,
    stationary_states,
)
from manyheads.theory.meanfield.contrastive.task import ContrastiveTask, sparse_feature
from manyheads.theory.papers import MENG

RADIUS = 0.1  # of the starts whose basin is looked for
SMALL = 0.05  # overlap of a feature whose growth rate is measured
SECOND = (0.0, 0.7, 0.7)  # start of Newton's method for the state that has learned feature 2
NODES = Nodes(32, 10, 32)
PATHS = 1e-4  # largest change of a plotted trajectory between two node counts
WINDOW = 3.0  # time over which growth is measured


def two_features(probability: float) -> ContrastiveTask:
    """Return the task of a sign and of a feature that is present with the given probability, equal second moments."""
    return ContrastiveTask(features=(sparse_feature(), sparse_feature(probability)))


def second_feature_state(task: ContrastiveTask) -> StationaryState:
    """Return the stationary state that has learned feature 2 alone."""
    found = stationary_states(task, [SECOND], NODES)
    return next(state for state in found if abs(state.overlaps[1]) > 0.1)


@dataclass(frozen=True)
class FeatureBasins(Study):
    """Two features of equal second moment: growth at Q = 0, boundary of the basins, stability of the learned state.

    Attributes
    ----------
    probabilities
        P of feature 2, which is zero with probability 1 - P; its kurtosis is 1/P. The first one is 1.
    dimension, runs
        n, and runs of a replicate for each growth rate.
    angles, selections
        Initial angles between 0 and 90 degrees at which SGD selects a feature, and runs from each.
    horizon
        Time at which the selected feature is read off.
    rounds
        Rounds of bracketing of the boundary in the theory, a factor of ten each.
    """

    name: ClassVar[str] = "meanfield/feature-basins"
    claim: ClassVar[str] = "Second moments decide growth at Q = 0; higher moments decide basin and stability"
    source: ClassVar[Source] = replace(
        MENG, locus="abstract: feature learnability, attraction region, local stability; rates are derived here"
    )
    revision: ClassVar[int] = 3

    probabilities: tuple[float, ...] = (1.0, 0.5, 0.25, 0.1)
    dimension: int = 1000
    runs: int = 96
    angles: int = 17
    selections: int = 6
    horizon: float = 120.0
    rounds: int = 3

    def __post_init__(self) -> None:
        check_integers(self, "runs", "rounds")
        check_integers(self, "angles", least=2)
        check_integers(self, "dimension", least=4)
        if not 0 < self.horizon < float("inf"):
            raise UsageError(f"horizon={self.horizon}: expected a positive time")
        if len(self.probabilities) < 2 or self.probabilities[0] != 1:
            raise UsageError(f"probabilities={self.probabilities}: expected 1 first, and another one")

    @classmethod
    def small(cls) -> FeatureBasins:
        """Return the smallest configuration in which every claim can change."""
        return cls(probabilities=(1.0, 0.25), dimension=50, runs=4, angles=3, selections=1, horizon=4.0, rounds=1)

    def cells(self) -> tuple[Cell, ...]:
        """Return every probability of feature 2."""
        return grid(probability=self.probabilities)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return growth rates at Q = 0, the boundary, the rate at the state of feature 2, and a phase portrait."""
        growth, boundary, transverse = [], [], []
        for probability in self.probabilities:
            task = two_features(probability)
            norm = norms_without_features(task, NODES)[-1]
            growth.append(growth_rates(task, (0.0, 0.0, norm), NODES))
            boundary.append(basin_boundary(task, RADIUS, self.horizon, self.rounds, NODES))
            transverse.append(growth_rates(task, second_feature_state(task).state, NODES)[0])
        return dataset(
            {
                "growth": (("probability", "feature"), growth, "growth rate at Q = 0", "1/time"),
                "boundary": ("probability", boundary, "boundary angle of the basins", "degrees"),
                "transverse": ("probability", transverse, "growth rate of feature 1 where 2 is learned", "1/time"),
                **self._portrait(),
            },
            {
                "probability": list(self.probabilities),
                "feature": [1, 2],
                "coordinate": ["Q1", "Q2", "q"],
                "radius": (self._radii(), "length of (Q1, Q2) at the start"),
            },
        )

    def _portrait(self) -> dict[str, Any]:
        """Return trajectories from a circle of starts, and stationary states, for the second probability."""
        task, times = two_features(self.probabilities[1]), np.linspace(0, self.horizon, 61)
        norm = norms_without_features(task, NODES)[-1]
        turned = np.deg2rad(np.linspace(0, 90, self.angles))
        starts = np.stack([RADIUS * np.cos(turned), RADIUS * np.sin(turned), np.full(self.angles, norm)], 1)
        paths = overlap_trajectory(task, starts, times, NODES, PATHS)
        states = stationary_states(task, [SECOND, (0.7, 0.0, 0.8), (0.45, 0.65, 0.8), (0.3, 0.3, 0.6)], NODES)
        rounds = min(2, self.rounds)  # a degree is as fine as the eye sees
        edges = [
            basin_boundary(task, radius, self.horizon, rounds, NODES, added_norm=radius**2 - RADIUS**2)
            for radius in self._radii()
        ]
        return {
            "edge": ("radius", edges, "boundary angle of the basins by initial overlap", "degrees"),
            "path": (("time", "start", "coordinate"), paths, "trajectory of the ODE"),
            "state": (("found", "coordinate"), [state.state for state in states], "stationary state"),
            "unstable": (
                "found",
                [sum(v.real > 0 for v in state.eigenvalues) for state in states],
                "unstable directions",
            ),
        }

    def _radii(self) -> np.ndarray:
        """Return the lengths of (Q1, Q2) at which the map of the basins is computed."""
        return np.linspace(RADIUS, 1.0, 2 * self.rounds)

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Measure growth rates, the selected features, and the rate at the state of feature 2, by SGD."""
        task = two_features(float(cell["probability"]))
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
        norm = norms_without_features(task, NODES)[-1]
        growth = self._rates(task, (SMALL, SMALL, norm), rng)
        learned = np.array(second_feature_state(task).state)
        transverse = self._rates(task, (SMALL, learned[1], learned[2] + SMALL**2), rng)[0]
        spacing = 90 / self.angles
        turned = np.deg2rad(spacing * (np.arange(self.angles) + 0.5))
        starts = np.stack([RADIUS * np.cos(turned), RADIUS * np.sin(turned), np.full(self.angles, norm)], 1)
        starts = np.repeat(starts, self.selections, 0)
        end = np.abs(train_overlaps(task, starts, self.dimension, [self.horizon], rng)[-1])
        first = (end[:, 0] > end[:, 1]).reshape(self.angles, -1).mean(1)
        return dataset(
            {
                "growth": ("feature", growth, "growth rate at Q = 0", "1/time"),
                "transverse": ((), transverse, "growth rate of feature 1 where 2 is learned", "1/time"),
                "boundary": ((), spacing * first.sum(), "boundary angle of the basins", "degrees"),
                "selected": ("angle", first, "share of runs that learn feature 1"),
            },
            {"feature": [1, 2], "angle": (np.rad2deg(turned), "initial angle", "degrees")},
        )

    def _rates(self, task: ContrastiveTask, start: tuple[float, ...], rng: np.random.Generator) -> np.ndarray:
        """Return the growth rates of the mean overlaps from a start, (2,)."""
        end = train_overlaps(task, np.tile(start, (self.runs, 1)), self.dimension, [WINDOW], rng)[-1]
        mean = np.maximum(end[:, :2].mean(0), 1e-6)
        return np.log(mean / np.maximum(np.abs(start[:2]), 1e-6)) / WINDOW

    def claims(self) -> tuple[Claim, ...]:
        """Test the two statements of the abstract on local stability, and what holds of basins and learned states."""
        other, last = self.probabilities[1], self.probabilities[-1]
        spacing = 90 / self.angles

        def growth(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            rates = trained["growth"].mean("cell").transpose("replicate", "feature").values
            return rates[:, 1] - rates[:, 0]

        def transverse(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            return trained["transverse"].transpose("replicate", "cell").values

        def error(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return (transverse(predicted, trained) - predicted["transverse"].values).mean(1)

        def boundary(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return select_cell(trained, probability=other)["boundary"].values

        return (
            Claim(
                "Features of equal second moment grow at the same rate at Q = 0, whatever their higher moments "
                "(difference of the rates)",
                growth,
                quantity="difference of growth rates",
                target=lambda predicted: float(np.ptp(predicted["growth"].values)),
                tolerance=0.02,
                basis="a tenth of the rate 0.22: second order in the overlap of 0.05, and noise",
            ),
            Claim(
                f"Higher moments move the boundary of the basins: its angle for kurtosis {1 / other:g} [degrees]",
                boundary,
                quantity="angle of the boundary (degrees)",
                target=lambda predicted: float(predicted["boundary"].sel(probability=other)),
                tolerance=spacing,
                resolution=spacing / 2,
                basis="one step between initial angles; finite n blurs the boundary symmetrically",
            ),
            Claim(
                "Moments higher than the second leave local stability unchanged: change of the rate of feature 1 "
                f"where feature 2 is learned, from kurtosis 1 to {1 / last:g}",
                lambda predicted, trained: transverse(predicted, trained)[:, -1] - transverse(predicted, trained)[:, 0],
                quantity="change of the growth rate",
                target=0.0,
                tolerance=0.05,
                expected="refuted",
                basis="the abstract's statement, where a feature is learned; a quarter of the rate at Q = 0",
            ),
            Claim(
                "The growth rate of feature 1 where 2 is learned is the eigenvalue of the ODE (mean difference)",
                error,
                quantity="growth rate, measured minus predicted",
                target=0.0,
                tolerance=0.02,
                basis="second order in the overlap of 0.05 and 1/n in the state, below a tenth of the rate at Q = 0",
            ),
            Claim(
                f"The state of feature 2 is unstable for kurtosis {1 / last:g} (growth rate of feature 1)",
                lambda predicted, trained: transverse(predicted, trained)[:, -1],
                quantity="growth rate",
                target=0.0,
                tolerance=(0.0, float("inf")),
                basis="an inequality: a positive rate; it is negative for kurtosis 1, where both features are alike",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the phase portrait, the selected feature against the initial angle, and rates against kurtosis."""
        kurtosis = tuple(1 / np.asarray(self.probabilities))
        selected = trained["selected"].mean("replicate").transpose("cell", "angle").values
        angles = tuple(trained["angle"].values.tolist())
        chosen = [
            Curve(angles, tuple(row.tolist()), f"kurtosis {k:g}", "trained", place)
            for place, (row, k) in enumerate(zip(selected, kurtosis, strict=True))
        ]
        edges = predicted["boundary"].values
        chosen += [
            Curve((float(edge), float(edge)), (0.0, 1.0), "", "predicted", place) for place, edge in enumerate(edges)
        ]
        rates = trained["transverse"].mean("replicate").values
        rows = tuple(
            (f"{k:g}", *(f"{value:.4f}" for value in (*growth, transverse, rate)), f"{edge:.2f}")
            for k, growth, transverse, rate, edge in zip(
                kurtosis,
                predicted["growth"].values,
                predicted["transverse"].values,
                rates,
                predicted["boundary"].values,
                strict=True,
            )
        )
        return (
            self._phase_portrait(predicted),
            Lines(
                f"Runs that learn feature 1: boundary at {edges[0]:.0f} to {edges[-1]:.0f} degrees by kurtosis of "
                "feature 2",
                "initial angle of (Q1, Q2) [degrees]",
                "share of runs",
                tuple(chosen),
                note=f"SGD, n = {self.dimension}. Dashed: the boundary of the ODE.",
            ),
            Listing(
                "Rates and boundary by kurtosis of feature 2",
                (
                    "kurtosis",
                    "rate 1 at Q = 0",
                    "rate 2",
                    "rate of 1 where 2 is learned",
                    "by SGD",
                    "boundary [degrees]",
                ),
                rows,
                note="Predicted by the ODE but for the column by SGD.",
            ),
        )

    def _phase_portrait(self, predicted: xr.Dataset) -> Panel:
        """Draw trajectories by the feature with the larger overlap at the end, and states by their stability."""
        paths = predicted["path"].transpose("start", "time", "coordinate").values
        states, unstable = predicted["state"].values, predicted["unstable"].values
        stable = int((unstable == 0).sum())
        curves = list(_filled_basins(predicted["radius"].values, predicted["edge"].values))
        for feature in (0, 1):
            members = [path for path in paths if abs(path[-1, feature]) > abs(path[-1, 1 - feature])]
            for place, path in enumerate(members):
                x, y = (tuple(path[:, axis].tolist()) for axis in (0, 1))
                label = "" if place else f"feature {feature + 1} is larger at the end"
                curves.append(Curve(x, y, label, "trained", feature))
        for count, name in ((0, "stable"), (1, "saddle"), (2, "two unstable directions")):
            for place, state in enumerate(states[unstable == count]):
                dot = (abs(float(state[0])),), (abs(float(state[1])),)
                curves.append(Curve(*dot, "" if place else name, "trained", 2 + count))
        return Lines(
            f"Phase portrait for kurtosis {1 / self.probabilities[1]:g} of feature 2: {stable} stable "
            f"state{'s' * (stable != 1)}",
            "overlap Q1 with feature 1",
            "overlap Q2 with feature 2",
            tuple(curves),
            note="Filled: basins of the two features, from starts whose weights outside of the features are those at "
            "Q = 0. Lines: trajectories of the ODE from a circle around Q = 0, projected along q; they may cross the "
            "edge of a basin in this projection. Dots: stationary states.",
        )


def _filled_basins(radii: np.ndarray, edges: np.ndarray) -> tuple[Curve, Curve]:
    """Return the basins of features 1 and 2 as the areas below and above their common boundary."""
    x, y = np.linspace(0, 1, 41), np.linspace(0, 1, 401)
    lengths, angles = np.hypot(x[:, None], y), np.rad2deg(np.arctan2(y, x[:, None] + 1e-12))
    second = angles > np.interp(lengths, radii, edges)
    height = np.where(second.any(1), y[second.argmax(1)], 1.0)  # from below: where feature 2 begins
    first, above = np.zeros_like(x), np.ones_like(x)
    shown = np.where(second.any(1), height, np.nan)  # no line where the boundary is outside of the frame
    common, edge, line = tuple(x.tolist()), tuple(height.tolist()), tuple(shown.tolist())
    return (
        Curve(common, line, "", "predicted", 0, tuple(first.tolist()), edge),
        Curve(common, line, "boundary of the basins", "predicted", 1, edge, tuple(above.tolist())),
    )
