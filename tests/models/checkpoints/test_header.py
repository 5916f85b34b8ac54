"""Fuzzing: whatever the bytes, a file either reads as the format's own library reads it, or is refused by name."""

import itertools
import json
import tracemalloc
from datetime import timedelta

import ml_dtypes  # noqa: F401 - teaches NumPy bfloat16, so that the library can return it
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.alphabet import ALPHABET

from manyheads.models.checkpoints.tensor_file import DTYPES, TensorFile
from manyheads.models.refusals import CheckpointRefused

VALID = {
    "__metadata__": {"format": "pt"},
    "wte.weight": {"dtype": "F32", "shape": [5, 2], "data_offsets": [0, 40]},
    "h.0.bias": {"dtype": "BF16", "shape": [3], "data_offsets": [40, 46]},
    "mask": {"dtype": "BOOL", "shape": [2, 1], "data_offsets": [46, 48]},
    "none": {"dtype": "I64", "shape": [0, 4], "data_offsets": [48, 48]},
    "step": {"dtype": "I64", "shape": [], "data_offsets": [48, 56]},
}
DATA = bytes(range(46)) + b"\0\1" + bytes(range(8))

# A file of less than a kilobyte; what Python itself takes to fail once (a traceback, a regular expression) included.
MEMORY_LIMIT = 1 << 20


def as_bytes(table):
    raw = table if isinstance(table, bytes) else json.dumps(table, separators=(",", ":")).encode()
    return len(raw).to_bytes(8, "little") + raw + DATA


def read(path):
    file = TensorFile(path)
    return {name: file.tensor(name) for name in file.names}, {name: file.fingerprint(name) for name in file.names}


def check(path, content):
    """Read `content` from `path`: refused, or equal to what the library reads; in bounded memory either way."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        arrays = read(path)[0]
    except CheckpointRefused:
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY_LIMIT + 8 * len(content), peak
    theirs = dict(safetensors.deserialize(content))
    assert arrays.keys() == theirs.keys()
    for name, array in arrays.items():
        assert DTYPES[theirs[name]["dtype"]] == array.dtype
        assert list(array.shape) == theirs[name]["shape"]
        assert array.tobytes() == bytes(theirs[name]["data"])
    return True


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    assert check(path, as_bytes(VALID))
    return path


FRUGAL = settings(deadline=timedelta(seconds=20))


def test_every_truncation_is_refused(path):
    whole = as_bytes(VALID)
    assert not any(check(path, whole[:length]) for length in range(len(whole)))


@pytest.mark.slow
def test_every_flipped_bit_is_refused_or_read_as_it_stands(path):
    whole = as_bytes(VALID)
    start = len(whole) - len(DATA)
    accepted = []
    for byte in (*range(start), start, start + 40, start + 46, start + 47, start + 48):
        for bit in range(8):
            broken = bytearray(whole)
            broken[byte] ^= 1 << bit
            if check(path, bytes(broken)):
                accepted.append(byte)
    # Of the data, every value is a number of its type, but a Boolean is 0 or 1.
    assert [accepted.count(start + at) for at in (0, 40, 46, 47, 48)] == [8, 8, 1, 1, 8]
    # Of the header, only names, metadata and some types can become others that are as valid.
    assert 0 < sum(byte < start for byte in accepted) < 0.15 * 8 * start
    assert min(accepted) >= 8


MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "insert", "delete", "copy", "cut", "length"]),
        st.integers(0, 2**16),
        st.binary(min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=4,
)


def mutate(content, mutations):
    content = bytearray(content)
    for kind, at, extra in mutations:
        at %= len(content) + 1
        if kind == "flip" and at < len(content):
            content[at] ^= extra[0] or 1
        elif kind == "insert":
            content[at:at] = extra
        elif kind == "delete":
            del content[at : at + len(extra)]
        elif kind == "copy":
            content[at:at] = content[: 7 * len(extra)]
        elif kind == "cut":
            del content[at:]
        elif kind == "length":
            content[: len(extra[:8])] = extra[:8]
    return bytes(content)


@FRUGAL
@given(mutations=MUTATIONS)
def test_mutated_bytes(path, mutations):
    check(path, mutate(as_bytes(VALID), mutations))


@FRUGAL
@given(content=st.binary(max_size=200) | st.binary(max_size=100).map(as_bytes))
def test_random_bytes(path, content):
    check(path, content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(ALPHABET, max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(ALPHABET, max_size=8), inner, max_size=3),
    max_leaves=8,
)


@FRUGAL
@given(data=st.data())
def test_mutated_header(path, data):
    """One field after another is replaced by any JSON value, so that the text still parses."""
    table = json.loads(json.dumps(VALID))
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(table)))
        fields = table[name]
        if isinstance(fields, dict) and fields and data.draw(st.booleans()):
            fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(
                JSON | st.lists(st.integers(0, 60), max_size=3) | st.sampled_from(sorted(DTYPES))
            )
        else:
            table[data.draw(st.sampled_from([name, "new"]))] = data.draw(JSON)
    check(path, as_bytes(table))


@st.composite
def layouts(draw):
    """Headers whose tensors may or may not tile the data: an exact partition, perhaps with one offset moved."""
    cuts = sorted(draw(st.lists(st.integers(0, len(DATA)), max_size=5)))
    edges = [0, *cuts, len(DATA)]
    spans = [[a, b] for a, b in itertools.pairwise(edges)]
    if draw(st.booleans()):
        span = draw(st.sampled_from(spans))
        span[draw(st.integers(0, 1))] += draw(st.integers(-3, 3))
    table = {
        f"w{i}": {"dtype": draw(st.sampled_from(["U8", "I8"])), "shape": [b - a], "data_offsets": [a, b]}
        for i, (a, b) in enumerate(spans)
    }
    return dict(draw(st.permutations(list(table.items()))))


@FRUGAL
@given(table=layouts())
def test_accepts_exactly_the_tilings(path, table):
    covered = np.zeros(len(DATA), int)
    honest = True
    for fields in table.values():
        begin, end = fields["data_offsets"]
        honest &= 0 <= begin <= end <= len(DATA)
        covered[max(begin, 0) : max(end, 0)] += 1
    accepted = check(path, as_bytes(table))
    # An empty tensor may stand at any seam, and inside another only by breaking the order of the seams.
    inside = any(
        a["data_offsets"][0] < b["data_offsets"][0] < a["data_offsets"][1] and b["shape"] == [0]
        for a in table.values()
        for b in table.values()
    )
    assert accepted == (honest and not inside and bool((covered == 1).all()))
