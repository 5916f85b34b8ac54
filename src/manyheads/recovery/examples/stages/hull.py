r"""Stages two, four and five: affine hull of the attention matrices, from certified rows, and its span.

Every equation of a certificate (`manyheads.recovery.examples.stages.agreement`) holds for all heads: (Theta_i, 1) is
orthogonal to a = [vec(x_r^T u), -t]. If certificates are exact and in general position, nothing else is orthogonal to
all of them, so that the null space of the mean of a a^T is spanned by the (Theta_i, 1), whose points with last entry
one are the affine hull

.. math:: \Big\{\sum_s c_s B_s : \sum_s c_s h_s = 1\Big\}, \qquad (B_s, h_s) \text{ the bottom } m \text{ eigenvectors.}

With certificates from an estimated sum of projections the bottom eigenvectors are near that space, and the gap above
the m-th eigenvalue says whether there is one. A false certificate, in which the heads differ and the label lies in the
simplex by accident, misses by much: rows are weighed again by how far they are from the bottom space (Cauchy's
weights).

Stage four is stage two with the refined sum. Which rows are kept is a matter of rank: the best few, whatever their
misfit.

Stage five is the span of the hull. The hull of m matrices in general position spans their m-dimensional space, and that
space is spanned by the matrices of the bottom eigenvectors: every Theta_i is a combination of m known matrices from
here on, m^2 unknown numbers in place of m d^2.

References
----------
S. Chen, Y. Li, arXiv 2402.04084: certificates determine the affine hull, whose span stands in for the matrices. The
eigenproblem, the weights and the ranking are worked out here.

Smallest eigenvalues of the certificate matrix: dense, or matrix-free where it does not fit.

The matrix is the weighted mean of a a^T over equations, a = [vec(x_r^T u_s), -t_s] in d^2 + 1 dimensions. Every a is a
rank-one matrix beside a number, so that a product with a vector (B, h) costs O(d^2) an equation and no object with d^4
entries is needed: first all x_r B u_s^T - t_s h, then their sums against x_r^T u_s and -t_s. The bottom eigenvectors
are the top ones of the matrix taken from its largest eigenvalue, which is what Lanczos' method finds well.
"""

from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.sparse.linalg

from manyheads.recovery._types import Array, Generator
from manyheads.recovery.examples.stages.agreement import RowCertificates, certify_rows, join, measure_quality
from manyheads.recovery.examples.stages.shards import Shards, add_up, apply
from manyheads.recovery.refusals import CertificateShortage, HullGapError

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


SHOWN = 12  # eigenvalues that are kept


@dataclass(frozen=True)
class HullSettings:
    """Choice and weights of the certificates."""

    # Rows that are kept, the best ones; None for the larger of 16 d^2 and one in a hundred, at most half of all that
    # qualify
    kept: int | None = None
    floor: float = 0.02  # smallest weight of a token below which a row says nothing
    reweighings: int = 2  # how often rows are weighed again by their distance from the bottom space
    # Largest dimension for which the (d^2 + 1, d^2 + 1) matrix is formed; above, only products with it are
    dense: int = 32


@dataclass(frozen=True)
class Hull:
    """An affine hull of matrices, and the evidence for it."""

    basis: Array  # B (m, d, d)
    heights: Array  # h (m,): sum_s c_s B_s is in the hull if sum_s c_s h_s = 1
    eigenvalues: Array  # the smallest eigenvalues of the certificates, rising, more than m
    kept: int  # rows that were kept
    threshold: float  # quality of the worst of them

    @property
    def gap(self) -> float:
        """Eigenvalue m + 1 over eigenvalue m, which counts as rounding at least: the largest gap is 1e16."""
        heads = len(self.heights)
        if len(self.eigenvalues) <= heads or not self.eigenvalues[-1] > 0:
            return 1.0  # nothing lies above, or nothing is measured: no hull stands out
        return float(self.eigenvalues[heads] / max(self.eigenvalues[heads - 1], 1e-16 * self.eigenvalues[-1]))

    @property
    def nearest(self) -> Array:
        r"""The point of the hull of smallest norm, (d, d).

        With G = (<B_s, B_t>), c = G^{-1} h / (h . G^{-1} h). Differences of heads are orthogonal to it, so that
        <Theta_i, nearest> is the same for all heads.
        """
        flat = self.basis.reshape(len(self.heights), -1)
        inner = flat @ flat.T
        mixture = np.linalg.solve(inner + 1e-13 * np.trace(inner) * np.eye(len(inner)), self.heights)
        return np.tensordot(mixture / (mixture @ self.heights), self.basis, 1)


def choose_rows(data: Shards, total: Array, settings: HullSettings) -> tuple[list[RowCertificates], float]:
    """Keep the best rows: two passes over the shards, one for the exact threshold, one for the rows below it."""
    wanted = settings.kept or max(16 * data.dim**2, data.rows // 100)
    needed = 2 * data.dim**2 // (data.length - 1)
    ranked = data.smallest(measure_quality, 2 * wanted, total, settings.floor)
    count = min(wanted, len(ranked) // 2)  # half of what qualifies, at most: certificates are the better rows
    why = f"{count} of {data.rows} rows can be certified: give more examples, or less saturated attention"
    CertificateShortage.if_below(count, needed, why)
    threshold = float(ranked[count - 1])
    threshold = max(threshold, 1e-12)  # rows that are all perfect to rounding are all kept
    return data.map(certify_rows, total, settings.floor, threshold), threshold


def find_hull(data: Shards, total: Array, heads: int, settings: HullSettings) -> Hull:
    """Find the affine hull of the attention matrices of so many heads."""
    return fit_hull(data, *choose_rows(data, total, settings), heads, settings)


def fit_hull(data: Shards, parts: list[RowCertificates], threshold: float, heads: int, settings: HullSettings) -> Hull:
    """Find the affine hull from certificates that are already chosen; see `find_hull`."""

    def fit(weights: list[Array]) -> Hull:
        if data.dim <= settings.dense:
            values, vectors = find_bottom_dense(parts, weights, max(SHOWN, heads + 1), data.executor)
        else:
            start = np.random.default_rng(data.dim)  # any start finds the same space
            values, vectors = find_bottom_by_products(parts, weights, heads + 1, start)
        basis = vectors[:-1, :heads].T.reshape(heads, data.dim, data.dim)
        return Hull(basis.copy(), vectors[-1, :heads].copy(), values, sum(map(len, parts)), threshold)

    weights = trust = [part.trust for part in parts]
    for _ in range(settings.reweighings):
        misses = apply(data.executor, _miss, parts, [fit(weights)] * len(parts))
        scale = max(2 * weighted_median(np.concatenate(misses), np.concatenate(trust)), 1e-14)
        weights = [own / np.square(1 + np.square(miss / scale)) for own, miss in zip(trust, misses, strict=True)]
    return fit(weights)


def weighted_median(values: Array, weights: Array) -> float:
    """Return the value at which half of the weight is reached; values of no weight do not matter."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(below, below[-1] / 2)]])


def _miss(certificates: RowCertificates, hull: Hull) -> Array:
    """Return how far each row is from the bottom space, (n,)."""
    return np.sqrt(np.square(certificates.misses(hull.basis, hull.heights)).sum((1, 2)))


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
