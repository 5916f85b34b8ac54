"""Stage five: span of the attention matrices, and the number of heads from its spectrum.

The hull of m matrices in general position spans their m-dimensional space, and that space is spanned by the matrices of
the bottom eigenvectors; nothing new has to be computed. Every Theta_i is a combination of m known matrices from here
on: m^2 unknown numbers in place of m d^2.

References
----------
S. Chen, Y. Li, arXiv 2402.04084: the span stands in for the unknown matrices.
"""

from __future__ import annotations

import numpy as np

from manyheads.recovery._types import Array
from manyheads.recovery.examples.stages.hull import Hull


def span_of(hull: Hull) -> Array:
    """Return an orthonormal basis (m, d, d) of the span of a hull."""
    flat = hull.basis.reshape(len(hull.basis), -1)
    return np.linalg.qr(flat.T)[0].T.reshape(hull.basis.shape)


def measure_span_error(span: Array, theta: Array) -> float:
    """Return the largest share of a matrix theta_i (m, d, d) that lies outside an orthonormal span."""
    flat, basis = theta.reshape(len(theta), -1), span.reshape(len(span), -1)
    outside = flat - (flat @ basis.T) @ basis
    return float((np.linalg.norm(outside, axis=1) / np.linalg.norm(flat, axis=1)).max())


def count_by_gap(eigenvalues: Array) -> int:
    """Read the number of heads off the largest gap, in logarithms, of rising eigenvalues."""
    logs = np.log(np.maximum(eigenvalues, 1e-14 * eigenvalues[-1]))
    return int(np.argmax(np.diff(logs))) + 1
