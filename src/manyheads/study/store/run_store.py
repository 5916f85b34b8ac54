"""The store: one folder a run.

Layout::

    runs/<study>/<hash>/run.json      identity, layout, settings, source, versions; signed
                        segments/     a run at work: JSON lines, one file for each process that writes
                        table-<hash>.zarr.zip   a finished run: all units in one file
                        leases/       which launch works on which units
                        failures/     the last failure of units that failed
                        summary.json  verdicts and panels of the last completed comparison; signed

Units are stored by the process that computed them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from manyheads._extras import xarray as xr
from manyheads._json import Json
from manyheads._settings import NUMBERS
from manyheads.errors import FileRefused, UsageError
from manyheads.study.base import Study
from manyheads.study.execution.units import Failure, Layout, Unit
from manyheads.study.panels import Panel, panel_from_json
from manyheads.study.sources import Source
from manyheads.study.store import disk
from manyheads.study.store.disk import StoreDamaged, StoreFull, no_link, printable, trusting_nothing
from manyheads.study.store.identity import fingerprint, fingerprint_of, identity
from manyheads.study.store.leases import Launch
from manyheads.study.store.provenance import class_path, command_of, versions
from manyheads.study.store.records.index import Index
from manyheads.study.store.records.segments import FORMAT, refuse_other_format
from manyheads.study.store.records.table import Pack
from manyheads.study.verdicts import Verdict

__all__ = ["RunStore", "StoreDamaged", "StoreFull", "find_paths", "find_runs"]

HEADER = ("study", "revision", "configuration", "inputs", "seed", "class", "command", "claim", "source", "versions")
TABLES = ("configuration", "inputs", "source", "versions")
CLAIMS = "claims"  # in run.json: the number of claims; absent in runs of older versions


@dataclasses.dataclass(frozen=True)
class Summary:
    """Result of the last comparison: systems compared in each cell, verdicts, and pictures of the report."""

    replicates: int
    verdicts: tuple[Verdict, ...]
    panels: tuple[Panel, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the summary as JSON can hold it."""
        parts = {name: [each.to_json() for each in getattr(self, name)] for name in ("verdicts", "panels")}
        return {"replicates": self.replicates} | parts

    @classmethod
    def from_json(cls, data: dict[str, Json]) -> Summary:
        """Rebuild a summary from `to_json`."""
        replicates = data["replicates"]
        if type(replicates) is not int or replicates < 1:
            raise ValueError(f"{replicates!r} replicates")
        verdicts, panels = map(Verdict.from_json, data["verdicts"]), map(panel_from_json, data["panels"])
        return cls(replicates, tuple(verdicts), tuple(panels))


class RunStore:
    """One run on disk, ``<root>/<study>/<hash>``: the units of one study with one configuration and one seed.

    FileRefused if the folder holds no run, or one of another format.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        remedy = "move this file away and run the same command again: stored units are kept"
        self.header = disk.read_signed(self.path / "run.json", "no run is stored here", remedy, disk.LARGEST_HEADER)
        refuse_other_format(self.header.get("format", 1), self.path / "run.json", remedy)
        with trusting_nothing(self.path / "run.json", remedy):
            self.layout = _check(self.header)
            self.run = fingerprint_of(self.header)

    @classmethod
    def create(cls, root: str | os.PathLike[str], study: Study, seed: int) -> RunStore:
        """Open the run of `study` and `seed` below `root`, and make it if it is not there.

        UsageError for a declaration that cannot be stored; StoreDamaged if the folder holds another run, or an altered
        one.
        """
        if not os.fspath(root):
            raise UsageError("store='' names no folder; '.' is the working folder")
        path = Path(root) / study.name / fingerprint(study, seed)
        if not (path / "run.json").exists():
            header = header_of(study, seed)
            try:
                _check(json.loads(json.dumps(header)))
            except (TypeError, ValueError) as error:
                raise UsageError(f"{study.name}: the declaration cannot be stored: {error}") from error
            with disk.room_on_disk(path):
                path.mkdir(parents=True, exist_ok=True)
                disk.write_signed(path / "run.json", header)
        run = cls(path)
        asked = identity(study, seed) | {"settings": NUMBERS}
        other = [name for name, value in asked.items() if run.header.get(name) != value]
        other += ["layout"] if run.layout != Layout.of(study) else []
        if other:
            raise StoreDamaged(f"{path} holds another run (its {other[0]} differs); move the folder away and run again")
        run.sweep()
        return run

    @cached_property
    def index(self) -> Index:
        """The stored units."""
        return Index(self.path, self.run)

    def numbers(self) -> set[int]:
        """Return the numbers of all stored units."""
        return set(self.index.refresh().units)

    def missing(self, replicates: int) -> list[int]:
        """Return the numbers of the units that a run of so many replicates lacks; no values are read."""
        stored = self.index.refresh().units
        return [number for number in range(self.layout.count(replicates)) if number not in stored]

    def __contains__(self, unit: Unit) -> bool:
        number = self.layout.number(unit)
        return number in self.index.units or number in self.index.refresh().units

    def read(self, unit: Unit) -> xr.Dataset:
        """Return a stored unit after checking it."""
        self._require(unit)
        (pack,) = self.load([self.layout.number(unit)])
        return pack.schema.dataset(pack.matrix[0])

    def load(self, numbers: Iterable[int] | None = None) -> list[Pack]:
        """Return units, all by default, grouped by their schemas, after checking them."""
        return self.index.refresh().load(numbers)

    def verify(self) -> int:
        """Check every stored unit and return how many there are."""
        return sum(len(pack.numbers) for pack in self.load())

    def compact(self) -> int:
        """Move all units into one table and return how many there are."""
        return self.index.compact()

    def environments(self) -> list[dict[str, Json]]:
        """Return what the stored units were computed under, with the number of units of each."""
        index = self.index.refresh()
        counts = Counter(entry.environment for entry in index.units.values())
        return [index.environments[name] | {"units": counts[name]} for name in sorted(counts)]

    def note_failure(self, unit: Unit, failure: Failure) -> None:
        """Keep the last failure of a unit, for `runs status`."""
        folder = no_link(self.path / "failures")
        with disk.room_on_disk(folder):
            folder.mkdir(exist_ok=True)
        disk.write_json(folder / f"{self.layout.number(unit)}.json", {"unit": str(unit), "what": failure.what})

    def failures(self) -> dict[int, str]:
        """Return the last failures of units that are not stored."""
        stored, found = self.numbers(), {}
        for path in sorted((self.path / "failures").glob("*.json")):
            if path.stem.isdecimal() and int(path.stem) not in stored:
                what = disk.read_json(path, "no failure")
                found[int(path.stem)] = str(what.get("what", "")) if isinstance(what, dict) else ""
        return found

    def leftovers(self) -> list[Path]:
        """Return temporary files and folders of processes that are gone from this machine."""
        # Level by level: a walk of the whole tree would enter folders that another process is renaming.
        found = [path for below in ("", "leases/", "failures/") for path in self.path.glob(f"{below}.*.tmp")]
        return [path for path in found if disk.is_abandoned(path)]

    def sweep(self) -> int:
        """Remove the leftovers of killed processes and return how many there were."""
        abandoned = self.leftovers()
        for path in abandoned:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        return len(abandoned)

    def remove(self) -> None:
        """Remove the run; AtWork if somebody works on it."""
        with Launch(self.path) as launch:
            launch.refuse_others("remove it")
            trash = self.path.with_name(f".trash-{uuid.uuid4().hex[:8]}")
            self.path.rename(trash)
        shutil.rmtree(trash)

    def write_summary(self, summary: Summary) -> None:
        """Store what the comparison gave, with its sha256, in one atomic step."""
        if self.header.get(CLAIMS) != (count := len(summary.verdicts)):  # a claim was added, or `compare` makes them
            self.header[CLAIMS] = count
            disk.write_signed(self.path / "run.json", self.header)
        data = summary.to_json()
        with trusting_nothing(self.path / "summary.json", "the study's claims cannot be stored"):
            Summary.from_json(data)
        disk.write_signed(self.path / "summary.json", data)

    def summary(self) -> Summary | None:
        """Return what the last comparison gave, None before there was one."""
        path, remedy = self.path / "summary.json", "run the same command again to renew it"
        if not path.exists() and not path.is_symlink():
            return None
        data = disk.read_signed(path, "the summary cannot be read", remedy)
        with trusting_nothing(path, remedy):
            summary = Summary.from_json(data)
            claims, count = self.header.get(CLAIMS), len(summary.verdicts)
            if not count or count != (claims or count):
                raise ValueError(f"{count} verdicts on {claims or 'the'} claims of the study")
        for unit in self.layout.units(summary.replicates):  # one after the other: a forger may state 1e18 of them
            self._require(unit, f"the summary is of {summary.replicates} replicates; {remedy}")
        return summary

    def _require(self, unit: Unit, why: str = "the run states a unit that is not stored; run it again") -> None:
        if unit not in self:
            raise StoreDamaged(f"{self.path}: {unit} is missing: {why}")


def header_of(study: Study, seed: int) -> dict[str, Json]:
    """Return what a new run's `run.json` states."""
    written = {"format": FORMAT, "settings": NUMBERS, "layout": Layout.of(study).to_json(), "versions": versions()}
    said = {"class": class_path(type(study)), "command": command_of(study), "claim": study.claim}
    # The number of claims is known when they are compared.
    return identity(study, seed) | written | said | {"source": dataclasses.asdict(study.source), CLAIMS: None}


def _check(header: dict[str, Json]) -> Layout:
    """Return the layout that a header states; raise the errors of one whose entries are missing or of another type."""
    for name in HEADER:
        kind = int if name in ("revision", "seed") else dict if name in TABLES else str
        if type(header[name]) is not kind:
            raise TypeError(f"{name} is a {type(header[name]).__name__}")
    if not re.fullmatch(r"[a-z0-9-]+(/[a-z0-9-]+)?", header["study"]):
        raise ValueError(f"the study is called {header['study']!r}")
    if strange := set(header["source"]) - {field.name for field in dataclasses.fields(Source)}:
        raise TypeError(f"the source has {sorted(strange)}")
    for name, value in header["source"].items():
        if type(value) is not (int if name == "year" else str):
            raise TypeError(f"the source's {name} is a {type(value).__name__}")
    for name in ("inputs", "versions"):
        if not all(isinstance(value, str) for value in header[name].values()):
            raise TypeError(f"{name} are no texts")
    if type(header.get(CLAIMS)) not in (int, type(None)):
        raise TypeError(f"claims is a {type(header[CLAIMS]).__name__}")
    return Layout.from_json(header["layout"])


def stored_source(header: dict[str, Json]) -> Source:
    """Return the publication that a stored header names, its texts as they may be shown."""
    shown: dict[str, Json] = header["source"]
    shown = {name: printable(text) if isinstance(text, str) else text for name, text in shown.items()}
    with trusting_nothing(Path("run.json"), "its source cannot be cited"):
        try:
            return Source(**shown)
        except UsageError:  # an older run, whose identifier has a form that is refused today
            return Source(**shown | {"identifier": ""})


def find_paths(root: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of all runs at or below a folder, sorted; none of them is opened."""
    paths = []
    for folder, below, files in os.walk(root):
        if "run.json" in files or "run.json" in below:
            paths.append(Path(folder))
            below.clear()  # a run holds no other, and what is in it may be renamed by a process at work
    if not paths:
        raise FileRefused(f"{root} holds no run: give the folder that was passed as --store, or one run's own folder")
    return sorted(paths)


def find_runs(root: str | os.PathLike[str]) -> list[RunStore]:
    """Return all runs at or below a folder, by path."""
    return [RunStore(path) for path in find_paths(root)]
