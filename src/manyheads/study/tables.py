"""Datasets of a study: labelled variables, selected cells, and variables over the grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr


def dataset(variables: Mapping[str, tuple[Any, ...]], coords: Mapping[str, Any] | None = None) -> xr.Dataset:
    """Build a dataset whose variables and coordinates carry long names and units.

    Parameters
    ----------
    variables
        By name: dimensions, values, long name and, unless it is 1, the unit; None for a text, which has none.
    coords
        By name: values, long name and perhaps the unit, or values alone.

    Examples
    --------
    >>> found = dataset({"loss": ("step", [2.0, 0.5], "training loss", "nat")}, {"step": ([0, 1], "updates")})
    >>> found["loss"].attrs, found["step"].attrs
    ({'long_name': 'training loss', 'units': 'nat'}, {'long_name': 'updates'})
    """
    import xarray as xr

    return xr.Dataset(
        {
            name: (dims, values, {"long_name": label} | ({} if units == [None] else {"units": (*units, "1")[0]}))
            for name, (dims, values, label, *units) in variables.items()
        },
        {
            name: (name, given[0], dict(zip(("long_name", "units"), given[1:], strict=False)))
            if isinstance(given, tuple)
            else given
            for name, given in (coords or {}).items()
        },
    )


def select_cells(data: xr.Dataset, **values: Any) -> xr.Dataset:
    """Select the cells whose coordinates have the given values; a tuple stands for any of its values.

    Examples
    --------
    >>> import xarray as xr
    >>> data = xr.Dataset({"x": ("cell", [1, 2, 3])}, {"size": ("cell", [4, 8, 8]), "rate": ("cell", [0.1, 0.1, 0.2])})
    >>> select_cells(data, size=8)["x"].values.tolist(), select_cells(data, size=(4, 8), rate=0.1)["x"].values.tolist()
    ([2, 3], [1, 2])
    """
    import numpy as np

    chosen = np.ones(data.sizes["cell"], bool)
    for name, value in values.items():
        chosen &= np.isin(data[name].values, value)
    return data.isel(cell=np.flatnonzero(chosen))


def select_cell(data: xr.Dataset, **values: Any) -> xr.Dataset:
    """Select the first cell with the given values, replicates in front."""
    return select_cells(data, **values).isel(cell=0).transpose("replicate", ...)


def unstack(data: xr.Dataset, name: str) -> xr.DataArray:
    """Return a variable over the coordinates of the grid instead of over cells: (coordinates, replicate, its own)."""
    axes = [str(n) for n, c in data.coords.items() if c.dims == ("cell",) and n != "cell"]
    table = data[name].set_index(cell=axes)
    table = table.unstack("cell") if len(axes) > 1 else table.rename(cell=axes[0])
    order = {axis: list(dict.fromkeys(data[axis].values.tolist())) for axis in axes}
    own = [dim for dim in table.dims if dim not in (*axes, "replicate")]
    return table.sel(order).transpose(*axes, "replicate", *own)
