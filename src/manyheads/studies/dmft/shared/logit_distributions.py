"""Distributions of the logits of single heads: shares below fixed levels, which are exactly unbiased in any sample.

Shares below levels of many networks have the mean that infinitely many networks would have; quantiles have not. So two
distributions are compared by the root mean square difference of their shares over all levels, and noise is taken off
as for any other mean (`manyheads.statistics.distances`).

Before training a logit is q . k of two independent Gaussian vectors of dimension N. With u = (q + k)/sqrt(2) and
v = (q - k)/sqrt(2), independent and Gaussian, q . k = (u^2 - v^2)/2 is the difference of two independent Gamma(N/2)
variables: a symmetric variance-gamma law, Laplace's at N = 2. Its cumulants of even order 2m are N (2m - 1)!, so the
variance is N and the excess kurtosis 6/N: Gaussian as N grows. (Derived here.)
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy.special import gammainc, gammaincinv, ndtr

from manyheads.study import Curve
from manyheads.study.panels import Multiples, Role, spread_curve

LEVELS = np.linspace(-4, 4, 81)
"""Of a logit, in its unit."""

COARSE = 4  # so many levels make one bin of a picture
NODES = 400  # of Gauss and Legendre, in the probability of the second variable


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


def excess_kurtosis(key_dim: int) -> float:
    """Excess kurtosis 6/N of a logit before training."""
    return 6 / key_dim


@lru_cache(maxsize=64)
def product_below(key_dim: int) -> np.ndarray:
    """Share of logits q . k / sqrt(N) at or below every level of `LEVELS`, (level,).

    Examples
    --------
    >>> laplace = np.exp(-np.sqrt(2) * np.abs(LEVELS)) / 2  # of variance one
    >>> bool(np.allclose(product_below(2), np.where(LEVELS < 0, laplace, 1 - laplace), atol=1e-4))
    True
    """
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    shape, probabilities = key_dim / 2, (1 + nodes) / 2
    other = gammaincinv(shape, probabilities)
    distances = np.abs(LEVELS) * np.sqrt(key_dim)
    above = gammainc(shape, distances[:, None] + other) @ (weights / 2)  # P(difference <= distance)
    return np.where(LEVELS < 0, 1 - above, above)


def densities(
    title: str, x_label: str, plots: Mapping[tuple[str, str], Mapping[str, xr.DataArray]], note: str
) -> Multiples:
    """Draw densities in bins of some levels, in small plots by their labels of row and column.

    `plots` are shares below levels: of networks, of a prediction, and of a reference.
    """
    rows, columns = (tuple(dict.fromkeys(labels)) for labels in zip(*plots, strict=True))
    edges = LEVELS[::COARSE]

    def curves(plot: Mapping[str, xr.DataArray]) -> Iterator[Curve]:
        roles: tuple[Role, ...] = ("trained", "predicted", "reference")
        for group, (role, (label, below)) in enumerate(zip(roles, plot.items(), strict=True)):
            below = below.mean("network") if "network" in below.dims else below
            density = np.diff(below.values[..., ::COARSE], axis=-1) / np.diff(edges)
            density = np.where(density > 0, density, np.nan)  # an empty bin has no place on a logarithmic axis
            yield spread_curve((edges[:-1] + edges[1:]) / 2, density, label, role, group)

    table = tuple(tuple(tuple(curves(plots[row, column])) for column in columns) for row in rows)
    return Multiples(title, x_label, "density", table, rows, columns, log_y=True, note=note)
