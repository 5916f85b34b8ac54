"""One optax transformation from the roles of the weights: rate, epsilon and decay of each class, by scaling alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from manyheads.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from manyheads.attention.scaling import Number


def rescale(
    transformation: optax.GradientTransformation,
    roles: Any,
    rates: Mapping[str, Number],
    epsilons: Mapping[str, Number],
) -> optax.GradientTransformation:
    r"""Run a transformation on rescaled gradients and weights, and rescale its updates.

    With the factors r of the rate and e of epsilon, the wrapped transformation sees the gradient g / e and the weight
    w / r, and its update is multiplied by r. Adam's update of g / e is that of g with epsilon times e, decoupled decay
    of w / r takes the share of w that it takes at the base, and gradient descent has e = 1.

    Parameters
    ----------
    transformation
        Any optax transformation that treats its entries alike.
    roles
        Names of roles in the structure of the weights.
    rates, epsilons
        The factors by role, numbers or traced scalars: one compiled step then serves every scheme.

    Raises
    ------
    UsageError
        A label has no factor.
    """
    known = set(rates) & set(epsilons)
    if unknown := {label for label in jax.tree.leaves(roles) if label not in known}:
        raise UsageError(f"no role is called {sorted(map(str, unknown))[0]!r}: choose from {', '.join(sorted(known))}")

    def times(tree: Any, factors: Mapping[str, Number], inverse: bool) -> Any:
        def one(label: str, leaf: Any) -> Any:
            factor = 1 / factors[label] if inverse else factors[label]
            # In the weight's own precision: a float64 factor must not lift float32 weights.
            return None if leaf is None else leaf * jnp.asarray(factor, leaf.dtype)

        return jax.tree.map(one, roles, tree)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        seen = None if params is None else times(params, rates, inverse=True)
        moved, state = transformation.update(times(updates, epsilons, inverse=True), state, seen)
        return times(moved, rates, inverse=False), state

    return optax.GradientTransformation(transformation.init, update)
