"""The header of a safetensors file: eight bytes of length, then JSON, then data; checked before memory is taken.

    [ n: uint64, little endian ][ n bytes of JSON ][ data ]
    JSON: {name: {"dtype": str, "shape": [int], "data_offsets": [begin, end]}, "__metadata__": {str: str}}

Offsets count from the end of the header. The tensors tile the data: no overlap, no gap, nothing after the last one.

Source: the safetensors format, https://github.com/huggingface/safetensors (section "Format").
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from manyheads.models import refusals
from manyheads.models.strictjson import parse_json

HEADER_LIMIT = 100_000_000
"""The longest header in bytes: the limit of the format's own library."""

DIMENSION_LIMIT = 64
"""The largest number of dimensions: NumPy's."""

SIZE_LIMIT = 2**63 - 1

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "F64": np.dtype("<f8"),
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "I64": np.dtype("<i8"),
        "I32": np.dtype("<i4"),
        "I16": np.dtype("<i2"),
        "I8": np.dtype("i1"),
        "U64": np.dtype("<u8"),
        "U32": np.dtype("<u4"),
        "U16": np.dtype("<u2"),
        "U8": np.dtype("u1"),
        "BOOL": np.dtype("?"),
    }
)
"""The element types: the name in the file and what NumPy calls it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as the header describes it.

    Attributes
    ----------
    name
        Its name.
    dtype
        Its element type, a key of `DTYPES`.
    shape
        Its dimensions.
    offset, nbytes
        Where its bytes begin in the file, and how many there are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file holds: its tensors in the order of the file, and its metadata."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def read_header(read: Callable[[int, int], bytes | bytearray], size: int, path: Path) -> Header:
    """Read and check the header of a file of `size` bytes.

    Parameters
    ----------
    read
        `read(offset, count)` returns exactly `count` bytes.
    size
        The length of the whole file in bytes.
    path
        Its path, for messages.

    Raises
    ------
    CheckpointRefused
        One subclass for each rule; nothing larger than the header itself is allocated before all of them hold.
    """
    if size == 0:
        raise refusals.EmptyFile(path, "0 bytes", 0)
    if size < 8:
        raise refusals.FileTooShort(path, f"{size} bytes; a safetensors file has at least 8", size)
    start = read(0, 8)
    length = int.from_bytes(start, "little")
    if length > HEADER_LIMIT:
        if start[:4] == b"PK\x03\x04" or (start[0] == 0x80 and start[1] in range(2, 6)):
            raise refusals.PickleRefused(path, "begins like a pickled PyTorch file", start)
        raise refusals.HeaderTooLarge(path, f"a header of {length:,} bytes; at most {HEADER_LIMIT:,}", length)
    if length > size - 8:
        raise refusals.HeaderBeyondFile(path, f"a header of {length:,} bytes in a file of {size:,}", length)
    return parse_header(read(8, length), 8 + length, size, path)


def parse_header(raw: bytes | bytearray, data_start: int, size: int, path: Path) -> Header:
    """Check the JSON text of a header against the size of its file.

    Parameters
    ----------
    raw
        The JSON text.
    data_start, size
        Where the data begin, and where the file ends.
    path
        The file, for messages.
    """
    if not raw.startswith(b"{"):
        raise refusals.JSONNotObject(path, f"the header begins with {bytes(raw[:1])!r}, not with '{{'", raw[:16])
    table = parse_json(raw, path)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refusals.MetadataInvalid(path, "__metadata__ is not a table of strings")
    entries = [_entry(name, fields, data_start, path) for name, fields in table.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_tiling(entries, data_start, size, path)
    return Header(
        entries=MappingProxyType({entry.name: entry for entry in entries}), metadata=MappingProxyType(metadata)
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _entry(name: str, fields: Any, data_start: int, path: Path) -> Entry:
    who = f"tensor {name[:120]!r}"
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        given = sorted(fields)[:8] if isinstance(fields, dict) else type(fields).__name__
        raise refusals.EntryInvalid(path, f"{who} has {given}, not exactly dtype, shape and data_offsets", given)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise refusals.UnknownDtype(path, f"{who} has dtype {str(dtype)[:40]!r}, not one of {', '.join(DTYPES)}", dtype)
    if (
        not isinstance(shape, list)
        or len(shape) > DIMENSION_LIMIT
        or not all(_is_integer(side) and 0 <= side <= SIZE_LIMIT for side in shape)
        # NumPy counts the bytes of an empty array as if its zeros were ones, and so must this check.
        or math.prod(side or 1 for side in shape) * DTYPES[dtype].itemsize > SIZE_LIMIT
    ):
        raise refusals.ShapeInvalid(path, f"{who} has shape {str(shape)[:200]}", shape)
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_is_integer(offset) for offset in offsets)
        or not 0 <= offsets[0] <= offsets[1]
    ):
        raise refusals.OffsetsInvalid(path, f"{who} has data_offsets {str(offsets)[:200]}", offsets)
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if needed != end - begin:
        raise refusals.ByteCountMismatch(
            path, f"{who}: {dtype} of shape {shape} takes {needed:,} bytes, its offsets span {end - begin:,}", needed
        )
    return Entry(name, dtype, tuple(shape), data_start + begin, needed)


def _check_tiling(entries: list[Entry], data_start: int, size: int, path: Path) -> None:
    """Check that the tensors, sorted by offset, cover the data exactly once."""
    reached = data_start
    for entry in entries:
        end = entry.offset + entry.nbytes
        if end > size:
            raise refusals.OffsetsBeyondFile(
                path, f"tensor {entry.name[:120]!r} ends at byte {end:,} of a file of {size:,}", end
            )
        if entry.offset < reached:
            raise refusals.TensorsOverlap(
                path, f"tensor {entry.name[:120]!r} begins {reached - entry.offset:,} bytes inside another", entry.name
            )
        if entry.offset > reached:
            raise refusals.GapBetweenTensors(
                path, f"{entry.offset - reached:,} unclaimed bytes before tensor {entry.name[:120]!r}", entry.name
            )
        reached = end
    if reached < size:
        raise refusals.TrailingBytes(path, f"{size - reached:,} unclaimed bytes at the end", size - reached)
