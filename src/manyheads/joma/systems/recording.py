"""Recorded states of a compiled training: the one scan behind gradient flow, gradient descent and SGD."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def record_states(advance: Callable[[Any, Any], Any], init: Any, inputs: Any) -> Any:
    """Advance a state by each of the inputs and return all states, initialization first; traceable.

    Parameters
    ----------
    advance
        (state, input) -> state, which may take many updates.
    init
        Any pytree of arrays.
    inputs
        Pytree of arrays with the number of records in front.

    Examples
    --------
    >>> record_states(lambda total, by: total + by, jnp.zeros(()), jnp.arange(3.0)).tolist()
    [0.0, 0.0, 1.0, 3.0]
    """

    def step(state: Any, each: Any) -> tuple[Any, Any]:
        state = advance(state, each)
        return state, state

    _, later = jax.lax.scan(step, init, inputs)
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), init, later)
