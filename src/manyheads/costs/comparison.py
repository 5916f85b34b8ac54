"""Comparison of conventions: one cost under every preset that can read it."""

from manyheads._overview import render_table
from manyheads.costs.conventions import PRESETS, ConventionError
from manyheads.costs.cost import Cost


def compare_conventions(cost: Cost) -> dict[str, int | None]:
    """Read one cost under every preset that can read it; None where halving gives no integer."""
    counts: dict[str, int | None] = {}
    for name in PRESETS:
        if cost.reads(name):
            try:
                counts[name] = cost.to(name).flops
            except ConventionError:
                counts[name] = None
    return counts


def render_comparison(cost: Cost) -> str:
    """Render one cost under every preset that can read it, with the ratio to the first, and who counts so."""
    counts = compare_conventions(cost)
    first, width = next(iter(counts.values())), max(map(len, counts))
    cells = [
        (name, "no integer", "") if count is None else (name, f"{count:,}", f"{count / first:.4f}" if first else "-")
        for name, count in counts.items()
    ]
    sources = "\n".join(f"{name.ljust(width)}  {PRESETS[name].source}" for name in counts)
    return f"{render_table(('convention', 'count', 'ratio'), cells)}\n\n{sources}"
