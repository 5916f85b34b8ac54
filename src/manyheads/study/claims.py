"""Declarative claims: what is measured, what the theory says, and how far from it still counts.

A study lists its claims, and `run` evaluates the list. A figure is decided by what it is: a single number exactly,
samples by the interval of their mean, and an interval as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

from manyheads.errors import UsageError
from manyheads.study.verdicts import LEVEL, Expected, Scale, Tolerance, Verdict

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

T = TypeVar("T")


class SampledFigure(NamedTuple):
    """Samples of a figure that is itself computed from a sampled prediction, with the error that the latter makes."""

    samples: np.ndarray  # (replicates,)
    prediction_error: float
    prediction_dof: float


# A number, samples of shape (replicates,) or a `SampledFigure`, a fitted exponent, an `Interval`, a figure with its
# `Interval`, or these two with the number of replicates that would decide.
Measure = Callable[["xr.Dataset", "xr.Dataset"], Any]
FromPrediction = Callable[["xr.Dataset"], T]


@dataclass(frozen=True)
class Claim:
    """One claim of a study, evaluated by `verdict`.

    Everything that the theory may determine (`target`, `tolerance`, `expected`, `prediction_error`) is a value, or a
    function of the prediction that returns it.

    Parameters
    ----------
    text
        One sentence: the quantity, the law and the regime, as an abstract would say it.
    measure
        ``measure(predicted, trained)`` returns the figure: one number without sampling error; one number a replicate,
        shape (replicates,); an `SampledFigure`; an `ExponentFit`; an `Interval` of level 0.99; a figure and its
        interval; or these two and the number of replicates that would decide an inconclusive claim.
    target, tolerance
        What the theory says and how far from it still counts: a number, or (below, above), either may be infinite.
    basis
        From what the tolerance follows: a rate, a Monte Carlo error, a closed form.
    expected
        The outcome known beforehand: "holds", or "refuted" for a claim that is known to fail. A value belongs to the
        study's default configurations and is dropped elsewhere; a function of the prediction stands everywhere.
    prediction_error, prediction_dof, resolution
        For samples: standard error of a sampled target, its degrees of freedom, and the grain of one sample; see
        `Verdict.from_samples`.
    scale
        For samples: "log" where the claim is about the geometric mean of positive replicates, such as a ratio.
    bounds
        Values that the quantity can take: (0, 1) for an accuracy; its interval ends there.
    quantity
        What the figure is, with its unit in round brackets: "escape time (steps)"; a report writes it on the axis.

    Examples
    --------
    >>> import xarray as xr
    >>> claim = Claim("the mean is 1/2", lambda predicted, trained: trained["mean"].values, target=0.5, tolerance=0.1,
    ...               basis="three standard errors of 200 draws")
    >>> trained = xr.Dataset({"mean": ("replicate", [0.49, 0.51, 0.5, 0.52])})
    >>> claim.verdict(xr.Dataset(), trained).outcome
    'holds'
    """

    text: str
    measure: Measure
    target: float | FromPrediction[float]
    tolerance: Tolerance | FromPrediction[Tolerance]
    basis: str
    expected: Expected | FromPrediction[Expected] = "holds"
    prediction_error: float | FromPrediction[float] = 0.0
    prediction_dof: float = float("inf")
    resolution: float = 0.0
    bounds: tuple[float, float] = (-math.inf, math.inf)
    quantity: str = ""
    scale: Scale = "linear"

    def __post_init__(self) -> None:
        pair = self.tolerance if isinstance(self.tolerance, tuple) else (self.tolerance, self.tolerance)
        right = {
            "text": isinstance(self.text, str),
            "measure": callable(self.measure),
            "target": callable(self.target) or _is_number(self.target),
            "tolerance": callable(self.tolerance) or (len(pair) == 2 and all(_is_number(each, 0) for each in pair)),
            "basis": isinstance(self.basis, str),
            "expected": callable(self.expected) or self.expected in get_args(Expected),
            "prediction_error": callable(self.prediction_error) or _is_number(self.prediction_error, 0),
            "prediction_dof": _is_number(self.prediction_dof, 0),
            "resolution": _is_number(self.resolution, 0),
            "bounds": isinstance(self.bounds, tuple) and len(self.bounds) == 2 and self.bounds[0] < self.bounds[1],
            "quantity": isinstance(self.quantity, str),
            "scale": self.scale in get_args(Scale),
        }
        if wrong := [name for name, is_right in right.items() if not is_right]:
            given = getattr(self, wrong[0])
            raise UsageError(f"claim {self.text!r}: {wrong[0]}={given!r} has a wrong type or range; see help(Claim)")

    def verdict(self, predicted: xr.Dataset, trained: xr.Dataset) -> Verdict:
        """Measure and decide.

        Raises
        ------
        UsageError
            A figure that is neither a number, nor samples, nor an interval; or options that do not apply to it.
        """

        def value(of: Any) -> Any:
            return of(predicted) if callable(of) else of

        stated: dict[str, Any] = {
            "target": value(self.target),
            "tolerance": value(self.tolerance),
            "basis": self.basis,
            "expected": value(self.expected),
        }
        verdict = self._decided(self.measure(predicted, trained), stated, value(self.prediction_error))
        return replace(verdict, derived=callable(self.expected), quantity=self.quantity)

    def _decided(self, found: Any, stated: dict[str, Any], prediction_error: float) -> Verdict:
        """Choose the rule by what was measured."""
        import numpy as np

        from manyheads.statistics import Interval, replicates_to_decide
        from manyheads.statistics.exponents import ExponentFit

        if isinstance(found, ExponentFit):
            self._refuse_sample_options("a fitted exponent")
            verdict = Verdict.from_interval(
                self.text, found.interval, figure=found.exponent, bounds=self.bounds, **stated
            )
            if verdict.outcome != "inconclusive" or len(found.replicate_exponents) < 2:
                return verdict
            needed = replicates_to_decide(found.replicate_exponents, stated["target"], stated["tolerance"], level=LEVEL)
            return replace(verdict, replicates_needed=needed)
        if isinstance(found, SampledFigure):
            error, dof = found.prediction_error, found.prediction_dof
            sampled: dict[str, Any] = {"prediction_error": error, "prediction_dof": dof, "bounds": self.bounds}
            return Verdict.from_samples(self.text, found.samples, scale=self.scale, **sampled, **stated)
        parts = found if isinstance(found, tuple) and len(found) in (2, 3) else (None, found)
        if isinstance(parts[1], Interval):
            self._refuse_sample_options("an interval")
            needed = parts[2] if len(parts) == 3 else None
            known: dict[str, Any] = {"figure": parts[0], "replicates_needed": needed, "bounds": self.bounds}
            return Verdict.from_interval(self.text, parts[1], **known, **stated)
        values = np.asarray(found, dtype=np.float64)
        if values.ndim == 0:
            self._refuse_sample_options("one number")
            return Verdict.exact(self.text, float(values), **stated)
        if values.ndim > 1:
            raise UsageError(
                f"claim {self.text!r}: measured shape {values.shape}; expected one number, (replicates,) or an interval"
            )
        return Verdict.from_samples(
            self.text,
            values,
            prediction_error=prediction_error,
            prediction_dof=self.prediction_dof,
            resolution=self.resolution,
            bounds=self.bounds,
            scale=self.scale,
            **stated,
        )

    def _refuse_sample_options(self, what: str) -> None:
        """Refuse options that only widen the interval of samples, where they would be ignored."""
        if callable(self.prediction_error) or self.prediction_error or self.resolution or self.scale != "linear":
            raise UsageError(
                f"claim {self.text!r}: it measures {what}, so prediction_error, resolution and scale would be ignored; "
                "include them in the interval or the tolerance"
            )


def _is_number(value: object, least: float = -math.inf) -> bool:
    """Tell whether a value is a number, no NaN, and not below the least."""
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) >= least
