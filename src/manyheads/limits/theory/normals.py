"""Standard normal numbers for the sampled branches, with their second moments made exact.

A sampled branch needs, per sample (a component of a head, or a neuron), one normal for every field (which source) and
every row (which token at which time). Plain draws make every kernel noisy in proportion to the process itself.
*Matched* draws are whitened: over the samples the second moments of all fields and rows are exactly the identity, so
that whatever is linear in the sources is exact and only what is nonlinear is sampled. For attention heads every draw is
used with the signs of V and of Q flipped in all four ways, which makes odd mixed moments vanish as well.
"""

import numpy as np

from manyheads.errors import UsageError

SIGNS = np.array([[1, 1, 1, 1], [-1, 1, 1, 1], [1, -1, 1, 1], [-1, -1, 1, 1]], np.float64)  # of V, Q, K, O


def matched_normals(rng: np.random.Generator, fields: int, rows: int, samples: int) -> np.ndarray:
    """Draw (fields, rows, samples) normals whose empirical second moments over the samples are exactly the identity.

    Raises
    ------
    UsageError
        Fewer samples than twice fields x rows: too few to whiten.
    """
    size = fields * rows
    if samples < 2 * size:
        raise UsageError(
            f"{samples} samples for {size} fields and rows: at least {2 * size} are needed to match moments"
        )
    draws = rng.standard_normal((size, samples))
    factor = np.linalg.cholesky(draws @ draws.T / samples)
    return np.linalg.solve(factor, draws).reshape(fields, rows, samples)


def signed_normals(rng: np.random.Generator, rows: int, heads: int, width: int) -> np.ndarray:
    """Draw normals (4, rows, heads * width) for V, Q, K, O of heads: matched, in groups of four signs.

    Raises
    ------
    UsageError
        A number of heads that four does not divide, or too few of them.
    """
    if heads % 4:
        raise UsageError(f"{heads} heads: they come in groups of four signs")
    draws = matched_normals(rng, 4, rows, heads // 4 * width)  # (4, rows, heads / 4 * width)
    signed = draws[:, :, None, :] * SIGNS.T[:, None, :, None]  # (4, rows, sign, ...)
    return np.ascontiguousarray(signed.reshape(4, rows, heads * width))
