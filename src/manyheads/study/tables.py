"""Datasets of a study: labelled variables, selected cells, and variables over the grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr


def labelled(variables: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, Any, dict[str, str]]]:
    """Attach long names and units to the variables of a dataset.

    Parameters
    ----------
    variables
        By name: dimensions, values, long name and, unless it is 1, the unit.

    Examples
    --------
    >>> labelled({"loss": ((), 0.5, "loss at the end", "nat")})
    {'loss': ((), 0.5, {'long_name': 'loss at the end', 'units': 'nat'})}
    """
    return {
        name: (dims, values, {"long_name": label, "units": units[0] if units else "1"})
        for name, (dims, values, label, *units) in variables.items()
    }


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
    table = data[name].set_index(cell=axes).unstack("cell")
    order = {axis: list(dict.fromkeys(data[axis].values.tolist())) for axis in axes}
    own = [dim for dim in table.dims if dim not in (*axes, "replicate")]
    return table.sel(order).transpose(*axes, "replicate", *own)
