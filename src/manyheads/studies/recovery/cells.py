"""Generator of a replicate, labels of variables and figures of one cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

if TYPE_CHECKING:
    import jax


def generator(key: jax.Array) -> np.random.Generator:
    """Return the generator of a replicate."""
    import jax

    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def label(name: str, units: str = "1") -> dict[str, str]:
    """Return the attributes of a variable."""
    return {"long_name": name, "units": units}


def of_cell(trained: xr.Dataset, name: str, **cell: object) -> np.ndarray:
    """Return a variable of one cell, (replicates, ...)."""
    chosen = np.logical_and.reduce([trained[field].values == value for field, value in cell.items()])
    return trained[name].isel(cell=int(np.flatnonzero(chosen)[0])).transpose("replicate", ...).values
