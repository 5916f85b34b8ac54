"""Pictures as data: what a report shows is described here, stored as JSON, and drawn elsewhere.

A panel may name the claims that it shows (`shows`, words of their texts): a run then writes what was decided on them
into its title, so that no title asserts what the data do not say.

A study returns panels; the store keeps them; `manyheads.study.reporting.drawing` turns them into SVG. So a report
needs no code of the study, and a test can look at what would be drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from manyheads._arrays import takes_arrays
from manyheads.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

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

    def to_json(self) -> dict[str, Any]:
        """Return the panel as JSON can hold it; NaN becomes null."""
        return {"kind": self.kind, **_plain(asdict(self))}  # type: ignore[call-overload]


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

    `limits` are the values at the ends of the scale of colours; the smallest and the largest value if absent. With
    `diverging` the scale has one colour below its middle and another one above.
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
        rows, columns = len(self.values), len(self.values[0]) if self.values else 0
        if not columns or any(len(row) != columns for row in self.values):
            raise UsageError(
                f"picture {self.title!r}: expected rows of one length, got {[len(r) for r in self.values]}"
            )
        for name, ticks, size in (("x_ticks", self.x_ticks, columns), ("y_ticks", self.y_ticks, rows)):
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
        for row in self.rows:
            if len(row) != len(self.columns):
                raise UsageError(f"table {self.title!r}: {len(self.columns)} columns, but a row holds {row}")


@dataclass(frozen=True)
class Multiples(_Panel):
    """Small plots in rows and columns on common axes, with one legend: how curves change with two settings.

    Parameters
    ----------
    curves
        ``curves[row][column]`` is what one small plot shows; an empty one is left blank.
    row_labels, column_labels
        What a row and a column have in common.
    captions
        A few words inside each small plot, ``captions[row][column]``; empty for none at all.
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
        rows, columns = len(self.row_labels), len(self.column_labels)
        shape = (rows, columns)
        for name, table in (("curves", self.curves), ("captions", self.captions or self.curves)):
            if not rows or not columns or len(table) != rows or any(len(row) != columns for row in table):
                sizes = [len(row) for row in table]
                raise UsageError(f"small multiples {self.title!r}: {name} in rows of {sizes} for {shape} labels")


@dataclass(frozen=True)
class Scatter(_Panel):
    """Points in small plots side by side, coloured by a value: orbits, diagrams of many orbits.

    Parameters
    ----------
    x, y, values
        Coordinates and colours of the points: one row a plot, equally many in each.
    labels
        Heading of each plot.
    shared
        Whether the plots have common axes.
    limits, diverging
        Scale of colours, as in `Picture`.
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
            raise UsageError(
                f"scatter {self.title!r}: x, y and values of {sizes} points, {len(self.labels)} labels; expected "
                "equally many in each plot"
            )


def _check_limits(panel: Picture | Scatter) -> None:
    """Refuse a scale of colours without extent."""
    if panel.limits is not None and not panel.limits[0] < panel.limits[1]:
        raise UsageError(f"{panel.kind} {panel.title!r}: limits {panel.limits}, expected a smaller and a larger value")


Drawn = Lines | Multiples | Picture | Scatter  # panels with axes
Panel = Drawn | Listing


def panel_from_json(data: dict[str, Any]) -> Panel:
    """Rebuild a panel from its `to_json`."""
    values = {name: _frozen(value) for name, value in data.items() if name != "kind"}
    match data.get("kind"):
        case "lines":
            return Lines(**values | {"curves": _curves(data["curves"])})
        case "multiples":
            table = tuple(tuple(_curves(plot) for plot in row) for row in data["curves"])
            return Multiples(**values | {"curves": table})
        case "picture":
            return Picture(**values | {"limits": _limits(data)})
        case "scatter":
            return Scatter(**values | {"limits": _limits(data)})
        case "listing":
            return Listing(**values)
    raise UsageError(f"unknown kind of panel: {data.get('kind')!r}")


def _limits(data: dict[str, Any]) -> tuple[float, float] | None:
    """Return the ends of a scale of colours; null is absent here, not NaN."""
    limits = data.get("limits")
    return None if limits is None else (float(limits[0]), float(limits[1]))


@takes_arrays
def spread_curve(x: Iterable[float], samples: np.ndarray, label: str, role: Role = "trained", group: int = 0) -> Curve:
    """Return the mean over replicates with the full range of the replicates as its band.

    Parameters
    ----------
    x
        Coordinates, shape (n,).
    samples
        One row a replicate, shape (replicates, n).
    """
    import numpy as np

    values = np.atleast_2d(np.asarray(samples, dtype=float))
    band = len(values) > 1
    return Curve(
        x=tuple(float(position) for position in x),
        y=tuple(values.mean(0).tolist()),
        label=label,
        role=role,
        group=group,
        low=tuple(values.min(0).tolist()) if band else (),
        high=tuple(values.max(0).tolist()) if band else (),
    )


def spans_decades(values: np.ndarray) -> bool:
    """Return whether values are positive and so far apart that they belong on a logarithmic axis."""
    return bool(values.min() > 0 and values.max() >= 8 * values.min())


BAND_NOTE = "Lines are means over replicates, bands reach from the smallest to the largest replicate."


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # a NumPy number
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _curves(data: Iterable[dict[str, Any]]) -> tuple[Curve, ...]:
    return tuple(Curve(**{name: _frozen(value) for name, value in curve.items()}) for curve in data)


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    return math.nan if value is None else value
