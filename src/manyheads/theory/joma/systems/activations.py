"""Activations with their derivatives and kinks, for the quadratures of theorem 3."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manyheads.errors import UsageError
from manyheads.theory.joma.task import ACTIVATIONS


@dataclass(frozen=True)
class Nonlinearity:
    """Elementwise activation, with the arguments at which its derivative jumps, in rising order.

    Examples
    --------
    >>> NONLINEARITIES["relu"].derivative(jnp.array([-1.0, 2.0])).tolist(), NONLINEARITIES["relu"].kinks
    ([0.0, 1.0], (0.0,))
    """

    name: str  # identity: activations of equal names and kinks are equal
    value: Callable[[Float[Array, "..."]], Float[Array, "..."]] = field(compare=False, repr=False)
    kinks: tuple[float, ...] = ()

    def derivative(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Differentiate the activation elementwise."""
        x = jnp.asarray(x)
        return jax.jvp(self.value, (x,), (jnp.ones_like(x),))[1]


NONLINEARITIES = {
    name: Nonlinearity(name, value, (0.0,) if name == "relu" else ()) for name, value in ACTIVATIONS.items()
}
"""The activations of `manyheads.theory.joma.task`, by name; square is x²/2."""


def find_nonlinearity(name: str) -> Nonlinearity:
    """Look up one of `NONLINEARITIES` by name; UsageError if there is none."""
    if name not in NONLINEARITIES:
        raise UsageError(f"activation {name!r}: expected one of {', '.join(NONLINEARITIES)}")
    return NONLINEARITIES[name]
