"""Settings of JAX and NumPy that manyheads computes under, set by a context and restored afterwards.

A user may have changed any of them for a program of their own. Most only turn into an error what is meant
(`jax_numpy_rank_promotion`, `jax_numpy_dtype_promotion`, `jax_transfer_guard`, `jax_debug_nans`, `numpy.seterr`);
`jax_enable_x64`, `jax_threefry_partitionable`, `jax_random_seed_offset` and `jax_default_matmul_precision` change the
numbers.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import Lock

import numpy as np

# What decides numbers, by JAX's names for it: the values that units of a study are computed under.
NUMBERS = {
    "jax_enable_x64": True,
    "jax_threefry_partitionable": True,
    "jax_default_prng_impl": "threefry2x32",
    "jax_default_matmul_precision": "highest",
    "jax_random_seed_offset": 0,
}

_PINNED: ContextVar[bool] = ContextVar("whether NumPy's treatment of errors is that of this library", default=False)


@contextmanager
def default_numpy_errors() -> Iterator[None]:
    """Treat overflow and the like as NumPy does by default, whatever the user set.

    Only the outermost call pins it: a computation that expects an overflow says so, and keeps its say in what it calls.
    """
    if _PINNED.get():
        yield
        return
    token = _PINNED.set(True)
    try:
        with np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"):
            yield
    finally:
        _PINNED.reset(token)


@contextmanager
def default_rules() -> Iterator[None]:
    """Compute in any precision under JAX's and NumPy's default rules for promotion, transfers, NaN and overflow."""
    import jax

    checks = jax.transfer_guard("allow"), jax.debug_nans(False), jax.debug_infs(False), default_numpy_errors()
    with ExitStack() as stack:
        for each in (jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), *checks):
            stack.enter_context(each)
        yield


@contextmanager
def double_precision() -> Iterator[None]:
    """Compute in double precision under the default rules."""
    import jax

    with default_rules(), jax.enable_x64(True):
        yield


@contextmanager
def reproducible() -> Iterator[None]:
    """Compute in double precision and pin what else decides numbers: random streams, products, compilation.

    The values are JAX's defaults. A unit of a study runs under them: its numbers belong to the study and the seed, and
    a run that was begun under one configuration of JAX is continued under any other.
    """
    import jax

    with double_precision(), ExitStack() as stack:
        for name in ("threefry_partitionable", "default_prng_impl", "default_matmul_precision"):
            stack.enter_context(getattr(jax, name)(NUMBERS[f"jax_{name}"]))
        stack.enter_context(jax.disable_jit(False))
        stack.enter_context(_zero_seed_offset())
        yield


_LOCK = Lock()
_OFFSET = {"given": 0, "threads": 0}


@contextmanager
def _zero_seed_offset() -> Iterator[None]:
    """Set `jax_random_seed_offset`, which JAX adds to every seed and for which it has no public context, to zero.

    It is zero in all threads while one of them is inside; the last one to leave restores what the user had set.
    """
    import jax

    with _LOCK:
        if not _OFFSET["threads"]:
            _OFFSET["given"] = jax.config.values["jax_random_seed_offset"]
        if _OFFSET["given"]:
            jax.config.update("jax_random_seed_offset", 0)
        _OFFSET["threads"] += 1
    try:
        yield
    finally:
        with _LOCK:
            _OFFSET["threads"] -= 1
            if _OFFSET["given"] and not _OFFSET["threads"]:
                jax.config.update("jax_random_seed_offset", _OFFSET["given"])
