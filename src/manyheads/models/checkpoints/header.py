"""The header of a safetensors file: eight bytes of length, then JSON, then data; checked before memory is taken.

    [ n: uint64, little endian ][ n bytes of JSON ][ data ]
    JSON: {name: {"dtype": str, "shape": [int], "data_offsets": [begin, end]}, "__metadata__": {str: str}}

Offsets count from the end of the header. The tensors tile the data: no overlap, no gap, nothing after the last one.

Source: the safetensors format, https://github.com/huggingface/safetensors (section "Format").
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from manyheads.models.checkpoints.files import parse_json
from manyheads.models.refusals import INTERRUPTED, FileDamaged, PickleRefused

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
