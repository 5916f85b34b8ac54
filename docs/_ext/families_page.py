"""Tables of the page of families, from the tables of the package and the data of its tests."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def setup(app):
    """Fill in the page before it is parsed."""

    def read(app, name, source):
        if name == "families":
            source[0] = fill(source[0])

    app.connect("source-read", read)
    return {"parallel_read_safe": True}


def fill(text):
    """Return the page with its three tables in the place of the marks."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    for mark, table in (("families", families), ("unsupported", unsupported), ("public", public)):
        text = text.replace(f"`{mark}`", table())
    return text


def families():
    """Return the table of the types with a table; a reason stands once, as a number below."""
    from tests.models.tools import TOOLS, verdicts

    from manyheads.models.families import FAMILIES

    notes, rows = {}, []
    for family in FAMILIES:
        words, reasons = verdicts(family)
        said = {tool: short(reason) for tool, reason in reasons.items()}
        cells = [
            f"{words[tool]} ({notes.setdefault(said[tool], len(notes) + 1)})" if tool in said else words[tool]
            for tool in TOOLS
        ]
        rows.append((f"`{family}`", *cells))
    listed = "\n".join(f"{number}. {reason}" for reason, number in notes.items())
    return f"{len(rows)} types.\n\n{render(('type', *TOOLS), rows)}\n\nReasons:\n\n{listed}"


def short(reason):
    """Return what a refusal says behind the name of the family."""
    return re.sub(r"^(attention of )?the family \S+( is not read)?: ", "", reason)


def unsupported():
    """Return the table of the types without a table, by reason."""
    from tests.models.tools import TOOLS, words_without_table

    from manyheads.models.families import UNSUPPORTED

    grouped = {}
    for name, reason in UNSUPPORTED.items():
        words = words_without_table(name)
        grouped.setdefault((reason, *(words[tool] for tool in TOOLS)), []).append(f"`{name}`")
    rows = [(reason, ", ".join(names), *words) for (reason, *words), names in grouped.items()]
    return f"{len(UNSUPPORTED)} types.\n\n{render(('reason', 'types', *TOOLS), rows)}"


def public():
    """Return the table of public configurations, with the remark of each row."""
    from tests.models.public import PUBLIC, differences

    from manyheads.costs import kv_cache_bytes, transformer_cost
    from manyheads.models import shape_from_config
    from manyheads.models.counts import count_parameters

    rows = []
    for name, row in PUBLIC.items():
        shape, found = shape_from_config(row.config), count_parameters(row.config)
        steps = [transformer_cost(shape, 1024, training=each).flops for each in (False, True)]
        remarks = {}
        for figure, why in differences(name).items():
            remarks.setdefault(why, []).append(figure)
        said = "; ".join(f"{', '.join(figures)}: {why}" for why, figures in remarks.items())
        published = f"{row.published:,}" if row.published else "by transformers alone"
        kept = kv_cache_bytes(shape, 1024, itemsize=2)
        rows.append((name, f"{found.total:,}", published, *(f"{step:,}" for step in steps), f"{kept:,}", said))
    heads = ("configuration", "parameters", "published", "forward FLOPs", "training FLOPs", "cache bytes", "remark")
    return f"{len(rows)} configurations.\n\n{render(heads, rows)}"


def render(heads, rows):
    """Return a table of Markdown."""
    lines = ["| " + " | ".join(each) + " |" for each in (heads, ["---"] * len(heads), *rows)]
    return "\n".join(lines)
