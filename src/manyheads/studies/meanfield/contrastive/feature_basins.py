"""`meanfield/feature-basins`: moments of a feature that decide its growth, its basin, and its stability."""

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.theory.meanfield import overlap_trajectory, train_overlaps
from manyheads.theory.meanfield.contrastive import stationary_states as stationary
from manyheads.theory.meanfield.contrastive.quadrature import Nodes
from manyheads.theory.meanfield.contrastive.task import ContrastiveTask, sparse_feature
from manyheads.theory.papers import MENG

RADIUS = 0.1  # of the starts whose basin is looked for
SMALL = 0.05  # overlap of a feature whose growth rate is measured
SECOND = (0.0, 0.7, 0.7)  # start of Newton's method for the state that has learned feature 2
NODES = Nodes(32, 10, 32)
PATHS = 1e-4  # largest change of a plotted trajectory between two node counts
WINDOW = 3.0  # time over which growth is measured


class FeatureBasins(st.Study):
    """Two features of equal second moment: growth at Q = 0, boundary of the basins, stability of the learned state."""

    name = "meanfield/feature-basins"
    claim = "Second moments decide growth at Q = 0; higher moments decide basin and stability"
    source = MENG.at("abstract: feature learnability, attraction region, local stability; rates are derived here")
    revision = 3
    grid = {"probability": "probabilities"}

    probabilities: tuple[float, ...] = st.setting(
        (1.0, 0.5, 0.25, 0.1),
        "P of feature 2, which is zero with probability 1 - P; its kurtosis is 1/P. The first one is 1",
        count=2,
        small=(1.0, 0.25),
    )
    dimension: int = st.setting(1000, "dimension n", least=4, small=50)
    runs: int = st.setting(96, "runs of a replicate for each growth rate", least=1, small=4)
    angles: int = st.setting(17, "initial angles from 0 to 90 degrees at which SGD selects a feature", least=2, small=3)
    selections: int = st.setting(6, "runs from each angle", small=1)
    horizon: float = st.setting(120.0, "time at which the selected feature is read off", above=0, small=4.0)
    rounds: int = st.setting(
        3, "rounds of bracketing of the boundary in the theory, a factor of ten each", least=1, small=1
    )

    def check(self) -> None:
        if self.probabilities[0] != 1:
            raise st.UsageError(f"probabilities={self.probabilities}: expected 1 first, and another one")

    def predict(self, key: st.Key) -> st.Record:
        growth, boundary, transverse = [], [], []
        for probability in self.probabilities:
            task = two_features(probability)
            norm = stationary.norms_without_features(task, NODES)[-1]
            growth.append(stationary.growth_rates(task, (0.0, 0.0, norm), NODES))
            boundary.append(stationary.basin_boundary(task, RADIUS, self.horizon, self.rounds, NODES))
            transverse.append(stationary.growth_rates(task, second_feature_state(task).state, NODES)[0])
        return {
            "growth": (("probability", "feature"), growth, "growth rate at Q = 0", "1/time"),
            "boundary": ("probability", boundary, "boundary angle of the basins", "degrees"),
            "transverse": ("probability", transverse, "growth rate of feature 1 where 2 is learned", "1/time"),
            **self._portrait(),
            "probability": ("probability", list(self.probabilities), "probability of feature 2"),
            "feature": ("feature", [1, 2], "feature"),
            "coordinate": ("coordinate", ["Q1", "Q2", "q"], "order parameter"),
            "radius": ("radius", self._radii(), "length of (Q1, Q2) at the start"),
        }

    def _portrait(self) -> st.Record:
        """Return trajectories from a circle of starts, and stationary states, for the second probability."""
        task, times = two_features(self.probabilities[1]), np.linspace(0, self.horizon, 61)
        norm = stationary.norms_without_features(task, NODES)[-1]
        starts = _circle(np.deg2rad(np.linspace(0, 90, self.angles)), norm)
        paths = overlap_trajectory(task, starts, times, NODES, PATHS)
        states = stationary.stationary_states(
            task, [SECOND, (0.7, 0.0, 0.8), (0.45, 0.65, 0.8), (0.3, 0.3, 0.6)], NODES
        )
        unstable = [sum(v.real > 0 for v in state.eigenvalues) for state in states]
        rounds = min(2, self.rounds)  # a degree is as fine as the eye sees
        edges = [
            stationary.basin_boundary(task, radius, self.horizon, rounds, NODES, added_norm=radius**2 - RADIUS**2)
            for radius in self._radii()
        ]
        return {
            "edge": ("radius", edges, "boundary angle of the basins by initial overlap", "degrees"),
            "path": (("time", "start", "coordinate"), paths, "trajectory of the ODE"),
            "state": (("found", "coordinate"), [state.state for state in states], "stationary state"),
            "unstable": ("found", unstable, "unstable directions"),
        }

    def _radii(self) -> np.ndarray:
        """Return the lengths of (Q1, Q2) at which the map of the basins is computed."""
        return np.linspace(RADIUS, 1.0, 2 * self.rounds)

    def train(self, key: st.Key, probability: float) -> st.Record:
        task, rng = two_features(probability), st.generator(key)
        norm = stationary.norms_without_features(task, NODES)[-1]
        growth = self._rates(task, (SMALL, SMALL, norm), rng)
        learned = np.array(second_feature_state(task).state)
        transverse = self._rates(task, (SMALL, learned[1], learned[2] + SMALL**2), rng)[0]
        spacing = 90 / self.angles
        turned = np.deg2rad(spacing * (np.arange(self.angles) + 0.5))
        starts = np.repeat(_circle(turned, norm), self.selections, 0)
        end = np.abs(train_overlaps(task, starts, self.dimension, [self.horizon], rng)[-1])
        first = (end[:, 0] > end[:, 1]).reshape(self.angles, -1).mean(1)
        return {
            "growth": ("feature", growth, "growth rate at Q = 0", "1/time"),
            "transverse": ((), transverse, "growth rate of feature 1 where 2 is learned", "1/time"),
            "boundary": ((), spacing * first.sum(), "boundary angle of the basins", "degrees"),
            "selected": ("angle", first, "share of runs that learn feature 1"),
            "feature": ("feature", [1, 2], "feature"),
            "angle": ("angle", np.rad2deg(turned), "initial angle", "degrees"),
        }

    def _rates(self, task: ContrastiveTask, start: tuple[float, ...], rng: np.random.Generator) -> np.ndarray:
        """Return the growth rates of the mean overlaps from a start, (2,)."""
        end = train_overlaps(task, np.tile(start, (self.runs, 1)), self.dimension, [WINDOW], rng)[-1]
        mean = np.maximum(end[:, :2].mean(0), 1e-6)
        return np.log(mean / np.maximum(np.abs(start[:2]), 1e-6)) / WINDOW

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        other, last, spacing = self.probabilities[1], self.probabilities[-1], 90 / self.angles
        growth, rate = trained["growth"].mean("probability"), trained["transverse"]
        yield st.Claim(
            "Features of equal second moment grow at the same rate at Q = 0, whatever their higher moments "
            "(difference of the rates)",
            growth.sel(feature=2) - growth.sel(feature=1),
            st.near(np.ptp(theory["growth"].values), 0.02),
            "a tenth of the rate 0.22: second order in the overlap of 0.05, and noise",
            "difference of growth rates",
        )
        yield st.Claim(
            f"Higher moments move the boundary of the basins: its angle for kurtosis {1 / other:g} [degrees]",
            trained["boundary"].sel(probability=other),
            st.near(theory["boundary"].sel(probability=other), spacing),
            "one step between initial angles; finite n blurs the boundary symmetrically",
            "angle of the boundary (degrees)",
            resolution=spacing / 2,
        )
        yield st.Claim(
            "Moments higher than the second leave local stability unchanged: change of the rate of feature 1 "
            f"where feature 2 is learned, from kurtosis 1 to {1 / last:g}",
            rate.isel(probability=-1) - rate.isel(probability=0),
            st.near(0, 0.05),
            "the abstract's statement, where a feature is learned; a quarter of the rate at Q = 0",
            "change of the growth rate",
            expected="refuted",
        )
        text = "The growth rate of feature 1 where 2 is learned is the eigenvalue of the ODE (mean difference)"
        basis = "second order in the overlap of 0.05 and 1/n in the state, below a tenth of the rate at Q = 0"
        quantity = "growth rate, measured minus predicted"
        yield st.Claim(text, (rate - theory["transverse"]).mean("probability"), st.near(0, 0.02), basis, quantity)
        text = f"The state of feature 2 is unstable for kurtosis {1 / last:g} (growth rate of feature 1)"
        basis = "an inequality: a positive rate; it is negative for kurtosis 1, where both features are alike"
        yield st.Claim(text, rate.isel(probability=-1), st.above(0), basis, "growth rate")

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        yield self._phase_portrait(theory)
        edges, selected = theory["boundary"], trained["selected"].mean("replicate")
        names = {probability: f"kurtosis {1 / probability:g}" for probability in self.probabilities}
        step = xr.DataArray([0.0, 1.0], dims="angle")
        runs = {name: selected.sel(probability=at) for at, name in names.items()}
        law = {name: step.assign_coords(angle=2 * [float(edges.sel(probability=at))]) for at, name in names.items()}
        ends = f"{float(edges[0]):.0f} to {float(edges[-1]):.0f} degrees by kurtosis of feature 2"
        title, label = f"Runs that learn feature 1: boundary at {ends}", "initial angle of (Q1, Q2) [degrees]"
        note = f"SGD, n = {self.dimension}. Dashed: the boundary of the ODE."
        yield st.lines(title, "angle", "share of runs", runs, law, x_label=label, note=note)

    def _phase_portrait(self, theory: st.Data) -> st.Lines:
        """Draw trajectories by the feature with the larger overlap at the end, and states by their stability."""
        paths = theory["path"].transpose("start", "time", "coordinate").values
        states, unstable = theory["state"].values, theory["unstable"].values
        stable = int((unstable == 0).sum())
        curves = list(_filled_basins(theory["radius"].values, theory["edge"].values))
        for feature in (0, 1):
            members = [path for path in paths if abs(path[-1, feature]) > abs(path[-1, 1 - feature])]
            for place, path in enumerate(members):
                x, y = (tuple(path[:, axis].tolist()) for axis in (0, 1))
                label = "" if place else f"feature {feature + 1} is larger at the end"
                curves.append(st.Curve(x, y, label, "trained", feature))
        for count, name in ((0, "stable"), (1, "saddle"), (2, "two unstable directions")):
            for place, state in enumerate(states[unstable == count]):
                dot = (abs(float(state[0])),), (abs(float(state[1])),)
                curves.append(st.Curve(*dot, "" if place else name, "trained", 2 + count))
        return st.Lines(
            f"Phase portrait for kurtosis {1 / self.probabilities[1]:g} of feature 2: {stable} stable "
            f"state{'s' * (stable != 1)}",
            "overlap Q1 with feature 1",
            "overlap Q2 with feature 2",
            tuple(curves),
            note="Filled: basins of the two features, from starts whose weights outside of the features are those at "
            "Q = 0. Lines: trajectories of the ODE from a circle around Q = 0, projected along q; they may cross the "
            "edge of a basin in this projection. Dots: stationary states.",
        )


def _filled_basins(radii: np.ndarray, edges: np.ndarray) -> tuple[st.Curve, st.Curve]:
    """Return the basins of features 1 and 2 as the areas below and above their common boundary."""
    x, y = np.linspace(0, 1, 41), np.linspace(0, 1, 401)
    lengths, angles = np.hypot(x[:, None], y), np.rad2deg(np.arctan2(y, x[:, None] + 1e-12))
    second = angles > np.interp(lengths, radii, edges)
    height = np.where(second.any(1), y[second.argmax(1)], 1.0)  # from below: where feature 2 begins
    first, above = np.zeros_like(x), np.ones_like(x)
    shown = np.where(second.any(1), height, np.nan)  # no line where the boundary is outside of the frame
    common, edge, line = tuple(x.tolist()), tuple(height.tolist()), tuple(shown.tolist())
    return (
        st.Curve(common, line, "", "predicted", 0, tuple(first.tolist()), edge),
        st.Curve(common, line, "boundary of the basins", "predicted", 1, edge, tuple(above.tolist())),
    )


def _circle(turned: np.ndarray, norm: float) -> np.ndarray:
    """Return states at the radius of the starts by angle, (angles, 3)."""
    return np.stack([RADIUS * np.cos(turned), RADIUS * np.sin(turned), np.full(len(turned), norm)], 1)


def two_features(probability: float) -> ContrastiveTask:
    """Return the task of a sign and of a feature of this probability, of equal second moments."""
    return ContrastiveTask(features=(sparse_feature(), sparse_feature(probability)))


def second_feature_state(task: ContrastiveTask) -> stationary.StationaryState:
    """Return the stationary state that has learned feature 2 alone."""
    found = stationary.stationary_states(task, [SECOND], NODES)
    return next(state for state in found if abs(state.overlaps[1]) > 0.1)
