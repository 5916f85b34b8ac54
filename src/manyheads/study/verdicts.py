"""The verdict on one claim: what was expected, what came out, how sure that is, and from what the tolerance follows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from manyheads import statistics
from manyheads._arrays import takes_arrays
from manyheads._extras import Figure, Float, pd
from manyheads._json import Json
from manyheads._overview import Overview, Shown
from manyheads.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from manyheads.statistics.verdicts import Outcome

LEVEL = 0.99  # coverage of every interval behind a verdict

Expected = Literal["holds", "refuted"]
Pair = tuple[float, float]
Tolerance = float | Pair
NOT_STORED = ("derived", "bounds")


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
    note
        Cause of an undecided claim beyond the spread of its replicates; and whether the interval is one of a sequence.
    """

    claim: str
    expected: Expected | None
    outcome: Outcome
    figure: float
    interval: Pair
    target: float
    tolerance: Pair
    basis: str
    replicates_needed: int | None = None
    derived: bool = field(default=False, compare=False, repr=False)
    quantity: str = field(default="", compare=False, repr=False)
    note: str = field(default="", compare=False, repr=False)
    bounds: Pair = field(default=(-math.inf, math.inf), compare=False, repr=False)

    @classmethod
    def from_interval(
        cls,
        claim: str,
        interval: statistics.Interval,
        *,
        target: float,
        tolerance: Tolerance,
        basis: str,
        figure: float | None = None,
        expected: Expected = "holds",
        replicates_needed: int | None = None,
        bounds: Pair = (-math.inf, math.inf),
    ) -> Verdict:
        """Decide a claim on a figure whose 99% interval is known, by default the interval's middle.

        The interval ends at the `bounds` of what the quantity can be, 0 and 1 for an accuracy, and keeps its level.
        UsageError if it lies beyond them, if the claim cannot fail, or if nothing is said of where its tolerance comes
        from.

        Examples
        --------
        >>> from manyheads.statistics import Interval
        >>> Verdict.from_interval("the slope is -1/2", Interval(-0.53, -0.49), target=-0.5, tolerance=0.1,
        ...                       basis="two standard errors of the slope at these sizes").outcome
        'holds'
        """
        if not basis.strip():
            raise UsageError(f"claim {claim!r}: say from what the tolerance follows")
        below, above = tolerance if isinstance(tolerance, tuple) else (tolerance, tolerance)
        if interval.low > bounds[1] or interval.high < bounds[0]:
            raise UsageError(f"claim {claim!r}: the interval {interval} lies beyond the bounds {bounds}")
        interval = replace(interval, low=max(interval.low, bounds[0]), high=min(interval.high, bounds[1]))
        middle = interval.low / 2 + interval.high / 2 if figure is None else float(figure)
        outcome = statistics.decide(middle, interval, target, tolerance)
        ends, widths = (interval.low, interval.high), (float(below), float(above))
        needed = replicates_needed if outcome == "inconclusive" else None
        return cls(claim, expected, outcome, middle, ends, float(target), widths, basis, needed, bounds=bounds)

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
        bounds: Pair = (-math.inf, math.inf),
    ) -> Verdict:
        """Decide a claim on the mean of independent replicates, by `manyheads.statistics.mean_interval`.

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

        Raises
        ------
        UsageError
            As `from_interval`.
        """
        from manyheads.statistics import intervals
        from manyheads.statistics.verdicts import replicates_to_decide

        values = intervals.as_samples(samples)
        origin = target if prediction_error else 0.0
        sampled = values, origin, prediction_error, prediction_dof
        silent = resolution == 0 and values.min() == values.max()
        interval, plain = (
            kind(*sampled, level=LEVEL).shifted(origin).widened(math.inf if silent else resolution)
            for kind in (intervals.discrepancy_interval, intervals.student_interval)
        )
        fixed = math.hypot(float(intervals.t_quantile(LEVEL, prediction_dof)) * prediction_error, resolution)
        needed = replicates_to_decide(values, target, tolerance, level=LEVEL, prediction_error=fixed)
        figure, needed = float(intervals.mean_of(values)), None if silent else needed
        stated: dict[str, Any] = {"target": target, "tolerance": tolerance, "basis": basis, "expected": expected}
        verdict = cls.from_interval(claim, interval, figure=figure, replicates_needed=needed, bounds=bounds, **stated)
        if verdict.outcome != "inconclusive" or values.size == 1:
            return verdict
        if silent:
            return replace(verdict, note="all replicates are equal, and no resolution says how far they could differ")
        if statistics.decide(figure, plain, target, tolerance) == "inconclusive":
            return verdict
        return replace(verdict, note=f"{values.size} replicates are too few for samples of this skewness")

    def at_any_time(self, first: int, now: int) -> Verdict:
        """Decide again by an interval that is valid at every number of replicates from `first` on, at `now` of them.

        Student's interval grows by `sequence_factor`, and others in proportion; an exact figure has none.
        """
        from manyheads.statistics.verdicts import sequence_factor

        if self.interval[0] == self.interval[1] or not math.isfinite(self.figure):
            return self
        more, middle = sequence_factor(LEVEL, first, now) - 1, self.figure
        low, high = self.interval
        low, high = low - more * abs(middle - low), high + more * abs(high - middle)
        interval = statistics.Interval(max(low, self.bounds[0]), min(high, self.bounds[1]), LEVEL)
        outcome = statistics.decide(self.figure, interval, self.target, self.tolerance)
        ends = interval.low, interval.high
        note = "; ".join(filter(None, (self.note, f"interval valid at any number of replicates from {first} on")))
        return replace(self, outcome=outcome, interval=ends, replicates_needed=None, note=note)

    @classmethod
    def exact(
        cls, claim: str, figure: float, *, target: float, tolerance: Tolerance, basis: str, expected: Expected = "holds"
    ) -> Verdict:
        """Decide a claim on a figure without sampling error: a count, a closed form, a bound over all replicates."""
        stated: dict[str, Any] = {"target": target, "tolerance": tolerance, "basis": basis, "expected": expected}
        return cls.from_interval(claim, statistics.Interval(float(figure), float(figure), 1.0), figure=figure, **stated)

    @property
    def as_expected(self) -> bool:
        """Whether the outcome is the expected one, or none is expected."""
        return self.expected in (None, self.outcome)

    @property
    def region(self) -> Pair:
        """Range of the figure in which the claim holds."""
        return self.target - self.tolerance[0], self.target + self.tolerance[1]

    def plot(self) -> Figure:
        """Draw the figure with its interval over the range in which the claim holds."""
        from manyheads.study.reporting.charts import Estimate, draw_intervals

        estimate = Estimate("", self.figure, self.interval, self.region)
        return draw_intervals(f"{self.claim}: {self.outcome}", "figure", [estimate])

    def to_dataframe(self) -> pd.DataFrame:
        """Return the verdict as a pandas data frame of one row."""
        return verdict_overview([self], "").frame()

    def _overview(self) -> Overview:
        figures = verdict_overview([self], "")
        expected = "" if self.as_expected else f"expected: {self.expected}"
        notes = tuple(filter(None, (expected, self.note, f"tolerance: {self.basis}")))
        rows = [row[3:] for row in figures.rows]
        return Overview(f"{self.outcome}: {self.claim}", figures.columns[3:], rows, notes)

    def to_json(self) -> dict[str, Json]:
        """Return the verdict as JSON can hold it: infinities as text."""
        left_out = {*NOT_STORED, *(name for name in ("quantity", "note") if not getattr(self, name))}
        return {name: _json(value) for name, value in asdict(self).items() if name not in left_out}

    @classmethod
    def from_json(cls, data: dict[str, Json]) -> Verdict:
        """Rebuild a verdict from `to_json`."""
        outcome, expected, needed = data["outcome"], data["expected"], data["replicates_needed"]
        if outcome not in (*get_args(Expected), "inconclusive") or expected not in (*get_args(Expected), None):
            raise ValueError(f"no outcome of a verdict: {outcome!r}, expected {expected!r}")
        texts = (data["claim"], data["basis"], data.get("quantity", ""), data.get("note", ""))
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


def tally(outcomes: Iterable[str]) -> str:
    """Return how often each outcome occurs, in the order of their first."""
    return ", ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes).items())


def _json(value: object) -> Json:
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
