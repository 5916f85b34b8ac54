"""Segments: the units of a run at work, one append-only file of JSON lines for each process that writes.

Lines of a segment::

    {"kind": "start", "format": 2, "run": ..., "owner": ..., "host": ..., "pid": ...}
    {"kind": "environment", "id": ..., "environment": {...}}          before the first unit under it
    {"kind": "schema", "id": ..., "schema": {...}}                    before the first unit of it
    {"kind": "unit", "unit": 7, "schema": ..., "environment": ..., "time": ..., "digest": ..., "data": base64}

A line is written by one call, so a process that is killed leaves whole lines and at most one torn last line, which is
no line. No other process writes to the file, so there are no locks.
"""

import base64
import binascii
import contextlib
import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from manyheads._json import Json, parse_bounded
from manyheads._overview import printable
from manyheads.errors import FileRefused
from manyheads.study.store.disk import StoreDamaged, no_link, open_bounded, room_on_disk, trusting_nothing
from manyheads.study.store.records.schema import Schema, digest_of, identify, is_unit_number

FORMAT = 2
SUFFIX, SEALED = ".jsonl", ".sealed"  # a compaction takes a segment by the second
DAMAGED = ".damaged"  # a repair has copied what was good in it
LARGEST_SEGMENT = 1 << 34
LARGEST_LINE = 1 << 28
SYNC_SECONDS = 1.0
REMEDY = "'manyheads runs repair' keeps its good units"


class Frame(NamedTuple):
    """A unit ready to be written."""

    unit: int
    environment: dict[str, Json]
    schema: dict[str, Json]
    block: bytes


class Entry(NamedTuple):
    """Where a unit is stored: file, byte and length of its line (or its row in a table), and what identifies it."""

    place: str
    offset: int
    length: int
    schema: str
    environment: str
    digest: str
    time: int


class SegmentWriter:
    """Appends units to a segment of its own for a launch, the owner; safe to share between threads."""

    def __init__(self, path: Path, run: str, owner: str):
        self.folder, self.run, self.owner = path / "segments", run, owner
        self.lock, self.file, self.full = threading.Lock(), -1, False

    def append(self, frame: Frame) -> None:
        """Append a unit; after `StoreFull` what was written before is whole, and this writer writes no more."""
        with self.lock, room_on_disk(self.folder):
            if self.full:
                raise OSError(errno.ENOSPC, "the disk was full")
            environment, schema = identify(frame.environment), identify(frame.schema)
            digest = digest_of(self.run, frame.unit, schema, environment, frame.block)
            data = base64.b64encode(frame.block).decode()
            line = (
                f'{{"kind":"unit","unit":{frame.unit},"schema":"{schema}","environment":"{environment}",'
                f'"time":{time.time_ns()},"digest":"{digest}","data":"{data}"}}\n'
            ).encode()
            # A compaction renames the file before it reads it for the last time: what comes after is written again.
            while True:
                if self.file < 0:
                    self._open()
                before = b""
                if environment not in self.known:
                    before += _line(kind="environment", id=environment, environment=frame.environment)
                if schema not in self.known:
                    before += _line(kind="schema", id=schema, schema=frame.schema)
                self._write(before + line)
                self.known |= {environment, schema}
                if time.monotonic() - self.synced > SYNC_SECONDS:
                    self._sync()
                if os.path.exists(self.path):
                    return
                self._close()

    def sync(self) -> None:
        """Have what was appended survive a power failure."""
        with self.lock, room_on_disk(self.folder):
            if self.file >= 0:
                self._sync()

    def close(self) -> None:
        """Sync and close."""
        with self.lock, room_on_disk(self.folder):
            try:
                if self.file >= 0:
                    self._sync()
            finally:
                self._close()

    def __del__(self) -> None:
        self._close()

    def _open(self) -> None:
        no_link(self.folder).mkdir(exist_ok=True)
        name = f"{time.time_ns():020d}.{self.owner}.{uuid.uuid4().hex[:8]}{SUFFIX}"
        self.path, self.size, self.synced = self.folder / name, 0, time.monotonic()
        self.known: set[str] = set()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        self.file = os.open(self.path, flags | getattr(os, "O_BINARY", 0), 0o666)
        start = {"format": FORMAT, "run": self.run, "owner": self.owner, "host": socket.gethostname()}
        self._write(_line(kind="start", **start, pid=os.getpid()))

    def _write(self, data: bytes) -> None:
        try:
            if (written := os.write(self.file, data)) != len(data):
                raise OSError(errno.ENOSPC, f"{written:,} of {len(data):,} bytes written")
        except OSError:
            self.full = True
            with contextlib.suppress(OSError):
                os.ftruncate(self.file, self.size)
            if not self.size:
                self.path.unlink(missing_ok=True)
            self._close()
            raise
        self.size += len(data)

    def _sync(self) -> None:
        try:
            os.fsync(self.file)
        except OSError:
            self.full = True
            self._close()
            raise
        self.synced = time.monotonic()

    def _close(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:  # closed already where synchronizing failed
            os.close(file)


def _line(**data: Json) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


class SegmentReader:
    """Reads what a segment of a run holds, sealed or not, from where it stopped the last time."""

    def __init__(self, path: Path, run: str):
        self.key, self.run = path.name.removesuffix(SEALED), run
        self.folder = path.parent
        self.position, self.line = 0, 0
        self.schemas: dict[str, Schema] = {}
        self.environments: dict[str, dict[str, Json]] = {}

    def scan(self) -> list[tuple[int, Entry]]:
        """Return the units that were appended since the last call; the values of none are decoded."""
        found = []
        with self._opened() as file:
            file.seek(self.position)
            with self._named():
                while (text := file.readline(LARGEST_LINE)).endswith(b"\n"):
                    record = parse(text)
                    if record["kind"] == "unit":
                        found.append((record["unit"], self._entry(record, len(text))))
                    else:
                        self._take(record)
                    self.line += 1
                    self.position += len(text)
            if len(text) == LARGEST_LINE:
                raise StoreDamaged(f"{self._path()}, line {self.line + 1}: a line without end; {REMEDY}")
        return found

    def load(self, wanted: dict[int, Entry]) -> dict[int, bytes]:
        """Return the blocks of units, each checked against its digest."""
        blocks = {}
        with self._opened() as file:
            for unit, entry in sorted(wanted.items(), key=lambda item: item[1].offset):
                file.seek(entry.offset)
                text = file.read(entry.length)
                with trusting_nothing(self._path(), f"unit {unit}: {REMEDY}"):
                    block = base64.b64decode(parse(text)["data"], validate=True)
                    size = self.schemas[entry.schema].size
                    digest = digest_of(self.run, unit, entry.schema, entry.environment, block)
                    if digest != entry.digest or len(block) != size:
                        what = f"byte {entry.offset}: unit {unit} has been altered (its sha256 differs)"
                        raise StoreDamaged(f"{self._path()}, {what}; {REMEDY}")
                    blocks[unit] = block
        return blocks

    def _path(self) -> Path:
        path = self.folder / self.key
        return path if path.exists() or path.is_symlink() else path.with_name(self.key + SEALED)

    def _opened(self) -> Any:
        return open_bounded(self._path(), LARGEST_SEGMENT)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except FileRefused:
            raise
        except Exception as error:
            what = printable(f"{type(error).__name__}: {error}")[:300]
            where = f"{self._path()}, line {self.line + 1}"
            raise StoreDamaged(f"{where} does not hold what this library writes ({what}); {REMEDY}") from error

    def _entry(self, record: dict[str, Json], length: int) -> Entry:
        unit, schema, environment = record["unit"], record["schema"], record["environment"]
        if not (type(unit) is int and type(record["time"]) is int and type(record["digest"]) is str):
            raise TypeError("a unit of other types")
        if schema not in self.schemas or environment not in self.environments:
            raise ValueError(f"unit {unit} before its schema or environment")
        if not (is_unit_number(unit) and 0 <= record["time"] < 1 << 63):
            raise ValueError(f"a unit {unit:.3g} of time {record['time']:.3g}")
        if 4 * -(-(size := self.schemas[schema].size) // 3) > length:  # before the memory of a block is taken
            raise ValueError(f"unit {unit}: a line of {length:,} bytes cannot hold values of {size:,} bytes")
        return Entry(self.key, self.position, length, schema, environment, record["digest"], record["time"])

    def _take(self, record: dict[str, Json]) -> None:
        kind = record["kind"]
        if (kind == "start") != (self.line == 0):
            raise ValueError(f"a line of kind {kind!r} here")
        if kind == "start":
            refuse_other_format(record["format"], self._path())
            if record["run"] != self.run:
                other = printable(record["run"])
                raise StoreDamaged(f"{self._path()} belongs to run {other}, not to {self.run}; move it away")
            return
        if kind not in ("schema", "environment"):
            raise ValueError(f"a line of kind {kind!r}")
        if identify(record[kind]) != record["id"]:
            raise StoreDamaged(f"{self._path()}, line {self.line + 1}: the {kind} has been altered; {REMEDY}")
        if kind == "schema":
            self.schemas[record["id"]] = Schema(record["schema"])
        else:
            self.environments[record["id"]] = record["environment"]


def refuse_other_format(version: Json, path: Path, remedy: str = REMEDY) -> None:
    """Refuse a format that this version does not read."""
    if type(version) is not int:  # True == 1
        raise StoreDamaged(f"{path}: the format {printable(repr(version))} is no integer; {remedy}")
    if version > FORMAT:
        newer = f"written by a newer manyheads (format {version}); this one reads format {FORMAT}"
        raise FileRefused(f"{path}: {newer}: upgrade manyheads")
    if version < 1:
        raise StoreDamaged(f"{path}: there is no format {version}; {remedy}")
    if version < FORMAT:
        raise FileRefused(f"{path}: written in format {version}, which is no longer read: run the study again")


def parse(text: bytes) -> dict[str, Json]:
    """Return the record of a line; ValueError or TypeError if there is none."""
    try:
        record = parse_bounded(text)
    except (ValueError, RecursionError, binascii.Error) as error:
        what = str(error) if type(error) is ValueError else type(error).__name__
        raise ValueError(f"no JSON: {what}") from error
    if not isinstance(record, dict):
        raise TypeError("no record")
    return record
