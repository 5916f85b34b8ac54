"""Recorded states of compiled trainings and flows: the one scan behind gradient descent, the one call of diffrax."""

from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp

from manyheads._namespaces import Array
from manyheads._trees import PyTree, T
from manyheads.errors import CertificateError, UsageError

STEPS = 100_000  # largest number of integrator steps


class SGDOptions(NamedTuple):
    """Plain SGD: `learning_rate * steps` is the time of the gradient flow; `snapshots` states are kept after the first.

    `steps` is a multiple of `snapshots`.
    """

    learning_rate: float
    steps: int
    snapshots: int

    def block(self) -> int:
        """Return the steps from one snapshot to the next."""
        if self.steps % self.snapshots or self.steps < 1 or not self.learning_rate > 0:
            raise UsageError(f"{self}: steps must be a positive multiple of snapshots, learning_rate positive")
        return self.steps // self.snapshots


def integrate(
    field: Callable[[Any, Any, Any], PyTree],
    init: PyTree,
    times: jax.Array,
    rtol: float,
    atol: float,
    *,
    solver: Any = None,
    end: Array | None = None,
    first: float | None = None,
    **settings: Any,
) -> Any:
    """Integrate ``field(time, state, args)`` from time 0, with a first step of a given size; return diffrax's solution.

    States are those at rising times; the integration goes on to `end`. Settings are those of `diffrax.diffeqsolve`.
    """
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        solver or diffrax.Dopri8(),
        0.0,
        times[-1] if end is None else end,
        first,
        init,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.PIDController(rtol=rtol, atol=atol),
        **settings,
    )


def integrate_to_end(
    field: Callable[[Any, Any, Any], PyTree], init: PyTree, times: jax.Array, precision: float, end: Array
) -> tuple[PyTree, PyTree]:
    """Integrate in at most `STEPS` steps, the first of 1e-3; return the states, and whether it reached the end."""
    limits = {"max_steps": STEPS, "throw": False}
    found = integrate(field, init, times, precision, precision, end=end, first=1e-3, **limits)
    return found.ys, found.result == diffrax.RESULTS.successful


def refuse_unfinished(ended: jax.Array, end: str, remedy: str) -> None:
    """Refuse an integration that did not reach its end."""
    if not bool(ended):
        raise CertificateError(f"{STEPS:,} steps do not reach {end}: {remedy}", measured=0.0, threshold=1.0)


def record_states(advance: Callable[[Any, Any], T], init: T, inputs: PyTree) -> T:
    """Advance a pytree of arrays by each of the inputs and return all states, initialization first; traceable.

    Examples
    --------
    >>> record_states(lambda total, by: total + by, jnp.zeros(()), jnp.arange(3.0)).tolist()
    [0.0, 0.0, 1.0, 3.0]
    """

    def step(state: T, each: PyTree) -> tuple[T, T]:
        state = advance(state, each)
        return state, state

    _, later = jax.lax.scan(step, init, inputs)
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), init, later)
