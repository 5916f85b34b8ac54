"""JoMA's latents: hierarchies against theorem 5, the neuron table with its controls, and Scan and Snap."""

from pathlib import Path

import jax
import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._studies import study, words_of

from manyheads.theory.joma.systems.latent_tree_task import binary_tree
from manyheads.theory.joma.systems.one_layer_attention import make_cooccurrence, scan_and_snap_flow
from manyheads.theory.joma.theorems.scan_and_snap import reduced_trajectory, training_time


def tree_pairs(folder: Path, trees: int, samples: int) -> Measured:
    """Sample random trees and compare P(y_l = 1 | y_m = 1) with theorem 5, in standard errors."""
    worst, count = 0.0, 0
    for seed in range(trees):
        rng = np.random.default_rng(seed)
        rho, bias = float(rng.uniform(-0.9, 0.9)), tuple(float(each) for each in rng.uniform(-0.8, 0.8, 3))
        branching = tuple(int(each) for each in rng.integers(2, 4, int(rng.integers(2, 5))))
        leaves = np.asarray(binary_tree(branching, rho, bias).draw(jax.random.key(seed), samples).levels[-1]) == 1
        rho_0, edges = -float(np.mean(bias)), len(branching)
        gap = 1
        for height in range(1, edges + 1):  # leaf `gap` is the first that meets leaf 0 at this height
            lean = rho**edges * rho_0
            chance = 0.5 * (1 + rho ** (2 * height) - 2 * lean) / (1 - lean)
            here = leaves[:, 0]
            found = leaves[here, gap].mean()
            worst = max(worst, abs(found - chance) / (chance * (1 - chance) / here.sum()) ** 0.5)
            count += 1
            gap *= branching[edges - height]
    return Measured(f"{worst:.2f} standard errors", f"worst of {count} pairs", f"0-{trees - 1}", bool(worst < 4.5))


def one_path(folder: Path, seeds: int, ratios: list[float], reach: float) -> Measured:
    """Compare all logits of the whole flow with the path and its clock."""
    worst, progress = 0.0, np.concatenate([[0.0], np.geomspace(0.05, reach, 30)])
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        own, common, classes = -np.sort(-rng.uniform(0.1, 1, 5)), rng.uniform(0.5, 1.5, 8), int(rng.integers(2, 9))
        path = reduced_trajectory(own, common, classes, progress)
        expected = np.concatenate([np.tile(path.distinct, (1, classes)), path.common], 1)
        table = make_cooccurrence(np.tile(own, (classes, 1)), common)
        for ratio in ratios:
            times = training_time(own, common, classes, progress, attention_learning_rate=ratio)
            flow = scan_and_snap_flow(table, times, attention_learning_rate=ratio)
            worst = max(worst, float(np.abs(flow.logits - expected).max()))
    extent = f"largest error of a logit, {seeds} draws, ratios {ratios}, progress up to {reach:g}"
    return Measured(f"{worst:.1e}", extent, f"0-{seeds - 1}", bool(worst < 1e-6))


FIGURES = (
    Figure(
        "tree-pairs",
        "leaves of sampled trees occur together as theorem 5 says",
        "< 4.5 standard errors",
        tree_pairs,
        {"trees": 20, "samples": 20000},
    ),
    Figure(
        "one-path",
        "Scan and Snap runs along one path with a known clock, at every ratio of the learning rates",
        "< 1e-6",
        one_path,
        {"seeds": 6, "ratios": [0.1, 1.0, 10.0], "reach": 24.0},
    ),
    Figure(
        "scan-and-snap",
        "distinct tokens gain by co-occurrence, attention snaps, and the gain law is of first order",
        "every verdict as expected",
        study,
        {"name": "joma/scan-and-snap", "replicates": 8},
        command=words_of("joma/scan-and-snap", 8),
    ),
    Figure(
        "neurons",
        "the neuron table and its controls",
        "every verdict as expected",
        study,
        {"name": "joma/neurons", "replicates": 8},
        command=words_of("joma/neurons", 8),
        revision=2,
    ),
)
