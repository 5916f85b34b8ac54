"""The demo with chapters of a second each: its structure, its report, and a second run that computes nothing."""

import pytest
from tests.study.toys import Averages, Walk

from manyheads.cli import main
from manyheads.demo import chapters
from manyheads.demo.chapters import Chapter

SEEN = []


def averages(scene):
    SEEN.append(dict(scene.finished))
    return Averages(repeats=5)


def walk(scene):
    SEEN.append(dict(scene.finished))
    return Walk()


@pytest.fixture
def short(monkeypatch):
    SEEN.clear()
    monkeypatch.setattr(
        chapters,
        "CHAPTERS",
        (
            Chapter("First things", "What an average is worth.", averages, 3),
            Chapter("Then a walk", "How far it leads.", walk, 2),
        ),
    )


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("words and words " * 50)
    return path


def test_chapters_run_in_order_and_find_what_was_finished_before(short, text, tmp_path, capsys):
    assert main(["demo", "--text", str(text), "--out", str(tmp_path / "demo"), "--workers", "1"]) == 0
    assert [list(finished) for finished in SEEN] == [[], ["toy/averages"]]
    assert (SEEN[1]["toy/averages"] / "summary.json").exists()
    said = capsys.readouterr()
    assert "1 of 2  First things" in said.err
    assert str(tmp_path / "demo" / "report.html") in said.out
    assert said.out.count("  manyheads ") == 3
    page = (tmp_path / "demo" / "report.html").read_text()
    for words in ("First things", "Then a walk", "How far it leads.", "mine.txt, 800 characters", "</svg>"):
        assert words in page
    assert page.index("First things") < page.index("Then a walk")


@pytest.mark.slow
def test_a_second_demo_computes_nothing_and_writes_the_same_report(short, text, tmp_path, monkeypatch):
    command = ["demo", "--text", str(text), "--out", str(tmp_path / "demo"), "--workers", "1"]
    assert main(command) == 0
    first = (tmp_path / "demo" / "report.html").read_bytes()
    monkeypatch.setattr(Walk, "train", lambda self, key, steps: pytest.fail("computed twice"))
    assert main(command) == 0
    assert (tmp_path / "demo" / "report.html").read_bytes() == first
