"""Claims with what was measured on them: a figure, the region in which the claim holds, and from what that follows.

A figure is decided by what it is: a single number exactly, samples by the interval of their mean, and an interval as
it stands. What has no figure, such as the logarithm of a negative number, leaves its claim undecided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from manyheads.errors import UsageError
from manyheads.study.verdicts import LEVEL, Expected, Scale, Tolerance, Verdict

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr


class Region(NamedTuple):
    """Where a claim holds: a target, and how far from it still counts (below, above)."""

    target: float
    tolerance: Tolerance

    @property
    def ends(self) -> tuple[float, float]:
        """Smallest and largest figure for which the claim holds."""
        below, above = self.tolerance if isinstance(self.tolerance, tuple) else (self.tolerance, self.tolerance)
        return self.target - below, self.target + above


def near(target: Any, tolerance: Any) -> Region:
    """Return the region within a tolerance of a target; (below, above) where they differ, either may be infinite."""
    pair = tuple(map(float, tolerance)) if isinstance(tolerance, tuple) else float(tolerance)
    return Region(float(target), pair)  # type: ignore[arg-type]


def above(bound: Any) -> Region:
    """Return the region from a bound on: an inequality."""
    return Region(float(bound), (0.0, math.inf))


def below(bound: Any) -> Region:
    """Return the region up to a bound: an inequality."""
    return Region(float(bound), (math.inf, 0.0))


class SampledFigure(NamedTuple):
    """Samples of a figure that is itself computed from a sampled prediction, with the error that the latter makes."""

    samples: np.ndarray  # (replicates,)
    prediction_error: float
    prediction_dof: float


@dataclass(frozen=True)
class Series:
    """What a picture of a figure draws: a measured series along an axis, and what is predicted of it."""

    along: str
    measured: xr.DataArray
    predicted: xr.DataArray | None = None


@dataclass(frozen=True)
class Figure:
    """A measured figure with its quantity, which remembers the data that it was computed from."""

    value: Any
    quantity: str = ""
    series: Series | None = None


@dataclass(frozen=True)
class Claim:
    """One claim of a study with what was measured on it.

    Parameters
    ----------
    text
        One sentence: the quantity, the law and the regime, as an abstract would say it.
    figure
        A measure (`exponent`, `log_ratio`, `Root`, ...); an array over replicates, decided by the interval of its mean;
        one number without sampling error; an `ExponentFit`; an `Interval` of level 0.99; a figure and its interval; or
        these two and the number of replicates that would decide an inconclusive claim.
    region
        Where the claim holds: `near`, `above` or `below`.
    basis
        From what the tolerance follows: a rate, a Monte Carlo error, a closed form.
    quantity
        What the figure is, with its unit in round brackets: "escape time (steps)"; that of a measure if empty.
    expected, derived
        The outcome known beforehand: "holds", or "refuted" for a claim that is known to fail. It belongs to the study's
        default configurations and is dropped elsewhere, unless it is `derived` from the prediction. None if unknown.
    bounds
        Values that the quantity can take: (0, 1) for an accuracy; its interval ends there.
    resolution, prediction_error, prediction_dof
        For samples: the grain of one sample, the standard error of a sampled target, and its degrees of freedom; see
        `Verdict.from_samples`.
    scale
        For samples: "log" where the claim is about the geometric mean of positive replicates, such as a ratio.

    Examples
    --------
    >>> import xarray as xr
    >>> means = xr.DataArray([0.49, 0.51, 0.5, 0.52], dims="replicate")
    >>> Claim("the mean is 1/2", means, near(0.5, 0.1), "three standard errors of 200 draws").verdict().outcome
    'holds'
    """

    text: str
    figure: Any
    region: Region
    basis: str
    quantity: str = ""
    expected: str | None = "holds"
    derived: bool = False
    bounds: tuple[float, float] = (-math.inf, math.inf)
    resolution: float = 0.0
    prediction_error: float = 0.0
    prediction_dof: float = math.inf
    scale: Scale = "linear"

    def __post_init__(self) -> None:
        right = {
            "text": isinstance(self.text, str),
            "region": isinstance(self.region, Region) and _is_number(self.region.target) and _is_width(self.region),
            "basis": isinstance(self.basis, str),
            "quantity": isinstance(self.quantity, str),
            "expected": self.expected in (*get_args(Expected), None),
            "bounds": isinstance(self.bounds, tuple) and len(self.bounds) == 2 and self.bounds[0] < self.bounds[1],
            "resolution": _is_number(self.resolution, 0),
            "prediction_error": _is_number(self.prediction_error, 0),
            "prediction_dof": _is_number(self.prediction_dof, 0),
            "scale": self.scale in get_args(Scale),
        }
        if wrong := [name for name, is_right in right.items() if not is_right]:
            given = getattr(self, wrong[0])
            raise UsageError(f"claim {self.text!r}: {wrong[0]}={given!r} has a wrong type or range; see help(Claim)")

    def verdict(self) -> Verdict:
        """Decide the claim by what its figure is.

        Raises
        ------
        UsageError
            A figure that is neither a number, nor samples, nor an interval; or options that do not apply to it.
        """
        figure = self.figure if isinstance(self.figure, Figure) else Figure(self.figure)
        verdict = self._decided(figure.value)
        return replace(verdict, derived=self.derived, quantity=self.quantity or figure.quantity)

    def _decided(self, found: Any) -> Verdict:
        """Choose the rule by what was measured."""
        import numpy as np

        from manyheads.statistics import Interval
        from manyheads.statistics.exponents import ExponentFit
        from manyheads.statistics.verdicts import replicates_to_decide

        target, tolerance = self.region
        stated: dict[str, Any] = {"target": target, "tolerance": tolerance, "basis": self.basis}
        stated |= {"expected": self.expected}
        if hasattr(found, "decided"):
            found = found.decided(self.region)
        if isinstance(found, ExponentFit):
            self._refuse_sample_options("a fitted exponent")
            verdict = Verdict.from_interval(
                self.text, found.interval, figure=found.exponent, bounds=self.bounds, **stated
            )
            if verdict.outcome != "inconclusive" or len(found.replicate_exponents) < 2:
                return verdict
            needed = replicates_to_decide(found.replicate_exponents, target, tolerance, level=LEVEL)
            return replace(verdict, replicates_needed=needed)
        error, dof = self.prediction_error, self.prediction_dof
        if isinstance(found, SampledFigure):
            found, error, dof = found
        parts = found if isinstance(found, tuple) and len(found) in (2, 3) else (None, found)
        if isinstance(parts[1], Interval):
            self._refuse_sample_options("an interval")
            needed = parts[2] if len(parts) == 3 else None
            known: dict[str, Any] = {"figure": parts[0], "replicates_needed": needed, "bounds": self.bounds}
            return Verdict.from_interval(self.text, parts[1], **known, **stated)
        if (dims := getattr(found, "dims", ())) not in ((), ("replicate",)):
            raise UsageError(f"claim {self.text!r}: measured over {dims}; average over all but replicates")
        values = np.asarray(found, dtype=np.float64)
        if values.ndim == 0:
            self._refuse_sample_options("one number")
            return Verdict.exact(self.text, float(values), **stated)
        if values.ndim > 1:
            raise UsageError(
                f"claim {self.text!r}: measured shape {values.shape}; expected one number, (replicates,) or an interval"
            )
        usable = int((np.isfinite(values) & ((values > 0) | (self.scale == "linear"))).sum())
        if usable < max(values.size, 1):
            nothing = Interval(-math.inf, math.inf, LEVEL)
            verdict = Verdict.from_interval(self.text, nothing, figure=math.nan, **stated)
            return replace(verdict, note=f"{usable} of {values.size} replicates have a figure")
        return Verdict.from_samples(
            self.text,
            values,
            prediction_error=error,
            prediction_dof=dof,
            resolution=self.resolution,
            bounds=self.bounds,
            scale=self.scale,
            **stated,
        )

    def _refuse_sample_options(self, what: str) -> None:
        """Refuse options that only widen the interval of samples, where they would be ignored."""
        if self.prediction_error or self.resolution or self.scale != "linear":
            raise UsageError(
                f"claim {self.text!r}: it measures {what}, so prediction_error, resolution and scale would be ignored; "
                "include them in the interval or the tolerance"
            )


def _is_number(value: object, least: float = -math.inf) -> bool:
    """Tell whether a value is a number, no NaN, and not below the least."""
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) >= least


def _is_width(region: Region) -> bool:
    """Tell whether the tolerance of a region is a number or two, none of them negative."""
    pair = region.tolerance if isinstance(region.tolerance, tuple) else (region.tolerance, region.tolerance)
    return len(pair) == 2 and all(_is_number(each, 0) for each in pair)
