"""Figures that are the verdicts of a registered study, run on the command line."""

import json
import subprocess
import sys
from pathlib import Path

from tests.acceptance._lane import ROOT, Measured

from manyheads.cli.study import Run
from manyheads.study import Verdict, open_run

COMMAND = "from manyheads.cli import main; raise SystemExit(main())"
STORE = ".acceptance/runs"


def words_of(name: str, replicates: int, flags: str = "", store: str = STORE) -> str:
    """Return the command as it is typed."""
    return " ".join(f"manyheads study run {name} --replicates {replicates} {flags} --store {store}".split())


def run_study(command: str) -> tuple[Path, list[dict]]:
    """Run a command, which goes on where it was killed; return the folder of its run and the verdicts."""
    words = [*command.split()[1:], "--json"]
    done = subprocess.run([sys.executable, "-c", COMMAND, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    answer = json.loads(done.stdout)
    return ROOT / answer["store"], answer["verdicts"]


def _stated(name: str, flags: str, path: Path) -> tuple[Verdict, ...]:
    """Return the verdicts with the expectations that the study states for its defaults: acceptance holds it to them."""
    made, tree = Run.parse([name, *flags.split()], "manyheads study run").study, open_run(path)
    return made.compare(tree["predicted"].to_dataset(), tree["trained"].to_dataset())


def study(folder: Path, name: str, replicates: int, flags: str = "") -> Measured:
    """Run a registered study and compare its verdicts with the expected ones."""
    path, found = run_study(words_of(name, replicates, flags))
    shown = [f"{row['claim']}: {row['outcome']}, {float(row['figure']):.4g}" for row in found]
    extents = ["[{:.4g}, {:.4g}]".format(*map(float, row["interval"])) for row in found]  # JSON has "-inf" as text
    passed = all(verdict.outcome == verdict.expected for verdict in _stated(name, flags, path))
    words = flags.split()
    seed = words[words.index("--seed") + 1] if "--seed" in words else "0"
    return Measured("<br>".join(shown), "<br>".join(extents), f"{seed}, replicates 0-{replicates - 1}", passed)
