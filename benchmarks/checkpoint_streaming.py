"""Streaming the weights of a checkpoint: peak memory and time of our reader beside the memory-mapping library.

    python benchmarks/checkpoint_streaming.py

A file of about 400 MB with the tensors of eight transformer layers of width 1024 in float32 is written to a temporary
folder (TMPDIR) and read once, so that every variant finds it in the page cache. Every variant then runs in a child
process of its own, in turn, a number of times: it goes through all tensors and takes the sum of squares of each. Memory
is the growth of the peak resident set (VmHWM) over the resident set before the file is opened; time is wall and CPU
time from opening to closing, the median of the repeats; the ratio is of CPU times, with the smallest and the largest
that pairs of repeats give. Linux only, because the peak is read and reset through /proc.
"""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WIDTH, LAYERS, REPEATS = 1024, 8, 7
MEGABYTE = 1e6
NAMES = {
    "ours": "manyheads, stream, `del` in the loop",
    "ours-naive": "manyheads, stream, loop variable kept",
    "ours-sha256": "manyheads, fingerprints only (sha256)",
    "mapped": "safetensors `safe_open`, tensor by tensor",
    "whole": "safetensors `load_file`",
}


def resident(field):
    """Read VmRSS or VmHWM in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def ours(path):
    from manyheads.models import open_checkpoint

    total = 0.0
    checkpoint = open_checkpoint(path)
    for _, tensor in checkpoint.stream():
        total += square(tensor)
        del tensor
    return total


def ours_naive(path):
    from manyheads.models import open_checkpoint

    checkpoint = open_checkpoint(path)
    return sum(square(tensor) for _, tensor in checkpoint.stream())


def fingerprints(path):
    from manyheads.models import open_checkpoint

    checkpoint = open_checkpoint(path)
    return len({checkpoint.fingerprint(name) for name in checkpoint.names})


def mapped(path):
    import safetensors

    total = 0.0
    with safetensors.safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            tensor = file.get_tensor(name)
            total += square(tensor)
            del tensor
    return total


def whole(path):
    from safetensors.numpy import load_file

    return sum(square(tensor) for tensor in load_file(path).values())


def square(tensor):
    flat = tensor.reshape(-1)
    return float(flat @ flat)


VARIANTS = {"ours": ours, "ours-naive": ours_naive, "ours-sha256": fingerprints, "mapped": mapped, "whole": whole}


def child(variant, path):
    # Everything is imported before the clock starts and the memory is noted.
    import safetensors.numpy  # noqa: F401

    import manyheads.models

    manyheads.models.open_checkpoint  # noqa: B018 - loads on first use
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = resident("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    result = VARIANTS[variant](path)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(json.dumps({"wall": wall, "cpu": cpu, "growth": resident("VmHWM") - before, "result": result}))


def generate(path):
    import numpy as np
    import safetensors.numpy

    rng = np.random.default_rng(0)
    shapes = {
        "attn.q": (1, 1),
        "attn.k": (1, 1),
        "attn.v": (1, 1),
        "attn.o": (1, 1),
        "mlp.in": (4, 1),
        "mlp.out": (1, 4),
    }
    tensors = {
        f"h.{layer}.{name}.weight": rng.standard_normal((a * WIDTH, b * WIDTH), np.float32)
        for layer in range(LAYERS)
        for name, (a, b) in shapes.items()
    }
    safetensors.numpy.save_file(tensors, path)
    return max(tensor.nbytes for tensor in tensors.values())


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        largest = generate(path)
        path.read_bytes()
        runs = {variant: [] for variant in VARIANTS}
        for _ in range(REPEATS):
            for variant in VARIANTS:
                command = [sys.executable, __file__, "--child", variant, str(path)]
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                runs[variant].append(json.loads(done.stdout))
        size = path.stat().st_size
    sums = {run["result"] for variant in ("ours", "ours-naive", "mapped") for run in runs[variant]}
    assert len(sums) == 1, sums
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("safetensors", "numpy"))
    print(
        f"{size / MEGABYTE:.0f} MB in {6 * LAYERS} tensors, the largest {largest / MEGABYTE:.1f} MB; in the page cache;"
    )
    print(f"{REPEATS} repeats, one thread; Python {platform.python_version()}, {versions}, {platform.machine()}.\n")
    print("| reader | peak memory, MB | in largest tensors | wall, s | CPU, s | CPU / ours (min, max) |")
    print("|---|---|---|---|---|---|")
    for variant, name in NAMES.items():
        growth = statistics.median(run["growth"] for run in runs[variant])
        wall, cpu = (statistics.median(run[key] for run in runs[variant]) for key in ("wall", "cpu"))
        ratios = [run["cpu"] / base["cpu"] for run, base in zip(runs[variant], runs["ours"], strict=True)]
        print(
            f"| {name} | {growth / MEGABYTE:.1f} | {growth / largest:.2f} | {wall:.2f} | {cpu:.2f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
