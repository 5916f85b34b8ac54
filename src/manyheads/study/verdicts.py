"""The verdict on one claim: what was expected, what came out, how sure that is, and from what the tolerance follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from manyheads._arrays import takes_arrays
from manyheads._overview import Overview, Shown
from manyheads.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from jaxtyping import Float
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

    from manyheads.statistics import Interval
    from manyheads.statistics.verdicts import Outcome

LEVEL = 0.99  # coverage of every interval behind a verdict

Expected = Literal["holds", "refuted"]
Tolerance = float | tuple[float, float]


@dataclass(frozen=True, repr=False)
class Verdict(Shown):
    """A decided claim.

    The rule: *holds* when the 99% interval of the figure lies wholly inside ``[target - tolerance, target +
    tolerance]``, *refuted* when it lies wholly outside, *inconclusive* otherwise.

    Parameters
    ----------
    claim
        One sentence, in the words of the source where there is one.
    expected
        The outcome known beforehand: "holds", or "refuted" for a claim that is known to fail. None when there is no
        expectation: expectations belong to a study's default configurations.
    outcome
        What this run decides.
    figure, interval
        The measured figure and its 99% interval, the prediction's own error included.
    target, tolerance
        What the theory says and how far from it still counts: (below, above), either may be infinite.
    basis
        From what the tolerance follows: a rate, a Monte Carlo error, a closed form.
    replicates_needed
        For *inconclusive*: how many replicates would decide at the present spread; None if that cannot be said.
    derived
        Whether `expected` follows from the configuration, so that it stands outside the defaults too.
    quantity
        What the figure is, with its unit in round brackets: "escape time (steps)"; empty if only the claim says it.
    """

    claim: str
    expected: Expected | None
    outcome: Outcome
    figure: float
    interval: tuple[float, float]
    target: float
    tolerance: tuple[float, float]
    basis: str
    replicates_needed: int | None = None
    derived: bool = field(default=False, compare=False, repr=False)
    quantity: str = field(default="", compare=False, repr=False)

    @classmethod
    def from_interval(
        cls,
        claim: str,
        interval: Interval,
        *,
        target: float,
        tolerance: Tolerance,
        basis: str,
        figure: float | None = None,
        expected: Expected = "holds",
        replicates_needed: int | None = None,
        bounds: tuple[float, float] = (-math.inf, math.inf),
    ) -> Verdict:
        """Decide a claim on a figure whose 99% interval is known, by default the interval's middle.

        Parameters
        ----------
        bounds
            Values that the quantity can take: 0 and 1 for an accuracy. The interval ends there and keeps its level.

        Raises
        ------
        UsageError
            A claim that cannot fail, one that says nothing of where its tolerance comes from, or an interval beyond
            the bounds.

        Examples
        --------
        >>> from manyheads.statistics import Interval
        >>> Verdict.from_interval("the slope is -1/2", Interval(-0.53, -0.49), target=-0.5, tolerance=0.1,
        ...                       basis="two standard errors of the slope at these sizes").outcome
        'holds'
        """
        from manyheads.statistics import decide

        if not basis.strip():
            raise UsageError(f"claim {claim!r}: say from what the tolerance follows")
        below, above = tolerance if isinstance(tolerance, tuple) else (tolerance, tolerance)
        if interval.low > bounds[1] or interval.high < bounds[0]:
            raise UsageError(f"claim {claim!r}: the interval {interval} lies beyond the bounds {bounds}")
        interval = replace(interval, low=max(interval.low, bounds[0]), high=min(interval.high, bounds[1]))
        middle = (interval.low + interval.high) / 2 if figure is None else float(figure)
        outcome = decide(middle, interval, target, tolerance)
        return cls(
            claim=claim,
            expected=expected,
            outcome=outcome,
            figure=middle,
            interval=(interval.low, interval.high),
            target=float(target),
            tolerance=(float(below), float(above)),
            basis=basis,
            replicates_needed=replicates_needed if outcome == "inconclusive" else None,
        )

    @classmethod
    @takes_arrays
    def from_samples(
        cls,
        claim: str,
        samples: Float[ArrayLike, " replicates"],
        *,
        target: float,
        tolerance: Tolerance,
        basis: str,
        expected: Expected = "holds",
        prediction_error: float = 0.0,
        prediction_dof: float = math.inf,
        resolution: float = 0.0,
        bounds: tuple[float, float] = (-math.inf, math.inf),
    ) -> Verdict:
        """Decide a claim on the mean of independent replicates, by its Student interval.

        Parameters
        ----------
        samples
            One figure a replicate, shape (replicates,).
        prediction_error
            Standard error of `target` where it was itself computed by sampling; it widens the interval.
        prediction_dof
            Degrees of freedom behind that error: n - 1 when it was estimated from n draws; infinite when it is known.
        resolution
            The grain of one sample: 1/n for a share of n trials, the spacing of a grid. It widens the interval on both
            sides. Without it, replicates that are all equal decide nothing: nobody knows how far they could differ. A
            figure that cannot differ belongs to `exact`.
        bounds
            Values that the quantity can take, at which its interval ends.
        """
        import numpy as np

        from manyheads.statistics import discrepancy_interval, mean_interval, replicates_to_decide
        from manyheads.statistics.intervals import t_quantile

        values = np.asarray(samples, dtype=np.float64)
        if prediction_error:
            gap = discrepancy_interval(values, target, prediction_error, prediction_dof, level=LEVEL)
            interval = gap.shifted(target)
        else:
            interval = mean_interval(values, LEVEL)
        half = float(t_quantile(LEVEL, prediction_dof)) * prediction_error
        silent = resolution == 0 and np.ptp(values) == 0
        interval = interval.widened(math.inf if silent else resolution)
        fixed = math.hypot(half, resolution)  # what more replicates do not shrink
        needed = replicates_to_decide(values, target, tolerance, level=LEVEL, prediction_error=fixed)
        return cls.from_interval(
            claim,
            interval,
            figure=float(values.mean()),
            target=target,
            tolerance=tolerance,
            basis=basis,
            expected=expected,
            replicates_needed=None if silent else needed,
            bounds=bounds,
        )

    @classmethod
    def exact(
        cls, claim: str, figure: float, *, target: float, tolerance: Tolerance, basis: str, expected: Expected = "holds"
    ) -> Verdict:
        """Decide a claim on a figure without sampling error: a count, a closed form, a bound over all replicates."""
        from manyheads.statistics import Interval

        interval = Interval(float(figure), float(figure), 1.0)
        return cls.from_interval(
            claim, interval, figure=figure, target=target, tolerance=tolerance, basis=basis, expected=expected
        )

    @property
    def as_expected(self) -> bool:
        """Whether the outcome is the expected one, or none is expected."""
        return self.expected in (None, self.outcome)

    @property
    def region(self) -> tuple[float, float]:
        """Range of the figure in which the claim holds."""
        return self.target - self.tolerance[0], self.target + self.tolerance[1]

    def plot(self) -> Figure:
        """Draw the figure with its interval over the range in which the claim holds."""
        from manyheads.study.reporting.charts import Estimate, draw_intervals

        return draw_intervals(
            f"{self.claim}: {self.outcome}", "figure", [Estimate("", self.figure, self.interval, self.region)]
        )

    def to_dataframe(self) -> pd.DataFrame:
        """Return the verdict as a pandas data frame of one row."""
        return verdict_overview([self], "").frame()

    def _overview(self) -> Overview:
        figures = verdict_overview([self], "")
        note = () if self.as_expected else (f"expected: {self.expected}",)
        return Overview(
            f"{self.outcome}: {self.claim}",
            figures.columns[3:],
            [row[3:] for row in figures.rows],
            (*note, f"tolerance: {self.basis}"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON can hold it: infinities as text."""
        left_out = {"derived"} if self.quantity else {"derived", "quantity"}
        return {name: _json(value) for name, value in asdict(self).items() if name not in left_out}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Verdict:
        """Rebuild a verdict from `to_json`."""
        outcome, expected, needed = data["outcome"], data["expected"], data["replicates_needed"]
        if outcome not in (*get_args(Expected), "inconclusive") or expected not in (*get_args(Expected), None):
            raise ValueError(f"no outcome of a verdict: {outcome!r}, expected {expected!r}")
        texts = (data["claim"], data["basis"], data.get("quantity", ""))
        if not all(isinstance(text, str) for text in texts) or type(needed) not in (int, type(None)):
            raise TypeError("a claim and its basis are texts, and replicates are counted")
        numbers = {name: float(data[name]) for name in ("figure", "target")}
        pairs = {name: tuple(float(end) for end in data[name]) for name in ("interval", "tolerance")}
        return cls(**data | numbers | pairs)


COLUMNS = ("claim", "outcome", "expected", "figure", "low", "high", "holds_from", "holds_to")


def verdict_overview(verdicts: Sequence[Verdict], title: str, notes: tuple[str, ...] = ()) -> Overview:
    """Return verdicts as a table: claim, outcome, figure, 99% interval, range in which the claim holds."""
    rows = [(each.claim, each.outcome, each.expected, each.figure, *each.interval, *each.region) for each in verdicts]
    return Overview(title, COLUMNS, rows, notes)


def _json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
