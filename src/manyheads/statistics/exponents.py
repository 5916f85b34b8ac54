"""Exponents of power laws with intervals, a visible lack of fit, and the drift of an optimum with size."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from manyheads._arrays import takes_arrays
from manyheads._namespaces import Floats
from manyheads.errors import ShapeError, UsageError
from manyheads.statistics.intervals import (
    Interval,
    around,
    as_samples,
    check_level,
    half_widths,
    mean_of,
    student_interval,
)
from manyheads.statistics.verdicts import Outcome, decide, replicates_to_decide

if TYPE_CHECKING:
    from jaxtyping import Float

LARGEST_RELATIVE_ERROR = 1 / 3
"""A mean known no better than this has no useful logarithm: its interval at three standard errors touches zero."""


@dataclass(frozen=True)
class ExponentFit:
    """A fitted power law, value = prefactor * size ** exponent.

    Attributes
    ----------
    exponent, interval
        The slope of log value against log size, and its interval.
    log_prefactor
        Natural logarithm of the prefactor.
    curvature
        Interval of the coefficient c in log value = a + b u + c u², u = log size: zero for a power law, and 2c is the
        change of the local exponent per e-fold. None with two sizes.
    p_fit
        Probability of a lack of fit at least as large if the power law were exact; small means that it is not. None
        where sizes or replicates are too few to tell.
    residuals
        log(value / fit) at each size: 0.1 is 10% off.
    replicate_exponents
        The slope of every replicate; empty if the values had none.
    design
        Where the error came from: "paired", "means" or "scatter".
    """

    exponent: float
    interval: Interval
    log_prefactor: float
    curvature: Interval | None
    p_fit: float | None
    residuals: tuple[float, ...] = field(repr=False)
    replicate_exponents: tuple[float, ...] = field(repr=False)
    design: str

    def predict(self, size: float) -> float:
        """Value of the fitted law at `size`."""
        if not 0 < size < math.inf:
            raise UsageError(f"size={size}: a power law has values at positive finite sizes")
        with np.errstate(over="ignore"):  # beyond the largest number: infinite
            return float(np.exp(self.log_prefactor + self.exponent * math.log(size)))


@takes_arrays
def fit_exponent(
    sizes: "Float[ArrayLike, ' sizes']",
    values: "Float[ArrayLike, 'replicates sizes'] | Float[ArrayLike, ' sizes']",
    *,
    level: float = 0.99,
) -> ExponentFit:
    r"""Fit value = prefactor * size ** exponent to replicates, by least squares on logarithms.

    Parameters
    ----------
    sizes
        Positive, shape (k,), at least two of them different.
    values
        Positive. Shape (n, k): replicate by size; the slope is fitted to each replicate by itself, and the interval is
        Student's for those n slopes. It is exact whether the columns share a seed or are independent, and whatever
        their spreads. Shape (k,): one value per size, whose error is read off the scatter about the line with k - 2
        degrees of freedom (k >= 3).
    level
        Coverage of the intervals.

    Returns
    -------
    ExponentFit
        `p_fit` is Hotelling's test of all k - 2 departures from the line, None for fewer than k replicates.

    Raises
    ------
    ShapeError
        Sizes and values do not match.
    UsageError
        Values or sizes that are not positive and finite: a mean difference that may be zero or negative has no
        logarithm; average over more replicates, or fit `fit_exponent_to_means` to means that are resolved from zero.

    Notes
    -----
    The law is fitted to the *typical* (geometric mean) value. It has the exponent of the mean value only if the
    relative spread does not change with size; for the bias of a mean use `fit_exponent_to_means`.

    Examples
    --------
    >>> fit = fit_exponent([2, 4, 8], [[0.50, 0.36, 0.25], [0.52, 0.35, 0.24], [0.49, 0.35, 0.26]])
    >>> round(fit.exponent, 3), fit.interval.contains(-0.5)
    (-0.505, True)
    """
    level = check_level(level)
    values = np.asarray(values, dtype=np.float64)
    if values.ndim not in (1, 2):
        raise ShapeError(f"values has shape {values.shape}: expected (replicates, sizes) or (sizes,)")
    if values.size == 0:
        raise ShapeError(f"values has shape {values.shape}: expected at least one replicate and two sizes")
    logs = _logs(values, "values")
    basis = _Basis.of(sizes, logs.shape[-1], None)
    if logs.ndim == 1:
        return _fit_scatter(basis, logs, level)
    means = mean_of(logs, axis=0)  # (k,)
    slopes = logs @ basis.slope  # (n,)
    return ExponentFit(
        float(mean_of(slopes)),
        student_interval(slopes, level=level),
        float(means @ basis.level),
        None if basis.bend is None else student_interval(logs @ basis.bend, level=level),
        _hotelling(logs @ basis.rest),
        tuple(basis.residuals(means).tolist()),
        tuple(slopes.tolist()),
        "paired",
    )


@takes_arrays
def fit_exponent_to_means(
    sizes: "Float[ArrayLike, ' sizes']",
    means: "Float[ArrayLike, ' sizes']",
    errors: "Float[ArrayLike, ' sizes']",
    *,
    dof: "Float[ArrayLike, '#sizes']" = math.inf,
    level: float = 0.99,
) -> ExponentFit:
    r"""Fit value = prefactor * size ** exponent to independent means with standard errors.

    Errors pass to the logarithm to first order, error / mean. The half-width of a contrast c of the logarithms is
    :math:`\sqrt{\sum_j t_{\nu_j}^2 c_j^2 e_j^2}`, which covers at least at `level` (Banerjee 1960).

    Parameters
    ----------
    sizes, means, errors
        Shapes (k,), all positive; an error may be zero.
    dof
        Degrees of freedom behind each error (replicates - 1), a number or shape (k,); inf for a known error.
    level
        Coverage of the intervals.

    Notes
    -----
    Sizes weigh 1 / (relative error)² where all errors are known and positive, and the same where errors are estimated:
    weights that are estimates spoil the coverage.

    Raises
    ------
    ShapeError
        The arrays do not match.
    UsageError
        Something is not positive, or an error exceeds a third of its mean.

    Examples
    --------
    >>> fit = fit_exponent_to_means([4, 16, 64], [0.078, 0.0162, 0.0040], [0.006, 0.0011, 0.0004])
    >>> round(fit.exponent, 2), fit.interval.contains(-1.0), fit.p_fit > 0.05
    (-1.08, True, True)
    """
    level = check_level(level)
    logs = _logs(as_samples(means, "means"), "means")
    try:
        errors, dof = np.broadcast_to(as_samples(errors, "errors"), logs.shape), np.broadcast_to(dof, logs.shape)
    except ValueError as error:
        raise ShapeError(f"means has shape {logs.shape}: errors and dof must match it") from error
    relative = errors / np.exp(logs)
    if np.any(errors < 0) or not np.all(np.asarray(dof) > 0):
        raise UsageError("errors must not be negative and degrees of freedom must be positive")
    if np.any(relative > LARGEST_RELATIVE_ERROR):
        raise UsageError(
            f"a mean with a relative error of {relative.max():.2g} is not resolved from zero: its logarithm is "
            "useless; add replicates at that size or leave it out (largest accepted 1/3)"
        )
    known = np.all(np.isinf(dof)) and np.all(relative > 0)
    basis = _Basis.of(sizes, logs.size, (relative.min() / relative) ** 2 if known else None)

    def half(contrast: Floats) -> float:
        return float(np.linalg.norm(half_widths(np.abs(contrast) * relative, dof, level)))

    exponent = float(logs @ basis.slope)
    return ExponentFit(
        exponent,
        around(exponent, half(basis.slope), level),
        float(logs @ basis.level),
        None if basis.bend is None else around(float(logs @ basis.bend), half(basis.bend), level),
        _chi_squared(logs @ basis.rest, (basis.rest.T * relative**2) @ basis.rest, float(np.min(dof))),
        tuple(basis.residuals(logs).tolist()),
        (),
        "means",
    )


@dataclass(frozen=True)
class DriftTest:
    """Whether an optimum moves with size.

    Attributes
    ----------
    fit
        The power law of the optimum; its interval includes the resolution of the search.
    factor_per_doubling
        Interval of the factor by which the optimum moves when the size doubles.
    outcome
        The verdict on "the exponent is zero within the tolerance".
    tolerance
        The tolerance on the exponent.
    replicates_needed
        Replicates in all that would decide; None without replicates or if too many.
    """

    fit: ExponentFit
    factor_per_doubling: Interval
    outcome: Outcome
    tolerance: float
    replicates_needed: int | None


@takes_arrays
def drift_test(
    sizes: "Float[ArrayLike, ' sizes']",
    optima: "Float[ArrayLike, 'replicates sizes']",
    *,
    tolerance: float,
    resolution: float = 1.0,
    level: float = 0.99,
) -> DriftTest:
    r"""Test that an optimum (a learning rate, say) stays where it is as the size grows.

    The exponent of optimum = prefactor * size ** exponent is fitted, and the claim is "0 ± tolerance".

    Parameters
    ----------
    sizes
        Positive, shape (k,).
    optima
        Positive, shape (n, k): one search per replicate and size.
    tolerance
        Allowed exponent: a drift of at most D decades over a factor F in size is D / log10(F).
    resolution
        Factor between neighbouring points of the search, >= 1; 1 for a search without a grid. An optimum read off a
        grid is known to within the square root of that factor, and **identical optima on a grid are no proof of no
        drift**: the interval is widened by :math:`\tfrac12 \ln(\text{resolution}) \sum_j |c_j|`, with c the slope's
        contrast.
    level
        Coverage.

    Raises
    ------
    ShapeError, UsageError
        As `fit_exponent`; a resolution below 1; optima without replicates.

    Examples
    --------
    >>> optima = [[0.010, 0.011, 0.010], [0.012, 0.010, 0.011], [0.011, 0.011, 0.012], [0.010, 0.010, 0.011]]
    >>> test = drift_test([4, 8, 32], optima, tolerance=0.277)
    >>> test.outcome, round(test.factor_per_doubling.low, 2), round(test.factor_per_doubling.high, 2)
    ('holds', 0.94, 1.09)
    """
    if not (1 <= resolution < math.inf):
        raise UsageError(
            f"resolution={resolution}: expected the factor between neighbouring grid points, 1 for no grid"
        )
    shape = np.shape(optima)
    if len(shape) != 2:
        raise ShapeError(f"optima of shape {shape}: expected (replicates, sizes)")
    fit = fit_exponent(sizes, optima, level=level)
    basis = _Basis.of(sizes, shape[-1], None)
    grid = 0.5 * math.log(resolution) * float(np.sum(np.abs(basis.slope)))
    # Replicates that agree to the last bit are read off a grid that nobody named: they decide nothing.
    silent = resolution == 1 and np.ptp(fit.replicate_exponents) == 0
    interval = fit.interval.widened(math.inf if silent else grid)
    needed = None
    if grid < tolerance and not silent:
        # The grid's error is a bound and not a spread: it narrows the region once instead of joining in quadrature.
        needed = replicates_to_decide(fit.replicate_exponents, 0.0, tolerance - grid, level=level)
    return DriftTest(
        ExponentFit(**{**vars(fit), "interval": interval}),
        Interval(0.0, math.inf, level) if silent else interval.mapped(_power_of_two),
        decide(fit.exponent, interval, 0.0, tolerance),
        tolerance,
        needed,
    )


@dataclass(frozen=True)
class _Basis:
    """The linear maps from log values at k sizes to a straight line in log size."""

    slope: Floats  # (k,)
    level: Floats  # (k,): value of the line at log size 0
    bend: Floats | None  # (k,): coefficient of the square in the parabola
    rest: Floats  # (k, k - 2): orthonormal in the weighted sense; vanish on straight lines
    line: Floats  # (k, 2): columns 1 and log size
    weight: Floats  # (k,), the largest 1

    @classmethod
    def of(cls, sizes: ArrayLike, count: int, weights: Floats | None) -> "_Basis":
        position = _logs(as_samples(sizes, "sizes"), "sizes")
        if position.size != count:
            raise ShapeError(f"{position.size} sizes for {count} columns of values")
        if (distinct := np.unique(position).size) < 2:
            raise UsageError("an exponent needs at least two different sizes")
        weight = np.ones(count) if weights is None else weights / weights.max()
        root = np.sqrt(weight)
        line = np.stack([np.ones(count), position], axis=1)
        solution = np.linalg.pinv(root[:, None] * line) * root  # (2, k)
        parabola = np.stack([np.ones(count), position, position**2], axis=1)
        bend = np.linalg.pinv(root[:, None] * parabola)[2] * root if distinct > 2 else None
        # The last k - 2 left singular vectors span what no line reaches.
        rest = np.linalg.svd(root[:, None] * line)[0][:, 2:] * root[:, None]
        return cls(solution[1], solution[0], bend, rest, line, weight)

    def residuals(self, logs: Floats) -> Floats:
        return logs - self.line @ np.stack([logs @ self.level, logs @ self.slope])


def _power_of_two(exponent: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp2(exponent))


def _logs(values: Floats, name: str) -> Floats:
    if not np.all(np.isfinite(values)) or np.any(values <= 0):
        worst = values[~(np.isfinite(values) & (values > 0))].flat[0]
        raise UsageError(
            f"{name} contains {worst}: a power law is fitted to positive finite numbers. A difference that may "
            "vanish or change sign has no logarithm: average it over more replicates first"
        )
    return np.log(values)


def _fit_scatter(basis: _Basis, logs: Floats, level: float) -> ExponentFit:
    if logs.size < 3:
        raise UsageError("two values without replicates have no error: give replicates, or errors, or a third size")
    dof = logs.size - 2
    spread = math.sqrt(float(np.sum((logs @ basis.rest) ** 2)) / dof)  # of a value of weight one
    error = spread * float(np.linalg.norm(basis.slope / np.sqrt(basis.weight)))
    exponent = float(logs @ basis.slope)
    interval = around(exponent, float(half_widths(error, dof, level)), level)
    residuals = tuple(basis.residuals(logs).tolist())
    return ExponentFit(exponent, interval, float(logs @ basis.level), None, None, residuals, (), "scatter")


def _hotelling(rest: Floats) -> float | None:
    """P-value of mean zero for rows of `rest` (replicates, departures), by Hotelling's T²."""
    count, width = rest.shape
    if width == 0 or count < width + 2:
        return None
    return _chi_squared(mean_of(rest, axis=0), np.atleast_2d(np.cov(rest, rowvar=False)) / count, count - 1)


def _chi_squared(departure: Floats, covariance: Floats, dof: float) -> float | None:
    """P-value of a departure from zero whose covariance has `dof` degrees of freedom."""
    width = departure.size
    if width == 0 or dof < width + 1:
        return None
    scale = float(np.trace(covariance))
    if scale == 0:  # deterministic values: the law is exact or it is not
        return float(np.max(np.abs(departure)) <= 1e-12)
    values, vectors = np.linalg.eigh(covariance)
    known = values <= 1e-12 * scale  # directions without error: there the law is exact or it is not
    along = vectors.T @ departure
    if np.any(np.abs(along[known]) > 1e-12):
        return 0.0
    statistic = float(np.sum(along[~known] ** 2 / values[~known]))
    if math.isinf(dof):
        return float(stats.chi2.sf(statistic, width))
    free = dof - width + 1
    return float(stats.f.sf(statistic * free / (width * dof), width, free))
