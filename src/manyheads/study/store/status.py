"""Status of a run: units stored, claimed and missing in each cell, launches, environments and failures."""

from manyheads._json import Json
from manyheads._overview import printable
from manyheads.study.store.leases import claims_in, owners_of
from manyheads.study.store.records.schema import is_unit_number
from manyheads.study.store.run_store import RunStore

MOST_CELLS = 20  # shown to people


def status(runs: RunStore, replicates: int | None = None) -> dict[str, Json]:
    """Return what is known of a run; no values are read.

    Without a number of replicates it is that of the cell that has most, claims included.
    """
    layout, stored = runs.layout, runs.numbers()
    claimed = {unit for unit, _ in claims_in(runs.path / "leases") if is_unit_number(unit)} - stored
    last = max((layout.unit(number).last for number in stored | claimed if layout.unit(number).cell), default=0)
    replicates = last + 1 if replicates is None else replicates
    failed, wanted = runs.failures(), layout.count(replicates)
    rows = {"prediction": layout.predictions or 1}
    rows |= {cell.slug: -(-replicates // layout.chunk) for cell in layout.cells}
    cells = {name: {"stored": 0, "claimed": 0, "missing": count, "failed": 0} for name, count in rows.items()}
    for kind, numbers in (("stored", stored), ("claimed", claimed), ("failed", failed)):
        for number in numbers:
            if number < wanted:
                cell = layout.unit(number).cell
                counts = cells["prediction" if cell is None else cell.slug]
                counts[kind] += 1
                counts["missing"] -= kind != "failed"
    launches = [
        {"host": owner.host, "pid": owner.pid, "seconds": round(owner.seconds, 1), "alive": owner.alive}
        for owner in owners_of(runs.path)
    ]
    failures = {str(layout.unit(number)): what for number, what in failed.items()}
    found = {"run": str(runs.path), "units": len(stored), "replicates": replicates, "cells": cells}
    return found | {"launches": launches, "environments": runs.environments(), "failures": failures}


def describe(found: dict[str, Json]) -> str:
    """Return a status as text, cells in which something is missing first."""
    wanted = sum(cell["stored"] + cell["claimed"] + cell["missing"] for cell in found["cells"].values())
    lines = [f"{printable(found['run'])}   {found['units']} units stored"]
    lines.append(f"  {found['replicates']} replicates, which are {wanted} units:")
    rows = sorted(found["cells"].items(), key=lambda row: -row[1]["missing"])
    width = max(len(name) for name, _ in rows)
    for name, counts in rows[:MOST_CELLS]:
        told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        lines.append(f"  {name:<{width}}   {told}")
    if len(rows) > MOST_CELLS:
        lines.append(f"  … and {len(rows) - MOST_CELLS} cells with no more missing")
    for owner in found["launches"]:
        how = "at work" if owner["alive"] else "dead"
        lines.append(f"  {how}: {printable(owner['host'])}, pid {owner['pid']}, beat {owner['seconds']:.0f} s ago")
    lines += [f"  failed: {unit}: {printable(what)}" for unit, what in found["failures"].items()]
    return "\n".join(lines)
