"""The rules of the house that a machine can check."""

import ast
import functools
import importlib
import inspect
import itertools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/manyheads"
MODULES = sorted(PACKAGE.rglob("*.py"))
STUBS = sorted(PACKAGE.rglob("*.pyi"))
LONGEST = 400
MOST_MODULES = 12  # in a folder, before it is grouped by idea

# Floors from low to high; arrows go down only. Rooms of the ground and of one floor know no other of their own floor
# beyond NEIGHBOURS: no theory another theory, no tool another tool.
GROUND = ("attention", "transformer", "data", "spectra", "statistics")
FLOOR = (
    dict.fromkeys(GROUND, 1)
    | {"study": 2}  # the bench
    | {"costs": 3, "curves": 3}
    | {"models": 4, "theory": 4}
    | dict.fromkeys(("scaling", "recovery", "probe"), 5)  # the tools
    | {"studies": 6, "demo": 7, "cli": 8, "__main__": 9}
)
SHARED = 0  # modules at the top: errors, arrays, settings
SHARED_BY_THEORIES = {"theory.papers", "theory.runge_kutta"}

# What a room needs of the rooms of its own floor.
NEIGHBOURS = {"transformer": {"attention", "data"}, "spectra": {"statistics"}}


def room(parts):
    """Return the room of a module by its dotted parts: `attention`, `theory.joma`, `errors`, …"""
    return ".".join(parts[: 2 if parts[0] == "theory" else 1])


def floor(name):
    return FLOOR.get(name.partition(".")[0], SHARED)


class Facts(NamedTuple):
    """What the rules ask of a module."""

    documented: bool
    imports: frozenset[str]  # dotted names, wherever in the file; imports for type checking included
    imported_first: frozenset[str]  # by statements outside every function
    calls: frozenset[str]  # plain names that are called
    bare: tuple[str, ...]  # public functions and classes without a docstring


@functools.cache
def facts(path):
    """Read a module once for all rules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found, calls = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            calls.add(node.func.id)
    first = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    first = {getattr(node, "module", None) or node.names[0].name for node in first}
    bare = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and is_bare(node)]
    documented = bool(ast.get_docstring(tree))
    return Facts(documented, frozenset(found), frozenset(first), frozenset(calls), tuple(bare))


def is_bare(node):
    """Tell whether a public function or class has no docstring; declarations of overloads need none."""
    overload = any(getattr(mark, "id", "") == "overload" for mark in node.decorator_list)
    return not (node.name.startswith("_") or overload or ast.get_docstring(node))


def rooms_imported(path):
    """Return the rooms of the package that a module imports anywhere."""
    names = {name for name in facts(path).imports if name.startswith("manyheads.") and "__version__" not in name}
    return {room(name.split(".")[1:]) for name in names}


def identify(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_a_module_keeps_the_rules(path):
    text = path.read_text(encoding="utf-8")
    here = room(path.relative_to(PACKAGE).with_suffix("").parts)
    for other in rooms_imported(path) - {here, *SHARED_BY_THEORIES}:
        below = floor(other) < floor(here) or floor(here) == SHARED == floor(other)
        assert below or other in NEIGHBOURS.get(here, ()), f"{here} imports {other}: arrows go down only"
    assert len(text.splitlines()) <= LONGEST
    assert facts(path).documented, "a module says what it is for"
    for name in facts(path).imports:
        assert not name.startswith(("jax._src", "jax.core", "jaxlib")), name
        assert name.partition(".")[0] not in {"pickle", "dill", "cloudpickle", "marshal", "shelve"} or (
            identify(path) == "src/manyheads/study/contract.py"  # checks that a study survives the way to a worker
        ), name
    assert not re.search(r"allow_pickle=True|\bload_module\b|read_pickle", text)
    assert not re.search(r"\btorch\.load\b(?!\([^()]*weights_only=True\))", text)
    assert not facts(path).calls & {"eval", "exec", "compile", "__import__"}
    at_import = {name.partition(".")[0] for name in facts(path).imported_first}
    assert not at_import & {"torch", "transformers", "numba", "distributed", "dask"}, "extras are imported in functions"


def stub_names(stub):
    package = ".".join(stub.relative_to(ROOT / "src").parent.parts)
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    return package, [alias.asname or alias.name for node in tree.body if hasattr(node, "names") for alias in node.names]


@pytest.mark.parametrize("stub", STUBS, ids=identify)
def test_every_public_name_is_there_and_documented(stub):
    package, names = stub_names(stub)
    assert names
    assert len(set(names)) == len(names)
    module = importlib.import_module(package)
    for name in names:
        found = getattr(module, name)
        assert name in dir(module)
        if (
            inspect.ismodule(found)
            or inspect.isclass(found)
            or inspect.isroutine(found)
            or hasattr(found, "__wrapped__")
        ):
            assert inspect.getdoc(found), f"{package}.{name} has no docstring"
        if inspect.isfunction(found) and found.__module__.startswith("manyheads."):
            assert found.__module__ != f"{package}.{name}", f"{package}.{name} shares the name of its module"


def test_public_classes_and_functions_of_every_module_are_documented():
    assert [f"{identify(path)}:{name}" for path in MODULES for name in facts(path).bare] == []


def test_the_registry_reads_files_alone_and_tells_the_truth():
    code = (
        "import sys; from manyheads.study.registry import STUDIES; assert len(STUDIES); "
        "assert not {'jax', 'numpy', 'xarray'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    from manyheads.study.registry import PLACES, STUDIES, load

    files = [path for place in PLACES for path in PACKAGE.glob(place)]
    classes = [node for path in files for node in ast.parse(path.read_text(encoding="utf-8")).body]
    bases = [{ast.unparse(base) for base in node.bases} for node in classes if isinstance(node, ast.ClassDef)]
    assert sum(bool({"Study", "st.Study"} & names) for names in bases) == len(STUDIES), "two studies share a name"
    wings = [name.partition("/")[0] for name in STUDIES]
    assert len(list(itertools.groupby(wings))) == len(set(wings)), "the studies of a wing stand together"
    for name, entry in STUDIES.items():
        study = load(name)
        assert (study.name, f"{study.__module__}:{study.__name__}") == (name, entry.place)
        assert "\n" not in entry.claim
        assert entry.claim == study.claim, f"{name}: the list and the study claim different things"


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).exists()]


def test_no_tracked_file_belongs_to_one_machine():
    lock_files = {"uv.lock", "poetry.lock", "Pipfile.lock", "pdm.lock"}
    path = re.compile(r"(?<![\w.$}/])/(?:home|root|Users|work|tmp|mnt)/\w")
    for file in tracked():
        assert file.name not in lock_files
        assert file.stat().st_size < 2**20, f"{file}: a megabyte belongs elsewhere"
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        assert not path.search(text), f"{identify(file)} names a path of one machine: {path.search(text)}"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = ("constraints.txt", "constraints-oldest.txt")


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_name_no_address(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index" not in text


def test_the_oldest_constraints_are_the_lower_bounds():
    lines = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
    pinned = {name: version for name, _, version in (line.partition(";")[0].strip().partition("==") for line in lines)}
    needed = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]
    for name, _, bound in (requirement.partition(">=") for requirement in needed if "[" not in requirement):
        assert bound, f"{name} has no lower bound"
        if name not in ("torch", "triton"):  # the Makefile installs that for the processor, which brings no Triton
            found = pinned[name.replace("_", "-")]
            assert found.startswith(bound), f"{name}>={bound} is tested with {found}"


def test_data_from_others_are_named_in_the_notice_that_is_shipped():
    assert {"LICENSE", "NOTICE"} <= set(PROJECT["license-files"])
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    ours, own = {".py", ".pyi", ".typed", ".html", ".pyc"}, {"report.css", "report.js", "descriptions.json"}
    data = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in ours]
    data = [path for path in data if path.name not in own]
    assert data
    for path in data:
        assert identify(path) in notice


def test_all_studies_are_in_one_place():
    assert [identify(path) for path in PACKAGE.rglob("studies") if path.is_dir()] == ["src/manyheads/studies"]


def test_a_file_name_occurs_twice_at_most():
    """Methods and tasks are found by their folder; so are, until the wing is drawn anew, parts of a method."""
    queries = PACKAGE / "recovery/queries"
    names = Counter(path.name for path in MODULES if queries not in path.parents)
    free = {"__init__.py", "method.py", "task.py"}
    assert {name: count for name, count in names.items() if count > 2 and name not in free} == {}


def test_a_folder_holds_a_dozen_modules_at_most():
    modules = Counter(path.parent for path in MODULES if not path.name.startswith("__"))
    assert {identify(folder): count for folder, count in modules.items() if count > MOST_MODULES} == {}


def test_stubs_export_no_module_but_those_that_pages_type():
    """Such as `mh.scaling.preflight`; errors are caught as `mh.errors.ManyheadsError`, theories are in `theory`."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    typed = {name for page in pages for name in re.findall(r"\bmh\.(\w+)\.\w", page.read_text(encoding="utf-8"))}
    for package, names in map(stub_names, STUBS):
        modules = {name for name in names if inspect.ismodule(getattr(importlib.import_module(package), name))}
        rooms = {path.stem for path in (PACKAGE / "errors.py", *(stub.parent for stub in STUBS))}
        theories = {stub.parent.name for stub in STUBS if stub.parent.parent.name == "theory"}
        right = {"manyheads": typed & rooms, "manyheads.theory": theories}.get(package, set())
        assert modules == right, f"{package} exports modules: {modules}"


def test_modules_import_each_other_in_no_circle():
    """Imports of types and within functions count as well."""
    names = {path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", "."): path for path in MODULES}
    graph = {
        name: {other for used in facts(path).imports for other in (used, used.rpartition(".")[0]) if other in names}
        - {name}
        for name, path in names.items()
        if path.name != "__init__.py"
    }
    while free := [name for name, needs in graph.items() if not needs & graph.keys()]:
        graph = {name: needs for name, needs in graph.items() if name not in free}
    left = graph
    while ends := [name for name in left if not any(name in needs for needs in left.values())]:
        left = {name: needs for name, needs in left.items() if name not in ends}
    assert sorted(left) == []


SNAPSHOT = ROOT / "tests/public_names.txt"
# what a hand-written page or a program that is written uses, what that returns, and 42 words to declare a study with
MOST_NAMES = 159


def public_names():
    return sorted(f"{package}.{name}" for package, names in map(stub_names, STUBS) for name in names)


def test_public_names_are_those_of_the_snapshot():
    """A change of the surface shows in the diff of the snapshot, which `python -m tests.test_house` renews."""
    names = public_names()
    assert SNAPSHOT.read_text(encoding="utf-8").split() == names, "python -m tests.test_house renews the snapshot"
    rooms = {path.parent.name for path in STUBS}
    assert len({name.rpartition(".")[2] for name in names} - rooms) <= MOST_NAMES


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(public_names()) + "\n", encoding="utf-8")
