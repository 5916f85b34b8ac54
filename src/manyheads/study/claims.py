"""Claims with what was measured on them: a figure, the region in which the claim holds, and from what that follows.

A figure is decided by what it is: a single number exactly, samples by the interval of their mean, and an interval as
it stands. What has no figure, such as the logarithm of a negative number, leaves its claim undecided.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, replace
from numbers import Real
from typing import Any, NamedTuple, SupportsFloat, get_args

from manyheads._extras import NDArray, np
from manyheads._extras import xarray as xr
from manyheads.errors import UsageError
from manyheads.study.verdicts import LEVEL, Expected, Tolerance, Verdict


class Region(NamedTuple):
    """Where a claim holds: a target, and how far from it still counts (below, above)."""

    target: float
    tolerance: Tolerance

    @property
    def widths(self) -> tuple[float, float]:
        """How far below and above the target still counts."""
        return self.tolerance if isinstance(self.tolerance, tuple) else (self.tolerance, self.tolerance)

    @property
    def ends(self) -> tuple[float, float]:
        """Smallest and largest figure for which the claim holds."""
        return self.target - self.widths[0], self.target + self.widths[1]

    @property
    def is_valid(self) -> bool:
        """Whether the target is a number, and the tolerance one or two that are not negative."""
        return _is_number(self.target) and len(self.widths) == 2 and all(_is_number(each, 0) for each in self.widths)


def near(target: SupportsFloat, tolerance: Any) -> Region:
    """Return the region within a tolerance of a target; (below, above) where they differ, either may be infinite."""
    several = isinstance(tolerance, tuple)
    return Region(float(target), tuple(map(float, tolerance)) if several else float(tolerance))  # type: ignore[arg-type]


def above(bound: SupportsFloat) -> Region:
    """Return the region from a bound on: an inequality."""
    return Region(float(bound), (0.0, math.inf))


def below(bound: SupportsFloat) -> Region:
    """Return the region up to a bound: an inequality."""
    return Region(float(bound), (math.inf, 0.0))


class SampledFigure(NamedTuple):
    """Samples of a figure that is itself computed from a sampled prediction, with the error that the latter makes."""

    samples: NDArray[np.float64]  # (replicates,)
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
    scale: InitVar[str | None] = None  # of an older version

    def __post_init__(self, scale: str | None) -> None:
        if scale is not None:
            remedy = "of a ratio measure `st.log`, and state its region in logarithms"
            raise UsageError(f"claim {self.text!r}: claims have no scale, given {scale!r}; {remedy}")
        widths = ("resolution", "prediction_error", "prediction_dof")
        right = {name: isinstance(getattr(self, name), str) for name in ("text", "basis", "quantity")}
        right |= {name: _is_number(getattr(self, name), 0) for name in widths} | {
            "region": isinstance(self.region, Region) and self.region.is_valid,
            "expected": self.expected in (*get_args(Expected), None),
            "bounds": isinstance(self.bounds, tuple) and len(self.bounds) == 2 and self.bounds[0] < self.bounds[1],
        }
        for name in (name for name, is_right in right.items() if not is_right):
            given = getattr(self, name)
            raise UsageError(f"claim {self.text!r}: {name}={given!r} has a wrong type or range; see help(Claim)")

    def verdict(self) -> Verdict:
        """Decide the claim by what its figure is; UsageError if it is none, or if options do not apply to it."""
        figure = self.figure if isinstance(self.figure, Figure) else Figure(self.figure)
        verdict = self._decided(figure.value)
        return replace(verdict, derived=self.derived, quantity=self.quantity or figure.quantity)

    def _decided(self, found: Any) -> Verdict:
        """Choose the rule by what was measured."""
        from manyheads.statistics import Interval, exponents, verdicts

        target, tolerance = self.region
        stated: dict[str, Any] = {**self.region._asdict(), "basis": self.basis, "expected": self.expected}
        error, dof = self.prediction_error, self.prediction_dof
        if hasattr(found, "decided"):
            found = found.decided(self.region)
        if isinstance(found, exponents.ExponentFit):
            rates = found.replicate_exponents
            few = len(rates) < 2
            needed = None if few else verdicts.replicates_to_decide(rates, target, tolerance, level=LEVEL)
            found = found.exponent, found.interval, needed
        if isinstance(found, SampledFigure):
            found, error, dof = found
        several = isinstance(found, tuple) and len(found) in (2, 3)
        figure, interval, needed = (*found, None)[:3] if several else (None, found, None)
        if isinstance(interval, Interval):
            self._refuse_sample_options("an interval")
            known: dict[str, Any] = {"figure": figure, "replicates_needed": needed, "bounds": self.bounds}
            return Verdict.from_interval(self.text, interval, **known, **stated)
        if (dims := getattr(found, "dims", ())) not in ((), ("replicate",)):
            raise UsageError(f"claim {self.text!r}: measured over {dims}; average over all but replicates")
        values = None
        with contextlib.suppress(TypeError, ValueError):
            values = None if found is None else np.asarray(found, dtype=np.float64)
        if values is None or values.ndim > 1:
            given = f"measured {found!r:.60}" if values is None else f"measured shape {values.shape}"
            raise UsageError(f"claim {self.text!r}: {given}; expected one number, (replicates,) or an interval")
        if values.ndim == 0:
            self._refuse_sample_options("one number")
            return Verdict.exact(self.text, float(values), **stated)
        usable = int(np.isfinite(values).sum())
        if usable < max(values.size, 1):
            nothing = Interval(-math.inf, math.inf, LEVEL)
            verdict = Verdict.from_interval(self.text, nothing, figure=math.nan, **stated)
            return replace(verdict, note=f"{usable} of {values.size} replicates have a figure")
        stated |= {"resolution": self.resolution, "bounds": self.bounds}
        return Verdict.from_samples(self.text, values, prediction_error=error, prediction_dof=dof, **stated)

    def _refuse_sample_options(self, what: str) -> None:
        """Refuse options that only widen the interval of samples, where they would be ignored."""
        if self.prediction_error or self.resolution:
            ignored = "so prediction_error and resolution would be ignored"
            remedy = "include them in the interval or the tolerance"
            raise UsageError(f"claim {self.text!r}: it measures {what}, {ignored}; {remedy}")


Claims = Iterator[Claim]


def _is_number(value: object, least: float = -math.inf) -> bool:
    """Tell whether a value is a number, no NaN, and not below the least."""
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) >= least
