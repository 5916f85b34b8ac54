"""`manyheads runs`, `report` and `cite`: what is stored, its care, a report and the sources."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from manyheads._overview import printable
from manyheads.cli.help.wrapping import two_columns, wrap_output
from manyheads.cli.parsing import OptionalInt, OptionalPath, Store, Switch, existing
from manyheads.errors import FileRefused, ManyheadsError, UsageError


@dataclass(frozen=True)
class List:
    """List the runs in a store with their units and verdicts, unfinished and damaged ones included."""

    store: Store = Path("runs")  # Root folder of the store.
    json: Switch = False  # Print JSON instead of a table.

    def run(self) -> int:
        """Print one line a run; nothing is changed."""
        from manyheads.study.store.run_store import find_paths

        rows = [_describe(path) for path in find_paths(existing(self.store))]
        if self.json:
            print(json.dumps(rows, indent=1))
            return 0
        shown = []
        for row in rows:
            units = f"{row['units']:>4} unit{'s' if row['units'] != 1 else ' '}"
            shown.append((printable(row["run"]), f"{units}   {printable(row['state'])}"))
        print(two_columns(shown))
        return 0


@dataclass(frozen=True)
class Clean:
    """Remove leftovers of interrupted processes; with --unfinished or --superseded also whole runs."""

    store: Store = Path("runs")  # Root folder of the store.
    unfinished: Switch = False  # Remove unfinished runs.
    superseded: Switch = False  # Remove runs of an older revision of their study.
    dry_run: Switch = False  # Print what would be removed; remove nothing.

    def run(self) -> int:
        """Remove and print what was removed."""
        from manyheads.study.registry import STUDIES, load

        leftovers = removed = 0

        def superseded(header: dict[str, Any]) -> bool:
            return header["study"] in STUDIES and load(header["study"]).revision > header["revision"]

        def clean(run: Any) -> None:
            nonlocal leftovers, removed
            leftovers += len(run.leftovers()) if self.dry_run else run.sweep()
            if (self.unfinished and run.summary() is None) or (self.superseded and superseded(run.header)):
                if not self.dry_run:
                    run.remove()
                removed += 1
                print(f"{'would remove' if self.dry_run else 'removed'} {printable(run.path)}")

        refused = _for_each_run(_no_linked_run(self.store), clean)
        done = "would be removed" if self.dry_run else "removed"
        print(wrap_output(f"{leftovers} leftovers of interrupted writes and {removed} runs {done}"))
        return refused


@dataclass(frozen=True)
class Status:
    """Show what each run has stored, what is claimed and missing in each cell, who works on it, and what failed."""

    store: Store = Path("runs")  # Root folder of the store.
    replicates: OptionalInt = None  # Replicates that are asked for; those of the cell that has most, if absent.
    json: Switch = False  # Print JSON instead of text.

    def run(self) -> int:
        """Print what is known; nothing is changed."""
        from manyheads.study.store.repair import describe, status

        found: list[dict[str, object]] = []
        refused = _for_each_run(existing(self.store), lambda run: found.append(status(run, self.replicates)))
        print(json.dumps(found, indent=1) if self.json else wrap_output("\n\n".join(map(describe, found))))
        return refused


@dataclass(frozen=True)
class Compact:
    """Move all units of each run into one table, as 'manyheads study run' does when a run is finished."""

    store: Store = Path("runs")  # Root folder of the store.

    def run(self) -> int:
        """Compact and print one line a run, refused ones included."""
        store = _no_linked_run(self.store)
        return _for_each_run(store, lambda run: print(f"{printable(run.path)}: {run.compact()} units"))


@dataclass(frozen=True)
class Export:
    """Write the tree of a finished run as a Zarr v3 folder or a netCDF file."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]  # The run's own folder.
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT.zarr|OUT.nc")]
    """What to write; it must not exist."""

    def run(self) -> int:
        """Write it and print where."""
        from manyheads.study.execution.export import export

        export(existing(self.path), self.out)
        print(self.out)
        return 0


@dataclass(frozen=True)
class Repair:
    """Copy the good units of damaged files to a new one; the damaged files are renamed to NAME.damaged."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]  # The run's own folder.

    def run(self) -> int:
        """Repair and print for each damaged file what was kept and what is lost."""
        from manyheads.study.store.repair import repair
        from manyheads.study.store.run_store import RunStore

        found = repair(_no_linked_run(self.path))
        layout = RunStore(self.path).layout
        for file in found:
            print(f"{printable(file.path)}: {file.kept} units kept")
            for unit in file.lost:
                print(f"  lost: {printable(layout.unit(unit))}")
            if file.nameless is None:
                print("  lost: all units, nothing of this table can be read")
            elif file.nameless:
                print(f"  {file.nameless} damaged lines name no unit")
        nothing = f"no file of {printable(self.path)} is damaged"
        print("'manyheads study run' computes what is lost" if found else nothing)
        return 0


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML file with claims, figures, verdicts and citations."""

    store: Store = Path("runs")  # Root folder of a store, or the folder of one run.
    out: OptionalPath = None  # File to write; report.html in the store if absent.
    open: Switch = False  # Open the report in the browser.

    def run(self) -> int:
        """Write the report and print its path."""
        from manyheads.study.reporting.html import report

        print(written := report(existing(self.store), self.out))
        if self.open:
            import webbrowser

            webbrowser.open(written.resolve().as_uri())
        return 0


@dataclass(frozen=True)
class Cite:
    """Print BibTeX for a study, a run or all runs in a store, each source once."""

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = "runs"
    """A study, or a folder with runs."""

    def run(self) -> int:
        """Print the entries."""
        from manyheads.study.registry import STUDIES, load
        from manyheads.study.reporting.citations import cite

        if self.what and Path(self.what).is_dir():
            print(cite(self.what))
        elif self.what in STUDIES or ":" in self.what:
            print(cite(load(self.what)))
        else:
            hint = "'manyheads study list' lists the studies"
            raise UsageError(f"{self.what!r} is neither a folder with runs nor a study; {hint}")
        return 0


def _no_linked_run(store: Path) -> Path:
    """Return the root of a store; a link to one run is refused, since it says nothing of what would be removed."""
    if store.is_symlink() and (store / "run.json").exists():
        remedy = f"runs are removed by their own folder only: give {store.resolve()}"
        raise FileRefused(f"{store} is a symbolic link to a run; {remedy}")
    return existing(store)


def _for_each_run(store: Path, act: Callable[[Any], None]) -> int:
    """Act on every run of a store, print errors on standard error and go on; return the exit status."""
    from manyheads.study.store.disk import trusting_nothing
    from manyheads.study.store.run_store import RunStore, find_paths

    refused = 0
    for path in find_paths(store):
        try:
            with trusting_nothing(path, "move it away", but=(ManyheadsError, OSError)):
                act(RunStore(path))
        except (ManyheadsError, OSError) as error:
            print(f"manyheads: {printable(str(error))}", file=sys.stderr)
            refused = 3
    return refused


def _describe(path: Path) -> dict[str, str | int]:
    """Return a row: the run, its number of units, and its state; a damaged run does not stop the list."""
    from manyheads.study.store.disk import trusting_nothing
    from manyheads.study.store.run_store import RunStore, StoreDamaged
    from manyheads.study.verdicts import tally

    count = 0
    try:
        with trusting_nothing(path, "'manyheads runs repair' keeps what is good", but=FileRefused):
            run = RunStore(path)
            count = len(run.numbers())
            run.verify()
            summary = run.summary()
        state = "unfinished" if summary is None else tally(each.outcome for each in summary.verdicts) or "no claim"
    except StoreDamaged as damage:
        state = f"damaged: {damage}"
    except FileRefused as refusal:
        state = f"refused: {refusal}"
    return {"run": str(path), "units": count, "state": state}
