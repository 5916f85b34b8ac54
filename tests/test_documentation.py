"""Everything written for people runs: the pages in the order in which they are read, and every docstring's example."""

import doctest
import html
import importlib
import json
import os
import pkgutil
import re
import shlex
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest

import manyheads
from manyheads._extras import EXTRA_OF
from manyheads.cli import main

ROOT = Path(__file__).resolve().parents[1]
FILES = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/tours/*.md")]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in FILES)]
GENERATED = ("docs/api/", "docs/gallery/")  # pages that `make docs` writes
BLOCK = re.compile(r"^```(?P<kind>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"`(?P<name>\w+)\.py`:\s*\Z")  # the name of the file that the next block is
MODULES = sorted(module.name for module in pkgutil.walk_packages(manyheads.__path__, "manyheads."))
SLOW = {  # pages and modules whose examples compile or train for more than a CPU second
    "docs/contrastive-learning.md",
    "docs/first-steps.md",
    "docs/in-context-learning.md",
    "docs/infinite-limits.md",
    "docs/joma.md",
    "docs/merged-and-separate-weights.md",
    "docs/one-bit-self-attention.md",
    "docs/passive-learning.md",
    "docs/recovery.md",
    "docs/runs.md",
    "docs/scaling-recipes.md",
    "docs/sparse-contextual-bigrams.md",
    "manyheads.attention.multihead",
    "manyheads.theory.bigram.training.two_stages",
    "manyheads.data.draws",
    "manyheads.data.recall",
    "manyheads.data.windows",
    "manyheads.theory.joma.systems.gaussian_mixture",
    "manyheads.theory.joma.systems.latent_tree_task",
    "manyheads.theory.joma.systems.token_hierarchy",
    "manyheads.theory.joma.theorems.gaussian_mixture",
    "manyheads.theory.joma.theorems.rebound",
    "manyheads.theory.joma.theorems.scan_and_snap",
    "manyheads.theory.meanfield.contrastive.ode",
    "manyheads.theory.meanfield.contrastive.particles",
    "manyheads.theory.meanfield.contrastive.sgd",
    "manyheads.theory.meanfield.contrastive.stationary_states",
    "manyheads.theory.meanfield.hopfield.attractors",
    "manyheads.theory.meanfield.incontext.circle",
    "manyheads.theory.meanfield.incontext.linear_attention.plateau_escape",
    "manyheads.theory.meanfield.incontext.particles",
    "manyheads.theory.meanfield.incontext.prompt_length",
    "manyheads.recovery.examples.learning",
    "manyheads.recovery.examples.six_stages",
    "manyheads.spectra.ranks",
    "manyheads.transformer.baselines",
    "manyheads.transformer.training",
    "manyheads.transformer.transformer",
}


LOUD = {"docs/scaling-recipes.md"}  # Lightning warns about loaders and devices


def mark(names):
    def marks(name):
        return [pytest.mark.slow] * (name in SLOW) + [pytest.mark.filterwarnings("ignore")] * (name in LOUD)

    return [pytest.param(name, marks=marks(name)) for name in names]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Sit down in an empty folder; modules that are saved there, the path and the environment are put back."""
    before, modules = dict(os.environ), set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    os.environ["COLUMNS"] = "140"  # of the outputs that pages show
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / ".cache")
    (tmp_path / "model.py").write_bytes((ROOT / "tests/scaling/nanogpt.py").read_bytes())  # as in a clone of nanoGPT
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


def read(page, folder, workers=None):
    """Do what a page says, from top to bottom; return the commands that were run.

    Lines below a command, and a block of text below a block of Python, are what it prints; "..." stands for the rest.
    Where workers are given, studies get so many: spawned ones compile again what this process has compiled.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    namespace, commands, printed = {"__name__": "page"}, [], ""
    for block in BLOCK.finditer(text):
        place = f"{page}, line {text[: block.start()].count(chr(10)) + 1}"
        if block["kind"] == "python" and (saved := SAVED.search(text[: block.start()])):
            (folder / f"{saved['name']}.py").write_text(block["text"], encoding="utf-8")
            importlib.import_module(saved["name"])
        elif block["kind"] in ("python", "{code-cell} python"):
            with redirect_stdout(StringIO()) as out:
                exec(compile(block["text"], place, "exec"), namespace)
            printed = out.getvalue()
        elif block["kind"] == "text":
            expect(block["text"], printed, place)
        elif block["kind"] == "console":
            assert block["text"].startswith("$ "), place
            for line, *shown in (each.splitlines(keepends=True) for each in block["text"].split("$ ")[1:]):
                program, *words = shlex.split(line)
                assert program == "manyheads", f"{place}: {line}"
                commands.append(words)
                if workers and words[:2] == ["study", "run"]:
                    words += ["--workers", str(workers)]
                with redirect_stdout(StringIO()) as out:
                    assert main(words) == 0, f"{place}: {line}"
                expect("".join(shown), out.getvalue(), f"{place}: {line}")
    return commands


def expect(shown, printed, place):
    """Hold what a page shows, where it shows something, against what was printed."""
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert not shown or doctest.OutputChecker().check_output(shown, printed, flags), f"{place}\n{printed}"


def skip_without_extras(text):
    """Skip what imports an optional dependency that is not installed."""
    for module, extra in EXTRA_OF.items():
        if re.search(rf"^\W*(import|from) {module}\b", text, re.MULTILINE) and find_spec(module) is None:
            pytest.skip(f"needs the extra '{extra}' ({module} is not installed)")


@pytest.mark.parametrize("page", mark(page for page in PAGES if "own-study" not in page))
def test_a_page_does_what_it_says(page, folder):
    skip_without_extras((ROOT / page).read_text(encoding="utf-8"))
    read(page, folder, workers=1)


@pytest.mark.slow
def test_a_study_written_from_the_page_alone_keeps_the_contract_and_shows_up_in_a_report(folder):
    page = (ROOT / "docs/write-your-own-study.md").read_text(encoding="utf-8")
    assert "check_study(EffectiveKeys)" in page  # the page itself runs the contract suite
    commands = read("docs/write-your-own-study.md", folder)
    assert ["report"] in commands
    report = html.unescape((folder / "runs/report.html").read_text(encoding="utf-8"))
    from effective_keys import EffectiveKeys

    assert EffectiveKeys.claim in report
    assert "the effective number of keys grows in proportion to their number" in report
    assert report.count("--variance 1.0") == 1  # one section for each of the two configurations


def test_every_page_has_a_place_in_the_site():
    listed = set()
    for path in FILES:
        for block in re.findall(
            r"^:::\{toctree\}\n(.*?)^:::$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        ):
            listed |= {
                (path.parent / line).resolve() for line in block.splitlines() if line and not line.startswith(":")
            }
    assert {path.with_suffix("") for path in FILES} - listed == {ROOT / "docs/index"}


def test_links_and_commands_of_the_pages_exist():
    pages = [
        *PAGES,
        "tests/where_is_it.md",
        *(f"{name}.md" for name in ("AGENTS", "CHANGELOG", "CONTRIBUTING", "NOTEBOOK")),
    ]
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            place = ((ROOT / page).parent / target).resolve().relative_to(ROOT).as_posix()
            assert place.startswith(GENERATED) or (ROOT / place).exists(), f"{page} links to {target}"
        for name in re.findall(r"make bench NAME=(\w+)", text):
            assert (ROOT / "benchmarks" / f"{name}.py").exists(), f"{page} names the benchmark {name}"
        targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE)) <= targets
    from manyheads.cli import COMMANDS

    verbs = set(re.findall(r"`manyheads (\w+)`", (ROOT / "README.md").read_text()))
    assert verbs == {name[0] for name in COMMANDS}  # no verb is promised, none is kept from the reader


def test_the_front_page_is_short_and_names_the_field():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 120
    words = "muP CompleteP Muon DMFT mean-field JoMA 2405.15712 2310.00535 2410.23438 2402.04084"
    assert [word for word in words.split() if word not in text] == []
    results = json.loads((ROOT / "tests/acceptance/results.json").read_text(encoding="utf-8"))
    assert f"{sum(row['met'] for row in results)} of {len(results)} required figures are met" in text


def has_examples(name):
    return ">>> " in Path(find_spec(name).origin).read_text(encoding="utf-8")


def test_every_module_can_be_imported_without_extras():
    for name in MODULES:
        importlib.import_module(name)


@pytest.mark.parametrize("name", mark(filter(has_examples, MODULES)))
def test_docstring_examples(name, folder):
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    finder, runner, said = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(optionflags=flags), []
    for example in finder.find(module, name):
        skip_without_extras(example.docstring)
        runner.run(example, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)
