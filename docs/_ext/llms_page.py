"""llms.txt of the site: every hand-written page with its title and first sentence."""

import re
from pathlib import Path

HEAD = """# manyheads

> Hyperparameter transfer (muP, CompleteP, Muon), exact FLOPs, attention statistics and black-box extraction for
> multi-head attention, and the theorems behind them, each tested on trained networks. A Python library and commands.

"""


def setup(app):
    """Write the file beside the pages."""
    app.connect("build-finished", lambda app, error: error or write(Path(app.srcdir), Path(app.outdir)))
    return {"parallel_read_safe": True}


def write(folder, out):
    """Write the list of pages."""
    (out / "llms.txt").write_text(HEAD + listing(folder), encoding="utf-8")


def listing(folder):
    """Return a line for each page."""
    lines = []
    for path in sorted([*folder.glob("*.md"), *folder.glob("tours/*.md")]):
        front = r"\A---\n.*?\n---\n|^(:::+|```+)[^\n]*\n.*?^\1$"  # and blocks
        text = re.sub(front, "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        if title := re.search(r"^# (.+)$", text, re.MULTILINE):
            place = path.relative_to(folder).with_suffix(".html").as_posix()
            said = re.search(r"^(?![#:|`\-*>{!])\S.*?(?=\n\n|\Z)", text[title.end() :], re.MULTILINE | re.DOTALL)
            sentence = re.split(r"(?<=[.?!])\s", said[0].replace("\n", " "), maxsplit=1)[0] if said else ""
            lines.append(f"- [{title[1]}]({place})" + (f": {sentence}" if sentence else ""))
    return "\n".join(lines) + "\n"
