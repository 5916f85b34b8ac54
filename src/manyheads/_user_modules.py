"""Modules and files of a user's own studies, imported by name or by path."""

import importlib
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from manyheads._extras import name_extra
from manyheads.errors import ManyheadsError, UsageError

FILES: dict[str, str] = {}  # files given by path and imported, as typed, by the name of their module


def import_module(module: str) -> ModuleType:
    """Import a module; what goes wrong inside it is told with its place, a module that is not there as Python does."""
    try:
        return importlib.import_module(module)
    except ManyheadsError:
        raise
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{module}.".startswith(f"{absent}."):
            raise
        if (named := name_extra(error, module)) is not error:
            raise named from error
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({place.filename}, line {place.lineno})"
        raise UsageError(f"{module} cannot be imported: {type(error).__name__}: {error}{where}") from error


def load_file(path: Path) -> object:
    """Import a user's file under its own name, with its folder on the path, so that workers can import it too."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    if not re.fullmatch(r"[A-Za-z_]\w*", path.stem):
        raise UsageError(f"{path}: rename the file so that its name can be imported (letters, digits, _)")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = import_module(path.stem)
    if Path(str(module.__file__)).resolve() != path.resolve():
        raise UsageError(f"{path}: another module called {path.stem!r} is imported already; rename the file")
    FILES[path.stem] = str(path)
    return module
