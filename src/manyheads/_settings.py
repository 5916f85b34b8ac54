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

    with ExitStack() as stack:
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.transfer_guard("allow"))
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        stack.enter_context(default_numpy_errors())
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
        stack.enter_context(jax.threefry_partitionable(NUMBERS["jax_threefry_partitionable"]))
        stack.enter_context(jax.default_prng_impl(NUMBERS["jax_default_prng_impl"]))
        stack.enter_context(jax.default_matmul_precision(NUMBERS["jax_default_matmul_precision"]))
        stack.enter_context(jax.disable_jit(False))
        stack.enter_context(_SEED_OFFSET.pinned())
        yield


class _SeedOffset:
    """The setting `jax_random_seed_offset`, which JAX adds to every seed and for which it has no public context.

    It is zero in all threads while one of them is inside; the last one to leave restores what the user had set.
    """

    def __init__(self) -> None:
        self.lock, self.inside, self.given = Lock(), 0, 0

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep the offset at zero."""
        import jax

        with self.lock:
            if not self.inside:
                self.given = jax.config.values["jax_random_seed_offset"]
            if self.given:
                jax.config.update("jax_random_seed_offset", 0)
            self.inside += 1
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if self.given and not self.inside:
                    jax.config.update("jax_random_seed_offset", self.given)


_SEED_OFFSET = _SeedOffset()
