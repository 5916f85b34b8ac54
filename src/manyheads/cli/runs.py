"""`manyheads runs`: what the store holds, and what may be removed."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from manyheads.cli.parsing import existing
from manyheads.errors import FileRefused


@dataclass(frozen=True)
class List:
    """List the runs in a store: units, verdicts, damage."""

    store: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """Root folder of the store."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Print one line a run; damage is reported, nothing is changed."""
        from manyheads.study.store.disk import printable
        from manyheads.study.store.run_store import find_paths

        rows = [_describe(path) for path in find_paths(existing(self.store))]
        if self.json:
            print(json.dumps(rows, indent=1))
            return 0
        shown = [(printable(row["run"]), row["units"], printable(row["state"])) for row in rows]
        width = max(len(run) for run, _, _ in shown)
        for run, units, state in shown:
            print(f"{run:<{width}}   {units:>4} units   {state}")
        return 0


@dataclass(frozen=True)
class Clean:
    """Remove what killed processes left behind; with --unfinished or --superseded also whole runs."""

    store: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """Root folder of the store."""
    unfinished: bool = False
    """Remove runs that were never finished."""
    superseded: bool = False
    """Remove runs of an older revision of their study."""

    def run(self) -> int:
        """Remove, and say what was removed."""
        from manyheads.study.store.disk import printable
        from manyheads.study.store.run_store import find_runs

        leftovers = removed = 0
        for run in find_runs(_no_linked_run(self.store)):
            leftovers += run.sweep()
            if (self.unfinished and run.summary() is None) or (self.superseded and _is_superseded(run)):
                shutil.rmtree(run.path)
                removed += 1
                print(f"removed {printable(run.path)}")
        print(f"{leftovers} leftovers of interrupted writes and {removed} runs removed")
        return 0


def _no_linked_run(store: Path) -> Path:
    """Return the root of a store; a link to one run is refused, since it says nothing of what would be removed."""
    if store.is_symlink() and (store / "run.json").exists():
        raise FileRefused(
            f"{store} is a symbolic link to a run; runs are removed by their own folder only: give {store.resolve()}"
        )
    return existing(store)


def _describe(path: Path) -> dict[str, Any]:
    """Return one row: the run, how many units it holds, and its state in words; a damaged one does not hide others."""
    from manyheads.study.store.run_store import RunStore, StoreDamaged

    count = 0
    try:
        run = RunStore(path)
        count = len(run.finished())
        run.verify()
        summary = run.summary()
    except StoreDamaged as damage:
        return {"run": str(path), "units": count, "state": f"damaged: {damage}"}
    except FileRefused as refusal:
        return {"run": str(path), "units": count, "state": f"refused: {refusal}"}
    if summary is None:
        return {"run": str(path), "units": count, "state": "unfinished"}
    outcomes = [verdict.outcome for verdict in summary.verdicts]
    tally = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
    return {"run": str(path), "units": count, "state": tally or "no claim"}


def _is_superseded(run: Any) -> bool:
    from manyheads.study.registry import STUDIES, load

    name = run.header["study"]
    return name in STUDIES and load(name).revision > run.header["revision"]
