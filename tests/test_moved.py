"""Old addresses name their successors in one line."""

import importlib

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
