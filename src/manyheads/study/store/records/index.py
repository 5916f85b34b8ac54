"""All stored units of a run: the tables and the segments of its folder, read together."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from manyheads._trees import T
from manyheads.study.store.disk import StoreDamaged, no_link
from manyheads.study.store.equality import differences
from manyheads.study.store.records.schema import Schema
from manyheads.study.store.records.segments import DAMAGED, SEALED, SUFFIX, Entry, SegmentReader
from manyheads.study.store.records.table import Pack, Table, write_table

ATTEMPTS = 50  # to read a folder that others are compacting
TABLE = re.compile(r"table-[0-9a-f]{16}\.zarr\.zip")


class Index:
    """Stored units of a run by number; `refresh` reads what was added since the last call."""

    def __init__(self, path: Path, run: str):
        self.path, self.run = path, run
        self._forget()

    def _forget(self) -> None:
        self.units: dict[int, Entry] = {}
        self.twice: list[tuple[int, Entry, Entry]] = []
        self.schemas: dict[str, Schema] = {}
        self.environments: dict[str, dict[str, object]] = {}
        self.tables: dict[str, Table] = {}
        self.segments: dict[str, SegmentReader] = {}

    def refresh(self) -> "Index":
        """Read what is new."""
        return self._steadily(self._refresh)

    def load(self, numbers: Iterable[int] | None = None) -> list[Pack]:
        """Return units, all by default, grouped by schema in the order of their first; every digest is checked."""
        chosen = None if numbers is None else set(numbers)
        return self._steadily(lambda: self._load(set(self.units) if chosen is None else chosen))

    def compact(self) -> int:
        """Move all units into one table and return how many there are.

        Segments are renamed before they are read, and whoever writes looks afterwards whether its file has still its
        name: a unit was read, or it is written again. A crash leaves units twice, which readers accept.
        """
        for path in self.files()[0]:
            if path.suffix == SUFFIX:
                path.rename(path.with_name(path.name + SEALED))
        sealed = [path for path in self.files()[0] if path.name.endswith(SEALED)]
        packs = self.refresh().load()
        before = [self.path / name for name in self.tables]
        if not packs or (len(before) == 1 and not sealed):
            return len(self.units)
        written = write_table(self.path, self.run, packs, self.units, self.environments)
        table = Table(written, self.run)
        for kept, read in zip(packs, table.load(), strict=True):
            same = (kept.numbers == read.numbers).all() and (kept.matrix == read.matrix).all()
            if not same or kept.schema.id != read.schema.id:
                raise StoreDamaged(f"{written} was not read back as it was written: the disk is failing")
        for path in [*sealed, *(path for path in before if path != written)]:
            path.unlink(missing_ok=True)
        self._forget()
        return len(self.refresh().units)

    def files(self) -> tuple[list[Path], list[Path]]:
        """Return segments, then tables: a compaction removes a segment only when its table is there.

        Files that a repair has renamed are left out.
        """
        folder = no_link(self.path / "segments")
        if folder.exists() and not folder.is_dir():
            raise StoreDamaged(f"{folder} is no folder; move it away")
        found = sorted(folder.iterdir()) if folder.exists() else []
        segments = [path for path in found if not path.name.endswith(DAMAGED)]
        if strange := [path for path in segments if not path.name.endswith((SUFFIX, SUFFIX + SEALED))]:
            raise StoreDamaged(f"{strange[0]} is no segment of a run; move it away")
        return segments, sorted(path for path in self.path.glob("table-*") if TABLE.fullmatch(path.name))

    def _refresh(self) -> "Index":
        segments, tables = self.files()
        for path in tables:
            if path.name not in self.tables:
                table = self.tables[path.name] = Table(path, self.run)
                self._take(table, table.units.items(), replace=True)
        for path in segments:
            key = path.name.removesuffix(SEALED)
            reader = self.segments.setdefault(key, SegmentReader(path, self.run))
            self._take(reader, reader.scan(), replace=False)
        return self

    def _take(self, source: Table | SegmentReader, found: Iterable[tuple[int, Entry]], replace: bool) -> None:
        self.schemas |= source.schemas
        self.environments |= source.environments
        for unit, entry in found:
            known = self.units.get(unit)
            if known is not None and known.digest != entry.digest:
                self.twice.append((unit, known, entry))
            elif known is None or replace:
                self.units[unit] = entry

    def _load(self, wanted: set[int]) -> list[Pack]:
        places: dict[str, dict[int, Entry]] = {}
        rows: dict[str, list[int]] = {}
        for unit in sorted(wanted):
            entry = self.units[unit]
            places.setdefault(entry.place, {})[unit] = entry
            rows.setdefault(entry.schema, []).append(unit)
        packs = {}
        for name, numbers in rows.items():
            schema = self.schemas[name]
            packs[name] = Pack(schema, np.asarray(numbers, np.int64), np.empty((len(numbers), schema.size), np.uint8))
        for place, entries in places.items():
            if place in self.tables:
                for pack in self.tables[place].load():
                    _copy(pack, packs.get(pack.schema.id), entries)
            else:
                for unit, block in self.segments[place].load(entries).items():
                    pack = packs[entries[unit].schema]
                    pack.matrix[np.searchsorted(pack.numbers, unit)] = np.frombuffer(block, np.uint8)
        for unit, first, second in self.twice:
            if unit in wanted:
                self._compare(unit, first, second)
        return list(packs.values())

    def _compare(self, unit: int, first: Entry, second: Entry) -> None:
        """Refuse a unit that was computed twice with different results; measured times may differ."""
        datasets = [self._block(unit, entry) for entry in (first, second)]
        if found := differences(*datasets):
            under = " and ".join(str(self.environments[entry.environment]) for entry in (first, second))
            raise StoreDamaged(
                f"{self.path}: unit {unit} was computed twice with different results ({', '.join(found)}), in "
                f"{first.place} and {second.place}, under {under}; move one of these files away"
            )

    def _block(self, unit: int, entry: Entry) -> Any:
        schema = self.schemas[entry.schema]
        if entry.place not in self.tables:
            return schema.dataset(self.segments[entry.place].load({unit: entry})[unit])
        pack = next(pack for pack in self.tables[entry.place].load() if pack.schema.id == schema.id)
        return schema.dataset(pack.matrix[np.searchsorted(pack.numbers, unit)])

    def _steadily(self, action: Callable[[], T]) -> T:
        """Repeat what met a file that a compaction has taken away; what it held lies in the new table."""
        for attempt in range(ATTEMPTS):
            try:
                if attempt:
                    self._refresh()
                return action()
            except FileNotFoundError:
                self._forget()
        raise StoreDamaged(f"{self.path}: files vanish while they are read; is something else removing them?")


def _copy(source: Pack, target: Pack | None, wanted: Iterable[int]) -> None:
    """Copy the rows of the wanted units that have this schema."""
    if target is not None:
        common, rows, _ = np.intersect1d(source.numbers, np.asarray(list(wanted)), return_indices=True)
        target.matrix[np.searchsorted(target.numbers, common)] = source.matrix[rows]
