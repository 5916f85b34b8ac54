"""Golub-Kahan bidiagonalization: extreme singular values from products with the matrix and its transpose."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads._extras import ArrayLike, Float
from manyheads._namespaces import Floats
from manyheads.errors import ShapeError, UsageError, check_integer

Matrix: TypeAlias = Any  # an array, a sparse one, one on a disk, or an object with `shape`, `matvec` and `rmatvec`

BLOCK_BYTES = 2**23  # of a block in which a matrix that is not float64 is converted
BREAKDOWN = 1e-13  # off-diagonal entries below this share of the norm are rounding: the Krylov space is exhausted


@dataclass(frozen=True)
class Operator:
    """A matrix given by its products: `matvec(v) = W v` and `rmatvec(u) = Wᵀ u`, both on float64 vectors."""

    shape: tuple[int, int]
    matvec: Callable[[Floats], Floats]
    rmatvec: Callable[[Floats], Floats]


def as_operator(matrix: Matrix) -> Operator:
    """Return the products of a real matrix, of anything with `shape`, `matvec` and `rmatvec`, or of a sparse array."""
    shape = tuple(getattr(matrix, "shape", None) or np.shape(matrix))
    if len(shape) != 2 or 0 in shape:
        raise ShapeError(f"shape {shape}: expected a matrix with two axes that are not empty; a vector v is v[:, None]")
    if hasattr(matrix, "matvec") and hasattr(matrix, "rmatvec"):
        return Operator(shape, lambda v: _as_vector(matrix.matvec(v)), lambda u: _as_vector(matrix.rmatvec(u)))
    if hasattr(matrix, "tocsr"):
        return Operator(shape, lambda v: _as_vector(matrix @ v), lambda u: _as_vector(matrix.T @ u))
    array = as_table(matrix)
    if array.dtype.kind in "cOSUMm":
        raise ShapeError(f"dtype {array.dtype}: expected a real matrix")
    if isinstance(array, np.ndarray) and array.dtype == np.float64:
        return Operator(shape, lambda v: array @ v, lambda u: array.T @ u)
    return Operator(
        shape,
        lambda v: np.concatenate([block @ v for _, block in row_blocks(array)]),
        lambda u: np.sum([block.T @ u[rows] for rows, block in row_blocks(array)], axis=0),
    )


def as_table(matrix: Matrix) -> Matrix:
    """Return an array; what has `shape`, `dtype` and rows `matrix[a:b]` that are read when indexed stays as it is."""
    stored = all(hasattr(matrix, name) for name in ("shape", "dtype", "__getitem__"))
    return matrix if stored and not (hasattr(matrix, "__array__") or hasattr(matrix, "tocsr")) else np.asarray(matrix)


def row_blocks(array: Matrix) -> Iterator[tuple[slice, Floats]]:
    """Iterate over blocks of rows in float64, with the rows they are."""
    if isinstance(array, np.ndarray) and array.dtype == np.float64:
        yield slice(0, array.shape[0]), array
        return
    step = max(1, BLOCK_BYTES // (8 * array.shape[1]))
    for start in range(0, array.shape[0], step):
        rows = slice(start, min(start + step, array.shape[0]))
        yield rows, array[rows].astype(np.float64)


@dataclass(frozen=True)
class Bidiagonal:
    """The result of k steps, W V = U B with B upper bidiagonal.

    *Some* singular value of W lies within the residual of a Ritz triple, ‖Wᵀ u - ritz · v‖, of the Ritz value. That is
    no bound on how far the largest Ritz value is from the largest singular value.
    """

    ritz: Floats  # (k,) singular values of B, descending; the largest never exceeds that of W, up to rounding
    residuals: Floats  # (k,)
    vector: Floats  # right Ritz vector of the largest Ritz value, unit length
    captured: float  # ‖W V‖_F²: the part of ‖W‖_F² that the Krylov space holds
    coupling: float  # ‖(1 - V Vᵀ) Wᵀ W V‖: how far the Krylov space is from being invariant
    steps: int  # k
    exhausted: bool  # whether the Krylov space became invariant, so that further steps would add nothing


@takes_arrays
def golub_kahan(
    matrix: "Float[ArrayLike, 'rows columns'] | Matrix",
    steps: int,
    *,
    rng: np.random.Generator | None = None,
    start: "Float[ArrayLike, ' columns'] | None" = None,
) -> Bidiagonal:
    """Bidiagonalize a matrix by Lanczos steps with full reorthogonalization.

    Each step costs one product with W and one with Wᵀ, and O(steps · (rows + columns)) for keeping both bases
    orthogonal to rounding (twice is enough: Giraud, Langou and Rozložník 2005).

    Parameters
    ----------
    matrix
        Real matrix of shape (rows, columns), a sparse array, or an object with `shape`, `matvec` and `rmatvec`.
    steps
        Number of steps, at least 1; fewer are taken where the Krylov space is exhausted before.
    rng
        Source of the Gaussian start vector.
    start
        Start vector of shape (columns,) in place of a random one.

    Raises
    ------
    UsageError
        Neither `rng` nor `start`, or a start vector that is zero or not finite; a product that is not finite.
    ShapeError
        Not a real matrix, or a start vector that does not fit.

    Examples
    --------
    >>> found = golub_kahan(np.diag([3.0, 2.0, 1.0]), 3, rng=np.random.default_rng(0))
    >>> bool(np.allclose(found.ritz, [3, 2, 1]))
    True

    References
    ----------
    Golub and Kahan (1965), Calculating the singular values and pseudo-inverse of a matrix, SIAM Journal on Numerical
    Analysis B 2.
    """
    operator = as_operator(matrix)
    rows, columns = operator.shape
    steps = min(check_integer("steps", steps), rows + 1, columns)
    left, right = np.zeros((steps, rows)), np.zeros((steps, columns))  # rows are basis vectors
    diagonal, beside = np.zeros(steps), np.zeros(steps)
    vector, taken = _start(columns, rng, start), steps
    for step in range(steps):
        right[step] = vector
        image = _orthogonalized(_finite(operator.matvec(vector)), left[:step])
        diagonal[step] = np.linalg.norm(image)
        floor = BREAKDOWN * max(diagonal.max(), beside.max())
        if diagonal[step] > floor:  # else W maps the new direction into what is known: no further left vector
            left[step] = image / diagonal[step]
            back = _orthogonalized(_finite(operator.rmatvec(left[step])), right[: step + 1])
            beside[step] = np.linalg.norm(back)
        if beside[step] <= floor:
            taken = step + 1
            break
        vector = back / beside[step]
    band = np.diag(diagonal[:taken]) + np.diag(beside[: taken - 1], 1)
    u, ritz, vt = np.linalg.svd(band)
    top = vt[0] @ right[:taken]
    return Bidiagonal(
        ritz=ritz,
        residuals=beside[taken - 1] * np.abs(u[-1]),
        vector=top / np.linalg.norm(top),
        captured=float(np.sum(band**2)),
        coupling=float(diagonal[taken - 1] * beside[taken - 1]),
        steps=taken,
        exhausted=bool(taken == columns or min(diagonal[taken - 1], beside[taken - 1]) <= floor),
    )


def _as_vector(product: "ArrayLike") -> Floats:
    return np.asarray(product, dtype=np.float64).reshape(-1)


def _finite(product: Floats) -> Floats:
    if not np.all(np.isfinite(product)):
        raise UsageError("a product with the matrix is NaN or infinite: the matrix holds such entries, or overflows")
    return product


def _start(columns: int, rng: np.random.Generator | None, start: "ArrayLike | None") -> Floats:
    if start is None:
        if rng is None:
            raise UsageError("give rng=np.random.default_rng(seed) for a random start, or a start vector")
        start = rng.standard_normal(columns)
    vector = np.asarray(start, dtype=np.float64)
    if vector.shape != (columns,):
        raise ShapeError(f"start has shape {vector.shape}: expected ({columns},)")
    norm = float(np.linalg.norm(vector))
    if not (np.isfinite(norm) and norm > 0):
        raise UsageError("the start vector is zero or not finite")
    return vector / norm


def _orthogonalized(vector: Floats, basis: Floats) -> Floats:
    for _ in range(2):  # once loses orthogonality in proportion to the condition of the basis, twice does not
        vector = vector - basis.T @ (basis @ vector)
    return vector
