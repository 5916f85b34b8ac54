"""Verdicts of the coverage page: each ``verdict STUDY: CLAIM`` becomes the outcome and figure of that claim.

They are taken from the gallery's data and the acceptance lane when the page is read, so the page holds no figure.
"""

import json
import re
from pathlib import Path

from gallery_pages import default_rows, escape, without_run

MARK = re.compile(r"`verdict (?P<study>\S+): (?P<claim>[^`]+)`")


def setup(app):
    """Fill in the page before it is parsed."""

    def read(app, name, source):
        if name == "coverage":
            source[0] = fill(source[0], Path(app.srcdir) / "gallery")

    app.connect("source-read", read)
    return {"parallel_read_safe": True}


def fill(text, folder):
    """Return the page with verdicts in the place of the marks."""
    return MARK.sub(lambda mark: verdict(mark["study"], mark["claim"], folder), text)


def verdict(study, claim, folder):
    """Return outcome and figure of the claim that begins with the given words, at the study's default size."""
    file = folder / f"{study.replace('/', '-')}.json"
    entry = json.loads(file.read_text(encoding="utf-8")) if file.exists() else without_run(study)
    for text, outcome, measured in default_rows(study, entry)[0]:
        if text.startswith(escape(claim)):
            return f"{outcome} {measured}"
    return "not run at the default size yet"
