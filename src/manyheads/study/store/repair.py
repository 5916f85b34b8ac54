"""Status and repair of a run.

Status: units stored, claimed and missing in each cell, launches, environments and failures.

Repair: good units of damaged files are copied to a new segment, and the damaged files are renamed. Good is what still
has its digest, line by line or row by row.
"""

import base64
import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from manyheads._json import Json
from manyheads._overview import printable
from manyheads.study.store import disk, leases, run_store
from manyheads.study.store.records import segments as lines
from manyheads.study.store.records.index import Index
from manyheads.study.store.records.schema import Schema, digest_of, identify, is_unit_number
from manyheads.study.store.records.table import Table

MOST_CELLS = 20  # shown to people


def status(runs: run_store.RunStore, replicates: int | None = None) -> dict[str, Json]:
    """Return what is known of a run; no values are read.

    Without a number of replicates it is that of the cell that has most, claims included.
    """
    layout, stored = runs.layout, runs.numbers()
    claimed = {unit for unit, _ in leases.claims_in(runs.path / "leases") if is_unit_number(unit)} - stored
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
        for owner in leases.owners_of(runs.path)
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


UNKNOWN = {"recorded": "lost in a damaged file"}  # environment of a unit whose values are good


# Good units of a file, numbers that it names, and how many damaged lines name none (None: nothing is known).
Salvaged = tuple[list[lines.Frame], set[int], int | None]


class Repaired(NamedTuple):
    """A damaged file under its new name, how many of its units were good, and what is lost."""

    path: Path
    kept: int
    lost: list[int]  # numbers of units that it names and that no file of the run holds now
    nameless: int | None  # damaged lines that name no unit; None if nothing could be read


def repair(path: Path) -> list[Repaired]:
    """Copy all good units of damaged files to a new segment and rename these files; the next run computes the rest.

    A run without damage is left untouched. The new segment is durable before a file is renamed: after a crash the
    repair is repeated, and units that are stored twice are equal. AtWork if somebody works on the run.
    """
    runs = run_store.RunStore(path)
    files = [file for kind in runs.index.files() for file in kind]
    damaged = [file for file in files if is_damaged(file, runs.run)]
    if not damaged:
        return []
    found = []
    with leases.Launch(path) as launch:
        launch.refuse_others("repair it")
        known, writer = Known(files, runs.run), lines.SegmentWriter(path, runs.run, launch.owner)
        for file in damaged:
            frames, named, nameless = known.salvage(file)
            for frame in frames:
                writer.append(frame)
            found.append((file.with_name(file.name + lines.DAMAGED), len(frames), named, nameless))
        writer.close()
        for file, (renamed, *_) in zip(damaged, found, strict=True):
            file.rename(renamed)
        stored = set(Index(path, runs.run).refresh().units)
    return [Repaired(renamed, kept, sorted(named - stored), nameless) for renamed, kept, named, nameless in found]


class Known:
    """Schemas and environments of all files of a run, damaged ones included.

    Their names are hashes, so one file stands in for another.
    """

    def __init__(self, files: Iterable[Path], run: str):
        self.run = run
        self.schemas: dict[str, Schema] = {}
        self.environments: dict[str, dict[str, Json]] = {}
        for file in files:
            if is_table(file):
                with contextlib.suppress(disk.StoreDamaged):
                    table = Table(file, run, checked=False)
                    self.schemas |= table.schemas
                    self.environments |= table.environments
                continue
            for record in _records(file):
                with contextlib.suppress(disk.StoreDamaged), disk.trusting_nothing(file, ""):
                    if record["kind"] == "schema":
                        schema = Schema(record["schema"])
                        self.schemas[schema.id] = schema
                    elif record["kind"] == "environment":
                        self.environments[identify(record["environment"])] = dict(record["environment"])

    def salvage(self, file: Path) -> Salvaged:
        """Return what is good in a file."""
        return self._of_table(file) if is_table(file) else self._of_segment(file)

    def _of_table(self, file: Path) -> Salvaged:
        try:
            table = Table(file, self.run, checked=False)
            packs = table.good()
        except disk.StoreDamaged:
            return [], set(), None
        frames = []
        for pack in packs:
            for unit, row in zip(pack.numbers.tolist(), pack.matrix, strict=True):
                environment = table.environments[table.units[unit].environment]
                frames.append(lines.Frame(unit, environment, pack.schema.data, row.tobytes()))
        return frames, set(table.units), 0

    def _of_segment(self, file: Path) -> Salvaged:
        frames: list[lines.Frame] = []
        named, nameless = set(), 0
        for record in _records(file):
            unit = record.get("unit")
            if record.get("kind") in ("start", "schema", "environment"):
                continue
            if type(unit) is not int:
                nameless += 1
                continue
            named.add(unit)
            with contextlib.suppress(disk.StoreDamaged), disk.trusting_nothing(file, ""):
                block, schema = base64.b64decode(record["data"], validate=True), self.schemas[record["schema"]]
                digest = digest_of(self.run, unit, schema.id, record["environment"], block)
                if digest == record["digest"] and len(block) == schema.size:
                    environment = self.environments.get(record["environment"], UNKNOWN)
                    frames.append(lines.Frame(unit, environment, schema.data, block))
        return frames, named, nameless


def is_table(file: Path) -> bool:
    """Tell a table from a segment."""
    return file.name.startswith("table-")


def is_damaged(file: Path, run: str) -> bool:
    """Tell whether a reader refuses a file."""
    try:
        if is_table(file):
            Table(file, run).load()
        else:
            reader = lines.SegmentReader(file, run)
            for unit, entry in reader.scan():
                reader.load({unit: entry})
    except disk.StoreDamaged:
        return True
    return False


def _records(file: Path) -> Iterator[dict[str, Json]]:
    """Yield the lines of a segment; of one that is no record, what it still says of its unit."""
    with contextlib.suppress(disk.StoreDamaged), disk.open_bounded(file, lines.LARGEST_SEGMENT) as opened:
        while text := opened.readline(lines.LARGEST_LINE):
            try:
                yield lines.parse(text)
            except (ValueError, TypeError):
                number = re.search(rb'"unit":(\d{1,18}),', text)
                yield {"unit": int(number[1])} if number else {}
