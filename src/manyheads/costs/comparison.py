"""Comparison of conventions: one cost under every preset that can read it."""

from dataclasses import dataclass

from manyheads.costs.conventions import PRESETS, ConventionError
from manyheads.costs.cost import Cost, render_table


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
