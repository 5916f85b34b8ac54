r"""Stores from elsewhere: a corpus of forgeries is refused by name, and none of them runs code or takes much memory.

Every forgery starts from a good run, changes it, and signs it again, as somebody who wants to deceive would do.
"""

import contextlib
import hashlib
import json
import os
import pickle
import shutil
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from tests.study.format1 import downgrade
from tests.study.toys import Walk

from manyheads.cli import main
from manyheads.errors import FileRefused
from manyheads.study import Cell, Verdict, cite, open_run, report, run
from manyheads.study.execution.units import MalformedResult, Unit, _on_host
from manyheads.study.store.disk import StoreDamaged, hash_files, list_files
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import RunStore

UNIT = "predicted/0"  # the first that is read
ARRAY = f"{UNIT}/data.zarr/square/zarr.json"
GROUP = f"{UNIT}/data.zarr/zarr.json"
CHUNK = f"{UNIT}/data.zarr/square/c/0"
TEXT = f"{UNIT}/data.zarr/outcome/zarr.json"


@dataclass(frozen=True)
class Small(Walk):
    """Few files: numbers, a label and a text, predicted and trained in two cells."""

    name: ClassVar[str] = "toy/small"
    predictions: ClassVar[int | None] = 2

    def predict(self, key):
        return self.train(key, {})

    def train(self, key, cell):
        square = np.asarray(jax.random.normal(key, (3,), jnp.float64)) ** 2
        return xr.Dataset({"square": ("i", square), "outcome": ((), "far")})

    def compare(self, predicted, trained):
        gap = float(abs(trained["square"].mean() - predicted["square"].mean()))
        return (Verdict.exact("near", gap, target=0.0, tolerance=3.0, basis="a test"),)


class Payload:
    """Runs code when it is unpickled: it leaves a file."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return (open, (self.canary, "w"))


def put(path, content):
    """Write a file anew: its content is shared by hard links with the run that was copied."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def copy(good, store):
    shutil.copytree(good, store, copy_function=os.link)
    return store


def sign(store):
    """Write the manifest of the forged unit anew, as a forger would."""
    with contextlib.suppress(FileRefused, OSError):
        sizes = list_files(store / UNIT)
        if max(sizes.values()) < 1 << 32:
            put(store / UNIT / "manifest.json", json.dumps(hash_files(store / UNIT, but="manifest.json")))


def edit(path, **changes):
    """Change entries of a JSON file; a signed one is signed again."""
    data = json.loads(path.read_text())
    signed = data.pop("sha256", None) is not None
    data = {name: value for name, value in (data | changes).items() if value is not DROP}
    digest = {"sha256": hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()} if signed else {}
    put(path, json.dumps(data | digest))


DROP = object()
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
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


def _codecs():
    for name in CODECS.split():
        yield f"codec {name}", lambda s, name=name: edit(s / ARRAY, codecs=[{"name": name, "configuration": {}}])
        yield f"codec {name} second", lambda s, name=name: edit(s / ARRAY, codecs=[BYTES, {"name": name}])
    zstd = {"name": "zstd", "configuration": {"level": 0, "checksum": False}}
    others = {
        "twice compressed": [BYTES, zstd, zstd],
        "compressed first": [zstd, BYTES],
        "none": [],
        "no list": "bytes",
        "a codec that is no table": ["bytes"],
        "big endian": [{"name": "bytes", "configuration": {"endian": "big"}}, zstd],
        "an option that is code": [{"name": "bytes", "configuration": {"endian": "little", "class": "os:system"}}],
        "an option that is a text": [BYTES, {"name": "zstd", "configuration": {"level": "os"}}],
    }
    for what, codecs in others.items():
        yield f"codecs {what}", lambda s, codecs=codecs: edit(s / ARRAY, codecs=codecs)


def _types():
    for kind in (*TYPES.split(), *OTHER_TYPES):
        yield f"type {kind}", lambda s, kind=kind: edit(s / ARRAY, data_type=kind)


def _bombs():
    for shape in BOMBS:
        yield f"shape {shape}", lambda s, shape=shape: edit(s / ARRAY, shape=shape)
        yield f"chunks {shape}", lambda s, shape=shape: edit(s / ARRAY, chunk_grid=_grid(shape))
        yield f"both {shape}", lambda s, shape=shape: edit(s / ARRAY, shape=shape, chunk_grid=_grid(shape))
    yield "shape of 8e12 bytes in small chunks", lambda s: edit(s / ARRAY, shape=[10**12], chunk_grid=_grid([3]))
    yield "texts that fill the memory", _wide_texts
    yield (
        "a frame that states 1 TB",
        lambda s: put(s / CHUNK, b"\x28\xb5\x2f\xfd\xe0" + (10**12).to_bytes(8, "little")),
    )
    yield "a frame that states nothing", lambda s: put(s / CHUNK, b"\x28\xb5\x2f\xfd\x00\x58" + bytes(9))
    yield "no frame", lambda s: put(s / CHUNK, b"cos\nsystem\n")
    yield "an empty chunk", lambda s: put(s / CHUNK, b"")
    yield "a chunk of holes", lambda s: holes(s / CHUNK)
    yield "metadata of holes", lambda s: holes(s / ARRAY)
    yield "metadata without end", lambda s: put(s / ARRAY, "[" * 100_000)
    yield "numbers without end", lambda s: put(s / ARRAY, '{"shape": [' + "9" * 10_000 + "]}")


def holes(path):
    put(path, b"")
    os.truncate(path, 1 << 40)


def _grid(shape):
    return {"name": "regular", "configuration": {"chunk_shape": shape}}


def _wide_texts(store):
    attributes = json.loads((store / TEXT).read_text())["attributes"] | {"labels": ["a" * 10_000] * 2}
    edit(store / TEXT, attributes=attributes, shape=[10_000], chunk_grid=_grid([10_000]), dimension_names=["i"])


def _metadata():
    for value in (1, 2, 4, "3", None, True, 3.5):
        yield f"array of format {value}", lambda s, v=value: edit(s / ARRAY, zarr_format=v)
        yield f"group of format {value}", lambda s, v=value: edit(s / GROUP, zarr_format=v)
    for name in ("storage_transformers", "chunk_grid", "chunk_key_encoding", "fill_value", "attributes"):
        for value in ([{"name": "os:system"}], "os:system", {"name": "os:system", "configuration": {}}):
            yield f"{name} {value}", lambda s, n=name, v=value: edit(s / ARRAY, **{n: v})
    for path in (ARRAY, GROUP):
        yield (
            f"{path} must_understand",
            lambda s, p=path: edit(s / p, extension={"name": "x", "must_understand": False}),
        )
        yield f"{path} consolidated", lambda s, p=path: edit(s / p, consolidated_metadata={"metadata": {}})
        yield f"{path} node", lambda s, p=path: edit(s / p, node_type="link")
        for attribute in ("scale_factor", "add_offset", "missing_value", "calendar", "dtype", "a\x1b[31m", "a\u202eb"):
            yield f"{path} attribute {attribute!r}", lambda s, p=path, a=attribute: _attribute(s / p, a, "2")
        yield (
            f"{path} deep attribute",
            lambda s, p=path: _attribute(s / p, "note", {"__reduce__": ["os.system", "true"]}),
        )
    yield "numbers that are called booleans", lambda s: _attribute(s / ARRAY, "dtype", "bool")
    for names in ([["i"]], ["a/b"], ["\x1b[2J"], [".."], "i", [3]):
        yield f"dimension {names}", lambda s, n=names: edit(s / ARRAY, dimension_names=n)


def _attribute(path, name, value):
    edit(path, attributes=json.loads(path.read_text())["attributes"] | {name: value})


def _files(canary):
    def v2(store, node, filters):
        (store / node).unlink()
        for other in ("outcome", "wall_seconds", "cpu_seconds") if node == GROUP else ():
            shutil.rmtree((store / GROUP).with_name(other))
        put((store / node).with_name(".zgroup"), '{"zarr_format": 2}')
        array = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "fill_value": None, "order": "C"}
        array |= {"compressor": None, "filters": filters, "attributes": {}}
        put((store / ARRAY).with_name(".zarray"), json.dumps(array))
        put((store / ARRAY).with_name(".zattrs"), '{"_ARRAY_DIMENSIONS": ["i"]}')
        put((store / ARRAY).with_name("0"), pickle.dumps(Payload(canary)))

    def write(name, content=b"x"):
        return lambda store: put(store / name, content)

    def link(name, target):
        def apply(store):
            outside = store.parent / "outside"
            shutil.move(store / name, outside)
            (store / name).symlink_to(target or outside)

        return apply

    def pipe(name):
        def apply(store):
            (store / name).unlink(missing_ok=True)
            os.mkfifo(store / name)

        return apply

    # Zarr judges the data type by the first of them, and decodes by the last one first.
    for filters in ("pickle", "vlen-utf8 pickle", "vlen-bytes pickle", "json2 pickle", "json2", "msgpack2"):
        listed = [{"id": name} for name in filters.split()]
        yield f"v2 array, {filters}", lambda s, f=listed: v2(s, ARRAY, f)
        yield f"v2 group, {filters}", lambda s, f=listed: v2(s, GROUP, f)
    folder = f"{UNIT}/data.zarr"
    yield "v2 beside v3", write(f"{folder}/square/.zarray", b"{}")
    for name in (
        ".zattrs",
        ".zmetadata",
        "x.pkl",
        "square/x.py",
        "square/c/1",
        "square/d/0",
        "square/c/-1",
        "square/c/00",
    ):
        yield f"a file {name}", write(f"{folder}/{name}")
    for name in ("__init__.py", "data.pkl", "data.zarr.zip"):
        yield f"a file {name} beside", write(f"{UNIT}/{name}")
    for name in ("a\x1b[31mb", "a\u202eb", ".hidden", "__class__", "x" * 201):
        yield f"a variable {name!r}", lambda s, n=name: shutil.copytree(s / folder / "square", s / folder / n)
    yield "a nested group", lambda s: shutil.copytree(s / folder, s / folder / "inner")
    for name in (ARRAY, GROUP, CHUNK, f"{UNIT}/manifest.json", "run.json", "summary.json"):
        yield f"{name} linked out", link(name, None)
        yield f"{name} linked to a device", link(name, "/dev/zero")
        yield f"{name} as a pipe", pipe(name)
    yield "a file of holes beside", lambda s: holes(s / UNIT / "data.pkl")
    for name in (f"{folder}/square", folder, UNIT, "units/steps=3/0", "units/steps=3", "units", "predicted"):
        yield f"folder {name} linked out", link(name, None)


def _swaps():
    def swap(first, second):
        def apply(store):
            shutil.move(store / first, store / "kept")
            shutil.move(store / second, store / first)
            shutil.move(store / "kept", store / second)

        return apply

    yield "replicates swapped", swap("units/steps=3/0", "units/steps=3/1")
    yield "cells swapped", swap("units/steps=5", "units/steps=3")
    yield "predictions swapped", swap("predicted/0", "predicted/1")
    yield "a prediction as a unit", swap("predicted/0", "units/steps=3/0")
    yield "a unit without a name", lambda s: edit(s / GROUP, attributes={})
    yield "a unit of another run", lambda s: edit(s / GROUP, attributes={"manyheads_unit": "toy/walk 0, cell steps=3"})


def _headers():
    for name in (
        "study",
        "class",
        "command",
        "claim",
        "source",
        "layout",
        "configuration",
        "versions",
        "inputs",
        "seed",
    ):
        for value in (DROP, None, 3.5, ["x"]):
            yield (
                f"header {name} {value if value is not DROP else 'absent'}",
                lambda s, n=name, v=value: edit(s / "run.json", **{n: v}),
            )
    for version in (2, 3, "2", None, 10**9, True, 1.0, 0, -1):
        yield f"format {version}", lambda s, v=version: edit(s / "run.json", format=v)
    layouts = {
        "1e12 predictions": {"cells": [[["steps", 3]]], "predictions": 10**12, "chunk": 1},
        "1e9 predictions": {"cells": [[["steps", 3]]], "predictions": 10**9, "chunk": 1},
        "no chunk": {"cells": [[["steps", 3]]], "predictions": 3, "chunk": 0},
        "a path as a cell": {"cells": [[["steps", "../../x"]]], "predictions": 3, "chunk": 1},
        "a cell of code": {"cells": [[["__class__", {"a": 1}]]], "predictions": 3, "chunk": 1},
        "cells that are none": {"cells": 3, "predictions": 3, "chunk": 1},
    }
    for what, layout in layouts.items():
        yield f"layout, {what}", lambda s, v=layout: edit(s / "run.json", layout=v)
    for what in ("../../../etc", "a/b/c", "os:system", "\x1b[2J", "A"):
        yield f"study called {what!r}", lambda s, v=what: edit(s / "run.json", study=v)
    yield "a source of other fields", lambda s: edit(s / "run.json", source={"key": "a", "system": "true"})
    for replicates in (0, -1, 3, 10**9, 10**18, 2.0, "2", None, True, [2]):
        yield f"{replicates!r} replicates", lambda s, v=replicates: edit(s / "summary.json", replicates=v)
    for verdicts in (3, [3], [{}], [{"claim": "x", "outcome": "\x1b[2J"}], {"a": 1}):
        yield f"verdicts {verdicts}", lambda s, v=verdicts: edit(s / "summary.json", verdicts=v)
    yield "no JSON", lambda s: put(s / "run.json", "import os")
    yield "JSON without end", lambda s: put(s / "summary.json", "[" * 200_000)


def forgeries(canary):
    """Yield the name of every forgery and the function that makes it of a good run."""
    for family in (_codecs(), _types(), _bombs(), _metadata(), _files(canary), _swaps(), _headers()):
        yield from family


@pytest.fixture(scope="module")
def good(tmp_path_factory, seed):
    """Return a run in format 1."""
    path = run(Small(), replicates=2, seed=seed, store=tmp_path_factory.mktemp("good"), progress=False).attrs["path"]
    return str(downgrade(path))


@pytest.mark.slow
def test_forged_stores_are_refused_by_name_and_run_nothing(good, tmp_path, monkeypatch):
    # As numcodecs behaved before 0.16.6, and as a user's environment may have it.
    monkeypatch.setattr("numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)
    canary = tmp_path / "executed"
    opened, count = [], 0
    for count, (name, forge) in enumerate(forgeries(canary), start=1):
        store = copy(good, tmp_path / str(count) / "run")
        forge(store)
        sign(store)
        with contextlib.suppress(FileRefused):
            open_run(store)
            opened.append(name)
        shutil.rmtree(store.parent)
    assert not canary.exists()
    assert opened == []
    assert count >= 200


def test_the_corpus_starts_from_a_run_that_opens(good, tmp_path):
    store = copy(good, tmp_path / "run")
    sign(store)
    edit(store / "run.json")
    assert differences(open_run(good), open_run(store)) == []


def test_what_a_forged_store_says_is_shown_and_not_obeyed(good, tmp_path, capsys):
    store = tmp_path / "evil\x1b[31m" / "toy"
    copy(good, store)
    source = json.loads((store / "run.json").read_text())["source"] | {"title": "a\x1b[2Jb\u202e"}
    edit(
        store / "run.json",
        source=source,
        **{"class": "os:system", "command": "\x1b]0;x\x07 rm -rf /", "claim": "c\x1b[1m"},
    )
    edit(store / "summary.json", panels=[{"kind": "lines"}])
    assert main(["runs", "list", str(tmp_path)]) == 0
    assert main(["cite", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path)]) == 3
    edit(store / "summary.json", panels=[])
    (store / UNIT / "manifest.json").unlink()
    assert main(["runs", "list", str(tmp_path)]) == 0
    out = capsys.readouterr()
    assert "\x1b" not in out.out + out.err
    assert "\\x1b[2J" in out.out
    assert "evil\\x1b[31m" in out.out


def test_a_run_that_is_not_the_asked_one_is_left_alone(good, tmp_path):
    copy(good, tmp_path / "toy/small" / os.path.basename(good))
    header = tmp_path / "toy/small" / os.path.basename(good) / "run.json"
    edit(header, seed=json.loads(header.read_text())["seed"] + 1)
    with pytest.raises(StoreDamaged, match="its seed differs"):
        run(
            Small(),
            replicates=2,
            seed=json.loads(header.read_text())["seed"] - 1,
            store=tmp_path,
            progress=False,
        )


def test_runs_that_were_written_before_units_had_names_open(good, tmp_path):
    store = tmp_path / "old"
    copy(good, store)
    edit(store / "run.json", units=DROP)
    for unit in [*store.glob("units/*/*"), *store.glob("predicted/*")]:
        edit(unit / "data.zarr/zarr.json", attributes={})
        put(unit / "manifest.json", json.dumps(hash_files(unit, but="manifest.json")))
    assert differences(open_run(good), open_run(store)) == []


@pytest.mark.parametrize("name", ["a/b", "a\\b", ".hidden", "__x", "zarr.json", "a\x1b[1m", "", "x" * 201])
def test_names_that_a_store_cannot_hold_are_refused_where_they_are_made(name):
    with pytest.raises(MalformedResult, match="which a store cannot hold"):
        _on_host(xr.Dataset({name: ((), 1.0)}), Unit(None, 0, 0))
    with pytest.raises(MalformedResult, match="which a store cannot hold"):
        _on_host(xr.Dataset({"x": ((name,), np.ones(2))}), Unit(None, 0, 0))


def test_an_older_run_is_cited_without_an_identifier_that_is_refused_today(good, tmp_path):
    store = copy(good, tmp_path / "old")
    edit(store / "run.json", source=json.loads((store / "run.json").read_text())["source"] | {"identifier": "arXiv:1"})
    assert differences(open_run(good), open_run(store)) == []
    assert "bernoulli1713" in cite(store)


@pytest.mark.parametrize("linked", ["predicted", "units", "units/steps=3"])
def test_nothing_is_written_or_removed_through_a_linked_folder(good, tmp_path, linked):
    outside, store = tmp_path / "outside", tmp_path / "toy/small" / os.path.basename(good)
    outside.mkdir()
    shutil.copytree(good, store)
    shutil.rmtree(store / linked)
    os.symlink(outside, store / linked)
    with pytest.raises(StoreDamaged, match="is a symbolic link"):
        run(Small(), 2, json.loads((store / "run.json").read_text())["seed"], store=tmp_path, progress=False)
    assert not list(outside.iterdir())
    assert main(["runs", "clean", str(tmp_path)]) == 3


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"chunk": 4}, "its layout differs"),
        ({"predictions": 5}, "its layout differs"),
        ({"chunk": 2**31}, "expected counts"),
        ({"predictions": 2**31}, "expected counts"),
    ],
)
def test_a_stated_layout_is_that_of_the_study(good, tmp_path, layout, words):
    store = copy(good, tmp_path / "toy/small" / os.path.basename(good))
    header = json.loads((store / "run.json").read_text())
    edit(store / "run.json", layout=header["layout"] | layout)
    with pytest.raises(StoreDamaged, match=words):
        run(Small(), 2, header["seed"], store=tmp_path, progress=False)


def test_a_unit_that_is_stated_and_not_stored_is_missing(good, tmp_path):
    shutil.copytree(good, tmp_path / "run")
    (tmp_path / "run/predicted/0").rename(tmp_path / "run/predicted/7")
    with pytest.raises(StoreDamaged, match="is missing"):
        open_run(tmp_path / "run")


@pytest.mark.parametrize(
    "stranger", ["predicted/7", "predicted/00", "units/steps=3/7-9", "units/steps=4/0", "units/steps=3/٣"]
)
def test_a_folder_of_no_unit_of_the_run_stands_in_for_none(good, tmp_path, stranger, capsys):
    store = shutil.copytree(good, tmp_path / "run")
    runs = RunStore(store)
    kept = runs.numbers()
    (store / "units/steps=5/1").rename((store / stranger).parent.mkdir(exist_ok=True) or store / stranger)
    assert RunStore(store).numbers() == kept - {runs.layout.number(Unit(Cell(steps=5), 1, 1))}
    for reader in (report, open_run):
        with pytest.raises(StoreDamaged, match=r"units/steps=5/1 is missing"):
            reader(store)
    assert main(["runs", "list", str(store)]) == 0
    assert f"{len(kept) - 1} units   damaged" in capsys.readouterr().out


@pytest.mark.parametrize("source", [{"title": []}, {"year": "2017},"}])
def test_a_source_of_other_types_is_refused(good, tmp_path, source):
    store = copy(good, tmp_path / "run")
    edit(store / "run.json", source=json.loads((store / "run.json").read_text())["source"] | source)
    with pytest.raises(StoreDamaged, match=f"the source's {min(source)}"):
        cite(store)


@pytest.mark.parametrize("forged", [{"basis": [1]}, {"claim": 5}, {"replicates_needed": "x"}])
def test_a_verdict_of_other_types_is_refused(good, tmp_path, forged):
    store = copy(good, tmp_path / "run")
    verdicts = json.loads((store / "summary.json").read_text())["verdicts"]
    edit(store / "summary.json", verdicts=[verdict | forged for verdict in verdicts])
    with pytest.raises(StoreDamaged, match="a claim and its basis are texts"):
        open_run(store)


def test_a_grid_without_cells_is_refused(good, tmp_path):
    store = copy(good, tmp_path / "run")
    edit(store / "run.json", layout=json.loads((store / "run.json").read_text())["layout"] | {"cells": []})
    with pytest.raises(StoreDamaged, match="a grid without cells"):
        open_run(store)
