"""Classical Runge-Kutta method of order four: one step of an autonomous flow of a pytree, in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from manyheads._extras import jax, jnp

State = TypeVar("State")

TABLEAU = ((0.0, 0.5, 0.5, 1.0), (1 / 6, 1 / 3, 1 / 3, 1 / 6))  # nodes and weights


def runge_kutta_step(derivative: Callable[[State], State], state: State, step: jax.Array) -> State:
    """Return the state after one step; traceable."""

    def stage(carry: tuple[State, State], shares: tuple[jax.Array, jax.Array]) -> tuple[tuple[State, State], None]:
        slope, end = carry
        slope = derivative(move(state, slope, step * shares[0]))
        return (slope, move(end, slope, step * shares[1])), None

    # A scan instead of four calls: the field is compiled once, in half the time, and runs as fast.
    shares = jax.tree.map(lambda column: jnp.asarray(column, step.dtype), tuple(map(np.asarray, TABLEAU)))
    still = jax.tree.map(jnp.zeros_like, state)
    return jax.lax.scan(stage, (still, state), shares)[0][1]


def move(state: State, direction: State, by: float | jax.Array) -> State:
    """Return state + by * direction."""
    return jax.tree.map(lambda y, dy: y + by * dy, state, direction)
