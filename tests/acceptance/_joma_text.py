"""JoMA on real text: both studies' texts, and the time that the default size takes."""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.acceptance._lane import ROOT, Figure, Measured
from tests.acceptance.attention import COMMAND, STORE

from manyheads.joma.studies.real_text import RealText
from manyheads.study import open_run
from manyheads.study.store import find_runs

WIKITEXT = "../shared/data/wikitext-2/valid.txt"
RUN = "manyheads study run joma/real-text --replicates {} --workers 2 --store .acceptance/runs{}"


def real_text(folder: Path, replicates: int, text: str) -> Measured:
    """Run the study, which goes on where it was killed, and read its verdicts."""
    words = RUN.format(replicates, f" --text {text}" if text else "").split()[1:]
    subprocess.run([sys.executable, "-c", COMMAND, *words], cwd=ROOT, check=True)
    # Runs of an earlier default may lie beside it.
    (run,) = [run for run in find_runs(STORE / "joma" / "real-text") if _is_of(run.header, text)]
    table = open_run(run.path)["verdicts"].to_dataset()
    shown, extents = [], []
    for claim in table["claim"].values:
        row = {key: table[key].sel(claim=claim).item() for key in table.data_vars}
        shown.append(f"{claim}: {row['outcome']}, {row['figure']:.4g}")
        extents.append(f"[{row['low']:.4g}, {row['high']:.4g}]")
    passed = bool((table["outcome"] == table["expected"]).all())
    return Measured("<br>".join(shown), "<br>".join(extents), f"0, replicates 0-{replicates - 1}", passed)


def _is_of(header: dict, text: str) -> bool:
    fields = header["configuration"]
    now = json.loads(json.dumps(asdict(RealText())))
    same = all(fields[name] == value for name, value in now.items() if name != "text")
    return header["seed"] == 0 and same and bool(fields["text"]) == bool(text)


def real_text_time(folder: Path, replicates: int) -> Measured:
    """Time the study from an empty store, and sum the CPU seconds of its units."""
    words = RUN.format(replicates, "").split()[1:]
    words[words.index(".acceptance/runs")] = str(folder / "runs")
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", COMMAND, *words], cwd=ROOT, check=True)
    minutes = (time.monotonic() - start) / 60
    (run,) = find_runs(folder / "runs")
    trained = open_run(run.path)["trained"].to_dataset()
    processor = float(trained["cpu_seconds"].sum()) / 60
    extent = f"{processor:.1f} CPU minutes in {trained['cpu_seconds'].size} units"
    return Measured(f"{minutes:.1f} minutes", extent, f"0, replicates 0-{replicates - 1}", minutes < 15)


FIGURES = (
    Figure(
        "real-text",
        "on Python's documentation: rebound, loss, and what else the curves say",
        "every verdict as expected",
        real_text,
        {"replicates": 8, "text": ""},
        command=RUN.format(8, ""),
    ),
    Figure(
        "real-text-wikitext",
        "the same on WikiText-2",
        "every verdict as expected",
        real_text,
        {"replicates": 4, "text": WIKITEXT},
        command=RUN.format(4, f" --text {WIKITEXT}"),
    ),
    Figure(
        "real-text-time",
        "the default size ends in minutes on two cores",
        "< 15 minutes on two idle cores",
        real_text_time,
        {"replicates": 8},
    ),
)
