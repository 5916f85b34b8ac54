"""`manyheads study`: list, show and run studies."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Optional, Self, Union

import tyro

from manyheads._overview import printable
from manyheads.cli.flags import Flag, check_flags, flag, flags_of, list_flags, suggest
from manyheads.cli.help.descriptions import default_of, describe, kept_description
from manyheads.cli.help.wrapping import is_watched, two_columns, wrap, wrap_lines, wrap_output
from manyheads.cli.parsing import ABSENT, NUMBERS_READ, OptionalInt, Switch, parse_flags
from manyheads.errors import UsageError
from manyheads.study.registry import STUDIES, load

if TYPE_CHECKING:
    from manyheads.study.base import Study
    from manyheads.study.verdicts import Verdict

TABLE = 100  # columns that a table of verdicts takes
SHOW_USAGE = "usage: manyheads study show NAME\n\nShow the claim, source, flags and size of a study.\n"
RUN_USAGE = """usage: manyheads study run NAME [flags of the study] [flags of the run]

Run a study, or resume an interrupted run, and print its verdicts.
"""
NAMES = """
NAME is a registered study ('manyheads study list'), package.module:Class, or path/to/file.py:Class \
(file.py alone if it defines one study)."""

_PATTERNS = tyro.conf.arg(metavar="[PATTERN ...]", help_behavior_hint="")
Patterns = Annotated[Union[None, tuple[str, ...]], tyro.conf.Positional, _PATTERNS]


@dataclass(frozen=True)
class List:
    """List the registered studies with their claims, by name; of some if PATTERNS are given.

    A pattern is a wing (joma), a part of a name or of a claim (entropy), or a name with * and ?.
    """

    patterns: Patterns = None  # Studies that match any of them.
    json: Switch = False  # Print JSON instead of a table.

    def run(self) -> int:
        """Print the table.

        Raises `UsageError`: no study matches a pattern.
        """
        patterns = self.patterns or ("*",)
        found = {name: STUDIES[name] for name in sorted(STUDIES) if any(_matches(name, each) for each in patterns)}
        for pattern in (each for each in patterns if not any(_matches(name, each) for name in found)):
            hint = suggest(pattern, [*STUDIES, *(name.partition("/")[0] for name in STUDIES)])
            hint = hint or "; expected a wing, a part of a name or of a claim, or a name with * and ?"
            raise UsageError(f"no study matches {pattern!r}{hint}")
        if self.json:
            print(json.dumps([{"study": name, "claim": entry.claim} for name, entry in found.items()], indent=1))
            return 0
        print(two_columns([(name, entry.claim) for name, entry in found.items()]))
        return 0


def _matches(name: str, pattern: str) -> bool:
    if set(pattern) & set("*?["):
        return fnmatch(name, pattern)
    return bool(pattern) and pattern.lower() in f"{name} {STUDIES[name].claim}".lower()


@dataclass(frozen=True)
class Show:
    """Show the claim, source, flags, size and claims of a study."""

    name: str  # A registered study, package.module:Class, or path/to/file.py:Class.

    @classmethod
    def parse(cls, arguments: Sequence[str], program: str) -> Self:
        """Take the study's name as a plain word."""
        return cls(_named(arguments, program, wrap_lines(SHOW_USAGE + NAMES)))

    def run(self) -> int:
        """Print the description."""
        kept = kept_description(self.name)
        claims = [f"  * {claim}" for claim in kept.claims] if kept else []
        listed = ["", "claims, worded as at the smallest size", "", *claims] if claims else []
        print(wrap_lines("\n".join([kept.text if kept else describe(load(self.name)), *listed])))
        return 0


@dataclass(frozen=True)
class Options:
    """Flags of every run."""

    replicates: int = flag(8, "Independently trained systems in each cell")
    seed: int = flag(0, "Root of all randomness")
    store: Path = flag(Path("runs"), "Folder of the runs; an unfinished run is resumed")
    workers: OptionalInt = flag(None, "Processes; 1 computes in this one; one for each processor if absent")
    until_decided: Switch = flag(
        False, "Add replicates until all claims are decided. Intervals are valid at any number of replicates"
    )
    most_replicates: OptionalInt = flag(None, "With --until-decided, stop at so many. 8 times --replicates if absent")
    executor: Annotated[Optional[str], ABSENT] = flag(None, "Cluster of dask: dask:tcp://HOST:PORT")
    full: Switch = flag(False, "Size of the publication instead of minutes on two cores")
    strict: Switch = flag(
        False, "Exit with 1 if an outcome differs from the expected one; outside the defaults few claims have one"
    )
    json: Switch = flag(False, "Print verdicts as JSON")
    dry_run: Switch = flag(False, "Print what would be computed and where; compute and write nothing")
    same_versions: Switch = flag(
        False, "Refuse to go on with a run whose units were computed under other versions of what the numbers depend on"
    )
    work_only: Switch = flag(
        False, "Compute missing units that nobody has claimed, and compare nothing; SIGTERM leaves after those at hand"
    )
    offset: int = flag(0, least=0, about="With --work-only: the number of this process among those that start together")
    expect: Annotated[Optional[str], ABSENT] = flag(
        None, "Refuse to run if the run has another name in the store, because a setting or an input differs"
    )


@dataclass(frozen=True)
class Run:
    """Run a study, or resume an interrupted run, and print its verdicts."""

    study: Study
    options: Options

    @classmethod
    def parse(cls, arguments: Sequence[str], program: str) -> Self:
        """Read the study's name first, then its own flags together with those of every run."""
        own_help = "'manyheads study run NAME --help' shows the study's own flags as well."
        return cls(*parse_study(arguments, program, f"{RUN_USAGE}{NAMES}\n{own_help}", Options()))

    def run(self) -> int:
        """Run the study and print its verdicts."""
        from manyheads.study.execution.executors import open_executor
        from manyheads.study.execution.runner import finish, last_replicates, plan, require_same_versions
        from manyheads.study.store.identity import fingerprint

        options = self.options
        check_flags(options)
        if options.offset and not options.work_only:
            raise UsageError(f"--offset {options.offset}: only processes with --work-only start together")
        if options.until_decided and options.work_only:
            raise UsageError("--until-decided --work-only: a process that only works decides nothing; leave one out")
        most = last_replicates(options.replicates, options.until_decided, options.most_replicates)
        if options.expect not in (None, found := fingerprint(self.study, options.seed)):
            why = f"this run is {found} here; a flag, an input or the study differs"
            raise UsageError(f"--expect {options.expect}: {why}")
        if options.same_versions:
            require_same_versions(self.study, options.seed, options.store)
        if options.dry_run:
            print(wrap_output(plan(self.study, options.replicates, options.seed, options.store)))
            return 0
        if options.work_only:
            return self._contribute()
        with open_executor(options.executor, options.workers) as executor:
            given = (self.study, options.replicates, options.seed, executor, options.store)
            done = finish(*given, progress=True, most=most)
        path = str(done.store.path)
        if options.json:
            verdicts = [verdict.to_json() for verdict in done.verdicts]
            print(json.dumps({"study": self.study.name, "store": path, "verdicts": verdicts}, indent=1))
        else:
            print_verdicts(done.verdicts)
            print(wrap_output(f"\nstored in {path}; 'manyheads report {options.store}' writes a report"))
        return 1 if options.strict and not all(verdict.as_expected for verdict in done.verdicts) else 0

    def _contribute(self) -> int:
        """Compute units until none is missing or free, or until SIGTERM."""
        from manyheads.study.execution.executors import open_executor
        from manyheads.study.execution.runner import contribute

        asked, leaving = self.options, threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: leaving.set())
        with open_executor(asked.executor, asked.workers) as executor:
            given = (self.study, asked.replicates, asked.seed, executor, asked.store)
            missing = contribute(*given, offset=asked.offset, leaving=leaving.is_set, progress=True)
        print(f"{missing} units are missing or claimed by others" if missing else "all units are stored")
        return 0


def parse_study(arguments: Sequence[str], program: str, usage: str, options: Any) -> tuple[Study, Any]:
    """Read the name of a study first, then its own flags together with those of `options`, which every study takes."""
    every = flags_of(type(options), options)
    title = (type(options).__doc__ or "").partition(".")[0].lower()  # flags of every run
    listed = f"{title}:\n{list_flags(every)}"
    name = _named(arguments[:1], program, f"{wrap_lines(usage)}\n\n{listed}")
    wanted = {"-h", "--help"} & set(arguments[1:])
    if wanted and "--full" not in arguments and (kept := kept_description(name)):
        _print_help(f"{program} {name}", name, STUDIES[name].claim, kept.flags, listed)
    kind = load(name)
    own, common = ({field.name for field in dataclasses.fields(each)} for each in (kind, type(options)))
    if taken := own & common:
        raise UsageError(f"{name}: field {min(taken)!r} is one of the {title}; rename the field")
    default = default_of(kind, "--full" in arguments)
    flags_of_study = flags_of(kind, default)
    if wanted:
        _print_help(f"{program} {name}", name, kind.claim, flags_of_study, listed)
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    both: list[Any] = [
        ("study", Annotated[kind, tyro.conf.arg(name="")], dataclasses.field(default=default)),
        ("options", Annotated[(type(options), *config)], dataclasses.field(default=options)),
    ]
    flags: Any = dataclasses.make_dataclass("Flags", both, frozen=True)
    names = [flag.name for flag in (*flags_of_study, *every)]
    names += [f"--no-{flag.name[2:]}" for flag in flags_of_study if isinstance(flag.default, bool)]
    parsed = parse_flags(flags, arguments[1:], f"{program} {name}", known=names)
    return parsed.study, parsed.options


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print verdicts on standard output: as a table, or below each other where the terminal is narrow."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from manyheads.study.reporting.html import format_figure

    console = Console(width=None if is_watched() else 160, soft_wrap=False)
    table = Table("claim", "outcome", "figure", "99% interval", "holds within", box=None, padding=(0, 2, 0, 0))
    colours = {"holds": "green", "refuted": "red", "inconclusive": "yellow"}
    for verdict in verdicts:
        note = "" if verdict.as_expected else f" (expected {verdict.expected})"
        if verdict.replicates_needed:
            note = f" (about {verdict.replicates_needed} replicates would decide)"
        note += f" ({printable(verdict.note)})" if verdict.note else ""
        claim, outcome = Text(printable(verdict.claim)), Text(verdict.outcome + note, style=colours[verdict.outcome])
        figure = format_figure(verdict.figure)
        extent, within = (" … ".join(map(format_figure, ends)) for ends in (verdict.interval, verdict.region))
        extent = "exact" if verdict.interval[0] == verdict.interval[1] else extent
        if console.width < TABLE:
            measured = Text(f"measured {figure}, {extent}\nholds within {within}")
            console.print(claim, Padding(outcome, (0, 0, 0, 4)), Padding(measured, (0, 0, 0, 4)))
        else:
            table.add_row(claim, outcome, figure, extent, within)
    if table.rows:
        console.print(table)


def _print_help(program: str, name: str, claim: str, own: Sequence[Flag], every: str) -> NoReturn:
    """Print the flags of a study and of every use of the command, and leave."""
    print(wrap(f"usage: {program} [flags]", "  ", ""))
    print(f"\n{wrap(claim)}\n\nflags of the study:\n{list_flags(own)}\n\n{every}")
    print(f"\n{wrap(f'{chr(39)}manyheads study show {name}{chr(39)} shows the flags in full, source and size.')}")
    print(wrap(NUMBERS_READ))
    raise SystemExit(0)


def _named(arguments: Sequence[str], program: str, usage: str) -> str:
    """Return the study's name, the only plain word; print the usage and leave when help is asked for."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage)
        raise SystemExit(0)
    command = program.removeprefix("manyheads ")
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(f"{command} needs the name of one study first; 'manyheads study list' lists them")
    if len(arguments) > 1:
        raise UsageError(f"{command} takes the name of one study and nothing else: leave out {arguments[1]!r}")
    return arguments[0]
