"""What is asked is judged before work starts: names, files, sizes; and what a study is told."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from tests.study.toys import RMS, Averages, Still

import manyheads as mh
from manyheads.data import load_text
from manyheads.errors import UsageError
from manyheads.study.execution.executors import local_pool
from manyheads.study.execution.units import Layout, compute
from manyheads.study.registry import load
from manyheads.study.store.identity import file_sha256

STUDY = "from tests.study.toys import Still\nclass {}(Still):\n    name = 'toy/{}'\n"


def test_a_file_with_one_study_needs_no_class(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    one, two, none = (tmp_path / f"{name}_studies_of_mine.py" for name in ("one", "two", "no"))
    one.write_text(STUDY.format("Mine", "mine"))
    two.write_text(STUDY.format("Mine", "mine") + STUDY.format("Other", "other"))
    none.write_text("x = 1\n")
    assert load(str(one)).__name__ == "Mine"
    with pytest.raises(UsageError, match=r"defines 2 studies; name one, as .*two_.*:Mine or .*two_.*:Other"):
        load(str(two))
    with pytest.raises(UsageError, match="defines no study"):
        load(str(none))


def test_a_study_is_run_by_its_name_and_settings(tmp_path, monkeypatch):
    monkeypatch.setattr("manyheads.study.execution.runner.load", lambda name: {"toy/still": Still}[name])
    tree = mh.run("toy/still", replicates=1, store=tmp_path, progress=False, size=2)
    assert tree["trained"].sizes["i"] == 2
    with pytest.raises(UsageError, match="no setting 'width'; it has fault, size"):
        mh.run("toy/still", store=tmp_path, width=2)
    with pytest.raises(UsageError, match="given by name"):
        mh.run(Still(), store=tmp_path, size=2)


def test_sizes_that_nobody_can_store_are_refused_before_work(tmp_path):
    with pytest.raises(UsageError, match=r"3,000,000,000 units; a store holds at most 1,000,000: ask for 333,333"):
        mh.run(Averages(), replicates=10**9, store=tmp_path / "runs")
    with pytest.raises(UsageError, match="processors; ask for at most"), local_pool(100_000):
        pass
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("read", [load_text, file_sha256])
def test_what_has_no_end_is_not_read(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(UsageError, match="no regular file"):
            read(path)


class Recorded(Averages):
    """Reads its replicates from outside."""

    name = "toy/recorded"

    def train(self, key, size, replicate):
        return xr.Dataset({"error": ((), jnp.asarray([0.5, 0.25, 0.125])[replicate], RMS)})


class RecordedTogether(Recorded):
    """The same, traced."""

    vectorized = True
    chunk = 3


@pytest.mark.parametrize("study", [Recorded(sizes=(4,)), RecordedTogether(sizes=(4,))], ids=["plain", "vectorized"])
def test_a_replicate_may_know_its_number(study, seed):
    found = [np.ravel(compute(study, unit, seed)["error"].values) for unit in Layout.of(study).trained(3)]
    np.testing.assert_array_equal(np.concatenate(found), [0.5, 0.25, 0.125])
