"""Result of a preflight: growths of updates, forward factors, settings, learning-rate transfer, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from manyheads._overview import Overview, Shown
from manyheads.scaling.audit.findings import UNJUDGED, Audit
from manyheads.scaling.axes import LETTERS, Axis
from manyheads.scaling.checks.coordinate_check import Growth, draw_growths
from manyheads.scaling.checks.transfer_check import TransferCheck
from manyheads.scaling.preflight_checks.training import Membership
from manyheads.statistics.verdicts import Outcome
from manyheads.transformer.shape import Shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPEN = ("not decided", "not audited", "does not move")  # words that mark a note on an open question
State = Literal["unchanged", "applied", "folded", "both", "neither", "other", "unknown"]
SAID = {
    "unchanged": "that of the base",
    "applied": "applied in the forward pass",
    "folded": "folded into weights",
    "both": "applied in the forward pass and folded into weights",
    "neither": "neither applied in the forward pass nor folded into weights",
    "other": "neither the prescribed number nor the usual one",
}


@dataclass(frozen=True)
class FactorUse:
    """One factor that the parametrization asks of the forward pass, at one shape, as it was measured.

    All three numbers are relative to the base and to a usual model without the factor; None where not measured.
    """

    name: str  # a field of `manyheads.models.infer.multipliers.ForwardPass`
    axis: Axis
    shape: Shape
    wanted: float
    forward: float | None  # what the forward pass multiplies, read off its trace
    weights: float | None  # by what the weights behind it start
    state: State
    reason: str = ""  # why it is not known

    @property
    def right(self) -> bool:
        """Whether the factor acts once, or cannot be told."""
        return self.state in ("unchanged", "applied", "folded", "unknown")

    def sentence(self) -> str:
        """Say it for people."""
        sizes = f"(N, H, L) = ({self.shape.key_dim}, {self.shape.heads}, {self.shape.depth})"
        asked = f"the {self.name} factor {self.wanted:.4g} at {sizes}"
        if self.state == "unknown":
            return f"{asked} could not be measured: {self.reason}"
        behind = "" if self.weights is None else f", weights start at {self.weights:.4g} times what they would"
        said = "not that of the base" if self.wanted == 1 and self.state == "other" else SAID[self.state]
        return f"{asked} is {said}: the forward pass multiplies by {self.forward:.4g}{behind}"


@dataclass(frozen=True)
class Cost:
    """What a preflight took."""

    trainings: int
    steps: int
    cpu_seconds: float
    seconds: float

    def sentence(self) -> str:
        """Say it for people."""
        return f"{self.trainings} trainings, {self.steps:,} steps, {self.cpu_seconds:.0f} CPU s, {self.seconds:.0f} s"


@dataclass(frozen=True, repr=False)
class Preflight(Shown):
    """All that a preflight measured, and what it judged."""

    growths: tuple[Growth, ...]  # of every module and axis, layers joined; not judged, against a flat one
    judged: bool  # whether a parametrization was given: without one only what no optimizer steps is wrong
    membership: Membership
    factors: tuple[FactorUse, ...]
    audits: Mapping[Axis, Audit]  # of the largest shape on it
    transfers: tuple[TransferCheck, ...]
    notes: tuple[str, ...]
    cost: Cost

    @property
    def broken(self) -> tuple[Growth, ...]:
        """Growths that certainly differ from the prescribed ones, or without a parametrization from flat ones."""
        return tuple(each for each in self.growths if each.outcome == "refuted")

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong; `outcome` tells whether all is decided."""
        return not self.faults()

    @property
    def outcome(self) -> Outcome:
        """All of it: refuted when something is wrong, inconclusive when something is open or could not be judged."""
        return "refuted" if not self.passed else "inconclusive" if self.undecided() else "holds"

    def undecided(self) -> list[str]:
        """Return findings that are neither right nor wrong, one sentence each."""
        said = [each.sentence() for each in self.factors if each.state == "unknown"]
        tested: list[Growth | TransferCheck] = [*self.growths, *self.transfers]
        said += [each.sentence() for each in tested if each.outcome == "inconclusive"]
        return said + [note for note in self.notes if any(words in note for words in (UNJUDGED, *OPEN))]

    def faults(self) -> list[str]:
        """Return what is wrong, one sentence each."""
        said = self.membership.sentences()
        said += [each.sentence() for each in self.factors if not each.right]
        if self.judged:
            said += [each.sentence() for each in self.broken]
        said += list(dict.fromkeys(each.sentence() for each in self.growths if each.fit is None and not self.judged))
        for axis, audit in self.audits.items():
            said += [f"largest {LETTERS[axis]}: {line}" for line in audit.sentences()]
        return said + [
            f"the learning rate along {LETTERS[each.axis]} {each.sentence()}"
            for each in self.transfers
            if each.outcome == "refuted"
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        growths = [
            {name: getattr(each, name) for name in ("module", "axis", "step", "least", "required", "tolerance")}
            | {"fit": each.fit and dict(zip(("exponent", "low", "high"), each.numbers, strict=False))}
            | {"outcome": each.outcome if self.judged else None, "sentence": say(each, self.judged)}
            for each in self.growths
        ]
        transfers = [
            {"axis": each.axis, "sizes": list(each.sizes), "best_rate_factors": each.learning_rates.tolist()}
            | {name: value if math.isfinite(value) else None for name, value in each.figures.items()}
            | {"outcome": each.outcome, "sentence": each.sentence()}
            for each in self.transfers
        ]
        return {
            "passed": self.passed,
            "outcome": self.outcome if self.judged else None,
            "undecided": self.undecided() if self.judged else [],
            "judged": self.judged,
            "faults": self.faults(),
            "growths": growths,
            "factors": [asdict(each) | {"sentence": each.sentence()} for each in self.factors],
            "optimizer": asdict(self.membership),
            "audits": {axis: audit.as_dict() for axis, audit in self.audits.items()},
            "transfers": transfers,
            "notes": list(self.notes),
            "cost": asdict(self.cost),
        }

    def __str__(self) -> str:
        """Lay out everything, what is wrong first."""
        faults = self.faults()
        lines = [self._headline(), *(f"  WRONG  {each}" for each in faults)]
        if self.growths:
            lines.append("updates along each axis:" if self.judged else "updates along each axis, beside a flat one:")
        lines += [f"  {say(each, self.judged)}" for each in sorted(self.growths, key=lambda one: one.severity)]
        lines += [f"factor: {each.sentence()}" for each in self.factors if each.right]
        lines += [f"learning rate along {LETTERS[each.axis]}: {each.sentence()}" for each in self.transfers]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), f"took {self.cost.sentence()}"])

    def plot(self) -> Figure:
        """Draw the fitted exponents with their intervals over the range that was asked for."""
        if not self.growths and self.transfers:
            return self.transfers[0].plot()
        named = [(f"{each.module}, {LETTERS[each.axis]}", each) for each in self.growths]
        return draw_growths(f"Preflight: {self._headline()}", "the size", named)

    def _headline(self) -> str:
        if not self.growths:
            return f"exponents of the best learning rate: {len(self.transfers)} measured"
        if not self.judged:
            changed = f"{len(self.broken)} of {len(self.growths)} updates change with the size"
            number = len(self.faults())
            return f"{changed}, not judged" + (f"; {number} fault{'s' * (number > 1)}" if number else "")
        word = {"holds": "passed", "refuted": "failed", "inconclusive": "nothing wrong, not all decided"}[self.outcome]
        counts = f"{len(self.growths)} updates, {len(self.faults())} wrong"
        return f"{word}: {counts}" + (f", {len(found)} undecided" if (found := self.undecided()) else "")

    def _overview(self) -> Overview:
        rows = [
            (each.module, LETTERS[each.axis], each.outcome if self.judged else describe(each), *each.numbers)
            for each in sorted(self.growths, key=lambda one: one.severity)
        ]
        columns = ("update_of", "axis", "outcome", "exponent", "low", "high", "least", "required")
        said = tuple(self.faults()) + tuple(each.sentence() for each in self.transfers) + self.notes
        return Overview(f"Preflight {self._headline()}", columns, rows, (*said, self.cost.sentence()))


def describe(growth: Growth) -> str:
    """Say how an update changes with the size, where nothing is prescribed."""
    if growth.fit is None:
        return "diverges"
    if growth.outcome == "holds":
        return "flat"
    if growth.outcome == "inconclusive":
        return "undecided"
    return "grows" if growth.fit.exponent > growth.required else "vanishes"


def say(growth: Growth, judged: bool) -> str:
    """Say one growth for people."""
    if judged or growth.fit is None:
        return growth.sentence()
    fit, letter = growth.fit, LETTERS[growth.axis]
    found = f"{growth.module}: {letter}^{fit.exponent:.2f} [{fit.interval.low:.2f}, {fit.interval.high:.2f}]"
    return f"{found} after {growth.step} steps: {describe(growth)}"
