"""Overview of claims: the head line, the place of each interval on the axis of a forest plot, and anchors.

The axis of the plot has no unit: the range in which a claim holds is mapped to [-1, 1]. Where it has one end only, the
unit is the allowed distance from the target, or, without one, the farthest distance of the interval.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from manyheads.study.panels import Panel
from manyheads.study.reporting.style import typeset
from manyheads.study.verdicts import Verdict

REACH = 3.0  # ends of the axis of the forest plot, in units of the range in which a claim holds
LONGEST_SLUG = 60
OPEN = ("inconclusive", "refuted")
# Words by which a bracket at the end of a claim is known to name its quantity.
QUANTITIES = (
    "change|decrease|deviation|difference|distance|doublings|error|estimate|excess|exponent|gain|loss|projection|"
    "rate|ratio|share|slope|z-score"
)


@dataclass(frozen=True)
class Strip:
    """Places on one row of the forest plot, in percent of its width.

    Ends of the range in which the claim holds and of the interval; the figure, None if it is no number; and what the
    theory says. The interval may be cut at the left and the right end of the row, or be that of an exact figure.
    """

    region: tuple[float, float]
    interval: tuple[float, float]
    figure: float | None
    target: float
    cut: tuple[bool, bool]
    exact: bool


def strip_of(verdict: Verdict) -> Strip:
    """Return the row of a verdict in the forest plot."""
    scale = _scale(verdict)
    low, high = (scale(end) for end in verdict.interval)
    figure = scale(verdict.figure)
    start, end = (_percent(scale(each)) for each in verdict.region)
    region, interval = (start, end), (_percent(low), _percent(high))
    shown, exact = None if math.isnan(figure) else _percent(figure), verdict.interval[0] == verdict.interval[1]
    return Strip(region, interval, shown, _percent(scale(verdict.target)), (low < -REACH, high > REACH), exact)


def _scale(verdict: Verdict) -> Callable[[float], float]:
    """Return the map that takes the range in which a claim holds to [-1, 1], or its only end to -1 or 1."""
    below, above = verdict.tolerance
    low, high = verdict.region
    if math.isfinite(low) and math.isfinite(high):
        middle, half = (low + high) / 2, (high - low) / 2
        return lambda value: _ratio(value - middle, half)
    end, side, tolerance = (high, 1.0, above) if math.isfinite(high) else (low, -1.0, below)
    far = max((abs(x - end) for x in (*verdict.interval, verdict.figure) if math.isfinite(x)), default=0.0)
    unit = tolerance or far or 1.0
    return lambda value: side + _ratio(value - end, unit)


def _ratio(distance: float, unit: float) -> float:
    if unit == 0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / unit


def _percent(place: float) -> float:
    inside = min(max(place, -REACH), REACH) if not math.isnan(place) else 0.0
    return round(100 * (inside + REACH) / (2 * REACH), 2)


def headline(verdicts: Iterable[Verdict]) -> str:
    """Return how many claims hold, are inconclusive and refuted, and how many of these outcomes are as expected.

    Examples
    --------
    >>> from manyheads.study import Verdict
    >>> exact = dict(target=0.0, tolerance=1.0, basis="a closed form")
    >>> headline([Verdict.exact("a", 0.5, **exact), Verdict.exact("b", 2.0, expected="refuted", **exact)])
    '2 claims: 1 holds, 1 is refuted (as expected).'
    """
    decided, parts = list(verdicts), []
    for outcome, one, many in (("holds", "holds", "hold"), *((w, f"is {w}", f"are {w}") for w in OPEN)):
        if found := [verdict for verdict in decided if verdict.outcome == outcome]:
            parts.append(f"{len(found)} {one if len(found) == 1 else many}{_of_them_expected(found)}")
    return f"{len(decided)} claim{'' if len(decided) == 1 else 's'}: {', '.join(parts)}."


def _of_them_expected(found: list[Verdict]) -> str:
    """Return how many outcomes of one kind are expected, or against expectation, where that is worth a word."""
    if found[0].outcome == "inconclusive":
        return ""
    against = sum(not verdict.as_expected for verdict in found)
    expected = sum(verdict.expected is not None for verdict in found) - against
    told = f"{expected} of them as expected" if expected < len(found) else "as expected"
    parts = [told] if expected and (found[0].outcome == "refuted" or against) else []
    parts += [f"{against} against expectation"] if against else []
    return f" ({', '.join(parts)})" if parts else ""


def state_findings(panels: Iterable[Panel], verdicts: Sequence[Verdict]) -> tuple[Panel, ...]:
    """Return panels with what was decided on the claims that they show as their titles.

    A claim that one panel alone shows is its title; of several claims the title says how many hold. Panels that show no
    claim keep theirs.
    """
    panels = list(panels)
    shown = [[one for one in verdicts if any(words in one.claim for words in panel.shows)] for panel in panels]
    return tuple(
        replace(panel, title=_finding(panel.title, found, shared=shown.count(found) > 1))
        for panel, found in zip(panels, shown, strict=True)
    )


def _finding(title: str, shown: list[Verdict], shared: bool) -> str:
    if not shown:
        return title
    if len(shown) == 1:
        claim = re.sub(r" \([^()]*\)$", "", shown[0].claim)  # the quantity, which stands on the axis
        decided = {"holds": "", "refuted": "refuted", "inconclusive": "undecided"}[shown[0].outcome]
        if shared:
            return f"{title} ({decided or 'holds'})"
        return f"{decided.title()}: {claim}" if decided else claim
    held, refuted = (sum(verdict.outcome == outcome for verdict in shown) for outcome in ("holds", "refuted"))
    decided = f"{held} of {len(shown)} claims hold{f', {refuted} refuted' if refuted else ''}"
    return f"{title} ({decided if held or refuted else 'undecided'})"


def is_unexpected(verdict: Verdict) -> bool:
    """Return whether a claim is decided against its expectation."""
    return verdict.outcome != "inconclusive" and not verdict.as_expected


def format_figure(value: float) -> str:
    """Return a figure with four digits, for people."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{int(value)}".replace("-", "−")
    return re.sub(r"^-", "−", f"{value:.4g}")


def quantity_text(verdict: Verdict) -> str:
    """Return what the figure is: stated, or in brackets at the end of the claim; empty if neither."""
    if verdict.quantity:
        return verdict.quantity
    found = re.search(rf" \(([^()]*\b(?:{QUANTITIES})\b[^()]*)\)$", verdict.claim)
    return found[1] if found else ""


def figure_text(verdict: Verdict) -> str:
    """Return the measured figure."""
    return "not a number" if math.isnan(verdict.figure) else _typeset(verdict.figure)


def interval_text(verdict: Verdict) -> str:
    """Return the interval of the figure."""
    low, high = verdict.interval
    return "exact" if low == high else f"{_typeset(low)} … {_typeset(high)}"


def region_text(verdict: Verdict) -> str:
    """Return the range in which the claim holds."""
    low, high = verdict.region
    if math.isinf(low):
        return f"at most {_typeset(high)}"
    if math.isinf(high):
        return f"at least {_typeset(low)}"
    if low == high:
        return f"exactly {_typeset(low)}"
    ends = (_typeset(low), _typeset(high))
    if ends[0] != ends[1]:
        return " … ".join(ends)
    return f"{_typeset(verdict.target)} within {_typeset(max(verdict.tolerance))}"


def _typeset(value: float) -> str:
    return typeset(format_figure(value))


class Anchors:
    """Anchors of one page, each named after what it marks and used once."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def name(self, *texts: str) -> str:
        """Return an unused anchor of letters, digits and hyphens."""
        words = (re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST_SLUG].strip("-") for text in texts)
        wanted = "-".join(words).strip("-") or "part"
        names = itertools.chain((wanted,), (f"{wanted}-{number}" for number in itertools.count(2)))
        anchor = next(name for name in names if name not in self._given)
        self._given.add(anchor)
        return anchor
