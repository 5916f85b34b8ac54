"""Launches to be killed, alone or together: on the command line, with a pool, on dask, as tasks of a job array."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
from tests.study.cluster import Cluster, Nap
from tests.study.dask_processes import COMMAND, QUIET, DaskProcesses
from tests.study.toys import Walk

from manyheads.study import run

REPLICATES = 8
PATIENCE = 300  # seconds that a launch may take before it is said to hang
WALK = Walk()


def work(store: str, seed: int, study: Walk = WALK) -> None:
    """Run a toy; the target of forked processes."""
    run(study, replicates=REPLICATES, seed=seed, store=store, progress=False)


def forks() -> multiprocessing.context.BaseContext:
    """Return a context whose processes are forked from one that has imported everything and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.acceptance._launches", "jax.numpy", "xarray", "zarr", "manyheads.study.execution.runner"]
    )
    return context


class Forked:
    """One or several launches of the toy, each in a process of its own, some of which are killed."""

    study, start_up, most = WALK, 0.6, 12  # seconds, about; kills of one store
    tears = True  # nothing goes on writing when a launch has ended

    def __init__(self, folder: Path, together: int = 1):
        self.together = together

    def start(self, store: Path, seed: int) -> None:
        self.processes = [forks().Process(target=work, args=(str(store), seed)) for _ in range(self.together)]
        for process in self.processes:
            process.start()

    def running(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def kill(self, rng: np.random.Generator) -> int:
        """Kill some of those that run, and return how many."""
        alive = [process for process in self.processes if process.is_alive()]
        killed = alive[: int(rng.integers(1, len(alive) + 1))] if alive else []
        for process in killed:
            process.kill()
        return len(killed)

    def faults(self) -> list[str]:
        """Wait until all have ended, and return what should not be."""
        found = []
        for process in self.processes:
            process.join(PATIENCE)
            if process.exitcode not in (0, -signal.SIGKILL):
                found.append(f"exit status {process.exitcode}")
                process.kill()
        return found

    def end(self) -> None:
        pass


class Commanded:
    """The run on the command line, with a pool of two spawned processes: parent, group or one worker is killed."""

    study, start_up, most, tears = WALK, 4.0, 12, True
    name = "tests.study.toys:Walk"

    def __init__(self, folder: Path, victim: str = "parent"):
        self.victim = victim

    def start(self, store: Path, seed: int) -> None:
        words = ["study", "run", self.name, "--store", store, "--seed", seed, "--workers", 2]
        words += ["--replicates", REPLICATES]
        named = QUIET | {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        self.process = subprocess.Popen([sys.executable, "-c", COMMAND, *map(str, words)], **named)

    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self, rng: np.random.Generator) -> int:
        """Kill the victim, and return whether there was one."""
        if self.victim == "group":
            os.killpg(self.process.pid, signal.SIGKILL)
        elif self.victim == "parent":
            self.process.kill()
        else:
            while not (workers := _workers(self.process.pid)) and self.running():
                time.sleep(0.01)
            for worker in workers[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
            return len(workers[:1])
        return 1

    def faults(self) -> list[str]:
        """Wait until all have ended, and return what should not be: a lost worker is told, and others end with it."""
        try:
            said = self.process.communicate(timeout=PATIENCE)[1]
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return [f"a launch hangs: {self.process.communicate()[1]}"]
        status = self.process.returncode
        right = status == 0 or (status == -signal.SIGKILL and self.victim in ("parent", "group"))
        right |= status == 3 and any(words in said for words in TOLD.get(self.victim, ()))
        found = [] if right else [f"{self.victim}: exit status {status}: {said}"]
        deadline = time.monotonic() + 5
        while (alive := _session(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found + [f"process {survivor} outlives its parent" for survivor in alive]

    def end(self) -> None:
        pass


class OnDask(Commanded):
    """The run on the command line, on a dask cluster of two workers: one of them, or the scheduler, is killed."""

    study, start_up, most, tears = Nap(seconds=0.05), 8.0, 2, False

    def __init__(self, folder: Path, victim: str):
        super().__init__(folder, victim)
        self.folder, self.cluster = folder, None

    def start(self, store: Path, seed: int) -> None:
        if self.cluster is None:
            self.cluster = DaskProcesses(self.folder / f"dask-{time.monotonic_ns()}")
        words = ("tests.study.cluster:Nap", "--seconds", self.study.seconds, "--replicates", REPLICATES)
        self.process = self.cluster.launch(store, *words, "--seed", seed)

    def kill(self, rng: np.random.Generator) -> int:
        if self.victim == "dask scheduler":
            self.cluster.scheduler.kill()
        else:
            worker = self.cluster.workers.pop(0)
            worker.kill()
            worker.wait()
            self.cluster.workers.append(self.cluster.start_worker())
        return 1

    def faults(self) -> list[str]:
        found = super().faults()
        if self.cluster.scheduler.poll() is not None:
            self.end()
        return found

    def end(self) -> None:
        if self.cluster is not None:
            self.cluster.end()
        self.cluster = None


class Tasks(Forked):
    """Three tasks of a job array, some of which are killed; the stand-in for Slurm starts them, again if need be."""

    study, start_up, tears = Nap(seconds=0.05), 4.0, True

    def __init__(self, folder: Path):
        super().__init__(folder, together=3)
        self.folder, self.cluster = folder, None

    def start(self, store: Path, seed: int) -> None:
        if self.cluster is None:
            self.cluster = Cluster(self.folder / f"slurm-{time.monotonic_ns()}")
            words = ("tests.study.cluster:Nap", "--seconds", self.study.seconds, "--replicates", REPLICATES)
            said = self.cluster.submit(*words, "--seed", seed, "--store", store, "--array", self.together)
            assert said.returncode == 0, said.stderr
        self.tasks = [self.cluster.start(1, task) for task in range(self.together)]

    def running(self) -> bool:
        return any(task.poll() is None for task in self.tasks)

    def kill(self, rng: np.random.Generator) -> int:
        alive = [task for task in self.tasks if task.poll() is None]
        killed = alive[: int(rng.integers(1, len(alive) + 1))] if alive else []
        for task in killed:
            task.kill()
        return len(killed)

    def faults(self) -> list[str]:
        found = []
        for task in self.tasks:
            try:
                status = task.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                task.kill()
                status = "none: it hangs"
            if status not in (0, -signal.SIGKILL):
                found.append(f"task: exit status {status}")
        return found


KINDS = {
    "a launch": Forked,
    "three launches at once": partial(Forked, together=3),
    "parent": Commanded,
    "process group": partial(Commanded, victim="group"),
    "worker": partial(Commanded, victim="worker"),
    "array task": Tasks,
    "dask worker": partial(OnDask, victim="dask worker"),
    "dask scheduler": partial(OnDask, victim="dask scheduler"),
}
LOST = "units came without a result"
TOLD = {"worker": (LOST,), "dask scheduler": (LOST, "Timed out trying to connect")}  # the latter before it began


def _workers(leader: int) -> list[int]:
    """Return the processes of a pool."""
    found = []
    for process in _session(leader):
        with contextlib.suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes():
                found.append(process)
    return found


def _session(leader: int) -> list[int]:
    alive = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                alive.append(int(entry.parent.name))
    return alive
