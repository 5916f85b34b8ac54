"""Law of an attention logit before training: q . k of two independent Gaussian vectors of dimension N.

With u = (q + k)/sqrt(2) and v = (q - k)/sqrt(2), independent and Gaussian, q . k = (u^2 - v^2)/2 is the difference of
two independent Gamma(N/2) variables: a symmetric variance-gamma law, Laplace's at N = 2. Its cumulants of even order
2m are N (2m - 1)!, so the variance is N and the excess kurtosis 6/N: Gaussian as N grows. (Derived here.)
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.special import gammainc, gammaincinv

from manyheads.studies.dmft.shared.logit_distributions import LEVELS

NODES = 400  # of Gauss and Legendre, in the probability of the second variable


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
