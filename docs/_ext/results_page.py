"""Results of the acceptance lane as a page: counts, what is not met, and every figure by wing, from results.json."""

import functools
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "`all results`"
WORDS = ("holds", "refuted", "inconclusive")
LONGEST = 120  # characters of a measured figure in a table; the details have all of it


def setup(app):
    """Fill in the page before it is parsed."""

    def read(app, name, source):
        if name == "acceptance":
            source[0] = source[0].replace(MARK, page())

    app.connect("source-read", read)
    return {"parallel_read_safe": True}


@functools.cache
def results():
    """Return the results, in the order of the lane."""
    return json.loads((ROOT / "tests/acceptance/results.json").read_text(encoding="utf-8"))


def reasons():
    """Return why figures are not met, in a sentence each."""
    return json.loads(Path(__file__).with_name("unmet.json").read_text(encoding="utf-8"))


def page():
    """Return the sections: met by wing, not met, and a table with folded details for each wing."""
    wings = {}
    for row in results():
        wings.setdefault(row["wing"], []).append(row)
    met = {wing: sum(row["met"] for row in rows) for wing, rows in wings.items()}
    counts = table(("wing", "met", "measured"), [(wing, met[wing], len(rows)) for wing, rows in wings.items()])
    names = {f"{row['wing']}/{row['figure']}": row for row in results() if not row["met"]}
    failed = [(name, row["claim"], short(row), row["required"], reasons()[name]) for name, row in names.items()]
    head = f"{sum(met.values())} of {len(results())} figures are met."
    parts = [head, counts, "## Not met", table(("figure", "claim", "measured", "required", "why"), failed)]
    for wing, rows in wings.items():
        shown = [(row["figure"], row["claim"], short(row), row["required"], verdict(row)) for row in rows]
        parts += [f"## {wing}", table(("figure", "claim", "measured", "required", "verdict"), shown)]
        parts += [f":::{{dropdown}} Details of {wing}", *map(details, rows), ":::"]
    return "\n\n".join(parts)


def verdict(row):
    """Return whether a result is met, in words."""
    return "met" if row["met"] else "**not met**"


def short(row):
    """Return what was measured in one line; verdicts are counted, a long text is cut."""
    texts = [text for text, _ in row["measured"]]
    found = [text.rpartition(": ")[2].partition(",")[0] for text in texts]
    if len(texts) > 1 and set(found) & set(WORDS):
        return ", ".join(f"{found.count(word)} {word.replace('holds', 'hold')}" for word in WORDS if word in found)
    cut = len(texts) > 1 or len(texts[0]) > LONGEST
    return f"{texts[0][:LONGEST].rstrip()} …" if cut else texts[0]


def details(row):
    """Return all of a result as a block of Markdown."""
    head = f"**{row['figure']}**, {verdict(row).strip('*')}: {row['claim']}"
    facts = f"required: {row['required']}; seeds: {row['seeds']}; `{row['command']}`"
    about = f"{row['date']}, {row['versions']}, {row['seconds']} s"
    return "\n\n".join((head, table(("measured", "interval or extent"), row["measured"]), f"{facts}; {about}"))


def table(head, rows):
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)
