"""What the studies of this wing share: their source, and a NumPy generator from a replicate's key."""

from __future__ import annotations

import jax
import numpy as np

from manyheads.study import Source

SOURCE = Source(
    "chen2024",
    "Provably learning a multi-head attention layer",
    "Sitan Chen and Yuanzhi Li",
    2025,
    kind="inproceedings",
    venue="Proceedings of the 57th Annual ACM Symposium on Theory of Computing",
    identifier="2402.04084",
    locus="outline of the algorithm; what is compared with it is derived here",
)


def generator(key: jax.Array) -> np.random.Generator:
    """Return the generator of a replicate."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))
