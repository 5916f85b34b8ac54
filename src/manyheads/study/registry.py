"""Registry of the studies: names, classes and claims as their files state them, so that listing them imports nothing.

`study` imports no theory of its own accord: it imports the module of a study when the study is named, and not before.
"""

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from manyheads._user_modules import FILES as FILES
from manyheads._user_modules import import_module, load_file
from manyheads.errors import UsageError
from manyheads.study.base import Study

PACKAGE = Path(__file__).parents[1]
PLACES = ("studies/**/*.py", "demo/text.py")  # of files that define studies, in the package
STATED = re.compile(r"^    (name|claim)(?:: [^=\n]+)? = (.+?)\n(?=    \w|\n|\Z)", re.MULTILINE | re.DOTALL)


class Entry(NamedTuple):
    """Place of a study and its claim in one line."""

    place: str
    claim: str


class _Registry(Mapping[str, Entry]):
    """The studies by name, in the order of their names; the files are read when somebody looks."""

    @functools.cached_property
    def entries(self) -> dict[str, Entry]:
        """Name and claim of every class that states both as literals, as a study does."""
        found = {}
        for path in (path for place in PLACES for path in PACKAGE.glob(place)):
            module = ".".join(("manyheads", *path.relative_to(PACKAGE).with_suffix("").parts))
            for text in path.read_text(encoding="utf-8").split("\nclass ")[1:]:
                with suppress(ValueError):  # a name that is computed is none of a study
                    header = STATED.findall(text.partition("\n    def ")[0])
                    stated = {name: ast.literal_eval(value) for name, value in header}
                    if len(stated) == 2:
                        found[stated["name"]] = Entry(f"{module}:{text.partition('(')[0]}", stated["claim"])
        return dict(sorted(found.items()))

    def __getitem__(self, name: str) -> Entry:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


STUDIES = _Registry()


def load(name: str) -> type[Study]:
    """Return the class of a registered study, or of a user's own: ``package.module:Class``, ``file.py:Class``.

    A file that holds a single study needs no class: ``file.py``.

    Raises
    ------
    UsageError
        No such study, and the message lists what is near; or its module cannot be imported.
    """
    if name not in STUDIES and ":" not in name and not name.endswith(".py"):
        raise UsageError(f"no study is called {name!r}{_suggestion(name)}; 'manyheads study list' shows all")
    from manyheads.study.base import Study, only_study

    if name not in STUDIES and ":" not in name:
        return only_study(name)
    module, _, attribute = (STUDIES[name].place if name in STUDIES else name).rpartition(":")
    found = getattr(_load(module), attribute, None)
    if not (isinstance(found, type) and issubclass(found, Study)):
        raise UsageError(f"{module} has no study {attribute!r}: expected a class that derives from manyheads.Study")
    return found


def _load(module: str) -> object:
    if module.endswith(".py"):
        return load_file(Path(module))
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        remedy = "check the spelling, or give the file as PATH.py:Class"
        raise UsageError(f"no module {module!r} can be imported: {remedy}") from error


def _suggestion(name: str) -> str:
    import difflib

    near = [one for one in STUDIES if one.startswith(f"{name}/")][:3]
    near = near or difflib.get_close_matches(name.lower(), STUDIES, n=3, cutoff=0.4)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
