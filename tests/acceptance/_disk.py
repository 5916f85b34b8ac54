"""A disk that is really full: a small tmpfs, filled up to every number of free blocks and of free inodes in turn.

``unshare -m python -m tests.acceptance._disk FOLDER SEED`` mounts it over FOLDER in a mount namespace of its own, which
ends with the process, and prints what it found as JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.study.toys import Walk

from manyheads.study import run
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import StoreFull, find_runs

SIZE, INODES = 4 << 20, 2000


def go(store: Path, seed: int):
    return run(Walk(), replicates=1, seed=seed, store=store, progress=False)


def fill(folder: Path, left: int, what: str) -> None:
    """Leave `left` free blocks, or inodes, on the disk."""
    folder.mkdir()
    room = os.statvfs(folder)
    if what == "inodes":
        for number in range(room.f_ffree - left):
            (folder / str(number)).touch()
    elif room.f_bfree > left:
        with (folder / "balloon").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (room.f_bfree - left) * room.f_frsize)


def times_of(found) -> dict[int, int]:
    return {unit: entry.time for unit, entry in found.index.refresh().units.items()}


def attempt(disk: Path, seed: int, left: int, what: str, whole: object) -> tuple[bool, list[str]]:
    """Run into the full disk, make room, and resume; return whether it was full, and what was wrong."""
    store, balloon, faults = disk / "store", disk / "balloon", []
    fill(balloon, left, what)
    full = False
    try:
        go(store, seed)
    except StoreFull:
        full = True
    except Exception as error:
        faults.append(f"{type(error).__name__}: {error}")
        full = True
    if full:
        faults += [f"{path.name} was left over" for path in store.rglob("*.tmp")]
    subprocess.run(["rm", "-rf", balloon], check=True)
    kept = {}
    if list(store.rglob("run.json")):
        (found,) = find_runs(store)
        found.verify()
        kept = times_of(found)
    faults += differences(whole, go(store, seed))
    (found,) = find_runs(store)
    faults += [f"unit {unit} was made again" for unit, time in kept.items() if times_of(found)[unit] != time]
    subprocess.run(["rm", "-rf", store], check=True)
    return full, [f"{left} {what} free: {fault}" for fault in faults]


def main(disk: Path, seed: int) -> None:
    whole = go(disk, seed)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE},nr_inodes={INODES}", "tmpfs", disk], check=True)
    found = {"blocks": 0, "inodes": 0, "faults": []}
    for what in ("blocks", "inodes"):
        left, full = 0, True
        while full:
            full, faults = attempt(disk, seed, left, what, whole)
            found["faults"] += faults
            found[what] += full
            left += 1
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
