"""Leases: which launch works on which units, without a daemon and without locks.

A launch has one file, ``leases/launch-<host>-<pid>-<8 hexadecimal digits>``, which it touches every 15 s. A claim of a
unit is a hard link to it, ``leases/unit-<number>.<generation>``: it is made in one atomic step, also on NFS, and it
ages with its launch. A claim whose launch is dead is outbid by the next generation and never removed first, since two
who remove it would remove each other's new claim. No result depends on leases: an error costs double work.
"""

import contextlib
import errno
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from manyheads._overview import printable
from manyheads.errors import ManyheadsError
from manyheads.study.store.disk import no_link, room_on_disk, temporary_beside

BEAT, STALE = 15.0, 180.0  # seconds
CLAIM = re.compile(r"unit-(\d{1,7})\.(\d{1,9})")
LAUNCH = "launch-"
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)


class AtWork(ManyheadsError, RuntimeError):
    """Another launch works on the run that was to be changed."""


class Claim(NamedTuple):
    """A claimed unit and the generation of the claim."""

    unit: int
    generation: int


class Owner(NamedTuple):
    """A launch as others see it."""

    name: str
    host: str
    pid: int
    seconds: float  # since its last sign of life
    alive: bool

    def __str__(self) -> str:
        return f"{printable(self.host)}, pid {self.pid}, last sign of life {self.seconds:.0f} s ago"


class Launch:
    """Work of this process on the run in a folder; `close` gives back what it still claims."""

    def __init__(self, path: Path):
        self.folder = no_link(path / "leases")
        with room_on_disk(self.folder):
            self.folder.mkdir(exist_ok=True)
            host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:60]
            self.owner = f"{LAUNCH}{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            self.mine, self.links = self.folder / self.owner, True
            about = {"host": socket.gethostname(), "pid": os.getpid(), "start": _start_of(os.getpid())}
            self.about = json.dumps(about | {"kernel": _kernel(), "owner": self.owner})
            temporary = temporary_beside(self.mine)
            try:
                temporary.write_text(self.about, encoding="utf-8")
                os.replace(temporary, self.mine)
            finally:
                temporary.unlink(missing_ok=True)
        self.claims: set[Claim] = set()
        self.stopped = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        """Give back all claims."""
        self.close()

    def close(self) -> None:
        """Give back all claims and end the launch."""
        self.stopped.set()
        try:
            self.release(list(self.claims))
        finally:
            self.mine.unlink(missing_ok=True)

    def claim(self, wanted: Iterable[int], most: int) -> list[Claim]:
        """Claim up to `most` of the wanted units that no living launch has claimed."""
        highest = dict(sorted(claims_in(self.folder)))
        living: dict[int, bool] = {}  # by inode: a launch has many claims
        taken, now = list[Claim](), self._now()
        for unit in wanted:
            if len(taken) == most:
                break
            generation = highest.get(unit, -1)
            if generation >= 0 and self._is_held(self.folder / f"unit-{unit}.{generation}", now, living):
                continue
            claim = Claim(unit, generation + 1)
            if self._take(claim):
                taken.append(claim)
                self.claims.add(claim)
        return taken

    def release(self, claims: Iterable[Claim]) -> None:
        """Give claims back."""
        for claim in claims:
            for generation in range(claim.generation + 1):
                (self.folder / f"unit-{claim.unit}.{generation}").unlink(missing_ok=True)
            self.claims.discard(claim)

    def others(self) -> list[Owner]:
        """Return the other launches that live."""
        owners = owners_of(self.folder.parent, self._now())
        return [owner for owner in owners if owner.name != self.owner and owner.alive]

    def refuse_others(self, what: str) -> None:
        """Refuse to change a run that somebody works on."""
        if others := self.others():
            raise AtWork(f"{self.folder.parent}: {others[0]} is at work here; {what} when it has ended")

    def sweep(self) -> int:
        """Remove claims and launches of the dead, and return how many there were."""
        now, dead = self._now(), 0
        for name in _names(self.folder):
            if name != self.owner and not name.startswith(".") and not _read(self.folder / name, now).alive:
                (self.folder / name).unlink(missing_ok=True)
                dead += 1
        return dead

    def _beat(self) -> None:
        while not self.stopped.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self.mine)

    def _now(self) -> float:
        """Return the time of the file server, the only clock that counts."""
        try:
            os.utime(self.mine)
        except FileNotFoundError:  # taken for dead, and swept: a process that was stopped and goes on
            self.mine.write_text(self.about, encoding="utf-8")
        with self.mine.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime

    def _is_held(self, path: Path, now: float, living: dict[int, bool]) -> bool:
        try:
            inode = path.stat().st_ino
        except FileNotFoundError:
            return True  # released at this moment: its unit is stored, or is claimed the next time
        if inode not in living:
            living[inode] = _read(path, now).alive
        return living[inode]

    def _take(self, claim: Claim) -> bool:
        path = self.folder / f"unit-{claim.unit}.{claim.generation}"
        with room_on_disk(self.folder):
            if self.links:
                try:
                    os.link(self.mine, path)
                    return True
                except FileExistsError:  # of ours if NFS repeated the request
                    with contextlib.suppress(FileNotFoundError):
                        return path.stat().st_ino == self.mine.stat().st_ino
                    return False
                except OSError as error:
                    if error.errno not in NO_LINKS:
                        raise
                    self.links = False
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(json.dumps({"owner": self.owner}))
            except FileExistsError:
                return False
        return True


def claims_in(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the number and generation of every claim."""
    for name in _names(folder):
        if match := CLAIM.fullmatch(name):
            yield int(match[1]), int(match[2])


def owners_of(path: Path, now: float | None = None) -> list[Owner]:
    """Return all launches that a run's folder names, by this machine's clock if no other is given."""
    folder = no_link(path / "leases")
    now = time.time() if now is None else now
    return [_read(folder / name, now) for name in _names(folder) if name.startswith(LAUNCH)]


def _names(folder: Path) -> list[str]:
    """Return the names in a folder: there may be hundreds of thousands, so no path is made of each."""
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _read(path: Path, now: float) -> Owner:
    """Read a launch's file or a claim, which is the same file, or names it where there are no links."""
    try:
        # Opened and not only looked at: a client of NFS asks the server then.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))) as file:
            about = json.loads(file.read(1 << 16) or "{}")
            seconds = now - os.fstat(file.fileno()).st_mtime
        if "pid" not in about:
            name = str(about["owner"])
            return _read(path.parent / name, now) if re.fullmatch(rf"{LAUNCH}[\w-]+", name) else _dead(path)
        owner = Owner(str(about["owner"]), str(about["host"]), int(about["pid"]), max(0.0, seconds), seconds < STALE)
        gone = about["kernel"] and about["kernel"] == _kernel() and _start_of(owner.pid) != about["start"]
        return owner._replace(alive=False) if gone else owner
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return _dead(path)


def _dead(path: Path) -> Owner:
    return Owner(path.name, "?", 0, 0.0, False)


def _start_of(pid: int) -> str:
    """Return when a process started: a number is given again, and number and time name a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _kernel() -> str:
    """Name what process numbers belong to; empty where that cannot be told."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return ""
