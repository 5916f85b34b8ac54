"""A dask cluster, left alone, or with its scheduler or a worker killed in the middle of a run."""

import pytest
from tests.study.cluster import Nap
from tests.study.dask_processes import DaskProcesses, wait_until

from manyheads.study import run
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import find_runs

REPLICATES = 8
UNITS = 3 + 2 * REPLICATES
STUDY = Nap(seconds=0.1)


@pytest.fixture
def dask(tmp_path):
    cluster = DaskProcesses(tmp_path / "dask")
    yield cluster
    cluster.end()


def run_on(cluster, store, seed=0, victim=None, count=4):
    """Run on the cluster, kill a process when so many units are stored, and return exit status and words."""
    words = ("tests.study.cluster:Nap", "--seconds", STUDY.seconds, "--replicates", REPLICATES, "--seed", seed)
    launch = cluster.launch(store, *words)
    try:
        if victim is not None:
            wait_until(lambda: launch.poll() is not None or stored(store) >= count)
            victim.kill()
        said = launch.communicate(timeout=120)[1]
    finally:
        launch.kill()
        launch.wait()
    return launch.returncode, said


def stored(store):
    return sum(len(runs.numbers()) for runs in find_runs(store)) if any(store.rglob("run.json")) else 0


@pytest.mark.slow
@pytest.mark.cluster
def test_a_dask_cluster_of_two_workers_agrees_to_the_last_bit(tmp_path, dask, seed):
    status, said = run_on(dask, tmp_path / "runs", seed)
    assert status == 0, said
    assert stored(tmp_path / "runs") == UNITS
    assert_same_as_undisturbed(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_killed_scheduler_is_told_with_the_units_that_are_missing(tmp_path, dask):
    status, said = run_on(dask, tmp_path / "runs", victim=dask.scheduler)
    assert status == 3
    assert "units came without a result" in said, said
    assert "is its scheduler gone?" in said
    assert 4 <= stored(tmp_path / "runs") < UNITS
    assert_same_as_undisturbed(tmp_path)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_killed_worker_costs_nothing(tmp_path, dask):
    status, said = run_on(dask, tmp_path / "runs", victim=dask.workers[0])
    assert status == 0, said
    assert_same_as_undisturbed(tmp_path)


def assert_same_as_undisturbed(folder, seed=0):
    """Finish the run in this process and compare it with one that nothing disturbed."""
    again = run(STUDY, REPLICATES, seed, store=folder / "runs", progress=False)
    whole = run(STUDY, REPLICATES, seed, store=folder / "whole", progress=False)
    assert differences(whole, again) == []
