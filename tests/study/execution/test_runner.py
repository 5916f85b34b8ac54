"""Running: the same results on every executor, only what is missing, and failures that cost nothing."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
import xarray as xr
from tests.study.toys import SOURCE, Averages, Still, VectorizedAverages, Walk, generator

from manyheads.errors import UsageError
from manyheads.study import Claim, Study, near, open_run, run
from manyheads.study.execution.executors import local_pool, open_executor
from manyheads.study.execution.runner import UnitFailed
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import find_runs


@pytest.fixture(scope="module")
def pool():
    with local_pool(2) as executor:
        yield executor


@pytest.mark.slow
@pytest.mark.parametrize("study", [Averages(repeats=5), VectorizedAverages(repeats=5), Walk()], ids=lambda s: s.name)
def test_process_pool_threads_and_this_process_agree_to_the_last_bit(study, pool, tmp_path, seed):
    here = run(study, replicates=4, seed=seed, store=tmp_path / "here", progress=False)
    there = run(study, replicates=4, seed=seed, store=tmp_path / "pool", executor=pool, progress=False)
    with ThreadPoolExecutor(2) as threads:
        beside = run(study, replicates=4, seed=seed, store=tmp_path / "threads", executor=threads, progress=False)
    assert differences(here, there) == []
    assert differences(here, beside) == []


@pytest.fixture(scope="module")
def tree(tmp_path_factory, seed):
    """Return a run that tests only read."""
    return run(Walk(), replicates=2, seed=seed, store=tmp_path_factory.mktemp("run"), progress=False)


def test_the_tree_is_labelled(tree):
    trained = tree["trained"]
    assert trained["square"].dims == ("cell", "replicate", "step")
    assert trained["steps"].values.tolist() == [3, 5]
    assert np.isnan(trained["square"].sel(cell="steps=3", step=[4, 5])).all()  # labels that the cell does not have
    assert not np.isnan(trained["square"].sel(cell="steps=5")).any()
    assert trained["outcome"].dtype.kind == "U"
    assert trained["grows"].dtype == bool
    assert tree["predicted"]["rate"].dims == ("prediction",)
    assert tree["verdicts"].sizes["claim"] == 3
    assert set(np.unique(tree["verdicts"]["outcome"])) <= {"holds", "refuted", "inconclusive"}


def test_replicates_differ(tree):
    assert len(np.unique(tree["trained"]["square"].sel(step=1).values.round(12))) > 1


def test_only_what_is_missing_is_computed(tmp_path, monkeypatch):
    first = run(Walk(), replicates=2, store=tmp_path, progress=False)
    calls = []
    train = Walk.train
    monkeypatch.setattr(Walk, "train", lambda self, key, steps: calls.append(steps) or train(self, key, steps))
    second = run(Walk(), replicates=4, store=tmp_path, progress=False)
    assert len(calls) == 2 * 2
    assert differences(first["trained"].to_dataset(), second["trained"].to_dataset().isel(replicate=slice(2))) == []
    run(Walk(), replicates=3, store=tmp_path, progress=False)
    assert len(calls) == 2 * 2


@pytest.mark.parametrize("executor", [None, pytest.param("pool", marks=pytest.mark.slow)])
def test_a_failing_unit_is_named_and_the_others_are_kept(tmp_path, request, executor):
    chosen = request.getfixturevalue(executor) if executor else None
    with pytest.raises(UnitFailed, match=r"replicate 1.*ran into a wall"):
        run(Walk(fail_at=1), replicates=3, store=tmp_path, executor=chosen, progress=False)
    (store,) = find_runs(tmp_path)
    assert store.verify() >= 3
    assert store.summary() is None


def test_configuration_seed_and_revision_are_the_identity(tmp_path, monkeypatch):
    paths = {run(Averages(repeats=3), 1, store=tmp_path, progress=False).attrs["path"]}
    paths.add(run(Averages(repeats=4), 1, store=tmp_path, progress=False).attrs["path"])
    paths.add(run(Averages(repeats=3), 1, seed=1, store=tmp_path, progress=False).attrs["path"])
    monkeypatch.setattr(Averages, "revision", 2)
    paths.add(run(Averages(repeats=3), 1, store=tmp_path, progress=False).attrs["path"])
    assert len(paths) == 4


def test_reading_back_equals_running(tree):
    again = open_run(tree.attrs["path"])
    assert differences(tree, again) == []
    assert tree.attrs == again.attrs


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"replicates": 0}, "at least 1"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"study": Still(fault="cells")}, None),
        ({"study": Averages}, "frozen dataclass"),
        ({"study": 3}, "frozen dataclass"),
        ({"study": "toy"}, "no study is called 'toy'"),
    ],
)
def test_arguments_that_mean_no_run_are_refused_before_work(tmp_path, arguments, words):
    given = {"study": Walk(), "replicates": 1, "seed": 0} | arguments
    if words is None:
        with pytest.raises(UsageError, match="different coordinates"):
            run(**given, store=tmp_path, progress=False)
    else:
        with pytest.raises(UsageError, match=words):
            run(**given, store=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_running_changes_no_global_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=elsewhere")
    before = (jax.config.jax_enable_x64, dict(os.environ))
    run(Averages(repeats=3), 1, store=tmp_path, progress=False)
    with local_pool(1):
        assert os.environ["OMP_NUM_THREADS"] == "1"
        assert os.environ["XLA_FLAGS"].startswith("--xla_dump_to=elsewhere --xla_cpu_multi_thread")
    assert (jax.config.jax_enable_x64, dict(os.environ)) == before


@pytest.mark.slow
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "dask", "dask:", "ray:auto"])
def test_an_unknown_executor_is_refused(address):
    with pytest.raises(UsageError, match="dask:tcp"), open_executor(address):
        pass


class Noise(Study):
    """A mean of normal numbers, and a count."""

    name = "toy/noise"
    claim = "the mean is zero"
    source = SOURCE
    unread_prediction = "targets are known"

    mean: float = 0.0
    tolerance: float = 0.9

    def predict(self, key):
        return xr.Dataset()

    def train(self, key):
        return xr.Dataset({"x": ((), self.mean + generator(key).standard_normal())})

    def claims(self, theory, trained):
        yield Claim("the mean is zero", trained["x"], near(0, self.tolerance), "a toy")
        yield Claim("three is three", 3.0, near(3, 0), "a count")


def test_replicates_are_added_until_every_claim_is_decided(tmp_path):
    study = Noise()
    found = run(study, 4, store=tmp_path, progress=False, until_decided=True, most_replicates=200)
    count = found["trained"].sizes["replicate"]
    assert 4 < count < 200
    assert set(found["verdicts"]["outcome"].values) == {"holds"}
    # read back, asked for again and computed in one go: the same
    assert differences(open_run(found.attrs["path"]), found) == []
    again = run(study, 4, store=tmp_path, progress=False, until_decided=True, most_replicates=200)
    assert differences(again, found) == []
    whole = run(study, count, store=tmp_path / "whole", progress=False)
    assert Path(whole.attrs["path"]).name == Path(found.attrs["path"]).name
    assert differences(whole["trained"].to_dataset(), found["trained"].to_dataset()) == []
    assert float(whole["verdicts"]["high"][0]) < float(found["verdicts"]["high"][0])


def test_a_killed_run_goes_on_to_the_same_end(tmp_path, monkeypatch):
    whole = run(Noise(), 4, store=tmp_path / "whole", progress=False, until_decided=True, most_replicates=200)
    train, calls = Noise.train, []

    def fails(self, key):
        calls.append(key)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return train(self, key)

    monkeypatch.setattr(Noise, "train", fails)
    with pytest.raises(KeyboardInterrupt):
        run(Noise(), 4, store=tmp_path / "killed", progress=False, until_decided=True, most_replicates=200)
    rest = run(Noise(), 4, store=tmp_path / "killed", progress=False, until_decided=True, most_replicates=200)
    assert differences(rest, whole) == []
    assert len(calls) == whole["trained"].sizes["replicate"] + 1


def test_a_run_stops_at_the_most_replicates(tmp_path):
    found = run(Noise(tolerance=1e-3), 3, store=tmp_path, progress=False, until_decided=True, most_replicates=7)
    assert found["trained"].sizes["replicate"] == 7
    assert found["verdicts"]["outcome"].values.tolist() == ["inconclusive", "holds"]


def test_what_is_decided_needs_no_more(tmp_path):
    found = run(Noise(mean=100.0), 4, store=tmp_path, progress=False, until_decided=True)
    assert found["trained"].sizes["replicate"] == 4
    assert found["verdicts"]["outcome"].values[0] == "refuted"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"most_replicates": 9}, "without until_decided"),
        ({"until_decided": True, "replicates": 1}, "of at least 2"),
        ({"until_decided": True, "most_replicates": 3}, "of at least 8"),
        ({"until_decided": True, "most_replicates": 1.5}, "most_replicates"),
        ({"until_decided": True, "most_replicates": 10**9}, "at most"),
    ],
)
def test_a_wrong_end_is_refused(tmp_path, asked, message):
    with pytest.raises(UsageError, match=message):
        run(Noise(), store=tmp_path, progress=False, **asked)
    assert not list(tmp_path.iterdir())
