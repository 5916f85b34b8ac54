r"""Benign landscape: fixed points of the attention, levels of the saddles, and a direction of negative curvature.

The two-timescale loss is :math:`L(\mu) = \frac12\operatorname{tr}(S_\circ - C S^{-1} C^\top)`, with :math:`B = C
S^{-1}` and the residual :math:`z = f° - B h`, for which :math:`E[z h^\top] = 0`. Three statements of the paper, in
this notation (its :math:`\Sigma_{\mu^\circ\mu}` is C, its :math:`\Sigma_{\mu\mu}` is S):

* *Fixed points.* :math:`\partial L/\partial W = -C^\top(C - C W S)` vanishes if and only if :math:`C W = C S^{-1}`,
  because :math:`C^\top C` and C have one null space: W itself is unique only where C is invertible.
* *Critical points.* The slope of L in the weight of a neuron is :math:`-B^\top E[z\,\sigma(w^\top x)]`, so a critical
  point whose first-layer weights span all features has :math:`B^\top z = 0`. If B is invertible, z = 0. Otherwise, with
  P the projector on the range of B, :math:`P f°` is fitted, P commutes with :math:`S_\circ`, and L is *half a sum of
  eigenvalues of* :math:`S_\circ`: at least r/2, with r the smallest.
* *Curvature.* Mix mu with particles whose map is :math:`R f°`, where R maps the range of :math:`Z = E[z z^\top]`
  isometrically into the null space of B. The second derivative of L is :math:`-\operatorname{tr} Z R^\top S^{-1} R Z`.
  Both spaces have the same dimension m; pairing large eigenvalues with large ones (Chebyshev) and
  :math:`\operatorname{tr} Z^2 \ge 4L^2/m`, :math:`\operatorname{tr} S^{-1}|_{\ker B} \ge m^2/\operatorname{tr} S` give

  .. math:: \frac{d^2 L}{ds^2} \le - \frac{4 L^2}{E|h|^2},

  which implies the paper's :math:`-4L^2/(k R_1^2)` for :math:`|h_j| \le R_1`, and for :math:`|h| \le R_1` as well.

Source: Kim and Suzuki, ICML 2024 (arXiv 2402.01258), from its abstract and statements; the proofs and the constant
:math:`E|h|^2` in the place of :math:`k R_1^2` are derived here.
"""

from itertools import combinations
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float
from scipy.linalg import cho_factor, cho_solve

from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.theory.meanfield.incontext.prompt_length import check_condition
from manyheads.theory.meanfield.incontext.task import FeatureTask, as_matrix

CRITICAL = 1e-6  # largest |B^T z| |h| / |f|^2 (root mean squares) at which a point counts as critical


def saddle_levels(covariance: Float[ArrayLike, "k k"]) -> Float[np.ndarray, " levels"]:
    """Return the losses of all saddles, rising: half the sums of eigenvalues over the sets of missed features.

    Parameters
    ----------
    covariance
        Second moments of the target features, symmetric and positive semi-definite.

    Raises
    ------
    ShapeError
        No square matrix.
    UsageError
        A matrix that is not symmetric, with a negative eigenvalue, or of more than 16 features.

    Examples
    --------
    >>> import numpy as np
    >>> saddle_levels(np.diag([1.0, 0.49, 0.16])).round(3).tolist()
    [0.08, 0.245, 0.325, 0.5, 0.58, 0.745, 0.825]
    """
    matrix = as_matrix(covariance, "covariance")
    if matrix.shape[0] != matrix.shape[1]:
        raise ShapeError(f"covariance of shape {matrix.shape}: expected a square matrix")
    size = np.abs(matrix).max()
    values = np.linalg.eigvalsh(matrix)
    if np.abs(matrix - matrix.T).max() > 1e-9 * size or values[0] < -1e-9 * size or len(values) > 16:
        raise UsageError("covariance: expected a symmetric matrix of up to 16 features without negative eigenvalues")
    missed = (subset for count in range(1, len(values) + 1) for subset in combinations(values.clip(0), count))
    return np.sort([0.5 * sum(subset) for subset in missed])


def attention_fixed_point(
    task: FeatureTask, representation: Float[ArrayLike, "nodes k"], start: Float[ArrayLike, "k k"]
) -> Float[np.ndarray, "k k"]:
    """Return the limit of the gradient flow of the attention matrix alone, W' = C^T (C - C W S), from a start.

    The flow is linear: in the eigenvectors of C^T C and S its entries converge at the products of their eigenvalues,
    or stay where that product is zero (below 1e-12 of the largest).
    """
    h = as_matrix(representation, "representation", task.targets.shape)
    weights = as_matrix(start, "start", (task.features, task.features))
    second, cross = h.T @ h / len(h), task.targets.T @ h / len(h)
    check_condition(second, "the representation")
    values, left = np.linalg.eigh(second)
    rates, right = np.linalg.eigh(cross.T @ cross)
    scale = float(np.trace(second)) * float((task.targets**2).sum(1).mean())
    moving = rates[:, None] > 1e-12 * scale
    ends = np.where(moving, right.T @ left / values, right.T @ weights @ left)
    return right @ ends @ left.T


class EscapeDirection(NamedTuple):
    """Direction of negative curvature at a critical point that is not global."""

    loss: float
    curvature: float  # second derivative of the loss along h + s R f°
    bound: float  # -4 L^2 / E|h|^2
    rotation: Float[np.ndarray, "k k"]  # R, a partial isometry


def escape_direction(task: FeatureTask, representation: Float[ArrayLike, "nodes k"]) -> EscapeDirection:
    """Return the direction of negative curvature at a saddle h, in closed form."""
    h, f = as_matrix(representation, "representation", task.targets.shape), task.targets
    second = h.T @ h / len(h)
    check_condition(second, "the representation")
    factor = cho_factor(second)
    solution = cho_solve(factor, h.T @ f / len(h)).T  # B
    residual = f - h @ solution.T
    scale = float(np.sqrt((f**2).sum() / (h**2).sum()))  # of the solution
    slope = float(np.sqrt(((residual @ solution) ** 2).sum() / (f**2).sum())) / scale
    loss = 0.5 * float((residual**2).sum(1).mean())
    if slope > CRITICAL:
        raise CertificateError(
            "the point is not critical: give a representation with B^T z = 0, or flow longer",
            measured=slope,
            threshold=CRITICAL,
        )
    missed = residual.T @ residual / len(h)  # Z
    targets = np.linalg.eigh(missed)[1]
    count = int((np.linalg.svd(solution, compute_uv=False) < CRITICAL * scale).sum())
    if not count or loss <= 0:
        raise UsageError(f"loss={loss:.3g}: the point is a global minimum, without a direction of negative curvature")
    null = np.linalg.svd(solution)[2][-count:].T  # (k, m), the null space of B
    inverse = null.T @ cho_solve(factor, null)
    directions = null @ np.linalg.eigh(inverse)[1]  # rising, paired with the rising eigenvalues of Z
    rotation = directions @ targets[:, -count:].T
    curvature = -float(np.trace(missed @ rotation.T @ cho_solve(factor, rotation @ missed)))
    return EscapeDirection(loss, curvature, -4 * loss**2 / float(np.trace(second)), rotation)
