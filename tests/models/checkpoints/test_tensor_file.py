"""Reading one file: against the format's own library, in bounded memory, and never a file that has changed."""

import hashlib
import os
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.alphabet import ALPHABET

from manyheads.errors import ShapeError, UsageError
from manyheads.models.checkpoints.tensor_file import DTYPES, TensorFile
from manyheads.models.refusals import FileChanged


def write(path, tensors, metadata=None):
    safetensors.numpy.save_file({name: array.copy() for name, array in tensors.items()}, path, metadata)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture
def tensors(rng):
    """One tensor of every dtype, with scalars and empty tensors among them."""
    shapes = [(3, 4), (5,), (), (0, 7), (2, 3, 2)]
    arrays = {}
    for number, (label, dtype) in enumerate(DTYPES.items()):
        shape = shapes[number % len(shapes)]
        raw = rng.integers(0, 2 if label == "BOOL" else 256, (*shape, dtype.itemsize), dtype=np.uint8)
        arrays[f"layer.{label}"] = np.frombuffer(raw.tobytes(), dtype).reshape(shape)
    return arrays


def test_reads_every_dtype_as_written(tmp_path, tensors):
    path = tmp_path / "a.safetensors"
    write(path, tensors, {"format": "np"})
    file = TensorFile(path)
    assert set(file.names) == set(tensors)
    assert file.metadata == {"format": "np"}
    for name, expected in tensors.items():
        read = file.tensor(name)
        assert same(read, expected), name
        assert read.flags.writeable
        assert read.flags.owndata or read.base.flags.owndata


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_]
)
def test_agrees_with_the_library(tmp_path, rng, dtype):
    path = tmp_path / "a.safetensors"
    arrays = {f"w{i}": (10 * rng.standard_normal((4, i + 1))).astype(dtype) for i in range(3)}
    write(path, arrays)
    with safetensors.safe_open(path, "np") as theirs:
        file = TensorFile(path)
        assert all(same(file.tensor(name), theirs.get_tensor(name)) for name in arrays)


def test_empty_table_is_a_file(tmp_path):
    safetensors.numpy.save_file({}, tmp_path / "a.safetensors")
    file = TensorFile(tmp_path / "a.safetensors")
    assert file.names == ()


STORABLE = [dtype for label, dtype in DTYPES.items() if label not in ("BF16", "F8_E4M3", "F8_E5M2")]
ARRAYS = st.sampled_from(STORABLE).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)


@given(st.dictionaries(st.text(ALPHABET, max_size=12).filter(lambda name: name != "__metadata__"), ARRAYS, max_size=6))
def test_round_trip(tmp_path_factory, arrays):
    path = tmp_path_factory.mktemp("round") / "a.safetensors"
    write(path, arrays)
    file = TensorFile(path)
    assert file.names == tuple(sorted(file.names, key=lambda name: file.entries[name].offset))
    for name, array in arrays.items():
        assert same(file.tensor(name), array)
        assert file.fingerprint(name) == hashlib.sha256(array.tobytes()).hexdigest()


@given(st.data())
def test_rows_are_those_of_the_whole_tensor(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("rows") / "a.safetensors"
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6))
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    write(path, {"before": np.ones(3, np.int8), "w": whole, "after": np.ones(3, np.int8)})
    bounds = st.none() | st.integers(-9, 9)
    rows = data.draw(st.builds(slice, bounds, bounds) | st.lists(st.integers(0, max(0, shape[0] - 1)), max_size=9))
    file = TensorFile(path)
    if shape[0] == 0 and not isinstance(rows, slice) and rows:
        with pytest.raises(ShapeError):
            file.tensor("w", rows)
    else:
        index = rows if isinstance(rows, slice) else np.array(rows, int)
        assert same(file.tensor("w", rows), whole[index])


def test_rows_read_only_their_bytes(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write(path, {"w": np.zeros((1000, 10), np.float32)})
    asked = []
    real = np.fromfile
    file = TensorFile(path)
    monkeypatch.setattr(np, "fromfile", lambda *args, **named: asked.append(args[2]) or real(*args, **named))
    file.tensor("w", rows=slice(500, 503))
    file.tensor("w", rows=[7, 8, 9, 3, 900])
    assert asked == [120, 120, 40, 40]


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (slice(None, None, 2), UsageError),
        ([4], ShapeError),
        ([-1], ShapeError),
        ([[0]], ShapeError),
        ([0.5], ShapeError),
        ([True], ShapeError),
    ],
)
def test_rows_that_cannot_be(tmp_path, rows, error):
    write(tmp_path / "a.safetensors", {"w": np.zeros((4, 2))})
    with pytest.raises(error):
        TensorFile(tmp_path / "a.safetensors").tensor("w", rows)


def test_wrong_use_is_named(tmp_path):
    write(tmp_path / "a.safetensors", {"layer.weight": np.zeros(()), "other": np.zeros(2)})
    file = TensorFile(tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match=r"near it: layer\.weight"):
        file.tensor("layer.weigth")
    with pytest.raises(UsageError, match="scalar"):
        file.tensor("layer.weight", rows=[0])


def test_threads_share_a_file(tmp_path, rng):
    arrays = {f"w{i}": rng.standard_normal(5000) for i in range(8)}
    write(tmp_path / "a.safetensors", arrays)
    wrong = []
    file = TensorFile(tmp_path / "a.safetensors")

    def read(name):
        wrong.extend(name for _ in range(20) if not same(file.tensor(name), arrays[name]))

    threads = [threading.Thread(target=read, args=(name,)) for name in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _truncate(path):
    os.truncate(path, path.stat().st_size - 8)


def _overwrite(path):
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x01\x02\x03\x04")
    later = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))


def _overwrite_and_set_the_clock_back(path):
    before = path.stat()
    _overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [_truncate, _overwrite, _overwrite_and_set_the_clock_back])
def test_a_change_after_opening_is_seen(tmp_path, change):
    path = tmp_path / "a.safetensors"
    write(path, {"w": np.zeros(100), "v": np.zeros(100)})
    file = TensorFile(path)
    file.tensor("v")
    # The clock of a file system ticks some hundred times a second; a change within a tick cannot be dated.
    threading.Event().wait(0.05)
    change(path)
    for act in (lambda: file.tensor("w"), lambda: file.tensor("w", rows=[0]), lambda: file.fingerprint("w")):
        with pytest.raises(FileChanged) as caught:
            act()
        assert caught.value.path == path


def test_a_replaced_file_is_seen(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, {"w": np.zeros(3)})
    file = TensorFile(path)
    write(tmp_path / "b.safetensors", {"w": np.ones(3)})
    threading.Event().wait(0.05)
    os.replace(tmp_path / "b.safetensors", path)
    with pytest.raises(FileChanged):
        file.tensor("w")


STREAMING = """
import sys
import numpy as np, ml_dtypes
from manyheads.models import open_checkpoint

def resident(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) * 1024

checkpoint = open_checkpoint(sys.argv[1])
for name in checkpoint.names[:1]:
    float(checkpoint.tensor(name, rows=slice(0, 1)).sum())
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
start, total = resident("VmRSS"), 0.0
for name, tensor in checkpoint.stream():
    total += float(tensor[:, 0].sum())
    del tensor
for name in checkpoint.names:
    checkpoint.fingerprint(name)
print(resident("VmHWM") - start, total)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measured through /proc")
def test_streaming_holds_one_tensor(tmp_path):
    size, count = 8 << 20, 12  # 96 MB in 12 tensors
    path = tmp_path / "model.safetensors"
    rows = {f"w{i}": np.full((2048, size // 8192), i, np.float32) for i in range(count)}
    write(path, rows)
    run = subprocess.run([sys.executable, "-c", STREAMING, path], capture_output=True, text=True, check=True)
    growth, total = run.stdout.split()
    assert float(total) == 2048 * sum(range(count))
    assert size * 0.9 < int(growth) < 2 * size
