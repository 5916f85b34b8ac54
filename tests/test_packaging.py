"""Files that repeat what `pyproject.toml` says agree with it."""

import re
import tomllib
from pathlib import Path

import manyheads

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECIPE = (ROOT / "packaging/conda/meta.yaml").read_text(encoding="utf-8")
CONDA_NAMES = {"matplotlib": "matplotlib-base"}  # without the windows of Qt


def test_the_recipe_requires_what_the_package_requires():
    run = re.search(r"^  run:\n((?:    - .*\n)+)", RECIPE, re.MULTILINE)[1]
    found = sorted(line.removeprefix("    - ").replace(" ", "") for line in run.splitlines())
    needed = [f"python{PROJECT['requires-python']}"]
    for requirement in PROJECT["dependencies"]:
        name, bound = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
        needed.append(f"{CONDA_NAMES.get(name, name)}{bound}")
    assert found == sorted(needed)


def test_the_hashed_requirements_are_the_pinned_core():
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    entries = (ROOT / "requirements-hashed.txt").read_text(encoding="utf-8").replace(" \\\n", " ").splitlines()
    assert all(entry.partition(" --hash=sha256:")[0].strip() in pinned for entry in entries)
    assert all("--hash=sha256:" in entry for entry in entries)
    found = {entry.partition("==")[0].replace("-", "_") for entry in entries}
    assert {re.match(r"[\w-]+", each)[0].replace("-", "_") for each in PROJECT["dependencies"]} <= found


def test_the_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == manyheads.__version__
    assert re.search(r'^  version: "(.*)"$', RECIPE, re.MULTILINE)[1] == manyheads.__version__
