"""NumPy in, float64, NumPy out: how the house keeps its precision without touching JAX's global switch.

A function of arrays that holds at any precision is written once in `jax.numpy` and decorated with `follows_caller`:

* all its arrays are NumPy arrays (or Python numbers): it runs inside `jax.enable_x64`, so float64 stays float64, and
  its arrays come back as NumPy arrays;
* one of them is a JAX array or a tracer: it runs as the caller has set JAX up, and differentiates and compiles there.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def on_host(*trees: Any) -> bool:
    """Tell whether no leaf of `trees` is a JAX array or tracer."""
    import jax

    return not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(trees))


def to_numpy(tree: Any) -> Any:
    """Replace every JAX array in a pytree by the NumPy array it holds."""
    import jax
    import numpy as np

    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def follows_caller(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` in double precision on NumPy arrays and in the caller's precision on JAX arrays.

    `self` of a method counts as an argument: a layer that holds NumPy weights is on the host.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not on_host(args, kwargs):
            return function(*args, **kwargs)
        import jax

        # Evaluated now even while a caller's function is traced: NumPy arrays are constants there, and a program
        # traced in double precision within one in single precision runs in neither.
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            return to_numpy(function(*args, **kwargs))

    return wrapper
