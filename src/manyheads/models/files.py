"""Regular files from outside: opened without following links, never one that blocks."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from manyheads.models import refusals

# Without O_NONBLOCK, opening a pipe that has no writer would wait for ever. Windows lacks all but O_BINARY.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

Seal = tuple[int, ...]
"""Identity, length and times of a file; the time of change moves even when the time of writing is set back."""


def open_regular(path: Path, follow_links: bool) -> BinaryIO:
    """Open a regular file for reading.

    Parameters
    ----------
    path
        The file.
    follow_links
        Whether the last part of `path` may be a symbolic link.

    Raises
    ------
    FileMissing, SymlinkRefused, FileUnreadable
        What stands in the way.
    """
    if "\0" in str(path):
        raise refusals.FileMissing(str(path).replace("\0", "\\0"), "no name of a file holds a null character")
    try:
        if not follow_links and os.path.islink(path):
            raise refusals.SymlinkRefused(path, f"is a symbolic link to {path.readlink()}")
        # O_NOFOLLOW closes the moment between the check, which names the target, and the opening.
        descriptor = os.open(path, _FLAGS | (0 if follow_links else getattr(os, "O_NOFOLLOW", 0)))
    except FileNotFoundError:
        raise refusals.FileMissing(path, "there is no such file") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise refusals.SymlinkRefused(path, "is a symbolic link") from error
        raise refusals.FileUnreadable(path, f"cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        wanted = ".json" if path.suffix == ".json" else ".safetensors"
        raise refusals.FileUnreadable(
            path, f"is {kind}", f"give the path of a regular {wanted} file, or of a folder that holds one"
        )
    return os.fdopen(descriptor, "rb")


def seal(status: os.stat_result) -> Seal:
    """Return what changes when a file is replaced or altered."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
