"""What every test sees: one thread, no network, a seed that may be any number, and skips that name the absent extra."""

import ctypes
import gc
import importlib.util
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
# Most programs run for milliseconds: compiling them is what the suite pays for. The acceptance lane optimizes.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Compiled programs are kept for the next run, and shared by all workers and by the processes that tests start. The
# small ones too: most are a single operation on a new shape, and reading one takes a quarter of compiling it.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "manyheads", "jax")),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# A shell makes what it starts in the background deaf to Ctrl-C, and tests of Ctrl-C with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import none

# What is imported and collected stays: a search for garbage among it takes seconds and finds nothing.
gc.set_threshold(100_000, 50, 100)

# A change is judged by the same drawn examples as the one before it; new ones are drawn by --hypothesis-profile=fuzz.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("fuzz", settings.get_profile("house"), derandomize=False, max_examples=1000)
settings.load_profile("house")

EXTRAS = {
    "jax": ("jax",),
    "torch": ("torch", "transformers"),
    "cluster": ("distributed",),
    "fast": ("numba",),
    "training": ("accelerate", "lightning", "tensorboard"),
}


def _absent(extra: str) -> list[str]:
    return [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]


def pytest_collection_modifyitems(config, items):
    acceptance = "acceptance" in (config.option.markexpr or "")
    for item in items:
        for extra in EXTRAS:
            if item.get_closest_marker(extra) and (absent := _absent(extra)):
                item.add_marker(pytest.mark.skip(reason=f"extra '{extra}' is not installed ({', '.join(absent)})"))
        if item.get_closest_marker("acceptance") and not acceptance:
            item.add_marker(pytest.mark.skip(reason="acceptance lane: make acceptance"))


def pytest_collection_finish():
    """Take what was imported out of the garbage collector's sight: it would be searched at every full collection."""
    given(none())(lambda _: None)()  # makes Hypothesis' generator, whose referrers it wants to see
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # tracing makes many objects that stay, and every search costs


MOST_MEMORY = 1_000_000_000  # bytes of this process; above that, compiled programs and free memory are given back
_most_memory = MOST_MEMORY


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Bound the memory of a worker: compiled programs stay loaded until JAX is told to forget them."""
    global _most_memory
    if "jax" in sys.modules and _memory() > _most_memory:
        sys.modules["jax"].clear_caches()
        gc.collect()
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # of glibc
        _most_memory = max(MOST_MEMORY, _memory() + MOST_MEMORY // 4)


def _memory() -> int:
    """Return the resident memory of this process in bytes, 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.fixture(scope="session")
def seed() -> int:
    """Any number must pass: MANYHEADS_TEST_SEED=7 make test."""
    return int(os.environ.get("MANYHEADS_TEST_SEED", "0"))


@pytest.fixture
def rng(seed: int, request: pytest.FixtureRequest) -> np.random.Generator:
    """An independent NumPy generator for each test, the same wherever its file stands."""
    return np.random.default_rng([seed, *request.node.name.encode()])
