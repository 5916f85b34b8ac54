"""Claims of the sources as a page: each row of `coverage.json` with the outcome and figure of its study's claim.

A row with a `study` names the beginning of one of its claims; its verdict is taken from the gallery's data and the
acceptance lane when the page is read, so the file holds no figure. Other rows have an answer in words.
"""

import json
from pathlib import Path

from gallery_pages import default_rows, escape, without_run
from results_page import table

MARK = "`all claims`"


def setup(app):
    """Fill in the page before it is parsed."""

    def read(app, name, source):
        if name == "coverage":
            source[0] = source[0].replace(MARK, page(Path(app.srcdir) / "gallery"))

    app.connect("source-read", read)
    return {"parallel_read_safe": True}


def sections():
    """Return the sources with their claims."""
    return json.loads(Path(__file__).with_name("coverage.json").read_text(encoding="utf-8"))


def page(folder):
    """Return a section with a table for each source."""
    parts = []
    for section in sections():
        rows = [(row["claim"], row["place"], *answer(row, folder)) for row in section["claims"]]
        parts += [f"## {section['source']}", table(("claim", "place", "answer", "verdict"), rows)]
    return "\n\n".join(parts)


def answer(row, folder):
    """Return what answers a claim, and the verdict."""
    if study := row.get("study"):
        link = f"[{study}](gallery/{study.replace('/', '-')}.md)"
        return link, verdict(study, row["verdict"], folder)
    command = f", {row['command']}" if "command" in row else ""
    return row["answer"] + command, row["verdict"]


def verdict(study, claim, folder):
    """Return outcome and figure of the claim that begins with the given words, at the study's default size."""
    file = folder / f"{study.replace('/', '-')}.json"
    entry = json.loads(file.read_text(encoding="utf-8")) if file.exists() else without_run(study)
    for text, outcome, measured in default_rows(study, entry)[0]:
        if text.startswith(escape(claim)):
            return f"{outcome} {measured}"
    return "not run at the default size yet"
