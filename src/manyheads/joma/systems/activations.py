"""Activations with their derivatives and kinks, for the quadratures of theorem 3."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from manyheads.errors import UsageError
from manyheads.joma.task import ACTIVATIONS


@dataclass(frozen=True)
class Nonlinearity:
    """Elementwise activation for `jax.numpy` arrays.

    Attributes
    ----------
    name
        Identity: nonlinearities of equal names and kinks are equal.
    value
        phi, which keeps the dtype of its argument.
    kinks
        Arguments at which the derivative jumps, in rising order.

    Examples
    --------
    >>> NONLINEARITIES["relu"].derivative(jnp.array([-1.0, 2.0])).tolist(), NONLINEARITIES["relu"].kinks
    ([0.0, 1.0], (0.0,))
    """

    name: str
    value: Callable[[Any], Any] = field(compare=False, repr=False)
    kinks: tuple[float, ...] = ()

    def derivative(self, x: Any) -> Any:
        """Differentiate phi elementwise."""
        x = jnp.asarray(x)
        return jax.jvp(self.value, (x,), (jnp.ones_like(x),))[1]


KINKS = {"relu": (0.0,)}

NONLINEARITIES = {name: Nonlinearity(name, value, KINKS.get(name, ())) for name, value in ACTIVATIONS.items()}
"""The activations of `manyheads.joma.task`, by name; square is x²/2."""


def find_nonlinearity(name: str) -> Nonlinearity:
    """Look up one of `NONLINEARITIES` by name.

    Raises
    ------
    UsageError
        No such activation; the message lists all.

    Examples
    --------
    >>> find_nonlinearity("square").name
    'square'
    """
    if name not in NONLINEARITIES:
        raise UsageError(f"activation {name!r}: expected one of {', '.join(NONLINEARITIES)}")
    return NONLINEARITIES[name]
