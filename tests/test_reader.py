"""The reader's test: a search for the field's own term finds the file, by path or first line of the docstring."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/manyheads"
PAGE = ROOT / "tests/where_is_it.md"


def plain(text):
    """Lower case, with one space for whatever is no letter or digit."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def read_page():
    rows = re.findall(r"^\| (.+?) \| (.+?) \| `(.+?)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [(question, term, path) for question, term, path in rows]


@functools.cache
def read_modules():
    """Path and first line of the docstring of every module."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]
    docs = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in paths]
    return [(path.relative_to(PACKAGE), doc.split("\n")[0]) for path, doc in zip(paths, docs, strict=True)]


def search(term):
    """Modules that a search finds: named by the term, led by it, describing it; studies and commands last."""
    found = []
    for name, first in read_modules():
        named = f" {plain(term)} " in f" {plain(' '.join(name.with_suffix('').parts[-2:]))} "
        described = f" {plain(term)} " in f" {plain(first)} "
        if named or described:
            leads = plain(first).startswith(plain(term))
            last = bool({"studies", "cli", "demo"} & set(name.parts))
            found.append((last, not named, not leads, name.as_posix()))
    return [name for *_, name in sorted(found)]


@pytest.mark.parametrize(
    ("question", "term", "path"), read_page(), ids=lambda value: plain(str(value)).replace(" ", "-")
)
def test_the_term_of_the_field_finds_the_file(question, term, path):
    assert search(term)[:1] == [path], f"{question} A search for {term!r} finds {search(term)[:4]}"


def test_the_page_asks_enough():
    assert len(read_page()) >= 25
    assert len({path for _, _, path in read_page()}) >= 25


def test_every_path_of_the_glossary_is_there():
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`([a-z_/0-9]+\.py)`", text))
    assert len(paths) > 30
    assert [path for path in sorted(paths) if not (PACKAGE / path).exists()] == []
