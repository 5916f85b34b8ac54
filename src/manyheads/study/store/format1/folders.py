"""Units in format 1, read only: a folder a unit, with a Zarr group and the sha256 of each of its files.

Layout::

    predicted/<draw>/data.zarr         one prediction
    units/<cell>/<replicate>/data.zarr one unit
                    .../manifest.json  the sha256 of every file of it
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads._overview import printable
from manyheads.study.execution.units import Layout, Unit
from manyheads.study.store.disk import StoreDamaged, hash_files, list_files, read_json, trusting_nothing
from manyheads.study.store.format1.text_codes import decode_texts
from manyheads.study.store.format1.whitelist import check_arrays

if TYPE_CHECKING:
    import xarray as xr

DATA, MANIFEST = "data.zarr", "manifest.json"
NAME = "manyheads_unit"  # attribute of a unit: the run, cell and replicate that it belongs to


class Folders:
    """Stored units of a run in format 1.

    Parameters
    ----------
    path
        The run's folder.
    layout
        Its division into units.
    run
        The study's name and the run's fingerprint, as units have them in their names.
    named
        Whether every unit must have a name; those of older runs have none.
    """

    def __init__(self, path: Path, layout: Layout, run: str, named: bool):
        self.path, self.layout, self.run, self.named = path, layout, run, named

    def __contains__(self, unit: Unit) -> bool:
        return self.unit_path(unit).is_dir()

    def unit_path(self, unit: Unit) -> Path:
        """Return where a unit is stored."""
        folder = self.path / "predicted" if unit.cell is None else self.path / "units" / unit.cell.slug
        return folder / unit.slug

    def units(self) -> Iterator[Unit]:
        """Yield all stored units; other folders belong to no unit of this run."""
        for draw in range(self.layout.predictions or 1):
            if (unit := Unit(None, draw, draw)) in self:
                yield unit
        for cell in self.layout.cells:
            for path in sorted((self.path / "units" / cell.slug).glob("[0-9]*")):
                if self.layout.knows(cell.slug, path.name):
                    first = int(path.name.partition("-")[0])
                    yield Unit(cell, first, first + self.layout.chunk - 1)

    def read(self, unit: Unit) -> xr.Dataset:
        """Return a stored unit after checking every one of its files."""
        import xarray as xr

        path = self.unit_path(unit)
        self.check(unit)
        with trusting_nothing(path, "delete this folder to compute it again"):
            # Units are words for people: "days" is no reason to turn a number into a date.
            how: Any = {"consolidated": False, "chunks": None, "decode_times": False, "zarr_format": 3}
            with xr.open_zarr(path / DATA, **how) as opened:
                dataset = decode_texts(opened.load())
        expected = f"{self.run}, {unit}"
        name = dataset.attrs.pop(NAME, None if self.named else expected)
        if name != expected:
            raise StoreDamaged(
                f"{path} holds {printable(name or 'a unit without a name')} instead of {expected}; delete this folder "
                "to compute it again"
            )
        return dataset

    def check(self, unit: Unit) -> None:
        """Compare a unit's files with its manifest, and its metadata with the whitelist."""
        path = self.unit_path(unit)
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

    def refuse_links(self) -> None:
        """Refuse folders of units that are symbolic links."""
        for folder in (self.path / "predicted", self.path / "units", *self.path.glob("units/*")):
            if folder.is_symlink():
                raise StoreDamaged(f"{folder} is a symbolic link; a store holds none")
