"""A dask cluster of processes on loopback, whose scheduler and workers tests kill."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = "from manyheads.cli import main; raise SystemExit(main())"
QUIET = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


class DaskProcesses:
    """A scheduler and two workers, each a process of one thread."""

    def __init__(self, folder: Path):
        paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self.folder, self.file = folder, folder / "scheduler.json"
        folder.mkdir()
        self.workers: list[subprocess.Popen] = []
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        try:
            wait_until(lambda: self.file.exists() and self.file.read_text().endswith("}"))
        except BaseException:
            self.end()
            raise
        self.address = f"dask:{json.loads(self.file.read_text())['address']}"
        self.workers += [self.start_worker() for _ in range(2)]

    def _start(self, what: str, *words: str) -> subprocess.Popen:
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", "--scheduler-file", str(self.file), *words]
        return subprocess.Popen(command, env=self.environment, cwd=self.folder, **QUIET)

    def start_worker(self) -> subprocess.Popen:
        """Start a worker, which ends itself soon after its scheduler."""
        return self._start("worker", "--no-nanny", "--nthreads", "1", "--no-dashboard", "--death-timeout", "30")

    def launch(self, store: Path, *words: object) -> subprocess.Popen:
        """Start `manyheads study run` on this cluster; its standard error is piped."""
        command = ["study", "run", *words, "--store", store, "--executor", self.address]
        named = QUIET | {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen([sys.executable, "-c", COMMAND, *map(str, command)], env=self.environment, **named)

    def end(self) -> None:
        """Kill whatever still runs."""
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()


def wait_until(ready: Callable[[], bool], seconds: float = 90.0) -> None:
    """Wait until something is true.

    Raises
    ------
    TimeoutError
        It was not, for that long.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s")
        time.sleep(0.01)
