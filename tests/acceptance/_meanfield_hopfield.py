"""Self-attention with 1-bit tokens: the mean-field map, and finite networks against it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._studies import study, words_of
from tests.meanfield.hopfield import oracle

from manyheads.meanfield import OneBitNetwork, mean_field_trajectory


def map_against_loops(folder: Path, beta: float, steps: int, networks: int, seed: int) -> Measured:
    """Compare the map with plain loops, for the published configuration and for random ones."""
    rng, published = np.random.default_rng(seed), OneBitNetwork.published()
    difference = np.abs(mean_field_trajectory(published, beta, steps) - oracle.run(published, beta, steps)).max()
    others = []
    for _ in range(networks):
        network = replace(OneBitNetwork.random(rng, *rng.integers(1, 6, 2), int(rng.integers(0, 4))), gain=2.0)
        others.append(np.abs(mean_field_trajectory(network, beta, steps) - oracle.run(network, beta, steps)).max())
    passed = max(difference, *others) < 1e-12
    extent = f"{steps} steps, published configuration; {max(others):.1e} for {networks} random networks"
    return Measured(f"{difference:.1e}", extent, str(seed), bool(passed))


def verdicts(name: str, claim: str, replicates: int, flags: str = "") -> Figure:
    """Return the figure that consists of the verdicts of a study."""
    study_name = f"meanfield/hopfield-{name}"
    return Figure(
        f"hopfield-{name}",
        claim,
        "all verdicts as expected",
        study,
        {"name": study_name, "replicates": replicates, "flags": flags},
        command=words_of(study_name, replicates, flags),
    )


FIGURES = [
    Figure(
        "hopfield-map",
        "The mean-field map of 1-bit self-attention is that of an independent implementation (A-1)",
        "< 1e-12",
        map_against_loops,
        {"beta": 1.4, "steps": 50, "networks": 20, "seed": 1},
    ),
    verdicts("finite-size", "Overlaps of finite 1-bit networks deviate by N^(-1/2) (A-2)", 8),
]
