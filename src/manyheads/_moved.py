"""Addresses of what moved: packages of older versions, and names that a package does not list."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

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

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        successor = MOVED[self.__name__.rpartition(".")[2]]
        raise ImportError(f"{self.__name__} moved to {successor}; no {name} here", name=self.__name__)


def note_moved_packages(package: str) -> None:
    """Put the old packages where an import looks for them."""
    for name in MOVED:
        sys.modules[f"{package}.{name}"] = moved = MovedPackage(f"{package}.{name}", f"Moved to {MOVED[name]}.")
        setattr(sys.modules[package], name, moved)


def find_address(package: str, filename: str, name: str) -> str | None:
    """Return the package below that lists a name, else the module that defines it; None of what is a module itself."""
    folder = Path(filename).parent
    if not name.isidentifier() or name.startswith("_") or (folder / name).exists() or (folder / f"{name}.py").exists():
        return None
    defined = rf"^(class|def) {name}\b|^{name}(: .*)? = "
    for pattern, kind in ((rf" as {name}$", "__init__.pyi"), (defined, "*.py")):
        for path in sorted(folder.rglob(kind), key=lambda path: (len(path.parts), path)):
            if re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE):
                parts = path.relative_to(folder).with_suffix("").parts
                return ".".join((package, *(part for part in parts if part != "__init__")))
    return None
