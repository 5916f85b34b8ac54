"""Constraints of settings as data: a field of a dataclass says what its values may be, and one check refuses others.

What the annotation says is checked too: integers, finite numbers, words of a `Literal`, the length of a tuple.
"""

import functools
import operator
import re
import sys
from dataclasses import MISSING, dataclass, field, fields, replace
from numbers import Real
from typing import Any, Literal

from manyheads.errors import UsageError

Bound = float | str | None
Order = Literal["", "rising", "falling", "distinct"]
WORDS = {"least": "at least", "above": "above", "most": "at most", "below": "below", "multiple": "a multiple of"}
COUNTS = ("no", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True)
class Constraint:
    """What a value may be; of a tuple, what each of its entries may be.

    Examples
    --------
    >>> Constraint(least=2, count=2, order="rising").kept("sizes", [2, 4], "tuple[int, ...]")
    (2, 4)
    >>> Constraint(above=0).kept("rate", 0.0, "float")
    Traceback (most recent call last):
    manyheads.errors.UsageError: rate=0.0: expected a positive number
    """

    least: Bound = None  # a number, or the name of another field; so are the next four
    most: Bound = None
    above: Bound = None  # excluded
    below: Bound = None  # excluded
    multiple: Bound = None
    choices: tuple[object, ...] = ()
    count: int = 1  # least number of entries of a tuple
    order: Order = ""

    def kept(self, name: str, value: Any, annotation: object = "", owner: object = None) -> Any:
        """Return a value with Python's own numbers, several of them as a tuple, or refuse it."""
        kind = _kind_of(annotation.__name__ if type(annotation) is type else str(annotation))
        if value is None and kind.optional:
            return None
        named = {bound: other for bound in WORDS if isinstance(other := getattr(self, bound), str)}
        bounds = {bound: getattr(owner, other) for bound, other in named.items()}
        rule = replace(self, choices=self.choices or kind.choices, **bounds)
        several = isinstance(value, tuple | list)
        entries = tuple(kind.plain(each) for each in (value if several else (value,)))
        if not (several == kind.several and all(map(rule._admits, entries)) and rule._fits(entries, kind)):
            raise UsageError(f"{name}={_shown(value)}: {rule._expected(kind, named)}")
        return entries if several else entries[0]

    def _admits(self, entry: Any) -> bool:
        """Tell whether one entry is within the bounds, or a choice."""
        if entry is INVALID or (self.choices and entry not in self.choices):
            return False
        try:
            return not (
                (self.least is not None and entry < self.least)
                or (self.most is not None and entry > self.most)
                or (self.above is not None and entry <= self.above)
                or (self.below is not None and entry >= self.below)
                or (self.multiple is not None and entry % self.multiple)
            )
        except TypeError:  # another field is no number: its own turn comes
            return False

    def _fits(self, entries: tuple[Any, ...], kind: "_Kind") -> bool:
        """Tell whether entries are as many as expected, and in order."""
        if kind.several and (len(entries) != kind.length if kind.length else len(entries) < self.count):
            return False
        if self.order in ("rising", "falling"):
            return list(entries) == sorted(set(entries), reverse=self.order == "falling")
        return self.order != "distinct" or len(set(entries)) == len(entries)

    def _expected(self, kind: "_Kind", named: dict[str, str]) -> str:
        """Return the sentence on what was expected."""

        def limit(bound: str) -> str:
            value = getattr(self, bound)
            if bound in named:
                return f"{named[bound]}={value}"
            return f"{value:,}" if isinstance(value, int) and value >= 10**6 else f"{value:g}"

        if self.choices:
            more = f", {COUNTS[self.count]} or more" if kind.several and self.count > 1 else ""
            once = ", each once" if kind.several and self.order else ""
            return f"choose from {', '.join(map(str, self.choices))}{more}{once}"
        positive = self.above == 0
        noun = f"{'positive ' if positive else ''}{kind.noun}"
        within = [name for name in WORDS if getattr(self, name) is not None and not (positive and name == "above")]
        bounds = " and ".join(f"{WORDS[name]} {limit(name)}" for name in within)
        if not kind.several:
            lead = " of " if bounds.startswith("at") else ", " if bounds.startswith("a ") else " "
            return f"expected {'an' if noun[0] == 'i' else 'a'} {noun}{lead if bounds else ''}{bounds}"
        count = COUNTS[kind.length] if kind.length else f"{COUNTS[self.count]} or more"
        order = {"": "", "distinct": ", each once"}.get(self.order, f" in {self.order} order")
        plural = noun if count == "one" else f"{noun}s"
        return f"expected {count} {plural}{order}{f', each {bounds}' if bounds else ''}"


def constrained(default: Any = MISSING, rule: Constraint | None = None, **metadata: object) -> Any:
    """Declare a field of a dataclass with what its values may be."""
    return field(default=default, metadata={"constraint": rule or Constraint(), **metadata})


CHECKED = {"constraint": Constraint()}
"""Metadata of a field that its type alone constrains, such as a word of a `Literal`."""


def check_fields(owner: Any, prefix: str = "") -> None:
    """Check all constrained fields of a dataclass, and keep their numbers as Python's own."""
    for each in fields(owner):
        if rule := each.metadata.get("constraint"):
            value = rule.kept(f"{prefix}{each.name}", getattr(owner, each.name), each.type, owner)
            object.__setattr__(owner, each.name, value)


class Constrained:
    """Base of dataclasses whose constrained fields are checked."""

    def __post_init__(self) -> None:
        check_fields(self)


def _shown(value: object) -> str:
    """Return a value as an error shows it."""
    try:
        shown = repr(value)
    except ValueError:  # Python refuses to print thousands of digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return shown if len(shown) <= 200 else f"{shown[:200]}…"


INVALID = object()


@dataclass(frozen=True)
class _Kind:
    """What an annotation says of a value."""

    noun: str  # integer, number, value
    several: bool
    length: int  # of a tuple; 0 for any
    optional: bool
    choices: tuple[str, ...]

    def plain(self, entry: object) -> object:
        """Return a number as Python's own, `INVALID` for what is none but should be one."""
        if self.noun == "value":
            return entry
        if isinstance(entry, bool) or not isinstance(entry, Real):
            return INVALID
        if self.noun == "integer":
            return operator.index(entry) if hasattr(entry, "__index__") else INVALID
        number = entry if isinstance(entry, int) else float(entry)
        return number if abs(number) <= sys.float_info.max else INVALID


@functools.cache
def _kind_of(annotation: str) -> _Kind:
    """Read an annotation as written: ``int``, ``tuple[float, ...]``, ``Literal["sgd", "adam"]``, ``int | None``."""
    words = set(re.findall(r"\w+", annotation))
    inside = re.search(r"tuple\[(.*)\]", annotation)
    length = 0 if inside is None or "..." in annotation else inside[1].count(",") + 1
    literal = re.search(r"Literal\[(.*?)\]", annotation)
    choices = tuple(re.findall(r"""["'](.*?)["']""", literal[1])) if literal else ()
    nested = annotation.count("tuple[") > 1
    numeric = not literal and not nested and not words & {"str", "bool", "Path"}
    noun = "number" if numeric and "float" in words else "integer" if numeric and "int" in words else "value"
    return _Kind(noun, "tuple" in words, length, "None" in words, choices)
