"""Export of a finished run: the tree that `open_run` returns, as a Zarr folder or a netCDF file of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import warnings
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from manyheads._extras import xarray as xr
from manyheads.errors import ExtraMissing, UsageError
from manyheads.study.execution.runner import open_run
from manyheads.study.store.disk import room_on_disk, temporary_beside

NETCDF = {"netCDF4": "netcdf4", "h5netcdf": "h5netcdf"}  # packages that write groups, and their names in xarray


def export(path: Path, out: Path) -> None:
    """Write a finished run to `out`, a Zarr v3 folder (``.zarr``) or a netCDF file (``.nc``), in one atomic step.

    UsageError if `out` exists or has another ending, or netCDF has no type for a variable; ExtraMissing without a
    package that writes netCDF with groups.
    """
    if out.suffix not in (".zarr", ".nc"):
        raise UsageError(f"{out}: expected a name that ends in .zarr or .nc")
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists; give another name, or remove it first")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder")
    if not (path / "run.json").exists():
        raise UsageError(f"{path}: expected the folder of one run, as 'manyheads runs list' names it")
    engine = _engine() if out.suffix == ".nc" else None
    tree, temporary = open_run(path), temporary_beside(out)
    with room_on_disk(out):
        try:
            if engine:
                _write_netcdf(tree, temporary, engine)
            else:
                _write_zarr(tree, temporary)
            temporary.rename(out)
        finally:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink()


def _write_zarr(tree: xr.DataTree, path: Path) -> None:
    import zarr

    # A chunk of negative zeros is not empty; texts and consolidated metadata are not in the final specification.
    with zarr.config.set({"array.write_empty_chunks": True}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree.to_zarr(path, mode="w-", zarr_format=3, encoding=_unmasked(tree))


def _write_netcdf(tree: xr.DataTree, path: Path, engine: Any) -> None:
    for node in tree.subtree:
        node.attrs = _plain(node.attrs)
        for name, variable in node.variables.items():
            if variable.dtype.kind == "c" or variable.dtype.name == "float16":
                raise UsageError(f"{node.path}/{name} is {variable.dtype}, which netCDF cannot hold: export to .zarr")
            variable.attrs = _plain(variable.attrs)
    tree.to_netcdf(path, mode="w", format="NETCDF4", engine=engine, encoding=_unmasked(tree))


def _unmasked(tree: xr.DataTree) -> dict[str, dict[str, dict[str, None]]]:
    """Return the encoding under which NaN is a number like the others."""
    plain: dict[str, None] = {"_FillValue": None}
    return {
        node.path: {str(name): plain for name, value in node.variables.items() if value.dtype.kind == "f"}
        for node in tree.subtree
    }


def _plain(attributes: dict[Hashable, object]) -> dict[Hashable, object]:
    """Return attributes as netCDF holds them: numbers and texts, all else as JSON text."""
    return {
        name: value
        if type(value) in (float, str) or (type(value) is int and -(2**63) <= value < 2**63)
        else json.dumps(value)
        for name, value in attributes.items()
    }


def _engine() -> str:
    for package, engine in NETCDF.items():
        if importlib.util.find_spec(package):
            return engine
    raise ExtraMissing("netCDF with groups needs netCDF4 or h5netcdf: pip install h5netcdf, or export to .zarr")
