"""Distributions of the logits of single heads: shares below fixed levels, which are exactly unbiased in any sample.

Shares below levels of many networks have the mean that infinitely many networks would have; quantiles have not. So two
distributions are compared by the root mean square difference of their shares over all levels, and noise is taken off
as for any other mean (`manyheads.statistics.distances`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr

from manyheads.study import Curve
from manyheads.study.panels import Role, spread_curve

if TYPE_CHECKING:
    from jaxtyping import Float

LEVELS = np.linspace(-4, 4, 81)
"""Of a logit, in its unit."""

COARSE = 4  # so many levels make one bin of a picture


def pool_logits(
    logits: Float[np.ndarray, "network layer head sample token key"], units: Float[np.ndarray, "sample token key"]
) -> dict[str, np.ndarray]:
    """Describe the logits of all heads, samples and pairs of tokens of a network together, each in its unit.

    Returns
    -------
    `mean` and `square` (network,), the first two moments, and `below` (network, level), shares at or below `LEVELS`.
    """
    pooled = np.sort((logits / units).reshape(len(logits), -1), axis=-1)
    below = np.stack([np.searchsorted(row, LEVELS, side="right") for row in pooled]) / pooled.shape[1]
    return {"mean": pooled.mean(-1), "square": (pooled**2).mean(-1), "below": below}


def gaussian_below(mean: float, variance: float) -> np.ndarray:
    """Share of a Gaussian below every level, (level,).

    Examples
    --------
    >>> bool(np.allclose(gaussian_below(0.0, 1.0)[[20, 40]], [0.02275, 0.5], atol=1e-5))
    True
    """
    return ndtr((LEVELS - mean) / math.sqrt(max(variance, np.finfo(float).tiny)))


def hold_against_gaussian(
    below: Float[np.ndarray, "network level"],
    mean: Float[np.ndarray, " network"],
    square: Float[np.ndarray, " network"],
) -> tuple[Float[np.ndarray, "network level"], Float[np.ndarray, " level"]]:
    """Return shares of networks and of the Gaussian with their mean and variance, fit to be compared.

    The Gaussian is fitted to the same networks and follows their noise, so that less of it is left in the difference
    than networks scatter. To first order a network moves the difference by its shares less what its own moments move
    the Gaussian by; these have the networks' mean, and the right noise.
    """
    middle = float(mean.mean())
    each = square - 2 * middle * mean + middle**2  # mean squares about the common mean
    std = math.sqrt(max(float(each.mean()), np.finfo(float).tiny))
    places = (LEVELS - middle) / std
    slopes = np.exp(-(places**2) / 2) / math.sqrt(2 * math.pi) / std  # of the Gaussian's shares, at every level
    moved = np.outer(mean - middle, -slopes) + np.outer(each - each.mean(), -slopes * places / (2 * std))
    return below - moved, gaussian_below(middle, std**2)


def density_curve(below: np.ndarray, label: str, role: Role, group: int) -> Curve:
    """Density in bins of some levels, from shares below them (replicates or draws, level)."""
    edges = LEVELS[::COARSE]
    density = np.diff(below[:, ::COARSE], axis=-1) / np.diff(edges)
    density = np.where(density > 0, density, np.nan)  # an empty bin has no place on a logarithmic axis
    return spread_curve((edges[:-1] + edges[1:]) / 2, density, label, role, group)
