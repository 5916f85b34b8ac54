"""Effective rank and participation ratio of matrices from their squared singular values."""

import numpy as np
from scipy import special

from manyheads._namespaces import Floats

EPS = float(np.finfo(np.float64).eps)


def rank_measures(squares: Floats) -> tuple[Floats, Floats]:
    r"""Return effective rank and participation ratio from squared singular values (..., n) of Gram matrices.

    .. math:: e^{-\sum_i p_i \ln p_i}, \quad p_i = \frac{\sigma_i}{\sum_j \sigma_j}, \qquad
        \frac{(\sum_i \sigma_i^2)^2}{\sum_i \sigma_i^4};

    0 where all are zero. What the Gram matrix rounds, below 16 n eps of the largest square, counts as zero.

    Examples
    --------
    >>> [round(float(each), 12) for each in rank_measures(np.array([0.0, 1.0, 1.0]))]
    [2.0, 2.0]
    """
    top = squares.max(axis=-1, keepdims=True, initial=0.0)
    squares = np.where(squares > 16 * squares.shape[-1] * EPS * top, squares, 0.0) / np.where(top == 0, 1, top)
    values = np.sqrt(squares)
    nonzero = top[..., 0] != 0
    total = np.where(nonzero, values.sum(axis=-1), 1)
    effective = np.exp(special.entr(values / total[..., None]).sum(axis=-1))
    participation = squares.sum(axis=-1) ** 2 / np.where(nonzero, (squares**2).sum(axis=-1), 1)
    return np.where(nonzero, effective, 0.0), participation
