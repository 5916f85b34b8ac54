"""`report`: one self-contained HTML file for one run or a whole store.

What it shows comes from the store alone: the same store gives the same bytes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manyheads.errors import FileRefused, UsageError
from manyheads.study.reporting.panels import Drawn, Listing, Multiples, Panel, Scatter
from manyheads.study.sources import Source
from manyheads.study.store.disk import printable, write_text
from manyheads.study.store.run_store import RunStore, find_runs, stored_source
from manyheads.study.verdicts import Verdict


@dataclass(frozen=True)
class Section:
    """One chapter of a report.

    Parameters
    ----------
    title, lead
        Heading, and a sentence or two that say what is asked; plain text.
    panels, verdicts
        What was measured and what follows.
    facts
        Name and value of what identifies the run.
    command
        What reruns it; empty for none.
    source
        Where the claim comes from; None for none.
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
    sections = [section_of(run) for run in runs if run.summary() is not None]
    if not sections:
        raise FileRefused(f"{path}: no run is finished yet; 'manyheads study run' finishes one")
    waiting = len(runs) - len(sections)
    note = f"{waiting} unfinished run{'s' if waiting > 1 else ''} left out." if waiting else ""
    return write_report(
        sections, Path(out or Path(path) / "report.html"), title="manyheads: theory beside training", introduction=note
    )


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
    return Section(
        title=title or printable(header["study"]),
        lead=lead or printable(header["claim"]),
        panels=summary.panels,
        verdicts=summary.verdicts,
        facts=tuple((name, printable(value)) for name, value in facts.items() if value),
        command=printable(f"{header['command']} --replicates {summary.replicates} --seed {header['seed']}"),
        source=stored_source(header),
    )


def write_report(sections: Sequence[Section], out: Path, title: str, introduction: str = "") -> Path:
    """Write sections as one self-contained HTML file (no script, nothing fetched) and return its path.

    Raises
    ------
    UsageError
        No section, or an output that is a folder or whose folder does not exist.
    """
    if not sections:
        raise UsageError("a report needs at least one section")
    if out.is_dir():
        raise UsageError(f"{out} is a folder: name the HTML file to write")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder to write {out.name} in; make it first")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("manyheads.study.reporting", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"figure": format_figure}
    text = environment.get_template("report.html").render(
        title=title,
        introduction=introduction,
        sections=[_rendered(section, position) for position, section in enumerate(sections)],
    )
    write_text(out, text)
    return out


def format_figure(value: float) -> str:
    """Return a figure with four digits, for people."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{int(value)}".replace("-", "−")
    return re.sub(r"^-", "−", f"{value:.4g}")


def _rendered(section: Section, position: int) -> dict[str, object]:
    """Return what the template shows of a section; drawing happens here."""
    from markupsafe import Markup

    from manyheads.study.reporting.drawing import svg

    panels: list[dict[str, object]] = []
    for index, panel in enumerate(section.panels):
        if isinstance(panel, Drawn):
            drawing = Markup(svg(panel, prefix=f"s{position}p{index}-"))
            wide = isinstance(panel, Multiples | Scatter)
            panels.append({"title": panel.title, "svg": drawing, "note": panel.note, "wide": wide})
        elif isinstance(panel, Listing):
            rows = [[(cell, _is_number(cell)) for cell in row] for row in panel.rows]
            panels.append({"title": panel.title, "columns": panel.columns, "rows": rows, "note": panel.note})
    return {
        "anchor": f"section-{position}",
        "title": section.title,
        "lead": section.lead,
        "panels": panels,
        "verdicts": section.verdicts,
        "facts": section.facts,
        "command": section.command,
        "source": section.source,
        "outcomes": [verdict.outcome for verdict in section.verdicts],
    }


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"[−+-]?[\d.,  ]+(e[+-]?\d+)?( ?[%×a-zA-Z/]{1,6})?", text.strip()))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
