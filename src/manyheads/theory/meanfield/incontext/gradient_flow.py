"""Gradient flow: SciPy's adaptive integrators, explicit or implicit, and Runge-Kutta steps of fixed size."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from manyheads._constraints import Constraint
from manyheads._trees import PyTree
from manyheads.errors import CertificateError
from manyheads.theory.meanfield.initial_value import solve_initial_value
from manyheads.theory.runge_kutta import runge_kutta_step

Derivative = Callable[[Any, Any], PyTree]


def _flat_derivative(derivative: Derivative, flat: jax.Array, like: PyTree, args: PyTree) -> jax.Array:
    """Return the derivative of a state that is given as one vector."""
    return ravel_pytree(derivative(ravel_pytree(like)[1](flat), args))[0]


_slope = jax.jit(_flat_derivative, static_argnums=0)
_jacobian = jax.jit(jax.jacfwd(_flat_derivative, argnums=1), static_argnums=0)


@partial(jax.jit, static_argnums=0)
def _observation(observe: Derivative, flat: jax.Array, like: PyTree, args: PyTree) -> PyTree:
    return observe(ravel_pytree(like)[1](flat), args)


def integrate(
    derivative: Derivative,
    observe: Derivative,
    state: PyTree,
    args: PyTree,
    times: Float[np.ndarray, " times"],
    tolerance: float,
    stiff: bool = False,
) -> tuple[PyTree, PyTree]:
    """Integrate ``derivative(state, args)`` from time 0; return ``observe(state, args)`` at rising times, and the end.

    Called in double precision. `derivative` and `observe` are functions of a module, so that they compile once. The
    method is DOP853, or Radau with the exact Jacobian where the flow is stiff; the tolerance is that of a step,
    relative, and a thousandth of it absolute.
    """
    Constraint(above=0, below=1).kept("tolerance", tolerance, "float")
    start, unravel = ravel_pytree(state)
    settings: dict[str, Any] = {"method": "DOP853", "rtol": tolerance, "atol": tolerance * 1e-3}
    if stiff:
        jacobian = lambda time, flat: np.asarray(_jacobian(derivative, flat, state, args))  # noqa: E731
        settings |= {"method": "Radau", "jac": jacobian}
    slope = lambda time, flat: np.asarray(_slope(derivative, flat, state, args))  # noqa: E731
    remedy = "the gradient flow cannot be integrated to the last time: end earlier, raise the tolerance, or start from "
    remedy += "particles whose mean map has full rank"
    path = solve_initial_value(slope, np.asarray(start), times, remedy, **settings)
    found = [jax.tree.map(np.asarray, _observation(observe, flat, state, args)) for flat in path]
    return jax.tree.map(lambda *each: np.stack(each), *found), jax.tree.map(np.asarray, unravel(jnp.asarray(path[-1])))


@partial(jax.jit, static_argnums=(0, 1))
def _steps(
    derivative: Derivative, observe: Derivative, state: PyTree, args: PyTree, plan: tuple[jax.Array, jax.Array]
) -> PyTree:
    """Scan over the intervals between records, each of a number of steps of one size."""

    def interval(state: PyTree, counted: tuple[jax.Array, jax.Array]) -> tuple[PyTree, PyTree]:
        count, size = counted
        step = lambda _, now: runge_kutta_step(lambda each: derivative(each, args), now, size)  # noqa: E731
        state = jax.lax.fori_loop(0, count, step, state)
        return state, observe(state, args)

    return jax.lax.scan(interval, state, plan)


def integrate_in_steps(
    derivative: Derivative, observe: Derivative, state: Any, args: Any, times: Float[np.ndarray, " times"], step: float
) -> tuple[PyTree, PyTree]:
    """Integrate as `integrate` does, by the classical Runge-Kutta method with steps of at most `step`.

    For flows that are not smooth, where steps of controlled error vanish: ReLU neurons have a kink whenever one of
    them crosses a node. One program, compiled once for a number of records.
    """
    Constraint(above=0).kept("step", step, "float")
    lengths = np.diff(times, prepend=0.0)
    counts = np.maximum(np.ceil(lengths / step), 1).astype(np.int32)
    end, found = _steps(derivative, observe, state, args, (jnp.asarray(counts), jnp.asarray(lengths / counts)))
    whole = np.all([np.isfinite(leaf).reshape(len(leaf), -1).all(1) for leaf in jax.tree.leaves(found)], axis=0)
    if not whole.all():
        raise CertificateError(
            "the gradient flow leaves the finite numbers: take a smaller step",
            measured=float(times[np.argmin(whole)]),
            threshold=float(times[-1]),
        )
    return jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, end)
