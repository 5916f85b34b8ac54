"""`manyheads study submit`: run a study as an array of Slurm jobs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from manyheads.cli.flags import check_flags, flag
from manyheads.cli.parsing import Switch
from manyheads.cli.study import parse_study
from manyheads.study.base import Study

MOST_TASKS = 100_000  # Slurm itself allows some thousand: MaxArraySize
USAGE = """usage: manyheads study submit NAME --array N [flags of the study] [flags of the submission]

Run a study as a Slurm job array: tasks claim the missing units of the run from its store.

NAME is a study as for 'manyheads study run'. Submitting again, after failures or while tasks are at \
work, computes only what is missing. 'manyheads runs status' lists what is stored, claimed and failed; \
'manyheads study run NAME' with the same flags compares when all units are there (--finish submits that)."""


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
        from manyheads.cli.slurm.jobs import job_script, sbatch_options, submit, write_script
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
