"""The unit of work: one cell and one replicate (or one fixed chunk of them), or one draw of the prediction.

`compute` is what a worker runs: it takes plain, picklable values and returns a dataset of NumPy arrays, the same on
every executor.
"""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from manyheads._extras import jax, jnp, np
from manyheads._extras import xarray as xr
from manyheads._json import Json
from manyheads._settings import reproducible
from manyheads.study.base import Study
from manyheads.study.cells import Cell
from manyheads.study.store.records.schema import CODED, MOST_UNITS, MalformedResult, is_plain_name
from manyheads.study.tables import record

PREDICTION_STREAM = 0xFFFF_FFFF  # replicates are counted from zero, so this stream meets none of theirs


OF_A_TABLE = {"unit", "unit_number", "unit_digest", "unit_environment", "unit_time"}
RESERVED = frozenset({"cell", "replicate", "prediction", "wall_seconds", "cpu_seconds"} | OF_A_TABLE)
# xarray would take them for instructions when a unit is written or read back, or the store states them itself.
OF_A_STORE = {"_FillValue", "coordinates", "labels", "manyheads_unit", "manyheads_units", "manyheads_schema"}
CODED_ATTRIBUTES = CODED | OF_A_STORE


@dataclass(frozen=True)
class Unit:
    """Unit of work, computed, stored and resumed as one: replicates `first` to `last` of a cell, both included.

    They are equal unless the study is vectorized. Without a cell it is a draw of the prediction.
    """

    cell: Cell | None
    first: int
    last: int

    def __str__(self) -> str:
        """Return its name for people."""
        numbers = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"prediction {numbers}" if self.cell is None else f"cell {self.cell.slug}, replicate {numbers}"


@dataclass(frozen=True)
class Layout:
    """Division of a run into units: all that is needed to put a stored run together again.

    `predictions` is None for a deterministic theory, else the number of independent draws; `chunk` replicates are
    computed as one.
    """

    cells: tuple[Cell, ...]
    predictions: int | None
    chunk: int

    @classmethod
    def of(cls, study: Study) -> Layout:
        """Return a study's layout."""
        return cls(tuple(study.cells()), study.predictions, study.chunk if study.vectorized else 1)

    def predicted(self) -> tuple[Unit, ...]:
        """Return the units of the prediction."""
        return tuple(self.units(0))

    def trained(self, replicates: int) -> tuple[Unit, ...]:
        """Return the units that cover `replicates` systems, replicate by replicate through all cells.

        Chunks depend on the layout alone, so the last one may reach past `replicates`.
        """
        return tuple(unit for unit in self.units(replicates) if unit.cell is not None)

    def units(self, replicates: int) -> Iterator[Unit]:
        """Yield the units of the prediction, then those of `replicates` systems; a forger may state 1e18 of them."""
        for draw in range(self.predictions or 1):
            yield Unit(None, draw, draw)
        for first in range(0, replicates, self.chunk):
            for cell in self.cells:
                yield Unit(cell, first, first + self.chunk - 1)

    def count(self, replicates: int) -> int:
        """Return how many units a run of so many replicates has; their numbers are those from zero on."""
        return (self.predictions or 1) + len(self.cells) * -(-replicates // self.chunk)

    def number(self, unit: Unit) -> int:
        """Return a unit's number, which further replicates do not change."""
        if unit.cell is None:
            return unit.first
        return (self.predictions or 1) + len(self.cells) * (unit.first // self.chunk) + self._places[unit.cell]

    def unit(self, number: int) -> Unit:
        """Return the unit with a number."""
        if number < (draws := self.predictions or 1):
            return Unit(None, number, number)
        chunk, place = divmod(number - draws, len(self.cells))
        return Unit(self.cells[place], chunk * self.chunk, (chunk + 1) * self.chunk - 1)

    @cached_property
    def _places(self) -> dict[Cell, int]:
        return {cell: place for place, cell in enumerate(self.cells)}

    def to_json(self) -> dict[str, Json]:
        """Return the layout as JSON can hold it, the order of names within a cell included."""
        cells = [list(map(list, cell.items())) for cell in self.cells]
        return {"cells": cells, "predictions": self.predictions, "chunk": self.chunk}

    @classmethod
    def from_json(cls, data: dict[str, Json]) -> Layout:
        """Rebuild a layout from `to_json`."""
        predictions, chunk = data["predictions"], data["chunk"]
        if not all(type(count) is int and 0 < count <= MOST_UNITS for count in (chunk, predictions or 1)):
            raise ValueError(f"predictions={predictions!r}, chunk={chunk!r}: expected counts")
        if not data["cells"]:
            raise ValueError("a grid without cells")
        return cls(tuple(Cell(**dict(cell)) for cell in data["cells"]), predictions, chunk)


def replicate_key(seed: int, replicate: int | jax.Array) -> jax.Array:
    """Return the key of a replicate, the same in every cell."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), replicate)


def prediction_key(seed: int, draw: int) -> jax.Array:
    """Return the key of one draw of the prediction, independent of every replicate's."""
    return jax.random.fold_in(replicate_key(seed, PREDICTION_STREAM), draw)


@dataclass(frozen=True)
class Failure:
    """An exception as text: not every exception can be sent from one process to another."""

    what: str
    trace: str


def attempt(study: Study, unit: Unit, seed: int) -> xr.Dataset | Failure:
    """Compute a unit; an exception is returned as data."""
    try:
        return compute(study, unit, seed)
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())


def compute(study: Study, unit: Unit, seed: int) -> xr.Dataset:
    """Run one unit under pinned settings of JAX and NumPy and return its dataset, wall and CPU seconds included."""
    wall, cpu = time.perf_counter(), time.process_time()
    with reproducible():
        if unit.cell is None:
            dataset = _on_host(_refuse_reserved(predict(study, prediction_key(seed, unit.first)), unit), unit)
        elif study.vectorized:
            dataset = _train_chunk(study, unit, seed)
        else:
            found = train(study, replicate_key(seed, unit.first), unit.cell, unit.first)
            dataset = _on_host(_refuse_reserved(found, unit), unit)
    times = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    count = unit.last - unit.first + 1  # a chunk's time is shared out equally
    dims, shape = (("replicate",), (count,)) if study.vectorized and unit.cell is not None else ((), ())
    for kind, word in (("wall", "wall"), ("cpu", "processor")):
        about = {"units": "s", "long_name": f"{word} time of the replicate", "deterministic": False}
        dataset[f"{kind}_seconds"] = (dims, np.full(shape, times[kind] / count), about)
    return dataset


def predict(study: Study, key: jax.Array) -> Any:
    """Return one prediction of a study as a dataset."""
    return record(study.predict(key), study.cells())


def train(study: Study, key: jax.Array, cell: Cell, replicate: int | jax.Array = 0) -> Any:
    """Train one replicate and return a dataset; a `train` with a parameter `replicate` is told its number."""
    taken = inspect.signature(study.train).parameters
    number = {"replicate": replicate} if "replicate" in taken else {}
    return record(study.train(key, **cell, **number))


def _train_chunk(study: Study, unit: Unit, seed: int) -> xr.Dataset:
    """Train replicates `first` to `last` under `vmap`; dimensions, coordinates and attributes come from the trace."""
    assert unit.cell is not None
    cell = unit.cell
    template: list[xr.Dataset] = []

    def arrays(key: jax.Array, replicate: jax.Array) -> dict[str, jax.Array]:
        dataset = _refuse_reserved(train(study, key, cell, replicate), unit)
        template[:] = [dataset]
        return {str(name): jnp.asarray(variable.data) for name, variable in dataset.data_vars.items()}

    numbers = jnp.arange(unit.first, unit.last + 1, dtype=jnp.uint32)
    keys = jax.vmap(lambda index: replicate_key(seed, index))(numbers)
    values = jax.jit(jax.vmap(arrays))(keys, numbers)
    (traced,) = template
    rows = {name: (("replicate", *traced[name].dims), value, traced[name].attrs) for name, value in values.items()}
    return _on_host(xr.Dataset(rows, coords=traced.coords, attrs=traced.attrs), unit)


def _on_host(dataset: xr.Dataset, unit: Unit) -> xr.Dataset:
    """Replace JAX arrays by NumPy arrays and refuse what a store cannot hold."""
    variables = {}
    for name in (*dataset.variables, *dataset.dims):
        if not is_plain_name(str(name)):
            wanted = "at most 200 printable bytes without '/' and backslash, and no '.' or '__' in front"
            raise MalformedResult(f"{unit}: the name {name!r} is one which a store cannot hold; use {wanted}")
    for name, variable in dataset.variables.items():
        values = np.asarray(variable.data)
        if values.dtype.kind == "O" and all(isinstance(item, str) for item in values.ravel()):
            values = values.astype(str)
        if values.dtype.kind not in "biufcU":
            raise MalformedResult(f"{unit}: variable {name!r} has dtype {values.dtype}; use numbers, booleans or text")
        variables[name] = (variable.dims, values, _attributes(variable.attrs, f"{unit}: variable {name!r}"))
    coordinates = {name: variables[name] for name in dataset.coords}
    data = {name: value for name, value in variables.items() if name not in coordinates}
    return xr.Dataset(data, coords=coordinates, attrs=_attributes(dataset.attrs, str(unit)))


def _attributes(attributes: Mapping[Hashable, Json], where: str) -> dict[str, Json]:
    """Return attributes as JSON can hold them, NumPy's numbers as Python's."""
    plain = {str(name): value.item() if hasattr(value, "item") else value for name, value in attributes.items()}
    for name, value in plain.items():
        if name in CODED_ATTRIBUTES:
            raise MalformedResult(f"{where}: the attribute {name!r} means something to the store; give it another name")
        if not isinstance(value, str | int | float | bool):
            kind = type(value).__name__
            raise MalformedResult(f"{where}: attribute {name!r} is a {kind}; use a text, a number or a boolean")
    return plain


def _refuse_reserved(dataset: object, unit: Unit) -> xr.Dataset:
    """Refuse what is no dataset, and names that the joined tree gives to something else."""
    if not isinstance(dataset, xr.Dataset):
        raise MalformedResult(f"{unit}: expected an xarray.Dataset, got {type(dataset).__name__}")
    names = {str(name) for name in (*dataset.dims, *dataset.variables)}
    if reserved := sorted(RESERVED & names):
        raise MalformedResult(f"{unit}: the name {reserved[0]!r} is reserved; choose another one")
    if twice := sorted(set(unit.cell or ()) & names):
        both = "a value of the cell and something that was measured"
        raise MalformedResult(f"{unit}: {twice[0]!r} names {both}; rename one of them")
    return dataset
