"""Gaussian fields of a given covariance, and response functions by Stein's lemma (no derivatives).

Sources are r = L z with L the Cholesky factor of the kernel so far and z fixed normals, so that a longer kernel extends
r without changing it. Responses come from Gaussian integration by parts (Stein): for any functional x of r

    <dx / dr_b> = sum_j <x z_j> (L^-1)_jb.

Its noise is of order one while the response is of the order of the richness; the same process *frozen* at its start,
driven by the same z without anything learned, has no response in these channels, so x minus its frozen twin has the
same mean and a noise that falls with the richness. (Derived here.)

A sampled branch needs, per sample (a component of a head, or a neuron), one normal for every field (which source) and
every row (which token at which time). Plain draws make every kernel noisy in proportion to the process itself.
*Matched* draws are whitened: over the samples the second moments of all fields and rows are exactly the identity, so
that whatever is linear in the sources is exact and only what is nonlinear is sampled. For attention heads every draw is
used with the signs of V and of Q flipped in all four ways, which makes odd mixed moments vanish as well.
"""

import numpy as np
from scipy.linalg import solve_triangular

from manyheads.errors import CertificateError, UsageError

JITTER, LARGEST_JITTER = 1e-9, 1e-3  # of the mean of the diagonal
NOTHING = 1e-100
SIGNS = np.array([[1, 1, 1, 1], [-1, 1, 1, 1], [1, -1, 1, 1], [-1, -1, 1, 1]], np.float64)  # of V, Q, K, O


def factor(kernel: np.ndarray) -> np.ndarray:
    """Return the Cholesky factor of a kernel that may be singular, with the smallest jitter that works.

    A kernel that is zero, as where nothing is trained yet, has a factor so small that what it drives is lost in
    rounding, and not so small that responses, which are divided by it, overflow.
    """
    symmetric = (kernel + kernel.T) / 2
    scale, jitter, lowest = float(np.abs(np.diag(symmetric)).mean()), JITTER, np.nan
    if scale == 0 and not symmetric.any():
        return NOTHING * np.eye(len(kernel))
    if np.isfinite(scale):
        while jitter <= LARGEST_JITTER:
            try:
                return np.linalg.cholesky(symmetric + jitter * scale * np.eye(len(kernel)))
            except np.linalg.LinAlgError:
                jitter *= 10
        lowest = float(np.linalg.eigvalsh(symmetric)[0]) / max(scale, NOTHING)
    raise CertificateError(
        "a kernel of the limit is not positive semi-definite: sample more, or take a smaller rate",
        measured=lowest,
        threshold=-LARGEST_JITTER,
    )


def stein_response(values: np.ndarray, normals: np.ndarray, root: np.ndarray) -> np.ndarray:
    """Stein's response (rows, columns) of values (rows, samples) to the source L z of normals (columns, samples)."""
    moments = values @ normals.T / values.shape[1]
    return solve_triangular(root, moments.T, lower=True, trans="T").T


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
