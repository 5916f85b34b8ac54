"""Settings of a study as data: default, one line, what it may be, and its value in the sizes `small` and `full`."""

import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any, Literal

from manyheads._constraints import Bound, Constraint, Order, constrained

UNCHANGED: Any = object()
Size = Literal["small", "full"]


def setting(
    default: Any,
    about: str,
    *,
    least: Bound = None,
    most: Bound = None,
    above: Bound = None,
    below: Bound = None,
    multiple: Bound = None,
    choices: Iterable[object] = (),
    count: int = 1,
    order: Order = "",
    small: Any = UNCHANGED,
    full: Any = UNCHANGED,
) -> Any:
    """Declare a setting of a study.

    Parameters
    ----------
    default
        Its value in the study's default size.
    about
        What it is, in one line without a full stop: the help of its flag, and its entry in the documentation.
    least, most, above, below, multiple
        Bounds, the middle two excluded, and what it is a multiple of: numbers, or names of other settings.
    choices
        Values among which to choose.
    count, order
        Of a tuple: its least number of entries, and "rising", "falling" or "distinct".
    small, full
        Its value in these sizes, where it differs from the default.
    """
    rule = Constraint(least, most, above, below, multiple, tuple(choices), count, order)
    return constrained(default, rule, about=about, small=small, full=full)


def sweep(default: tuple[object, ...], about: str, *, count: int = 2, falling: bool = False, **rules: Any) -> Any:
    """Declare the values along an axis of the grid: two or more in rising (or falling) order, from one on.

    Parameters
    ----------
    default, about, count, **rules
        As in `setting`; with `least` or `above` values begin elsewhere.
    falling
        Whether they fall.
    """
    rules = {"order": "falling" if falling else "rising"} | ({} if "above" in rules else {"least": 1}) | rules
    return setting(default, about, count=count, **rules)


def values_of(kind: type, size: Size) -> dict[str, Any]:
    """Return the settings that a size changes."""
    fields = {field.name: field.metadata.get(size, UNCHANGED) for field in dataclasses.fields(kind)}
    return {name: value for name, value in fields.items() if value is not UNCHANGED}


def documented(kind: type) -> str:
    """Return the docstring of a class of settings, with the section on them that flags and documentation read."""
    about = {field.name: field.metadata.get("about", "") for field in dataclasses.fields(kind)}
    entries = [f"{name}\n    {text[0].upper()}{text[1:]}." for name, text in about.items() if text]
    text = inspect.cleandoc(kind.__doc__ or "")
    return "\n".join([text, "", "Attributes", "----------", *entries]) if entries else text
