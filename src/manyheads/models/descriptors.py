"""Opening a file from outside: regular, not a link unless allowed, never one that blocks."""

import errno
import os
import stat
from pathlib import Path

from manyheads.models import refusals

# Without O_NONBLOCK, opening a pipe that has no writer would wait for ever. Windows lacks all but O_BINARY.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

CHUNK = 1 << 20


def open_regular(path: Path, follow_links: bool) -> tuple[int, os.stat_result]:
    """Open a regular file for reading.

    Parameters
    ----------
    path
        The file.
    follow_links
        Whether the last part of `path` may be a symbolic link.

    Returns
    -------
    int, os.stat_result
        The descriptor, which the caller closes, and its status.

    Raises
    ------
    FileMissing, SymlinkRefused, NotAFile, FileUnreadable
        What stands in the way.
    """
    try:
        if not follow_links and os.path.islink(path):
            raise refusals.SymlinkRefused(path, f"is a symbolic link to {path.readlink()}", str(path.readlink()))
        # O_NOFOLLOW closes the moment between the check, which names the target, and the opening.
        descriptor = os.open(path, _FLAGS | (0 if follow_links else getattr(os, "O_NOFOLLOW", 0)))
    except FileNotFoundError:
        raise refusals.FileMissing(path, "there is no such file") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise refusals.SymlinkRefused(path, "is a symbolic link", error.errno) from error
        raise refusals.FileUnreadable(path, f"cannot be opened: {error.strerror}", error.errno) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise refusals.NotAFile(path, f"is {kind}", stat.filemode(status.st_mode))
    return descriptor, status


def seal(status: os.stat_result) -> tuple[int, int, int]:
    """Length, time of writing and time of change: the last one moves even when the other is set back."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read into `buffer` from `offset` on; returns how many bytes came, 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    # Windows: one position for all readers, and a copy of at most one chunk.
    os.lseek(descriptor, offset, os.SEEK_SET)
    data = os.read(descriptor, min(CHUNK, len(buffer)))
    buffer[: len(data)] = data
    return len(data)
