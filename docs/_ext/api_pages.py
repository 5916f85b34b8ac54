"""API pages: one for each public name, one for each package, from `tests/public_names.txt`."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
NAMES = ROOT / "tests/public_names.txt"
HEAD = """# API

Every public name has a page. What is not listed here is private: it is imported from its module and may change.
`import manyheads as mh` gives the names of the package `manyheads`, and everything below is found from there.

"""


def setup(app):
    """Write the pages before Sphinx looks for sources."""
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir) / "api"))
    app.connect("autodoc-process-docstring", escape_bars)
    return {"parallel_read_safe": True}


def write_pages(folder):
    """Write the pages of all public names below a folder; pages that did not change keep their time."""
    packages = {}
    for name in NAMES.read_text(encoding="utf-8").split():
        if isinstance(found := resolve(name), ModuleType):
            packages.setdefault(name, [])
        else:
            packages.setdefault(name.rpartition(".")[0], []).append((name, found))
    pages = {"index.md": HEAD + listing(packages)}
    for package, members in sorted(packages.items()):
        pages[f"{package}.rst"] = package_page(package, members)
        below = {id(found) for other, named in packages.items() if other != package for _, found in named}
        alias = package == "manyheads"
        pages |= {f"{name}.rst": member_page(name, found, alias and id(found) in below) for name, found in members}
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.*"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        write(folder / name, text)


def write(path, text):
    """Write a file unless it says the same already."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def escape_bars(app, what, name, found, options, lines):
    """Escape the bars of absolute values outside of mathematics: reST reads them as substitutions."""
    depth = None  # indentation of the directive of mathematics that the line is part of
    for place, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if line.strip().startswith(".. math::"):
            depth = indent
        elif depth is not None and line.strip() and indent <= depth:
            depth = None
        if depth is None and ">>>" not in line:
            parts = re.split(r"(``.*?``|`.*?`)", line)  # what stands in backticks is every other one
            lines[place] = "".join(part if at % 2 else part.replace("|", r"\|") for at, part in enumerate(parts))


def resolve(name):
    """Return the object of a dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        package, _, last = name.rpartition(".")
        return getattr(importlib.import_module(package), last)


def summary(found):
    """Return the first sentence of a docstring, without its full stop."""
    text = " ".join((inspect.getdoc(found) or "").split("\n\n")[0].split())
    return text.rstrip(".")


def listing(packages):
    """Return the table of packages, and the table of contents."""
    rows = [f"| [{name}]({name}.rst) | {summary(resolve(name))} |" for name in sorted(packages)]
    table = "\n".join(["| package | what it is |", "|---|---|", *rows])
    entries = "\n".join(sorted(packages))
    return f"{table}\n\n:::{{toctree}}\n:hidden:\n:maxdepth: 1\n\n{entries}\n:::\n"


def package_page(package, members):
    """Return the page of a package: its docstring and its names."""
    lines = [package, "=" * len(package), "", f".. automodule:: {package}", ""]
    if not members:  # a module whose classes are public together
        lines[-1:] = ["   :members:", "   :show-inheritance:", ""]
        return "\n".join(lines)
    lines += [".. list-table::", "   :widths: 35 65", ""]
    for name, found in members:
        lines += [
            f"   * - :doc:`{name.rpartition('.')[2]} <{name}>`",
            f"     - {summary(found).replace('|', chr(92) + '|')}",
        ]
    lines += ["", ".. toctree::", "   :hidden:", "", *(f"   {name}" for name, _ in members), ""]
    return "\n".join(lines)


def member_page(name, found, alias):
    """Return the page of one name; an alias is not entered in the index a second time."""
    if inspect.isclass(found):
        directive, options = "autoclass", ["   :members:"]
    elif callable(found):
        directive, options = "autofunction", []
    else:
        directive, options = "autodata", []
    options += ["   :no-index:"] * alias
    last = name.rpartition(".")[2]
    return "\n".join([last, "=" * len(last), "", f".. {directive}:: {name}", *options, ""])
