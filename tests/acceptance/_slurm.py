"""Job arrays: on a stand-in, and on a real Slurm of one node on loopback.

The real one is that of Debian's packages slurm-wlm, slurm-wlm-basic-plugins and munge; without them its figure says so.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Measured
from tests.study.cluster import Cluster, Nap

from manyheads.study import open_run, run
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import RunStore, find_runs

STUDY = ("tests.study.cluster:Nap", "--seconds", 0.3)
DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIGURATION = """ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={first}
SlurmdPort={second}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=cpu Nodes={host} Default=YES State=UP
"""


def is_installed() -> bool:
    """Tell whether the daemons are there, and may be started."""
    return os.geteuid() == 0 and all(map(_find, DAEMONS))


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start the daemons, yield the environment in which sbatch finds them, and end them."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    (key := folder / "munge.key").write_bytes(os.urandom(1024))
    key.chmod(0o400)
    folder.chmod(0o755)  # munged refuses a socket that others cannot reach
    first, second = _free_ports(2)
    text = CONFIGURATION.format(
        host=socket.gethostname().partition(".")[0], folder=folder, first=first, second=second, cores=os.cpu_count()
    )
    (path := folder / "slurm.conf").write_text(text)
    environment = os.environ | {"SLURM_CONF": str(path)}
    commands = (
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder / 'munge.socket'}"]
        + [f"--{name}-file={folder / 'munge'}.{name}" for name in ("pid", "log", "seed")],
        ["slurmctld", "-D", "-f", str(path)],
        ["slurmd", "-D", "-f", str(path)],
    )
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            command[0] = _find(command[0]) or command[0]
            with (folder / "output.log").open("ab") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            time.sleep(1)
        _wait(lambda: "idle" in ask(environment, "sinfo", "--noheader", "--format=%T"), 60)
        yield environment
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            ask(environment, "scancel", "--user=root")
        for process in reversed(processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def ask(environment: dict[str, str], *words: str) -> str:
    """Run a command of Slurm and return what it prints."""
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=60, check=False
    ).stdout.strip()


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait(ready, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError("Slurm did not become ready")
        time.sleep(0.5)


def arrays_of_a_stand_in(folder: Path, arrays: int, tasks: int, replicates: int) -> Measured:
    """Kill, preempt and requeue tasks of arrays at random moments; compare each run with one of a single process."""
    faults: list[str] = []
    events = {"killed": 0, "preempted": 0, "requeued": 0, "twice": 0}
    for number in range(arrays):
        rng = np.random.default_rng([77, number])
        cluster, store = Cluster(folder / f"cluster{number}"), folder / f"runs{number}"
        done = cluster.submit(*STUDY, "--replicates", replicates, "--seed", number, "--store", store, "--array", tasks)
        (runs,) = find_runs(store)
        for task in range(tasks):
            cluster.start(1, task)
        deadline = time.monotonic() + 300
        while runs.missing(replicates) and time.monotonic() < deadline:
            time.sleep(float(rng.uniform(0.5, 3.0)))
            task = int(rng.integers(tasks))
            if cluster.tasks[1, task].poll() is not None:
                if all(process.poll() is not None for process in cluster.tasks.values()):
                    cluster.start(1, task)  # nobody is left: submitted again
                    events["requeued"] += 1
                continue
            if rng.random() < 0.5:
                cluster.kill(1, task)
                events["killed"] += 1
            else:
                if cluster.preempt(1, task) not in (0, -signal.SIGTERM):  # the second while Python still starts
                    faults.append(f"array {number}: task {task} did not leave well: {cluster.output(1, task)[-300:]}")
                events["preempted"] += 1
            if rng.random() < 0.7:
                cluster.start(1, task)
                events["requeued"] += 1
        cluster.end()
        events["twice"] += _written(runs) - len(runs.numbers())
        faults += _faults(f"array {number}", done, runs, replicates, number, folder)
    print(*faults, sep="\n")
    extent = ", ".join(f"{count} {name}" for name, count in events.items()).replace("twice", "units computed twice")
    return Measured(f"{arrays} arrays, {len(faults)} faults", extent, f"0-{arrays - 1}", not faults)


def array_of_slurm(folder: Path, tasks: int, replicates: int) -> Measured:
    """Submit an array to a real Slurm, kill a task, preempt one, requeue one, and submit again."""
    if not is_installed():
        return Measured("not measured: no Slurm here, or no right to start it", "", "0", False)
    store = folder / "runs"
    with slurm(folder / "slurm") as environment:
        words = [*STUDY, "--replicates", replicates, "--store", store, "--array", tasks]
        command = [sys.executable, "-m", "manyheads", "study", "submit", *map(str, words)]
        how = {"env": environment, "capture_output": True, "text": True, "timeout": 120, "check": False}
        done = subprocess.run(command, **how)
        job = done.stdout.partition("job ")[2].partition(":")[0]
        (runs,) = find_runs(store)
        _wait(lambda: len(runs.numbers()) > 4, 120)
        ask(environment, "scancel", "--signal=KILL", "--full", f"{job}_0")
        ask(environment, "scontrol", "requeue", f"{job}_1")
        _wait(lambda: len(runs.numbers()) > 8, 120)
        ask(environment, "scancel", "--signal=TERM", "--full", f"{job}_2")
        again = subprocess.run([*command, "--finish"], **how)
        _wait(lambda: not ask(environment, "squeue", "--noheader"), 600)
        version = ask(environment, "sbatch", "--version")
        states = ask(environment, "scontrol", "show", "job", job)
    twice = 0 if runs.summary() else _written(runs) - len(runs.numbers())
    faults = _faults("array", done, runs, replicates, 0, folder)
    faults += [] if runs.summary() else ["the comparison that --finish submits is absent"]
    faults += [again.stderr] if again.returncode else []
    print(*faults, sep="\n")
    ended = sorted(line.split("=")[1].split()[0] for line in states.splitlines() if "JobState=" in line)
    extent = f"{version}, one node; {tasks} tasks ended as {', '.join(ended)}; {twice} units computed twice"
    return Measured(f"{len(faults)} faults", extent, "0", not faults)


def _written(runs: RunStore) -> int:
    """Return how many units all segments hold, repeated ones included."""
    return sum(path.read_bytes().count(b'{"kind":"unit"') for path in (runs.path / "segments").iterdir())


def _faults(what: str, done, runs: RunStore, replicates: int, seed: int, folder: Path) -> list[str]:
    """Finish a run and compare it to the bit with one that nobody disturbed."""
    faults = [f"{what}: {done.stderr}"] if done.returncode else []
    if missing := runs.missing(replicates):
        faults.append(f"{what}: {len(missing)} units are missing")
    study = Nap(seconds=0.3)
    run(study, replicates, seed, store=runs.path.parents[2], progress=False)
    whole = run(study, replicates, seed, store=folder / f"whole{seed}", progress=False)
    return faults + [f"{what}: {name} differs" for name in differences(whole, open_run(runs.path))]
