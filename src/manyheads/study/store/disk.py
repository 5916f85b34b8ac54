"""Atomic writes, and errors of disks and files."""

import contextlib
import errno
import hashlib
import io
import json
import os
import socket
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manyheads._json import Json, parse_bounded
from manyheads._overview import printable as printable
from manyheads.errors import FileRefused, ManyheadsError

LARGEST_JSON = 1 << 26  # bytes: pictures of a large run
LARGEST_HEADER = 1 << 24  # bytes of run.json: a grid of 100,000 cells
LARGEST_FILE = 1 << 32


class StoreDamaged(FileRefused):
    """A stored file is missing, altered, added, unreadable, or not of the form that this library writes."""


class StoreFull(ManyheadsError, OSError):
    """The disk or a quota is full; what was finished before is kept."""


def write_json(path: Path, data: object) -> None:
    """Write JSON in one atomic step."""
    write_text(path, json.dumps(data, indent=1, sort_keys=True, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Write a text to a temporary sibling and move it into place: readers see the old file or the new one."""
    temporary = temporary_beside(path)
    with room_on_disk(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def read_json(path: Path, what: str, largest: int = LARGEST_JSON) -> Json:
    """Read JSON; `what` says in the error what its absence means."""
    try:
        return parse_bounded(read_bounded(path, largest))
    except FileNotFoundError:
        raise FileRefused(f"{path.parent}: {what} ({path.name} is missing)") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreDamaged(f"{path} cannot be read: {error}") from error


@contextlib.contextmanager
def open_bounded(path: Path, largest: int) -> Iterator[io.BufferedReader]:
    """Open a regular file of bounded size for reading; symbolic links are not followed."""
    # Non-blocking, or opening a pipe would wait for somebody to write into it.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(no_link(path), flags)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise StoreDamaged(f"{path} is no regular file")
        if about.st_size > largest:
            raise StoreDamaged(f"{path} has {about.st_size:,} bytes; expected at most {largest:,}")
    except BaseException:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as file:
        yield file


def read_bounded(path: Path, largest: int = LARGEST_JSON) -> bytes:
    """Read a regular file of bounded size; raises what `open_bounded` does."""
    with open_bounded(path, largest) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def no_link(path: Path) -> Path:
    """Return a path, and refuse a symbolic link."""
    if path.is_symlink():
        raise StoreDamaged(f"{path} is a symbolic link; a store holds none")
    return path


def list_files(folder: Path) -> dict[str, int]:
    """Return the size of every file below a folder by relative path, and refuse links, pipes and devices."""
    found: dict[str, int] = {}
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(folder / below) as entries:
            for entry in entries:
                about = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(about.st_mode):
                    waiting.append(f"{below}{entry.name}/")
                elif stat.S_ISREG(about.st_mode):
                    found[below + entry.name] = about.st_size
                else:
                    kind = "a symbolic link" if stat.S_ISLNK(about.st_mode) else "no regular file"
                    raise StoreDamaged(f"{entry.path} is {kind}; a store holds none")
    return found


def write_signed(path: Path, data: dict[str, Json]) -> None:
    """Write JSON with the sha256 of what it says, in one atomic step."""
    write_json(path, data | {"sha256": _json_sha256(data)})


def read_signed(path: Path, what: str, remedy: str, largest: int = LARGEST_JSON) -> dict[str, Json]:
    """Read what `write_signed` wrote."""
    data = read_json(path, what, largest)
    if not isinstance(data, dict) or data.pop("sha256", None) != _json_sha256(data):
        raise StoreDamaged(f"{path} has been altered (its sha256 differs); {remedy}")
    return data


def _json_sha256(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def hash_files(folder: Path, but: str) -> dict[str, str]:
    """Return the sha256 of every file below a folder, by relative path, without those that are called `but`."""
    digests = {}
    for name in sorted(list_files(folder)):
        if name.rpartition("/")[2] != but:
            with open_bounded(folder / name, LARGEST_FILE) as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def temporary_beside(path: Path) -> Path:
    """Return a hidden name beside a path that says which process it belongs to."""
    return path.with_name(f".{path.name}.{_host()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


def is_abandoned(temporary: Path) -> bool:
    """Tell whether a temporary name belongs to a process of this machine that is gone."""
    host, process = temporary.name.split(".")[-4:-2] if temporary.name.count(".") >= 5 else ("", "")
    if not process.isdigit() or host != _host() or int(process) == os.getpid():
        return False
    try:
        with contextlib.suppress(PermissionError):
            os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    return False


def _host() -> str:
    """Name the set of processes that a process number means something in: a machine, or a container in it."""
    try:
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        namespace = "all"
    return f"{socket.gethostname().replace('.', '-')}-{namespace}"


@contextlib.contextmanager
def trusting_nothing(path: Path, remedy: str, but: Any = StoreDamaged) -> Iterator[None]:
    """Turn whatever goes wrong while stored data are interpreted into `StoreDamaged`; errors of kind `but` pass."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"[:300]
        raise StoreDamaged(f"{path} does not hold what this library writes ({what}); {remedy}") from error


@contextlib.contextmanager
def room_on_disk(path: Path) -> Iterator[None]:
    """Turn the system's word for a full disk or quota into `StoreFull`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        message = f"no room left for {path}: what is finished is kept; free some space and run the same command again"
        raise StoreFull(error.errno, message) from error
