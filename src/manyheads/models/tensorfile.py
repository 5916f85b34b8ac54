"""One safetensors file, read tensor by tensor into fresh memory.

The file is read with `preadv` and never mapped: the pages of a mapping count as resident once they are touched, so a
mapping that is walked from end to end costs as much memory as the whole file.
"""

import difflib
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import final

import numpy as np

from manyheads.errors import ShapeError, UsageError
from manyheads.models import refusals
from manyheads.models.descriptors import CHUNK, open_regular, read_at, seal
from manyheads.models.header import DTYPES, Entry, read_header


@final
class TensorFile:
    """A safetensors file that is open for reading.

    Parameters
    ----------
    path
        The file.
    follow_links
        Whether `path` itself may be a symbolic link.

    Attributes
    ----------
    path
        The file.
    entries
        Name → `Entry` (dtype, shape, bytes), in the order of the file.
    metadata
        The table of strings that the file carries.

    Raises
    ------
    CheckpointRefused
        The file breaks a rule of the format; see `manyheads.models.refusals`, one class for each rule.

    Notes
    -----
    Every read checks that the file is still the one that was opened (length and times of change) and raises
    `FileChanged` otherwise; a file that was replaced or whose permissions were set counts as changed. A change within
    the resolution of the file system's clock after opening goes unnoticed unless it shortens the file; compare
    fingerprints where that matters. Reads keep no position, so threads may share an open file.

    Examples
    --------
    >>> import tempfile, numpy as np, safetensors.numpy
    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> safetensors.numpy.save_file({"w": np.arange(6.0).reshape(3, 2)}, path)
    >>> with TensorFile(path) as file:
    ...     print(file.names, file.tensor("w", rows=slice(1, 3)).tolist())
    ('w',) [[2.0, 3.0], [4.0, 5.0]]
    """

    def __init__(self, path: Path | str, *, follow_links: bool = False):
        self.path = Path(path)
        if sys.byteorder != "little":
            raise UsageError("this machine is big-endian; safetensors files are read on little-endian ones only")
        self._descriptor, status = open_regular(self.path, follow_links)
        self._seal = seal(status)
        try:
            header = read_header(self._read, status.st_size, self.path)
        except BaseException:
            self.close()
            raise
        self.entries: Mapping[str, Entry] = header.entries
        self.metadata: Mapping[str, str] = header.metadata

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of the file."""
        return tuple(self.entries)

    def tensor(self, name: str, rows: slice | Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Read one tensor, or some of its rows, into a new array.

        Parameters
        ----------
        name
            Which tensor.
        rows
            Which indices of the first axis: a slice of step 1 (clipped to the axis, as NumPy does) or integers from 0
            to its length - 1, in any order, repeated or not. None: all. Only these rows are read.

        Returns
        -------
        np.ndarray
            Writable, in the dtype of the file (`ml_dtypes.bfloat16` for BF16); shape of the tensor, the first axis
            replaced by the rows.

        Raises
        ------
        UsageError
            No tensor of that name, or a slice with another step.
        ShapeError
            Rows outside the tensor.
        FileChanged
            The file was truncated or altered since it was opened.
        BooleanInvalid
            A BOOL tensor holds another byte than 0 and 1.
        """
        entry = self.entry(name)
        length = entry.shape[0] if entry.shape else None
        count, runs = _runs(rows, length, entry)
        stride = entry.nbytes // length if length else 0
        shape = entry.shape if rows is None else (count, *entry.shape[1:])
        data = np.empty(entry.nbytes if rows is None else count * stride, np.uint8)
        buffer = data.data
        if rows is None:
            self._fill(buffer, entry.offset)
        else:
            filled = 0
            for start, stop in runs:
                taken = (stop - start) * stride
                self._fill(buffer[filled : filled + taken], entry.offset + start * stride)
                filled += taken
        if entry.dtype == "BOOL" and data.size and data.max() > 1:
            raise refusals.BooleanInvalid(self.path, f"tensor {name[:120]!r} holds the byte {data.max()}", name)
        return data.view(DTYPES[entry.dtype]).reshape(shape)

    def stream(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Read tensor after tensor, in the order of the file or of `names`.

        One tensor is held at a time by this generator. A loop variable keeps the last one alive while the next is
        read: `del` it at the end of the loop's body where two would be too many.

        Yields
        ------
        tuple[str, np.ndarray]
            Name and a new array.
        """
        for name in self.names if names is None else names:
            yield name, self.tensor(name)

    def fingerprint(self, name: str) -> str:
        """Return the sha256 of a tensor's bytes, reading a megabyte at a time.

        It equals `hashlib.sha256(file.tensor(name).tobytes()).hexdigest()`: dtype and shape do not enter.
        """
        entry = self.entry(name)
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(CHUNK, entry.nbytes)))
        for done in range(0, entry.nbytes, CHUNK):
            part = buffer[: min(CHUNK, entry.nbytes - done)]
            self._fill(part, entry.offset + done)
            digest.update(part)
        return digest.hexdigest()

    def entry(self, name: str) -> Entry:
        """Return what the header says about a tensor.

        Raises
        ------
        UsageError
            No tensor of that name; the message lists the nearest names.
        """
        try:
            return self.entries[name]
        except KeyError:
            raise UsageError(unknown_name(self.path, name, self.names)) from None

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"TensorFile({str(self.path)!r}, {len(self.entries)} tensors{', closed' if self._descriptor < 0 else ''})"
        )

    def _read(self, offset: int, count: int) -> bytearray:
        buffer = bytearray(count)
        self._fill(memoryview(buffer), offset)
        return buffer

    def _fill(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on, or say that the file is no longer what it was."""
        if self._descriptor < 0:
            raise UsageError(f"{self.path} is closed: read inside its with block")
        done = 0
        try:
            while done < len(buffer):
                got = read_at(self._descriptor, buffer[done:], offset + done)
                if not got:
                    raise refusals.FileChanged(self.path, f"ends at byte {offset + done:,}, in the middle of a tensor")
                done += got
            # After reading, so that a change during the read is seen as well.
            now = seal(os.fstat(self._descriptor))
        except OSError as error:
            raise refusals.FileUnreadable(self.path, f"reading failed: {error.strerror}", error.errno) from error
        if now != self._seal:
            raise refusals.FileChanged(self.path, "was altered after it was opened", now[0])


def unknown_name(path: Path, name: str, names: Iterable[str]) -> str:
    """Say that there is no such tensor, and which names come near."""
    # Comparing takes the product of two lengths: names from outside may be many, and long.
    comparable = [known for known in islice(names, 10_000) if len(known) <= 200]
    near = difflib.get_close_matches(name[:200], comparable, n=3)
    return f"{path} holds no tensor {name[:200]!r}; " + (f"near it: {', '.join(near)}" if near else "see .names")


def _runs(
    rows: slice | Sequence[int] | np.ndarray | None, length: int | None, entry: Entry
) -> tuple[int, list[tuple[int, int]]]:
    """Turn a choice of rows into their number and the consecutive runs (start, stop) to read."""
    if rows is None:
        return 0, []
    if length is None:
        raise UsageError(f"tensor {entry.name!r} is a scalar and has no rows")
    if isinstance(rows, slice):
        start, stop, step = rows.indices(length)
        if step != 1:
            raise UsageError(f"rows={rows}: only slices of step 1; for others give the indices")
        stop = max(start, stop)
        return stop - start, [(start, stop)]
    chosen = np.asarray(rows)
    if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
        raise ShapeError(f"rows: a slice or a list of integers, not {chosen.dtype} of shape {chosen.shape}")
    if not chosen.size:
        return 0, []
    if chosen.min() < 0 or chosen.max() >= length:
        raise ShapeError(f"rows from {chosen.min()} to {chosen.max()} of {entry.name!r}, which has {length}")
    chosen = chosen.astype(np.int64)
    heads = np.flatnonzero(np.diff(chosen, prepend=chosen[0] - 2) != 1)
    ends = np.append(heads[1:], chosen.size) - 1
    return chosen.size, [(int(chosen[a]), int(chosen[b]) + 1) for a, b in zip(heads, ends, strict=True)]
