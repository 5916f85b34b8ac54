"""Runs that are killed with SIGKILL at chosen moments, again and again, and what must stay true of them."""

import json
import os
import time
from pathlib import Path

import numpy as np
from tests.acceptance._launches import PATIENCE, REPLICATES, Commanded, Forked, work
from tests.study.toys import Walk

from manyheads.errors import FileRefused
from manyheads.study import open_run
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import find_runs

UNITS = 3 + 2 * REPLICATES  # of Walk: three predictions and two cells
MOMENTS = ("start", "first", "between", "writing", "writing", "end")


def units_of(store: Path) -> dict[int, int]:
    """Return when each stored unit was written, by number; nothing of a run that is not there yet."""
    try:
        (run,) = find_runs(store)
    except FileRefused:
        return {}
    return {number: entry.time for number, entry in run.index.refresh().units.items()}


def look(store: Path) -> tuple[int, bool]:
    """Return how many units are finished, and whether one is claimed, hence computed or written."""
    return len(units_of(store)), any(store.glob("*/*/*/leases/unit-*"))


def kill_at(kind: Forked | Commanded, store: Path, moment: str, delay: float, rng: np.random.Generator) -> int:
    """Wait for the moment, kill, and return how many were killed."""
    before = look(store)[0]
    deadline = time.monotonic() + PATIENCE
    while kind.running() and moment != "start" and time.monotonic() < deadline:
        finished, writing = look(store)
        if moment == "writing" and writing and finished > before:
            break
        if (moment == "first" and finished > before) or (moment == "between" and finished > (before + UNITS) // 2):
            break
        if moment == "end" and finished == UNITS:
            break
        time.sleep(0.001)
    time.sleep(delay)
    return kind.kill(rng) if kind.running() else 0


class Torn:
    """One store that is killed again and again, and everything that must stay true of it."""

    def __init__(self, folder: Path, seed: int, study: Walk):
        self.folder, self.seed, self.study, self.kept = folder, seed, study, {}
        self.cut = 0  # units whose line was cut after a kill, as a power failure cuts it
        self.faults: list[str] = []

    def kill_often(self, kind: Forked | Commanded, rng: np.random.Generator, most: int) -> int:
        """Start and kill until `most` were killed, or a run ends by itself; return how many were killed."""
        count = 0
        while count < most:
            kind.start(self.folder, self.seed)
            moment = str(rng.choice(MOMENTS))
            delay = float(rng.uniform(0, kind.start_up if moment == "start" else 0.03))
            killed = kill_at(kind, self.folder, moment, delay, rng)
            self.faults += kind.faults()
            self.note()
            if not killed:
                break
            count += killed
            if kind.tears and rng.integers(2):
                self.tear(rng)
        kind.end()
        return count

    def note(self) -> None:
        """Remember when each finished unit was made: none is made twice, or lost."""
        now = units_of(self.folder)
        self.faults += [f"unit {unit} was lost or made again" for unit in self.kept if now.get(unit) != self.kept[unit]]
        self.kept |= now

    def tear(self, rng: np.random.Generator) -> None:
        """Cut the last line of the latest segment at a random byte."""
        if not (found := sorted(self.folder.rglob("*.jsonl"))):
            return
        content = found[-1].read_bytes()
        begin = content[:-1].rfind(b"\n") + 1
        last = json.loads(content[begin:]) if content[begin:].endswith(b"\n") else {}
        os.truncate(found[-1], int(rng.integers(begin, len(content))))
        if last.get("kind") == "unit":
            self.kept.pop(last["unit"], None)
            self.cut += 1

    def finish(self, whole: object) -> None:
        """Resume to the end and compare with an uninterrupted run."""
        work(str(self.folder), self.seed, self.study)
        self.note()
        (store,) = find_runs(self.folder)
        self.faults += [f"{name} differs" for name in differences(whole, open_run(store.path))]
        left = [path for what in ("*.tmp", "*.jsonl*", "leases/*") for path in self.folder.rglob(what)]
        self.faults += [f"{path} was left over" for path in left]
        if store.verify() != UNITS:
            self.faults.append(f"{store.verify()} units instead of {UNITS}")
