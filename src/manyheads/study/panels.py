"""Pictures as data: what a report shows is described here, stored as JSON, and drawn elsewhere.

A panel may name the claims that it shows (`shows`, words of their texts): a run then writes what was decided on them
into its title, so that no title asserts what the data do not say. A report needs no code of the study.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

from manyheads._arrays import takes_arrays
from manyheads._extras import np
from manyheads._json import Json, json_ready
from manyheads.errors import UsageError

Role = Literal["trained", "predicted", "reference"]


@dataclass(frozen=True)
class Curve:
    """One line of a panel, with an optional band.

    Parameters
    ----------
    x, y
        Coordinates, equally many.
    label
        Entry in the legend; empty for none.
    role
        "trained" is drawn solid, "predicted" dashed, "reference" thin and grey.
    group
        Curves of one group share a colour: a prediction and the system that it predicts.
    low, high
        Band around `y`; empty for none.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    label: str
    role: Role = "trained"
    group: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.low) not in (0, len(self.x)) or len(self.low) != len(self.high):
            sizes = f"x {len(self.x)}, y {len(self.y)}, low {len(self.low)}, high {len(self.high)}"
            raise UsageError(f"curve {self.label!r}: coordinates must be equally many, got {sizes}")


class _Panel:
    """Base of the panels: the kind, by which they are stored."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Json]:
        """Return the panel as JSON can hold it; NaN becomes null. UsageError for a part that is of another type."""
        try:
            data = {"kind": self.kind, **json_ready(asdict(self))}  # type: ignore[call-overload]
            _check_parts(data)
        except (TypeError, ValueError) as error:
            what, kind = f"{getattr(self, 'title', '')!r:.60}: {error}", type(self).__name__
            raise UsageError(
                f"{self.kind} {what}; expected texts, numbers and tuples of them as help({kind})"
            ) from error
        return data


@dataclass(frozen=True)
class Lines(_Panel):
    """Curves over a common axis. `note` is a caption: what to see, what the bands are.

    `x_ticks` are names of the places 0, 1, ... of the horizontal axis, for what has no size: layers of several kinds.
    """

    kind: ClassVar[str] = "lines"
    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    log_x: bool = False
    log_y: bool = False
    note: str = ""
    shows: tuple[str, ...] = ()
    x_ticks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        places = {x for curve in self.curves for x in curve.x} if self.x_ticks else set()
        if not places <= set(range(len(self.x_ticks))):
            raise UsageError(f"lines {self.title!r}: {len(self.x_ticks)} x_ticks for the places {sorted(places)}")


@dataclass(frozen=True)
class Picture(_Panel):
    """A matrix as an image: `values` is row by row, ticks are one label a row or column or none at all.

    `limits` are the ends of the scale of colours, by default those of the values; a `diverging` one has a middle.
    """

    kind: ClassVar[str] = "picture"
    title: str
    x_label: str
    y_label: str
    values: tuple[tuple[float, ...], ...]
    value_label: str = ""
    x_ticks: tuple[str, ...] = ()
    y_ticks: tuple[str, ...] = ()
    note: str = ""
    limits: tuple[float, float] | None = None
    diverging: bool = False
    shows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_limits(self)
        sizes = list(map(len, self.values))
        if not sizes or not sizes[0] or len(set(sizes)) > 1:
            raise UsageError(f"picture {self.title!r}: expected rows of one length, got {sizes}")
        for name, ticks, size in (("x_ticks", self.x_ticks, sizes[0]), ("y_ticks", self.y_ticks, len(sizes))):
            if len(ticks) not in (0, size):
                raise UsageError(f"picture {self.title!r}: {len(ticks)} {name} for {size} entries")


@dataclass(frozen=True)
class Listing(_Panel):
    """A table of texts: whoever makes it formats its numbers; texts that look like numbers are set to the right."""

    kind: ClassVar[str] = "listing"
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    shows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if wrong := [row for row in self.rows if len(row) != len(self.columns)]:
            raise UsageError(f"table {self.title!r}: {len(self.columns)} columns, but a row holds {wrong[0]}")


@dataclass(frozen=True)
class Multiples(_Panel):
    """Small plots in rows and columns on common axes, with one legend: how curves change with two settings.

    `curves[row][column]` is what one small plot shows, an empty one is left blank; `captions[row][column]` are a few
    words inside it, empty for none at all.
    """

    kind: ClassVar[str] = "multiples"
    title: str
    x_label: str
    y_label: str
    curves: tuple[tuple[tuple[Curve, ...], ...], ...]
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    captions: tuple[tuple[str, ...], ...] = ()
    log_y: bool = False
    note: str = ""
    shows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shape = rows, columns = (len(self.row_labels), len(self.column_labels))
        for name, table in (("curves", self.curves), ("captions", self.captions or self.curves)):
            if not rows or not columns or list(map(len, table)) != [columns] * rows:
                sizes = list(map(len, table))
                raise UsageError(f"small multiples {self.title!r}: {name} in rows of {sizes} for {shape} labels")


@dataclass(frozen=True)
class Scatter(_Panel):
    """Points in small plots side by side, coloured by a value: orbits, diagrams of many orbits.

    One row of `x`, `y` and `values` a plot, with its heading in `labels`; on common axes if `shared`; colours as of
    `Picture`.
    """

    kind: ClassVar[str] = "scatter"
    title: str
    x_label: str
    y_label: str
    x: tuple[tuple[float, ...], ...]
    y: tuple[tuple[float, ...], ...]
    values: tuple[tuple[float, ...], ...]
    value_label: str = ""
    labels: tuple[str, ...] = ("",)
    shared: bool = True
    note: str = ""
    limits: tuple[float, float] | None = None
    diverging: bool = False
    shows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_limits(self)
        sizes = [[len(row) for row in table] for table in (self.x, self.y, self.values)]
        if not sizes[0] or sizes[1:] != sizes[:1] * 2 or len(self.labels) != len(sizes[0]):
            given = f"x, y and values of {sizes} points, {len(self.labels)} labels"
            raise UsageError(f"scatter {self.title!r}: {given}; expected equally many in each plot")


def _check_limits(panel: Picture | Scatter) -> None:
    """Refuse a scale of colours without extent."""
    if panel.limits is not None and not panel.limits[0] < panel.limits[1]:
        raise UsageError(f"{panel.kind} {panel.title!r}: limits {panel.limits}, expected a smaller and a larger value")


Drawn = Lines | Multiples | Picture | Scatter  # panels with axes
Panel = Drawn | Listing
Panels = Iterator[Panel]

KINDS: dict[str, type[Panel]] = {each.kind: each for each in (Lines, Multiples, Picture, Scatter, Listing)}


def panel_from_json(data: dict[str, Json]) -> Panel:
    """Rebuild a panel from its `to_json`."""
    if (kind := data.get("kind")) not in KINDS:
        raise UsageError(f"unknown kind of panel: {kind!r}")
    values = {name: _frozen(value) for name, value in data.items() if name != "kind"}
    if "curves" in data:
        values["curves"] = _curves(data["curves"])
    if "limits" in data:  # null is absent here, not NaN
        values["limits"] = data["limits"] and (float(data["limits"][0]), float(data["limits"][1]))
    return KINDS[kind](**values)


def _check_parts(data: Json, field: str = "") -> None:
    """Raise a ValueError for an entry of a panel's JSON of another type than its field has."""
    if isinstance(data, list):
        for entry in data:
            _check_parts(entry, field)
    elif isinstance(data, dict):
        for each in fields(KINDS.get(data.get("kind", ""), Curve)):
            _check_parts(data[each.name], f"{each.name}: {each.type}")
    elif not isinstance(data, float | int | None if re.search(": .*(float|int|bool)", field) else str):
        raise ValueError(f"{field} holds {data!r:.60}")


@takes_arrays
def spread_curve(x: Iterable[float], samples: np.ndarray, label: str, role: Role = "trained", group: int = 0) -> Curve:
    """Return the mean of samples (replicates, n) over coordinates (n,), with their range as its band."""
    values = np.atleast_2d(np.asarray(samples, dtype=float))
    mean, low, high = (tuple(each.tolist()) for each in (values.mean(0), values.min(0), values.max(0)))
    return Curve(tuple(map(float, x)), mean, label, role, group, *((low, high) if len(values) > 1 else ()))


def spans_decades(values: np.ndarray) -> bool:
    """Return whether values are positive and so far apart that they belong on a logarithmic axis."""
    return bool(values.min() > 0 and values.max() >= 8 * values.min())


BAND_NOTE = "Lines are means over replicates, bands reach from the smallest to the largest replicate."


def _curves(data: Json) -> Any:
    """Rebuild curves, in rows or in tables of rows."""
    if isinstance(data, list):
        return tuple(map(_curves, data))
    return Curve(**{name: _frozen(value) for name, value in data.items()})


def _frozen(value: Json) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    return math.nan if value is None else value
