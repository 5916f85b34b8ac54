"""Style of drawings: Okabe-Ito colours with markers, and the CSS variables that stand for them in a page.

A page in dark mode redefines the variables; elsewhere a drawing has its own colours. Vermillion is kept for
refuted claims and unexpected outcomes, so it comes last; the yellow of Okabe and Ito is left out, since nobody sees it
on white.
"""

import re
from typing import Any

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#434b54", "#d55e00")
DEEP = ("#004b76", "#9a6900", "#00694d", "#8a4d70", "#2b7fb0", "#171b1f", "#8e3f00")  # the same, for predictions
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DIVERGING = ("#003a5c", COLOURS[0], "#bcc5cf", COLOURS[6], "#5e2a00")  # grey in the middle: points show on white
INK, SOFT, AXIS, GRID = "#1f2934", "#4f5b67", "#8593a1", "#e4e7eb"
VARIABLES = {INK: "ink", SOFT: "soft", AXIS: "axis", GRID: "grid"}
VARIABLES |= {colour: f"c{place}" for place, colour in enumerate(COLOURS)}
VARIABLES |= {colour: f"d{place}" for place, colour in enumerate(DEEP)}
LINES: Any = {"trained": "-", "predicted": (0, (4, 2)), "reference": (0, (1, 1.5))}  # by role
SMALL = 8.5  # points; the smallest text
STYLE: Any = {
    "font.size": 9.5, "axes.titlesize": 9.5, "axes.labelcolor": INK, "axes.edgecolor": AXIS, "axes.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7,
    "xtick.color": AXIS, "ytick.color": AXIS, "xtick.labelcolor": SOFT, "ytick.labelcolor": SOFT,
    "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "text.color": INK,
    "legend.frameon": False, "legend.fontsize": SMALL, "figure.facecolor": "white",
    "text.parse_math": False,  # a dollar in a label is a dollar
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and copied
    "svg.hashsalt": "manyheads",
}  # fmt: skip


def colour_of(group: int, *, deep: bool = False) -> str:
    """Return the colour of a group of curves."""
    return (DEEP if deep else COLOURS)[group % len(COLOURS)]


def role_colour(role: str, group: int) -> str:
    """Return the colour of a curve: references grey, predictions darker than what they predict."""
    return AXIS if role == "reference" else colour_of(group, deep=role == "predicted")


def marker_of(group: int) -> str:
    """Return the marker of a group; groups that share a colour differ in it."""
    return MARKERS[(group + group // len(COLOURS)) % len(MARKERS)]


def plain_colours(svg: str) -> str:
    """Move the colours of an SVG text from styles to attributes, which any viewer reads and a page can override."""
    return re.sub(r' style="([^"]*)"', _attributes, svg)


def colour_rules() -> str:
    """Return the rules of a page that exchange the colours of its drawings for the page's variables."""
    rule = 'svg [{0}="{1}"] {{ {0}: var(--{2}); }}'
    return "\n".join(rule.format(kind, *each) for each in VARIABLES.items() for kind in ("fill", "stroke"))


def _attributes(style: re.Match[str]) -> str:
    drawn = re.findall(r"(fill|stroke): (#\w+)", style[1])
    rest = re.sub(r"(?:fill|stroke): #\w+(?:; *)?", "", style[1]).strip("; ")
    return "".join(f' {kind}="{colour}"' for kind, colour in drawn) + (f' style="{rest}"' if rest else "")


_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def typeset(text: str) -> str:
    """Return the text of a number with a true minus and powers of ten: "-2e-05" as "−2×10⁻⁵"."""
    return re.sub(r"(?:(?<![\d.])1|(\d))e([+-]?)0*(\d+)", _power, text).replace("-", "−")


def number_text(value: float) -> str:
    """Return a number of an axis: plain between 0.001 and 100,000, with a power of ten beyond."""
    import numpy as np

    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return typeset(f"{value:g}")
    return typeset(np.format_float_scientific(value, precision=4, trim="-").replace(".e", "e"))


def raised(text: str) -> str:
    """Return text with whole exponents as superscripts, "N^-1" as "N⁻¹", and "1/√N" for "N^(-1/2)"."""
    text = re.sub(r"\b(\w+)\^\(-1/2\)", r"1/√\1", text)
    return re.sub(r"\^(-?\d+)(?![\d./])", lambda found: found[1].translate(_SUPERSCRIPTS), text)


def _power(found: re.Match[str]) -> str:
    mantissa = f"{found[1]}×" if found[1] else ""
    return mantissa + "10" + (found[2].strip("+") + found[3]).translate(_SUPERSCRIPTS)
