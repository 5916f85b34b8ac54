"""Smallest eigenvalues of the certificate matrix: dense, or matrix-free where it does not fit.

The matrix is the weighted mean of a a^T over equations, a = [vec(x_r^T u_s), -t_s] in d^2 + 1 dimensions. Every a is a
rank-one matrix beside a number, so that a product with a vector (B, h) costs O(d^2) an equation and no object with d^4
entries is needed: first all x_r B u_s^T - t_s h, then their sums against x_r^T u_s and -t_s. The bottom eigenvectors
are the top ones of the matrix taken from its largest eigenvalue, which is what Lanczos' method finds well.
"""

from concurrent.futures import Executor

import numpy as np
import scipy.linalg
import scipy.sparse.linalg

from manyheads.recovery._types import Array, Generator
from manyheads.recovery.examples.stages.agreement import RowCertificates, join
from manyheads.recovery.examples.stages.shards import add_up, apply
from manyheads.recovery.refusals import HullGapError

BLOCK = 4096  # equations that are written out at a time
ACCURACY = 1e-10  # of the matrix-free eigenvectors, relative to the largest eigenvalue


def measure_gram(certificates: RowCertificates, weights: Array) -> tuple[Array, float]:
    """Return the sums of weight a a^T (d^2 + 1, d^2 + 1), and of weights, of the equations of certificates (n,)."""
    _, dim = certificates.query.shape
    kinds = certificates.mixes.shape[1]
    total = np.zeros((dim**2 + 1, dim**2 + 1))
    step = max(1, BLOCK // kinds)
    for begin in range(0, len(certificates), step):
        part = slice(begin, begin + step)
        root = np.sqrt(weights[part])[:, None]
        mixes = certificates.mixes[part] * root[..., None]  # (n, k-1, d)
        rows = np.empty((len(root), kinds, dim**2 + 1))
        rows[..., :-1] = (certificates.query[part, None, :, None] * mixes[:, :, None, :]).reshape(len(root), kinds, -1)
        rows[..., -1] = -certificates.targets[part] * root
        flat = rows.reshape(-1, dim**2 + 1)
        total += flat.T @ flat
    return total, float(weights.sum())


def find_bottom_dense(
    parts: list[RowCertificates], weights: list[Array], count: int, executor: Executor | None = None
) -> tuple[Array, Array]:
    """Return the smallest eigenvalues, rising, and their vectors, from the matrix itself."""
    total, weight = add_up(apply(executor, measure_gram, parts, weights))
    mean = total / weight
    last = min(count, len(mean)) - 1
    values, vectors = scipy.linalg.eigh(mean, subset_by_index=(0, last), driver="evr")
    return np.maximum(values, 0.0), _fix_signs(vectors)


def find_bottom_by_products(
    parts: list[RowCertificates], weights: list[Array], count: int, rng: Generator
) -> tuple[Array, Array]:
    """Return the smallest eigenvalues, rising, and their vectors, by Lanczos' method on products alone."""
    certificates, trust = join(parts), np.concatenate(weights)
    trust = trust / trust.sum()
    size = certificates.query.shape[1] ** 2 + 1

    def multiply(vector: Array) -> Array:
        return multiply_gram(certificates, trust, vector)

    start = rng.standard_normal(size)
    whole = scipy.sparse.linalg.LinearOperator((size, size), matvec=multiply, dtype=np.float64)
    try:
        top = scipy.sparse.linalg.eigsh(whole, 1, which="LA", v0=start, tol=1e-2, return_eigenvectors=False)[0]
        top *= 1.05  # above the largest one for certain
        turned = scipy.sparse.linalg.LinearOperator(
            (size, size), matvec=lambda vector: top * vector.ravel() - multiply(vector), dtype=np.float64
        )
        subspace = min(size - 1, max(4 * count, 40))
        values, vectors = scipy.sparse.linalg.eigsh(
            turned, count, which="LA", v0=start, tol=ACCURACY, ncv=subspace, maxiter=40
        )
    except scipy.sparse.linalg.ArpackNoConvergence as error:
        few = len(error.eigenvalues)
        what = f"only {few} of {count} eigenvectors of the certificates converged: give more examples"
        raise HullGapError(what, few, count) from error
    order = np.argsort(-values)
    return np.maximum(top - values[order], 0.0), _fix_signs(vectors[:, order])


def multiply_gram(certificates: RowCertificates, weights: Array, vector: Array) -> Array:
    """Return the sum of weight a (a . v) over equations, (d^2 + 1,), in O(d^2) operations an equation."""
    dim = certificates.query.shape[1]
    flat = np.asarray(vector).ravel()
    misses = certificates.misses(flat[None, :-1].reshape(1, dim, dim), flat[-1:])[..., 0] * weights[:, None]  # (n, k-1)
    mixed = np.matmul(misses[:, None], certificates.mixes)[:, 0]  # (n, d)
    return np.append((certificates.query.T @ mixed).ravel(), -np.vdot(misses, certificates.targets))


def _fix_signs(vectors: Array) -> Array:
    """Return the vectors with positive last entries, so that equal problems have equal answers."""
    return vectors * np.where(vectors[-1] < 0, -1.0, 1.0)
