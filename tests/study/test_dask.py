"""A dask cluster whose scheduler or worker is killed in the middle of a run."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.study.cluster import Nap

from manyheads.study import open_run, run
from manyheads.study.executors import open_executor
from manyheads.study.runner import WorkersLost
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import find_runs

pytest.importorskip("distributed")
ROOT = Path(__file__).parents[2]
REPLICATES = 20
STUDY = Nap(seconds=0.1)


@pytest.fixture
def cluster(tmp_path):
    """Yield the address, the scheduler and two workers, each a process of its own."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    where, processes = tmp_path / "scheduler.json", []

    def start(*words):
        command = [sys.executable, "-m", "distributed.cli." + words[0], *words[1:], "--scheduler-file", str(where)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        processes.append(subprocess.Popen(command, env=environment, cwd=tmp_path, **quiet))
        return processes[-1]

    scheduler = start("dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
    wait_until(where.exists)
    alone = ("--no-nanny", "--nthreads", "1", "--no-dashboard", "--death-timeout", "60")
    workers = [start("dask_worker", *alone) for _ in range(2)]
    yield json_address(where), scheduler, workers
    for process in reversed(processes):
        process.kill()
        process.wait()


def json_address(where):
    """Return the address in a scheduler's file."""
    import json

    return json.loads(where.read_text())["address"]


def wait_until(ready, seconds=60):
    """Wait until something is true, at most a minute."""
    deadline = time.monotonic() + seconds
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.02)


def kill_when_stored(store, count, process):
    """Kill a process as soon as so many units are stored; return the thread that waits for it."""

    def wait():
        wait_until(lambda: store.exists() and any(len(runs.numbers()) >= count for runs in _runs(store)))
        process.kill()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def _runs(store):
    return find_runs(store) if list(store.rglob("run.json")) else []


@pytest.mark.slow
def test_a_killed_scheduler_is_told_with_the_units_that_are_missing(tmp_path, cluster):
    address, scheduler, _ = cluster
    store = tmp_path / "runs"
    with open_executor(f"dask:{address}") as executor:
        killer = kill_when_stored(store, 12, scheduler)
        with pytest.raises(WorkersLost, match=r"\d+ of \d+ units came without a result"):
            run(STUDY, REPLICATES, executor=executor, store=store, progress=False)
        killer.join()
    (runs,) = find_runs(store)
    assert 12 <= len(runs.numbers()) < 3 + 2 * REPLICATES
    assert_same_as_undisturbed(tmp_path)


@pytest.mark.slow
def test_a_killed_worker_costs_nothing(tmp_path, cluster):
    address, _, workers = cluster
    store = tmp_path / "runs"
    with open_executor(f"dask:{address}") as executor:
        killer = kill_when_stored(store, 12, workers[0])
        run(STUDY, REPLICATES, executor=executor, store=store, progress=False)
        killer.join()
    assert_same_as_undisturbed(tmp_path)


def assert_same_as_undisturbed(folder):
    """Finish the run in this process and compare it with one that nothing disturbed."""
    again = run(STUDY, REPLICATES, store=folder / "runs", progress=False)
    whole = run(STUDY, REPLICATES, store=folder / "whole", progress=False)
    assert differences(whole, again) == []
    assert differences(whole, open_run(again.attrs["path"])) == []
