"""One optax transformation from the roles of the weights: learning rate, epsilon and decay of each class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from manyheads.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from manyheads.transformer.scaling import Number


def rescale(
    transformation: optax.GradientTransformation,
    roles: Any,
    learning_rates: Mapping[str, Number],
    epsilons: Mapping[str, Number],
) -> optax.GradientTransformationExtraArgs:
    r"""Run a transformation on rescaled gradients and weights, and rescale its updates.

    With the factors r of the rate and e of epsilon, the wrapped transformation sees the gradient g / e and the weight
    w / r, and its update is multiplied by r. Adam's update of g / e is that of g with epsilon times e, decoupled decay
    of w / r takes the share of w that it takes at the base, and gradient descent has e = 1.

    Weights that `optax.masked` and `optax.multi_transform` leave out are left alone. Factors are numbers or traced
    scalars by role: one compiled step then serves every parametrization.
    """
    if not isinstance(transformation, optax.GradientTransformation):
        raise UsageError(f"{transformation!r} is no optax transformation: give the base's, such as optax.adam(1e-3)")
    known = set(learning_rates) & set(epsilons)
    labels = dict(jax.tree_util.tree_leaves_with_path(roles))
    if unknown := {label for label in labels.values() if label not in known}:
        raise UsageError(f"no role is called {sorted(map(str, unknown))[0]!r}: choose from {', '.join(sorted(known))}")
    inner = optax.with_extra_args_support(transformation)

    def label_of(path: tuple[Any, ...]) -> str:
        for length in range(len(path), -1, -1):
            if path[:length] in labels:
                return labels[path[:length]]
        raise UsageError(
            f"the weight {jax.tree_util.keystr(path) or 'itself'} has no role: give roles one at its place"
        )

    def times(tree: Any, factors: Mapping[str, Number], inverse: bool) -> Any:
        def one(path: tuple[Any, ...], leaf: Any) -> Any:
            factor = factors[label_of(path)]
            # In the weight's own precision: a float64 factor must not lift float32 weights.
            return leaf * jnp.asarray(1 / factor if inverse else factor, jnp.result_type(leaf))

        return jax.tree_util.tree_map_with_path(one, tree)

    def init(params: Any) -> Any:
        for path, _ in jax.tree_util.tree_leaves_with_path(params):
            label_of(path)
        return inner.init(times(params, learning_rates, inverse=True))  # of what keeps weights in its state

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        seen = None if params is None else times(params, learning_rates, inverse=True)
        moved, state = inner.update(times(updates, epsilons, inverse=True), state, seen, **extra)
        return times(moved, learning_rates, inverse=False), state

    return optax.GradientTransformationExtraArgs(init, update)
