"""Moment-matched standard normal draws for the sampled branches.

A sampled branch needs, per sample (a component of a head, or a neuron), one normal for every field (which source) and
every row (which token at which time). Plain draws make every kernel noisy in proportion to the process itself.
*Matched* draws are whitened: over the samples the second moments of all fields and rows are exactly the identity, so
that whatever is linear in the sources is exact and only what is nonlinear is sampled. For attention heads every draw is
used with the signs of V and of Q flipped in all four ways, which makes odd mixed moments vanish as well.
"""

import numpy as np
from scipy.linalg import solve_triangular

from manyheads.errors import UsageError

SIGNS = np.array([[1, 1, 1, 1], [-1, 1, 1, 1], [1, -1, 1, 1], [-1, -1, 1, 1]], np.float64)  # of V, Q, K, O


def fewest_neurons(rows: int) -> int:
    """Return how many neurons, with an inner and an outer source a row, match moments: twice their fields and rows."""
    return 2 * 2 * rows


def fewest_heads(rows: int, width: int) -> int:
    """Return how many heads of a width match moments: a quarter of them have draws of their own for four fields."""
    return 4 * -(-2 * 4 * rows // width)


def matched_normals(rng: np.random.Generator, fields: int, rows: int, samples: int) -> np.ndarray:
    """Draw (fields, rows, samples) normals whose empirical second moments over the samples are exactly the identity."""
    size = fields * rows
    if samples < 2 * size:
        raise UsageError(
            f"{samples} samples for {size} fields and rows: at least {2 * size} are needed to match moments"
        )
    draws = rng.standard_normal((size, samples))
    factor = np.linalg.cholesky(draws @ draws.T / samples)
    return solve_triangular(factor, draws, lower=True).reshape(fields, rows, samples)


def signed_normals(rng: np.random.Generator, rows: int, heads: int, width: int) -> np.ndarray:
    """Draw normals (4, rows, heads * width) for V, Q, K, O of heads: matched, in groups of four signs."""
    if heads % 4:
        raise UsageError(f"{heads} heads: they come in groups of four signs")
    fewest = fewest_heads(rows, width)
    if heads < fewest:
        raise UsageError(f"{heads} heads of key dimension {width}: at least {fewest} are needed to match moments")
    draws = matched_normals(rng, 4, rows, heads // 4 * width)  # (4, rows, heads / 4 * width)
    signed = np.empty((4, rows, 4, heads // 4 * width))  # (field, row, sign, ...), in the order of memory
    np.multiply(draws[:, :, None, :], SIGNS.T[:, None, :, None], out=signed)
    return signed.reshape(4, rows, heads * width)
