"""Coordinate checks, rate transfer and head diversity: verdicts over at least eight seeds, on digits and on text."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from tests.acceptance._lane import ROOT, Figure, Measured

from manyheads.limits.axes import LETTERS
from manyheads.limits.studies.coordinate_check import CoordinateCheckStudy
from manyheads.study import open_run
from manyheads.study.store import find_runs

STORE = ROOT / ".acceptance" / "runs"
COMMAND = "from manyheads.cli import main; raise SystemExit(main())"
WIDEST = {"key_dim": 0.35, "heads": 0.2, "depth": 0.35}  # what is required of plain slopes, without their derivation


def words_of(name: str, replicates: int, flags: str) -> str:
    return f"manyheads study run {name} --replicates {replicates} {flags} --store .acceptance/runs".replace("  ", " ")


def run(name: str, replicates: int, flags: str) -> Path:
    """Run a study on the command line, which goes on where it was killed, and return the folder of the run."""
    known = {runs.path for runs in find_runs(STORE / name)} if (STORE / name).exists() else set()
    words = words_of(name, replicates, flags).split()[1:]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, flush=True)
    paths = {runs.path for runs in find_runs(STORE / name)}
    named = [path for path in paths if Path(path).name in done.stdout]
    return Path((named or list(paths - known))[0])


def verdicts(folder: Path, name: str, replicates: int, flags: str = "") -> Measured:
    """All verdicts of a study are the expected ones."""
    table = open_run(run(name, replicates, flags))["verdicts"].to_dataset()
    shown, extents = [], []
    for claim in table["claim"].values:
        row = {key: table[key].sel(claim=claim).item() for key in table.data_vars}
        shown.append(f"{claim}: {row['outcome']}, {row['figure']:.3g}")
        extents.append(f"[{row['low']:.3g}, {row['high']:.3g}]")
    passed = bool((table["outcome"] == table["expected"]).all())
    return Measured("<br>".join(shown), "<br>".join(extents), f"0, replicates 0-{replicates - 1}", passed)


def plain_slopes(folder: Path, replicates: int, flags: str, optimizer: str, axes: list[str]) -> Measured:
    """Both exponents one: plain slopes of outputs, stream, logits and values, all intervals within the widest."""
    trained = open_run(run("limits/coordinate-check", replicates, flags))["trained"].to_dataset()
    schemes = tuple(dict.fromkeys(["limits", *map(str, trained["scheme"].values)]))
    study = CoordinateCheckStudy(optimizer=optimizer, axes=tuple(axes), schemes=schemes)
    shown, extents, passed = [], [], True
    for axis in axes:
        for growth in study.growths(trained, "limits", axis):  # type: ignore[arg-type]
            if growth.quantity == "query_by_weights":
                continue
            interval = growth.fit.interval if growth.fit else None
            reached = max(abs(interval.low), abs(interval.high)) if interval else np.inf
            passed &= reached <= WIDEST[axis]
            shown.append(f"{growth.module}: {LETTERS[axis]}^{growth.fit.exponent:.2f} after {growth.step} steps")
            extents.append(f"[{interval.low:.2f}, {interval.high:.2f}]")
    return Measured("<br>".join(shown), "<br>".join(extents), f"0, replicates 0-{replicates - 1}", bool(passed))


def study(name: str, title: str, claim: str, replicates: int = 8, flags: str = "") -> Figure:
    settings = {"name": name, "replicates": replicates, "flags": flags}
    command = words_of(name, replicates, flags)
    return Figure(title, claim, "every verdict as expected", verdicts, settings, command=command)


ALL = "--axes key_dim heads depth"
SGD = "--optimizer sgd"
DEPTH = "--optimizer sgd --axes depth --schemes limits half-depth standard"

FIGURES = (
    study("limits/coordinate-check", "coordinates-adam", "Adam, 4 and 25 steps: what is flat, what breaks, and where"),
    study("limits/coordinate-check", "coordinates-sgd", "gradient descent, 20 steps", flags=SGD),
    study("limits/coordinate-check", "coordinates-sgd-depth", "gradient descent along L", 16, DEPTH),
    study("limits/coordinate-check", "coordinates-text", "Adam on text", flags="--task text"),
    Figure(
        "plain-slopes-adam",
        "both exponents one, Adam: outputs, stream, logits and values move as N^0, H^0, L^0",
        "|slope| <= 0.35 in N and L, 0.2 in H, with its interval",
        plain_slopes,
        {"replicates": 8, "flags": "", "optimizer": "adam", "axes": ["key_dim", "heads", "depth"]},
        command=words_of("limits/coordinate-check", 8, ""),
    ),
    Figure(
        "plain-slopes-sgd-depth",
        "both exponents one, gradient descent: the same along L",
        "|slope| <= 0.35, with its interval",
        plain_slopes,
        {"replicates": 16, "flags": DEPTH, "optimizer": "sgd", "axes": ["depth"]},
        command=words_of("limits/coordinate-check", 16, DEPTH),
    ),
    study("limits/rate-transfer", "transfer-digits", "digits, along N: the best rate"),
    study("limits/rate-transfer", "transfer-digits-all", "digits, along N, H and L", flags=ALL),
    study("limits/rate-transfer", "transfer-text", "text, along N, H and L", flags=f"--task text --steps 60 {ALL}"),
    study("limits/head-diversity", "heads-digits", "variance of logits over heads against N"),
    study("limits/head-diversity", "heads-text", "the same on text", flags="--task text"),
)
