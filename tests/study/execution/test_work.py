"""Work on a run: changed inputs, workers that see no store or never answer, units that fail, claims of the dead."""

import dataclasses
import errno
import json
import os
import time
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import xarray as xr
from tests.study.toys import Walk

from manyheads.study import open_run, run
from manyheads.study.execution.runner import UnitFailed, WorkersLost, contribute, prepare
from manyheads.study.store.disk import StoreFull, temporary_beside
from manyheads.study.store.equality import differences
from manyheads.study.store.identity import InputChanged
from manyheads.study.store.leases import NO_LINKS, STALE, Launch, owners_of
from manyheads.study.store.run_store import find_runs

REPLICATES = 4
UNITS = 3 + 2 * REPLICATES  # of Walk


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run that nothing disturbed."""
    return run(Walk(), REPLICATES, store=tmp_path_factory.mktemp("whole"), progress=False)


class Reader(Walk):
    """A walk that reads a file, and may find another content in it afterwards."""

    name = "toy/reader"
    path: Path = Path("steps.txt")
    spoiled_by: ClassVar[str] = ""

    def train(self, key, steps) -> xr.Dataset:
        if self.spoiled_by:
            self.path.write_text(self.spoiled_by)
        return super().train(key, steps)


def test_a_unit_is_refused_when_its_input_changed_while_it_was_computed(tmp_path, monkeypatch):
    (path := tmp_path / "steps.txt").write_text("first")
    study, store = Reader(path=path), tmp_path / "runs"
    monkeypatch.setattr(Reader, "spoiled_by", "other")
    with pytest.raises(InputChanged, match="changed while the study ran"):
        run(study, REPLICATES, store=store, progress=False)
    monkeypatch.setattr(Reader, "spoiled_by", "")
    path.write_text("first")
    (runs,) = find_runs(store)
    assert len(runs.missing(REPLICATES)) == UNITS - 3  # predictions alone were stored
    os.utime(path, (0, 0))  # another time and the same content
    tree = run(study, REPLICATES, store=store, progress=False)
    assert tree["trained"].sizes["replicate"] == REPLICATES


class Elsewhere(Executor):
    """Computes at once, as a worker that does not see the run's folder."""

    def submit(self, function, task, units):
        future = Future()
        future.set_result(function(dataclasses.replace(task, path=Path("/nowhere")), units))
        return future


def test_units_of_workers_without_the_folder_are_stored_by_the_client(tmp_path, whole):
    tree = run(Walk(), REPLICATES, executor=Elsewhere(), store=tmp_path, progress=False)
    assert differences(whole, tree) == []
    assert differences(whole, open_run(tree.attrs["path"])) == []


class Mute(Executor):
    """Computes some batches and cancels all others, as dask does when its scheduler is gone."""

    def __init__(self, answers):
        self.answers = answers

    def submit(self, function, *words):
        future = Future()
        if self.answers:
            self.answers -= 1
            future.set_result(function(*words))
        else:
            future.cancel()  # and nobody is notified
        return future


def test_units_that_never_come_back_are_counted(tmp_path, whole):
    with pytest.raises(WorkersLost, match=r"\d of \d+ units came without a result .*scheduler"):
        run(Walk(), REPLICATES, executor=Mute(2), store=tmp_path, progress=False)
    (runs,) = find_runs(tmp_path)
    assert 0 < len(runs.numbers()) < UNITS
    assert differences(whole, run(Walk(), REPLICATES, store=tmp_path, progress=False)) == []


class Disconnected(Mute):
    """Computes some batches and never answers for the others, as dask for results that it was just fetching."""

    _client = SimpleNamespace(status="running")

    def submit(self, function, *words):
        if self.answers:
            return super().submit(function, *words)
        self._client = SimpleNamespace(status="connecting")
        return Future()


def test_a_run_ends_when_dask_has_lost_its_scheduler_and_cancels_nothing(tmp_path, whole):
    with pytest.raises(WorkersLost, match=r"\d of \d+ units came without a result .*scheduler"):
        run(Walk(), REPLICATES, executor=Disconnected(2), store=tmp_path, progress=False)
    assert differences(whole, run(Walk(), REPLICATES, store=tmp_path, progress=False)) == []


class Doomed(Walk):
    """A walk one of whose units fails."""

    def train(self, key, steps) -> xr.Dataset:
        found = super().train(key, steps)
        if int(found["square"].sum() * 1e6) == self.fail_at:
            raise ArithmeticError("the walk ran into a wall")
        return found


def test_a_contribution_goes_on_behind_a_unit_that_fails(tmp_path, whole):
    doomed = whole["trained"]["square"].isel(replicate=1, cell=0).dropna("step")
    study = Doomed(fail_at=int(doomed.sum() * 1e6))
    with pytest.raises(UnitFailed, match="ran into a wall"):
        contribute(study, REPLICATES, 0, store=tmp_path, progress=False)
    (runs,) = find_runs(tmp_path)
    assert len(runs.missing(REPLICATES)) == 1
    (said,) = runs.failures().values()
    assert "ran into a wall" in said


def test_a_contribution_leaves_when_it_is_asked_to(tmp_path):
    asked = []

    def leaving():
        asked.append(True)
        return len(asked) > 2

    left = contribute(Walk(), REPLICATES, 0, store=tmp_path, leaving=leaving, progress=False)
    assert 0 < left < UNITS
    assert contribute(Walk(), REPLICATES, 0, store=tmp_path, offset=3, progress=False) == 0


@pytest.mark.parametrize(("silence", "is_alive"), [(0.0, True), (STALE / 2, True), (2 * STALE, False)])
def test_claims_of_another_host_hold_until_it_was_silent_for_long(tmp_path, silence, is_alive):
    runs = prepare(Walk(), REPLICATES, 0, tmp_path)
    with Launch(runs.path) as launch:
        about = json.loads(launch.about) | {"host": "elsewhere", "kernel": "another", "owner": "launch-elsewhere-1-0"}
        (other := runs.path / "leases" / "launch-elsewhere-1-0").write_text(json.dumps(about))
        os.link(other, runs.path / "leases" / "unit-5.0")
        os.utime(other, (time.time() - silence,) * 2)
        assert [owner.alive for owner in owners_of(runs.path) if owner.host == "elsewhere"] == [is_alive]
        claims = launch.claim([5, 6], 2)
        assert [claim.unit for claim in claims] == ([6] if is_alive else [5, 6])
        assert bool(launch.others()) is is_alive


@pytest.mark.parametrize("number", sorted(NO_LINKS))
def test_claims_are_files_where_there_are_no_hard_links(tmp_path, monkeypatch, whole, number):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refused)
    runs = prepare(Walk(), REPLICATES, 0, tmp_path)
    with Launch(runs.path) as first, Launch(runs.path) as second:
        assert [claim.unit for claim in first.claim(range(5), 3)] == [0, 1, 2]
        assert [claim.unit for claim in second.claim(range(5), 3)] == [3, 4]
        first.about = json.dumps(json.loads(first.about) | {"kernel": "another"})
        first.mine.write_text(first.about)  # from another machine, where silence is all that tells
        os.utime(first.mine, (time.time() - 2 * STALE,) * 2)
        assert [claim.unit for claim in second.claim(range(5), 3)] == [0, 1, 2]
    assert differences(whole, run(Walk(), REPLICATES, store=tmp_path, progress=False)) == []
    assert not any((runs.path / "leases").iterdir())


def test_a_launch_without_room_leaves_nothing(tmp_path, monkeypatch):
    runs = prepare(Walk(), REPLICATES, 0, tmp_path)

    def full(self, text, encoding):
        with self.open("w", encoding=encoding) as file:
            file.write(text[:3])
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StoreFull):
        Launch(runs.path)
    assert not any((runs.path / "leases").iterdir())


def test_what_a_killed_launch_left_is_swept(tmp_path):
    runs = prepare(Walk(), REPLICATES, 0, tmp_path)
    with Launch(runs.path) as launch:
        gone = temporary_beside(launch.mine).name.replace(f".{os.getpid()}.", ".4194303.")  # above the largest number
        (runs.path / "leases" / gone).write_text("{")
        assert runs.sweep() == 1
        assert [path.name for path in (runs.path / "leases").iterdir()] == [launch.owner]


def test_a_run_with_nothing_to_do_removes_what_a_dead_launch_claimed(tmp_path):
    runs = find_runs(run(Walk(), REPLICATES, store=tmp_path, progress=False).attrs["path"])[0]
    with Launch(runs.path) as launch:
        about = json.loads(launch.about) | {"start": "0", "owner": "launch-dead-1-0"}
    (runs.path / "leases" / "launch-dead-1-0").write_text(json.dumps(about))
    os.link(runs.path / "leases" / "launch-dead-1-0", runs.path / "leases" / "unit-1.0")
    run(Walk(), REPLICATES, store=tmp_path, progress=False)
    assert not any((runs.path / "leases").iterdir())
