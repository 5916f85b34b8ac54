"""Gallery pages: a card and a page for each study, drawn from `docs/gallery/*.json`."""

import functools
import json
import math
import re
from pathlib import Path

from api_pages import write
from results_page import results

from manyheads.study.panels import Drawn, Multiples, Scatter, panel_from_json
from manyheads.study.registry import STUDIES, load
from manyheads.study.reporting.overview import format_figure
from manyheads.study.reporting.svg import svg
from manyheads.study.sources import Source

WINGS = {
    "attention": "Attention, recurrence and pooling",
    "recovery": "Recovering a layer",
    "limits": "Infinite limits and scaling",
    "joma": "Joint dynamics of MLP and attention",
    "bigram": "Sparse contextual bigrams",
    "meanfield": "Mean-field dynamics",
    "demo": "Text",
}
OUTCOMES = ("holds", "refuted", "inconclusive")
COMMAND = re.compile(
    r"(manyheads study run (\S+) --replicates \d+(?: --seed \d+)?)(?: --workers \d+)? --store"
)  # default size
ROW = re.compile(rf"(.*): ({'|'.join(OUTCOMES)}), (\S+)")
HEAD = """# Gallery

Every registered study: its claim, a picture of what was measured beside what the theory predicts, and how many of
its claims hold, are refuted or stay inconclusive at the default size. Each page names the command that makes its
run. A picture of the *smallest size* comes from the smallest configuration of its study: it shows what is
measured, and decides little. More figures stand in [Acceptance](../acceptance.md).

"""
REFUTED = """# Refutations

What was measured against a claim and did not agree with it, at the default size of each study. The 99% interval of
the figure lies wholly outside the range in which the claim would hold ([the rule](../verdicts.md)). Some were
expected: a claim that is known to fail is kept as its source states it. What was tried and did not work beyond
single claims stands in the [notebook](../notebook.md).

"""
BREAK = "/\u200b"  # a long name breaks behind its wing, not inside a word


def setup(app):
    """Write the pages before Sphinx looks for sources."""
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir) / "gallery"))
    return {"parallel_read_safe": True}


def write_pages(folder):
    """Write one page a study, the gallery and the list of refutations."""
    entries = {}
    for name in STUDIES:
        file = folder / f"{name.replace('/', '-')}.json"
        bare = {
            "default": False,
            "command": f"manyheads study run {name}",
            "source": None,
            "verdicts": [],
            "panels": [],
        }
        entries[name] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else bare
    for name, entry in entries.items():
        write(folder / f"{name.replace('/', '-')}.md", study_page(folder, name, entry))
    write(folder / "index.md", HEAD + cards(folder, entries))
    write(folder / "refutations.md", REFUTED + refutations(entries))


def without_run(name):
    """Return the entry of a study that the gallery has no run of."""
    command = f"manyheads study run {name}"
    return {"default": False, "command": command, "source": None, "verdicts": [], "panels": []}


def is_current(name, entry):
    """Whether a run is of the default size and of the present revision of its study."""
    return entry["default"] and entry["revision"] == load(name).revision


def picture_note(name, entry):
    """Say of what run the pictures are, if not of a current one."""
    if is_current(name, entry):
        return ""
    return "picture of an earlier revision" if entry["default"] else "picture of the smallest size"


def default_rows(name, entry):
    """Return the verdicts of a study at its default size as rows, and the command; none if it was not run there."""
    if is_current(name, entry):
        return [verdict_row(verdict)[:3] for verdict in entry["verdicts"]], entry["command"]
    return accepted().get(name, ([], ""))


@functools.cache
def accepted():
    """Return the verdicts that the acceptance lane has measured with default settings, by study."""
    found = {}
    for row in results():
        command = COMMAND.match(row["command"])
        rows = [(ROW.fullmatch(text), extent) for text, extent in row["measured"]]
        shown = [
            (escape(match[1]), badge(match[2], match[2]), f"{match[3]} {extent}") for match, extent in rows if match
        ]
        if command and shown:
            found.setdefault(command[2], (shown, command[1]))
    return found


def cards(folder, entries):
    """Return the cards of all studies, wing by wing, and the hidden table of contents."""
    parts = []
    for wing, title in WINGS.items():
        parts.append(f"## {title}\n\n::::{{grid}} 1 2 2 3\n:gutter: 3\n")
        for name, entry in entries.items():
            if name.partition("/")[0] == wing:
                parts.append(card(folder, name, entry))
        parts.append("::::\n")
    pages = "\n".join(name.replace("/", "-") for name in entries)
    return "\n".join([*parts, f":::{{toctree}}\n:hidden:\n\n{pages}\n:::\n"])


def card(folder, name, entry):
    """Return the card of a study: picture, name, claim, outcomes."""
    slug = name.replace("/", "-")
    image = (
        f":img-top: {slug}-0.svg\n:img-alt: {plain(first_title(entry))}\n"
        if (folder / f"{slug}-0.svg").exists()
        else ""
    )
    note = picture_note(name, entry)
    size = f"\n\n*{note}*" if note else ""
    return (
        f":::{{grid-item-card}} {name.replace('/', BREAK)}\n:link: {slug}\n:link-type: doc\n"
        f":class-card: gallery-card\n{image}\n"
        f"{escape(STUDIES[name].claim)}.\n\n{counts(name, entry)}{size}\n:::\n"
    )


def first_title(entry):
    """Return the title of the first picture."""
    return next((panel["title"] for panel in entry["panels"] if panel["kind"] != "listing"), "picture of the study")


def counts(name, entry):
    """Return the outcomes at the default size with their numbers."""
    rows, _ = default_rows(name, entry)
    numbers = [(word, sum(f">{word}" in row[1] for row in rows)) for word in OUTCOMES]
    return " ".join(
        badge(word, f"{number} {'hold' if word == 'holds' else word}") for word, number in numbers if number
    )


def badge(outcome, text):
    """Return a coloured word."""
    return f'<span class="outcome outcome-{outcome}">{text}</span>'


def study_page(folder, name, entry):
    """Return the page of a study, and write its pictures."""
    slug, position = name.replace("/", "-"), 0
    parts = [f"# {name}\n", f"{escape(STUDIES[name].claim)}.\n", f"{counts(name, entry)}\n"]
    for data in entry["panels"]:
        panel = panel_from_json(data)
        parts.append(f"## {escape(panel.title)}\n")
        if isinstance(panel, Drawn):
            draw_once(folder / f"{slug}-{position}.svg", panel, folder / f"{slug}.json")
            kind = "gallery wide" if isinstance(panel, Multiples | Scatter) else "gallery"
            image = f":::{{image}} {slug}-{position}.svg\n:alt: {plain(panel.title)}\n:class: {kind}\n:::"
            parts.append(f"::::{{container}} picture\n{image}\n::::\n")
            position += 1
        else:
            parts.append(table(panel.columns, panel.rows))
        if panel.note:
            parts.append(f"{escape(panel.note)}\n")
    rows, command = default_rows(name, entry)
    if rows and not is_current(name, entry):
        parts.append("## Verdicts at the default size\n")
        parts.append(table(("claim", "outcome", "measured, 99% interval"), rows))
        parts.append(f"Made by\n\n```sh\n{command}\n```\n")
    if entry["verdicts"]:
        parts.append("## Verdicts of this run\n")
        if note := picture_note(name, entry):
            parts.append(f"The pictures above show what is measured ({note}).\n")
        columns = ("claim", "outcome", "measured, 99% interval", "holds if inside")
        parts.append(table(columns, map(verdict_row, entry["verdicts"])))
    parts.append(f"Made by\n\n```sh\n{entry['command']}\n```\n")
    if entry["source"]:
        parts.append(f"Source: {escape(str(Source(**entry['source'])))}.\n")
    return "\n".join(parts)


def draw_once(path, panel, data):
    """Draw a picture unless there is one that is newer than its data."""
    if not path.exists() or path.stat().st_mtime < data.stat().st_mtime:
        path.write_text(standalone(svg(panel, f"{path.stem}-")), encoding="utf-8")


def standalone(text):
    """Return an SVG element as a file of its own: with a font and a background, which a page would give it."""
    style = "<style>text { font-family: system-ui, 'DejaVu Sans', Arial, sans-serif }</style>"
    return text.replace("</desc>", f'</desc>{style}<rect width="100%" height="100%" fill="#fff"/>', 1)


def verdict_row(verdict):
    """Return the cells of a verdict."""
    low, high = map(float, verdict["interval"])
    below, above = map(float, verdict["tolerance"])
    target = float(verdict["target"])
    measured = format_figure(float(verdict["figure"]))
    if low != high:
        measured += f" [{format_figure(low)}, {format_figure(high)}]"
    word = verdict["outcome"] + (" (expected)" if verdict["expected"] == verdict["outcome"] == "refuted" else "")
    return escape(verdict["claim"]), badge(verdict["outcome"], word), measured, interval(target - below, target + above)


def interval(low, high):
    """Return a range in words that a table can hold."""
    if math.isinf(low):
        return f"at most {format_figure(high)}"
    if math.isinf(high):
        return f"at least {format_figure(low)}"
    return f"{format_figure(low)} to {format_figure(high)}" if low != high else format_figure(low)


def refutations(entries):
    """Return the claims of all studies that were refuted at the default size."""
    parts = []
    for name, entry in entries.items():
        rows = [row for row in default_rows(name, entry)[0] if ">refuted" in row[1]]
        if rows:
            parts.append(f"## [{name}]({name.replace('/', '-')}.md)\n")
            parts.append(table(("claim", "outcome", "measured, 99% interval"), rows))
    return "\n".join(parts)


def table(columns, rows):
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *(map(cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text):
    """Return text that does not end its cell."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def escape(text):
    """Return text that Markdown shows as it is; dashes of code stay."""
    for letter in "\\`*_$<>[]":
        text = text.replace(letter, f"\\{letter}")
    return text


def plain(text):
    """Return text for an option of a directive."""
    return " ".join(text.split())
