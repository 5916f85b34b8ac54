"""Repair of a run: good units of damaged files are copied to a new segment, and the damaged files are renamed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from manyheads.study.store.leases import Launch
from manyheads.study.store.records.index import Index
from manyheads.study.store.records.salvage import Known, is_damaged
from manyheads.study.store.records.segments import DAMAGED, SegmentWriter
from manyheads.study.store.run_store import RunStore


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
        known, writer = Known(files, runs.run), SegmentWriter(path, runs.run, launch.owner)
        for file in damaged:
            frames, named, nameless = known.salvage(file)
            for frame in frames:
                writer.append(frame)
            found.append((file.with_name(file.name + DAMAGED), len(frames), named, nameless))
        writer.close()
        for file, (renamed, *_) in zip(damaged, found, strict=True):
            file.rename(renamed)
        stored = set(Index(path, runs.run).refresh().units)
    return [Repaired(renamed, kept, sorted(named - stored), nameless) for renamed, kept, named, nameless in found]
