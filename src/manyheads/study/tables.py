"""Data of a study: records of named arrays, and trained systems over the axes of the grid."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from manyheads._extras import NDArray, np
from manyheads._extras import xarray as xr
from manyheads._json import Json
from manyheads.errors import UsageError
from manyheads.study.cells import Cell

# Name: dimensions, values, long name and, unless it is 1, the unit; None for a text or a truth value, which has none.
# A name that is its own only dimension is a coordinate. A measured time has a table of attributes as its third entry.
Record = Mapping[str, tuple[Any, ...]]


def record(values: object, cells: Sequence[Cell] = ()) -> Any:
    """Return a record as a dataset; a dimension named as an axis of the grid has its values as coordinates.

    Examples
    --------
    >>> found = record({"loss": ("step", [2.0, 0.5], "training loss", "nat"), "step": ("step", [0, 1], "updates")})
    >>> found["loss"].attrs, found["step"].attrs
    ({'long_name': 'training loss', 'units': 'nat'}, {'long_name': 'updates'})
    """
    if not isinstance(values, Mapping) or isinstance(values, xr.Dataset):
        return values
    data, coords = {}, {}
    for name, entry in values.items():
        if not (isinstance(entry, tuple) and len(entry) in (3, 4)):
            kind = type(entry).__name__
            raise UsageError(f"{name!r} is a {kind}: expected (dimensions, values, label, perhaps a unit)")
        dims, array, label, *units = entry
        if dims in (name, (name,)):
            unit = {"units": units[0]} if units and units[0] else {}
            coords[name] = (name, array, {"long_name": label} | unit)
        else:
            unit = {} if units == [None] else {"units": (*units, "1")[0]}
            data[name] = (dims, array, label if isinstance(label, dict) else {"long_name": label} | unit)
    found = xr.Dataset(data, coords)
    for axis in cells[0] if cells else ():
        places = list(dict.fromkeys(cell[axis] for cell in cells))
        if axis in found.dims and axis not in found.coords and found.sizes[axis] == len(places):
            found = found.assign_coords({axis: places})
    return found


def on_grid(trained: xr.Dataset, theory: xr.Dataset) -> xr.Dataset:
    """Return trained systems over (replicate, axes of the grid, own dimensions) instead of over cells.

    Where the grid is no product of its axes, numbers are NaN and texts empty; where it is one, arrays are views. The
    axes are named in the attribute `axes`, and labelled as the prediction labels them.
    """
    if "cell" not in trained.dims:
        return trained
    names = [str(name) for name, found in trained.coords.items() if found.dims == ("cell",) and name != "cell"]
    values = {name: list(dict.fromkeys(trained[name].values.tolist())) for name in names}
    at = {name: {value: place for place, value in enumerate(found)} for name, found in values.items()}
    places = tuple(np.array([at[name][value] for value in trained[name].values.tolist()]) for name in names)
    shape = tuple(map(len, values.values()))
    labels = {name: theory[name].attrs if name in theory.coords else {} for name in names}
    coords = {name: (name, list(places), labels[name]) for name, places in values.items()}

    def spread(array: xr.Variable) -> tuple[tuple[Hashable, ...], np.ndarray, Mapping[str, Json]]:
        rows = array.transpose("cell", ...)
        own = [dim for dim in rows.dims if dim not in ("cell", "replicate")]
        lead = ["replicate"] if "replicate" in rows.dims else []
        table = xr.Variable((*names, *rows.dims[1:]), _on_axes(rows.values, places, shape))
        return (*lead, *names, *own), table.transpose(*lead, *names, *own).values, array.attrs

    plain = trained.drop_vars([*names, "cell"], errors="ignore")
    found: dict[str, Any] = {
        str(name): spread(array) if "cell" in array.dims else array for name, array in plain.variables.items()
    }
    coords |= {str(name): found.pop(str(name)) for name in plain.coords}
    return xr.Dataset(found, coords, trained.attrs | {"axes": " ".join(names)})


def theory_on_grid(predicted: xr.Dataset, cells: Sequence[Cell]) -> xr.Dataset:
    """Return a prediction over the axes of the grid where it has a dimension of the names of all cells.

    As it is where it has other values along an axis too.
    """
    slugs = [cell.slug for cell in cells]
    for name, places in predicted.coords.items():
        if places.dims == (name,) and places.values.tolist() == slugs and not {*cells[0]} & {*predicted.dims}:
            axes = {axis: ("cell", [cell[axis] for cell in cells]) for axis in cells[0]}
            return on_grid(predicted.rename({name: "cell"}).assign_coords(axes), predicted)
    return predicted


def _on_axes(rows: NDArray[Any], places: tuple[NDArray[np.intp], ...], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return rows over cells as an array over axes, a view where cells are their product in order."""
    full = int(np.prod(shape)) == len(rows)
    if full and (not shape or (np.ravel_multi_index(places, shape) == np.arange(len(rows))).all()):
        return rows.reshape(*shape, *rows.shape[1:])
    missing: Any = "" if rows.dtype.kind == "U" else np.nan
    kind = rows.dtype if full or rows.dtype.kind in "fcU" else float
    found = np.full((*shape, *rows.shape[1:]), missing if not full else rows.flat[0], kind)
    found[places] = rows
    return found
