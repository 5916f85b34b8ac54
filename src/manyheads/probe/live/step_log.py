"""Append-only log of measured steps: a JSON header, and one JSON line for each step.

A line goes to the operating system as soon as its step is measured: a process that is killed loses no finished step. A
line that was being written is dropped when the log is read or continued. A training that starts again from a
checkpoint appends to the same log; on reading, a step replaces what the log said before of that step and later ones.
"""

import json
import math
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from manyheads._json import Json, parse_bounded
from manyheads.errors import UsageError
from manyheads.study.store.disk import LARGEST_FILE, StoreDamaged, open_bounded, trusting_nothing

Line = dict[str, Json]  # figures of one step, or the header, for JSON

FORMAT = 1
REMEDY = "move it away and record again"


class StepLog:
    """Log of one kind of figures, in a file or in memory.

    A file is continued if its header is the same, and refused otherwise; without a path, lines are kept in memory.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Json]) -> None:
        self._path, self._header = path, {"manyheads": "step log", "format": FORMAT, **header}
        self._file: BinaryIO | None = None
        self._lines: list[Line] = []
        if path is not None and _has_begun(path) and (found := read_log(path)[0]) != self._header:
            other = sorted(key for key in found.keys() | self._header.keys() if found.get(key) != self._header.get(key))
            raise UsageError(f"{path} holds another recording ({', '.join(other)} differ): give another store")

    def append(self, line: Mapping[str, Json]) -> None:
        """Add the line of a step."""
        if self._path is None:
            self._lines.append(dict(line))
            return
        if self._file is None:
            self._file = _open(self._path, self._header)
            self._close = weakref.finalize(self, self._file.close)
        self._file.write(_encode(line))
        self._file.flush()

    def read(self) -> tuple[Line, list[Line]]:
        """Return the header and the lines that count."""
        if self._path is not None and _has_begun(self._path):
            return read_log(self._path)
        return self._header, drop_replaced(self._lines)

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        if self._file is not None:
            self._close()
            self._file = None


def read_log(path: Path) -> tuple[Line, list[Line]]:
    """Read the header and the lines that count; StoreDamaged if it is no log, or damaged before its end."""
    with open_bounded(path, LARGEST_FILE) as file:
        whole = [line for line in file if line.endswith(b"\n")]  # the last one may be torn
    with trusting_nothing(path, REMEDY):
        parsed = [parse_bounded(line) for line in whole]
        if not parsed:
            raise StoreDamaged(f"{path} has no header: nothing was recorded; {REMEDY}")
        header, lines = parsed[0], parsed[1:]
        if header["manyheads"] != "step log" or header["format"] != FORMAT:
            raise StoreDamaged(f"{path} is no step log of format {FORMAT}; {REMEDY}")
        return header, drop_replaced(lines)


def drop_replaced(lines: list[Line]) -> list[Line]:
    """Return the lines in the order of their steps, without those that a training which started again replaced."""
    kept: list[Line] = []
    for line in lines:
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def _has_begun(path: Path) -> bool:
    """Tell whether a log holds its header: a process may have been killed before that."""
    if not path.exists():
        return False
    with open_bounded(path, LARGEST_FILE) as file:
        return file.readline().endswith(b"\n")


def _open(path: Path, header: Mapping[str, Json]) -> BinaryIO:
    """Open a log for appending, without the torn line of a killed process, and write the header of a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b")
    try:
        with suppress(ImportError):  # where the system cannot lock files
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(f"another process records into {path.parent}: give another store") from None
    except OSError:  # a network disk without locks
        pass
    file.seek(0)
    whole = sum(len(line) for line in file if line.endswith(b"\n"))
    file.truncate(whole)
    if not whole:
        file.write(_encode(header))
    return file


def _encode(line: Mapping[str, Json]) -> bytes:
    return json.dumps(_plain(line), allow_nan=False).encode() + b"\n"


def _plain(value: object) -> Json:
    """Return a value as JSON can hold it: arrays as lists, numbers that are not finite as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
