"""Labels of curves: beside their ends where there is room, otherwise in a legend above the axes, never on the data."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from manyheads._extras import Axes
from manyheads.study.panels import Curve, Lines
from manyheads.study.reporting.style import INK, LINES, SMALL, role_colour

MOST_DIRECT, LONGEST_DIRECT = 7, 16  # labels beside the curves, and characters of one
LONGEST_ENTRY = 58  # characters of one row of a legend
CHARACTER = 0.56 * SMALL / 72  # width in inches, as a mean
HANDLE = 0.5  # inches: line, marker and gaps of a legend's entry
GAP = 0.075  # between two labels, of the axes' height


class End(NamedTuple):
    """Right end of a curve: its place in data and its height in the axes."""

    curve: Curve
    x: float
    y: float
    height: float


def legend_rows(panel: Lines, width: float) -> int:
    """Return how many rows the legend above the axes takes in a figure that is `width` inches wide."""
    labels = _labels(panel)
    if not labels or _may_be_direct(panel):
        return 0
    rows = -(-len(labels) // _columns(labels, width))
    return rows * max(len(_wrapped(label).splitlines()) for label in labels)


def label_lines(axes: Axes, panel: Lines, width: float) -> None:
    """Name the curves of a panel whose scales are set."""
    if _may_be_direct(panel) and (ends := _ends(axes, panel)):
        _label_ends(axes, ends)
    elif _labels(panel):
        label_above(axes, *axes.get_legend_handles_labels(), width)


def label_above(owner: Any, handles: Sequence[object], labels: list[str], width: float) -> None:
    """Put a legend above the axes, or above all axes of a figure, in as many columns as fit."""
    place: dict[str, Any] = {"loc": "outside upper center"}
    if hasattr(owner, "plot"):
        place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}
    columns = _columns(labels, width)
    owner.legend(handles, [_wrapped(label) for label in labels], ncols=columns, columnspacing=1.4, **place)


def _labels(panel: Lines) -> list[str]:
    return [curve.label for curve in panel.curves if curve.label]


def _may_be_direct(panel: Lines) -> bool:
    """Return whether labels are few and short, and all curves end where the axis ends."""
    labels = _labels(panel)
    if not 1 < len(labels) <= MOST_DIRECT or max(map(len, labels)) > LONGEST_DIRECT:
        return False
    lasts = [_last(panel, curve) for curve in panel.curves if curve.label]
    every = [x for curve in panel.curves for x in curve.x if math.isfinite(x) and (x > 0 or not panel.log_x)]
    if None in lasts or not every:
        return False
    scale = math.log if panel.log_x and min(every) > 0 else float
    first, last = scale(min(every)), scale(max(every))
    return all(scale(found[0]) >= last - 0.06 * (last - first) for found in lasts if found)


def _last(panel: Lines, curve: Curve) -> tuple[float, float] | None:
    """Return the right-most point of a curve that its axes can show."""
    low, bottom = (0.0 if log else -math.inf for log in (panel.log_x, panel.log_y))
    points = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    return max(((x, y) for x, y in points if x > low and y > bottom), default=None)


def _ends(axes: Axes, panel: Lines) -> list[End]:
    """Return the ends of the labelled curves, from the lowest to the highest."""
    axes.get_xlim(), axes.get_ylim()  # settle the limits
    into_axes = axes.transData + axes.transAxes.inverted()
    found = []
    for curve in panel.curves:
        if curve.label and (last := _last(panel, curve)):
            height = float(into_axes.transform(last)[1])
            found.append(End(curve, *last, min(max(height, 0.0), 1.0)))
    return sorted(found, key=lambda end: end.height)


def _label_ends(axes: Axes, ends: list[End]) -> None:
    for end, height in zip(ends, _spread([end.height for end in ends]), strict=True):
        arrow = {"arrowstyle": "-", "linewidth": 1.2, "shrinkA": 1.5, "shrinkB": 2.5, "relpos": (0.0, 0.5)}
        arrow |= {"color": role_colour(end.curve.role, end.curve.group), "linestyle": LINES[end.curve.role]}
        place: dict[str, Any] = {"xy": (end.x, end.y), "xytext": (1.075, height), "textcoords": "axes fraction"}
        place |= {"va": "center", "ha": "left", "fontsize": SMALL, "color": INK, "annotation_clip": False}
        axes.annotate(end.curve.label, **place, arrowprops=arrow)


def _spread(heights: list[float]) -> list[float]:
    """Move sorted heights apart, as little as needed, such that neighbours keep a gap and none leaves the axes."""
    places = list(heights)
    for place in range(1, len(places)):
        places[place] = max(places[place], places[place - 1] + GAP)
    places[-1] = min(places[-1], 1.0)
    for place in range(len(places) - 2, -1, -1):
        places[place] = min(places[place], places[place + 1] - GAP)
    return places


def _columns(labels: list[str], width: float) -> int:
    longest = max(min(len(label), LONGEST_ENTRY) for label in labels)
    return max(1, min(len(labels), 6, int((width - 0.4) / (HANDLE + CHARACTER * longest))))


def _wrapped(label: str) -> str:
    return textwrap.fill(label, LONGEST_ENTRY)
