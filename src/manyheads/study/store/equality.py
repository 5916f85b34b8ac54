"""Bit-for-bit comparison of results, measured times excepted."""

from __future__ import annotations

from manyheads._extras import xarray as xr


def differences(first: xr.Dataset | xr.DataTree, second: xr.Dataset | xr.DataTree) -> list[str]:
    """Return the names of all variables that are not the same to the last bit, in values, dimensions or labels.

    Variables whose attribute `deterministic` is False (measured times) are left out, as are attributes of the root of a
    tree, which name the run's folder.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> first = xr.Dataset({"loss": ("step", np.array([1.0, 0.5]))})
    >>> differences(first, first), differences(first, first + 1e-17), differences(first, first + 1e-15)
    ([], [], ['loss'])
    """
    if isinstance(first, xr.DataTree) and isinstance(second, xr.DataTree):
        paths = sorted({node.path for node in first.subtree} ^ {node.path for node in second.subtree})
        common = [node.path for node in first.subtree if node.path not in paths]
        inside = [f"{path}/{name}" for path in common for name in differences(first[path].ds, second[path].ds)]
        return paths + inside
    if isinstance(first, xr.DataTree) or isinstance(second, xr.DataTree):
        return ["/"]
    ours, theirs = _deterministic(first), _deterministic(second)
    return sorted(name for name in {*ours, *theirs} if not _same(ours.get(name), theirs.get(name)))


def _deterministic(dataset: xr.Dataset) -> dict[str, xr.Variable]:
    return {str(name): value for name, value in dataset.variables.items() if value.attrs.get("deterministic", True)}


def _same(first: xr.Variable | None, second: xr.Variable | None) -> bool:
    if first is None or second is None:
        return False
    if (first.dims, first.shape, first.dtype.kind) != (second.dims, second.shape, second.dtype.kind):
        return False
    if first.dtype.kind == "U":
        return bool((first.values == second.values).all())
    return first.dtype == second.dtype and first.values.tobytes() == second.values.tobytes()
