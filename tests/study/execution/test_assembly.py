"""Assembly of units whose cells, or whose replicates, differ in shape: joined schema by schema as one by one."""

import numpy as np
import pytest
import xarray as xr
from tests.study.bits import unequal_bits
from tests.study.toys import Still

from manyheads.study.cells import grid
from manyheads.study.execution.assembly import _joined, _reader, assemble
from manyheads.study.store.records.schema import MalformedResult, pack
from manyheads.study.store.records.segments import Frame, SegmentWriter
from manyheads.study.store.run_store import RunStore

CELLS, REPLICATES = 5, 7
LABELS = {
    "regular": lambda cell, chunk, rng: np.arange(3),
    "by cell": lambda cell, chunk, rng: np.arange(2 + cell % 3),
    "last cell longest": lambda cell, chunk, rng: np.arange(1 + cell) * 10,
    "by unit": lambda cell, chunk, rng: np.sort(rng.choice(6, rng.integers(1, 6), replace=False)),
    "unsorted": lambda cell, chunk, rng: np.array([[3, 1, 2], [2, 0]][chunk % 2]),
    "words": lambda cell, chunk, rng: np.array(["query", "key", "value"][: 1 + (cell + chunk) % 3]),
    "one empty": lambda cell, chunk, rng: np.arange(0 if cell == 1 else 2),
}


class Many(Still):
    """A study of several cells, whose units the test makes."""

    name = "toy/many"

    def cells(self):
        return grid(place=tuple(range(CELLS)))


class Chunked(Many):
    """The same, two replicates at a time."""

    name = "toy/chunked"
    vectorized = True
    chunk = 2


def unit(rng, labels, chunk):
    """Return a unit with numbers, truth values and texts along labels; of several replicates if they come in chunks."""
    axis, size = (("replicate",), (chunk,)) if chunk else ((), ())
    long = {"long_name": "quantity", "units": "1", "note": int(rng.integers(9))}
    along, shape = (*axis, "label"), (*size, len(labels))
    words = rng.choice(["a", "far away", "é" * 20], shape)
    return xr.Dataset(
        {
            "number": (along, rng.normal(size=shape), long),
            "count": (along, rng.integers(9, size=shape), long),
            "flag": (along, rng.integers(2, size=shape).astype(bool), long),
            "text": (along, words.astype(str), long),
            "loss": (axis, np.float32(rng.normal(size=size)), long),
        },
        coords={"label": ("label", labels, {"long_name": "label"}), "twice": ("label", np.arange(len(labels)))},
        attrs={"seed": int(rng.integers(9))},
    )


def made(folder, study, labels, rng):
    """Write the units of a study, and return its store."""
    runs = RunStore.create(folder, study, 0)
    writer, chunk = SegmentWriter(runs.path, runs.run, "launch-test"), study.chunk if study.vectorized else 0
    for number in range(runs.layout.count(REPLICATES)):
        place, turn = (number - 1) % CELLS, (number - 1) // CELLS
        dataset = unit(rng, LABELS[labels](place, turn, rng), chunk if number else 0)
        writer.append(Frame(number, {"manyheads": "test"}, *pack(dataset)))
    writer.close()
    return RunStore(runs.path)


@pytest.mark.parametrize("study", [Many(), Chunked()], ids=["one by one", "chunks"])
@pytest.mark.parametrize("labels", LABELS)
def test_units_joined_schema_by_schema_equal_units_joined_one_by_one(tmp_path, study, labels, rng):
    runs = made(tmp_path, study, labels, rng)
    found = assemble(runs, REPLICATES)
    slow = _joined(runs.layout, REPLICATES, _reader(runs.load(range(runs.layout.count(REPLICATES)))))
    for ours, theirs in zip(found, slow, strict=True):
        assert unequal_bits(ours, theirs) == []
        assert list(ours.data_vars) == list(theirs.data_vars)
        assert {name: value.dtype for name, value in ours.items()} == {name: v.dtype for name, v in theirs.items()}
        assert dict(ours.sizes) == dict(theirs.sizes)


def test_a_dimension_without_labels_that_differs_is_refused_with_the_part(tmp_path, rng):
    runs = RunStore.create(tmp_path, Many(), 0)
    writer = SegmentWriter(runs.path, runs.run, "launch-test")
    for number in range(runs.layout.count(1)):
        dataset = xr.Dataset({"x": ("i", rng.normal(size=3 if number < 4 else 2), {"units": "1"})})
        writer.append(Frame(number, {"manyheads": "test"}, *pack(dataset)))
    writer.close()
    with pytest.raises(MalformedResult, match="dimension 'i' has 2 entries in part 3 and 3 in part 0"):
        assemble(RunStore(runs.path), 1)
