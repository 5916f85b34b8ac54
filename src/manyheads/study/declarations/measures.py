"""Measures: figures of claims from arrays with names, over replicates and axes of the grid.

A measure does not raise on data: what has no figure is an infinite interval, and only its own claim is undecided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from manyheads.errors import UsageError
from manyheads.statistics import Interval, distances, exponents, fit_exponent, mean_interval
from manyheads.statistics.verdicts import replicates_to_decide
from manyheads.study.claims import Figure, Region, SampledFigure, Series
from manyheads.study.verdicts import LEVEL

if TYPE_CHECKING:
    from jax import Array as Key  # of the random numbers of a replicate
else:
    Key = Any
Data = xr.Dataset


def generator(key: Key, *numbers: int) -> np.random.Generator:
    """Return NumPy's generator for the key of a replicate, another one for further numbers, such as those of a cell."""
    import jax

    return np.random.default_rng([*np.asarray(jax.random.key_data(key)).ravel().tolist(), *numbers])


def log(values: xr.DataArray | float) -> xr.DataArray:
    """Return the natural logarithm, as an array with names; NaN or infinite where there is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return xr.DataArray(np.log(values))


Fit = Callable[..., exponents.ExponentFit]
Dims = str | Collection[Hashable] | None


def distance(first: xr.DataArray, second: xr.DataArray | float, over: Dims = None) -> xr.DataArray:
    """Return the root mean square of a difference over some dimensions; over all but replicates if None."""
    squares = (first - second) ** 2
    if over is None:
        over = [dim for dim in squares.dims if dim != "replicate"]
    return squares.mean(over) ** 0.5


def exponent(
    values: xr.DataArray, along: str, letter: str = "", what: str = "", predicted: xr.DataArray | None = None
) -> Figure:
    """Return the exponent of a power law along one axis of the grid, fitted to every replicate.

    Parameters
    ----------
    values
        Over replicates and that axis.
    letter
        The axis in the quantity, "exponent of n"; its name if empty.
    what
        Name of the values in the picture; their long name if empty.
    predicted
        What the theory says of the values: drawn instead of the claimed power.
    """
    return _exponent(fit_exponent, values, along, letter, what, predicted)


def exponent_of_mean(values: xr.DataArray, along: str, letter: str = "", what: str = "") -> Figure:
    """Return the exponent of the means over replicates, where single values may be negative."""

    def fit(sizes: NDArray[np.float64], rows: NDArray[np.float64]) -> exponents.ExponentFit:
        errors = rows.std(0, ddof=1) / len(rows) ** 0.5
        return exponents.fit_exponent_to_means(sizes, rows.mean(0), errors, dof=len(rows) - 1)

    return _exponent(fit, values, along, letter, what)


def _exponent(
    fit: Fit, values: xr.DataArray, along: str, letter: str, what: str, predicted: xr.DataArray | None = None
) -> Figure:
    rows = values.transpose(..., along).dropna(along, how="all")
    try:
        found: Any = fit(np.asarray(rows[along], float), np.asarray(rows.values, float))
    except UsageError:  # values without a logarithm
        found = math.nan, Interval(-math.inf, math.inf, LEVEL)
    rows = rows.assign_attrs(long_name=what) if what else rows.rename(None)
    return Figure(found, f"exponent of {letter or along}", Series(along, rows, predicted))


def slope(values: xr.DataArray, along: str, x: Any = None) -> xr.DataArray:
    """Return the least-squares slope along one axis, whose places are `x`, for everything else."""
    places = np.asarray(values[along] if x is None else x, float)
    rest = [dim for dim in values.dims if dim != along]
    rows = values.transpose(along, *rest)
    found = np.polyfit(places, rows.values.reshape(len(places), -1), 1)[0]
    return xr.DataArray(found.reshape(rows.shape[1:]), {dim: rows[dim] for dim in rest if dim in rows.coords}, rest)


def log_ratio(measured: xr.DataArray, predicted: xr.DataArray, along: str = "", quantity: str = "") -> Figure:
    """Return ln(measured / predicted) of every replicate, its mean over all other dimensions.

    With `along` both are drawn along that axis.
    """
    return _compared(log(measured / predicted), measured, predicted, along, quantity)


def ratio(measured: xr.DataArray, predicted: xr.DataArray, along: str = "", quantity: str = "") -> Figure:
    """Return measured / predicted of every replicate, as `log_ratio` does."""
    return _compared(measured / predicted, measured, predicted, along, quantity)


def gap(measured: xr.DataArray, predicted: xr.DataArray, along: str = "", quantity: str = "") -> Figure:
    """Return measured - predicted of every replicate, as `log_ratio` does."""
    return _compared(measured - predicted, measured, predicted, along, quantity)


def _compared(
    values: xr.DataArray, measured: xr.DataArray, predicted: xr.DataArray, along: str, quantity: str
) -> Figure:
    each = values.mean([dim for dim in values.dims if dim != "replicate"])
    return Figure(each, quantity, Series(along, measured.rename(None), predicted) if along else None)


@dataclass(frozen=True)
class Root:
    """The root of a mean of squares, with the sign of that mean, decided in squares.

    Attributes
    ----------
    samples
        Independent samples of the square, `each` to a replicate.
    square
        The square; the mean of the samples up to their bias.
    drawn
        Half-width that a sampled prediction adds.
    """

    samples: NDArray[np.float64]
    square: float
    drawn: float = 0.0
    each: int = 1

    @classmethod
    def of(cls, found: distances.SquaredDistance, each: int = 1) -> Root:
        """Return the figure of a distance between two means."""
        return cls(found.first, found.square, found.drawn, each)

    def decided(self, region: Region) -> tuple[float, Interval, int | None]:
        """Return the figure, its interval, and how many replicates would decide."""
        middle = float(self.samples.mean())
        squares = mean_interval(self.samples, LEVEL).widened_independently(middle, self.drawn)
        low, square, high = (end * abs(end) for end in (region.ends[0], region.target, region.ends[1]))
        widths = (square - low, high - square)
        needed = replicates_to_decide(self.samples, square, widths, level=LEVEL, prediction_error=self.drawn)
        interval = squares.shifted(self.square - middle).mapped(distances.signed_root)
        return distances.signed_root(self.square), interval, None if needed is None else -(-needed // self.each)


@dataclass(frozen=True)
class WidenedExponent:
    """A fitted exponent whose interval includes what the draws of a sampled prediction scatter."""

    fit: exponents.ExponentFit
    drawn: float

    def decided(self, region: Region) -> tuple[float, Interval, int | None]:
        """Return the figure, its interval, and how many replicates would decide."""
        found = self.fit
        needed = replicates_to_decide(found.replicate_exponents, *region, level=LEVEL, prediction_error=self.drawn)
        return found.exponent, found.interval.widened_independently(found.exponent, self.drawn), needed


def over_draws(figure: Callable[[Any, float], Any], theory: Any) -> Any:
    """Return a figure that is computed from a sampled prediction, with the error that its draws make.

    Parameters
    ----------
    figure
        ``figure(limit, share)`` is called with the mean of all draws, whose variance is `share` = 1/draws of that of
        one, and with every draw by itself (`share` = 1). It returns an `exponent`, or one number a replicate.
    theory
        An array or a dataset over `prediction`.
    """
    count = theory.sizes["prediction"]
    found = figure(theory.mean("prediction"), 1 / count)
    each = [figure(theory.isel(prediction=place, drop=True), 1.0) for place in range(count)]
    if not isinstance(found, Figure) or isinstance(found.value, xr.DataArray):
        series = [one.value if isinstance(one, Figure) else one for one in (found, *each)]
        error = np.std([float(one.mean()) for one in series[1:]], ddof=1) / math.sqrt(count)
        sampled = SampledFigure(series[0].values, float(error), count - 1)
        return replace(found, value=sampled) if isinstance(found, Figure) else sampled
    if not all(isinstance(one.value, exponents.ExponentFit) for one in (found, *each)):
        return replace(found, value=(math.nan, Interval(-math.inf, math.inf, LEVEL)))
    drawn = distances.half_width_of_draws(np.asarray([one.value.exponent for one in each]))
    return replace(found, value=WidenedExponent(found.value, drawn))
