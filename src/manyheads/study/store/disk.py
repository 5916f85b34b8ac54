"""Writing so that nothing is ever half there, and saying clearly what is wrong with a disk or a file."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manyheads.errors import FileRefused, ManyheadsError


class StoreDamaged(FileRefused):
    """A stored file is missing, altered, added or unreadable."""


class StoreFull(ManyheadsError, OSError):
    """The disk or a quota is full; what was finished before is kept."""


def write_json(path: Path, data: object) -> None:
    """Write JSON in one atomic step."""
    write_text(path, json.dumps(data, indent=1, sort_keys=True, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Write a text to a temporary sibling and move it into place: readers see the old file or the new one.

    Raises
    ------
    StoreFull
        The disk is full; the old file is as it was.
    """
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


def read_json(path: Path, what: str) -> Any:
    """Read JSON; `what` says in the error what its absence means.

    Raises
    ------
    FileRefused
        There is no such file.
    StoreDamaged
        It cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileRefused(f"{path.parent}: {what} ({path.name} is missing)") from None
    except (OSError, ValueError) as error:
        raise StoreDamaged(f"{path} cannot be read: {error}") from error


def write_signed(path: Path, data: dict[str, Any]) -> None:
    """Write JSON with the sha256 of what it says, in one atomic step."""
    write_json(path, data | {"sha256": _json_sha256(data)})


def read_signed(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """Read what `write_signed` wrote.

    Raises
    ------
    FileRefused
        There is no such file; `what` says what that means.
    StoreDamaged
        It cannot be read, or says something else than was written; `remedy` says what to do.
    """
    data = read_json(path, what)
    if not isinstance(data, dict) or data.pop("sha256", None) != _json_sha256(data):
        raise StoreDamaged(f"{path} has been altered (its sha256 differs); {remedy}")
    return data


def _json_sha256(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def hash_files(folder: Path, but: str) -> dict[str, str]:
    """Return the sha256 of every file below a folder, by relative path, without those that are called `but`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != but)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def temporary_beside(path: Path) -> Path:
    """Return a hidden name beside a path that says which process it belongs to."""
    return path.with_name(f".{path.name}.{_host()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


def is_abandoned(temporary: Path) -> bool:
    """Tell whether a temporary name belongs to a process of this machine that is gone."""
    host, process = temporary.name.split(".")[-4:-2] if temporary.name.count(".") >= 5 else ("", "")
    if not process.isdigit() or host != _host() or int(process) == os.getpid():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _host() -> str:
    """Name the set of processes that a process number means something in: a machine, or a container in it."""
    try:
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        namespace = "all"
    return f"{socket.gethostname().replace('.', '-')}-{namespace}"


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
