"""Reference levels of random matrices: stable rank, coherence, Marchenko-Pastur law and outliers, causal entropy."""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from manyheads._arrays import takes_arrays
from manyheads._extras import Float
from manyheads._namespaces import Floats
from manyheads.errors import UsageError, check_integer

TRACY_WIDOM_QUANTILE = 2.0234
"""99% quantile of the Tracy-Widom law of order one (Bejan 2005, table 2)."""
TRACY_WIDOM_MEAN = -1.2065335745820
"""Mean of the Tracy-Widom law of order one (Bornemann 2010)."""


def marchenko_pastur_edges(rows: int, columns: int, variance: float = 1.0) -> tuple[float, float]:
    r"""Edges of the squared singular values of an (m, n) matrix of independent entries of mean zero.

    .. math:: \sigma^2 (\sqrt m \mp \sqrt n)^2

    Examples
    --------
    >>> marchenko_pastur_edges(400, 100)
    (100.0, 900.0)

    References
    ----------
    Marchenko and Pastur (1967), Distribution of eigenvalues for some sets of random matrices, Math. USSR-Sbornik 1.
    """
    _check_shape(rows, columns, variance)
    small, large = math.sqrt(min(rows, columns)), math.sqrt(max(rows, columns))
    return variance * (large - small) ** 2, variance * (large + small) ** 2


@takes_arrays
def marchenko_pastur_density(
    squares: "Float[ArrayLike, '...']", rows: int, columns: int, variance: float = 1.0
) -> "Float[np.ndarray, '...']":
    r"""Density of the min(m, n) squared singular values of a matrix with independent entries.

    .. math:: p(x) = \frac{\sqrt{(x_+ - x)(x - x_-)}}{2 \pi \sigma^2 \min(m, n)\, x}

    between the edges of `marchenko_pastur_edges` and 0 outside; its integral is 1.

    Examples
    --------
    >>> marchenko_pastur_density([50.0, 500.0, 1000.0], 400, 100).round(6).tolist()
    [0.0, 0.001273, 0.0]
    """
    low, high = marchenko_pastur_edges(rows, columns, variance)
    x = np.asarray(squares, dtype=np.float64)
    inside = (x > low) & (x < high)
    safe = np.where(inside, x, 1.0)
    shape = np.sqrt(np.where(inside, (high - safe) * (safe - low), 0.0))
    return np.where(inside, shape / (2 * np.pi * variance * min(rows, columns) * safe), 0.0)


def random_stable_rank(rows: int, columns: int) -> float:
    r"""Stable rank that a large matrix of independent entries has: :math:`m n / (\sqrt m + \sqrt n)^2`.

    A finite matrix lies above this limit by about :math:`1.21\, (1/\sqrt m + 1/\sqrt n)^{1/3} / (\sqrt m + \sqrt n)`
    in relative terms, because its largest singular value fluctuates below the edge; see `expected_stable_rank`.

    Examples
    --------
    >>> round(random_stable_rank(3072, 768), 1)
    341.3
    """
    _check_shape(rows, columns)
    return rows * columns / (math.sqrt(rows) + math.sqrt(columns)) ** 2


def expected_stable_rank(rows: int, columns: int) -> float:
    r"""Stable rank expected of a Gaussian matrix of finite size, to second order.

    .. math:: \frac{m n}{\mu - 1.2065\, s}, \quad \mu = (\sqrt{m - \tfrac12} + \sqrt{n - \tfrac12})^2, \quad
        s = \sqrt\mu\, \Big(\frac1{\sqrt{m - 1/2}} + \frac1{\sqrt{n - 1/2}}\Big)^{1/3}

    with the mean of the Tracy-Widom law. Within 0.5% of simulation from 16 x 16 on.

    Examples
    --------
    >>> round(expected_stable_rank(512, 512), 1)
    129.7

    References
    ----------
    Johnstone (2001), On the distribution of the largest eigenvalue in principal components analysis, Annals of
    Statistics 29. Ma (2012), Accuracy of the Tracy-Widom limits for the extreme eigenvalues in white Wishart matrices,
    Bernoulli 18 (the halves).
    """
    _check_shape(rows, columns)
    edge, scale = finite_edge(rows, columns)
    return rows * columns / (edge + TRACY_WIDOM_MEAN * scale)


def finite_edge(rows: int, columns: int) -> tuple[float, float]:
    """Return centre and scale, at unit variance, of the Tracy-Widom law of the largest squared singular value."""
    m, n = math.sqrt(rows - 0.5), math.sqrt(columns - 0.5)
    return (m + n) ** 2, (m + n) * (1 / m + 1 / n) ** (1 / 3)


def random_coherence(dimension: int) -> float:
    r"""Mean of \|cos\| between independent random directions in `dimension` dimensions.

    .. math:: \frac{\Gamma(d/2)}{\sqrt\pi\, \Gamma((d + 1)/2)} \approx \sqrt{\frac{2}{\pi d}}

    Examples
    --------
    >>> round(random_coherence(1), 6), round(random_coherence(512), 4)
    (1.0, 0.0353)
    """
    dimension = check_integer("dimension", dimension)
    return math.exp(special.gammaln(dimension / 2) - special.gammaln((dimension + 1) / 2)) / math.sqrt(math.pi)


def causal_entropy_level(length: int) -> float:
    r"""Mean entropy of uniform causal attention in nats, the largest that a causal layer can have.

    .. math:: \frac1n \sum_{i=1}^n \ln i = \frac{\ln n!}{n}

    Examples
    --------
    >>> round(causal_entropy_level(35), 3)
    2.632
    """
    length = check_integer("length", length)
    return float(special.gammaln(length + 1)) / length


def _check_shape(rows: int, columns: int, variance: float = 1.0) -> None:
    check_integer("rows", rows)
    check_integer("columns", columns)
    if not 0 < variance < math.inf:
        raise UsageError(f"variance={variance}: expected a positive number")


def count_beyond_edge(squares: Floats, rows: int, columns: int) -> int:
    r"""Count the singular values beyond the Marchenko-Pastur edge, with the fluctuations of a finite matrix.

    The largest squared singular value of an m x n matrix of independent entries of variance :math:`\sigma^2` lies at
    :math:`\sigma^2 (\mu + s\, T)`, T of the Tracy-Widom law of order one: the bare edge
    :math:`\sigma^2 (\sqrt m + \sqrt n)^2` is passed by chance in one matrix of six. A value counts if it is beyond the
    99% quantile for the matrix that is left when the k larger values are taken out: of k rows and columns less, and of
    the variance of the rest (Kritchman and Nadler).

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
