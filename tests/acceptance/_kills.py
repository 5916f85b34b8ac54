"""Runs that are killed with SIGKILL at chosen moments, in a forked process or on the command line with its pool."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from tests.study.toys import Walk

from manyheads.errors import FileRefused
from manyheads.study import open_run, run
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import find_runs

REPLICATES = 8
UNITS = 3 + 2 * REPLICATES  # of Walk: three predictions and two cells
MOMENTS = ("start", "first", "between", "writing", "writing", "end")
COMMAND = "from manyheads.cli import main; raise SystemExit(main())"


def work(store: str, seed: int) -> None:
    """Run the toy; the target of forked processes."""
    run(Walk(), replicates=REPLICATES, seed=seed, store=store, progress=False)


def forks() -> multiprocessing.context.BaseContext:
    """Return a context whose processes are forked from one that has imported everything and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.acceptance._kills", "jax.numpy", "xarray", "zarr", "manyheads.study.runner"])
    return context


class Forked:
    """The run in a process of its own."""

    start_up = 0.6  # seconds, about

    def __init__(self, store: Path, seed: int):
        self.process = forks().Process(target=work, args=(str(store), seed))
        self.process.start()

    def running(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def failure(self) -> str:
        """Return how a process that was not killed failed; nothing if it ended well."""
        self.process.join()
        return f"exit status {self.process.exitcode}" if self.process.exitcode else ""

    def survivors(self) -> list[int]:
        return []


class Commanded:
    """The run on the command line, with a pool of two spawned processes; only the parent is killed."""

    start_up = 4.0

    def __init__(self, store: Path, seed: int):
        words = ["study", "run", "tests.study.toys:Walk", "--store", store, "--seed", seed, "--workers", 2]
        words += ["--replicates", REPLICATES]
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *map(str, words)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stderr.close()

    def failure(self) -> str:
        said = self.process.communicate()[1]
        return f"exit status {self.process.returncode}: {said}" if self.process.returncode else ""

    def survivors(self) -> list[int]:
        """Return the processes of its session that still run five seconds later."""
        deadline = time.monotonic() + 5
        while (alive := _session(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return alive


def _session(leader: int) -> list[int]:
    alive = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                alive.append(int(entry.parent.name))
    return alive


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


def kill_at(process: Forked | Commanded, store: Path, moment: str, delay: float) -> bool:
    """Wait for the moment, kill, and return whether there was still something to kill."""
    before = look(store)[0]
    while process.running() and moment != "start":
        finished, writing = look(store)
        if moment == "writing" and writing and finished > before:
            break
        if (moment == "first" and finished > before) or (moment == "between" and finished > (before + UNITS) // 2):
            break
        if moment == "end" and finished == UNITS:
            break
        time.sleep(0.001)
    time.sleep(delay)
    if not process.running():
        return False
    process.kill()
    return True


class Torn:
    """One store that is killed again and again, and everything that must stay true of it."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.seed, self.kept = folder, seed, {}
        self.cut = 0  # units whose line was cut after a kill, as a power failure cuts it
        self.faults: list[str] = []

    def kill_often(self, kind: type[Forked] | type[Commanded], rng: np.random.Generator, most: int) -> int:
        """Start and kill up to `most` times, until a run ends by itself; return how many were killed."""
        for number in range(most):
            process = kind(self.folder, self.seed)
            moment = str(rng.choice(MOMENTS))
            delay = float(rng.uniform(0, kind.start_up if moment == "start" else 0.03))
            killed = kill_at(process, self.folder, moment, delay)
            if not killed and (failure := process.failure()):
                self.faults.append(failure)
            self.faults += [f"process {survivor} outlives its parent" for survivor in process.survivors()]
            self.note()
            if killed and rng.integers(2):
                self.tear(rng)
            if not killed:
                return number
        return most

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
        work(str(self.folder), self.seed)
        self.note()
        (store,) = find_runs(self.folder)
        self.faults += [f"{name} differs" for name in differences(whole, open_run(store.path))]
        left = [path for what in ("*.tmp", "*.jsonl*", "leases/*") for path in self.folder.rglob(what)]
        self.faults += [f"{path} was left over" for path in left]
        if store.verify() != UNITS:
            self.faults.append(f"{store.verify()} units instead of {UNITS}")
