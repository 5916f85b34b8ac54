"""The command line: one verb a file, imported when it is typed; nothing heavy before it is needed.

Exit status: 0 done, verdicts written; 1 a check failed (`--strict`); 2 wrong use; 3 failed; 130 interrupted.
"""

from __future__ import annotations

import difflib
import importlib
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manyheads.cli.interrupts import heeded_interrupts

DONE, CHECK_FAILED, WRONG_USE, FAILED, INTERRUPTED = 0, 1, 2, 3, 130

LIBRARIES = ("jax", "equinox", "numpy", "scipy", "xarray", "zarr", "numba", "torch", "transformers", "distributed")


class Command(NamedTuple):
    """Where a command's dataclass is (`parse` makes it, `run` does the work) and what it answers."""

    place: str
    answers: str


COMMANDS: dict[tuple[str, ...], Command] = {
    ("demo",): Command("manyheads.cli.demo:Demo", "train a small transformer on real text and see all of this on it"),
    ("study", "list"): Command("manyheads.cli.study:List", "which claims can be tested, one line each"),
    ("study", "show"): Command("manyheads.cli.study:Show", "one study: claim, source, flags, size"),
    ("study", "run"): Command(
        "manyheads.cli.study:Run", "does this theorem describe a network that is really trained?"
    ),
    ("runs", "list"): Command("manyheads.cli.runs:List", "what the store holds, and what is unfinished or damaged"),
    ("runs", "clean"): Command("manyheads.cli.runs:Clean", "remove what killed processes left behind"),
    ("report",): Command("manyheads.cli.report:Report", "write one HTML file over the runs in a store"),
    ("cite",): Command("manyheads.cli.cite:Cite", "BibTeX for exactly what a study or a store rests on"),
    ("count",): Command("manyheads.cli.count:Count", "how many FLOPs and bytes, exactly, under which convention?"),
    ("extract",): Command(
        "manyheads.cli.extract:Extract", "which weights does an attention layer have that only answers questions?"
    ),
    ("scale",): Command(
        "manyheads.cli.scale:Scale", "which init, rate and epsilon does every weight need at another shape?"
    ),
    ("scale", "audit"): Command(
        "manyheads.cli.audit:Audit", "has every parameter of a model the numbers that it needs?"
    ),
    ("scale", "check"): Command("manyheads.cli.checks:Check", "does it scale? small transformers are trained and tell"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with heeded_interrupts():
            status = _dispatch(words)
        sys.stdout.flush()  # here, where a reader that went away or a full disk is still an error we can tell
        return status
    except KeyboardInterrupt as interrupt:
        kept = "finished units are kept; run the same command again to go on"
        _complain(f"interrupted: {str(interrupt) or kept}")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away: no error of ours, and nothing left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        foreseen = _status_of(error)
        if foreseen is None or os.environ.get("MANYHEADS_TRACEBACK"):
            import traceback

            traceback.print_exc()
        _complain(_message_of(error))
        return FAILED if foreseen is None else foreseen


def _dispatch(words: list[str]) -> int:
    if words in (["--version"], ["-V"]):
        print(_versions())
        return DONE
    if not words or words[0] in ("--help", "-h"):
        print(_help(()))
        return DONE if words else WRONG_USE
    group = (words[0],)
    known = {name[:2] for name in COMMANDS if name[:1] == group and len(name) > 1}
    # `scale audit` before `scale`, which takes flags alone: another word after it is a mistyped one of its group.
    for name in (tuple(words[:2]), group):
        if name in COMMANDS and not (known and name == group and len(words) > 1 and words[1][:1] != "-"):
            return _run(name, words[len(name) :])
    if known and (len(words) == 1 or words[1] in ("--help", "-h")):
        print(_help(group))
        return DONE if len(words) > 1 else WRONG_USE
    typed, options = (words[1], [name[1] for name in known]) if known else (words[0], [name[0] for name in COMMANDS])
    near = difflib.get_close_matches(typed, sorted(set(options)), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(dict.fromkeys(options))}"
    _complain(f"{' '.join(['manyheads', *group] if known else ['manyheads'])} has no command {typed!r}; {hint}")
    return WRONG_USE


def _run(name: tuple[str, ...], rest: list[str]) -> int:
    module, _, attribute = COMMANDS[name].place.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    parsed = _parse(command, rest, f"manyheads {' '.join(name)}")
    if parsed is None:
        return DONE
    _share_compiled_programs()
    return int(parsed.run())


def _parse(command: Any, rest: list[str], program: str) -> Any:
    """Return the command with its flags; None when help was asked for and has been printed."""
    try:
        if hasattr(command, "parse"):
            return command.parse(rest, program)
        from manyheads.cli.parsing import parse_command

        return parse_command(command, rest, program)
    except SystemExit as leaving:
        if leaving.code in (0, None):
            return None
        raise


def _versions() -> str:
    """Return the version of manyheads and of the libraries that its numbers depend on, as a bug report needs them."""
    from importlib.metadata import PackageNotFoundError, version

    import manyheads

    lines = [f"manyheads {manyheads.__version__}", f"python {platform.python_version()}"]
    for library in LIBRARIES:
        try:
            lines.append(f"{library} {version(library)}")
        except PackageNotFoundError:  # an optional one
            lines.append(f"{library} is not installed")
    return "\n".join(lines)


def _help(group: tuple[str, ...]) -> str:
    """Return the table of commands, of all or of one group."""
    rows = [(" ".join(name), command.answers) for name, command in COMMANDS.items() if name[: len(group)] == group]
    width = max(len(name) for name, _ in rows)
    lines = "\n".join(f"  {name:<{width}}   {answers}" for name, answers in rows)
    return (
        f"usage: manyheads {' '.join([*group, 'COMMAND' if group else 'VERB'])} [--help] ...\n\n"
        "The theory of multi-head attention, made runnable: every theorem beside a really trained network.\n\n"
        f"{lines}\n\n'manyheads {' '.join([*group, rows[0][0].split()[-1]])} --help' shows the flags of one.\n"
        "MANYHEADS_TRACEBACK=1 in the environment shows where an error came from."
    )


def _share_compiled_programs() -> None:
    """Let JAX keep compiled programs in the user's cache folder, for this process and those it starts."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "manyheads" / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a home that cannot be written: everything works, only compiling takes longer
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def _status_of(error: Exception) -> int | None:
    """Return the exit status that an error stands for; None for one that nobody foresaw."""
    from manyheads.errors import ExtraMissing, ManyheadsError, UsageError

    if isinstance(error, UsageError | ExtraMissing):
        return WRONG_USE
    return FAILED if isinstance(error, ManyheadsError | OSError) else None


def _message_of(error: Exception) -> str:
    """Return what an error says to people; the number of a system error tells them nothing."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _complain(text: str) -> None:
    """Say it on standard error, in one line whatever the message holds."""
    from manyheads.study.store.disk import printable

    print(f"manyheads: {printable(' '.join(text.split()))}", file=sys.stderr)
