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
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.errors import FileRefused
from manyheads.study.base import Study
from manyheads.study.store.disk import (
    StoreDamaged,
    StoreFull,
    hash_files,
    is_abandoned,
    read_signed,
    room_on_disk,
    temporary_beside,
    write_json,
    write_signed,
)
from manyheads.study.store.identity import fingerprint, identity
from manyheads.study.store.provenance import class_path, command_of, versions
from manyheads.study.store.text_codes import decode_texts, encode_texts
from manyheads.study.store.units import Layout, Unit

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["RunStore", "StoreDamaged", "StoreFull", "find_paths", "find_runs"]

DATA, MANIFEST = "data.zarr", "manifest.json"
HEADER = ("study", "revision", "configuration", "inputs", "seed", "class", "command", "claim", "source", "versions")


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
        try:
            self.layout = Layout.from_json(self.header["layout"])
            missing = [name for name in HEADER if name not in self.header]
            if missing:
                raise KeyError(*missing)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreDamaged(f"{self.path / 'run.json'} does not describe a run ({error!r})") from error

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
                }
                write_signed(path / "run.json", identity(study, seed) | about)
        run = cls(path)
        run.sweep()
        return run

    def unit_path(self, unit: Unit) -> Path:
        """Return where a unit is stored."""
        folder = self.path / "predicted" if unit.cell is None else self.path / "units" / unit.cell.slug
        return folder / unit.slug

    def __contains__(self, unit: Unit) -> bool:
        return self.unit_path(unit).is_dir()

    def write(self, unit: Unit, dataset: xr.Dataset) -> bool:
        """Store a unit; return False when another process stored it first.

        Raises
        ------
        StoreFull
            The disk is full. Nothing under a final name has changed.
        """
        final = self.unit_path(unit)
        temporary = temporary_beside(final)
        with room_on_disk(final):
            try:
                temporary.mkdir(parents=True)
                encode_texts(dataset).to_zarr(temporary / DATA, mode="w-", zarr_format=3, consolidated=False)
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
        """Return a stored unit after checking every one of its files.

        Raises
        ------
        StoreDamaged
            A file is missing, altered, added or unreadable; nothing is changed.
        """
        import xarray as xr

        path = self.unit_path(unit)
        self.check(path)
        try:
            # Units are words for people: "days" is no reason to turn a number into a date.
            with xr.open_zarr(path / DATA, consolidated=False, chunks=None, decode_times=False) as dataset:
                return decode_texts(dataset.load())
        except (OSError, ValueError, KeyError) as error:
            raise StoreDamaged(f"{path} cannot be read ({error}); delete this folder to compute it again") from error

    def check(self, path: Path) -> None:
        """Compare a unit's files with its manifest.

        Raises
        ------
        StoreDamaged
            They differ.
        """
        remedy = f"the run is left untouched; delete {path} to compute this unit again"
        try:
            recorded = json.loads((path / MANIFEST).read_text())
            if not isinstance(recorded, dict):
                raise ValueError("it is no table of files")
        except (OSError, ValueError) as error:
            raise StoreDamaged(f"{path / MANIFEST} cannot be read ({error}); {remedy}") from error
        found = hash_files(path, but=MANIFEST)
        for name in sorted({*recorded, *found}):
            if name not in found:
                raise StoreDamaged(f"{path / name} is missing; {remedy}")
            if name not in recorded:
                raise StoreDamaged(f"{path / name} does not belong to the unit; {remedy}")
            if recorded[name] != found[name]:
                raise StoreDamaged(f"{path / name} has been altered (its sha256 differs); {remedy}")

    def finished(self) -> list[Path]:
        """Return the folders of all stored units, predictions included."""
        return sorted([*self.path.glob("predicted/[0-9]*"), *self.path.glob("units/*/[0-9]*")])

    def verify(self) -> int:
        """Check every stored unit and return how many there are.

        Raises
        ------
        StoreDamaged
            One of them is damaged.
        """
        for path in self.finished():
            self.check(path)
        return len(self.finished())

    def leftovers(self) -> list[Path]:
        """Return temporary folders of processes that are gone from this machine."""
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

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Store what the comparison gave, with its sha256, in one atomic step."""
        write_signed(self.path / "summary.json", summary)

    def summary(self) -> dict[str, Any] | None:
        """Return what the last comparison gave, None before there was one.

        Raises
        ------
        StoreDamaged
            It has been altered.
        """
        path = self.path / "summary.json"
        if not path.exists():
            return None
        return read_signed(path, "the summary cannot be read", "run the same command again to renew it")


def find_paths(root: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of all runs at or below a folder, sorted; none of them is opened.

    Raises
    ------
    FileRefused
        The folder does not exist or holds no run.
    """
    paths = []
    for folder, below, files in os.walk(root):
        if "run.json" in files:
            paths.append(Path(folder))
            below.clear()  # a run holds no other, and what is in it may be renamed by a process at work
    if not paths:
        raise FileRefused(f"{root} holds no run: give the folder that was passed as --store, or one run's own folder")
    return sorted(paths)


def find_runs(root: str | os.PathLike[str]) -> list[RunStore]:
    """Return all runs at or below a folder, by path.

    Raises
    ------
    FileRefused
        The folder does not exist, holds no run, or one of its runs does not say what it is.
    """
    return [RunStore(path) for path in find_paths(root)]
