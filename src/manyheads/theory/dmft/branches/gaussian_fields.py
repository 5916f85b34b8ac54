"""Gaussian fields of a given covariance, and response functions by Stein's lemma (no derivatives).

Sources are r = L z with L the Cholesky factor of the kernel so far and z fixed normals, so that a longer kernel extends
r without changing it. Responses come from Gaussian integration by parts (Stein): for any functional x of r

    <dx / dr_b> = sum_j <x z_j> (L^-1)_jb.

Its noise is of order one while the response is of the order of the richness; the same process *frozen* at its start,
driven by the same z without anything learned, has no response in these channels, so x minus its frozen twin has the
same mean and a noise that falls with the richness. (Derived here.)
"""

import numpy as np
from scipy.linalg import solve_triangular

from manyheads.errors import CertificateError

JITTER, LARGEST_JITTER = 1e-9, 1e-3  # of the mean of the diagonal
NOTHING = 1e-100


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
