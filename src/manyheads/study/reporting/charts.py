"""Charts of single results: bars, and intervals against the range in which a claim holds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from manyheads._extras import mpl
from manyheads.errors import UsageError
from manyheads.study.reporting.drawing import NotebookFigure, draw, write_plainly
from manyheads.study.reporting.style import COLOURS, INK, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from manyheads.study.panels import Drawn

MOST_BARS = 24
LONGEST_LABEL, TITLE = 60, 64  # characters


class Estimate(NamedTuple):
    """A figure with its interval, and the range in which a claim about it holds; ends may be infinite."""

    label: str
    figure: float
    interval: tuple[float, float]
    holds: tuple[float, float]


def draw_titled(panel: Drawn) -> Figure:
    """Draw a panel with its title, which a report writes as text beside the picture."""
    figure = draw(panel)
    figure.suptitle(textwrap.fill(panel.title, TITLE), fontsize=10.5, color=INK)
    return figure


def draw_bars(title: str, x_label: str, bars: Sequence[tuple[str, float]]) -> Figure:
    """Draw labelled amounts as horizontal bars, the first on top; those beyond the 24th are added up."""
    from matplotlib.ticker import EngFormatter

    shown = list(bars[:MOST_BARS])
    if rest := bars[MOST_BARS:]:
        shown.append((f"{len(rest)} more", sum(value for _, value in rest)))
    with mpl.rc_context(STYLE):
        figure, axes = _rows(title, x_label, [label for label, _ in shown])
        axes.barh(range(len(shown)), [value for _, value in shown], color=COLOURS[0], height=0.65)
        axes.xaxis.set_major_formatter(EngFormatter())
        for place, (_, value) in enumerate(shown):
            text = EngFormatter(places=1)(value)
            axes.annotate(text, (value, place), (3, 0), textcoords="offset points", va="center")
        axes.margins(x=0.12)
    return figure


def draw_intervals(title: str, x_label: str, estimates: Sequence[Estimate], log: bool = False) -> Figure:
    """Draw figures with their intervals as points with lines, over the range in which each claim holds as a band."""
    if not estimates:
        raise UsageError(f"{title}: there is nothing to draw")
    with mpl.rc_context(STYLE):
        figure, axes = _rows(title, x_label, [each.label for each in estimates])
        if log:
            axes.set_xscale("log")
        low, high = _extent([value for each in estimates for value in (each.figure, *each.interval, *each.holds)], log)
        axes.set_xlim(low, high)
        if log:
            write_plainly(axes.xaxis)
        for place, each in enumerate(estimates):
            start, end = (min(max(value, low), high) for value in each.holds)
            axes.fill_between([start, end], place - 0.35, place + 0.35, color=COLOURS[2], alpha=0.18, linewidth=0)
            axes.plot([min(max(value, low), high) for value in each.interval], [place] * 2, color=COLOURS[0])
            axes.plot(each.figure, place, "o", color=COLOURS[0], markersize=5, zorder=3)
    return figure


def _extent(values: Sequence[float], log: bool) -> tuple[float, float]:
    """Return the ends of an axis that shows all finite values with a margin; open ends reach up to it."""
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
    low, high = min(finite), max(finite)
    factor, margin = (high / low) ** 0.08 if log else 1.0, 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return (low / max(factor, 1.2), high * max(factor, 1.2)) if log else (low - margin, high + margin)


def _rows(title: str, x_label: str, labels: Sequence[str]) -> tuple[Figure, Axes]:
    """Return a figure with a labelled row for every entry, the first on top."""
    figure = NotebookFigure(figsize=(7.4, 1.2 + 0.32 * max(len(labels), 2)), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x_label)
    short = [label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…" for label in labels]
    axes.set_yticks(range(len(labels)), labels=short)
    axes.grid(False, axis="y")
    axes.set_ylim(len(labels) - 0.5, -0.5)
    return figure, axes
