"""Drawing of panels: matplotlib figures in one style, small enough to be read on a telephone."""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from manyheads._extras import mpl
from manyheads.study.panels import Curve, Drawn, Lines, Multiples, Picture, Scatter
from manyheads.study.reporting import style
from manyheads.study.reporting.labels import label_above, label_lines, legend_rows
from manyheads.study.reporting.style import INK, SMALL, SOFT, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

NARROW, WIDE = 4.6, 9.5  # inches: at 72 pixels an inch the first fits a telephone, the second scrolls there
PLOTS_IN_ROW = 4  # of a scatter
PLATE = "#f3f4f6"  # behind the points of a scatter
MOST_POINTS = 20_000  # more than these are drawn as pixels, which keeps the page small and quick
MOST_MARKED = 12  # of more points only some carry a marker
LONGEST_NAME = 16  # characters of a named tick in one row
SHORT = 4.0  # factor over which a logarithmic axis is marked like a plain one
X_LABEL, Y_LABEL = 46, 28  # characters of an axis label in one row; twice as many in wide panels


class NotebookFigure(Figure):
    """A matplotlib figure that a notebook shows also where pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        with mpl.rc_context(STYLE):
            self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def draw(panel: Drawn) -> Figure:
    """Return a matplotlib figure of a panel, made without pyplot and without touching its settings."""
    with mpl.rc_context(STYLE):
        figure = NotebookFigure(figsize=_size(panel), layout="constrained")
        DRAWINGS[type(panel)](figure, panel)
    return figure


def is_wide(panel: Drawn) -> bool:
    """Return whether a panel takes the whole width of a page: small plots side by side, and pictures."""
    return not isinstance(panel, Lines)


def _size(panel: Drawn) -> tuple[float, float]:
    if isinstance(panel, Multiples):
        return (max(WIDE, 0.6 + 2.05 * len(panel.column_labels)), 0.9 + max(2.4, 1.55 * len(panel.row_labels)))
    if isinstance(panel, Scatter):
        columns = _scatter_columns(panel)
        return (WIDE, 0.9 + (4.0 if columns == 1 else 8.2 / columns) * -(-len(panel.labels) // columns))
    if isinstance(panel, Lines):
        names = min(max(map(len, panel.x_ticks), default=0), LONGEST_NAME)
        return (NARROW, 2.9 + 0.06 * names + 0.18 * legend_rows(panel, NARROW))
    rows, columns = len(panel.values), len(panel.values[0])
    width = WIDE if columns > 40 else NARROW + 1.5 if columns > 12 else NARROW
    return (width, 1.1 + min(6.0, max(1.6, 0.3 * rows if rows <= 12 else (width - 2.0) * rows / columns)))


def _draw_lines(figure: Figure, panel: Lines) -> None:
    axes = figure.add_subplot()
    for curve in panel.curves:
        _draw_curve(axes, curve, named=bool(panel.x_ticks))
    if sum(len(curve.x) for curve in panel.curves) > MOST_POINTS:
        for artist in (*axes.lines, *axes.collections):
            artist.set_rasterized(True)
    # A logarithmic axis without a positive number on it cannot be drawn: such a panel is shown on a plain one.
    if panel.x_ticks:
        names = [textwrap.fill(name, LONGEST_NAME) for name in panel.x_ticks]
        axes.set_xticks(range(len(names)), labels=names, rotation=35, ha="right", rotation_mode="anchor")
    elif panel.log_x and _has_positive(curve.x for curve in panel.curves):
        axes.set_xscale("log")
        if sizes := _few_sizes(panel):
            axes.set_xticks(sizes, labels=[style.number_text(size) for size in sizes])
            axes.set_xticks([], minor=True)
        else:
            write_plainly(axes.xaxis)
    else:
        write_plainly(axes.xaxis)
        _mark_whole_numbers(axes.xaxis, panel.curves)
    if panel.log_y and _has_positive(curve.y for curve in panel.curves):
        axes.set_yscale("log")
    write_plainly(axes.yaxis)
    axes.set_xlabel(_axis_label(panel.x_label, X_LABEL))
    axes.set_ylabel(_axis_label(panel.y_label, Y_LABEL))
    label_lines(axes, panel, NARROW)


def _draw_multiples(figure: Figure, panel: Multiples) -> None:
    shape = (len(panel.row_labels), len(panel.column_labels))
    grid = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False)
    legend: dict[str, object] = {}
    for row, column in itertools.product(*map(range, shape)):
        axes = grid[row, column]
        for curve in panel.curves[row][column]:
            _draw_curve(axes, curve, width=1.3)
        legend |= {text: line for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        axes.tick_params(length=2)
        if panel.captions and panel.captions[row][column]:
            text = panel.captions[row][column]
            axes.text(0.97, 0.95, text, transform=axes.transAxes, ha="right", va="top", fontsize=SMALL, color=SOFT)
        if row == 0:
            axes.set_title(textwrap.fill(panel.column_labels[column], 28))
        if column == 0:
            axes.set_ylabel(textwrap.fill(panel.row_labels[row], 16))
    write_plainly(grid[0, 0].xaxis)
    _mark_whole_numbers(grid[0, 0].xaxis, [curve for row in panel.curves for plot in row for curve in plot])
    if panel.log_y and _has_positive(curve.y for row in panel.curves for plot in row for curve in plot):
        grid[0, 0].set_yscale("log")
    elif panel.captions:  # room above the curves, which a caption would cover
        low, high = grid[0, 0].get_ylim()
        grid[0, 0].set_ylim(low, high + 0.2 * (high - low))
    write_plainly(grid[0, 0].yaxis)
    _label_figure(figure, panel)
    if legend:
        names = sorted(legend, key=_by_number)
        label_above(figure, [legend[name] for name in names], names, WIDE)


def _draw_scatter(figure: Figure, panel: Scatter) -> None:
    from matplotlib.patches import Rectangle

    columns = _scatter_columns(panel)
    rows, shared = -(-len(panel.labels) // columns), panel.shared
    grid = figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False)
    every = [value for row in panel.values for value in row if math.isfinite(value)]
    many, pixels = len(every) > MOST_POINTS / 4, len(every) > MOST_POINTS / 20
    scale, ticks = _scatter_scale(panel, every)
    for place, axes in enumerate(grid.flat):
        if place >= len(panel.labels):
            axes.set_visible(False)
            continue
        drawn: dict[str, Any] = {"s": 1.5 if many else 5.0, "linewidths": 0, "rasterized": pixels}
        points = axes.scatter(panel.x[place], panel.y[place], c=panel.values[place], **drawn, **scale)
        if ticks is None or pixels:  # light in dark mode too, where neither a scale of colours nor pixels change
            axes.add_patch(Rectangle((0, 0), 1, 1, transform=axes.transAxes, facecolor=PLATE, linewidth=0, zorder=-1))
            axes.grid(color="white")
        axes.set_axisbelow(True)
        axes.set_title(textwrap.fill(panel.labels[place], 36))
        axes.tick_params(length=2)
        for axis in (axes.xaxis, axes.yaxis):
            write_plainly(axis)
    _label_figure(figure, panel)
    _draw_bar(figure, points, list(grid.flat), panel.value_label, ticks)
    figure.axes[-1].collections[-1].set_rasterized(pixels)  # the bar has the colours of the points, in dark mode too


def _label_figure(figure: Figure, panel: Multiples | Scatter) -> None:
    figure.supxlabel(_axis_label(panel.x_label, 2 * X_LABEL), fontsize=9.5, color=INK)
    figure.supylabel(_axis_label(panel.y_label, X_LABEL), fontsize=9.5, color=INK)


def _scatter_scale(panel: Scatter, every: list[float]) -> tuple[dict[str, Any], list[float] | None]:
    """Return the colours of points, and the marks of their scale: a few whole numbers have a colour each."""
    from matplotlib.colors import BoundaryNorm, ListedColormap

    kinds = sorted(set(every))
    if 1 < len(kinds) <= len(style.COLOURS) and all(value == int(value) for value in kinds):
        edges = [kinds[0] - 0.5, *((a + b) / 2 for a, b in itertools.pairwise(kinds)), kinds[-1] + 0.5]
        return {"cmap": ListedColormap(style.COLOURS[: len(kinds)]), "norm": BoundaryNorm(edges, len(kinds))}, kinds
    low, high = panel.limits or (min(every, default=0.0), max(every, default=1.0))
    return {"cmap": _colours(panel.diverging, _without_yellow()), "vmin": low, "vmax": high}, None


def _without_yellow() -> Any:
    """Return the scale of points from dark to green: yellow ones are not seen on a light plate."""
    from matplotlib.colors import ListedColormap

    return ListedColormap([mpl.colormaps["viridis"](0.8 * place / 255) for place in range(256)])


def _scatter_columns(panel: Scatter) -> int:
    """Return the number of plots in a row, such that the rows are filled evenly."""
    rows = -(-len(panel.labels) // PLOTS_IN_ROW)
    return -(-len(panel.labels) // rows)


def _colours(diverging: bool, sequential: Any) -> Any:
    """Return the scale of colours: one with a middle, or the other one."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("diverging", style.DIVERGING) if diverging else sequential


def _draw_bar(figure: Figure, drawn: Any, axes: Any, label: str, ticks: list[float] | None = None) -> None:
    bar = figure.colorbar(drawn, ax=axes, shrink=0.85, pad=0.02, ticks=ticks)
    bar.outline.set_visible(False)
    bar.set_label(_axis_label(label, Y_LABEL))
    if ticks:
        bar.ax.minorticks_off()
        bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])
    else:
        write_plainly(bar.ax.yaxis)


def _axis_label(text: str, width: int) -> str:
    """Return the label of an axis in rows of at most `width` characters, its unit in round brackets."""
    return textwrap.fill(re.sub(r"\[([^\[\]]*)\]$", r"(\1)", text), width)


def _by_number(text: str) -> list[str | float]:
    """Sort H=4 before H=16: words as words, numbers as numbers, in turn."""
    return [float(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", text))]


def _few_sizes(panel: Lines) -> list[float]:
    """Return the places of all points where these are few, short to write and far enough apart for a mark each."""
    sizes = sorted({x for curve in panel.curves for x in curve.x if 0 < x < math.inf})
    if not 2 <= len(sizes) <= 12 or max(len(f"{size:g}") for size in sizes) > 5:
        return []
    return sizes if min(b / a for a, b in itertools.pairwise(sizes)) > (sizes[-1] / sizes[0]) ** (1 / 14) else []


def write_plainly(axis: Axis) -> None:
    """Label an axis with plain numbers: matplotlib writes mathematics, which is switched off.

    A logarithmic axis over less than a factor of `SHORT` holds a mark of its own or two: it gets round numbers instead.
    """
    from matplotlib.ticker import FuncFormatter, LogFormatter, LogLocator, MaxNLocator, NullLocator, ScalarFormatter

    class Powers(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return style.number_text(x) if super().__call__(x, pos) else ""

    class Plain(ScalarFormatter):
        def get_offset(self) -> str:
            return style.typeset(super().get_offset())

    low, high = sorted(axis.get_view_interval())
    if isinstance(axis.get_major_locator(), LogLocator) and 0 < low < high < SHORT * low:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda x, pos: style.number_text(x)))
    elif isinstance(axis.get_major_locator(), LogLocator):
        axis.set_major_formatter(Powers())
        axis.set_minor_formatter(Powers(labelOnlyBase=False))
    elif isinstance(axis.get_major_formatter(), ScalarFormatter):
        axis.set_major_formatter(Plain(useOffset=False))


def _mark_whole_numbers(axis: Axis, curves: Iterable[Curve]) -> None:
    """Leave out marks between whole numbers where all points are at whole numbers: stages, layers, updates."""
    from matplotlib.ticker import MaxNLocator

    if all(x == int(x) for curve in curves for x in curve.x if math.isfinite(x)):
        axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def _has_positive(series: Iterable[tuple[float, ...]]) -> bool:
    return any(0 < value < math.inf for values in series for value in values)


def _draw_curve(axes: Axes, curve: Curve, width: float = 1.7, named: bool = False) -> None:
    """Draw one curve: trained solid with markers, predicted dashed and darker on top, references dotted and grey.

    Over `named` places points count, bars are their ranges, and a faint line leads from one to the next of its kind.
    """
    predicted, reference = curve.role == "predicted", curve.role == "reference"
    colour = style.role_colour(curve.role, curve.group)
    over = named and predicted
    line: dict[str, Any] = {"linestyle": style.LINES[curve.role], "zorder": 3 if predicted else 2}
    line |= {"color": (colour, 0.35) if named and not reference else colour, "label": curve.label or None}
    line["linewidth"] = min(width, 1.2) if reference or named else width
    mark: dict[str, Any] = {"markerfacecolor": colour, "markeredgecolor": style.colour_of(curve.group, deep=True)}
    mark["marker"] = style.marker_of(curve.group) if curve.role == "trained" else "_" if over else ""
    mark |= {"markersize": 11 if over else 5 if named else 3.8, "markeredgewidth": 2 if over else 0.7}
    axes.plot(curve.x, curve.y, markevery=_marked(curve), **line, **mark)
    if curve.low and named:
        axes.vlines(curve.x, curve.low, curve.high, color=colour, linewidth=width)
    elif curve.low:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)


def _marked(curve: Curve) -> tuple[int, int]:
    """Return the first marked point and the step to the next ones: all of a few, a few of many."""
    step = 1 if len(curve.x) <= MOST_MARKED else len(curve.x) // 7
    return curve.group * step // 5 % step, step


def _draw_picture(figure: Figure, panel: Picture) -> None:
    axes = figure.add_subplot()
    axes.grid(False)
    low, high = panel.limits or (None, None)
    colours = _colours(panel.diverging, "viridis")
    image = axes.imshow(panel.values, aspect="auto", cmap=colours, interpolation="nearest", vmin=low, vmax=high)
    for ticks, axis in ((panel.x_ticks, axes.xaxis), (panel.y_ticks, axes.yaxis)):
        if words := {place: text for place, text in enumerate(ticks) if text}:  # no mark where there is no word
            axis.set_ticks(list(words), labels=list(words.values()), fontsize=SMALL)
    axes.set_xlabel(_axis_label(panel.x_label, X_LABEL))
    axes.set_ylabel(_axis_label(panel.y_label, Y_LABEL))
    _draw_bar(figure, image, axes, panel.value_label)


DRAWINGS: Any = {Lines: _draw_lines, Multiples: _draw_multiples, Picture: _draw_picture, Scatter: _draw_scatter}
