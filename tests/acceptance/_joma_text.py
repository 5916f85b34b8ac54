"""JoMA on real text: both studies' texts, and the time that the default size takes."""

import time
from pathlib import Path

from tests.acceptance._lane import Figure, Measured
from tests.acceptance._studies import run_study, study, words_of

from manyheads.study import open_run

WIKITEXT = "../shared/data/wikitext-2/valid.txt"
NAME = "joma/real-text"


def flags_of(text: str) -> str:
    return f"--workers 2 --text {text}" if text else "--workers 2"


def real_text(folder: Path, replicates: int, text: str) -> Measured:
    """Run the study on a text."""
    return study(folder, NAME, replicates, flags_of(text))


def real_text_time(folder: Path, replicates: int) -> Measured:
    """Time the study from an empty store, and sum the CPU seconds of its units."""
    start = time.monotonic()
    path, _ = run_study(words_of(NAME, replicates, flags_of(""), str(folder / "runs")))
    minutes = (time.monotonic() - start) / 60
    trained = open_run(path)["trained"].to_dataset()
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
        command=words_of(NAME, 8, flags_of("")),
    ),
    Figure(
        "real-text-wikitext",
        "the same on WikiText-2",
        "every verdict as expected",
        real_text,
        {"replicates": 4, "text": WIKITEXT},
        command=words_of(NAME, 4, flags_of(WIKITEXT)),
    ),
    Figure(
        "real-text-time",
        "the default size ends in minutes on two cores",
        "< 15 minutes on two idle cores",
        real_text_time,
        {"replicates": 8},
    ),
)
