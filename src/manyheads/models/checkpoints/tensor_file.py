"""One safetensors file, read tensor by tensor into fresh memory.

The file is read, never mapped: the pages of a mapping count as resident once they are touched, so a mapping that is
walked from end to end costs as much memory as the whole file. Its header is checked before memory is taken:

    [ n: uint64, little endian ][ n bytes of JSON ][ data ]
    JSON: {name: {"dtype": str, "shape": [int], "data_offsets": [begin, end]}, "__metadata__": {str: str}}

Offsets count from the end of the header. The tensors tile the data: no overlap, no gap, nothing after the last one.

Source: the safetensors format, https://github.com/huggingface/safetensors (section "Format").
"""

import difflib
import hashlib
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from manyheads.errors import ShapeError, UsageError
from manyheads.models.checkpoints.files import open_regular, parse_json, seal
from manyheads.models.refusals import INTERRUPTED, FileChanged, FileDamaged, PickleRefused

Array = NDArray[Any]

CHUNK = 1 << 20
HEADER_LIMIT = 100_000_000  # the longest header in bytes: the limit of the format's own library
DIMENSION_LIMIT = 64  # the largest number of dimensions: NumPy's
SIZE_LIMIT = 2**63 - 1

_TYPES: Mapping[str, Any] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2, "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4",
    "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
DTYPES: Mapping[str, np.dtype] = MappingProxyType({name: np.dtype(kind) for name, kind in _TYPES.items()})
"""The element types: the name in the file and what NumPy calls it."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the header describes it."""

    name: str
    dtype: str  # a key of `DTYPES`
    shape: tuple[int, ...]
    offset: int  # where its bytes begin in the file
    nbytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(file: BinaryIO, size: int, path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Read and check the header of an open file of `size` bytes: the tensors in the order of the file, and metadata."""
    if size < 8:
        raise FileDamaged(path, f"{size} bytes; a safetensors file has at least 8", "" if size else INTERRUPTED)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if length > HEADER_LIMIT:
        if start[:4] == b"PK\x03\x04" or (start[0] == 0x80 and start[1] in range(2, 6)):
            raise PickleRefused(path, "begins like a pickled PyTorch file")
        raise FileDamaged(path, f"a header of {length:,} bytes; at most {HEADER_LIMIT:,}")
    if length > size - 8:
        raise FileDamaged(path, f"a header of {length:,} bytes in a file of {size:,}")
    raw = file.read(length)
    if not raw.startswith(b"{"):
        raise FileDamaged(path, f"the header begins with {raw[:1]!r}, not with '{{'")
    table = parse_json(raw, path)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileDamaged(path, "__metadata__ is not a table of strings")
    entries = [_entry(name, fields, 8 + length, path) for name, fields in table.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_tiling(entries, 8 + length, size, path)
    return {entry.name: entry for entry in entries}, metadata


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= SIZE_LIMIT


def _entry(name: str, fields: Any, data_start: int, path: Path) -> TensorEntry:
    """Check one entry by itself."""
    who = f"tensor {name[:120]!r}"
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        given = sorted(fields)[:8] if isinstance(fields, dict) else type(fields).__name__
        raise FileDamaged(path, f"{who} has {given}, not exactly dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        found = f"{who} has dtype {str(dtype)[:40]!r}, not one of {', '.join(DTYPES)}"
        raise FileDamaged(path, found, "convert the file to one of these types; nothing is read by guesswork")
    itemsize = DTYPES[dtype].itemsize
    if (
        not isinstance(shape, list)
        or len(shape) > DIMENSION_LIMIT
        or not all(map(_is_size, shape))
        # NumPy counts the bytes of an empty array as if its zeros were ones, and so must this check.
        or math.prod(side or 1 for side in shape) * itemsize > SIZE_LIMIT
    ):
        raise FileDamaged(path, f"{who} has shape {str(shape)[:200]}")
    pair = isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_size, offsets))
    if not pair or offsets[0] > offsets[1]:
        raise FileDamaged(path, f"{who} has data_offsets {str(offsets)[:200]}")
    begin, end = offsets
    needed = math.prod(shape) * itemsize
    if needed != end - begin:
        raise FileDamaged(
            path, f"{who}: {dtype} of shape {shape} takes {needed:,} bytes, its offsets span {end - begin:,}"
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + begin, needed)


def _check_tiling(entries: list[TensorEntry], data_start: int, size: int, path: Path) -> None:
    """Check that the tensors, sorted by offset, cover the data exactly once."""
    reached = data_start
    for entry in entries:
        end = entry.offset + entry.nbytes
        who = f"tensor {entry.name[:120]!r}"
        if end > size:
            raise FileDamaged(path, f"{who} ends at byte {end:,} of a file of {size:,}", INTERRUPTED)
        if entry.offset < reached:
            raise FileDamaged(path, f"{who} begins {reached - entry.offset:,} bytes inside another")
        if entry.offset > reached:
            raise FileDamaged(path, f"{entry.offset - reached:,} unclaimed bytes before {who}")
        reached = end
    if reached < size:
        raise FileDamaged(path, f"{size - reached:,} unclaimed bytes at the end")


@final
class TensorFile:
    """A safetensors file whose header has been read and checked; nothing stays open.

    Every read checks that the file is still the one whose header was read (identity, length and times of change) and
    raises `FileChanged` otherwise. A change within the resolution of the file system's clock goes unnoticed unless it
    shortens the file; compare fingerprints where that matters. Threads may share a `TensorFile`.
    """

    def __init__(self, path: Path | str, *, follow_links: bool = False):
        self.path = Path(path)
        if sys.byteorder != "little":
            raise UsageError("this machine is big-endian; safetensors files are read on little-endian ones only")
        with open_regular(self.path, follow_links) as file:
            status = os.fstat(file.fileno())
            entries, metadata = read_header(file, status.st_size, self.path)
        self._seal = seal(status)
        self.entries: Mapping[str, TensorEntry] = MappingProxyType(entries)  # by name, in the order of the file
        self.metadata: Mapping[str, str] = MappingProxyType(metadata)  # the table of strings that the file carries

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of the file."""
        return tuple(self.entries)

    def tensor(self, name: str, rows: slice | Sequence[int] | Array | None = None) -> Array:
        """Read one tensor, or some of its rows, into a new array in the dtype of the file.

        `rows` are indices of the first axis: a slice of step 1 (clipped to the axis, as NumPy does) or integers from 0
        to its length - 1, in any order, repeated or not; None: all. Only these rows are read. BF16 is
        `ml_dtypes.bfloat16`.
        """
        entry = self.entry(name)
        shape = entry.shape
        if rows is None:
            data = self._read(entry.offset, entry.nbytes)
        else:
            runs = _runs(rows, entry)
            stride = entry.nbytes // shape[0] if shape[0] else 0
            parts = [self._read(entry.offset + a * stride, (b - a) * stride) for a, b in runs]
            data = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])
            shape = (sum(b - a for a, b in runs), *shape[1:])
        if entry.dtype == "BOOL" and data.size and data.max() > 1:
            raise FileDamaged(self.path, f"tensor {name[:120]!r} holds the byte {data.max()}, not 0 or 1")
        return data.view(DTYPES[entry.dtype]).reshape(shape)

    def fingerprint(self, name: str) -> str:
        """Return the sha256 of a tensor's bytes, reading a megabyte at a time.

        It equals `hashlib.sha256(file.tensor(name).tobytes()).hexdigest()`: dtype and shape do not enter.
        """
        entry = self.entry(name)
        digest = hashlib.sha256()
        for done in range(0, entry.nbytes, CHUNK):
            digest.update(self._read(entry.offset + done, min(CHUNK, entry.nbytes - done)).data)
        return digest.hexdigest()

    def entry(self, name: str) -> TensorEntry:
        """Return what the header says about a tensor."""
        try:
            return self.entries[name]
        except KeyError:
            raise UsageError(unknown_name(self.path, name, self.names)) from None

    def __repr__(self) -> str:
        return f"TensorFile({str(self.path)!r}, {len(self.entries)} tensors)"

    def _read(self, offset: int, count: int) -> Array:
        """Read bytes into new memory, and check that the file is the one whose header was read."""
        try:
            data = np.fromfile(self.path, np.uint8, count, offset=offset)
            # After reading, so that a change during the read is seen as well.
            now = seal(os.stat(self.path))
        except OSError as error:
            raise FileChanged(self.path, f"can no longer be read: {error.strerror}") from error
        if data.size < count:
            raise FileChanged(self.path, f"ends at byte {offset + data.size:,}, in the middle of a tensor")
        if now != self._seal:
            raise FileChanged(self.path, "was altered or replaced after its header was read")
        return data


def unknown_name(path: Path, name: str, names: Iterable[str]) -> str:
    """Say that there is no such tensor, and which names come near."""
    # Comparing takes the product of two lengths: names from outside may be many, and long.
    comparable = [known for known in islice(names, 10_000) if len(known) <= 200]
    near = difflib.get_close_matches(name[:200], comparable, n=3)
    return f"{path} holds no tensor {name[:200]!r}; " + (f"near it: {', '.join(near)}" if near else "see .names")


def _runs(rows: slice | Sequence[int] | Array, entry: TensorEntry) -> list[tuple[int, int]]:
    """Turn a choice of rows into the consecutive runs (start, stop) to read."""
    if not entry.shape:
        raise UsageError(f"tensor {entry.name!r} is a scalar and has no rows")
    if isinstance(rows, slice):
        start, stop, step = rows.indices(entry.shape[0])
        if step != 1:
            raise UsageError(f"rows={rows}: only slices of step 1; for others give the indices")
        return [(start, max(start, stop))]
    chosen = np.asarray(rows)
    if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
        raise ShapeError(f"rows: a slice or a list of integers, not {chosen.dtype} of shape {chosen.shape}")
    if not chosen.size:
        return []
    if chosen.min() < 0 or chosen.max() >= entry.shape[0]:
        raise ShapeError(f"rows from {chosen.min()} to {chosen.max()} of {entry.name!r}, which has {entry.shape[0]}")
    ends = np.flatnonzero(np.diff(chosen.astype(np.int64)) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(chosen, ends)]
