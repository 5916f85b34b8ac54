"""Contrastive learning: SGD against the ODE, growth rates, basins, noise correlation, particles."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._studies import study, words_of

from manyheads.studies.meanfield.contrastive.feature_basins import second_feature_state, two_features
from manyheads.studies.meanfield.contrastive.noise_correlation import one_feature, stationary_cosine
from manyheads.theory.meanfield import ContrastiveTask, overlap_trajectory, train_overlaps
from manyheads.theory.meanfield.contrastive.quadrature import Nodes
from manyheads.theory.meanfield.contrastive.stationary_states import (
    basin_boundary,
    growth_rates,
    norms_without_features,
)
from manyheads.theory.meanfield.contrastive.task import FeatureDistribution, logistic_loss, sparse_feature

START = (0.15, 0.1, 0.5)
COSINES = {  # of the specification, by noise; correlations -0.9, -0.5, 0, 0.5, 0.9
    0.25: (0.9796, 0.9795, 0.9792, 0.9789, 0.9785),
    0.5: (0.9593, 0.9591, 0.9589, 0.9584, 0.9571),
    0.75: (0.9119, 0.9112, 0.9107, 0.9095, 0.9078),
}


def sgd_error(folder: Path, dimensions: list[int], runs: int, seed: int) -> Measured:
    """Fit the rms distance over Q1, Q2, q and 50 times against n."""
    times, errors = np.linspace(0, 30, 51)[1:], []
    limit = overlap_trajectory(ContrastiveTask(), START, times)
    for size in dimensions:
        rng = np.random.default_rng([seed, size])
        path = train_overlaps(ContrastiveTask(), np.tile(START, (runs, 1)), size, times, rng)
        errors.append(float(np.sqrt(((path - limit[:, None]) ** 2).mean())))
    slope = np.polyfit(np.log(dimensions), np.log(errors), 1)[0]
    extent = ", ".join(f"n={size}: {error:.4f}" for size, error in zip(dimensions, errors, strict=True))
    shown = f"slope {slope:.3f}, error {errors[-1]:.4f} at n = {dimensions[-1]}"
    return Measured(shown, extent, f"{seed}, {runs} runs each", bool(-0.75 <= slope <= -0.4 and errors[-1] < 0.02))


def squared_hinge(anchor: Array, positive: Array, negative: Array) -> Array:
    """Return a smooth loss that is not logistic: the squared softplus of the margin."""
    return jax.nn.softplus(1 + anchor * (negative - positive)) ** 2 / 2


def equal_growth(folder: Path, kurtoses: list[float]) -> Measured:
    """Compare growth rates at Q = 0 of features with equal second moment, and of four values."""
    features = [sparse_feature(1 / kurtosis) for kurtosis in kurtoses]
    features.append(FeatureDistribution((-2.0, -0.5, 0.5, 2.0), (0.1, 0.4, 0.4, 0.1)))  # second moment 1
    norm = norms_without_features(ContrastiveTask())[-1]
    rates, others = (
        [growth_rates(ContrastiveTask((sparse_feature(), f), loss=loss), (0.0, 0.0, norm))[1] for f in features]
        for loss in (logistic_loss, squared_hinge)
    )
    twice = growth_rates(ContrastiveTask((sparse_feature(), sparse_feature(1.0, 2.0))), (0.0, 0.0, norm))[1]
    passed = max(np.ptp(rates), np.ptp(others)) < 1e-12 and abs(rates[0] - 0.2242) < 1e-3 and abs(twice - 0.4617) < 1e-3
    return Measured(
        f"{rates[0]:.6f}, spread {np.ptp(rates):.1e}; of another loss {others[0]:.6f}, spread {np.ptp(others):.1e}",
        f"second moment 2: {twice:.4f}",
        "none",
        bool(passed),
    )


def boundary(folder: Path, probabilities: list[float], horizon: float) -> Measured:
    """Locate the boundary of the basins, and the growth rate of feature 1 where feature 2 is learned."""
    tasks = [two_features(probability) for probability in probabilities]
    angles = [basin_boundary(task, horizon=horizon) for task in tasks]
    rates = [growth_rates(task, second_feature_state(task).state)[0] for task in tasks]
    passed = abs(angles[0] - 45) <= 0.4 and abs(angles[1] - 54) <= 1 and min(angles[2:]) >= 87
    passed = passed and rates[1] < 0 < rates[2] and np.allclose(rates, (-0.0917, -0.0073, 0.082, 0.166), atol=1e-3)
    shown = ", ".join(f"{angle:.2f}" for angle in angles)
    return Measured(shown, "rates " + ", ".join(f"{rate:.4f}" for rate in rates), "none", bool(passed))


def cosine_table(folder: Path, error: float) -> Measured:
    """Compare stationary cosines with the specification's table, at two node counts."""
    rho, found, nodes = (-0.9, -0.5, 0.0, 0.5, 0.9), [], Nodes(48, 16, 48)
    for noise in COSINES:
        found.append([stationary_cosine(one_feature(noise, 0.5, one), nodes) for one in rho])
    worst = np.abs(np.array(found) - np.array(list(COSINES.values()))).max()
    fast = [stationary_cosine(one_feature(0.5, 2.0, one), nodes) for one in rho[:4]]
    strong = [stationary_cosine(one_feature(1.0, 0.5, one), nodes) for one in rho]
    passed = worst < error and np.abs(np.array(fast) - (0.8528, 0.8495, 0.8460, 0.8419)).max() < error
    passed = passed and abs(fast[0] - fast[2] - 0.0068) < 3e-4 and strong[0] < strong[2]
    shown = "tau 2: " + ", ".join(f"{one:.4f}" for one in fast)
    extent = f"table off by {worst:.1e} at most; noise 1: " + ", ".join(f"{one:.4f}" for one in strong)
    return Measured(shown, extent, "none", bool(passed))


def verdicts(name: str, claim: str, replicates: int) -> Figure:
    """Return the figure that consists of the verdicts of a study."""
    name = f"meanfield/{name}"
    settings = {"name": name, "replicates": replicates}
    figure = name.replace("meanfield/", "study-")
    return Figure(figure, claim, "all verdicts as expected", study, settings, command=words_of(name, replicates))


FIGURES = [
    Figure(
        "contrastive-sgd-error",
        "SGD for contrastive learning in n dimensions against the ODE (C-1)",
        "slope in [-.75, -.4], error below .02 at n = 3200",
        sgd_error,
        {"dimensions": [50, 100, 200, 400, 800, 1600, 3200], "runs": 16, "seed": 0},
    ),
    Figure(
        "contrastive-growth",
        "Growth rates at Q = 0 for kurtosis 1, 4, 10 and equal second moments, two losses (C-2)",
        "equal to 1e-12; .2242 and, for twice the second moment, .4617, within .001",
        equal_growth,
        {"kurtoses": [1.0, 4.0, 10.0]},
        revision=2,
    ),
    Figure(
        "contrastive-basins",
        "Boundary angle of the basins, and stability of the state of feature 2, P = 1, .5, .25, .1 (C-3)",
        "45 within .4, 54 within 1, at least 87; rates within .001 of -.0917, -.0073, .082, .166",
        boundary,
        {"probabilities": [1.0, 0.5, 0.25, 0.1], "horizon": 200.0},
    ),
    Figure(
        "contrastive-noise",
        "Stationary cosine by noise and its correlation (C-4)",
        "table and learning rate 2 within .003 (error of its nodes), gain .0068 within .0003; lower at noise 1",
        cosine_table,
        {"error": 3e-3},
    ),
    replace(verdicts("contrastive-sgd", "SGD against the ODE; escape from random weights", 8), revision=2),
    verdicts("feature-basins", "Moments, basins and stability, by SGD", 8),
    verdicts("noise-correlation", "Correlation of augmentation noise, by SGD", 8),
    verdicts("sparse-penalty", "L1 penalty, SGD against particles", 12),
]
