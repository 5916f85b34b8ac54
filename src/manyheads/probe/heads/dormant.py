"""Dormant heads: heads of attention that write next to nothing into the residual stream."""

import numpy as np

from manyheads._extras import xarray as xr
from manyheads.errors import UsageError


def dormant_heads(found: "xr.Dataset", threshold: float = 0.1) -> list[str]:
    """Name the heads whose output is small beside that of the other heads of their layer.

    The figures over (layer, head) are those of `record.dataset()` or of one step of a live recording; UsageError for
    those of several steps. The threshold, positive, is the largest RMS of the output of a dormant head over that of all
    heads of the layer, before W_O; heads that write alike have 1. It is a choice: no level follows from the theory.
    Returned are module and number of each head, the smallest output first.

    Examples
    --------
    >>> import xarray as xr
    >>> coords = {"layer": [0], "head": [0, 1], "module": ("layer", ["h.0.attn"])}
    >>> dormant_heads(xr.Dataset({"relative_output": (("layer", "head"), [[1.41, 0.01]])}, coords))
    ['h.0.attn, head 1']
    """
    if not threshold > 0:
        raise UsageError(f"threshold={threshold!r}: expected a positive number")
    if found.relative_output.dims != ("layer", "head"):
        raise UsageError(f"figures over {found.relative_output.dims}: choose one step, such as found.isel(step=-1)")
    output = found.relative_output.values
    places = np.argwhere(output <= threshold)  # NaN, heads that a layer lacks, are none
    ordered = places[np.argsort(output[tuple(places.T)], kind="stable")]
    return [f"{found['module'].values[layer]}, head {found['head'].values[head]}" for layer, head in ordered]
