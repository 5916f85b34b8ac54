"""Normal points of low discrepancy: particles that stand for infinitely many with an error below N^(-1/2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import norm, qmc

from manyheads.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Float


def gaussian_points(dim: int, count: int, rng: np.random.Generator) -> Float[np.ndarray, "count dim"]:
    """Return scrambled Sobol points with a standard normal distribution; `count` is a power of two."""
    if count < 2 or count & (count - 1):
        raise UsageError(f"{count} points: expected a power of two, which makes Sobol points balanced")
    uniform = qmc.Sobol(dim, seed=rng).random(count)
    return norm.ppf(np.clip(uniform, 1e-12, 1 - 1e-12))
