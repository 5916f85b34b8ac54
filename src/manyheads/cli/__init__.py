"""Command line: one command a file, imported when it is typed.

Exit status: 0 done; 1 a check failed (`--strict`); 2 wrong use; 3 failed; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import gc
import importlib
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NamedTuple

AGAIN = 0.02  # seconds until an interrupt that came during a collection is tried again
DONE, CHECK_FAILED, WRONG_USE, FAILED, INTERRUPTED = 0, 1, 2, 3, 130

ABOUT = (
    "Theories of multi-head attention as code: predictions beside trained networks, exact costs, extraction of "
    "weights, and scaling of hyperparameters."
)
MORE = (
    "'manyheads --completion bash' (zsh, fish) prints a script that completes words.",
    "In the environment NO_COLOR=1 switches colours off, and MANYHEADS_TRACEBACK=1 adds the traceback of an error.",
)
LIBRARIES = ("jax", "equinox", "numpy", "scipy", "xarray", "zarr", "numba", "torch", "transformers", "distributed")


class Command(NamedTuple):
    """Module and name of a command's dataclass, one line on what it does, and examples."""

    place: str
    summary: str
    examples: tuple[str, ...]


_TABLE = """\
demo = demo:Demo = train a small transformer on text, test every theory on it
    manyheads demo
    manyheads demo --text novel.txt --out demo-novel --replicates 8
study list = study:List = list the studies with their claims
    manyheads study list
    manyheads study list joma
    manyheads study list 'limits/infinite*'
study show = study:Show = show the claim, source, flags and size of a study
    manyheads study show joma/rebound
study run = study:Run = compare a theory's prediction with trained networks
    manyheads study run attention/costs --width 16 --replicates 2
    manyheads study run attention/costs --full --dry-run
study submit = slurm:Submit = run a study as a Slurm job array
    manyheads study submit joma/rebound --array 100 --finish --dry-run
    manyheads study submit joma/rebound --sbatch --time=2:00:00
runs list = runs:List = list stored runs, with unfinished and damaged ones
    manyheads runs list
    manyheads runs list other-store --json
runs clean = runs:Clean = remove leftovers of interrupted processes
    manyheads runs clean --unfinished --dry-run
runs status = runs:Status = show what is stored, claimed, missing and failed
    manyheads runs status --json
runs compact = runs:Compact = move the units of each run into one table
    manyheads runs compact
runs export = runs:Export = write a finished run as a Zarr folder or a netCDF file
    manyheads runs export runs/joma/clouds/0a1b2c3d clouds.zarr
runs repair = runs:Repair = keep the good units of damaged files
    manyheads runs repair runs/joma/clouds/0a1b2c3d
report = runs:Report = write one HTML file over stored runs
    manyheads report --open
    manyheads report runs/joma --out joma.html
cite = runs:Cite = print BibTeX for the sources of a study or of stored runs
    manyheads cite joma/rebound
    manyheads cite runs
count = count:Count = count FLOPs and bytes of a PyTorch model or a JAX function
    manyheads count --layers 12 --width 768 --heads 12 --vocabulary 50257
    manyheads count config.json --length 4096 --training --compare
    manyheads count package.module:function --shapes 4x128x64:bfloat16 8:int32
    manyheads count package.module:make --training --meta
curves judge = curves:Judge = judge curves of attention entropy and rank beside the loss
    manyheads curves judge run1.csv run2.csv
    manyheads curves judge probe --losses run/checkpoint-500/trainer_state.json
probe attention = probe.attention:Attention = measure attention and rank over a series of checkpoints
    manyheads probe attention run/checkpoint-* --tokens valid.txt --store probe
    manyheads probe attention run/step* --tokens ids.npy --rows 64
probe weights = probe.checkpoints:Weights = measure rank and coherence of weights in checkpoints
    manyheads probe weights run/step*
probe verify = probe.checkpoints:Verify = check whether a series of checkpoints is what it says
    manyheads probe verify run/step*
probe health = probe.attention:Health = name heads and steps at which a training broke
    manyheads probe health recording
    manyheads probe health recording --strict
extract = extract:Extract = recover the weights of a black-box attention layer
    manyheads extract pythia-70m --layer 3 --output layer3.safetensors
    manyheads extract package.module:function --dim 16 --budget 10_000
scale = scale.scaling_table:Scale = scale init, learning rate and epsilon to another shape
    manyheads scale --base 64,4,4 --to 64,12,12 --learning-rate 3e-3
    manyheads scale --base 64,4,4 --to model --learning-rate 3e-3 --snippet torch
scale audit = scale.audit:Audit = check the hyperparameters of the weights of a model
    manyheads scale audit train:build --base 64,4,4 --learning-rate 3e-3 --strict
scale roles = scale.roles:Roles = infer the roles of a model's parameters from its builder
    manyheads scale roles train:build --base 64,4,4
    manyheads scale roles train:build --base 64,4,4 --write roles.json
scale preflight = scale.preflight:Preflight = train your own model at several shapes and say what grows
    manyheads scale preflight train:make --base 64,4,4 --axes heads
    manyheads scale preflight train:make --base 64,4,4 --transfer --strict
scale check = scale.check:Check = test a parametrization by training small models
    manyheads scale check --axis heads --seeds 4
    manyheads scale check --axis depth --transfer --out checked
"""  # name = module and class below this package = summary, and examples


def _read(row: str) -> tuple[tuple[str, ...], Command]:
    """Return a command of the table by its name."""
    head, *examples = row.splitlines()
    name, place, summary = head.split(" = ")
    return tuple(name.split()), Command(f"manyheads.cli.{place}", summary, tuple(map(str.strip, examples)))


COMMANDS: dict[tuple[str, ...], Command] = dict(map(_read, re.split(r"\n(?=\S)", _TABLE.strip())))

# Of older versions: groups, and flags with their values.
MOVED = {"joma": "curves judge"}
MOVED_FLAGS = {"--scheme limits": "--scheme completep"}
# Group → the command whose arguments may follow at once: `manyheads probe CHECKPOINT ... --tokens FILE`.
DEFAULTS = {"probe": ("probe", "attention")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with heeded_interrupts():
            status = _dispatch(words)
        sys.stdout.flush()  # here, where a closed pipe or a full disk is still reported
        return status
    except KeyboardInterrupt as interrupt:
        kept = "finished units are kept; run the same command again to go on"
        _complain(f"interrupted: {str(interrupt) or kept}")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as raised:
        from manyheads._extras import name_extra

        error = name_extra(raised, "this command")
        known = _status_of(error)
        if known is None or os.environ.get("MANYHEADS_TRACEBACK"):
            import traceback

            traceback.print_exc()
        _complain(_message_of(error, known is None))
        return FAILED if known is None else known


@contextlib.contextmanager
def heeded_interrupts() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on Ctrl-C inside the block, a moment later if it would be dropped.

    Python reports and drops what is raised during garbage collection, which calls callbacks (JAX registers one) and
    finalizers; during imports one interrupt in ten was lost so. Does nothing outside the main thread, or if another
    handler of Ctrl-C is set.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    collecting = False

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal collecting
        collecting = phase == "start"

    def interrupt(number: int, frame: FrameType | None) -> None:
        if collecting or _is_callback(frame):
            later = threading.Timer(AGAIN, os.kill, (os.getpid(), number))
            later.daemon = True
            later.start()
        else:
            raise KeyboardInterrupt

    gc.callbacks.insert(0, watch)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.callbacks.remove(watch)


def _is_callback(frame: FrameType | None) -> bool:
    """Tell whether a callback of the collector is running: some run before `watch` is told of its start."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False


def _dispatch(words: list[str]) -> int:
    if words in (["--version"], ["-V"]):
        print(_versions())
        return DONE
    if words[:1] in (["--completion"], ["--complete"]):
        from manyheads.cli.help.completion import candidates, completion_script

        script = words[0] == "--completion"
        print(completion_script(" ".join(words[1:])) if script else "\n".join(candidates(words[1:], COMMANDS)))
        return DONE
    if not words or words[0] in ("--help", "-h"):
        print(_help(()))
        return DONE if words else WRONG_USE
    if old := next((flag for flag in MOVED_FLAGS if flag in " ".join(words).replace("=", " ")), None):
        _complain(f"{old} is called {MOVED_FLAGS[old]} now")
        return WRONG_USE
    group = (words[0],)
    known = {name[:2] for name in COMMANDS if name[:1] == group and len(name) > 1}
    # `scale audit` before `scale`, which takes flags alone: another word after it is a mistyped one of its group.
    for name in (tuple(words[:2]), group):
        if name in COMMANDS and not (known and name == group and len(words) > 1 and words[1][:1] != "-"):
            return _run(name, words[len(name) :])
    second = words[1] if len(words) > 1 else ""  # a flag or a path is no mistyped command
    flag = second[:1] == "-" and second not in ("--help", "-h")
    if group[0] in DEFAULTS and (flag or os.sep in second or os.path.exists(second)):
        return _run(DEFAULTS[group[0]], words[1:])
    if known and (len(words) == 1 or words[1] in ("--help", "-h")):
        print(_help(group))
        return DONE if len(words) > 1 else WRONG_USE
    typed, options = (words[1], [name[1] for name in known]) if known else (words[0], [name[0] for name in COMMANDS])
    if group[0] in MOVED:
        _complain(f"'manyheads {group[0]}' moved: it is 'manyheads {MOVED[group[0]]}' now")
        return WRONG_USE
    near = difflib.get_close_matches(typed, sorted(set(options)), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(dict.fromkeys(options))}"
    _complain(f"{' '.join(['manyheads', *group] if known else ['manyheads'])} has no command {typed!r}; {hint}")
    return WRONG_USE


def _run(name: tuple[str, ...], rest: list[str]) -> int:
    module, _, attribute = COMMANDS[name].place.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    try:
        if not (parse := getattr(command, "parse", None)):
            from manyheads.cli.parsing import parse_command

            parse = functools.partial(parse_command, command)
        parsed = parse(rest, f"manyheads {' '.join(name)}")
    except SystemExit as leaving:
        if leaving.code not in (0, None):
            raise
        from manyheads.cli.help.wrapping import command_line  # help was requested and has been printed

        print("\n".join(["", "examples:", *map(command_line, COMMANDS[name].examples)]))
        return DONE
    _share_compiled_programs()
    return int(parsed.run())


def _versions() -> str:
    """Return the versions of manyheads and of the libraries that its results depend on."""
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
    from manyheads.cli.help.wrapping import two_columns, wrap

    rows = [(" ".join(name), command.summary) for name, command in COMMANDS.items() if name[: len(group)] == group]
    usage = wrap(f"usage: manyheads {' '.join([*group, 'COMMAND'])} [--help] ...", "  ", "")
    first = f"'manyheads {rows[0][0]} --help' shows the flags of a command."
    return "\n".join([usage, "", wrap(ABOUT), "", two_columns(rows, "  "), "", *map(wrap, (first, *MORE))])


def _share_compiled_programs() -> None:
    """Let JAX keep compiled programs in the user's cache folder, for this process and those it starts."""
    from manyheads.cli.parsing import cache_folder

    folder = cache_folder() / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # no cache: compiling takes longer
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def _status_of(error: Exception) -> int | None:
    """Return the exit status of an error; None for an unexpected one."""
    from manyheads.errors import ExtraMissing, ManyheadsError, UsageError

    if isinstance(error, UsageError | ExtraMissing):
        return WRONG_USE
    return FAILED if isinstance(error, ManyheadsError | OSError) else None


def _message_of(error: Exception, unexpected: bool) -> str:
    """Return the message of an error: of a system error without its number, of an unexpected one behind its type."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    kind, text = type(error).__name__, str(error)
    return f"{kind}: {text}" if text and unexpected else text or kind


def _complain(text: str) -> None:
    """Print one line on standard error, and below it the lines of a role map that is proposed."""
    from manyheads._overview import printable

    said, mark, proposed = text.partition("\nroles = {\n")
    lines = f"{mark.strip()}\n{proposed}".splitlines() if mark else []
    print("\n".join([f"manyheads: {printable(' '.join(said.split()))}", *map(printable, lines)]), file=sys.stderr)
