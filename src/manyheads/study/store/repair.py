"""Repair of a run: good units of damaged files are copied to a new segment, and the damaged files are renamed.

Good is what still has its digest, line by line or row by row.
"""

import base64
import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from manyheads._json import Json
from manyheads.study.store.disk import StoreDamaged, open_bounded, trusting_nothing
from manyheads.study.store.leases import Launch
from manyheads.study.store.records import segments as lines
from manyheads.study.store.records.index import Index
from manyheads.study.store.records.schema import Schema, digest_of, identify
from manyheads.study.store.records.table import Table
from manyheads.study.store.run_store import RunStore

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
    runs = RunStore(path)
    files = [file for kind in runs.index.files() for file in kind]
    damaged = [file for file in files if is_damaged(file, runs.run)]
    if not damaged:
        return []
    found = []
    with Launch(path) as launch:
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
                with contextlib.suppress(StoreDamaged):
                    table = Table(file, run, checked=False)
                    self.schemas |= table.schemas
                    self.environments |= table.environments
                continue
            for record in _records(file):
                with contextlib.suppress(StoreDamaged), trusting_nothing(file, ""):
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
        except StoreDamaged:
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
            with contextlib.suppress(StoreDamaged), trusting_nothing(file, ""):
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
    except StoreDamaged:
        return True
    return False


def _records(file: Path) -> Iterator[dict[str, Json]]:
    """Yield the lines of a segment; of one that is no record, what it still says of its unit."""
    with contextlib.suppress(StoreDamaged), open_bounded(file, lines.LARGEST_SEGMENT) as opened:
        while text := opened.readline(lines.LARGEST_LINE):
            try:
                yield lines.parse(text)
            except (ValueError, TypeError):
                number = re.search(rb'"unit":(\d{1,18}),', text)
                yield {"unit": int(number[1])} if number else {}
