"""A stand-in for Slurm: an sbatch that queues scripts, whose tasks tests start, signal and requeue."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import xarray as xr
from tests.study.toys import Walk

SBATCH = """#!/bin/bash
# sbatch --parsable [--dependency=KIND:JOB] SCRIPT: prints the number of the job
[ -e "{folder}/refuse" ] && {{ echo 'sbatch: error: Invalid partition name specified' >&2; exit 1; }}
script="${{@: -1}}"
number=$(( $(ls "{folder}" | grep -c '^job') + 1 ))
cp "$script" "{folder}/job$number"
echo "$@" > "{folder}/words$number"
echo "$number;cluster"
"""


class Nap(Walk):
    """A walk whose units take a moment."""

    name = "toy/nap"
    seconds: float = 0.2

    def train(self, key, steps) -> xr.Dataset:
        time.sleep(self.seconds)
        return super().train(key, steps)


class Cluster:
    """Jobs that an sbatch on the path takes in, and their tasks as processes."""

    def __init__(self, folder: Path):
        self.folder, self.tasks = folder, {}
        (folder / "bin").mkdir(parents=True)
        (folder / "queue").mkdir()
        path = folder / "bin" / "sbatch"
        path.write_text(SBATCH.format(folder=folder / "queue"))
        path.chmod(0o755)
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(paths),
        }

    def submit(self, *words: object) -> subprocess.CompletedProcess:
        """Run `manyheads study submit` with this cluster's sbatch."""
        command = [sys.executable, "-m", "manyheads", "study", "submit", *map(str, words)]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120, check=False)

    def script(self, job: int) -> str:
        """Return the script of a job."""
        return (self.folder / "queue" / f"job{job}").read_text()

    def size(self, job: int) -> int:
        """Return how many tasks a job's array has."""
        (last,) = re.findall(r"^#SBATCH --array=0-(\d+)$", self.script(job), re.MULTILINE)
        return int(last) + 1

    def start(self, job: int, task: int | None = None) -> subprocess.Popen:
        """Start a task of a job, again if it was requeued; its output is appended to one file."""
        environment = self.environment | {"SLURM_JOB_ID": str(job), "SLURM_CPUS_PER_TASK": "1"}
        if task is not None:
            environment |= {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_JOB_ID": str(job)}
        with (self.folder / f"{job}_{task}.log").open("a") as log:
            process = subprocess.Popen(
                ["bash", self.folder / "queue" / f"job{job}"], env=environment, stdout=log, stderr=log
            )
        self.tasks[job, task] = process
        return process

    def output(self, job: int, task: int | None = None) -> str:
        """Return what a task has printed."""
        return (self.folder / f"{job}_{task}.log").read_text()

    def preempt(self, job: int, task: int) -> int:
        """Send SIGTERM to a task, wait until it has left, and return its exit status."""
        self.tasks[job, task].send_signal(signal.SIGTERM)
        return self.tasks[job, task].wait(60)

    def kill(self, job: int, task: int) -> None:
        """Send SIGKILL to a task."""
        self.tasks[job, task].kill()
        self.tasks[job, task].wait(60)

    def end(self) -> dict[tuple[int, int | None], int]:
        """Wait for all tasks and return their exit statuses."""
        return {name: process.wait(300) for name, process in self.tasks.items()}
