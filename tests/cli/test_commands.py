"""What the commands do on a store: run, resume, list, report, cite, clean."""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from tests.study.toys import Walk

from manyheads.cli import main
from manyheads.cli.study import print_verdicts
from manyheads.study import open_run, run
from manyheads.study.registry import STUDIES
from manyheads.study.store.equality import differences
from manyheads.study.store.leases import Launch
from manyheads.study.verdicts import Verdict

WALK = "tests.study.toys:Walk"
PATIENT = "tests.cli.toys:Patient"


@pytest.fixture
def call(capsys):
    """Run a command in this process; return its exit status, output and complaints."""

    def command(*words):
        status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the root of a store with one finished run."""
    root = tmp_path_factory.mktemp("store")
    run(Walk(), replicates=2, store=root, progress=False)
    return root


@pytest.fixture
def store(finished, folder):
    return shutil.copytree(finished, folder / "runs")


def test_run_as_json_and_again_from_the_store(call, folder, seed):
    words = ("study", "run", WALK, "--replicates", 2, "--seed", seed, "--workers", 1, "--json", "--store", "kept")
    status, out, err = call(*words)
    assert status == 0
    assert "7 to do" in err
    result = json.loads(out)
    assert set(result) == {"study", "store", "verdicts"}
    assert result["study"] == "toy/walk"
    keys = {"claim", "expected", "outcome", "figure", "interval", "target", "tolerance", "basis"}
    assert all(keys <= set(verdict) for verdict in result["verdicts"])
    assert [verdict["claim"] for verdict in result["verdicts"]] == ["one a step", "moves away", "ends near or far"]
    assert differences(open_run(result["store"]), run(Walk(), 2, seed, store=folder / "other", progress=False)) == []
    status, again, err = call(*words)
    assert (status, json.loads(again)) == (0, result)
    assert "0 to do" in err


def test_a_table_for_people_names_claim_outcome_and_store(call):
    status, out, _ = call("study", "run", PATIENT, "--units", 2, "--replicates", 1, "--workers", 1)
    assert status == 0
    assert "all are one" in out
    assert "holds" in out
    assert "runs/toy/patient/" in out


@pytest.mark.parametrize("columns", [40, 60, 99, 100, 200])
def test_verdicts_lose_no_word_and_no_digit_at_any_width(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    told = ("No loss grows faster than linearly", 0.1234, "refuted", (0.1111, 0.2222), 0.5, (0.25, 0.25))
    claim, figure, outcome, interval, target, tolerance = told
    print_verdicts([Verdict(claim, "holds", outcome, figure, interval, target, tolerance, "a test")])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    words = " ".join(lines).split()
    for word in (*claim.split(), "0.1234", "0.1111", "0.2222", "0.25", "0.75", "refuted"):
        assert word in words or f"{word}," in words


@pytest.mark.parametrize(("target", "strict", "expected"), [(1, True, 0), (5, True, 1), (5, False, 0)])
def test_strict_asks_for_the_expected_outcome(call, target, strict, expected):
    words = ("study", "run", PATIENT, "--units", 1, "--replicates", 1, "--workers", 1, "--target", target)
    assert call(*words, *(["--strict"] if strict else []))[0] == expected


def test_list_and_show(call):
    status, out, _ = call("study", "list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == sorted(STUDIES)
    status, out, _ = call("study", "list", "--json")
    assert {row["study"]: row["claim"] for row in json.loads(out)} == {n: entry.claim for n, entry in STUDIES.items()}
    status, out, _ = call("study", "show", WALK)
    assert status == 0
    for text in ("toy/walk", Walk.claim, "Bernoulli", "--walkers = 64", "cells    2"):
        assert text in out


def test_runs_are_listed_with_what_is_known_of_them(call, store):
    status, out, _ = call("runs", "list")
    assert status == 0
    assert "7 units" in out
    (row,) = json.loads(call("runs", "list", "--json")[1])
    assert row["units"] == 7
    assert "holds" in row["state"]
    (path,) = store.glob("toy/walk/*")
    (path / "summary.json").unlink()
    assert "unfinished" in call("runs", "list", store)[1]
    (table,) = path.glob("table-*")
    table.write_bytes(table.read_bytes()[:-30])
    status, out, _ = call("runs", "list")
    assert status == 0
    assert f"damaged: {table.relative_to(store.parent)}" in out


def test_status_says_what_is_stored_claimed_and_missing(call, store):
    (path,) = store.glob("toy/walk/*")
    (row,) = json.loads(call("runs", "status", "--json", "--replicates", "3")[1])
    assert row["cells"]["steps=3"] == {"stored": 2, "claimed": 0, "missing": 1, "failed": 0}
    assert row["launches"] == []
    with Launch(path) as launch:
        launch.claim([7], 1)
        (row,) = json.loads(call("runs", "status", "--json", "--replicates", "3")[1])
        assert row["cells"]["steps=3"] == {"stored": 2, "claimed": 1, "missing": 0, "failed": 0}
        assert row["launches"][0]["pid"] == os.getpid()
        out = call("runs", "status")[1]
        assert "at work: " in out
        (path / "summary.json").unlink()
        status, _, err = call("runs", "clean", "--unfinished")
        assert (status, "is at work here" in err) == (3, True)


def test_a_damaged_run_is_repaired_and_run_again(call, store):
    (path,) = store.glob("toy/walk/*")
    whole, name = open_run(path), path.relative_to(store.parent)
    (table,) = path.glob("table-*")
    assert call("runs", "repair", name)[1] == f"no file of {name} is damaged\n"
    table.write_bytes(table.read_bytes()[:-30])
    assert "'manyheads runs repair'" in call("runs", "list", "--json")[1]
    status, out, _ = call("runs", "repair", name)
    assert status == 0
    assert f"{table.relative_to(store.parent)}.damaged: 0 units kept\n  lost: all units" in out
    assert call("study", "run", WALK, "--replicates", 2, "--workers", 1)[0] == 0
    assert differences(open_run(path), whole) == []


def test_compact_and_export_say_what_they_wrote(call, store):
    (path,) = store.glob("toy/walk/*")
    name = path.relative_to(store.parent)
    assert call("runs", "compact")[1] == f"{name}: 7 units\n"
    assert call("runs", "export", name, "walk.zarr")[:2] == (0, "walk.zarr\n")
    assert call("runs", "export", name, "walk.zarr")[0] == 2


def test_a_run_under_other_versions_is_refused_when_asked(call, store, monkeypatch):
    from manyheads.study.execution import runner

    words = ("study", "run", WALK, "--replicates", 2, "--workers", 1, "--same-versions")
    assert call(*words)[0] == 0
    other = runner.versions() | {"jax": "0.0.1"}
    monkeypatch.setattr(runner, "versions", lambda: other)
    status, _, err = call(*words)
    assert status == 2
    assert f"units come from jax {jax.__version__}" in err
    assert "jax 0.0.1" in err


def test_clean_removes_what_it_says_and_nothing_else(call, store):
    (path,) = store.glob("toy/walk/*")
    before = sorted(store.rglob("*"))
    assert call("runs", "clean", "--unfinished", "--superseded")[0] == 0
    assert sorted(store.rglob("*")) == before
    (path / "summary.json").unlink()
    call("runs", "clean")
    assert path.exists()
    status, out, _ = call("runs", "clean", "--unfinished")
    assert status == 0
    assert f"removed {path.relative_to(store.parent)}" in out
    assert not path.exists()


@pytest.mark.parametrize(
    "words", [["study", "run", "attention/costs", "--store", ""], ["demo", "--out="], ["runs", "list", ""]]
)
def test_an_empty_path_is_not_the_working_folder(call, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, complaint = call(*words)
    assert status == 2
    assert "names no file" in complaint
    assert not list(tmp_path.iterdir())


def test_clean_refuses_a_link_to_a_run(call, store):
    (path,) = store.glob("toy/walk/*")
    (path / "summary.json").unlink()
    (store.parent / "link").symlink_to(path)
    for words in (("link",), ("link", "--unfinished")):
        status, out, err = call("runs", "clean", *words)
        assert (status, out) == (3, "")
        assert "link is a symbolic link to a run" in err
        assert str(path.resolve()) in err
    assert path.exists()
    (store.parent / "root").symlink_to(store)
    assert call("runs", "clean", "root", "--unfinished")[0] == 0
    assert not path.exists()


def test_clean_and_run_tell_what_they_would_do(call, store):
    (path,) = store.glob("toy/walk/*")
    (path / "summary.json").unlink()
    before = sorted(store.rglob("*"))
    status, out, _ = call("runs", "clean", "--unfinished", "--dry-run")
    assert status == 0
    assert f"would remove {path.relative_to(store.parent)}" in out
    assert "1 runs would be removed" in out
    status, out, _ = call("study", "run", WALK, "--replicates", 3, "--dry-run")
    assert (status, sorted(store.rglob("*"))) == (0, before)
    assert "9 units, 7 stored, 2 to do" in out
    assert str(path.relative_to(store.parent)) in out
    status, out, _ = call("study", "run", WALK, "--store", "other", "--dry-run")
    assert "0 stored" in out
    assert not (store.parent / "other").exists()


def test_a_report_opens_in_the_browser(call, store, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert call("report", "--open")[0] == 0
    assert opened == [(store / "report.html").resolve().as_uri()]


def test_report_and_citation(call, store):
    status, out, _ = call("report")
    assert (status, out.strip()) == (0, "runs/report.html")
    text = (store / "report.html").read_text()
    assert Walk.claim in text
    assert "one a step" in text
    assert call("report", "runs", "--out", "mine.html")[0] == 0
    assert (store.parent / "mine.html").read_text() == text
    by_store, by_name = call("cite"), call("cite", WALK)
    assert by_store[:2] == by_name[:2]
    assert by_store[1].startswith("@misc{bernoulli1713")


def test_version(call):
    import manyheads

    status, shown, _ = call("--version")
    assert status == 0
    assert shown.splitlines()[0] == f"manyheads {manyheads.__version__}"
    assert f"jax {jax.__version__}" in shown.splitlines()
    assert f"numpy {np.__version__}" in shown.splitlines()


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "manyheads", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("manyheads ")


def test_an_old_command_names_its_successor(call):
    status, _, error = call("joma", "judge", "run.csv")
    assert status == 2
    assert error == "manyheads: 'manyheads joma' moved: it is 'manyheads curves judge' now\n"


@pytest.mark.parametrize("flags", [("--scheme", "limits"), ("--scheme=limits",)])
def test_an_old_flag_names_its_successor(call, flags):
    status, _, error = call("scale", "--base", "64,4,4", *flags)
    assert status == 2
    assert error == "manyheads: --scheme limits is called --scheme completep now\n"


def test_curves_are_judged(call, tmp_path):
    lines = [f"{step},{layer},{2 + layer + 0.5 ** (step / 30)},3" for step in range(0, 300, 10) for layer in (0, 1)]
    (tmp_path / "run.csv").write_text("\n".join(["step,layer,entropy,loss", *lines]))
    status, text, _ = call("curves", "judge", str(tmp_path / "run.csv"))
    assert status == 0
    assert "attention entropy, top layer: drops and rebounds in 0 of 1 runs" in text
    status, _, error = call("curves", "judge", str(tmp_path / "run.csv"), "--losses", "a.csv", "b.csv")
    assert status == 2
    assert "2 files for 1 runs" in error
