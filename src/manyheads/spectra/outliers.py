r"""Singular values beyond the Marchenko-Pastur edge, with the fluctuations of a finite matrix.

The largest squared singular value of an m x n matrix of independent entries of variance :math:`\sigma^2` lies at
:math:`\sigma^2 (\mu + s\, T)`, T of the Tracy-Widom law of order one: the bare edge
:math:`\sigma^2 (\sqrt m + \sqrt n)^2` is passed by chance in one matrix of six. A value counts if it is beyond the 99%
quantile for the matrix that is left when the k larger values are taken out: of k rows and columns less, and of the
variance of the rest (Kritchman and Nadler).
"""

import numpy as np

from manyheads._namespaces import Floats
from manyheads.spectra.levels import finite_edge

TRACY_WIDOM_QUANTILE = 2.0234
"""99% quantile of the Tracy-Widom law of order one (Bejan 2005, table 2)."""


def count_beyond_edge(squares: Floats, rows: int, columns: int) -> int:
    r"""Count the singular values beyond the edge of a matrix of independent entries.

    A matrix of independent entries of one variance has none in 99 of 100 cases. One whose rows differ in scale, or
    whose entries have heavy tails, may have some without any structure; a structure weaker than
    :math:`\sigma (m n)^{1/4}` leaves no value beyond the edge (Baik, Ben Arous and Péché).

    `squares` (min(rows, columns),) are all squared singular values, in any unit, ascending; the last is not tested.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> noise = rng.standard_normal((80, 40))
    >>> spiked = noise + 25 * np.outer(np.eye(80)[0], np.eye(40)[0])
    >>> [count_beyond_edge(np.linalg.eigvalsh(each.T @ each), 80, 40) for each in (noise, spiked)]
    [0, 1]

    References
    ----------
    Kritchman and Nadler (2008), Determining the number of components in a factor model from limited noisy data,
    Chemometrics and Intelligent Laboratory Systems 94. Baik, Ben Arous and Péché (2005), Phase transition of the
    largest eigenvalue for nonnull complex sample covariance matrices, Annals of Probability 33.
    """
    remaining = np.cumsum(np.maximum(squares, 0.0))  # of the values up to each
    for count in range(len(squares) - 1):
        m, n = rows - count, columns - count
        centre, scale = finite_edge(m, n)
        variance = remaining[-1 - count] / (m * n)
        if not squares[-1 - count] > variance * (centre + TRACY_WIDOM_QUANTILE * scale):
            return count
    return len(squares) - 1
