"""CPU time of commands that only say something, in processes of their own, as a Markdown table.

Beside the commands: an interpreter that does nothing, and the help of a study computed from its module, as it is where
no description is kept. Repeats are interleaved; a first round that fills the caches of the file system is left out.

    make bench NAME=command_line
"""

import os
import resource
import statistics
import subprocess
import sys

from _shared import ONE_THREAD, ratio_of, versions_of

REPEATS = 7
STUDY = "limits/infinite-heads"
START = "import sys; from manyheads.cli import main; main(sys.argv[1:])"
COMPUTED = f"import manyheads.cli.study as study; study.kept_description = lambda name: None; {START}"
COMMANDS = {
    "an interpreter alone": ("pass",),
    "manyheads --help": (START, "--help"),
    "manyheads study list": (START, "study", "list"),
    f"manyheads study show {STUDY}": (START, "study", "show", STUDY),
    f"manyheads study run {STUDY} --help": (START, "study", "run", STUDY, "--help"),
    "the same, from the study's module": (COMPUTED, "study", "run", STUDY, "--help"),
}


def cpu_seconds(words):
    """Return the CPU seconds of a process, user and system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", *words], env=os.environ | ONE_THREAD, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main():
    rounds = [{name: cpu_seconds(words) for name, words in COMMANDS.items()} for _ in range(REPEATS + 1)][1:]
    times = {name: [each[name] for each in rounds] for name in COMMANDS}
    *_, slowest = times.values()
    print(f"{versions_of('manyheads', 'jax', 'tyro')}; {REPEATS} repeats\n")
    print("| command | CPU s, median (range) | times faster than from the module |\n|---|---|---|")
    for name, taken in times.items():
        print(
            f"| {name} | {statistics.median(taken):.2f} ({min(taken):.2f} to {max(taken):.2f}) "
            f"| {ratio_of(slowest, taken)} |"
        )


if __name__ == "__main__":
    main()
