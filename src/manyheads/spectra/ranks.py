"""Stable rank: bounds, exact for small matrices, by Lanczos with a certificate for large ones."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from scipy import linalg, special

from manyheads._arrays import takes_arrays
from manyheads._extras import ArrayLike, Float
from manyheads._namespaces import Floats
from manyheads.errors import CertificateError, UsageError
from manyheads.spectra import bidiagonal

EPS = float(np.finfo(np.float64).eps)

Method: TypeAlias = Literal["auto", "gram", "lanczos"]
Certificate: TypeAlias = Literal["cholesky", "probability"]

EXACT_SIDE = 1024  # up to this smaller side the whole spectrum of the Gram matrix is cheap
CHOLESKY_SIDE = 8192  # up to this smaller side (a Gram matrix of half a gigabyte) the certificate is a proof
FAILURE = 1e-9  # probability that the random start of the probabilistic certificate is an unlucky one


@dataclass(frozen=True)
class StableRank:
    """The stable rank ‖W‖_F² / σ₁² of a matrix and what is known of its error.

    Attributes
    ----------
    lower, upper
        Bounds, rounding included: lower <= value <= upper.
    sigma_low, sigma_high
        Bounds on the largest singular value.
    steps
        Lanczos steps; 0 for the Gram method.
    certificate
        What the lower bound rests on: "exact"; "frobenius" or "cholesky" (proofs); or "probability" (of failure at
        most 1e-9 over the random start).
    vector
        Singular vector (an approximate one) of σ₁ on the smaller side, a warm start for the next checkpoint; None for
        "gram".
    squares
        All squared singular values over the largest, ascending; None for "lanczos".
    effective_rank
        exp(-sum p log p) with p = sigma / sum(sigma), the singular values as a distribution (Roy and Vetterli 2007).
    participation_ratio
        (sum sigma^2)^2 / sum(sigma^4), of the eigenvalues sigma^2 of the Gram matrix.
        Both are 0 for a zero matrix and NaN for "lanczos", which does not give all singular values; values below the
        rounding of the Gram matrix, 6e-8 sqrt(min(rows, columns)) of the largest, count as zero.
    """

    value: float
    lower: float
    upper: float
    frobenius: float
    sigma_low: float
    sigma_high: float
    steps: int
    method: str  # "gram", "lanczos" or "zero"
    certificate: str
    vector: Floats | None = field(default=None, repr=False, compare=False)
    squares: Floats | None = field(default=None, repr=False, compare=False)

    @property
    def effective_rank(self) -> float:  # noqa: D102  # in the docstring of the class
        return math.nan if self.squares is None else float(rank_measures(self.squares)[0])

    @property
    def participation_ratio(self) -> float:  # noqa: D102
        return math.nan if self.squares is None else float(rank_measures(self.squares)[1])


@takes_arrays
def stable_rank(
    matrix: "Float[ArrayLike, 'rows columns'] | bidiagonal.Matrix",
    method: Method = "auto",
    *,
    tolerance: float = 1e-3,
    certificate: Certificate | None = None,
    rng: np.random.Generator | None = None,
    start: Floats | None = None,
) -> StableRank:
    r"""Stable rank :math:`\|W\|_F^2 / \sigma_1^2`, in [1, rank], with bounds that hold.

    * "gram": eigenvalues of :math:`W^\top W` on the smaller side, in float64; exact to rounding.
    * "lanczos": Golub-Kahan steps, whose largest Ritz value :math:`\theta \le \sigma_1^2` gives the upper bound (a
      Rayleigh quotient). The lower bound needs a certificate, because a small residual only says that *some* singular
      value is near. Tried first, since it is free: with :math:`\rho` the part of :math:`\|W\|_F^2` outside the Krylov
      space and :math:`\beta` its coupling, :math:`\sigma_1^2` is at most the larger eigenvalue of
      :math:`[[\theta, \beta], [\beta, \rho]]`, which is sharp for low ranks and lone spikes. Then
      "cholesky" factors :math:`\theta (1 + t) I - W^\top W`, whose success proves
      :math:`\sigma_1^2 < \theta (1 + t)`; "probability" takes as many steps as make
      :math:`P[\sigma_1^2 > \theta / (1 - \epsilon)] \le 1.648 \sqrt n\, e^{-\sqrt\epsilon (2k - 1)}` at most 1e-9 over
      the random start, for every matrix.

    Parameters
    ----------
    matrix
        Real, shape (rows, columns), any floating or integer dtype (bfloat16 included); converted block by block. A tall
        one with `shape`, `dtype` and rows `matrix[a:b]` that are read when indexed is read by blocks. A sparse array,
        or an object with `shape`, `matvec`, `rmatvec` and `frobenius`, takes "lanczos" with "probability".
    method
        "auto" is "gram" up to a smaller side of 1024.
    tolerance
        Certified upper / lower - 1 that "lanczos" has to reach.
    certificate
        Default "cholesky" up to a smaller side of 8192, which forms the Gram matrix of that side, then "probability".
    rng
        Source of the random start; a fixed one by default.
    start
        Start vector of shape (min(rows, columns),), such as `vector` of the checkpoint before; only with "cholesky",
        because the probability is that of a random start.

    Returns
    -------
    StableRank
        A zero matrix has the stable rank 0, the only value in [0, rank].

    Raises
    ------
    ShapeError
        Not a real matrix of two axes.
    UsageError
        NaN or infinite entries, or arguments that exclude one another.
    CertificateError
        The tolerance was not reached with min(rows, columns) steps, or is below what float64 can certify.

    Examples
    --------
    >>> found = stable_rank(np.diag([2.0, 1.0, 1.0]))
    >>> round(found.value, 12), found.method
    (1.5, 'gram')

    References
    ----------
    Rudelson and Vershynin (2007), Sampling from large matrices, Journal of the ACM 54 (stable rank). Roy and Vetterli
    (2007), The effective rank, EUSIPCO. Kuczyński and Woźniakowski (1992), Estimating the largest eigenvalue by the
    power and Lanczos algorithms with a random start, SIAM Journal on Matrix Analysis 13, theorem 3.2. Rump (2006),
    Verification of positive definiteness, BIT 46.
    """
    if method not in ("auto", "gram", "lanczos") or certificate not in (None, "cholesky", "probability"):
        raise UsageError(f"method={method!r}, certificate={certificate!r}: no such choice; see help(stable_rank)")
    if not 0 < tolerance < math.inf:
        raise UsageError(f"tolerance={tolerance}: expected a positive number")
    shape = bidiagonal.as_operator(matrix).shape
    entries = not (hasattr(matrix, "matvec") or hasattr(matrix, "tocsr"))
    if method == "auto":
        method = "gram" if entries and min(shape) <= EXACT_SIDE else "lanczos"
    if certificate is None:
        certificate = "cholesky" if entries and min(shape) <= CHOLESKY_SIDE and tolerance < 1 else "probability"
    if not entries and (method == "gram" or certificate == "cholesky"):
        raise UsageError("without its entries a matrix takes method='lanczos' with certificate='probability'")
    if start is not None and certificate == "probability" and method == "lanczos":
        raise UsageError("the probability is that of a random start: a start vector needs certificate='cholesky'")
    scaled, scale, frobenius = _scaled(matrix, entries)
    if frobenius == 0:
        return StableRank(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, "zero", "exact", squares=np.zeros(min(shape)))
    if method == "gram":
        return _by_gram(scaled, scale, frobenius)
    rng = np.random.default_rng(0) if rng is None else rng
    return _by_lanczos(scaled, scale, frobenius, tolerance, certificate, rng=rng, start=start)


def lanczos_error(side: int, steps: int, failure: float = FAILURE) -> float:
    r"""Relative error of the largest Ritz value that a random start exceeds with probability at most `failure`.

    .. math:: \epsilon = \Big(\frac{\ln(1.648 \sqrt n / p)}{2k - 1}\Big)^2, \qquad
        P\Big[\frac{\lambda_1 - \theta}{\lambda_1} > \epsilon\Big] \le p

    for every symmetric positive semidefinite matrix of side n after k Lanczos steps. A value of 1 or more says nothing.

    Examples
    --------
    >>> round(lanczos_error(512, 60, failure=1e-6), 3)
    0.021

    References
    ----------
    Kuczyński and Woźniakowski (1992), theorem 3.2.
    """
    return (math.log(1.648 * math.sqrt(side) / failure) / (2 * steps - 1)) ** 2


def _scaled(matrix: bidiagonal.Matrix, entries: bool) -> tuple[bidiagonal.Matrix, float, float]:
    """Bring the largest entry near one, by a power of two, so that squares neither overflow nor vanish."""
    if not entries:
        if not (hasattr(matrix, "frobenius") or hasattr(matrix, "tocsr")):
            raise UsageError("an operator needs an attribute `frobenius`, its Frobenius norm: products do not give it")
        frobenius = matrix.frobenius if hasattr(matrix, "frobenius") else np.linalg.norm(matrix.tocsr().data)
        if not (np.isfinite(frobenius) and frobenius >= 0):
            raise UsageError(f"frobenius={frobenius}: expected the finite Frobenius norm of the matrix")
        return matrix, 1.0, float(frobenius)
    array = bidiagonal.as_table(matrix)
    if array.shape[0] < array.shape[1]:
        array = array[:]
    if isinstance(array, np.ndarray) and 8 * array.size <= bidiagonal.BLOCK_BYTES and array.dtype.kind not in "iub":
        array = array.astype(np.float64, copy=False)  # one block: converted once
    largest = 0.0
    for _, block in bidiagonal.row_blocks(array):
        ends = float(block.max()), -float(block.min())
        if not np.all(np.isfinite(ends)):  # NaN is the largest and the smallest of all
            raise UsageError("the matrix holds NaN or infinite entries: it has no stable rank")
        largest = max(largest, *ends)
    if largest == 0:
        return array, 1.0, 0.0
    exponent = math.frexp(largest)[1] - 1  # 2**1024 is no number, 2**1023 is
    scale = 1.0
    if abs(exponent) > 100 or array.dtype.kind in "iub":
        scale = math.ldexp(1.0, exponent)
        array = np.ldexp(array[:].astype(np.float64), -exponent)
    squares = math.fsum(float(np.vdot(block, block)) for _, block in bidiagonal.row_blocks(array))
    return array, scale, math.sqrt(squares)


def _gram(array: bidiagonal.Matrix) -> Floats:
    """Gram matrix of the columns, in float64."""
    if isinstance(array, np.ndarray) and array.dtype == np.float64:
        return array.T @ array
    gram = np.zeros((array.shape[1], array.shape[1]))
    for _, block in bidiagonal.row_blocks(array):
        gram += block.T @ block  # the same array twice: NumPy calls syrk, at half the cost
    return gram


def _by_gram(array: bidiagonal.Matrix, scale: float, frobenius: float) -> StableRank:
    squares: Floats = np.linalg.eigvalsh(_gram(_tall(array))).astype(np.float64, copy=False)
    top = float(squares[-1])
    # Rounding: a dot product of length m errs by m eps |x||y|, so the Gram by m eps F²; eigvalsh by about n eps σ₁².
    slack = EPS * (max(array.shape) * frobenius**2 / top + 8 * min(array.shape))
    how: dict[str, Any] = {"steps": 0, "method": "gram", "certificate": "exact", "squares": squares / top}
    return _result(array, scale, frobenius, (top * (1 - slack), top, top * (1 + slack)), **how)


def _by_lanczos(
    array: bidiagonal.Matrix, scale: float, frobenius: float, tolerance: float, certificate: Certificate, **start: Any
) -> StableRank:
    """Lanczos from the smaller side, until one of the certificates holds; `start` is that of `golub_kahan`."""
    tall = _tall(array)
    if certificate == "cholesky":
        # The Gram matrix will outweigh this copy, and converting blocks at every step costs more than the products.
        tall = np.asarray(tall[:], dtype=np.float64)
    side = min(tall.shape)
    steps = 60
    if certificate == "probability":  # as many as certify upper / lower = 1 + tolerance, a little less for rounding
        error = 0.999 * tolerance / (1 + tolerance)
        steps = math.ceil((math.log(1.648 * math.sqrt(side) / FAILURE) / math.sqrt(error) + 1) / 2)
    while True:
        found = bidiagonal.golub_kahan(tall, steps, **start)
        # The Rayleigh quotient of the Ritz vector: a lower bound on σ₁² whatever rounding did to the Lanczos basis.
        image, rounding = bidiagonal.as_operator(tall).matvec(found.vector), 4 * EPS * max(tall.shape)
        theta = float(image @ image / (found.vector @ found.vector)) * (1 - rounding)
        goal = theta * (1 + tolerance) / _rounding(tall) ** 2
        proof, bound = "frobenius", _frobenius_bound(found, theta, frobenius**2, max(tall.shape))
        if bound > goal and certificate == "probability":
            proof, bound = "probability", theta / (1 - min(_chance(found, side), 1 - EPS))
        elif bound > goal:
            proof, bound = "cholesky", _cholesky_bound(tall, goal, frobenius**2)
        if bound <= goal * (1 + 4 * EPS):
            how = {"steps": found.steps, "method": "lanczos", "certificate": proof, "vector": found.vector}
            return _result(tall, scale, frobenius, (theta, theta, bound), **how)
        if found.exhausted or found.steps >= side or certificate == "probability":
            failure = f"{found.steps} Lanczos steps did not certify the largest singular value to the tolerance"
            remedy = "use method='gram', a larger tolerance, or another rng if a start vector was given"
            raise CertificateError(f"{failure}: {remedy}", measured=bound / theta - 1, threshold=tolerance)
        # The Ritz value itself is still short of the top.
        steps = min(2 * steps, side)


def _frobenius_bound(found: bidiagonal.Bidiagonal, theta: float, total: float, length: int) -> float:
    """Bound on σ₁² from what the Krylov space leaves out, in the basis (Krylov space, its complement)."""
    rounding = 8 * length * EPS * total
    rest, coupling = max(total - found.captured, 0.0) + rounding, found.coupling + rounding
    top = max(theta, float(found.ritz[0]) ** 2) + rounding
    return (top + rest) / 2 + math.hypot((top - rest) / 2, coupling)


def _cholesky_bound(tall: Floats, goal: float, total: float) -> float:
    """`goal` if a factorization proves σ₁² below it, infinity if it does not."""
    # Success proves definiteness up to the first term (Rump 2006); the Gram matrix is known up to the second.
    rows, side = tall.shape
    slack = EPS * ((side + 2) * max(side * goal - total, 0.0) + 2 * rows * total)
    shifted = _gram(tall)
    np.negative(shifted, out=shifted)
    shifted[np.diag_indices(side)] += goal - slack
    # Symmetric, so its transpose is the Fortran-ordered matrix that LAPACK factors in place.
    failed = linalg.lapack.dpotrf(shifted.T, lower=True, overwrite_a=True, clean=False)[1]
    return math.inf if failed else goal


def _chance(found: bidiagonal.Bidiagonal, side: int) -> float:
    """Relative error of the Ritz value that a random start exceeds with probability at most FAILURE."""
    # Any k: by the theorem. An invariant space: (λ₁ - θ) |c| <= coupling, with c the start's part along the top vector,
    # and P(|c| < d) <= d √(2 n / π).
    if not found.exhausted:
        return lanczos_error(side, found.steps)
    coupling = found.coupling / float(found.ritz[0]) ** 2 + 4 * EPS
    return coupling * math.sqrt(2 * side / math.pi) / FAILURE


def _tall(array: bidiagonal.Matrix) -> bidiagonal.Matrix:
    """Return the matrix, or its transpose, with the smaller side last."""
    if array.shape[0] >= array.shape[1]:
        return array
    if hasattr(array, "matvec"):
        return bidiagonal.Operator((array.shape[1], array.shape[0]), array.rmatvec, array.matvec)
    return array.T


def _rounding(array: bidiagonal.Matrix) -> float:
    """Factor by which the rounded sum of all squares may be off."""
    return 1 + 4 * EPS * math.sqrt(array.shape[0] * array.shape[1])


def _result(
    array: bidiagonal.Matrix, scale: float, frobenius: float, tops: tuple[float, float, float], **how: Any
) -> StableRank:
    """Return bounds from those of σ₁², low, best and high."""
    low, best, high = tops
    rounding = _rounding(array)
    total, side = frobenius**2, float(min(array.shape))
    lower, upper = max(1.0, total / high / rounding), min(side, total / low * rounding)
    return StableRank(
        value=min(max(total / best, lower), upper),
        lower=lower,
        upper=max(upper, lower),
        frobenius=scale * frobenius,
        sigma_low=scale * math.sqrt(low),
        sigma_high=scale * math.sqrt(high),
        **how,
    )


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
