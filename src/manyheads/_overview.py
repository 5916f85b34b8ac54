"""Overview of a result: one table of values, shown as text, as HTML or as a data frame."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

LONGEST_TEXT = 1000  # characters of a `repr`
MOST_ROWS = 8  # of a table in a `repr`
MOST_HTML_ROWS = 40
WIDEST_CELL = 56


@dataclass(frozen=True)
class Overview:
    """A headline, a table of plain values and remarks."""

    title: str  # what it is, and the figure that matters most
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[Any, ...]] = ()  # numbers stay numbers, None is an empty cell
    notes: tuple[str, ...] = ()  # what a reader must know beside the figures

    def text(self) -> str:
        """Return at most 1000 characters: the first rows, as many as fit, and how many there are besides."""
        notes = [_cut(note, 240) for note in self.notes[:2]]
        for most in range(min(MOST_ROWS, len(self.rows)), -1, -1):
            table = render_table(self.columns, self._texts(most)).splitlines() if most else []
            left = len(self.rows) - most
            more = [f"… {left} more row{'s' if left > 1 else ''}"] if left else []
            lines = [_cut(self.title, 160), *(f"  {line}" for line in (*table, *more, *notes))]
            found = "\n".join(lines)
            if len(found) <= LONGEST_TEXT:
                break
        return found

    def html(self) -> str:
        """Return a table for notebooks; every text is escaped."""
        sides = [
            "right" if set(map(_is_number, column)) == {True} else "left" for column in zip(*self.rows, strict=True)
        ]
        head = _html_row("th", self.columns, sides or ["left"] * len(self.columns))
        body = "".join(_html_row("td", map(plain_text, row), sides) for row in self.rows[:MOST_HTML_ROWS])
        left = len(self.rows) - MOST_HTML_ROWS
        notes = (*((f"… {left} more rows",) if left > 0 else ()), *self.notes)
        table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>" if self.columns else ""
        table = table and f'<div style="overflow-x:auto">{table}</div>'
        remarks = "".join(f"<div><small>{_escaped(note)}</small></div>" for note in notes)
        return f"<div><strong>{_escaped(self.title)}</strong>{table}{remarks}</div>"

    def frame(self) -> pd.DataFrame:
        """Return the whole table as a data frame."""
        import pandas as pd

        return pd.DataFrame.from_records(list(self.rows), columns=list(self.columns))

    def _texts(self, most: int) -> list[tuple[str, ...]]:
        return [tuple(_cut(plain_text(value), WIDEST_CELL) for value in row) for row in self.rows[:most]]


class Shown:
    """Base of results that show themselves, by their `_overview`."""

    def _overview(self) -> Overview:
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return the headline and the first rows."""
        return self._overview().text()

    def _repr_html_(self) -> str:
        return self._overview().html()

    def to_dataframe(self) -> pd.DataFrame:
        """Return the table of the result as a pandas data frame."""
        return self._overview().frame()


class ArraysAsShapes:
    """Base of dataclasses whose `repr` gives type and shape of arrays, and the beginning of texts."""

    def __repr__(self) -> str:
        """Return the fields that are not None."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.repr}  # type: ignore[arg-type]
        shown = ", ".join(f"{name}={_brief(value)}" for name, value in values.items() if value is not None)
        return _cut(f"{type(self).__name__}({shown})", LONGEST_TEXT)


def _brief(value: object) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {_brief(item)}' for name, item in value.items())}}}"
    return repr(value) if not isinstance(value, str) or len(value) <= WIDEST_CELL else f"{value[:WIDEST_CELL]!r}…"


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align rows of text: the first column left, the others right."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rest = ([cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)] for line in lines)
    texts = ["  ".join([line[0].ljust(widths[0]), *cells]) for line, cells in zip(lines, rest, strict=True)]
    return "\n".join([texts[0].rstrip(), "-" * max(map(len, texts)), *(text.rstrip() for text in texts[1:])])


def plain_text(value: object) -> str:
    """Return a value for people: integers in groups of three digits, other numbers with four, None as nothing."""
    if value is None:
        return ""
    if isinstance(value, bool) or type(value).__name__ == "bool":  # NumPy's too
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e6 and value.is_integer() else f"{value:.4g}"
    return str(value)


def distinct_texts(*values: float, digits: int = 3) -> list[str]:
    """Return numbers with as many digits, at least the given ones, as it takes to tell those that differ apart.

    Examples
    --------
    >>> distinct_texts(50.04, 50.0), distinct_texts(64.23, 50.0)
    (['50.04', '50'], ['64.2', '50'])
    """
    count = len({*values})
    tries = ([f"{value:.{places}g}" for value in values] for places in range(digits, 18))
    return next((texts for texts in tries if len({*texts}) >= count), [repr(value) for value in values])


def _is_number(value: object) -> bool:
    """Tell numbers, written ones too, and absent values from words."""
    text = plain_text(value).replace(",", "")
    try:
        float(text or 0)
    except ValueError:
        return False
    return True


def _html_row(kind: str, texts: Iterable[str], sides: Sequence[str]) -> str:
    cells = (
        f'<{kind} style="text-align:{side};padding:0 0.6em{";min-width:16em" * (len(text) > WIDEST_CELL // 2)}">'
        f"{_escaped(text)}</{kind}>"
        for text, side in zip(texts, sides, strict=True)
    )
    return f"<tr>{''.join(cells)}</tr>"


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _cut(text: str, longest: int) -> str:
    """Return a printable text on one line, cut to a length."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= longest else text[: longest - 1] + "…"


def printable(text: object) -> str:
    r"""Return text from outside as it may be shown: control and format characters, which move a cursor, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))
