"""Help and import: what answers at once, and what is not even imported for it."""

import contextlib
import dataclasses
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.study.toys import Walk

from manyheads.cli import COMMANDS, main
from manyheads.cli.study import Options
from manyheads.studies.attention.order_blindness import OrderBlindness
from manyheads.study import run

HEAVY = ("jax", "numpy", "scipy", "torch", "xarray", "matplotlib", "zarr", "equinox", "typeguard", "asyncio")
GROUPS = {name[:1] for name in COMMANDS if len(name) > 1}

ASKING = """
import json, sys
from manyheads.cli import main
status = main(sys.argv[1:])
json.dump([status, sorted(sys.modules)], sys.stderr)
"""

# Everything that an import could change, before and after importing every module of the package.
IMPORTING = """
import importlib, json, locale, logging, os, pkgutil, random, signal, sys, warnings
import jax, numpy

def state():
    return {
        "jax": {name: str(value) for name, value in jax.config.values.items()},
        "warnings": [str(entry) for entry in warnings.filters],
        "logging": [str(logging.root.handlers), logging.root.level, logging.root.manager.disable],
        "numpy": [str(numpy.geterr()), str(numpy.get_printoptions()), str(numpy.random.get_state()[1].sum())],
        "python": [sys.getrecursionlimit(), str(sys.path), str(random.getstate()), str(sys.excepthook)],
        "process": [dict(os.environ), os.getcwd(), str(signal.getsignal(signal.SIGINT)), locale.getlocale()],
    }

# Third parties first: what equinox or matplotlib do on import is theirs.
import diffrax, equinox, jinja2, matplotlib.figure, ml_dtypes, optax, optimistix, rich, safetensors, scipy.linalg
import scipy.optimize, scipy.special, scipy.stats, tyro, xarray, zarr
before = state()
import manyheads
for module in pkgutil.walk_packages(manyheads.__path__, "manyheads."):
    importlib.import_module(module.name)
after = state()
changed = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
print(json.dumps([changed, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def ask(*words):
    """Return exit status, output, and what was imported by a fresh process."""
    done = subprocess.run([sys.executable, "-c", ASKING, *words], capture_output=True, text=True, check=True)
    status, modules = json.loads(done.stderr)
    return status, done.stdout, set(modules)


@pytest.mark.parametrize("words", [(), *sorted(GROUPS), *COMMANDS], ids=" ".join)
def test_help_answers_at_once(words):
    status, text, modules = ask(*words, "--help")
    assert status == 0
    assert text.startswith(f"usage: manyheads {' '.join(words)}".strip())
    assert max(map(len, text.splitlines())) <= 80
    assert "(default: False)" not in text
    assert not modules & set(HEAVY)
    # The largest imports 169 modules, in 0.12 s on a quiet machine. Modules are counted, since a machine may be slow.
    assert len(modules) < 250


def test_help_names_every_command():
    _, text, _ = ask("--help")
    for name, command in COMMANDS.items():
        assert f"  {' '.join(name)} " in text
        assert command.summary in text


def test_help_of_a_study_shows_its_flags_and_those_of_every_run(capsys):
    assert main(["study", "run", "attention/costs", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in (
        "--width",
        "--lengths",
        "--replicates",
        "--seed",
        "--store",
        "--workers",
        "--full",
        "--strict",
        "--json",
    ):
        assert flag in text


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_of_a_study_has_one_line_a_flag_and_no_docstring(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["study", "run", "attention/order-blindness", "--help"]) == 0
    text = capsys.readouterr().out
    shown = text.partition("flags of the study:")[2].partition("\n\nexamples:")[0]
    flags = [line for line in shown.splitlines() if line.startswith("  ")]
    assert all(line.startswith("  --") for line in flags)
    assert len(flags) == len(dataclasses.fields(OrderBlindness)) + len(dataclasses.fields(Options))
    assert max(map(len, flags)) <= max(columns, 40)
    assert "Attributes" not in text
    if columns == 200:
        assert text.count(" of the transformer") == 3


LISTINGS = (
    ("study", "list"),
    ("study", "show", "joma/rebound"),
    ("study", "show", "--help"),
    ("study", "run", "limits/infinite-heads", "--help"),
    ("study", "run", "attention/costs", "--dry-run"),
    ("runs", "list", "store"),
    ("runs", "clean", "store", "--dry-run"),
    ("count", "--layers", "12", "--width", "768", "--heads", "12", "--vocabulary", "50257", "--compare"),
    ("scale", "--base", "64,4,4", "--to", "64,12,12", "--learning-rate", "3e-3", "--weight-decay", "0.1"),
)


@pytest.fixture
def store(folder):
    """A store of one finished run and one that is damaged."""
    path = Path(run(Walk(), 1, store=folder / "store", progress=False).attrs["path"])
    shutil.copytree(path, path.with_name("0123456789abcdef"))
    next(path.with_name("0123456789abcdef").glob("table-*")).write_bytes(b"no table")
    return folder / "store"


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_helps_and_listings_fit_the_terminal(capsys, monkeypatch, store, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in [*((*name, "--help") for name in [(), *sorted(GROUPS), *COMMANDS]), *LISTINGS]:
        assert main(list(words)) == 0
        lines = capsys.readouterr().out.splitlines()
        # A path or a command line of one word stays whole.
        assert [line for line in lines if len(line) > columns and len(line.split()) > 1] == [], words


def test_examples_in_a_narrow_terminal_can_be_pasted(capsys, monkeypatch):
    for name, command in COMMANDS.items():
        monkeypatch.setenv("COLUMNS", "40")
        assert main([*name, "--help"]) == 0
        shown = capsys.readouterr().out.partition("\nexamples:\n")[2].replace("\\\n", "").splitlines()
        assert [shlex.split(line) for line in shown] == [shlex.split(line) for line in command.examples]


def test_a_table_in_a_narrow_terminal_keeps_every_number(capsys, monkeypatch):
    words = ["count", "--layers", "12", "--width", "768", "--heads", "12", "--vocabulary", "50257"]
    numbers = []
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(words) == 0
        numbers.append(sorted(re.findall(r"[\d,.]*\d", capsys.readouterr().out)))
    assert numbers[0] == numbers[1]


def test_a_table_that_is_a_little_too_wide_leaves_out_the_shares(capsys, monkeypatch):
    words = ["count", "--layers", "12", "--width", "768", "--heads", "12", "--vocabulary", "50257"]
    monkeypatch.setenv("COLUMNS", "80")
    assert main(words) == 0
    header, _, first = capsys.readouterr().out.splitlines()[:3]
    assert header.split() == ["item", "FLOPs", "elementwise", "transcendental", "bytes"]
    assert first.split()[0] == "positions"


def test_in_a_pipe_a_run_is_one_line(capsys, monkeypatch, store):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["runs", "list", "store"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_help_of_a_registered_study_imports_no_study(monkeypatch):
    status, text, modules = ask("study", "run", "limits/infinite-heads", "--help")
    assert status == 0
    assert not modules & set(HEAVY)
    monkeypatch.setattr("manyheads.cli.study.kept_description", lambda name: None)
    computed = io.StringIO()
    with contextlib.redirect_stdout(computed):
        assert main(["study", "run", "limits/infinite-heads", "--help"]) == 0
    assert text == computed.getvalue()


def test_importing_the_package_imports_nothing_heavy():
    code = "import json, sys, manyheads; dir(manyheads); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(json.loads(done.stdout)) & {*HEAVY, "tyro", "rich"}


@pytest.mark.slow
def test_importing_everything_changes_no_global_state_and_needs_no_extra():
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", IMPORTING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    changed, modules = json.loads(done.stdout)
    assert changed == {}
    assert not set(modules) & {"torch", "numba", "transformers", "distributed", "dask"}
