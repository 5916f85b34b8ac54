"""SVG text of panels: real text, colours that follow the page, a title and an alternative text."""

import io
import math
import re
from collections.abc import Iterable
from html import escape

from manyheads._extras import mpl
from manyheads.study.panels import Curve, Drawn, Lines, Multiples, Picture, Scatter
from manyheads.study.reporting.drawing import draw
from manyheads.study.reporting.style import STYLE, plain_colours, raised, typeset

MOST_CURVES = 8  # that an alternative text describes one by one


def svg(panel: Drawn, prefix: str) -> str:
    """Return the panel as an SVG element whose ids begin with `prefix`; the same panel gives the same text."""
    with mpl.rc_context(STYLE):
        buffer = io.StringIO()
        metadata = {"Date": None, "Creator": None}
        draw(panel).savefig(buffer, format="svg", dpi=150, metadata=metadata, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;?|font: ([\d.]+px)[^;\"]*;?", r"font-size: \1;", text)
    text = text.replace("font-size: ;", "")
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'((?:xlink:)?href=")#', rf"\1#{prefix}", text)
    text = re.sub(r"url\(#", f"url(#{prefix}", text).strip()
    text = re.sub(r">[^<>]*\^[^<>]*<", lambda found: raised(found[0]), text)
    opening = re.search(r'viewBox="[^"]*"', text)
    assert opening is not None, "matplotlib writes a viewBox"
    title, words = f"{prefix}title", f"{prefix}words"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {opening[0]} role="img" '
        f'aria-labelledby="{title} {words}" stroke-linejoin="round"><title id="{title}">{escape(panel.title)}</title>'
        f'<desc id="{words}">{escape(describe(panel))}</desc>'
    )
    return plain_colours(head + text[text.index(">") + 1 :])


def describe(panel: Drawn) -> str:
    """Return a text that stands for the drawing: the axes, and where each curve or colour begins and ends."""
    if isinstance(panel, Picture):
        shape = f"{len(panel.values)} rows ({panel.y_label}) and {len(panel.values[0])} columns ({panel.x_label})"
        every = (value for row in panel.values for value in row)
        return f"Heat map of {panel.value_label or 'values'} in {shape}, {_range(every)}."
    if isinstance(panel, Scatter):
        every = (value for row in panel.values for value in row)
        points = f"{sum(map(len, panel.x)):,} points in {len(panel.labels)} plots"
        return f"{points} of {panel.y_label} over {panel.x_label}; {panel.value_label or 'colour'} {_range(every)}."
    if isinstance(panel, Multiples):
        shape = f"{len(panel.row_labels)} rows and {len(panel.column_labels)} columns of plots"
        labels = dict.fromkeys(curve.label for row in panel.curves for plot in row for curve in plot if curve.label)
        every = (value for row in panel.curves for plot in row for curve in plot for value in curve.y)
        named = f" Curves: {', '.join(labels)}." if labels else ""
        return f"{shape} of {panel.y_label} over {panel.x_label}, {_range(every)}.{named}"
    return _describe_lines(panel)


def _describe_lines(panel: Lines) -> str:
    told = [text for curve in panel.curves if curve.label and (text := _course(curve, panel.x_ticks))]
    more = f" And {len(told) - MOST_CURVES} more curves." if len(told) > MOST_CURVES else ""
    return f"{panel.y_label} over {panel.x_label}. {' '.join(told[:MOST_CURVES])}{more}".strip()


def _course(curve: Curve, names: tuple[str, ...]) -> str:
    """Return from where to where a curve goes; empty if it shows nothing."""
    points = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return ""
    (x, y), (last_x, last_y) = points[0], points[-1]
    first, last = (names[int(place)] if names else _number(place) for place in (x, last_x))
    return f"{curve.label}: from {_number(y)} at {first} to {_number(last_y)} at {last}."


def _range(values: Iterable[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    return f"from {_number(min(finite))} to {_number(max(finite))}" if finite else "without a finite value"


def _number(value: float) -> str:
    return typeset(f"{value:.3g}")
