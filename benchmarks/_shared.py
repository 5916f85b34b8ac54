"""Shared parts of the benchmarks: one thread, CPU time of a call, ratios of repeats, versions."""

import importlib.metadata
import platform
import statistics
import time

# Set in os.environ before JAX is imported.
ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
}


def timed(call, *arguments):
    """Return the CPU seconds of a call, and its result."""
    start = time.process_time()
    found = call(*arguments)
    return time.process_time() - start, found


def ratio_of(slow, fast, digits=1):
    """Return the median ratio of the times of paired repeats, with the smallest and the largest, as text."""
    ratios = [one / other for one, other in zip(slow, fast, strict=True)]
    return f"{statistics.median(ratios):.{digits}f} ({min(ratios):.{digits}f} to {max(ratios):.{digits}f})"


def versions_of(*packages):
    """Return the versions of packages and of Python, and the machine, as text."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return f"{versions}, Python {platform.python_version()}, {platform.machine()}, one thread"
