"""`manyheads study`: list, show and run studies."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, Self

from manyheads.cli.parsing import ABSENT, Switch, parse_flags
from manyheads.errors import UsageError
from manyheads.study.registry import STUDIES, load

if TYPE_CHECKING:
    from manyheads.study.base import Study
    from manyheads.study.verdicts import Verdict

SHOW_USAGE = """usage: manyheads study show NAME

Show the claim, source, flags and size of a study.

NAME is a registered study ('manyheads study list'), package.module:Class, or
path/to/file.py:Class (file.py alone if it defines one study)."""
RUN_USAGE = """usage: manyheads study run NAME [flags of the study] [flags of the run]

Run a study, or resume an interrupted run, and print its verdicts.

NAME is a registered study ('manyheads study list'), package.module:Class, or
path/to/file.py:Class (file.py alone if it defines one study).
'manyheads study run NAME --help' shows the study's own flags as well.

flags of every run:
  --replicates N    independently trained systems in each cell (default 8)
  --seed N          root of all randomness (default 0)
  --store FOLDER    folder of the runs (default runs)
  --workers N       processes; 1 computes in this one (default: one a processor)
  --executor ADDR   dask:tcp://HOST:PORT, a dask cluster (extra 'cluster')
  --full            size of the publication instead of minutes on two cores
  --strict          exit with 1 if an outcome differs from the expected one
  --json            print verdicts as JSON"""


@dataclass(frozen=True)
class List:
    """List the registered studies, one line each."""

    json: Switch = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Print the table."""
        if self.json:
            print(json.dumps([{"study": name, "claim": entry.claim} for name, entry in STUDIES.items()], indent=1))
            return 0
        width = max(map(len, STUDIES))
        for name, entry in STUDIES.items():
            print(f"{name:<{width}}   {entry.claim}")
        return 0


@dataclass(frozen=True)
class Show:
    """Show the claim, source, flags and size of a study."""

    name: str
    """A registered study, package.module:Class, or path/to/file.py:Class."""

    @classmethod
    def parse(cls, arguments: Sequence[str], program: str) -> Self:
        """Take the study's name as a plain word."""
        return cls(_named(arguments, program, SHOW_USAGE))

    def run(self) -> int:
        """Print the description."""
        from manyheads.study.base import configuration
        from manyheads.study.store.identity import plain

        cls = load(self.name)
        study, full = _default(cls), _default(cls, full=True)
        print(f"{study.name}\n\nclaim    {study.claim}\nsource   {study.source}\n")
        for name, value in configuration(study).items():
            paper = plain(getattr(full, name), name)
            extra = "" if paper == plain(value, name) else f"   (--full: {paper})"
            print(f"  --{name.replace('_', '-')} = {plain(value, name)}{extra}")
        print(f"\ncells    {len(study.cells())} (--full: {len(full.cells())})")
        costs = [study.flops(cell) for cell in study.cells()]
        if known := [cost for cost in costs if cost is not None]:
            print(f"cost     {sum(known):.3g} matrix-multiply FLOPs for each replicate of all cells")
        return 0


@dataclass(frozen=True)
class Options:
    """Flags of every run.

    Attributes
    ----------
    replicates
        Independently trained systems in each cell.
    seed
        Root of all randomness.
    store
        Folder of the runs; an unfinished run is resumed.
    workers
        Processes; 1 computes in this one; one for each processor if absent.
    executor
        dask:tcp://HOST:PORT, a dask cluster.
    full
        Size of the publication instead of minutes on two cores.
    strict
        Exit with 1 if an outcome differs from the expected one; outside the defaults few claims have one.
    json
        Print verdicts as JSON.
    """

    replicates: int = 8
    seed: int = 0
    store: Path = Path("runs")
    workers: Annotated[Optional[int], ABSENT] = None
    executor: Annotated[Optional[str], ABSENT] = None
    full: Switch = False
    strict: Switch = False
    json: Switch = False


@contextmanager
def _help_for_every_flag(kind: Any) -> Iterator[str]:
    """Give attributes that share an entry of the docstring one each, as tyro reads it; yield the text before them."""
    original = kind.__doc__
    description, heading, entries = inspect.cleandoc(original or "").partition("\nAttributes\n----------\n")
    lines: list[str] = []
    for name, text in re.findall(r"(?m)^(\S.*)\n((?:(?: .*)?(?:\n|$))*)", entries):
        for one in name.split(", "):
            lines += [one, f"    {name.replace('_', '-')}: {text.strip()}" if ", " in name else f"    {text.strip()}"]
    kind.__doc__ = description + heading + "\n".join(lines)
    try:
        yield description.strip()
    finally:
        kind.__doc__ = original


@dataclass(frozen=True)
class Run:
    """Run a study, or resume an interrupted run, and print its verdicts."""

    study: Study
    options: Options

    @classmethod
    def parse(cls, arguments: Sequence[str], program: str) -> Self:
        """Read the study's name first, then its own flags together with those of every run."""
        name = _named(arguments[:1], program, RUN_USAGE)
        import tyro

        kind = load(name)
        own, common = ({field.name for field in dataclasses.fields(each)} for each in (kind, Options))  # type: ignore[arg-type]
        if taken := own & common:
            raise UsageError(f"{name}: field {min(taken)!r} is a flag of every run; rename the field")
        default = _default(kind, "--full" in arguments)
        flags: Any = dataclasses.make_dataclass(
            "Flags",
            [
                ("study", Annotated[kind, tyro.conf.arg(name="")], dataclasses.field(default=default)),
                (
                    "run",
                    Annotated[Options, tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone],
                    dataclasses.field(default=Options()),
                ),
            ],
            frozen=True,
        )
        with _help_for_every_flag(kind) as description:
            parsed = parse_flags(flags, arguments[1:], f"{program} {name}", description=description)
        return cls(parsed.study, parsed.run)

    def run(self) -> int:
        """Run the study and print its verdicts."""
        from manyheads.study.executors import open_executor
        from manyheads.study.runner import finish

        options = self.options
        with open_executor(options.executor, options.workers) as executor:
            done = finish(self.study, options.replicates, options.seed, executor, options.store, progress=True)
        path = str(done.store.path)
        if options.json:
            verdicts = [verdict.to_json() for verdict in done.verdicts]
            print(json.dumps({"study": self.study.name, "store": path, "verdicts": verdicts}, indent=1))
        else:
            print_verdicts(done.verdicts)
            print(f"\nstored in {path}; 'manyheads report {options.store}' writes a report")
        return 1 if options.strict and not all(verdict.as_expected for verdict in done.verdicts) else 0


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print verdicts as a table on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from manyheads.study.reporting.html import format_figure
    from manyheads.study.store.disk import printable

    table = Table("claim", "outcome", "figure", "99% interval", "holds within", box=None, padding=(0, 2, 0, 0))
    colours = {"holds": "green", "refuted": "red", "inconclusive": "yellow"}
    for verdict in verdicts:
        note = "" if verdict.as_expected else f" (expected {verdict.expected})"
        if verdict.replicates_needed:
            note = f" (about {verdict.replicates_needed} replicates would decide)"
        low, high = verdict.interval
        table.add_row(
            Text(printable(verdict.claim)),
            Text(verdict.outcome + note, style=colours[verdict.outcome]),
            format_figure(verdict.figure),
            "exact" if low == high else f"{format_figure(low)} … {format_figure(high)}",
            f"{format_figure(verdict.target - verdict.tolerance[0])} … "
            f"{format_figure(verdict.target + verdict.tolerance[1])}",
        )
    Console(width=None if sys.stdout.isatty() else 160, soft_wrap=False).print(table)


def _default(kind: type[Study], full: bool = False) -> Study:
    """Return a study with its default configuration, or at full size."""
    try:
        return kind.full() if full else kind()
    except TypeError as error:
        if full and "full" in vars(kind):
            raise
        raise UsageError(
            f"{kind.__name__} cannot be constructed without arguments ({error}): give every field a default"
        ) from error


def _named(arguments: Sequence[str], program: str, usage: str) -> str:
    """Return the study's name, the only plain word; print the usage and leave when help is asked for."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage)
        raise SystemExit(0)
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError(
            f"{program.removeprefix('manyheads ')} needs the name of one study first; 'manyheads study list' lists them"
        )
    return arguments[0]
