"""A disk on which each renaming, link, removal or synchronization of a run fails in turn: nothing is lost."""

import errno
import itertools
import os

import pytest
from tests.study.toys import Walk

from manyheads.study import run
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import find_runs


def go(store):
    return run(Walk(), 2, store=store, progress=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return go(tmp_path_factory.mktemp("whole"))


def failing(original, at):
    """Return a call that fails once, at its turn, and the count of calls."""
    calls = itertools.count()

    def call(*words, **named):
        if next(calls) == at:
            raise OSError(errno.EIO, "input/output error")
        return original(*words, **named)

    return call, calls


@pytest.mark.parametrize(
    "name", ["replace", "rename", *(pytest.param(name, marks=pytest.mark.slow) for name in ("link", "unlink", "fsync"))]
)
def test_a_call_that_fails_costs_no_unit(tmp_path, monkeypatch, whole, name):
    for at in range(100):
        store = tmp_path / str(at)
        with monkeypatch.context() as patch:
            call, calls = failing(getattr(os, name), at)
            patch.setattr(os, name, call)
            said = None
            try:
                go(store)
            except OSError as error:
                said = error.errno
        assert said in (None, errno.EIO)  # told as it is
        kept = {}
        if any(store.rglob("run.json")):
            (runs,) = find_runs(store)
            kept = {number: entry.time for number, entry in runs.index.refresh().units.items()}
            runs.verify()
        assert differences(whole, go(store)) == []
        (runs,) = find_runs(store)
        now = {number: entry.time for number, entry in runs.index.refresh().units.items()}
        assert kept.items() <= now.items()  # none is computed again
        assert len(now) == 3 + 2 * 2
        assert not list(store.rglob("*.tmp"))
        files = [path for path in runs.path.rglob("*") if path.is_file() and path.parent.name != "leases"]
        assert len(files) == 3  # header, table, summary
        assert name == "unlink" or not list(store.rglob("leases/*"))  # what could not be removed goes with the process
        if next(calls) <= at:
            break
    assert 0 < at < 99  # calls there are, and each has failed
