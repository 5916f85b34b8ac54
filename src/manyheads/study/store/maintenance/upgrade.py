"""Upgrade of a run from format 1: its units in one table, compared bit for bit with the folders that they come from."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from manyheads._settings import NUMBERS
from manyheads.study.store.disk import StoreDamaged, write_signed
from manyheads.study.store.equality import unequal_bits
from manyheads.study.store.leases import Launch
from manyheads.study.store.records.index import Index
from manyheads.study.store.records.schema import Schema, digest_of, identify, pack
from manyheads.study.store.records.segments import FORMAT, Entry
from manyheads.study.store.records.table import Pack, write_table
from manyheads.study.store.run_store import RunStore

KEPT = ".format1"  # folder of the old units
OLD_FOLDERS = ("units", "predicted")


def upgrade(path: Path, drop: bool = False) -> int:
    """Rewrite a run of format 1 in format 2 and return its number of units; 0 if it is of format 2 already.

    The new `run.json` is written last: until then the run is one of format 1, and afterwards one of format 2. The old
    folders are moved to ``.format1``, or removed if `drop` says so; those of a killed upgrade, too.
    The run's hash stays.

    Raises
    ------
    AtWork
        Somebody works on the run.
    StoreDamaged
        A unit is damaged, or was not read back to the same bits.
    """
    runs = RunStore(path)
    if runs.format != 1:
        if any((path / name).exists() for name in OLD_FOLDERS):  # an upgrade was killed after it wrote run.json
            with Launch(path) as launch:
                launch.refuse_others("upgrade it")
                _put_away(path, drop)
        return 0
    with Launch(path) as launch:
        launch.refuse_others("upgrade it")
        runs.folders.refuse_links()
        numbers = sorted(runs.numbers())
        environment = runs.header["versions"] | {"recorded": "run"}
        rows: dict[str, list[tuple[int, bytes]]] = {}
        schemas: dict[str, Schema] = {}
        units: dict[int, Entry] = {}
        for number in numbers:
            unit = runs.layout.unit(number)
            data, block = pack(runs.read(unit))
            schema = schemas.setdefault(identify(data), Schema(data))
            rows.setdefault(schema.id, []).append((number, block))
            written = (runs.folders.unit_path(unit) / "manifest.json").stat().st_mtime_ns
            names = (schema.id, identify(environment))
            units[number] = Entry("", 0, 0, *names, digest_of(runs.run, number, *names, block), written)
        packs = [
            Pack(
                schemas[name],
                np.asarray([number for number, _ in found], np.int64),
                np.frombuffer(b"".join(block for _, block in found), np.uint8).reshape(len(found), schemas[name].size),
            )
            for name, found in rows.items()
        ]
        if packs:
            write_table(path, runs.run, packs, units, {identify(environment): environment})
        _compare(runs)
        header = {name: value for name, value in runs.header.items() if name not in ("units", "format")}
        write_signed(path / "run.json", header | {"format": FORMAT, "settings": NUMBERS})
        _put_away(path, drop)
    return len(numbers)


def _put_away(path: Path, drop: bool) -> None:
    """Move the old folders to ``.format1``, or remove them."""
    for name in OLD_FOLDERS:
        if (path / name).exists():
            (path / KEPT).mkdir(exist_ok=True)
            (path / name).rename(path / KEPT / name)
    if drop:
        shutil.rmtree(path / KEPT, ignore_errors=True)


def _compare(runs: RunStore) -> None:
    """Compare what the table gives back with the folders, measured times and attributes included."""
    index = Index(runs.path, runs.run).refresh()
    for stored in index.load():
        for row, number in enumerate(stored.numbers.tolist()):
            unit = runs.layout.unit(number)
            if found := unequal_bits(runs.read(unit), stored.schema.dataset(stored.matrix[row])):
                raise StoreDamaged(f"{runs.path}, {unit}: {found} differ in the table; the old units are kept")
    if set(index.units) != runs.numbers():
        raise StoreDamaged(f"{runs.path}: the table has other units than the folders; the old units are kept")
