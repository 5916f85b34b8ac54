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
from tests.study.bits import unequal_bits
from tests.study.toys import Averages, Walk

from manyheads.errors import FileRefused
from manyheads.study import open_run, run
from manyheads.study.store.equality import differences
from manyheads.study.store.records.schema import pack
from manyheads.study.store.records.segments import Frame, SegmentWriter
from manyheads.study.store.run_store import RunStore, StoreDamaged, StoreFull, find_runs

CRASHING = """
import sys
from manyheads.study import run
from tests.study.toys import Walk
run(Walk(), replicates=12, seed=int(sys.argv[2]), store=sys.argv[1], progress=False)
"""


def some_unit(study):
    from manyheads.study.execution.units import Layout

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
    put(store, some_unit(Walk()), dataset)
    back = store.read(some_unit(Walk()))
    assert differences(dataset, back) == []
    store.compact()
    assert unequal_bits(store.read(some_unit(Walk())), back) == []
    assert back.attrs == dataset.attrs
    assert back["x"].attrs == dataset["x"].attrs


def put(store, unit, dataset):
    """Append a unit as a worker does."""
    writer = SegmentWriter(store.path, store.run, "launch-test")
    writer.append(Frame(store.layout.number(unit), {"manyheads": "test"}, *pack(dataset)))
    writer.close()


def stored_units(folder):
    """Return when each stored unit was made, by run and number."""
    found = {}
    for store in find_runs(folder):
        found |= {(store.path, number): entry.time for number, entry in store.index.refresh().units.items()}
    return found


def count_of(folder):
    """Return the number of units in a store that may not be there yet."""
    try:
        return len(stored_units(folder))
    except FileRefused:
        return 0


@pytest.mark.slow
def test_a_killed_run_resumes_and_equals_an_uninterrupted_one(tmp_path, seed, rng):
    whole = run(Walk(), replicates=12, seed=seed, store=tmp_path / "whole", progress=False)
    # A process that is killed may leave half a compiled program: it gets a cache of its own.
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", CRASHING, str(tmp_path / "torn"), str(seed)]
    with subprocess.Popen(command, env=environment) as process:
        try:
            while not count_of(tmp_path / "torn") and process.poll() is None:
                time.sleep(0.01)
            time.sleep(float(rng.uniform(0, 0.15)))
        finally:
            process.send_signal(signal.SIGKILL)
    kept = stored_units(tmp_path / "torn")
    assert kept
    resumed = run(Walk(), replicates=12, seed=seed, store=tmp_path / "torn", progress=False)
    assert differences(whole, resumed) == []
    after = stored_units(tmp_path / "torn")
    assert {unit: after[unit] for unit in kept} == kept  # nothing was computed twice
    assert not list((tmp_path / "torn").rglob("*.tmp"))
    assert not list((tmp_path / "torn").rglob("*.jsonl*"))


@pytest.mark.slow
def test_two_processes_share_a_store(tmp_path, seed):
    whole = run(Walk(), replicates=12, seed=seed, store=tmp_path / "whole", progress=False)
    command = [sys.executable, "-c", CRASHING, str(tmp_path / "shared"), str(seed)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) as process:
        while not count_of(tmp_path / "shared") and process.poll() is None:
            time.sleep(0.01)
        run(Walk(), replicates=12, seed=seed, store=tmp_path / "shared", progress=False)
    assert process.returncode == 0
    (store,) = find_runs(tmp_path / "shared")
    assert store.verify() == 3 + 2 * 12
    assert differences(whole, open_run(store.path)) == []


def test_a_unit_that_was_computed_twice_must_have_the_same_result(tmp_path):
    store = RunStore.create(tmp_path, Walk(), 0)
    clock = {"deterministic": False}
    for number in range(3):  # measured times may differ
        put(store, some_unit(Walk()), xr.Dataset({"x": ("i", np.ones(3)), "wall_seconds": ((), float(number), clock)}))
    assert store.verify() == 1
    put(store, some_unit(Walk()), xr.Dataset({"x": ("i", np.zeros(3)), "wall_seconds": ((), 1.0, clock)}))
    with pytest.raises(StoreDamaged, match="computed twice with different results"):
        RunStore(store.path).verify()


@pytest.fixture
def finished(tmp_path):
    tree = run(Averages(repeats=4), replicates=1, store=tmp_path, progress=False)
    return RunStore(tree.attrs["path"])


def segments_of(tmp_path, units=3):
    """Return a run with so many units in one segment."""
    store = RunStore.create(tmp_path, Walk(), 0)
    writer = SegmentWriter(store.path, store.run, "launch-test")
    for number in range(units):
        dataset = xr.Dataset({"x": ("i", np.arange(3.0) + number)}, coords={"i": np.arange(3)})
        writer.append(Frame(number, {"manyheads": "test"}, *pack(dataset)))
    writer.close()
    return store


def values_of(store):
    """Return every stored unit's values by number."""
    packs = RunStore(store.path).load()
    return {int(n): row.tobytes() for part in packs for n, row in zip(part.numbers, part.matrix, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("compacted", [False, True])
def test_a_bit_flipped_in_any_byte_is_never_read_as_other_data(tmp_path, compacted):
    store = segments_of(tmp_path)
    if compacted:
        store.compact()
    (file,) = [*store.path.glob("segments/*"), *store.path.glob("table-*")]
    original, whole = file.read_bytes(), values_of(store)
    refused = 0
    for position in range(0, len(original), 5 if compacted else 1):
        file.write_bytes(
            original[:position] + bytes([original[position] ^ 1 << position % 8]) + original[position + 1 :]
        )
        try:
            assert values_of(store).items() <= whole.items()  # a flipped last line break makes a torn last line
        except StoreDamaged as damage:
            refused += file.name in str(damage)
    assert refused > 0.9 * len(range(0, len(original), 5 if compacted else 1))


def test_a_segment_cut_anywhere_in_its_last_line_keeps_the_others(tmp_path):
    store = segments_of(tmp_path)
    (file,) = store.path.glob("segments/*")
    original, whole = file.read_bytes(), values_of(store)
    last = original[:-1].rfind(b"\n") + 1
    for end in range(last, len(original)):
        file.write_bytes(original[:end])
        assert values_of(store) == {number: whole[number] for number in (0, 1)}
    file.write_bytes(original + bytes(100))  # zeros, as a power failure leaves them
    assert values_of(store) == whole


def test_a_unit_is_refused_in_another_place_run_or_order(tmp_path):
    store = segments_of(tmp_path)
    (file,) = store.path.glob("segments/*")
    lines = file.read_bytes().splitlines(keepends=True)
    units = [place for place, line in enumerate(lines) if b'"kind":"unit"' in line]
    changes = {
        "another number": [line.replace(b'"unit":1,', b'"unit":7,') for line in lines],
        "no schema": [line for line in lines if b'"schema"' not in line or b'"kind":"unit"' in line],
        "no start": lines[1:],
        "a run": [line.replace(store.run.encode(), b"0" * 16) for line in lines],
        "a second start": lines + lines[:1],
        "no JSON": [*lines, b"[[[[\n"],
        "a kind": [*lines, b'{"kind": "code"}\n'],
    }
    for what, changed in changes.items():
        file.write_bytes(b"".join(changed))
        with pytest.raises(StoreDamaged):
            print(what, values_of(store))
    file.write_bytes(b"".join(lines).replace(b'"format":2', b'"format":3'))
    with pytest.raises(FileRefused, match=r"newer manyheads \(format 3\)"):
        values_of(store)
    assert len(units) == 3


def test_a_foreign_file_among_the_segments_is_found(tmp_path):
    store = segments_of(tmp_path)
    (store.path / "segments" / "stray").write_text("x")
    with pytest.raises(StoreDamaged, match="is no segment"):
        store.verify()


def test_a_damaged_store_is_left_untouched_by_another_run(finished):
    (victim,) = finished.path.glob("table-*")
    victim.write_bytes(b"broken")
    before = {path: path.read_bytes() for path in finished.path.rglob("*") if path.is_file()}
    with pytest.raises(StoreDamaged):
        run(Averages(repeats=4), replicates=1, store=finished.path.parents[2], progress=False)
    assert {path: path.read_bytes() for path in finished.path.rglob("*") if path.is_file()} == before


def test_compaction_beside_a_writer_loses_nothing(tmp_path):
    store = RunStore.create(tmp_path, Walk(), 0)
    done = threading.Event()

    def write(first):
        writer = SegmentWriter(store.path, store.run, f"launch-{first}")
        for number in range(first, 300, 3):
            writer.append(Frame(number, {"manyheads": "test"}, *pack(xr.Dataset({"x": ((), float(number))}))))
        writer.close()

    def compact():
        while not done.is_set():
            RunStore(store.path).compact()

    with ThreadPoolExecutor(4) as pool:
        compacting = pool.submit(compact)
        try:
            for writing in [pool.submit(write, first) for first in range(3)]:
                writing.result()
        finally:
            done.set()
        compacting.result()
    assert RunStore(store.path).compact() == 300
    assert {number: np.frombuffer(data)[0] for number, data in values_of(store).items()} == {
        number: number for number in range(300)
    }
    assert [path.name for path in store.path.iterdir() if path.is_file() and path.name != "run.json"] == [
        path.name for path in store.path.glob("table-*")
    ]


def test_a_table_is_read_by_xarray_alone(finished):
    from zarr.storage import ZipStore

    (table,) = finished.path.glob("table-*.zarr.zip")
    read = 0
    for group in ("0", "1"):
        with ZipStore(table, mode="r") as store:
            opened = xr.open_zarr(store, group=group, consolidated=False).load()
        for row, number in enumerate(opened["unit_number"].values.tolist()):
            own = finished.read(finished.layout.unit(number))
            assert differences(own, opened[list(own)].isel(unit=row)) == []
            read += 1
    assert read == 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_and_costs_nothing_that_was_there(finished, monkeypatch, number):
    before = {path: path.stat().st_mtime_ns for path in finished.path.rglob("*") if path.is_file()}

    def full(*_):
        raise OSError(number, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull, match="no room left"):
        run(Averages(repeats=4), replicates=2, store=finished.path.parents[2], progress=False)
    monkeypatch.undo()
    assert not list(finished.path.rglob("*.tmp"))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert finished.verify() >= 4
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
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | kept
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
    places = [finished.path, finished.path / "leases", finished.path / "failures"]
    dead = [place / f".0.{host}.{process.pid}.deadbeef.tmp" for place in places]
    alive = [place / f".1.{host}.{os.getppid()}.deadbeef.tmp" for place in places]
    elsewhere = [place / ".2.another-machine.1.deadbeef.tmp" for place in places]
    for folder in (*dead, *alive, *elsewhere):
        folder.mkdir(parents=True)
    assert finished.sweep() == 3
    assert not any(folder.exists() for folder in dead)
    assert all(folder.exists() for folder in (*alive, *elsewhere))


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
