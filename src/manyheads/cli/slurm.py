"""`manyheads study submit`: run a study as an array of Slurm jobs, whose tasks claim the missing units of a run.

The scheduler is asked to start tasks and for nothing else: which units are missing, claimed or failed is read from the
store. A task that is killed, requeued or submitted twice costs no more than the unit at hand.
"""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from manyheads._overview import printable
from manyheads.cli.flags import check_flags, flag
from manyheads.cli.parsing import Switch
from manyheads.cli.study import parse_study
from manyheads.errors import ManyheadsError, UsageError
from manyheads.study.base import Study
from manyheads.study.store.disk import room_on_disk

MOST_TASKS = 100_000  # Slurm itself allows some thousand: MaxArraySize
USAGE = """usage: manyheads study submit NAME --array N [flags of the study] [flags of the submission]

Run a study as a Slurm job array: tasks claim the missing units of the run from its store.

NAME is a study as for 'manyheads study run'. Submitting again, after failures or while tasks are at \
work, computes only what is missing. 'manyheads runs status' lists what is stored, claimed and failed; \
'manyheads study run NAME' with the same flags compares when all units are there (--finish submits that)."""

TASK = '"$SLURM_ARRAY_TASK_ID"'
SBATCH_TIMEOUT = 120  # seconds until an sbatch that does not answer is given up


class SubmissionFailed(ManyheadsError, RuntimeError):
    """sbatch is absent, refused a script, or did not answer; the script is kept."""


# Options of sbatch by their full names: abbreviations, and options that replace the script or its output, are refused.
WITH_VALUE = (
    "account acctg-freq bb bbf begin chdir cluster-constraint clusters comment constraint container container-id "
    "core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error "
    "exclude exclusive export extra-node-info gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task "
    "gres gres-flags hint job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu "
    "mem-per-gpu mincpus network nice nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node "
    "ntasks-per-socket open-mode output partition prefer priority profile qos reservation segment signal "
    "sockets-per-node switches thread-spec threads-per-core time time-min tmp tres-bind tres-per-task wckey"
)
ALONE = "contiguous exclusive hold nice no-kill no-requeue overcommit oversubscribe requeue spread-job use-min-nodes"
LETTERS = "AbBcCdDeFGJLmMnNopqStwx"  # of options with a value, which follows at once: -c4
LETTERS_ALONE = "HkOs"


def sbatch_options(text: str) -> list[str]:
    """Split options of sbatch as a shell does.

    UsageError for a word that is no option of sbatch by its full name, or is not allowed, and for --array, which is
    set.
    """
    _refuse_controls("--sbatch", text)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--sbatch {text!r}: {error}; quote it as a shell would") from error
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            known = re.fullmatch(rf"-([{LETTERS}].+|[{LETTERS_ALONE}])", word) is not None
        else:
            known = bool(value) and name in WITH_VALUE.split() if equals else name in ALONE.split()
        if name == "array" or word.startswith("-a"):
            raise UsageError(f"--sbatch {word!r}: the number of tasks is given by --array")
        if not known:
            remedy = "give options of sbatch by their full names, each as one word, such as --partition=cpu or -c4"
            raise UsageError(f"--sbatch {word!r}: unknown or not allowed: {remedy}")
    return words


def _refuse_controls(what: str, text: str, but: str = "") -> None:
    """Refuse characters that are not printable: a line break in them would start another line of the script."""
    if strange := [letter for letter in text if not (letter.isprintable() or letter in but)]:
        raise UsageError(f"{what} {text!r} holds the character {strange[0]!r}: give printable characters only")


def job_script(folder: Path, command: Sequence[str], options: Sequence[str], tasks: int | None, prologue: str) -> str:
    """Return the script of a job: an array of `tasks` that share the units of a run, or a single job for None.

    Tasks write ``<job>_<task>.log`` into the folder, and get their number as ``--offset``. Options of sbatch replace
    those of the same name below; the prologue is lines of shell in front of the command, such as ``module load
    python``.
    """
    from manyheads.study.execution.executors import POOLS

    output = f"{str(folder).replace('%', '%%')}/{'%j' if tasks is None else '%A_%a'}.log"
    own = ["--requeue", "--open-mode=append", "--cpus-per-task=1", f"--output={output}"]
    for what, text in (("the folder", str(folder)), *(("the argument", word) for word in command)):
        _refuse_controls(what, text)
    _refuse_controls("--prologue", prologue, but="\n\t")
    given = {word.partition("=")[0] for word in options}
    chosen = [word for word in own if word.partition("=")[0] not in given] + list(options)
    if tasks is not None:
        chosen.insert(0, f"--array=0-{tasks - 1}")
    threads = " ".join(f"{name}=${{SLURM_CPUS_PER_TASK:-1}}" for name in POOLS)
    offset = "" if tasks is None else f" --offset {TASK}"
    lines = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(word)}" for word in chosen)]
    # exec: a signal of the scheduler reaches Python, not a shell that waits for it
    lines += [f"export {threads}", *filter(None, [prologue]), f"exec {shlex.join(command)}{offset}"]
    return "\n".join(lines) + "\n"


def write_script(folder: Path, text: str) -> Path:
    """Write a script under a new name in `folder` and return its path."""
    with room_on_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{time.time_ns():020d}.sh"
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    return path


def submit(script: Path, *options: str) -> str:
    """Hand a script to sbatch and return the number of the job; `SubmissionFailed` if that fails."""
    try:
        words = ["sbatch", "--parsable", *options, str(script)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=SBATCH_TIMEOUT, check=False)
    except FileNotFoundError as error:
        remedy = f"the script is kept: submit {script} from a host that has it"
        raise SubmissionFailed(f"sbatch is not on the path; {remedy}") from error
    except subprocess.TimeoutExpired as error:
        remedy = f"'squeue' tells whether it took {script}"
        raise SubmissionFailed(f"sbatch did not answer within {SBATCH_TIMEOUT} s; {remedy}") from error
    job = done.stdout.strip().partition(";")[0]
    if done.returncode or not job.isdigit():
        raise SubmissionFailed(f"sbatch refused {script}: {printable(done.stderr.strip() or done.stdout.strip())}")
    return job


@dataclass(frozen=True)
class Submission:
    """Flags of every submission."""

    array: int = flag(8, "Tasks of the array; each takes units until none is missing", least=1, most=MOST_TASKS)
    sbatch: str = flag("", 'Options of sbatch, as one word: "--time=2:00:00 --partition=cpu"')
    prologue: str = flag("", 'Lines of shell in front of each task: "module load python"')
    finish: Switch = flag(False, "Also submit the comparison, which waits for all tasks")
    replicates: int = flag(8, "Independently trained systems in each cell")
    seed: int = flag(0, "Root of all randomness")
    store: Path = flag(Path("runs"), "Folder of the runs, on a file system that all tasks share")
    full: Switch = flag(False, "Size of the publication")
    dry_run: Switch = flag(False, "Print the script; write and submit nothing")


@dataclass(frozen=True)
class Submit:
    """Run a study as a Slurm job array."""

    study: Study
    options: Submission

    @classmethod
    def parse(cls, arguments: Sequence[str], program: str) -> Self:
        """Read the study's name, its flags and those of the submission."""
        study, options = parse_study(_joined(arguments, "--sbatch"), program, USAGE, Submission())
        check_flags(options)
        return cls(study, options)

    def run(self) -> int:
        """Write the scripts, submit them, and print the numbers of the jobs."""
        from manyheads.study.execution.runner import plan, prepare
        from manyheads.study.store.identity import fingerprint
        from manyheads.study.store.provenance import command_of

        asked = self.options
        store, identity = asked.store.resolve(), fingerprint(self.study, asked.seed)
        folder = store / self.study.name / identity / "slurm"
        compare = [sys.executable, "-m", *shlex.split(command_of(self.study))]
        compare += ["--replicates", str(asked.replicates), "--seed", str(asked.seed), "--store", str(store)]
        compare += ["--workers", "1", "--expect", identity]
        options = sbatch_options(asked.sbatch)
        tasks = job_script(folder, [*compare, "--work-only"], options, asked.array, asked.prologue)
        print(plan(self.study, asked.replicates, asked.seed, store))
        if asked.dry_run:
            print(f"\n{tasks}", end="")
            return 0
        prepare(self.study, asked.replicates, asked.seed, store)
        job = submit(write_script(folder, tasks))
        print(f"job {job}: {asked.array} tasks, output in {folder}")
        if asked.finish:
            last = write_script(folder, job_script(folder, compare, options, None, asked.prologue))
            print(f"job {submit(last, f'--dependency=afterany:{job}')}: the comparison, when they have ended")
        print(f"'manyheads runs status {folder.parent}' lists what is stored, claimed and failed")
        return 0


def _joined(arguments: Sequence[str], flag: str) -> list[str]:
    """Write a flag and its value as one word: a value that begins with '-' would be taken for another flag."""
    words = list(arguments)
    if flag in words[:-1]:
        place = words.index(flag)
        words[place : place + 2] = [f"{flag}={words[place + 1]}"]
    return words
