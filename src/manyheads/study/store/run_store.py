"""The store: one folder a run, one Zarr group a unit, complete or absent, with the sha256 of every file beside it.

Layout (Zarr v3)::

    runs/<study>/<hash>/run.json                      identity, layout, source, versions
                        predicted/<draw>/data.zarr    one prediction
                        units/<cell>/<replicate>/     one unit of work:
                            data.zarr                   what was measured
                            manifest.json               the sha256 of every file of it
                        summary.json                  verdicts and panels of the last completed comparison

A unit is written to a temporary sibling and renamed: a killed process leaves nothing half-written under a final
name, and of two processes that finish the same unit the first one wins. A missing, altered or added file is found
when the run is opened; a damaged run is named and left untouched.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.errors import FileRefused, UsageError
from manyheads.study.base import Study
from manyheads.study.sources import Source
from manyheads.study.store.disk import (
    StoreDamaged,
    StoreFull,
    hash_files,
    is_abandoned,
    list_files,
    printable,
    read_json,
    read_signed,
    room_on_disk,
    temporary_beside,
    trusting_nothing,
    write_json,
    write_signed,
)
from manyheads.study.store.identity import fingerprint, fingerprint_of, identity
from manyheads.study.store.provenance import class_path, command_of, versions
from manyheads.study.store.summary import Summary
from manyheads.study.store.text_codes import decode_texts, encode_texts
from manyheads.study.store.units import Layout, Unit
from manyheads.study.store.whitelist import check_arrays

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["RunStore", "StoreDamaged", "StoreFull", "find_paths", "find_runs"]

DATA, MANIFEST = "data.zarr", "manifest.json"
HEADER = ("study", "revision", "configuration", "inputs", "seed", "class", "command", "claim", "source", "versions")
TABLES = ("configuration", "inputs", "source", "versions")
FORMAT = 1
UNIT = "manyheads_unit"  # attribute of a unit: the run, cell and replicate that it belongs to
NAMED = "named"  # in run.json: every unit of this run has that attribute; older runs lack it


class RunStore:
    """One run on disk: the units of one study with one configuration and one seed.

    Parameters
    ----------
    path
        The run's folder, ``<root>/<study>/<hash>``.

    Raises
    ------
    FileRefused
        `path` holds no run.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        remedy = "delete the run's folder to compute it again"
        self.header = read_signed(self.path / "run.json", "no run is stored here", remedy)
        written = self.header.get("format", FORMAT)
        if type(written) is not int:  # True == 1
            raise StoreDamaged(f"{self.path / 'run.json'}: the format {printable(written)} is no integer; {remedy}")
        if written != FORMAT:
            raise FileRefused(
                f"{self.path}: written by a newer manyheads (format {printable(written)}); this one reads format "
                f"{FORMAT}: upgrade manyheads"
            )
        with trusting_nothing(self.path / "run.json", remedy):
            _check_types(self.header)
            self.layout = Layout.from_json(self.header["layout"])

    @classmethod
    def create(cls, root: str | os.PathLike[str], study: Study, seed: int) -> RunStore:
        """Open the run of `study` and `seed` below `root`, and make it if it is not there."""
        path = Path(root) / study.name / fingerprint(study, seed)
        if not (path / "run.json").exists():
            with room_on_disk(path):
                path.mkdir(parents=True, exist_ok=True)
                about = {
                    "class": class_path(type(study)),
                    "command": command_of(study),
                    "claim": study.claim,
                    "source": dataclasses.asdict(study.source),
                    "layout": Layout.of(study).to_json(),
                    "versions": versions(),
                    "units": NAMED,
                }
                write_signed(path / "run.json", identity(study, seed) | about)
        run = cls(path)
        asked = identity(study, seed)
        other = [name for name, value in asked.items() if run.header[name] != value]
        other += ["layout"] if run.layout != Layout.of(study) else []
        if other:
            raise StoreDamaged(f"{path} holds another run (its {other[0]} differs); move the folder away and run again")
        run.sweep()
        return run

    def unit_path(self, unit: Unit) -> Path:
        """Return where a unit is stored."""
        folder = self.path / "predicted" if unit.cell is None else self.path / "units" / unit.cell.slug
        return folder / unit.slug

    def __contains__(self, unit: Unit) -> bool:
        return self.unit_path(unit).is_dir()

    def write(self, unit: Unit, dataset: xr.Dataset) -> bool:
        """Store a unit; return False when another process stored it first."""
        final = self.unit_path(unit)
        temporary = temporary_beside(final)
        with room_on_disk(final):
            try:
                temporary.mkdir(parents=True)
                named = encode_texts(dataset).assign_attrs({UNIT: self._name(unit)})
                named.to_zarr(temporary / DATA, mode="w-", zarr_format=3, consolidated=False)
                write_json(temporary / MANIFEST, hash_files(temporary, but=MANIFEST))
                os.rename(temporary, final)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and final.is_dir():
                    return False
                raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return True

    def read(self, unit: Unit) -> xr.Dataset:
        """Return a stored unit after checking every one of its files."""
        import xarray as xr

        path = self.unit_path(unit)
        self.check(path)
        with trusting_nothing(path, "delete this folder to compute it again"):
            # Units are words for people: "days" is no reason to turn a number into a date.
            how: Any = {"consolidated": False, "chunks": None, "decode_times": False, "zarr_format": 3}
            with xr.open_zarr(path / DATA, **how) as opened:
                dataset = decode_texts(opened.load())
        name = dataset.attrs.pop(UNIT, None if self.header.get("units") == NAMED else self._name(unit))
        if name != self._name(unit):
            raise StoreDamaged(
                f"{path} holds {printable(name or 'a unit without a name')} instead of {self._name(unit)}; delete this "
                "folder to compute it again"
            )
        return dataset

    def _name(self, unit: Unit) -> str:
        """Return what a unit is called in its own file: its run, cell and replicate."""
        return f"{self.header['study']} {fingerprint_of(self.header)}, {unit}"

    def check(self, path: Path) -> None:
        """Compare a unit's files with its manifest, and its metadata with the whitelist."""
        remedy = f"the run is left untouched; delete {path} to compute this unit again"
        inside = Path(os.path.realpath(self.path)) / path.relative_to(self.path)
        if Path(os.path.realpath(path)) != inside:
            raise StoreDamaged(f"{path} lies behind a symbolic link, out of the store; {remedy}")
        if not path.is_dir():
            raise StoreDamaged(f"{path} is missing: the run states a unit that is not stored; run it again")
        names = set(list_files(path))
        if MANIFEST not in names:
            raise StoreDamaged(f"{path / MANIFEST} is missing; {remedy}")
        recorded = read_json(path / MANIFEST, "the unit has no manifest")
        if not isinstance(recorded, dict):
            raise StoreDamaged(f"{path / MANIFEST} cannot be read (it is no table of files); {remedy}")
        for name in sorted({*recorded, *names} - {MANIFEST}):
            if name not in names:
                raise StoreDamaged(f"{path / name} is missing; {remedy}")
            if name not in recorded or not name.startswith(f"{DATA}/"):
                raise StoreDamaged(f"{path / name} does not belong to the unit; {remedy}")
        for name, digest in hash_files(path, but=MANIFEST).items():
            if recorded[name] != digest:
                raise StoreDamaged(f"{path / name} has been altered (its sha256 differs); {remedy}")
        with trusting_nothing(path / DATA, remedy):
            check_arrays(path / DATA)

    def finished(self) -> list[Path]:
        """Return the folders of all stored units, predictions included; other folders belong to no unit of this run."""
        predicted = [path for path in self.path.glob("predicted/[0-9]*") if self.layout.knows(None, path.name)]
        trained = self.path.glob("units/*/[0-9]*")
        return sorted([*predicted, *(path for path in trained if self.layout.knows(path.parent.name, path.name))])

    def verify(self) -> int:
        """Check every stored unit and return how many there are."""
        for path in self.finished():
            self.check(path)
        return len(self.finished())

    def leftovers(self) -> list[Path]:
        """Return temporary folders of processes that are gone from this machine."""
        for folder in (self.path / "predicted", self.path / "units", *self.path.glob("units/*")):
            if folder.is_symlink():
                raise StoreDamaged(f"{folder} is a symbolic link; a store holds none")
        # Level by level: a walk of the whole tree would enter folders that another process is renaming.
        found = [path for below in ("", "predicted/", "units/*/") for path in self.path.glob(f"{below}.*.tmp")]
        return [path for path in found if is_abandoned(path)]

    def sweep(self) -> int:
        """Remove the leftovers of killed processes and return how many there were."""
        abandoned = self.leftovers()
        for path in abandoned:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return len(abandoned)

    def write_summary(self, summary: Summary) -> None:
        """Store what the comparison gave, with its sha256, in one atomic step."""
        write_signed(self.path / "summary.json", summary.to_json())

    def summary(self) -> Summary | None:
        """Return what the last comparison gave, None before there was one."""
        path, remedy = self.path / "summary.json", "run the same command again to renew it"
        if not path.exists() and not path.is_symlink():
            return None
        data = read_signed(path, "the summary cannot be read", remedy)
        with trusting_nothing(path, remedy):
            summary = Summary.from_json(data)
            for unit in self.layout.units(summary.replicates):
                if unit not in self:
                    raise StoreDamaged(
                        f"{self.unit_path(unit)} is missing: the summary is of {summary.replicates} replicates; "
                        f"{remedy}"
                    )
        return summary


def _check_types(header: dict[str, Any]) -> None:
    """Raise the errors of a header whose entries are missing or of another type."""
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


def stored_source(header: dict[str, Any]) -> Source:
    """Return the publication that a stored header names, its texts as they may be shown."""
    shown: dict[str, Any] = {
        name: printable(text) if isinstance(text, str) else text for name, text in header["source"].items()
    }
    with trusting_nothing(Path("run.json"), "its source cannot be cited"):
        try:
            return Source(**shown)
        except UsageError:  # an older run, whose identifier has a form that is refused today
            return Source(**shown | {"identifier": ""})


def find_paths(root: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of all runs at or below a folder, sorted; none of them is opened."""
    paths = []
    for folder, below, files in os.walk(root):
        if "run.json" in files:
            paths.append(Path(folder))
            below.clear()  # a run holds no other, and what is in it may be renamed by a process at work
    if not paths:
        raise FileRefused(f"{root} holds no run: give the folder that was passed as --store, or one run's own folder")
    return sorted(paths)


def find_runs(root: str | os.PathLike[str]) -> list[RunStore]:
    """Return all runs at or below a folder, by path."""
    return [RunStore(path) for path in find_paths(root)]
