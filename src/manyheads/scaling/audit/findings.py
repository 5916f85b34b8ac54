"""Findings of an audit: what was compared, what is wrong, grouped by cause, as text, table and picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from manyheads._overview import Overview, Shown
from manyheads.scaling.parametrization.table import OUTSIDE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

OTHER_STD, OTHER_FACTOR = "it starts with another std", "its factor is wrong"
"""Causes too general to group by: findings that differ in their factors stay apart."""
UNJUDGED = "not judged"  # words that mark a note on a number without comparison
CATEGORIES = ("optimizer", "block", "shape_factor", "nesterov")
"""Quantities without a number, whose faults have no factor."""
DRAWN = 1.1  # ratio of two stds of one draw: a hundred numbers give theirs to 7%


@dataclass(frozen=True)
class Finding:
    """One number of one parameter that was compared.

    The quantity is `"initial"`, `"learning_rate"`, `"epsilon"` or `"weight_decay"`, and beside Muon `"optimizer"`,
    `"block"` (what it orthogonalizes together) or a setting that is taken over unchanged.
    """

    name: str
    role: str
    quantity: str
    expected: float
    actual: float
    factor: float  # actual over expected, infinite where nothing was expected
    right: bool  # whether they agree: to rounding, for stds within their sampling error
    meaning: str = ""  # what a wrong one does, in words; empty for a right one


@dataclass(frozen=True, repr=False)
class Audit(Shown):
    """All numbers that were compared, and those that were not."""

    findings: tuple[Finding, ...]  # one for each number of each parameter
    notes: tuple[str, ...] = field(default=OUTSIDE)  # what was not compared, or is outside the theory

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are wrong."""
        return tuple(each for each in self.findings if not each.right)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON, which has no infinity and no NaN: they are None there."""
        found = asdict(self)
        for each in found["findings"]:
            finite = {name: each[name] for name in ("actual", "factor")}
            keep = each["quantity"] not in CATEGORIES
            each |= {name: value if keep and math.isfinite(value) else None for name, value in finite.items()}
        return {"passed": self.passed, **found}

    def causes(self) -> tuple[tuple[Finding, ...], ...]:
        """Group what is wrong by its cause: all that a forgotten group gets wrong is one of them."""
        kinds: list[list[Finding]] = []
        for each in self.faults:
            same: list[Finding] = next((kind for kind in kinds if _share_cause(kind[0], each)), [])
            kinds += [] if same else [same]
            same.append(each)
        return tuple(map(tuple, kinds))

    def sentences(self) -> list[str]:
        """Say what is wrong, one sentence a cause."""
        return [f"{_parameters(same)}: {_cause(same[0])} ({_extent(same)})" for same in self.causes()]

    def __str__(self) -> str:
        """Lay out what is wrong, cause by cause."""
        lines = [self._headline()]
        for same in self.causes():
            first, quantities = same[0], dict.fromkeys(each.quantity for each in same)
            if len(quantities) > 1:
                lines.append(f"{_parameters(same)}: {_cause(first)}")
            for quantity in quantities:
                part = [each for each in same if each.quantity == quantity]
                amount, found = _amount(part), f"expected {part[0].expected:.6g}, found {part[0].actual:.6g}"
                if len(quantities) > 1:
                    lines.append(f"    {amount}: {found} at {part[0].name}")
                elif quantity in CATEGORIES:
                    lines += [f"{_parameters(same)}: {amount}", f"    {first.meaning}"]
                else:
                    lines += [f"{_parameters(same)}: {amount}", f"    {found}: {first.meaning}"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dataframe(self) -> pd.DataFrame:
        """Return all numbers that were compared as a pandas data frame."""
        columns = tuple(each.name for each in fields(Finding))
        return Overview("", columns, [astuple(each) for each in self.findings]).frame()

    def plot(self) -> Figure:
        """Draw actual over expected, its range over the parameters of a role, for every role and quantity."""
        from manyheads.study.reporting.charts import Estimate, draw_intervals

        ratios: dict[str, list[float]] = {}
        for each in self.findings:
            if 0 < each.factor < math.inf:
                ratios.setdefault(f"{each.role}: {each.quantity.replace('_', ' ')}", []).append(each.factor)
        rows = [
            Estimate(label, math.exp(sum(map(math.log, found)) / len(found)), (min(found), max(found)), (1.0, 1.0))
            for label, found in ratios.items()
        ]
        return draw_intervals(f"Audit: {self._headline()}", "actual / expected", rows, log=True)

    def _headline(self) -> str:
        parameters, causes = len({each.name for each in self.findings}), len(self.causes())
        found = f" in {causes} finding{'s' if causes > 1 else ''}" if causes else ""
        open_ = dict.fromkeys(note.partition(":")[0] for note in self.notes if UNJUDGED in note)
        rest = f"; {UNJUDGED}: {', '.join(open_)}" if open_ else ""
        return f"{parameters} parameters, {len(self.findings)} numbers, {len(self.faults)} wrong{found}{rest}"

    def _overview(self) -> Overview:
        rows = []
        for same in self.causes():
            roles, wrong = (
                ", ".join(dict.fromkeys(getattr(each, name) for each in same)) for name in ("role", "quantity")
            )
            factors = _factors([each for each in same if _is_ratio(each)])
            rows.append((_cause(same[0]), len({each.name for each in same}), roles, wrong, factors))
        columns = ("cause", "parameters", "roles", "wrong", "factor") if rows else ()
        return Overview(f"Audit: {self._headline()}", columns, rows, self.notes)


def _cause(finding: Finding) -> str:
    """Return the cause of a wrong number, in words that its other quantities share."""
    cause = finding.meaning.partition(":" if finding.quantity == "initial" else ";")[0]
    return cause.replace(f"the base's {finding.quantity.replace('_', ' ')}", "the base's settings")


def _share_cause(first: Finding, other: Finding) -> bool:
    """Whether wrong numbers have one cause; where it is not known, they share role, quantity and factor."""
    if _cause(first) != _cause(other):
        return False
    if _cause(first) not in (OTHER_STD, OTHER_FACTOR):
        return True
    if (first.role, first.quantity) != (other.role, other.quantity):
        return False
    if first.quantity == "initial" and 0 < first.factor < math.inf and 0 < other.factor < math.inf:
        return max(first.factor, other.factor) <= DRAWN * min(first.factor, other.factor)
    return f"{first.factor:.3g}" == f"{other.factor:.3g}"


def _parameters(findings: Sequence[Finding]) -> str:
    """Name the first parameter, how many others there are, and the roles."""
    names, roles = (list(dict.fromkeys(getattr(each, what) for each in findings)) for what in ("name", "role"))
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{others} ({', '.join(roles[:6])}{', …' if len(roles) > 6 else ''})"


def _is_ratio(finding: Finding) -> bool:
    """Whether a wrong number is off by a factor."""
    return finding.quantity not in CATEGORIES and 0 < finding.factor < math.inf


def _amount(findings: Sequence[Finding]) -> str:
    """Say how far one quantity is off: by a factor where there is one."""
    quantity, ratios = findings[0].quantity, [each for each in findings if _is_ratio(each)]
    if quantity in CATEGORIES:
        return f"{quantity} is wrong"
    others = {
        "0": any(each.factor == 0 for each in findings),
        "not 0": any(each.expected == 0 and math.isfinite(each.actual) for each in findings),
        "not finite": not all(math.isfinite(each.actual) for each in findings),
    }
    said = [f"{_factors(ratios)} times what it should be"] if ratios else []
    return f"{quantity} is {' or '.join([*said, *(words for words, there in others.items() if there)])}"


def _extent(findings: Sequence[Finding]) -> str:
    """Say of a cause which quantities are off, and by how much."""
    ratios = [each for each in findings if _is_ratio(each)]
    names = ", ".join(dict.fromkeys(each.quantity for each in ratios))
    rest = {each.quantity: _amount([each]) for each in findings if not _is_ratio(each)}
    return ", ".join(([f"{names} × {_factors(ratios)}"] if ratios else []) + list(rest.values()))


def _factors(findings: Sequence[Finding]) -> str:
    """Return the range of the factors; the first one where they differ by the noise of a draw."""
    factors = [each.factor for each in findings]
    if len(factors) and max(factors) > DRAWN * min(factors):
        return f"{min(factors):.3g} to {max(factors):.3g}"
    return f"{factors[0]:.3g}" if factors else ""
