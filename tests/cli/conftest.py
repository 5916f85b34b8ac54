"""A folder of its own for every test of the command line, and nothing of it left behind in this process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "import sys; from manyheads.cli import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in an empty folder, with a cache folder inside it; environment and module path are put back."""
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / ".cache")
    os.environ.pop("COLUMNS", None)  # set by pytest-xdist in its workers: results would be wrapped as on a terminal
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def start():
    """Start the command line in a process of its own, in the leader's place of a new process group."""
    started = []

    def popen(*words, **options):
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            **options.pop("environment", {}),
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], env=environment, **pipes | options)
        started.append(process)
        return process

    yield popen
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
