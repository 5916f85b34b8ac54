"""Packages that moved: whatever is asked of an old one is answered by the name of its successor."""

import sys
from types import ModuleType
from typing import Any

MOVED = {
    "limits": "manyheads.scaling (hyperparameters) and manyheads.theory.dmft (infinite networks)",
    "joma": "manyheads.theory.joma and manyheads.curves (shapes of recorded curves)",
    "bigram": "manyheads.theory.bigram",
    "meanfield": "manyheads.theory.meanfield",
}


class MovedPackage(ModuleType):
    """A package of an older version, which holds nothing."""

    def __init__(self, name: str, doc: str):
        super().__init__(name, doc)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        successor = MOVED[self.__name__.rpartition(".")[2]]
        raise ImportError(f"{self.__name__} moved to {successor}; no {name} here", name=self.__name__)


def note_moved_packages(package: str) -> None:
    """Put the old packages where an import looks for them."""
    for name in MOVED:
        sys.modules[f"{package}.{name}"] = moved = MovedPackage(f"{package}.{name}", f"Moved to {MOVED[name]}.")
        setattr(sys.modules[package], name, moved)
