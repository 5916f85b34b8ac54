"""Texts as integer codes: Zarr v3 has no stable type for text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr

LABELS = "labels"  # attribute that holds the texts behind an integer-coded variable


def encode_texts(dataset: xr.Dataset) -> xr.Dataset:
    """Replace texts by integer codes, with the texts as an attribute."""
    import numpy as np

    coded = {}
    for name, variable in dataset.variables.items():
        if variable.dtype.kind in "OUT":
            texts, codes = np.unique(np.asarray(variable.values, dtype=str), return_inverse=True)
            attributes = variable.attrs | {LABELS: texts.tolist()}
            coded[name] = (variable.dims, codes.reshape(variable.shape).astype(np.int32), attributes)
    return dataset.assign_coords({name: value for name, value in coded.items() if name in dataset.coords}).assign(
        {name: value for name, value in coded.items() if name not in dataset.coords}
    )


def decode_texts(dataset: xr.Dataset) -> xr.Dataset:
    """Put the texts back that `encode_texts` turned into codes."""
    import numpy as np

    texts = {}
    for name, variable in dataset.variables.items():
        if LABELS in variable.attrs:
            attributes = {key: value for key, value in variable.attrs.items() if key != LABELS}
            texts[name] = (variable.dims, np.asarray(variable.attrs[LABELS], dtype=str)[variable.values], attributes)
    return dataset.assign_coords({name: value for name, value in texts.items() if name in dataset.coords}).assign(
        {name: value for name, value in texts.items() if name not in dataset.coords}
    )
