"""The bench: nothing is lost or counted twice when it is killed, the disk is full, bytes change or processes race."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from tests.acceptance import _kills, _launches, _scale, _verdict_rates
from tests.acceptance._altered import altered_bytes
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._slurm import array_of_slurm, arrays_of_a_stand_in
from tests.study.toys import VectorizedAverages, Walk

from manyheads.statistics import Interval, decide, mean_interval
from manyheads.statistics.intervals import discrepancy_interval, proportion_interval
from manyheads.studies.attention.order_blindness import OrderBlindness
from manyheads.study import open_run, run
from manyheads.study.execution.executors import local_pool, open_executor
from manyheads.study.store.equality import differences
from manyheads.study.store.run_store import find_runs

ROOT = Path(__file__).parents[2]


def kills(folder: Path, counts: dict[str, int], seeds: int) -> Measured:
    """Kill runs of a toy so many times in each of the ways of `_launches.KINDS`."""
    log = folder / "log.json"  # after every store, so that a lane that is killed itself goes on from there
    found = {"kills": dict.fromkeys(counts, 0), "torn": 0, "stores": 0, "faults": []}
    found = json.loads(log.read_text()) if log.exists() else found
    for name, count in counts.items():
        while found["kills"][name] < count:
            shutil.rmtree(folder / "torn", ignore_errors=True)
            kind = _launches.KINDS[name](folder)
            torn = _kills.Torn(folder / "torn", found["stores"] % seeds, kind.study)
            whole = run(kind.study, _launches.REPLICATES, torn.seed, store=folder / "whole", progress=False)
            rng = np.random.default_rng([20, found["stores"]])
            found["kills"][name] += torn.kill_often(kind, rng, min(kind.most, count - found["kills"][name]))
            torn.finish(whole)
            found |= {"torn": found["torn"] + torn.cut, "stores": found["stores"] + 1}
            found["faults"] += [f"{name}: {fault}" for fault in torn.faults]
            log.write_text(json.dumps(found))
    print(*found["faults"], sep="\n")
    extent = f"{found['stores']} stores; {', '.join(f'{name} {count}' for name, count in found['kills'].items())}; "
    extent += f"after {found['torn']} the last line was cut as well, as by a power failure"
    figure = f"{sum(found['kills'].values())} kills, {len(found['faults'])} faults"
    return Measured(figure, extent, f"0-{seeds - 1}", not found["faults"])


def full_disk(folder: Path, seeds: int) -> Measured:
    """Run into every number of free blocks and inodes of a small tmpfs in a mount namespace."""
    blocks = inodes = 0
    faults: list[str] = []
    flags = "-m" if os.geteuid() == 0 else "-rm"
    for seed in range(seeds):
        (folder / "disk").mkdir(exist_ok=True)
        words = ["unshare", flags, sys.executable, "-m", "tests.acceptance._disk", folder / "disk", str(seed)]
        done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
        found = json.loads(done.stdout)
        blocks, inodes, faults = blocks + found["blocks"], inodes + found["inodes"], faults + found["faults"]
    print(*faults, sep="\n")
    extent = f"full at each of {blocks} numbers of free blocks and {inodes} of free inodes of a tmpfs"
    return Measured(f"{blocks + inodes} full disks, {len(faults)} faults", extent, f"0-{seeds - 1}", not faults)


def races(folder: Path, times: int) -> Measured:
    """Start two and four processes on one store at once."""
    faults = []
    for number in range(2 * times):
        together, seed, store = 2 + 2 * (number % 2), number, folder / f"store{number}"
        whole = run(Walk(), _launches.REPLICATES, seed, store=folder / "whole", progress=False)
        launches = _launches.Forked(folder, together)
        launches.start(store, seed)
        faults += launches.faults()
        (found,) = find_runs(store)
        faults += differences(whole, open_run(found.path))
        faults += [f"{path} was left over" for path in store.rglob("*.tmp")]
        if found.verify() != _kills.UNITS:
            faults.append(f"{found.verify()} units")
        faults += [f"{path} was left over" for path in store.glob("*/*/*/leases/*")]
        shutil.rmtree(store)
    print(*faults, sep="\n")
    extent = f"{times} times two and {times} times four processes"
    return Measured(f"{len(faults)} faults", extent, f"0-{2 * times - 1}", not faults)


PLAIN = """
import pickle, sys
from manyheads.study import run
run(pickle.loads(bytes.fromhex(sys.argv[2])), 2, int(sys.argv[3]), store=sys.argv[1], progress=False)
"""


def executors(folder: Path, seeds: int) -> Measured:
    """Run the same studies in process, as a user does and with one thread, in a pool and on a dask cluster."""
    import pickle

    from distributed import LocalCluster

    studies = (Walk(), VectorizedAverages(), OrderBlindness(lengths=(8,), steps_per_token=8))
    faults = []
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with cluster, local_pool(2) as pool, open_executor(f"dask:{cluster.scheduler_address}") as dask:
        for study in studies:
            for seed in range(seeds):
                whole = run(study, 2, seed, store=folder / "here", progress=False)
                for name, executor in (("pool", pool), ("dask", dask)):
                    other = run(study, 2, seed, executor, folder / name, progress=False)
                    faults += [f"{study.name}, seed {seed}, {name}: {part}" for part in differences(whole, other)]
                threads = ("XLA_FLAGS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
                free = {name: value for name, value in os.environ.items() if name not in threads}
                words = [sys.executable, "-c", PLAIN, folder / "free", pickle.dumps(study).hex(), str(seed)]
                subprocess.run(words, env=free, check=True)
                other = run(study, 2, seed, store=folder / "free", progress=False)
                faults += [f"{study.name}, seed {seed}, all threads: {part}" for part in differences(whole, other)]
    print(*faults, sep="\n")
    extent = "in process with one and with all threads, spawn pool of two, dask cluster of two; " + ", ".join(
        study.name for study in studies
    )
    return Measured(f"{len(faults)} variables differ", extent, f"0-{seeds - 1}", not faults)


def recipes(folder: Path) -> Measured:
    """Run the recipes of docs/runs.md whose package is installed, and compare each with one process."""
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    whole = run("joma/latent-tree", store=folder / "whole", progress=False, depth=3, samples=(64, 128))
    faults, done, absent = [], [], []
    for text in re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (package,) = {"loky", "mpi4py", "parsl", "ray"} & set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
        if find_spec(package) is None:
            absent.append(package)
            continue
        (home := folder / package).mkdir()
        (home / "recipe.py").write_text(text, encoding="utf-8")
        launcher = ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "3"] if package == "mpi4py" else []
        words = [*launcher, sys.executable, *(["-m", "mpi4py"] if launcher else []), "recipe.py"]
        ended = subprocess.run(words, cwd=home, capture_output=True, text=True, timeout=300, check=False)
        done.append(f"{package} {version(package)}")
        faults += [f"{package}: {ended.stderr[-500:]}"] if ended.returncode else []
        (found,) = find_runs(home / "runs")
        faults += [f"{package}: {name} differs" for name in differences(whole, open_run(found.path))]
    print(*faults, sep="\n")
    extent = ", ".join(done) + (f"; not installed: {', '.join(absent)}" if absent else "")
    return Measured(f"{len(done)} of 4 run, {len(faults)} faults", extent, "0", len(done) == 4 and not faults)


def error_rates(folder: Path, trials: int, sizes: tuple[int, ...], seed: int) -> Measured:
    """Simulate the verdict rule where the truth sits on an edge of the tolerance, and where the claim is exact."""
    rng = np.random.default_rng(seed)
    worst = {"hold": Interval(0, 0), "refute": Interval(0, 0)}
    passed = True
    for size in sizes:
        for error in (0.0, 0.5):
            held = refuted = 0
            for _ in range(trials):
                values, shift = rng.normal(size=size), error * rng.normal()
                # The prediction is off by `shift`; the truth is 0, on the lower edge of [0, 2], and then the target.
                held += _decide(values, 1.0 + shift, 1.0, error) == "holds"
                refuted += _decide(values, shift, 0.0, error) == "refuted"
            for name, number, bound in (("hold", held, 0.005), ("refute", refuted, 0.01)):
                interval = proportion_interval(number, trials, 0.9999)  # of twenty, one in five hundred lanes errs
                passed &= interval.low <= bound
                worst[name] = max(worst[name], interval, key=lambda found: found.high)
    shown = {name: f"[{100 * found.low:.3f}%, {100 * found.high:.3f}%]" for name, found in worst.items()}
    figure = f"falsely holds at the edge: {shown['hold']}; refutes what is true: {shown['refute']}"
    extent = f"99.99% intervals of the worst of {', '.join(map(str, sizes))} replicates, {trials} trials each"
    return Measured(figure, f"{extent}, exact and sampled predictions", str(seed), passed)


def _decide(values: np.ndarray, target: float, tolerance: float, error: float) -> str:
    if error:
        interval = discrepancy_interval(values, target, error, level=0.99).shifted(target)
    else:
        interval = mean_interval(values, 0.99)
    return decide(float(values.mean()), interval, target, tolerance)


FIGURES = (
    Figure(
        "scale",
        "a store of 20,000 units of 2 kB is written, opened and compacted in seconds, in few files",
        "at most .3 ms of CPU to write a unit, .2 s to find that nothing is missing, 1.2 s to open, 2.4 s to compact; "
        "at most 10 inodes",
        _scale.scale,
        {"cells": 25, "replicates": 800, "seed": 0},
    ),
    Figure(
        "kills",
        "a run whose launches, workers, schedulers or tasks are killed at random moments ends as an uninterrupted one",
        "200 kills; bit for bit the same, no unit made twice, nothing left over",
        kills,
        {
            "counts": {
                "a launch": 100,
                "three launches at once": 42,
                "parent": 14,
                "process group": 12,
                "worker": 10,
                "array task": 10,
                "dask worker": 6,
                "dask scheduler": 6,
            },
            "seeds": 5,
        },
    ),
    Figure(
        "full-disk",
        "a disk that is really full is named, costs nothing that is finished, and the run goes on when there is room",
        "StoreFull each time; then bit for bit the same, nothing left over",
        full_disk,
        {"seeds": 2},
    ),
    Figure(
        "altered-bytes",
        "altered, missing or cut bytes anywhere in a stored run are never read as data",
        "refused by name, or read to the same bits",
        altered_bytes,
        {"count": 6000, "seed": 0},
    ),
    Figure(
        "races",
        "processes that run on one store at once do not disturb each other",
        "every process ends well; bit for bit the same as one alone",
        races,
        {"times": 15},
    ),
    Figure(
        "arrays",
        "tasks of a job array that are killed, preempted and requeued share the units of a run",
        "bit for bit the same as one process; nothing missing",
        arrays_of_a_stand_in,
        {"arrays": 6, "tasks": 3, "replicates": 20},
    ),
    Figure(
        "slurm",
        "the same on a real Slurm, where the array is submitted twice and the second one finishes the run",
        "bit for bit the same as one process; nothing missing",
        array_of_slurm,
        {"tasks": 4, "replicates": 40},
    ),
    Figure(
        "executor-recipes",
        "the recipes for loky, MPI, Parsl and Ray give what one process gives",
        "all four run; bit for bit the same",
        recipes,
    ),
    Figure(
        "executors",
        "a study gives the same on every executor",
        "bit for bit the same",
        executors,
        {"seeds": 2},
    ),
    Figure(
        "error-rates",
        "the verdict rule errs as rarely as it says",
        "holds falsely at the edge at most 0.5%, refutes what is true at most 1% (not refuted by the simulation)",
        error_rates,
        {"trials": 40_000, "sizes": [2, 3, 4, 8, 32], "seed": 0},
    ),
    Figure(
        "skewed-samples",
        "verdicts on skewed samples err as rarely as docs/verdicts.md says",
        "what is true is refuted at most by 7%, 4.5%, 1.5%, 1% and 1% at n = 4, 8, 16, 32 and 64 (normal to lognormal "
        "1.5 and Pareto 3)",
        _verdict_rates.skewed_samples,
        {"trials": 20_000, "seed": 0},
    ),
    Figure(
        "until-decided",
        "a run that is looked at after every replicate refutes what is true as rarely as one that is looked at once",
        "at most 1% of normal, Student and uniform samples and 2% of lognormal ones (not refuted by the simulation)",
        _verdict_rates.until_decided,
        {"trials": 3000, "most": 64, "seed": 0},
    ),
)
