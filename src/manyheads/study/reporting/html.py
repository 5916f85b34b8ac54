"""`report`: one self-contained HTML file for one run or a whole store.

What it shows comes from the store alone: the same store gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads.errors import FileRefused, UsageError
from manyheads.study.panels import Drawn, Listing, Panel
from manyheads.study.reporting import overview
from manyheads.study.reporting.overview import Anchors, format_figure, headline
from manyheads.study.reporting.style import colour_rules, typeset
from manyheads.study.sources import Source
from manyheads.study.store.disk import printable, write_text
from manyheads.study.store.run_store import RunStore, find_runs, stored_source
from manyheads.study.verdicts import Verdict

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["Section", "format_figure", "report", "section_of", "write_report"]

LONGEST_TITLE = 80  # characters by which runs of one study differ; beyond, the name of the run's folder is shown


@dataclass(frozen=True)
class Section:
    """One chapter of a report: what is asked, what was measured and what follows, in plain text.

    `facts` are name and value of what identifies the run, `command` is what reruns it.
    """

    title: str
    lead: str
    panels: tuple[Panel, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    command: str = ""
    source: Source | None = None


def report(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of every run at or below a folder and return the file.

    Each finished run is a section: claim, pictures of prediction and training, verdicts with figure and interval, the
    command that reruns it, and the citation. Every file of every run is checked first.

    Parameters
    ----------
    path
        A store's root, or one run's folder.
    out
        The HTML file; by default ``report.html`` in `path`.

    Raises
    ------
    FileRefused
        No run lies there, none is finished, or one is damaged.
    """
    runs = find_runs(path)
    finished = [run for run in runs if run.summary() is not None]
    sections = list(map(section_of, finished, _titles(finished)))
    if not sections:
        raise FileRefused(f"{path}: no run is finished yet; 'manyheads study run' finishes one")
    waiting = len(runs) - len(sections)
    note = f"{waiting} unfinished run{'s' if waiting > 1 else ''} left out." if waiting else ""
    out = Path(out or Path(path) / "report.html")
    return write_report(sections, out, "manyheads: theory beside training", note)


def _titles(runs: Sequence[RunStore]) -> list[str]:
    """Return the studies of the runs; several runs of one study also say by what they differ."""
    counts = [summary.replicates for run in runs if (summary := run.summary())]
    settings = [
        run.header["configuration"] | {"replicates": count, **{name: run.header[name] for name in ("seed", "revision")}}
        for run, count in zip(runs, counts, strict=True)
    ]
    titles = []
    for run, own in zip(runs, settings, strict=True):
        study = run.header["study"]
        peers = [each for other, each in zip(runs, settings, strict=True) if other.header["study"] == study]
        different = [name for name in own if any(each.get(name) != own[name] for each in peers)]
        said = ", ".join(f"{name} = {_text(own[name])}" for name in different)
        alone = len(peers) == 1
        titles.append(study if alone else f"{study}: {said if 0 < len(said) <= LONGEST_TITLE else run.path.name}")
    return [printable(title) for title in titles]


def section_of(run: RunStore, title: str = "", lead: str = "") -> Section:
    """Return the section of a finished run, checked file by file; `title` and `lead` replace the study's own."""
    summary = run.summary()
    if summary is None:
        raise FileRefused(f"{run.path}: this run is not finished; run the same command again to finish it")
    run.verify()
    header = run.header
    facts = {
        "configuration": ", ".join(f"{name} = {_text(value)}" for name, value in header["configuration"].items()),
        "replicates": str(summary.replicates),
        "seed": str(header["seed"]),
        "inputs": ", ".join(f"{name}: sha256 {digest[:16]}…" for name, digest in header["inputs"].items()),
        "run": f"{header['study']}/{run.path.name}, revision {header['revision']}",
        "versions": ", ".join(f"{name} {version}" for name, version in header["versions"].items()),
    }
    heading = title or printable(header["study"]), lead or printable(header["claim"])
    shown = tuple((name, printable(value)) for name, value in facts.items() if value)
    command = printable(f"{header['command']} --replicates {summary.replicates} --seed {header['seed']}")
    return Section(*heading, summary.panels, summary.verdicts, shown, command, stored_source(header))


def write_report(sections: Sequence[Section], out: Path, title: str, introduction: str = "") -> Path:
    """Write sections as one self-contained HTML file and return its path; UsageError if it has no place.

    The file fetches nothing. Its script filters claims, and the page is complete without it.
    """
    if not sections:
        raise UsageError("a report needs at least one section")
    if out.is_dir():
        raise UsageError(f"{out} is a folder: name the HTML file to write")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder to write {out.name} in; make it first")
    import jinja2
    from markupsafe import Markup

    loader = jinja2.PackageLoader("manyheads.study.reporting", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["math"] = _with_exponents
    script, style = (Markup(loader.get_source(environment, name)[0]) for name in ("report.js", "report.css"))
    style += Markup(colour_rules())
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    anchors = Anchors()
    shown = [_rendered(section, position, anchors) for position, section in enumerate(sections)]
    every = [one for section in sections for one in section.verdicts]
    outcomes = {each.outcome for each in every} | {"unexpected" for each in every if overview.is_unexpected(each)}
    head = {"title": title, "introduction": introduction, "headline": headline(every) if every else ""}
    page = {"sections": shown, "claims": len(every), "outcomes": outcomes}
    code = {"script": script, "script_hash": f"sha256-{digest}", "style": style}
    write_text(out, environment.get_template("report.html").render(head | page | code))
    return out


def _rendered(section: Section, position: int, anchors: Anchors) -> dict[str, object]:
    """Return what the template shows of a section; drawing happens here."""
    anchor = anchors.name(section.title)
    return vars(section) | {
        "anchor": anchor,
        "headline": headline(section.verdicts) if section.verdicts else "",
        "panels": [_panel(panel, f"s{position}p{index}-") for index, panel in enumerate(section.panels)],
        "claims": [_claim(verdict, anchors.name(anchor, verdict.claim)) for verdict in section.verdicts],
    }


def _panel(panel: Panel, prefix: str) -> dict[str, object]:
    from markupsafe import Markup

    from manyheads.study.reporting.drawing import is_wide
    from manyheads.study.reporting.svg import svg

    shown: dict[str, object] = {"title": panel.title, "note": panel.note}
    if isinstance(panel, Drawn):
        drawing = svg(panel, prefix)
        width = re.search(r'viewBox="0 0 ([\d.]+)', drawing)
        assert width is not None, "a drawing starts at its origin"
        return shown | {"svg": Markup(drawing), "width": round(float(width[1])), "wide": is_wide(panel)}
    assert isinstance(panel, Listing)
    numeric = [all(map(_is_number, filter(None, column))) and any(column) for column in zip(*panel.rows, strict=True)]
    rows = [[typeset(cell) if _is_number(cell) else cell for cell in row] for row in panel.rows]
    columns = list(zip(panel.columns, numeric or [False] * len(panel.columns), strict=True))
    return shown | {"columns": columns, "rows": rows}


def _claim(verdict: Verdict, anchor: str) -> dict[str, object]:
    texts = {name: getattr(overview, f"{name}_text")(verdict) for name in ("figure", "interval", "region", "quantity")}
    drawn = {"strip": overview.strip_of(verdict), "unexpected": overview.is_unexpected(verdict)}
    return {"anchor": anchor, "verdict": verdict} | drawn | texts


def _is_number(text: str) -> bool:
    """Return whether the cell of a table is a number, perhaps with its error or its unit."""
    number = r"[−+-]?[\d.,\u2009 ]*\d\.?(e[+-]?\d+)?"
    return bool(re.fullmatch(rf"{number}( ± {number})?( ?[%×a-zA-Z/]{{1,6}})?", text.strip()))


def _with_exponents(text: str) -> Markup:
    """Return text as HTML with raised exponents, lowered indices and numbers as on axes: N^(-1/2), R_1^2, 1e-06."""
    from markupsafe import Markup, escape

    text = re.sub(r"(?<![\w.^-])-?\d+(\.\d+)?e[+-]\d+\b|(?<=\s)-(?=\.?\d)", lambda found: typeset(found[0]), text)
    exponent = r"-\d+/\d+|1/\d+|-?\d+(?:\.\d+)?|[A-Za-z]\b"  # v^2/2 is half of a square, N^-1/2 an inverse root
    powers, marked = rf"\^(?:\(([^()]+)\)|({exponent}))", str(escape(text))
    raised = re.sub(powers, lambda found: f"<sup>{(found[1] or found[2]).replace('-', '−')}</sup>", marked)
    return Markup(re.sub(r"(?<=[A-Za-z>])_([A-Za-z0-9])(?![A-Za-z0-9_])", r"<sub>\1</sub>", raised))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
