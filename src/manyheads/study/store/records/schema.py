"""Packing of a unit: a schema, which many units share, and one block of bytes, which is its own.

The schema holds names, dimensions, types, shapes, attributes and the values of all coordinates; the block holds the
other variables one after the other, in C order and little-endian. The blocks of n units of one schema are the rows of
an (n, bytes) matrix, and a variable is a slice of its columns.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads._extras import xarray as xr
from manyheads._json import Json
from manyheads.errors import ManyheadsError

_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
NUMBERS = {name: np.dtype(name).newbyteorder("<") for name in _NAMES.split()}
TEXT = "utf8-"  # followed by the bytes of the longest text, a power of two
LEAST_TEXT = 16  # so that a longer word does not make another schema
LARGEST_BLOCK = 1 << 27  # bytes of a unit
MOST_UNITS = 1_000_000  # of a prediction, and of trained systems
CODED = frozenset({"missing_value", "scale_factor", "add_offset", "calendar", "dtype"})  # xarray would follow them


class MalformedResult(ManyheadsError, TypeError):
    """A study returned something that cannot be stored."""


class Field(NamedTuple):
    """Variable of a schema, and where its bytes lie in a unit's block; coordinates have values instead."""

    name: str
    dims: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    attrs: dict[str, Json]
    values: NDArray[Any] | None
    start: int
    size: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the stored bytes."""
        return dtype_of(self.kind)


class Schema:
    """All that units of one form have in common, from what `pack` returned.

    ValueError, TypeError or KeyError if that does not describe plain arrays.
    """

    def __init__(self, data: dict[str, Json]):
        self.data = data
        self.id = identify(data)
        self.attrs = _plain_attributes(data["attrs"])
        self.fields: list[Field] = []
        self.size = 0
        for about in data["variables"]:
            self.fields.append(field := _field(about, self.size))
            self.size += field.size
        if self.size > LARGEST_BLOCK:
            raise ValueError(f"units of {self.size:,} bytes; expected at most {LARGEST_BLOCK:,}")
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"a variable twice in {names}")

    def arrays(self, matrix: NDArray[np.uint8]) -> Iterator[tuple[Field, NDArray[Any]]]:
        """Yield every measured variable of n units, from their blocks (n, bytes), with the unit as first axis."""
        for field in self.fields:
            if field.values is None:
                column = np.ascontiguousarray(matrix[:, field.start : field.start + field.size])
                yield field, _decoded(column, field.kind, (len(matrix), *field.shape))

    def coordinates(self) -> dict[str, tuple[tuple[str, ...], NDArray[Any], dict[str, Json]]]:
        """Return the coordinates as `xarray.Dataset` takes them."""
        stated = ((each, each.values) for each in self.fields)
        return {each.name: (each.dims, values, each.attrs) for each, values in stated if values is not None}

    def dataset(self, block: bytes | NDArray[np.uint8]) -> xr.Dataset:
        """Return one unit."""
        row = np.frombuffer(block, np.uint8).reshape(1, self.size)
        variables = {field.name: (field.dims, array[0], field.attrs) for field, array in self.arrays(row)}
        return xr.Dataset(variables, coords=self.coordinates(), attrs=self.attrs)


def pack(dataset: xr.Dataset) -> tuple[dict[str, Json], bytes]:
    """Return the schema of a unit, as JSON can hold it, and its block of bytes."""
    variables, blocks, coordinates = [], [], set(dataset.coords)
    for name, variable in dataset.variables.items():
        kind, values = _encoded(np.asarray(variable.values), str(name))
        about: dict[str, Json] = {"name": str(name), "dims": list(variable.dims), "type": kind}
        about |= {"shape": list(values.shape), "attrs": variable.attrs}
        if name in coordinates:
            about["values"] = base64.b64encode(values.tobytes()).decode()
        else:
            blocks.append(values.tobytes())
        variables.append(about)
    block = b"".join(blocks)
    if len(block) > LARGEST_BLOCK:
        raise MalformedResult(f"a unit of {len(block):,} bytes; a store holds at most {LARGEST_BLOCK:,}")
    return {"attrs": dataset.attrs, "variables": variables}, block


def canonical(data: object) -> str:
    """Return JSON in the form that is hashed."""
    return json.dumps(data, separators=(",", ":"))


def identify(data: object) -> str:
    """Return 32 hexadecimal digits of the sha256 of JSON: the name of a schema or an environment."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()[:32]


def digest_of(run: str, unit: int, schema: str, environment: str, block: bytes | memoryview) -> str:
    """Return the sha256 that binds a unit's values to its run, number, schema and environment."""
    digest = hashlib.sha256(f"{run} {unit} {schema} {environment}\n".encode())
    digest.update(block)
    return digest.hexdigest()


def is_unit_number(unit: int) -> bool:
    """Tell whether a unit of some run may have this number: draws, trained units, and cells of a last chunk."""
    return 0 <= unit < 3 * MOST_UNITS


def is_plain_name(name: str) -> bool:
    """Tell whether a name of a variable or dimension can be stored: printable, at most 200 bytes, no path."""
    short = 0 < len(name.encode("utf-8", "surrogatepass")) <= 200 and name.isprintable()
    return short and name != "zarr.json" and not set(name) & set("/\\") and not name.startswith((".", "__"))


@functools.lru_cache(maxsize=256)
def dtype_of(kind: str) -> np.dtype[Any]:
    """Return the NumPy type of stored bytes: a number's, or texts of a fixed number of bytes of UTF-8."""
    if kind in NUMBERS:
        return NUMBERS[kind]
    width = kind.removeprefix(TEXT)
    if not kind.startswith(TEXT) or not width.isdecimal() or width != str(1 << int(width[:12]).bit_length() - 1):
        raise ValueError(f"type {kind!r}")
    return np.dtype(f"S{width}")


def encode_texts(texts: NDArray[Any], kind: str) -> NDArray[np.bytes_]:
    """Return texts as UTF-8 of a fixed width."""
    return np.char.encode(texts, "utf-8", "surrogatepass").astype(dtype_of(kind))


def _encoded(values: NDArray[Any], name: str) -> tuple[str, NDArray[Any]]:
    if values.dtype.kind in "UOT":
        encoded = np.char.encode(values.astype(str), "utf-8", "surrogatepass")
        kind = f"{TEXT}{max(LEAST_TEXT, 1 << (encoded.dtype.itemsize - 1).bit_length())}"
        return kind, encoded.astype(dtype_of(kind))
    kind = values.dtype.name
    if kind not in NUMBERS:
        kinds = ", ".join(NUMBERS)
        raise MalformedResult(f"variable {name!r} has dtype {values.dtype}; a store holds {kinds} and text")
    return kind, values if values.dtype.isnative and values.dtype == NUMBERS[kind] else values.astype(NUMBERS[kind])


def _decoded(column: NDArray[np.uint8], kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
    dtype = dtype_of(kind)
    if kind == "bool":
        return (column != 0).reshape(shape)
    stored = column.view(dtype).reshape(shape) if column.size else np.empty(shape, dtype)
    if dtype.kind != "S":
        return stored.astype(dtype.newbyteorder("="), copy=False)
    return np.asarray(np.char.decode(stored, "utf-8", "surrogatepass"))


def _field(about: dict[str, Json], start: int) -> Field:
    name, dims, shape, kind = about["name"], about["dims"], about["shape"], about["type"]
    if not all(isinstance(text, str) and is_plain_name(text) for text in (name, *dims)):
        raise ValueError(f"the name {name!r} or one of its dimensions {dims!r}")
    if len(shape) != len(dims) or len(shape) > 32 or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name}: shape {shape!r} of dimensions {dims!r}")
    size = dtype_of(kind).itemsize * math.prod(shape)
    if size > LARGEST_BLOCK:
        raise ValueError(f"{name}: {size:,} bytes; expected at most {LARGEST_BLOCK:,}")
    values = None
    if (text := about.get("values")) is not None:
        stored = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
        if len(stored) != size:
            raise ValueError(f"{name}: {len(stored):,} bytes of values; expected {size:,}")
        values, size = _decoded(stored, kind, tuple(shape)), 0
    return Field(name, tuple(dims), kind, tuple(shape), _plain_attributes(about["attrs"]), values, start, size)


def _plain_attributes(attributes: dict[str, Json]) -> dict[str, Json]:
    for name, value in attributes.items():
        if name in CODED or not name.isprintable() or not isinstance(value, str | int | float | bool):
            raise ValueError(f"the attribute {name!r}")
    return attributes
