"""Numba compilation of kernels on the first call, cached in the user's cache folder.

Kernels are plain functions at module level, which import nothing. With the extra `fast` they are compiled once and
stored for later processes under a hash of their source.
"""

import contextlib
import hashlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from manyheads._extras import require

# Sums may be reordered and products fused; infinities and NaN are preserved for the divergence check.
FAST = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}
EXACT = {"error_model": "numpy"}
_lock = threading.RLock()
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
_registered: set[Callable[..., Any]] = set()


def compile_kernel(entry: Callable[..., Any], fast: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    """Return `entry` compiled; it releases the GIL, so that several runs share a process as threads.

    `fast` lists every function that it or another of them calls, callees first; their sums may be reordered, those of
    `entry` not.
    """
    with _lock:
        if entry not in _compiled:
            numba, extending = require("numba"), require("numba.extending")
            for function in fast:
                if function not in _registered:
                    extending.register_jitable(**FAST)(function)
                    _registered.add(function)
            with _cache_of(numba, entry, fast) as kept:
                _compiled[entry] = numba.njit(cache=kept, nogil=True, **EXACT)(entry)
        return _compiled[entry]


@contextlib.contextmanager
def _cache_of(numba: ModuleType, entry: Callable[..., Any], fast: tuple[Callable[..., Any], ...]) -> Iterator[bool]:
    """Point numba to a folder of the user's cache while it decides where to store a function; True if there is one."""
    modules = {inspect.getmodule(function) for function in (entry, *fast)}
    sources = sorted(inspect.getsource(module) for module in modules if module is not None)
    name = hashlib.sha256("".join(sources).encode()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "manyheads" / "numba" / f"{name}-{sys.implementation.cache_tag}"
    before = numba.config.CACHE_DIR
    if before:  # the caller has chosen a folder
        yield True
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = os.access(folder, os.W_OK)
    except OSError:
        kept = False  # a read-only home: compilation is repeated in every process
    try:
        if kept:
            numba.config.CACHE_DIR = str(folder)
        yield kept
    finally:
        numba.config.CACHE_DIR = before
