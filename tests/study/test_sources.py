"""BibTeX entries, read back by a strict parser of their own."""

import dataclasses
import re

import pytest
from tests.study.toys import Walk

from manyheads.errors import UsageError
from manyheads.study import Source, run
from manyheads.study.registry import STUDIES, load
from manyheads.study.reporting.citations import cite

# What BibTeX requires of each type, and what it knows besides.
REQUIRED = {
    "article": {"author", "title", "journal", "year"},
    "inproceedings": {"author", "title", "booktitle", "year"},
    "misc": {"author", "title", "year"},
}
OPTIONAL = {
    "article": {"volume", "number", "pages"},
    "inproceedings": {"volume", "number", "pages"},
    "misc": {"howpublished"},
}
IDENTIFIERS = {"eprint", "archivePrefix", "doi"}


def braced(text, start):
    """Return what stands between the brace at `start` and its partner, and the place behind it."""
    assert text[start] == "{"
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start + 1 : place], place + 1
    raise AssertionError(f"a brace is open at the end: {text[start:]}")


def parse(text):
    """Return {key: (type, fields)}; nothing may stand between the entries but white space."""
    entries, place = {}, 0
    while head := re.compile(r"\s*@(\w+)(?=\{)").match(text, place):
        body, place = braced(text, head.end())
        key, _, rest = body.partition(",")
        assert re.fullmatch(r"[A-Za-z][\w:-]*", key)
        assert key not in entries, f"BibTeX refuses a repeated entry: {key}"
        fields, here = {}, 0
        while field := re.compile(r"\s*(\w+) = (?=\{)").match(rest, here):
            value, here = braced(rest, field.end())
            assert rest[here] == ","
            assert field[1] not in fields
            fields[field[1]], here = value, here + 1
        assert not rest[here:].strip(), rest[here:]
        entries[key] = (head[1], fields)
    assert not text[place:].strip(), text[place:]
    return entries


def check(kind, fields):
    assert REQUIRED[kind] <= set(fields) <= REQUIRED[kind] | OPTIONAL[kind] | IDENTIFIERS
    assert re.fullmatch(r"\d{4}", fields["year"])
    assert ("eprint" in fields) == ("archivePrefix" in fields)
    if "eprint" in fields:
        assert fields["archivePrefix"] == "arXiv"
        assert re.fullmatch(r"\d{4}\.\d{4,5}(v\d+)?|[a-z.A-Z-]+/\d{7}(v\d+)?", fields["eprint"])
    if "doi" in fields:
        assert re.fullmatch(r"10\.\d{4,9}/\S+", fields["doi"])
    if "pages" in fields:
        assert re.fullmatch(r"\d+--\d+", fields["pages"])
    for name in set(fields) - IDENTIFIERS:
        assert fields[name].strip() == fields[name] != ""
        assert not re.search(r"(?<!\\)[&%$#_]", fields[name]), f"LaTeX stumbles over {fields[name]}"
    for author in fields["author"].split(" and "):
        assert author == "others" or re.fullmatch(r"\S+( \S+)+", author)
        assert "," not in author


def test_the_entries_of_all_studies_are_valid_and_one_file():
    sources = [load(name).source for name in STUDIES]
    text = "\n\n".join(dict.fromkeys(source.bibtex() for source in sources))
    entries = parse(text)
    assert set(entries) == {source.key for source in sources}
    for kind, fields in entries.values():
        check(kind, fields)
        if kind == "misc":
            assert "eprint" in fields or fields["howpublished"] != "arXiv", "what is not on arXiv says where it is"


SOURCE = Source("a", "Kernels & 50% more", "Ada Lovelace and Emmy Noether", 1915)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"identifier": "arXiv:2402.04084"}, {"eprint": "2402.04084", "archivePrefix": "arXiv"}),
        ({"identifier": "hep-th/9901001v2"}, {"eprint": "hep-th/9901001v2", "archivePrefix": "arXiv"}),
        ({"kind": "article", "venue": "J. Stat_Mech", "volume": "3", "pages": "1--9", "identifier": "10.1000/a_b"},
         {"journal": "J. Stat\\_Mech", "volume": "3", "pages": "1--9", "doi": "10.1000/a_b"}),
        ({"kind": "inproceedings", "venue": "{STOC}", "identifier": "2402.04084"},
         {"booktitle": "{STOC}", "eprint": "2402.04084", "archivePrefix": "arXiv"}),
        ({"venue": "Basel", "locus": "a remark"}, {"howpublished": "Basel"}),
    ],
)  # fmt: skip
def test_an_entry_is_read_back_as_it_was_written(changes, expected):
    ((kind, fields),) = parse(dataclasses.replace(SOURCE, **changes).bibtex()).values()
    check(kind, fields)
    fixed = {"title": "{Kernels \\& 50\\% more}", "author": "Ada Lovelace and Emmy Noether", "year": "1915"}
    assert (kind, fields) == (changes.get("kind", "misc"), fixed | expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"identifier": "arXiv: 2402.04084"}, "expected an arXiv number"),
        ({"identifier": "https://doi.org/10.1000/1"}, "or a DOI"),
        ({"kind": "book"}, "choose from article, inproceedings, misc"),
        ({"title": "a } b { c"}, "unbalanced"),
        ({"key": "2024chen"}, "a BibTeX key starts with a letter"),
    ],
)
def test_what_bibtex_cannot_read_is_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        dataclasses.replace(SOURCE, **changes)


def test_runs_of_one_publication_share_an_entry(tmp_path, monkeypatch):
    run(Walk(), 1, store=tmp_path)
    monkeypatch.setattr(
        Walk, "source", dataclasses.replace(Walk.source, locus="another theorem", identifier="10.1000/1")
    )
    run(Walk(), 1, seed=1, store=tmp_path)
    assert list(parse(cite(tmp_path))) == [Walk.source.key]
