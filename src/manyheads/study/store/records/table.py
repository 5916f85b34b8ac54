"""The table of a finished run: all of its units in one Zarr v3 group, in one zip without compression.

A group a schema; in it every variable with the dimension `unit` first, and the coordinates::

    table-<16 hexadecimal digits of its sha256>.zarr.zip
        zarr.json                            attributes: format, run, environments, number of groups
        0/zarr.json                          attributes: the dataset's, the schema, the number of units
        0/unit_number  0/unit_digest  0/unit_environment  0/unit_time
        0/<variable>   0/<coordinate>        texts are int32 codes, their words the attribute `labels`

The one codec is `bytes`, so a reader needs no Zarr: this one states what every file must say, and refuses the rest.
Zarr and xarray read it as well: ``xarray.open_zarr(ZipStore(path, mode="r"), group="0", consolidated=False)``.
"""

import contextlib
import hashlib
import json
import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads._json import Json, parse_bounded
from manyheads.study.store.disk import StoreDamaged, open_bounded, room_on_disk, temporary_beside, trusting_nothing
from manyheads.study.store.records.schema import Schema, digest_of, dtype_of, encode_texts, identify, is_unit_number
from manyheads.study.store.records.segments import FORMAT, Entry, refuse_other_format

LARGEST_TABLE = 1 << 40
LARGEST_METADATA = 1 << 28
LARGEST_EMPTY = 1 << 26  # bytes that a table may state without a proportion to what is on disk
LARGEST_RATIO = 32  # of the bytes of units to bytes on disk, beyond that: texts are stored as codes
CHUNK = 1 << 24  # bytes of the largest chunk, unless a row is larger
OWN = {"unit_number": "int64", "unit_digest": "uint8", "unit_environment": "int32", "unit_time": "int64"}
REMEDY = "'manyheads runs repair' keeps its good units"


Environments = dict[str, dict[str, Json]]


class Pack(NamedTuple):
    """Units of one schema: their numbers, in order, and their blocks as the rows of a matrix."""

    schema: Schema
    numbers: NDArray[np.int64]
    matrix: NDArray[np.uint8]


def write_table(path: Path, run: str, packs: list[Pack], units: dict[int, Entry], environments: Environments) -> Path:
    """Write a table into a run's folder, durable, under its final name."""
    temporary = temporary_beside(path / "table")
    order = sorted(environments)
    with room_on_disk(path):
        try:
            with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as file:
                named = [[name, environments[name]] for name in order]
                root = {"manyheads_format": FORMAT, "run": run, "environments": named, "groups": len(packs)}
                _put(file, "zarr.json", _json(_group(root)))
                for number, pack in enumerate(packs):
                    _write_group(file, str(number), pack, [units[unit] for unit in pack.numbers.tolist()], order)
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
                digest = hashlib.file_digest(written, "sha256").hexdigest()[:16]
            final = path / f"table-{digest}.zarr.zip"
            os.replace(temporary, final)
            _sync_folder(path)
        finally:
            temporary.unlink(missing_ok=True)
    return final


class Table:
    """A stored table of a run; what it states is compared with the only form that `write_table` gives it.

    The zip's own checksums are compared if `checked`; without them `good` finds the units that were not altered.
    """

    def __init__(self, path: Path, run: str, checked: bool = True):
        self.path, self.run, self.checked = path, run, checked
        self.schemas: dict[str, Schema] = {}
        self.environments: Environments = {}
        self.units: dict[int, Entry] = {}
        with open_bounded(path, LARGEST_TABLE) as file, self._opened(file) as members:
            self._index(members, _members(members, os.fstat(file.fileno()).st_size))

    def _index(self, file: zipfile.ZipFile, sizes: dict[str, int]) -> None:
        root = _stated(file, sizes, "zarr.json")["attributes"]
        refuse_other_format(root["manyheads_format"], self.path)
        if root["run"] != self.run:
            raise StoreDamaged(f"{self.path} belongs to another run; move it away")
        self.environments = dict(root["environments"])
        order = list(self.environments)
        if any(identify(about) != name for name, about in self.environments.items()):
            raise ValueError("an environment that was altered")
        _require_metadata(file, sizes, "zarr.json", _group(root))
        known, room = {"zarr.json"}, LARGEST_EMPTY + LARGEST_RATIO * sum(sizes.values())
        for number in range(root["groups"]):
            group = str(number)
            attributes = _stated(file, sizes, f"{group}/zarr.json")["attributes"]
            schema, count = Schema(attributes["manyheads_schema"]), attributes["manyheads_units"]
            if type(count) is not int or not 0 < count <= sum(sizes.values()) // 8:
                raise ValueError(f"{count!r} units")
            if (room := room - count * schema.size) < 0:  # texts are stored as codes, and read as wide as the longest
                raise ValueError(f"{count:,} units of {schema.size:,} bytes in a file of {sum(sizes.values()):,}")
            _require_metadata(file, sizes, f"{group}/zarr.json", _group(_attributes(schema, count)))
            known.add(f"{group}/zarr.json")
            for name, array in _arrays(schema, count).items():
                known |= array.check(file, sizes, f"{group}/{name}")
            self.schemas[schema.id] = schema
            self._enter(file, group, schema, count, order)
        if strangers := sorted(set(sizes) - known):
            raise ValueError(f"{strangers[0]!r} is no part of a table")

    def _enter(self, file: zipfile.ZipFile, group: str, schema: Schema, count: int, order: list[str]) -> None:
        own = {name: _arrays(schema, count)[name].read(file, f"{group}/{name}") for name in OWN}
        digests = own["unit_digest"].tobytes().hex()
        rows = zip(*(own[name].tolist() for name in ("unit_number", "unit_environment", "unit_time")), strict=True)
        for row, (unit, environment, time) in enumerate(rows):
            if unit in self.units or not is_unit_number(unit) or environment < 0:
                raise ValueError(f"unit {unit} twice or nowhere")
            digest = digests[64 * row : 64 * row + 64]
            self.units[unit] = Entry(self.path.name, row, 0, schema.id, order[environment], digest, time)

    def load(self) -> list[Pack]:
        """Return all units, after comparing the file with its name and every unit with its digest."""
        with open_bounded(self.path, LARGEST_TABLE) as file:
            if hashlib.file_digest(file, "sha256").hexdigest()[:16] != self.path.name.split("-")[1].split(".")[0]:
                raise StoreDamaged(f"{self.path} has been altered (its sha256 differs); {REMEDY}")
            packs = self._packs(file)
        for pack in packs:
            if not (right := self._right(pack)).all():
                unit = pack.numbers[np.argmin(right)]
                raise StoreDamaged(f"{self.path}: unit {unit} has been altered (its sha256 differs); {REMEDY}")
        return packs

    def good(self) -> list[Pack]:
        """Return the units that have their digest, whatever else was altered."""
        with open_bounded(self.path, LARGEST_TABLE) as file:
            packs = self._packs(file)
        return [Pack(pack.schema, pack.numbers[right := self._right(pack)], pack.matrix[right]) for pack in packs]

    @contextlib.contextmanager
    def _opened(self, file: IO[bytes]) -> Iterator[zipfile.ZipFile]:
        with trusting_nothing(self.path, REMEDY), zipfile.ZipFile(file) as members:
            for member in () if self.checked else members.infolist():
                del member.CRC  # and `zipfile` compares none
            yield members

    def _packs(self, file: IO[bytes]) -> list[Pack]:
        with self._opened(file) as members:
            return [self._read_group(members, str(group), schema) for group, schema in enumerate(self.schemas.values())]

    def _right(self, pack: Pack) -> NDArray[np.bool_]:
        """Tell which units of a pack have their digest."""
        right = []
        for unit, row in zip(pack.numbers.tolist(), pack.matrix, strict=True):
            entry = self.units[unit]
            right.append(digest_of(self.run, unit, entry.schema, entry.environment, row.data) == entry.digest)
        return np.asarray(right, bool)

    def _read_group(self, file: zipfile.ZipFile, group: str, schema: Schema) -> Pack:
        numbers = [unit for unit, entry in self.units.items() if entry.schema == schema.id]
        matrix = np.zeros((len(numbers), schema.size), np.uint8)
        arrays = _arrays(schema, len(numbers))
        for field in schema.fields:
            if field.values is None and field.size:
                stored = arrays[field.name].read(file, f"{group}/{field.name}")
                if dtype_of(field.kind).kind == "S":
                    labels = _stated(file, None, f"{group}/{field.name}/zarr.json")["attributes"]["labels"]
                    if not self.checked:
                        stored = stored.clip(0, len(labels) - 1)
                    if stored.min() < 0:
                        raise ValueError(f"{field.name}: a code below zero")
                    stored = encode_texts(np.asarray(labels, dtype=str), field.kind)[stored]
                block = np.ascontiguousarray(stored).reshape(len(numbers), -1).view(np.uint8)
                matrix[:, field.start : field.start + field.size] = block
        return Pack(schema, np.asarray(numbers, np.int64), matrix)


class _Array(NamedTuple):
    """An array as the table holds it: type, shape, chunks of whole rows, dimensions, attributes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    attrs: dict[str, Json]
    text: bool

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def rows(self) -> int:
        """Rows of a chunk."""
        return max(1, min(self.shape[0], CHUNK // max(1, self.row_bytes))) if self.shape else 1

    def chunks(self) -> list[str]:
        """Return the names of the chunks below the array."""
        if not math.prod(self.shape):
            return []
        if not self.shape:
            return ["c"]
        rest = "/0" * (len(self.shape) - 1)
        return [f"c/{number}{rest}" for number in range(-(-self.shape[0] // self.rows))]

    def metadata(self, labels: list[str] | None = None) -> dict[str, Json]:
        shape = list(self.shape)
        chunk = [self.rows, *(max(1, size) for size in shape[1:])] if shape else []
        fill: Any = self.dtype.type(0).item()
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": self.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": [fill.real, fill.imag] if self.dtype.kind == "c" else fill,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "attributes": self.attrs | ({"labels": labels} if self.text else {}),
            "dimension_names": list(self.dims),
        }

    def check(self, file: zipfile.ZipFile, sizes: dict[str, int], name: str) -> set[str]:
        """Refuse any other metadata, and chunks of other sizes; return the names of all files."""
        labels = _stated(file, sizes, f"{name}/zarr.json")["attributes"].get("labels") if self.text else None
        if self.text and not (isinstance(labels, list) and all(isinstance(label, str) for label in labels)):
            raise ValueError(f"{name}: labels that are no texts")
        _require_metadata(file, sizes, f"{name}/zarr.json", self.metadata(labels))
        expected = self.rows * self.row_bytes if self.shape else self.dtype.itemsize
        for chunk in (chunks := self.chunks()):
            if sizes[f"{name}/{chunk}"] != expected:
                raise ValueError(f"{name}/{chunk} has {sizes[f'{name}/{chunk}']:,} bytes; expected {expected:,}")
        return {f"{name}/zarr.json", *(f"{name}/{chunk}" for chunk in chunks)}

    def read(self, file: zipfile.ZipFile, name: str) -> NDArray[Any]:
        data = b"".join(file.read(f"{name}/{chunk}") for chunk in self.chunks())
        count = math.prod(self.shape)
        return np.frombuffer(data, self.dtype, count).reshape(self.shape)

    def write(self, file: zipfile.ZipFile, name: str, values: NDArray[Any], labels: list[str] | None = None) -> None:
        _put(file, f"{name}/zarr.json", _json(self.metadata(labels)))
        size = self.rows * self.row_bytes if self.shape else self.dtype.itemsize
        data = memoryview(values.astype(self.dtype, copy=False).tobytes())
        for number, chunk in enumerate(self.chunks()):
            part = bytes(data[number * size : (number + 1) * size])
            _put(file, f"{name}/{chunk}", part + bytes(size - len(part)))


def _arrays(schema: Schema, count: int) -> dict[str, _Array]:
    """Return the arrays of a group, by name."""
    own: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = dict.fromkeys(OWN, ((count,), ("unit",)))
    own["unit_digest"] = ((count, 32), ("unit", "digest_byte"))
    arrays = {name: _Array(np.dtype(OWN[name]), *own[name], {}, False) for name in OWN}
    for field in schema.fields:
        text = dtype_of(field.kind).kind == "S"
        dtype = np.dtype(np.int32) if text else dtype_of(field.kind)
        lead = ((count, *field.shape), ("unit", *field.dims)) if field.values is None else (field.shape, field.dims)
        arrays[field.name] = _Array(dtype, *lead, field.attrs, text)
    return arrays


def _write_group(file: zipfile.ZipFile, group: str, pack: Pack, entries: list[Entry], order: list[str]) -> None:
    schema, count = pack.schema, len(entries)
    _put(file, f"{group}/zarr.json", _json(_group(_attributes(schema, count))))
    arrays, digests = _arrays(schema, count), bytes.fromhex("".join(entry.digest for entry in entries))
    own: dict[str, NDArray[Any]] = {
        "unit_number": pack.numbers,
        "unit_digest": np.frombuffer(digests, np.uint8).reshape(count, 32),
        "unit_environment": np.asarray([order.index(entry.environment) for entry in entries]),
        "unit_time": np.asarray([entry.time for entry in entries]),
    }
    for name, values in own.items():
        arrays[name].write(file, f"{group}/{name}", values)
    measured = {field.name: values for field, values in schema.arrays(pack.matrix)}
    for field in schema.fields:
        values = measured[field.name] if field.values is None else field.values
        labels = None
        if arrays[field.name].text:
            texts, codes = np.unique(values, return_inverse=True)
            values, labels = codes.reshape(values.shape).astype(np.int32), texts.tolist()
        arrays[field.name].write(file, f"{group}/{field.name}", values, labels)


def _attributes(schema: Schema, count: int) -> dict[str, Json]:
    return schema.attrs | {"manyheads_schema": schema.data, "manyheads_units": count}


def _group(attributes: dict[str, Json]) -> dict[str, Json]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def _members(file: zipfile.ZipFile, size: int) -> dict[str, int]:
    """Return the sizes of all members; refuse whatever is not stored plainly, once, inside the file."""
    sizes: dict[str, int] = {}
    for member in file.infolist():
        plain = member.compress_type == zipfile.ZIP_STORED and member.file_size == member.compress_size
        if not plain or member.flag_bits & ~0x800 or member.filename in sizes:
            raise ValueError(f"{member.filename!r} is compressed, encrypted or there twice")
        sizes[member.filename] = member.file_size
    if sum(sizes.values()) > size:
        raise ValueError("files that overlap")
    return sizes


def _stated(file: zipfile.ZipFile, sizes: dict[str, int] | None, name: str) -> dict[str, Json]:
    if sizes is not None and sizes[name] > LARGEST_METADATA:
        raise ValueError(f"{name}: {sizes[name]:,} bytes of metadata")
    data = parse_bounded(file.read(name))
    if not isinstance(data, dict) or not isinstance(data.get("attributes"), dict):
        raise TypeError(f"{name} is no metadata")
    return data


def _require_metadata(file: zipfile.ZipFile, sizes: dict[str, int], name: str, expected: dict[str, Json]) -> None:
    if file.read(name) != _json(expected):
        raise ValueError(f"{name} says something else than this library writes")


def _json(data: dict[str, Json]) -> bytes:
    return json.dumps(data, indent=1).encode()


def _put(file: zipfile.ZipFile, name: str, content: bytes) -> None:
    file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content)


def _sync_folder(path: Path) -> None:
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
