"""Assembly of stored units into one labelled tree: ``/predicted``, ``/trained``, ``/verdicts``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from manyheads.study.cells import Cell
from manyheads.study.store.units import MalformedResult
from manyheads.study.verdicts import Verdict

if TYPE_CHECKING:
    import xarray as xr

    from manyheads.study.run_tree import RunTree
    from manyheads.study.store.run_store import RunStore


def join_replicates(parts: Sequence[xr.Dataset], replicates: int) -> xr.Dataset:
    """Stack the units of one cell along `replicate`, the first `replicates` of them."""
    import numpy as np

    whole = [part if "replicate" in part.dims else part.expand_dims("replicate") for part in parts]
    joined = _concatenate(whole, "replicate").isel(replicate=slice(replicates))
    return joined.assign_coords(
        replicate=("replicate", np.arange(joined.sizes["replicate"]), {"long_name": "replicate"})
    )


def join_cells(cells: Sequence[Cell], parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Stack cells along `cell`, with the cell's values as coordinates along it.

    A dimension with labels (say `layer`) may have fewer of them in some cells: where the label does not exist numbers
    and booleans, which become floating-point for it, are NaN, and texts are empty. Dimensions without labels must
    agree.
    """
    import numpy as np

    joined = _concatenate([part.expand_dims("cell") for part in parts], "cell")
    names = list(dict.fromkeys(name for cell in cells for name in cell))
    values = {name: ("cell", np.asarray([cell[name] for cell in cells])) for name in names}
    return joined.assign_coords({"cell": ("cell", [cell.slug for cell in cells]), **values})


def join_predictions(draws: Sequence[xr.Dataset]) -> xr.Dataset:
    """Stack independent draws of the prediction along `prediction`."""
    return _concatenate([draw.expand_dims("prediction") for draw in draws], "prediction")


def _concatenate(parts: Sequence[xr.Dataset], dimension: str) -> xr.Dataset:
    import numpy as np
    import xarray as xr

    first = _declared(parts[0])
    for position, part in enumerate(parts[1:], start=1):
        other = _declared(part)
        if other != first:
            raise MalformedResult(
                f"along {dimension!r}, part {position} has variables {other} where part 0 has {first}: return the same"
            )
        differing = [
            str(name)
            for name in part.dims
            if name in parts[0].dims and name not in part.indexes and part.sizes[name] != parts[0].sizes[name]
        ]
        if differing and differing != [dimension]:
            raise MalformedResult(
                f"along {dimension!r}, dimension {differing[0]!r} has {part.sizes[differing[0]]} entries in part "
                f"{position} and {parts[0].sizes[differing[0]]} in part 0: give it a coordinate or equal sizes"
            )
    texts = {name: "" for name, (_, kind) in first.items() if kind == "text"}
    return xr.concat(
        parts,
        dim=dimension,
        data_vars="all",
        coords="minimal",
        compat="override",
        join="outer",
        combine_attrs="override",
        fill_value=texts | {name: np.nan for name in first if name not in texts},
    )


def _declared(part: xr.Dataset) -> dict[Any, tuple[tuple[Any, ...], str]]:
    """Return dimensions and kind of every variable: what all units of a study have in common."""
    kinds = {"b": "boolean", "U": "text", "O": "text"}
    return {name: (value.dims, kinds.get(value.dtype.kind, "number")) for name, value in part.data_vars.items()}


def tree(runs: RunStore, predicted: xr.Dataset, trained: xr.Dataset, verdicts: Sequence[Verdict]) -> RunTree:
    """Return the labelled tree of a run; its attributes hold identity, versions and the run's folder."""
    import xarray as xr

    from manyheads.study.run_tree import RunTree

    header = runs.header
    nodes = {"/": xr.Dataset(), "predicted": predicted, "trained": trained, "verdicts": verdict_table(verdicts)}
    result = RunTree.from_dict(nodes, name=str(header["study"]).rpartition("/")[2])
    result.attrs |= {
        "study": header["study"],
        "class": header["class"],
        "revision": header["revision"],
        "seed": header["seed"],
        "configuration": json.dumps(header["configuration"], sort_keys=True),
        "inputs": json.dumps(header["inputs"], sort_keys=True),
        "versions": json.dumps(header["versions"], sort_keys=True),
        "source": json.dumps(header["source"], sort_keys=True),
        "path": str(runs.path),
    }
    return result


def verdict_table(verdicts: Sequence[Verdict]) -> xr.Dataset:
    """Return verdicts as a dataset along `claim`."""
    import numpy as np
    import xarray as xr

    def column(values: list[Any], dtype: type) -> tuple[str, Any]:
        return ("claim", np.asarray(values, dtype=dtype))

    return xr.Dataset(
        {
            "expected": column([verdict.expected or "" for verdict in verdicts], str),
            "outcome": column([verdict.outcome for verdict in verdicts], str),
            "figure": column([verdict.figure for verdict in verdicts], float),
            "low": column([verdict.interval[0] for verdict in verdicts], float),
            "high": column([verdict.interval[1] for verdict in verdicts], float),
            "target": column([verdict.target for verdict in verdicts], float),
            "tolerance_below": column([verdict.tolerance[0] for verdict in verdicts], float),
            "tolerance_above": column([verdict.tolerance[1] for verdict in verdicts], float),
            "basis": column([verdict.basis for verdict in verdicts], str),
        },
        coords={"claim": column([verdict.claim for verdict in verdicts], str)},
    )
