"""Texts as integer codes, which format 1 stores: Zarr v3 has no stable type for text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr

LABELS = "labels"  # attribute that holds the texts behind an integer-coded variable


def decode_texts(dataset: xr.Dataset) -> xr.Dataset:
    """Put the texts in the place of their codes."""
    import numpy as np

    texts = {}
    for name, variable in dataset.variables.items():
        if LABELS in variable.attrs:
            attributes = {key: value for key, value in variable.attrs.items() if key != LABELS}
            texts[name] = (variable.dims, np.asarray(variable.attrs[LABELS], dtype=str)[variable.values], attributes)
    return dataset.assign_coords({name: value for name, value in texts.items() if name in dataset.coords}).assign(
        {name: value for name, value in texts.items() if name not in dataset.coords}
    )
