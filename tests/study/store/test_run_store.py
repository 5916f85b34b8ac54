"""The store: what is written is read back to the last bit, and nothing damaged is ever read as data."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xarray as xr
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.study.toys import Averages, Walk

from manyheads.errors import FileRefused
from manyheads.study import open_run, run
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import RunStore, StoreDamaged, StoreFull, find_paths, find_runs

CRASHING = """
import sys
from manyheads.study import run
from tests.study.toys import Walk
run(Walk(), replicates=12, seed=int(sys.argv[2]), store=sys.argv[1], progress=False)
"""


def some_unit(study):
    from manyheads.study.store.units import Layout

    return Layout.of(study).trained(1)[0]


arrays = hnp.arrays(
    st.sampled_from(["f8", "f4", "i8", "i4", "u1", "?", "c16", "U3"]),
    hnp.array_shapes(min_dims=0, max_dims=3, max_side=4),
)


@settings(max_examples=25)
@given(arrays)
@example(np.array([-0.0, -0.0]))  # older versions of zarr take a chunk of negative zeros for an empty one
@example(np.array(-0.0, np.float32))
def test_any_array_comes_back_to_the_last_bit(tmp_path_factory, array):
    store = RunStore.create(tmp_path_factory.mktemp("store"), Walk(), 0)
    dims = [f"d{axis}" for axis in range(array.ndim)]
    dataset = xr.Dataset({"x": (dims, array, {"units": "1"})}, attrs={"note": "é"})
    assert store.write(some_unit(Walk()), dataset)
    back = store.read(some_unit(Walk()))
    assert differences(dataset, back) == []
    assert back.attrs == dataset.attrs
    assert back["x"].attrs == dataset["x"].attrs


def test_booleans_as_older_versions_of_xarray_write_them_are_read(tmp_path):
    store = RunStore.create(tmp_path, Walk(), 0)
    older = xr.Dataset({"x": ("i", np.array([1, 0], np.int8), {"dtype": "bool", "units": "1"})})
    assert store.write(some_unit(Walk()), older)
    back = store.read(some_unit(Walk()))["x"]
    assert (back.dtype, back.values.tolist(), back.attrs) == (np.dtype(bool), [True, False], {"units": "1"})


def finished_units(folder):
    """Count the units in a store, one level at a time: what a run is renaming is not entered."""
    return len(list(folder.glob("*/*/*/units/*/[0-9]*")))


@pytest.mark.slow
def test_a_killed_run_resumes_and_equals_an_uninterrupted_one(tmp_path, seed, rng):
    whole = run(Walk(), replicates=12, seed=seed, store=tmp_path / "whole", progress=False)
    # A process that is killed may leave half a compiled program: it gets a cache of its own.
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax")}
    command = [sys.executable, "-c", CRASHING, str(tmp_path / "torn"), str(seed)]
    with subprocess.Popen(command, env=environment) as process:
        try:
            while not finished_units(tmp_path / "torn") and process.poll() is None:
                time.sleep(0.01)
            time.sleep(float(rng.uniform(0, 0.15)))
        finally:
            process.send_signal(signal.SIGKILL)
    kept = {path: path.stat().st_mtime_ns for store in find_runs(tmp_path / "torn") for path in store.finished()}
    assert kept
    resumed = run(Walk(), replicates=12, seed=seed, store=tmp_path / "torn", progress=False)
    assert differences(whole, resumed) == []
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # nothing was computed twice
    assert not list((tmp_path / "torn").rglob("*.tmp"))


@pytest.mark.slow
def test_two_processes_share_a_store(tmp_path, seed):
    whole = run(Walk(), replicates=12, seed=seed, store=tmp_path / "whole", progress=False)
    command = [sys.executable, "-c", CRASHING, str(tmp_path / "shared"), str(seed)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.getcwd()}) as process:
        while not finished_units(tmp_path / "shared") and process.poll() is None:
            time.sleep(0.01)
        run(Walk(), replicates=12, seed=seed, store=tmp_path / "shared", progress=False)
    assert process.returncode == 0
    (store,) = find_runs(tmp_path / "shared")
    assert store.verify() == 3 + 2 * 12
    assert differences(whole, open_run(store.path)) == []


def test_the_first_writer_wins(tmp_path):
    store = RunStore.create(tmp_path, Walk(), 0)
    datasets = [xr.Dataset({"x": ("i", np.full(10, float(number)))}) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda dataset: store.write(some_unit(Walk()), dataset), datasets))
    assert sum(won) == 1
    assert differences(store.read(some_unit(Walk())), datasets[won.index(True)]) == []
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.fixture
def finished(tmp_path):
    tree = run(Averages(repeats=4), replicates=1, store=tmp_path, progress=False)
    return RunStore(tree.attrs["path"])


def data_files(store):
    return [path for path in store.path.rglob("*") if path.is_file() and "data.zarr" in path.parts]


@pytest.mark.slow
def test_every_single_file_that_is_missing_altered_or_truncated_is_found(finished, tmp_path):
    for position, path in enumerate(data_files(finished)):
        original = path.read_bytes()
        path.unlink()
        with pytest.raises(StoreDamaged, match="is missing"):
            open_run(finished.path)
        flipped = bytearray(original)
        flipped[position % len(flipped)] ^= 1
        for other in (bytes(flipped), original[:-1], original + b"x"):
            path.write_bytes(other)
            with pytest.raises(StoreDamaged, match="altered"):
                open_run(finished.path)
        path.write_bytes(original)
    open_run(finished.path)


def test_a_foreign_file_and_a_broken_manifest_are_found(finished):
    unit = finished.finished()[0]
    (unit / "data.zarr" / "stray").write_text("x")
    with pytest.raises(StoreDamaged, match="does not belong"):
        finished.verify()
    (unit / "data.zarr" / "stray").unlink()
    for text in ("", "[1, 2]", "{", "null"):
        (unit / "manifest.json").write_text(text)
        with pytest.raises(StoreDamaged):
            finished.verify()
    (unit / "manifest.json").unlink()
    with pytest.raises(StoreDamaged, match="manifest"):
        finished.verify()


def test_a_damaged_store_is_left_untouched_by_another_run(finished):
    victim = data_files(finished)[0]
    victim.write_bytes(b"broken")
    before = {path: path.read_bytes() for path in finished.path.rglob("*") if path.is_file()}
    with pytest.raises(StoreDamaged):
        run(Averages(repeats=4), replicates=1, store=finished.path.parents[2], progress=False)
    assert {path: path.read_bytes() for path in finished.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_and_costs_nothing_that_was_there(finished, monkeypatch, number):
    before = sorted(finished.path.rglob("*"))

    def full(*_):
        raise OSError(number, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull, match="no room left"):
        run(Averages(repeats=4), replicates=2, store=finished.path.parents[2], progress=False)
    monkeypatch.undo()
    assert sorted(path for path in finished.path.rglob("*")) == before
    assert finished.verify() == 4
    run(Averages(repeats=4), replicates=2, store=finished.path.parents[2], progress=False)


LIMITED = """
import resource, signal, sys
from manyheads.study import run
from tests.study.toys import Walk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
try:
    run(Walk(), replicates=2, store=sys.argv[1], progress=False)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.slow
def test_a_real_limit_on_written_bytes_is_a_full_store(tmp_path):
    """The kernel itself refuses the write here (EFBIG), in the middle of a unit's files."""
    # The limit holds for everything that is written: no compiled module or program is to be cut short by it.
    kept = {"PYTHONDONTWRITEBYTECODE": "1", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax")}
    environment = os.environ | {"PYTHONPATH": os.getcwd()} | kept
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "StoreFull", done.stderr
    assert not list(tmp_path.rglob("*.tmp"))


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_kept(finished):
    from manyheads.study.store.disk import _host

    host = _host()
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    places = [finished.path, finished.path / "predicted", finished.path / "units" / "a"]
    dead = [place / f".0.{host}.{process.pid}.deadbeef.tmp" for place in places]
    alive = [place / f".1.{host}.{os.getppid()}.deadbeef.tmp" for place in places]
    elsewhere = [place / ".2.another-machine.1.deadbeef.tmp" for place in places]
    for folder in (*dead, *alive, *elsewhere):
        folder.mkdir(parents=True)
    assert finished.sweep() == 3
    assert not any(folder.exists() for folder in dead)
    assert all(folder.exists() for folder in (*alive, *elsewhere))


def test_a_run_at_work_can_be_looked_through(finished, tmp_path):
    """Another process renames what it has written at any moment, also while this one walks through the folders."""
    busy, cell = threading.Event(), finished.path / "units" / "busy"

    def work():
        for number in range(10**6):
            if busy.is_set():
                return
            (temporary := cell / f".{number}.host.1.deadbeef.tmp" / "data.zarr" / "x").mkdir(parents=True)
            os.rename(temporary.parents[1], cell / str(number))
            shutil.rmtree(cell / str(number))

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            for _ in range(300):
                assert find_paths(tmp_path) == [finished.path]
                assert finished.leftovers() == []
        finally:
            busy.set()
        working.result()


def test_a_folder_without_a_run_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileRefused, match="holds no run"):
            find_runs(path)
        with pytest.raises(FileRefused, match="no run"):
            open_run(path)


def test_an_unfinished_run_is_not_opened(finished):
    (finished.path / "summary.json").unlink()
    with pytest.raises(FileRefused, match="not finished"):
        open_run(finished.path)


def test_a_run_can_be_moved(finished, tmp_path):
    moved = shutil.move(finished.path, tmp_path / "elsewhere")
    assert open_run(moved)["trained"].sizes["cell"] == 3
    header = json.loads((tmp_path / "elsewhere" / "run.json").read_text())
    assert header["versions"]["manyheads"]
