"""Stable rank: ours beside the full singular value decomposition, on one thread.

    python benchmarks/stable_rank.py

Square float32 matrices, Gaussian (no gap at the edge: the worst case for Lanczos) and Gaussian with one spike, at
n = 512, 1024 and 2048. Every variant runs in a child process of its own, in turn, a number of times. Time is wall and
CPU time, the median of the repeats; the ratio is of CPU times, with the smallest and the largest that pairs of repeats
give. Memory is the growth of the peak resident set (VmHWM). The error is relative to the float64 singular values; the
certified width is upper / lower - 1. Linux only, because the peak is read and reset through /proc.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from statistics import median

import numpy as np

SIZES, KINDS, REPEATS = (512, 1024, 2048), ("gaussian", "one spike"), 3
VARIANTS = {
    "svd": "`numpy.linalg.svd`, float64, values only (peer)",
    "gram": "ours, `gram` (exact)",
    "cholesky": "ours, `lanczos`, proof to 1e-3",
    "probability": "ours, `lanczos`, probability 1e-9, to 1e-2",
}


def matrix_of(kind, size):
    rng = np.random.default_rng(size)
    matrix = rng.standard_normal((size, size)).astype(np.float32)
    if kind == "one spike":
        u, v = (x / np.linalg.norm(x) for x in rng.standard_normal((2, size)))
        matrix += np.float32(4 * np.sqrt(size)) * np.outer(u, v).astype(np.float32)
    return matrix


def measure(variant, matrix):
    from manyheads.spectra import stable_rank

    if variant == "svd":
        squares = np.linalg.svd(matrix.astype(np.float64), compute_uv=False) ** 2
        return squares.sum() / squares[0], 0.0, ""
    options = {
        "gram": {"method": "gram"},
        "cholesky": {"method": "lanczos", "certificate": "cholesky"},
        "probability": {"method": "lanczos", "certificate": "probability", "tolerance": 1e-2},
    }[variant]
    found = stable_rank(matrix, **options)
    return found.value, found.upper / found.lower - 1, f"{found.certificate}, {found.steps} steps"


def memory(field):
    """Read VmRSS or VmHWM in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def child(variant, kind, size):
    measure(variant, matrix_of(kind, 64))  # imports and warm-up
    matrix = matrix_of(kind, size)
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = memory("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    value, width, note = measure(variant, matrix)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    result = {"value": float(value), "width": width, "note": note, "wall": wall, "cpu": cpu}
    print(json.dumps({**result, "growth": memory("VmHWM") - before}))


def run(variant, kind, size):
    command = [sys.executable, __file__, "--child", variant, kind, str(size)]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **one_thread})
    return json.loads(done.stdout)


def row(kind, size, variant, runs):
    ours, peer = runs[variant], runs["svd"]
    ratios = [p["cpu"] / o["cpu"] for o, p in zip(ours, peer, strict=True)]
    low, high = min(ratios), max(ratios)
    wall, cpu, growth = (median(o[field] for o in ours) for field in ("wall", "cpu", "growth"))
    error = ours[0]["value"] / peer[0]["value"] - 1
    faster = "1" if variant == "svd" else f"{median(ratios):.1f} ({low:.1f} to {high:.1f})"
    return (
        f"| {kind} | {size} | {VARIANTS[variant]} | {wall:.3f} | {cpu:.3f} | {faster} | {growth / 1e6:.0f} "
        f"| {error:+.1e} | {ours[0]['width']:.1e} | {ours[0]['note']} |"
    )


def main():
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("manyheads", "numpy", "scipy"))
    print(f"Python {platform.python_version()}, {versions}; {platform.machine()}, one thread; {REPEATS} repeats\n")
    head = "matrix|n|variant|wall s|CPU s|times faster (CPU)|peak MB|error|certified width|certificate"
    print(f"| {head.replace('|', ' | ')} |\n" + "|---" * 10 + "|")
    for kind in KINDS:
        for size in SIZES:
            runs = {variant: [] for variant in VARIANTS}
            for _ in range(REPEATS):
                for variant in VARIANTS:
                    runs[variant].append(run(variant, kind, size))
            for variant in VARIANTS:
                print(row(kind, size, variant, runs), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
