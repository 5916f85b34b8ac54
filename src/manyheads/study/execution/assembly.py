"""Assembly of stored units into one labelled tree: ``/predicted``, ``/trained``, ``/verdicts``."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from manyheads._extras import np
from manyheads._extras import xarray as xr
from manyheads.study.cells import Cell
from manyheads.study.execution.units import Layout
from manyheads.study.store.disk import StoreDamaged
from manyheads.study.store.records.schema import MalformedResult, Schema
from manyheads.study.store.records.table import Pack
from manyheads.study.verdicts import Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from manyheads.study.reporting.run_tree import RunTree
    from manyheads.study.store.run_store import RunStore


def assemble(runs: RunStore, replicates: int) -> tuple[xr.Dataset, xr.Dataset]:
    """Read a complete run back, everything checked: its predictions and its trained systems."""
    layout = runs.layout
    numbers = range(layout.count(replicates))
    if missing := runs.missing(replicates):
        raise StoreDamaged(f"{runs.path}: {layout.unit(missing[0])} is missing; run the same command again")
    packs = runs.load(numbers)
    try:
        return _assembled(layout, replicates, packs)
    except MalformedResult:
        return _joined(layout, replicates, _reader(packs))  # says which units do not fit together


def _assembled(layout: Layout, replicates: int, packs: Sequence[Pack]) -> tuple[xr.Dataset, xr.Dataset]:
    """Join units schema by schema: what `_joined` returns, in time linear in the units if the schemas are few."""
    draws = layout.predictions or 1
    predictions, parts = [], []
    for pack in packs:
        trained = pack.numbers >= draws
        predictions.append(Pack(pack.schema, pack.numbers[~trained], pack.matrix[~trained]))
        if trained.any():
            if not _is_regular(pack.schema):
                return _joined(layout, replicates, _reader(packs))
            parts.append((pack.numbers[trained], _stacked(pack.schema, pack.matrix[trained])))
    parts.sort(key=lambda part: int(part[0].min()))  # attributes are those of the first unit
    numbers = np.concatenate([numbers for numbers, _ in parts])
    units = _concatenate([part for _, part in parts], "cell") if len(parts) > 1 else parts[0][1]
    if (np.diff(numbers) < 0).any():
        units = units.isel(cell=np.argsort(numbers))
    whole = _of_cells(layout.cells, _of_replicates(_grid(units, len(layout.cells), replicates)))
    return _predicted(layout, _reader(predictions)), whole


def _reader(packs: Sequence[Pack]) -> Callable[[int], xr.Dataset]:
    """Return a function that returns a unit by its number."""
    places = {int(number): (pack, row) for pack in packs for row, number in enumerate(pack.numbers)}

    def read(number: int) -> xr.Dataset:
        pack, row = places[number]
        return pack.schema.dataset(pack.matrix[row])

    return read


def _predicted(layout: Layout, read: Callable[[int], xr.Dataset]) -> xr.Dataset:
    draws = [read(draw) for draw in range(layout.predictions or 1)]
    return draws[0] if layout.predictions is None else join_predictions(draws)


def _joined(layout: Layout, replicates: int, read: Callable[[int], xr.Dataset]) -> tuple[xr.Dataset, xr.Dataset]:
    """Join units one by one: of different schemas."""
    draws, cells = layout.predictions or 1, len(layout.cells)
    end = layout.count(replicates)
    parts = [
        join_replicates([read(number) for number in range(draws + place, end, cells)], replicates)
        for place in range(cells)
    ]
    return _predicted(layout, read), join_cells(layout.cells, parts)


def _is_regular(schema: Schema) -> bool:
    """Tell whether chunks of replicates have their axis first in every variable, or none has it."""
    measured = [field.dims for field in schema.fields if field.values is None]
    others = [field.dims for field in schema.fields if field.values is not None]
    first = all(dims[:1] == ("replicate",) for dims in measured)
    return (first or not any("replicate" in dims for dims in measured)) and not any("replicate" in d for d in others)


def _stacked(schema: Schema, matrix: NDArray[np.uint8]) -> xr.Dataset:
    """Return units of one schema along `cell`, each with its axis of replicates."""
    variables = {}
    for field, array in schema.arrays(matrix):
        chunked = field.dims[:1] == ("replicate",)
        dims = ("cell", *field.dims) if chunked else ("cell", "replicate", *field.dims)
        variables[field.name] = (dims, array if chunked else array[:, None], field.attrs)
    return xr.Dataset(variables, coords=schema.coordinates(), attrs=schema.attrs)


def _grid(units: xr.Dataset, cells: int, replicates: int) -> xr.Dataset:
    """Turn units in the order of their numbers into cells and replicates."""
    variables = {}
    for name, variable in units.data_vars.items():
        _, chunk, *shape = variable.shape
        array = variable.values.reshape(-1, cells, chunk, *shape).swapaxes(0, 1)
        variables[name] = (variable.dims, array.reshape(cells, -1, *shape)[:, :replicates], variable.attrs)
    return units.drop_vars(variables).assign(variables)


def join_replicates(parts: Sequence[xr.Dataset], replicates: int) -> xr.Dataset:
    """Stack the units of one cell along `replicate`, the first `replicates` of them."""
    whole = [part if "replicate" in part.dims else part.expand_dims("replicate") for part in parts]
    return _of_replicates(_concatenate(whole, "replicate").isel(replicate=slice(replicates)))


def _of_replicates(joined: xr.Dataset) -> xr.Dataset:
    numbers = np.arange(joined.sizes["replicate"])
    return joined.assign_coords(replicate=("replicate", numbers, {"long_name": "replicate"}))


def join_cells(cells: Sequence[Cell], parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Stack cells along `cell`, with the cell's values as coordinates along it.

    Where a cell lacks a label of a dimension, numbers and booleans are NaN, and texts are empty; dimensions without
    labels must agree.
    """
    return _of_cells(cells, _concatenate([part.expand_dims("cell") for part in parts], "cell"))


def _of_cells(cells: Sequence[Cell], joined: xr.Dataset) -> xr.Dataset:
    names = list(dict.fromkeys(name for cell in cells for name in cell))
    values = {name: ("cell", np.asarray([cell[name] for cell in cells])) for name in names}
    return joined.assign_coords({"cell": ("cell", [cell.slug for cell in cells]), **values})


def join_predictions(draws: Sequence[xr.Dataset]) -> xr.Dataset:
    """Stack independent draws of the prediction along `prediction`."""
    return _concatenate([draw.expand_dims("prediction") for draw in draws], "prediction")


def _concatenate(parts: Sequence[xr.Dataset], dimension: str) -> xr.Dataset:
    first = _declared(parts[0])
    for position, part in enumerate(parts[1:], start=1):
        other = _declared(part)
        if other != first:
            what = f"has variables {other} where part 0 has {first}: return the same"
            raise MalformedResult(f"along {dimension!r}, part {position} {what}")
        common = [str(name) for name in part.dims if name in parts[0].dims and name not in part.indexes]
        differing = [name for name in common if part.sizes[name] != parts[0].sizes[name]]
        if differing and differing != [dimension]:
            here, first_size = (each.sizes[differing[0]] for each in (part, parts[0]))
            what = f"{here} entries in part {position} and {first_size} in part 0: give it a coordinate or equal sizes"
            raise MalformedResult(f"along {dimension!r}, dimension {differing[0]!r} has {what}")
    blank = {name: "" if kind == "text" else np.nan for name, (_, kind) in first.items()}
    how: dict[str, Any] = {"coords": "minimal", "compat": "override", "join": "outer", "combine_attrs": "override"}
    return xr.concat(parts, dim=dimension, data_vars="all", fill_value=blank, **how)


def _declared(part: xr.Dataset) -> dict[Hashable, tuple[tuple[Hashable, ...], str]]:
    """Return dimensions and kind of every variable: what all units of a study have in common."""
    kinds = {"b": "boolean", "U": "text", "O": "text"}
    return {name: (value.dims, kinds.get(value.dtype.kind, "number")) for name, value in part.data_vars.items()}


def tree(runs: RunStore, predicted: xr.Dataset, trained: xr.Dataset, verdicts: Sequence[Verdict]) -> RunTree:
    """Return the labelled tree of a run; its attributes hold identity, versions and the run's folder."""
    from manyheads.study.reporting.run_tree import RunTree

    header = runs.header
    nodes = {"/": xr.Dataset(), "predicted": predicted, "trained": trained, "verdicts": verdict_table(verdicts)}
    result = RunTree.from_dict(nodes, name=str(header["study"]).rpartition("/")[2])
    stated = header | {"environments": runs.environments()}
    result.attrs |= {name: header[name] for name in ("study", "class", "revision", "seed")}
    texts = ("configuration", "inputs", "versions", "source", "environments")
    result.attrs.update({name: json.dumps(stated[name], sort_keys=True) for name in texts}, path=str(runs.path))
    return result


def verdict_table(verdicts: Sequence[Verdict]) -> xr.Dataset:
    """Return verdicts as a dataset along `claim`."""
    rows = [
        (one.claim, one.expected or "", one.outcome, one.figure, *one.interval, one.target, *one.tolerance, one.basis)
        for one in verdicts
    ]
    kinds: dict[str, type] = dict.fromkeys(("claim", "expected", "outcome"), str)
    kinds |= dict.fromkeys(("figure", "low", "high", "target", "tolerance_below", "tolerance_above"), float)
    columns = zip((kinds | {"basis": str}).items(), zip(*rows, strict=True), strict=True)
    table: dict[str, Any] = {name: ("claim", np.asarray(values, kind)) for (name, kind), values in columns}
    return xr.Dataset(table, coords={"claim": table.pop("claim")})
