"""Reports in a browser: nothing overflows, text is readable in both schemes and in print, drawings have words."""

import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from manyheads.statistics import Interval
from manyheads.study import Curve, Lines, Listing, Source, Verdict
from manyheads.study.panels import Multiples, Picture, Scatter
from manyheads.study.reporting.html import Section, write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
LONG = "a claim about the quantity that_has_an_unbreakable_name_of_more_than_sixty_characters_in_all and a regime"


@pytest.fixture
def browser(tmp_path):
    """Return a function that starts headless Chromium on a file and returns what it prints."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")

    def start(page, *flags):
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command += ["--virtual-time-budget=20000", *flags, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return start


def verdict(claim, low, high, **changes):
    stated = {"target": 0.0, "tolerance": 1.0, "basis": "half a standard error of the prediction"}
    return Verdict.from_interval(claim, Interval(low, high), **stated | changes)


def every_kind():
    """Return sections with every kind of panel and every outcome, and with long names."""
    steps = tuple(map(float, range(40)))
    curves = tuple(Curve(steps, tuple(math.sin(x / 9 + at) for x in steps), f"head {at}", group=at) for at in range(7))
    roles = tuple(
        Curve((1.0, 10.0, 1e7), (1.0, 2.0, 3e6), f"{role} with a label that is too long for the end", role)
        for role in ("trained", "predicted", "reference")
    )
    panels = (
        Lines("Entropy", "training step", "entropy [nat]", curves, note="One line a head."),
        Lines(LONG, LONG, LONG, roles, log_x=True, log_y=True),
        Multiples("Plots", "step", "loss", ((curves[:2],) * 6,) * 2, ("a", "b"), tuple("abcdef")),
        Picture("Few", "key", "query", ((0.0, 1.0), (1.0, 0.5)), "attention", ("a", "b"), ("a", "b")),
        Picture("Many", "key", "query", (tuple(map(float, range(60))),) * 20, "attention"),
        Scatter("Orbit", "x", "y", (steps,) * 3, (steps,) * 3, (steps,) * 3, "time [s]", ("a", "b", "c")),
        Listing("Table", tuple(f"column {at}" for at in range(9)), (tuple("123456789"), (LONG, *"23456789"))),
    )
    verdicts = (
        verdict(LONG, -0.5, 0.5),
        verdict("known to fail", 5.0, 6.0, expected="refuted"),
        verdict("fails", 2.0, 40.0),
        verdict("open", -math.inf, math.inf, replicates_needed=12),
        verdict("one-sided", 0.5, 0.9, tolerance=(math.inf, 1.0)),
        Verdict.exact("exact", 3.0, target=3.0, tolerance=0.0, basis="a count"),
    )
    source = Source("key", "Title", "A Person and B Person", 2020, identifier="2405.15712", locus="figure 1")
    facts = (("configuration", "sizes = [1, 2, 3], " * 20),)
    return [
        Section("wing/every-kind", LONG, panels, verdicts, facts, "manyheads study run wing/every-kind", source),
        Section("wing/other", LONG, (), verdicts[:1]),
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report(every_kind(), tmp_path_factory.mktemp("page") / "report.html", "A report", "An introduction.")


def lay_out(page, browser, folder):
    """Lay a report out in windows of several widths and schemes; return what a reader would stumble over in each."""
    template = (Path(__file__).parent / "measure.html").read_text()
    (folder / "measure.html").write_text(
        template.replace("PAGE", json.dumps(page.read_text()).replace("</", "<\\/"), 1)
    )
    printed = browser(folder / "measure.html", "--dump-dom")
    told = re.search(r"<body>RESULTS (.*?) END", printed, re.DOTALL)
    assert told, printed[-2000:]
    return json.loads(html.unescape(told[1]))


@pytest.mark.slow
def test_nothing_overflows_and_everything_can_be_read(page, browser, tmp_path):
    results = lay_out(page, browser, tmp_path)
    assert len(results) == 9
    assert {name: result["found"] for name, result in results.items() if result["found"]} == {}
    assert all(result["dark"] == ("dark" in name) for name, result in results.items())
    assert all(result["ran"] for result in results.values()), "the filter is switched on by the script"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="pdftotext is not installed")
def test_a_printed_report_starts_on_its_first_page_and_shows_its_citations(page, browser, tmp_path):
    browser(page, f"--print-to-pdf={tmp_path / 'report.pdf'}", "--no-pdf-header-footer")
    printed = subprocess.run(["pdftotext", tmp_path / "report.pdf", "-"], capture_output=True, text=True).stdout
    pages = printed.rstrip("\f").split("\f")
    assert "A report" in pages[0]
    assert all(len(text.split()) >= 8 for text in pages)  # no page with a line or two
    assert "@misc{key" in printed
    assert "https://arxiv.org/abs/2405.15712" in printed
