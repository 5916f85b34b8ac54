"""Drawing of panels: matplotlib figures in one style, and SVG text that may stand beside others in one page."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from manyheads.study.reporting.panels import Curve, Drawn, Lines, Multiples, Picture, Scatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

COLOURS = ("#1b6ca8", "#d1603d", "#2f855a", "#7b4fa3", "#b7791f", "#0f8b8d", "#b83280", "#5a6778")
INK, FAINT = "#1f2933", "#9aa5b1"
DIVERGING = ("#0b3c63", COLOURS[0], "#bcc5cf", COLOURS[1], "#7a1f0a")  # grey in the middle: points show on white
PLOTS_IN_ROW = 4  # of a scatter
STYLE: Any = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.7,
    "xtick.color": "#52606d",
    "ytick.color": "#52606d",
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "white",
    "text.parse_math": False,  # a dollar in a label is a dollar
    "svg.fonttype": "path",
    "svg.hashsalt": "manyheads",
}
MOST_POINTS = 20_000  # more than these are drawn as pixels, which keeps the page small and quick
LEGEND_OUTSIDE = 5  # more entries than this stand beside the axes, not on the data


class NotebookFigure(Figure):
    """A matplotlib figure that a notebook shows also where pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        import matplotlib as mpl

        buffer = io.BytesIO()
        with mpl.rc_context(STYLE):
            self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def draw(panel: Drawn) -> Figure:
    """Return a matplotlib figure of a panel, made without pyplot and without touching its settings."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        figure = NotebookFigure(figsize=_size(panel), layout="constrained")
        if isinstance(panel, Multiples):
            _draw_multiples(figure, panel)
            return figure
        if isinstance(panel, Scatter):
            _draw_scatter(figure, panel)
            return figure
        axes = figure.add_subplot()
        if isinstance(panel, Lines):
            _draw_lines(axes, panel)
        else:
            _draw_picture(figure, axes, panel)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
    return figure


def svg(panel: Drawn, prefix: str) -> str:
    """Return the panel as an SVG element whose ids begin with `prefix`; the same panel gives the same text."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        buffer = io.StringIO()
        draw(panel).savefig(buffer, format="svg", dpi=150, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'((?:xlink:)?href=")#', rf"\1#{prefix}", text)
    return re.sub(r"url\(#", f"url(#{prefix}", text).strip()


def _size(panel: Drawn) -> tuple[float, float]:
    if isinstance(panel, Multiples):
        return (max(9.5, 0.6 + 2.05 * len(panel.column_labels)), 0.9 + max(2.4, 1.45 * len(panel.row_labels)))
    if isinstance(panel, Scatter):
        columns = _scatter_columns(panel)
        return (9.5, 0.9 + (4.0 if columns == 1 else 8.2 / columns) * -(-len(panel.labels) // columns))
    if isinstance(panel, Lines):
        return (7.4 if _entries(panel) > LEGEND_OUTSIDE else 6.0, 3.5)
    rows, columns = len(panel.values), len(panel.values[0])
    width = 2.2 + min(5.2, max(2.6, 0.17 * columns))
    return (width, 1.2 + min(5.2, max(1.6, (width - 2.2) * rows / columns)))


def _entries(panel: Lines) -> int:
    return sum(bool(curve.label) for curve in panel.curves)


def _draw_lines(axes: Axes, panel: Lines) -> None:
    for curve in panel.curves:
        _draw_curve(axes, curve)
    if sum(len(curve.x) for curve in panel.curves) > MOST_POINTS:
        for artist in (*axes.lines, *axes.collections):
            artist.set_rasterized(True)
    # A logarithmic axis without a positive number on it cannot be drawn: such a panel is shown on a plain one.
    if panel.log_x and _has_positive(curve.x for curve in panel.curves):
        axes.set_xscale("log")
        write_plainly(axes.xaxis)
        if sizes := _few_sizes(panel):
            axes.set_xticks(sizes, labels=[f"{size:g}" for size in sizes])
            axes.set_xticks([], minor=True)
    if panel.log_y and _has_positive(curve.y for curve in panel.curves):
        axes.set_yscale("log")
        write_plainly(axes.yaxis)
    if _entries(panel) > LEGEND_OUTSIDE:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    elif _entries(panel):
        axes.legend(loc="best")


def _draw_multiples(figure: Figure, panel: Multiples) -> None:
    shape = (len(panel.row_labels), len(panel.column_labels))
    grid = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False)
    legend: dict[str, Any] = {}
    for row, column in itertools.product(*map(range, shape)):
        axes = grid[row, column]
        for curve in panel.curves[row][column]:
            _draw_curve(axes, curve, width=1.3)
        legend |= {text: line for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        axes.tick_params(labelsize=7.5, length=2)
        if panel.captions and panel.captions[row][column]:
            text = panel.captions[row][column]
            axes.text(0.97, 0.95, text, transform=axes.transAxes, ha="right", va="top", fontsize=7.5, color="#52606d")
        if row == 0:
            axes.set_title(panel.column_labels[column], fontsize=9)
        if column == 0:
            axes.set_ylabel(panel.row_labels[row], fontsize=9)
    if panel.log_y and _has_positive(curve.y for row in panel.curves for plot in row for curve in plot):
        grid[0, 0].set_yscale("log")
        write_plainly(grid[0, 0].yaxis)
    figure.supxlabel(panel.x_label, fontsize=9, color=INK)
    figure.supylabel(panel.y_label, fontsize=9, color=INK)
    if legend:
        names = sorted(legend, key=_by_number)
        figure.legend([legend[name] for name in names], names, loc="outside upper center", ncols=min(len(names), 7))


def _draw_scatter(figure: Figure, panel: Scatter) -> None:
    columns = _scatter_columns(panel)
    rows, shared = -(-len(panel.labels) // columns), panel.shared
    grid = figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False)
    every = [value for row in panel.values for value in row if math.isfinite(value)]
    many = len(every) > MOST_POINTS / 4
    scale, ticks = _scatter_scale(panel, every)
    for place, axes in enumerate(grid.flat):
        if place >= len(panel.labels):
            axes.set_visible(False)
            continue
        points = axes.scatter(
            panel.x[place],
            panel.y[place],
            s=1.5 if many else 5.0,
            c=panel.values[place],
            linewidths=0,
            rasterized=len(every) > MOST_POINTS / 20,
            **scale,
        )
        axes.set_title(panel.labels[place], fontsize=9)
        axes.tick_params(labelsize=7.5, length=2)
    figure.supxlabel(panel.x_label, fontsize=9, color=INK)
    figure.supylabel(panel.y_label, fontsize=9, color=INK)
    _draw_bar(figure, points, list(grid.flat), panel.value_label, ticks)


def _scatter_scale(panel: Scatter, every: list[float]) -> tuple[dict[str, Any], list[float] | None]:
    """Return the colours of points, and the marks of their scale: a few whole numbers have a colour each."""
    from matplotlib.colors import BoundaryNorm, ListedColormap

    kinds = sorted(set(every))
    if 1 < len(kinds) <= len(COLOURS) and all(value == int(value) for value in kinds):
        edges = [kinds[0] - 0.5, *((a + b) / 2 for a, b in itertools.pairwise(kinds)), kinds[-1] + 0.5]
        return {"cmap": ListedColormap(COLOURS[: len(kinds)]), "norm": BoundaryNorm(edges, len(kinds))}, kinds
    low, high = panel.limits or (min(every, default=0.0), max(every, default=1.0))
    return {"cmap": _colours(panel.diverging, "viridis"), "vmin": low, "vmax": high}, None


def _scatter_columns(panel: Scatter) -> int:
    """Return the number of plots in a row, such that the rows are filled evenly."""
    rows = -(-len(panel.labels) // PLOTS_IN_ROW)
    return -(-len(panel.labels) // rows)


def _colours(diverging: bool, sequential: str) -> Any:
    """Return the scale of colours: one with a middle, or the one of that name."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("diverging", DIVERGING) if diverging else sequential


def _draw_bar(figure: Figure, drawn: Any, axes: Any, label: str, ticks: list[float] | None = None) -> None:
    bar = figure.colorbar(drawn, ax=axes, shrink=0.85, pad=0.02, ticks=ticks)
    bar.outline.set_visible(False)
    bar.set_label(label)
    if ticks:
        bar.ax.minorticks_off()
        bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])


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
    """Label a logarithmic axis with plain numbers: matplotlib writes mathematics, which is switched off."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(labelOnlyBase=False))


def _has_positive(series: Iterable[tuple[float, ...]]) -> bool:
    return any(0 < value < math.inf for values in series for value in values)


def _draw_curve(axes: Axes, curve: Curve, width: float = 1.7) -> None:
    colour = FAINT if curve.role == "reference" else COLOURS[curve.group % len(COLOURS)]
    if curve.role == "predicted":  # darker and on top: a prediction that fits would vanish behind the trained line
        colour = "#" + "".join(f"{int(colour[i : i + 2], 16) * 2 // 3:02x}" for i in (1, 3, 5))
    style = {"trained": "-", "predicted": "--", "reference": ":"}[curve.role]
    marker = "o" if len(curve.x) <= 12 and curve.role == "trained" else ""
    width = min(width, 1.2) if curve.role == "reference" else width
    axes.plot(
        curve.x,
        curve.y,
        linestyle=style,
        marker=marker,
        markersize=3.5,
        color=colour,
        linewidth=width,
        zorder=3 if curve.role == "predicted" else 2,
        label=curve.label or None,
    )
    if curve.low:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)


def _draw_picture(figure: Figure, axes: Axes, panel: Picture) -> None:
    axes.grid(False)
    low, high = panel.limits or (None, None)
    colours = _colours(panel.diverging, "magma_r")
    image = axes.imshow(panel.values, aspect="auto", cmap=colours, interpolation="nearest", vmin=low, vmax=high)
    for ticks, axis, rotation in ((panel.x_ticks, axes.xaxis, 0), (panel.y_ticks, axes.yaxis, 0)):
        if ticks:
            shown = [(place, text) for place, text in enumerate(ticks) if text]  # no mark where there is no word
            places, texts = [place for place, _ in shown], [text for _, text in shown]
            axis.set_ticks(places, labels=texts, rotation=rotation, fontsize=7.5, family="monospace")
    _draw_bar(figure, image, axes, panel.value_label)
