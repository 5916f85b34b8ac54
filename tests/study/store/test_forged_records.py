"""Segments and tables from elsewhere: forgeries of format 2 are refused by name, run nothing and take little memory."""

import base64
import contextlib
import copy
import hashlib
import json
import os
import pickle
import shutil
import tracemalloc
import zipfile

import pytest
from tests.study.store.test_foreign import DROP, Small

from manyheads.cli import main
from manyheads.errors import FileRefused
from manyheads.study import open_run, run
from manyheads.study.store.disk import read_json, write_signed
from manyheads.study.store.equality import differences
from manyheads.study.store.records.schema import identify
from manyheads.study.store.run_store import RunStore, StoreDamaged

CODECS = """
    numcodecs.adler32 numcodecs.astype numcodecs.bitround numcodecs.blosc numcodecs.bz2 numcodecs.crc32 numcodecs.delta
    numcodecs.fixedscaleoffset numcodecs.fletcher32 numcodecs.gzip numcodecs.jenkins_lookup3 numcodecs.json2
    numcodecs.lz4 numcodecs.lzma numcodecs.msgpack2 numcodecs.packbits numcodecs.pcodec numcodecs.pickle
    numcodecs.quantize numcodecs.shuffle numcodecs.zfpy numcodecs.zlib pickle json2 msgpack2 gzip blosc crc32c
    sharding_indexed transpose vlen-utf8 vlen-bytes cast_value os.system
"""
TYPES = """
    object O |O string str bytes variable_length_bytes null_terminated_bytes raw_bytes r8 r64 struct structured
    numpy.datetime64 numpy.timedelta64 datetime64[ns] fixed_length_utf32 float128 int128 complex256 bfloat16
    <f8 |b1 >f8 float int complex unknown V8 FLOAT64
"""
OTHER_TYPES = (
    {"name": "numpy.datetime64", "configuration": {"unit": "ns", "scale_factor": 1}},
    {"name": "structured", "configuration": {"fields": [["a", "float64"]]}},
    {"name": "fixed_length_utf32", "configuration": {"length_bytes": 4}},
    None,
    3,
    [],
)
BOMBS = [
    [10**12],
    [3, 10**9],
    [2**40, 2**40],
    [2**63],
    [10**30],
    [-1],
    [1.5],
    ["3"],
    [True],
    3,
    None,
    [0] * 40,
    [10**9] * 3,
]


class Payload:
    """Runs code when it is unpickled: it leaves a file."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return (open, (self.canary, "w"))


ARRAY, GROUP, ROOT = "0/square/zarr.json", "0/zarr.json", "zarr.json"
CHUNK = "0/square/c/0/0"


def read_table(store):
    """Return every file of the table."""
    (path,) = store.glob("table-*")
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def write_table(store, members, how=zipfile.ZIP_STORED):
    """Put files into a table and give it the name of its content, as a forger would."""
    for path in store.glob("table-*"):
        path.unlink()
    with zipfile.ZipFile(store / "new", "w", how) as file:
        for name, content in members:
            file.writestr(name, content)
    digest = hashlib.sha256((store / "new").read_bytes()).hexdigest()[:16]
    (store / "new").rename(store / f"table-{digest}.zarr.zip")


def member(name, change):
    """Return a forgery that changes the content of one file of the table, JSON if it is JSON."""

    def forge(store):
        members = read_table(store)
        if name.endswith("zarr.json"):
            data = json.loads(members[name])
            members[name] = json.dumps(change(copy.deepcopy(data)), indent=1).encode()
        else:
            members[name] = change(members[name])
        write_table(store, members.items())

    return forge


def entry(name, key, value):
    """Return a forgery that changes one entry of a file of metadata."""

    def change(data):
        return {k: v for k, v in (data | {key: value}).items() if v is not DROP}

    return member(name, change)


def attribute(name, key, value):
    def change(data):
        attributes = {k: v for k, v in (data["attributes"] | {key: value}).items() if v is not DROP}
        return data | {"attributes": attributes}

    return member(name, change)


def schema(key, value):
    """Return a forgery of the schema of the first group: an entry of its first variable."""

    def change(data):
        data["attributes"]["manyheads_schema"]["variables"][0][key] = value
        return data

    return member(GROUP, change)


def added(name, content=b"x"):
    return lambda store: write_table(store, [*read_table(store).items(), (name, content)])


def tables(canary):
    """Yield forgeries of a finished run."""
    for codec in CODECS.split():
        yield f"codec {codec}", entry(ARRAY, "codecs", [{"name": codec, "configuration": {}}])
    for kind in (*TYPES.split(), *OTHER_TYPES):
        yield f"type {kind}", entry(ARRAY, "data_type", kind)
        yield f"schema of type {kind}", schema("type", kind)
    for shape in BOMBS:
        yield f"shape {shape}", entry(ARRAY, "shape", shape)
        yield f"schema of shape {shape}", schema("shape", shape)
    for count in (0, -1, 10**18, 10**30, "1", None, True, 1.5, [1]):
        yield f"{count!r} units", attribute(GROUP, "manyheads_units", count)
        yield f"{count!r} groups", attribute(ROOT, "groups", count if count is not True else 5)
    for name in ("a/b", "..", "a\x1b[2J", "", "__class__", "x" * 300, 3, None):
        yield f"a variable {name!r}", schema("name", name)
        yield f"dimensions {name!r}", schema("dims", [name])
    for value in ("os:system", {"__reduce__": "os.system"}, [1], None):
        yield f"attrs {value}", schema("attrs", {"note": value} if value != "os:system" else {"scale_factor": value})
        yield f"root run {value}", attribute(ROOT, "run", value)
        yield f"environments {value}", attribute(ROOT, "environments", value)
        yield f"storage transformers {value}", entry(ARRAY, "storage_transformers", [value])
    for version in (0, 3, "2", None, True, 10**9):
        yield f"format {version}", attribute(ROOT, "manyheads_format", version)
        yield f"zarr format {version}", entry(ARRAY, "zarr_format", version if version != 3 else 2)
    yield "values of another size", schema("values", base64.b64encode(bytes(1000)).decode())
    yield "wider texts", schema("type", "utf8-1073741824")
    pickled = pickle.dumps(Payload(canary))
    yield "a pickle as a chunk", member(CHUNK, lambda content: pickled)
    yield "a changed number", member(CHUNK, lambda content: content[:-1] + bytes([content[-1] ^ 1]))
    yield "an empty chunk", member(CHUNK, lambda content: b"")
    for name in (
        "0/square/.zarray",
        ".zgroup",
        "0/x.py",
        "../../x",
        "/etc/x",
        "0/square/c/1/0",
        "0/square",
        "1e9/zarr.json",
    ):
        yield f"a file {name}", added(name, pickled)
    yield "a file twice", added(CHUNK, b"x" * 24)
    yield "compressed", lambda store: write_table(store, read_table(store).items(), zipfile.ZIP_DEFLATED)
    for name in (ROOT, GROUP, ARRAY, CHUNK, "0/unit_number/c/0", "0/unit_digest/zarr.json"):
        yield (
            f"without {name}",
            lambda store, n=name: write_table(store, [i for i in read_table(store).items() if i[0] != n]),
        )
    for name in ("0/unit_number/c/0", "0/unit_digest/c/0/0", "0/unit_environment/c/0", "0/outcome/c/0"):
        yield f"{name} turned over", member(name, lambda content: content[::-1])
        yield f"{name} of ones", member(name, lambda content: b"\xff" * len(content))
    yield "JSON without end", lambda store: write_table(store, [*_but(store, ROOT), (ROOT, "[" * 100_000)])
    yield "no zip", lambda store: _only(store).write_bytes(b"cos\nsystem\n")
    yield "cut", lambda store: _only(store).write_bytes(_only(store).read_bytes()[:-40])
    yield "holes", lambda store: os.truncate(_only(store), 1 << 42)
    yield "linked out", _link
    yield "a pipe", _pipe


def _but(store, name):
    return [item for item in read_table(store).items() if item[0] != name]


def _only(store):
    (path,) = store.glob("table-*")
    return path


def _link(store):
    path = _only(store)
    path.rename(store.parent / "outside")
    path.symlink_to(store.parent / "outside")


def _pipe(store):
    path = _only(store)
    path.unlink()
    os.mkfifo(path)


def record(kind, change):
    """Return a forgery that changes the first line of a kind."""

    def forge(lines):
        place = next(place for place, line in enumerate(lines) if line["kind"] == kind)
        lines[place] = change(copy.deepcopy(lines[place]))
        return lines

    return forge


def segments():
    """Yield forgeries of a run at work, as functions of its lines."""
    for kind in ("start", "environment", "schema", "unit"):
        for key in ("kind", "format", "run", "id", "schema", "environment", "unit", "digest", "data", "time"):
            for value in (None, 3.5, ["x"], {"a": 1}, "os:system", -1):
                yield f"{kind} with {key} {value}", record(kind, lambda line, k=key, v=value: line | {k: v})
        yield f"{kind} as a list", record(kind, lambda line: list(line))
        yield f"no {kind}", lambda lines, k=kind: [line for line in lines if line["kind"] != k]
    for shape in BOMBS:
        yield (
            f"shape {shape}",
            record("schema", lambda line, s=shape: resign(line, lambda about: about | {"shape": s})),
        )
    for kind in (*TYPES.split(), *OTHER_TYPES):
        yield f"type {kind}", record("schema", lambda line, k=kind: resign(line, lambda about: about | {"type": k}))
    yield "two units swapped", swap
    yield "a unit of another run", record("unit", lambda line: line | {"digest": "0" * 64})
    yield "newer", record("start", lambda line: line | {"format": 3})


def resign(line, change):
    """Change the first variable of a schema and give the schema the name of its content."""
    variables = line["schema"]["variables"]
    data = line["schema"] | {"variables": [change(variables[0]), *variables[1:]]}
    return line | {"schema": data, "id": identify(data)}


def swap(lines):
    units = [line for line in lines if line["kind"] == "unit"]
    units[0]["unit"], units[1]["unit"] = units[1]["unit"], units[0]["unit"]
    return lines


@pytest.fixture(scope="module")
def good(tmp_path_factory, seed):
    return run(Small(), replicates=2, seed=seed, store=tmp_path_factory.mktemp("good"), progress=False).attrs["path"]


@pytest.fixture(scope="module")
def at_work(tmp_path_factory, seed, good):
    """Return a run whose units lie in one segment."""
    from manyheads.study.store.records.segments import Frame, SegmentWriter

    store, kept = tmp_path_factory.mktemp("work") / "run", RunStore(good)
    shutil.copytree(good, store)
    _only(store).unlink()
    writer = SegmentWriter(store, kept.run, "launch-test")
    for pack in kept.load():
        for number, row in zip(pack.numbers.tolist(), pack.matrix, strict=True):
            writer.append(Frame(number, {"manyheads": "test"}, pack.schema.data, row.tobytes()))
    writer.close()
    return store


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_forged_tables_are_refused_and_run_nothing(good, tmp_path):
    canary, opened, count, whole = tmp_path / "executed", [], 0, open_run(good)
    tracemalloc.start()
    for count, (name, forge) in enumerate(tables(canary), start=1):
        store = shutil.copytree(good, tmp_path / str(count) / "run")
        forge(store)
        with contextlib.suppress(FileRefused):
            assert differences(open_run(store), whole) == [], name
            opened.append(name)
        shutil.rmtree(store.parent)
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()
    assert all("turned over" in name for name in opened)  # of zeros, which stay what they were
    assert not canary.exists()
    assert count >= 200


@pytest.mark.slow
def test_forged_segments_are_refused_or_say_the_same(at_work, good, tmp_path):
    whole = open_run(good)
    assert differences(open_run(at_work), whole) == []
    (path,) = at_work.glob("segments/*")
    lines, count, same = [json.loads(line) for line in path.read_text().splitlines()], 0, []
    for count, (name, forge) in enumerate(segments(), start=1):
        store = shutil.copytree(at_work, tmp_path / str(count) / "run")
        changed = forge(copy.deepcopy(lines))
        (store / "segments" / path.name).write_text("".join(json.dumps(line) + "\n" for line in changed))
        with contextlib.suppress(FileRefused):
            assert differences(open_run(store), whole) == [], name
            same.append(name)
        shutil.rmtree(store.parent)
    assert count >= 200
    assert len(same) < count / 2  # an entry was added that nobody reads, or a time was changed


def wide(lines):
    """Return units of a few bytes under a schema of 128 MB."""
    (start, environment, about, *_), units = lines, [line for line in lines if line["kind"] == "unit"]
    about = resign(about, lambda variable: {**variable, "shape": [1 << 27], "type": "bool", "dims": ["x"]})
    rest = [{**units[0], "unit": number, "schema": about["id"], "data": ""} for number in range(2000)]
    return [start, environment, about, *rest]


HUGE = {
    "128 MB a unit": wide,
    "a unit 1e30": record("unit", lambda line: line | {"unit": 10**30}),
    "a unit 1e18": record("unit", lambda line: line | {"unit": 10**18}),
    "a unit -1": record("unit", lambda line: line | {"unit": -1}),
    "a time 1e30": record("unit", lambda line: line | {"time": 10**30}),
    "two million values": record("environment", lambda line: line | {"more": [[]] * 2_000_000}),
}


@pytest.mark.parametrize("kind", HUGE)
def test_what_a_segment_states_is_bounded_by_its_bytes_and_one_bad_run_is_one_line(at_work, tmp_path, capsys, kind):
    for name in ("a", "c"):
        shutil.copytree(at_work, tmp_path / name)
    bad = shutil.copytree(at_work, tmp_path / "b")
    (path,) = bad.glob("segments/*")
    lines = HUGE[kind]([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    with pytest.raises(StoreDamaged):
        RunStore(bad).load()
    assert tracemalloc.get_traced_memory()[1] - before < 60e6
    tracemalloc.stop()
    assert main(["runs", "list", str(tmp_path), "--json"]) == 0
    states = [row["state"] for row in json.loads(capsys.readouterr().out)]
    assert len(states) == 3
    assert ["damaged" in state for state in states] == [False, True, False]
    for command, of_good in (("status", 2), ("compact", 2), ("clean", 1)):
        assert main(["runs", command, str(tmp_path)]) == (0 if command == "clean" else 3)
        said = capsys.readouterr()
        assert said.out.count("units") + said.out.count("leftovers") >= of_good
        assert said.err.count("manyheads:") == (command != "clean")  # which reads no units


def test_a_table_of_short_codes_cannot_state_long_texts(good, tmp_path):
    store = shutil.copytree(good, tmp_path / "run")
    members = read_table(store)
    data = json.loads(members[GROUP])
    for variable in data["attributes"]["manyheads_schema"]["variables"]:
        if variable["type"].startswith("utf8-"):
            variable["type"] = f"utf8-{1 << 26}"
    members[GROUP] = json.dumps(data, indent=1).encode()
    write_table(store, members.items())
    with pytest.raises(FileRefused, match=r"units of .* bytes in a file of"):
        RunStore(store).load()


def test_json_of_millions_of_values_is_refused_before_it_takes_memory(good, tmp_path):
    store = shutil.copytree(good, tmp_path / "run")
    (store / "run.json").write_text("[" + "[]," * 3_000_000 + "[]]")
    tracemalloc.start()
    with pytest.raises(FileRefused, match="commas and brackets"):
        RunStore(store)
    assert tracemalloc.get_traced_memory()[1] < 40e6
    tracemalloc.stop()


def test_a_summary_without_the_verdicts_of_the_study_is_no_summary(good, tmp_path):
    for kept in (0, 1):
        store = shutil.copytree(good, tmp_path / str(kept))
        header, summary = (read_json(store / name, "absent") for name in ("run.json", "summary.json"))
        write_signed(
            store / "summary.json",
            {k: v for k, v in summary.items() if k != "sha256"} | {"verdicts": summary["verdicts"][:kept]},
        )
        if kept:  # one verdict is one too few where the study declares two
            about = {k: v for k, v in header.items() if k != "sha256"} | {"claims": 2}
            write_signed(store / "run.json", about)
        with pytest.raises(StoreDamaged, match="verdicts on"):
            open_run(store)


@pytest.mark.parametrize("linked", ["segments", "leases"])
def test_nothing_is_written_or_removed_through_a_linked_folder(good, tmp_path, linked):
    outside, store = tmp_path / "outside", tmp_path / "toy/small" / os.path.basename(good)
    outside.mkdir()
    shutil.copytree(good, store)
    shutil.rmtree(store / linked, ignore_errors=True)
    os.symlink(outside, store / linked)
    with pytest.raises(FileRefused, match="symbolic link"):
        run(Small(), 3, json.loads((store / "run.json").read_text())["seed"], store=tmp_path, progress=False)
    (store / "summary.json").unlink()
    assert main(["runs", "clean", "--unfinished", str(tmp_path)]) == (3 if linked == "leases" else 0)
    assert not list(outside.iterdir())
