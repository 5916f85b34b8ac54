"""One safetensors file, read tensor by tensor into fresh memory.

The file is read, never mapped: the pages of a mapping count as resident once they are touched, so a mapping that is
walked from end to end costs as much memory as the whole file.
"""

import difflib
import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from manyheads.errors import ShapeError, UsageError
from manyheads.models.checkpoints.files import open_regular, seal
from manyheads.models.checkpoints.header import DTYPES, TensorEntry, read_header
from manyheads.models.refusals import FileChanged, FileDamaged

Array = NDArray[Any]

CHUNK = 1 << 20


@final
class TensorFile:
    """A safetensors file whose header has been read and checked; nothing stays open.

    Attributes
    ----------
    entries
        Name → `TensorEntry` (dtype, shape, bytes), in the order of the file.
    metadata
        The table of strings that the file carries.

    Notes
    -----
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
        self.entries: Mapping[str, TensorEntry] = MappingProxyType(entries)
        self.metadata: Mapping[str, str] = MappingProxyType(metadata)

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
