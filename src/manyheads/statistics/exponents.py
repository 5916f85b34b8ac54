"""Exponents of power laws with intervals, a visible lack of fit, and the drift of an optimum with size."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from manyheads._arrays import takes_arrays
from manyheads._extras import Float
from manyheads._namespaces import Floats
from manyheads._overview import distinct_texts
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

LARGEST_RELATIVE_ERROR = 1 / 3  # of a mean with a useful logarithm: beyond, three standard errors touch zero


@dataclass(frozen=True)
class ExponentFit:
    """A fitted power law, value = prefactor * size ** exponent.

    Attributes
    ----------
    curvature
        Interval of the coefficient c in log value = a + b u + c u², u = log size: zero for a power law, and 2c is the
        change of the local exponent per e-fold. None with two sizes.
    p_fit
        Probability of a lack of fit at least as large if the power law were exact; small means that it is not. None
        where sizes or replicates are too few to tell.
    """

    exponent: float  # slope of log value against log size
    interval: Interval  # of the exponent
    log_prefactor: float  # natural logarithm
    curvature: Interval | None = None
    p_fit: float | None = None
    residuals: tuple[float, ...] = field(default=(), repr=False)  # log(value / fit) at each size: 0.1 is 10% off
    replicate_exponents: tuple[float, ...] = field(default=(), repr=False)  # empty if the values had no replicates
    design: str = ""  # where the error came from: "paired", "means" or "scatter"

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
        Values or sizes that are not positive and finite.

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
    if values.ndim not in (1, 2) or values.size == 0:
        raise ShapeError(f"values {values.shape}: expected at least one replicate, (replicates, sizes) or (sizes,)")
    logs = _logs(values, "values")
    basis = _Basis.of(sizes, logs.shape[-1], None)
    if logs.ndim == 1:
        if logs.size < 3:
            raise UsageError("two values without replicates have no error: give replicates, or errors, or a third size")
        dof = logs.size - 2
        spread = math.sqrt(float(np.sum((logs @ basis.rest) ** 2)) / dof)  # of a value of weight one
        error = spread * float(np.linalg.norm(basis.slope / np.sqrt(basis.weight)))
        exponent = float(logs @ basis.slope)
        return basis.fit(logs, exponent, around(exponent, float(half_widths(error, dof, level)), level), "scatter")
    means = mean_of(logs, axis=0)  # (k,)
    slopes = logs @ basis.slope  # (n,)
    curvature = None if basis.bend is None else student_interval(logs @ basis.bend, level=level)
    interval, p_fit = student_interval(slopes, level=level), _hotelling(logs @ basis.rest)
    found = {"curvature": curvature, "p_fit": p_fit, "replicate_exponents": tuple(slopes.tolist())}
    return basis.fit(means, float(mean_of(slopes)), interval, "paired", **found)


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

    Notes
    -----
    Sizes weigh 1 / (relative error)² where all errors are known and positive, and equally where errors are estimated:
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
        largest, _ = distinct_texts(float(relative.max()), LARGEST_RELATIVE_ERROR, digits=2)
        given = f"a mean with a relative error of {largest}, above 1/3, is not resolved from zero"
        raise UsageError(f"{given}: add replicates at that size or leave it out")
    known = np.all(np.isinf(dof)) and np.all(relative > 0)
    basis = _Basis.of(sizes, logs.size, (relative.min() / relative) ** 2 if known else None)

    def half(contrast: Floats) -> float:
        return float(np.linalg.norm(half_widths(np.abs(contrast) * relative, dof, level)))

    exponent = float(logs @ basis.slope)
    curvature = None if basis.bend is None else around(float(logs @ basis.bend), half(basis.bend), level)
    p_fit = _chi_squared(logs @ basis.rest, (basis.rest.T * relative**2) @ basis.rest, float(np.min(dof)))
    interval = around(exponent, half(basis.slope), level)
    return basis.fit(logs, exponent, interval, "means", curvature=curvature, p_fit=p_fit)


@dataclass(frozen=True)
class DriftTest:
    """Whether an optimum moves with size."""

    fit: ExponentFit  # its interval includes the resolution of the search
    factor_per_doubling: Interval  # of the optimum when the size doubles
    outcome: Outcome  # of "the exponent is zero within the tolerance"
    tolerance: float  # on the exponent
    replicates_needed: int | None  # in all, to decide; None if too many


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
        raise UsageError(f"resolution={resolution}: expected the factor between neighbours on a grid, 1 for no grid")
    shape = np.shape(optima)
    if len(shape) != 2:
        raise ShapeError(f"optima of shape {shape}: expected (replicates, sizes)")
    fit = fit_exponent(sizes, optima, level=level)
    basis = _Basis.of(sizes, shape[-1], None)
    grid = 0.5 * math.log(resolution) * float(np.sum(np.abs(basis.slope)))
    # Replicates that agree to the last bit are read off a grid that nobody named: they decide nothing.
    silent = resolution == 1 and np.ptp(fit.replicate_exponents) == 0
    interval = fit.interval.widened(math.inf if silent else grid)
    # The grid's error is a bound and not a spread: it narrows the region once instead of joining in quadrature.
    hopeless = silent or grid >= tolerance
    return DriftTest(
        replace(fit, interval=interval),
        Interval(0.0, math.inf, level) if silent else interval.mapped(_power_of_two),
        decide(fit.exponent, interval, 0.0, tolerance),
        tolerance,
        None if hopeless else replicates_to_decide(fit.replicate_exponents, 0.0, tolerance - grid, level=level),
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

    def fit(self, logs: Floats, exponent: float, interval: Interval, design: str, **found: Any) -> ExponentFit:
        """Return what is found of log values (k,), with the prefactor and the residuals of the line."""
        residuals = tuple((logs - self.line @ np.stack([logs @ self.level, logs @ self.slope])).tolist())
        return ExponentFit(exponent, interval, float(logs @ self.level), residuals=residuals, design=design, **found)


def _power_of_two(exponent: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp2(exponent))


def _logs(values: Floats, name: str) -> Floats:
    if not np.all(np.isfinite(values)) or np.any(values <= 0):
        worst = values[~(np.isfinite(values) & (values > 0))].flat[0]
        remedy = "average a difference that may vanish or change sign over more replicates first"
        raise UsageError(f"{name} contains {worst}: a power law is fitted to positive finite numbers; {remedy}")
    return np.log(values)


def _hotelling(rest: Floats) -> float | None:
    """P-value of mean zero for rows of `rest` (replicates, departures), by Hotelling's T²."""
    count, width = rest.shape
    if width == 0 or count < width + 2:  # covariances of fewer rows are singular
        return None
    return _chi_squared(mean_of(rest, axis=0), np.atleast_2d(np.cov(rest, rowvar=False)) / count, count - 1)


def _chi_squared(departure: Floats, covariance: Floats, dof: float) -> float | None:
    """P-value of a departure from zero whose covariance has `dof` degrees of freedom."""
    width, scale = departure.size, float(np.trace(covariance))
    if width == 0 or dof < width + 1:
        return None
    if scale == 0:  # deterministic values: the law is exact or it is not
        return float(np.max(np.abs(departure)) <= 1e-12)
    values, vectors = np.linalg.eigh(covariance)
    known, along = values <= 1e-12 * scale, vectors.T @ departure  # without error the law is exact or it is not
    if np.any(np.abs(along[known]) > 1e-12):
        return 0.0
    statistic = float(np.sum(along[~known] ** 2 / values[~known]))
    if math.isinf(dof):
        return float(stats.chi2.sf(statistic, width))
    free = dof - width + 1
    return float(stats.f.sf(statistic * free / (width * dof), width, free))
