"""Plain-text tables of costs: integers in full, aligned, readable in a log and in a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from manyheads.costs.conventions import PRESETS, ConventionError
from manyheads.costs.cost import BYTES, Cost

COLUMNS = ("flops", "elementwise", "transcendental", "bytes")


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align rows of text: the first column left, the others right.

    Examples
    --------
    >>> print(render_table(("item", "n"), [("a", "10"), ("total", "7")]))
    item    n
    ---------
    a      10
    total   7
    """
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    texts = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    return "\n".join([texts[0].rstrip(), "-" * max(map(len, texts)), *(text.rstrip() for text in texts[1:])])


def render_cost(cost: Cost) -> str:
    """Render the breakdown of a cost, its total, its convention and its notes."""
    known = cost.lower_bound()
    total = {name: getattr(known, name) for name in COLUMNS}
    unit = "FLOPs" if cost.convention.multiply_add == 2 else "MACs"
    rows = [
        (name, *(f"{figures[column]:,}" for column in COLUMNS), _share(figures["flops"], total["flops"]))
        for name, figures in known.breakdown().items()
    ]
    label = "at least" if cost.unknown else "total"
    rows.append((label, *(f"{total[column]:,}" for column in COLUMNS), _share(total["flops"], total["flops"])))
    lines = [
        render_table(("item", unit, "elementwise", "transcendental", "bytes", f"% of {unit}"), rows),
        f"convention {cost.convention.name}: {cost.convention.describe()}",
        f"bytes: {BYTES[cost.convention.executed]}",
    ]
    lines += [f"unknown: {part}" for part in cost.unknown] + [f"note: {note}" for note in cost.notes]
    return "\n".join(lines)


@dataclass(frozen=True)
class Comparison:
    """One preset's reading of a cost; `count` is None where halving gives no integer."""

    name: str
    count: int | None
    source: str


def compare_conventions(cost: Cost) -> tuple[Comparison, ...]:
    """Read one cost under every preset that can read it."""
    rows = []
    for name, preset in PRESETS.items():
        if preset.convention.executed != cost.convention.executed:
            continue
        try:
            rows.append(Comparison(name, cost.to(preset.convention).flops, preset.source))
        except ConventionError:
            rows.append(Comparison(name, None, preset.source))
    return tuple(rows)


def render_comparison(cost: Cost) -> str:
    """Render one cost under every preset that can read it, with the ratio to the first, and who counts so."""
    rows = compare_conventions(cost)
    first = rows[0].count
    cells = [
        (row.name, "no integer", "")
        if row.count is None
        else (row.name, f"{row.count:,}", f"{row.count / first:.4f}" if first else "-")
        for row in rows
    ]
    width = max(len(row.name) for row in rows)
    sources = "\n".join(f"{row.name.ljust(width)}  {row.source}" for row in rows)
    return f"{render_table(('convention', 'count', 'ratio'), cells)}\n\n{sources}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"
