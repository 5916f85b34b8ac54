"""Flags from dataclasses (tyro): help that fits the terminal, and errors of one line."""

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Optional

import tyro

from manyheads.cli.flags import flags_of, positionals, suggest, without_markup
from manyheads.cli.help.wrapping import wrap_lines
from manyheads.errors import UsageError

# Flags that may be left out are annotated `Annotated[Optional[X], ABSENT]`: then no help ends in "(default: None)".
# Optional[X] and not X | None, and for a tuple Union[None, tuple[X, ...]] with None in front: otherwise tyro checks the
# default with typeguard, which imports asyncio and unittest.mock, a third of the time that a help may take.
ABSENT = tyro.conf.arg(help_behavior_hint="")
Switch = Annotated[bool, ABSENT]  # off unless it is given
OptionalInt = Annotated[Optional[int], ABSENT]
OptionalFloat = Annotated[Optional[float], ABSENT]
OptionalPath = Annotated[Optional[Path], ABSENT]
Builder = Annotated[Optional[str], tyro.conf.arg(metavar="MODULE:BUILD", help_behavior_hint="")]
Store = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[STORE]")]
Target = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET", help_behavior_hint="")]


def parse_command(kind: Any, arguments: Sequence[str], program: str) -> Any:
    """Parse a command: `--flag` without a `--no-flag`, and None is left out, not written."""
    return parse_flags(kind, arguments, program, config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone))


def parse_flags(
    kind: Any,
    arguments: Sequence[str],
    program: str,
    config: Sequence[Any] = (),
    known: Sequence[str] = (),
) -> Any:
    """Parse command-line words into an instance of a dataclass; `known` are its flags where they are not its fields.

    UsageError for words that do not parse, with tyro's message without its frame; SystemExit after a help.
    """
    complaint, screen = io.StringIO(), _Screen()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(screen), NUMBERS:
            return tyro.cli(kind, args=list(arguments), prog=program, config=tuple(config))
    except SystemExit as leaving:
        if leaving.code in (0, None):
            text = screen.getvalue()
            print("\n".join(map(_wrapped, text.splitlines())))
            if re.search(r"\b(INT|FLOAT)\b", text):
                print(f"\n{wrap_lines(NUMBERS_READ)}")
            raise
        text = _first_paragraph(complaint.getvalue())
        if text.startswith("unknown options"):
            known = known or [flag.name for flag in flags_of(kind)]
            strange = [word.partition("=")[0] for word in arguments if word.startswith("--")]
            strange = [word for word in strange if word.replace("_", "-") not in known] or text.split()[2:3]
            alone = strange[0][2:] in positionals(kind)
            hint = f"; {strange[0][2:].upper()} stands without its name" if alone else suggest(strange[0], known)
            text = f"unknown option {strange[0]}{hint}"
        raise UsageError(f"{text}; '{program} --help' shows the flags") from None


class _Screen(io.StringIO):
    """Captured output with the colours and the encoding of standard output."""

    def __init__(self) -> None:
        super().__init__()
        self.stdout = sys.stdout

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read here, never set
        """Encoding of standard output."""
        return self.stdout.encoding

    def isatty(self) -> bool:
        """Whether standard output is a terminal that may be coloured."""
        return self.stdout.isatty() and not os.environ.get("NO_COLOR")


def whole_number(text: str) -> int:
    """Read an integer, also as 1e6 or 2.5e3; a suffix is refused, since 4k may mean 4,000 or 4,096."""
    with contextlib.suppress(ArithmeticError):  # of decimal: no number, or one too large
        found = Decimal(text)
        if abs(found) < LARGEST and found == int(found):
            return int(found)
    return int(text)


def named_path(text: str) -> Path:
    """Read a path; raise a ValueError for an empty text, which `pathlib` takes for the working folder, or a NUL."""
    if not text or "\0" in text:
        raise ValueError(f"{text!r} names no file or folder; '.' is the working folder")
    return Path(text)


NUMBERS_READ = "Numbers: 4096, 4_096 or 4e3. A suffix is refused: 4k may mean 4000 or 4096."
LARGEST = 10**18  # of a number in floating-point notation, whose exponent may be anything
NUMBERS = tyro.constructors.ConstructorRegistry()


@NUMBERS.primitive_rule
def _number_rule(about: Any) -> Any:
    """Tell tyro how integers, other numbers and paths are written."""
    read: Any = {int: whole_number, float: float, Path: named_path}.get(about.type)
    if read is None:
        return None
    kinds = (type(Path()),) if about.type is Path else (int, about.type)
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=about.type.__name__.upper(),
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: type(value) in kinds,
        str_from_instance=lambda value: [str(value)],
    )


def _wrapped(line: str) -> str:
    """Wrap a line of a help text, which tyro wraps inside its frames alone, to the width of the terminal."""
    line = without_markup(line)
    return line if "│" in line or "\x1b" in line else wrap_lines(line)


def _first_paragraph(framed: str) -> str:
    """Return the first paragraph inside tyro's frame as one line."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip(" │╭╮╰╯") for line in framed.splitlines()[1:]]
    paragraph: list[str] = []
    for line in lines:
        if line and not set(line) <= {"─", "-"}:  # in a terminal without Unicode the heading has a rule of its own
            paragraph.append(line)
        elif paragraph:
            break
    return _reworded(" ".join(paragraph)) or "these arguments cannot be read"


EXPECTED = (
    (r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)", r"\1 \2: expected an integer"),
    (r"Error parsing (\S+): could not convert string to float: (.*)", r"\1 \2: expected a number"),
    (r"Error parsing (\S+): (.*) names no file or folder;", r"\1 \2 names no file or folder;"),
    (
        r"Error parsing (.+): no type matching .*PATH.* could be instantiated from \[.*''.*\]\.",
        r"\1 '' names no file or folder; '.' is the working folder",
    ),
    (r"Error parsing (.+): no type matching \{?(.*?)\}? could be instantiated from \[(.*)\]\.", r"\1 \3: expected \2"),
    (r"Missing from .*?: (\S+) (.*)\. \(required\)", r"\1 is missing: \2"),
    (r"Error parsing (\S+): Could not find valid parse for arguments: \[(.*)\]", r"\1 \2: cannot be read"),
    (r"^Unrecognized options", "unknown options"),
    (r"expected FLOAT\b", "expected a number"),
    (r"expected INT\b", "expected an integer"),
    (
        r"('[\d_.]+([kKmMgGtT])i?[bB]?'.*): (cannot be read|expected an integer|expected a number)",
        r"\1: \3; a suffix is refused, since \2 may mean powers of 1000 or of 1024: write digits, or 4e3",
    ),
)
"""Complaints of tyro, and how they read here."""


def _reworded(complaint: str) -> str:
    """Put what was given first; drop the choice 'None' that tyro adds for a flag that may be absent."""

    def choices(found: re.Match[str]) -> str:
        names = re.findall(r"'([^']*)'", found[1])
        names = sorted(set(names) - {"None"}) if "None" in names else names
        return f"; choose one of {', '.join(names)}"

    for pattern, wording in EXPECTED:
        complaint = re.sub(pattern, wording, complaint)
    return re.sub(r"\. Expected one of \((.*)\)\.?$", choices, complaint)


def cache_folder() -> Path:
    """Return the folder of the user's cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manyheads"


def existing(store: Path) -> Path:
    """Return the folder of a store; UsageError if it does not exist."""
    if not store.exists():
        raise UsageError(f"{store}: no such folder; give the one that was passed as --store, or one run's own folder")
    return store


def load_function(target: str) -> Any:
    """Import the function that package.module:function names; UsageError if there is none."""
    module, _, path = target.partition(":")
    # As with `python -m`, modules of the current folder can be named; the folder is removed from the path afterwards.
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{target}: cannot be imported ({error}); expected package.module:function") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise UsageError(f"{target}: {type(found).__name__} cannot be called; expected a function")
    return found
