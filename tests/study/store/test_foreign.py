"""Headers and summaries of stores from elsewhere: forgeries are refused by name, and none is obeyed."""

import contextlib
import hashlib
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from tests.study.toys import Walk

from manyheads.cli import main
from manyheads.errors import FileRefused
from manyheads.study import Verdict, cite, open_run, run
from manyheads.study.execution.units import MalformedResult, Unit, _on_host
from manyheads.study.store.disk import StoreDamaged
from manyheads.study.store.equality import differences


class Small(Walk):
    """Few files: numbers, a label and a text, predicted and trained in two cells."""

    name = "toy/small"
    predictions = 2

    def predict(self, key):
        return self.train(key, 0)

    def train(self, key, steps):
        square = np.asarray(jax.random.normal(key, (3,), jnp.float64)) ** 2
        return xr.Dataset({"square": ("i", square), "outcome": ((), "far")})

    def compare(self, predicted, trained, claims=None):
        gap = float(abs(trained["square"].mean() - predicted["square"].mean()))
        return (Verdict.exact("near", gap, target=0.0, tolerance=3.0, basis="a test"),)

    def pictures(self, theory, trained):
        return ()


def put(path, content):
    """Write a file anew: its content is shared by hard links with the run that was copied."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def copy(good, store):
    shutil.copytree(good, store, copy_function=os.link)
    return store


def edit(path, **changes):
    """Change entries of a JSON file; a signed one is signed again."""
    data = json.loads(path.read_text())
    signed = data.pop("sha256", None) is not None
    data = {name: value for name, value in (data | changes).items() if value is not DROP}
    digest = {"sha256": hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()} if signed else {}
    put(path, json.dumps(data | digest))


DROP = object()


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
    for version in (1, 3, "2", None, 10**9, True, 2.0, 0, -1, DROP):
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


def _files():
    def link(name, target):
        def apply(store):
            outside = store.parent / "outside"
            shutil.move(store / name, outside)
            (store / name).symlink_to(target or outside)

        return apply

    def pipe(name):
        def apply(store):
            (store / name).unlink()
            os.mkfifo(store / name)

        return apply

    for name in ("run.json", "summary.json"):
        yield f"{name} linked out", link(name, None)
        yield f"{name} linked to a device", link(name, "/dev/zero")
        yield f"{name} as a pipe", pipe(name)


@pytest.fixture(scope="module")
def good(tmp_path_factory, seed):
    """Return a finished run."""
    return run(Small(), replicates=2, seed=seed, store=tmp_path_factory.mktemp("good"), progress=False).attrs["path"]


def test_forged_headers_and_summaries_are_refused_by_name(good, tmp_path):
    opened, count = [], 0
    for count, (name, forge) in enumerate((*_headers(), *_files()), start=1):
        store = copy(good, tmp_path / str(count) / "run")
        forge(store)
        with contextlib.suppress(FileRefused):
            open_run(store)
            opened.append(name)
        shutil.rmtree(store.parent)
    assert opened == []
    assert count >= 85


def test_the_corpus_starts_from_a_run_that_opens(good, tmp_path):
    store = copy(good, tmp_path / "run")
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
