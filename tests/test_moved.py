"""Old addresses name their successors in one line."""

import importlib
import subprocess
import sys

import pytest

import manyheads
from manyheads._moved import MOVED


@pytest.mark.parametrize("name", sorted(MOVED))
def test_an_old_package_names_its_successor(name):
    successor = MOVED[name].partition(" ")[0]
    importlib.import_module(successor)
    for ask in (
        lambda: getattr(manyheads, name).run,
        lambda: importlib.import_module(f"manyheads.{name}").run,
        lambda: exec(f"from manyheads.{name} import run"),
    ):
        with pytest.raises(ImportError, match=f"manyheads.{name} moved to {successor}"):
            ask()
    with pytest.raises(ModuleNotFoundError, match=f"manyheads.{name}.studies"):
        importlib.import_module(f"manyheads.{name}.studies")


@pytest.mark.parametrize(
    ("address", "successor"),
    [
        ("manyheads.AttentionLayer", "manyheads.attention"),
        ("manyheads.TransformerConfig", "manyheads.transformer"),
        ("manyheads.spectra.golub_kahan", "manyheads.spectra.bidiagonal"),
        ("manyheads.scaling.measure_task", "manyheads.scaling.checks.coordinate_check"),
        ("manyheads.theory.joma.blowup_time", "manyheads.theory.joma.theorems.winner_take_all"),
        ("manyheads.recovery.Oracle", "manyheads.recovery.oracle.oracle"),
    ],
)
def test_a_name_that_a_package_does_not_list_has_an_address(address, successor):
    package, _, name = address.rpartition(".")
    with pytest.raises(ImportError, match=f"from {successor} import {name}$"):
        exec(f"from {package} import {name}")
    assert hasattr(importlib.import_module(successor), name)


@pytest.mark.parametrize("name", ["attention", "curves", "data", "models", "spectra", "statistics", "study", "theory"])
def test_a_package_is_an_attribute(name):
    code = f"import manyheads as mh; assert mh.{name}.__name__ == 'manyheads.{name}'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_nowhere_has_none():
    assert not hasattr(manyheads, "transformers")
    assert not hasattr(manyheads.scaling, "_private")
    assert not hasattr(manyheads.scaling, "a name")
    assert importlib.import_module("manyheads.spectra.levels").__name__ == "manyheads.spectra.levels"
