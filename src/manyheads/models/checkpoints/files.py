"""Files from outside: regular files only, opened without following links, and strict JSON of bounded size."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from manyheads._json import check_parts
from manyheads.models import refusals

Json = dict[str, Any]  # content of a JSON object

# Without O_NONBLOCK, opening a pipe that has no writer would wait for ever. Windows lacks all but O_BINARY.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

JSON_LIMIT = 50_000_000  # the longest index or configuration in bytes; the largest published indexes take about a tenth

_HUGE = 10**20

Seal = tuple[int, ...]
"""Identity, length and times of a file; the time of change moves even when the time of writing is set back."""


def open_regular(path: Path, follow_links: bool) -> BinaryIO:
    """Open a regular file for reading; unless `follow_links`, its path may not be a symbolic link."""
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


def _integer(digits: str) -> int | float:
    if digits == "-0":  # an integer to Python and a float to other readers, who then refuse it where a size has to be
        return -0.0
    # Python takes quadratic time over long integers and refuses beyond 4,300 digits with an error of its own.
    return int(digits) if len(digits) <= 20 else _HUGE


def read_json(path: Path, follow_links: bool = False) -> Json:
    """Read a JSON file whose top is an object."""
    try:
        with open_regular(path, follow_links) as file:
            data = file.read(JSON_LIMIT + 1)
    except OSError as error:
        raise refusals.FileUnreadable(path, f"cannot be read: {error.strerror}") from error
    if len(data) > JSON_LIMIT:
        raise refusals.FileDamaged(path, f"more than {JSON_LIMIT:,} bytes")
    # Python writes NaN and Infinity into configurations, and published ones hold them.
    parsed = parse_json(data, path, constants=True)
    if not isinstance(parsed, dict):
        raise refusals.FileDamaged(path, f"the top of the file is a {type(parsed).__name__}, not an object")
    return parsed


def parse_json(data: bytes | bytearray, path: Path, *, constants: bool = False) -> Any:
    """Parse JSON of bounded length, refusing what readers disagree about.

    With `constants`, NaN and Infinity, which Python writes and JSON does not know, are let through. Integers of more
    than 20 digits become 10^20.
    """
    try:
        check_parts(data)
    except ValueError as error:
        raise refusals.FileDamaged(path, str(error)) from error

    def collect(pairs: list[tuple[str, Any]]) -> Json:
        table = dict(pairs)
        if len(table) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            found = f"the key {twice[:80]!r} stands twice in one object"
            raise refusals.FileDamaged(path, found, "readers disagree about which one counts: keep one")
        return table

    def constant(literal: str) -> float:
        if not constants:
            raise refusals.FileDamaged(path, f"{literal} is no JSON number")
        return float(literal.replace("Infinity", "inf"))

    try:
        text = data.decode()
        parsed = json.loads(text, object_pairs_hook=collect, parse_int=_integer, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise refusals.FileDamaged(path, f"byte {error.start} of the JSON text is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise refusals.FileDamaged(path, f"no JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise refusals.FileDamaged(path, "JSON nested too deeply; a header has three levels") from error
    if b"\\u" in data:
        _refuse_surrogates(parsed, path)
    return parsed


def _refuse_surrogates(parsed: Any, path: Path) -> None:
    r"""Refuse half characters such as `\ud800`: legal in an escape, but no text that could be printed or stored."""
    stack = [parsed]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list):
            stack += item
        elif isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError as error:
                raise refusals.FileDamaged(path, f"the string {item[:80]!a} has no UTF-8 form") from error
