"""AdamW with weight decay on transformers of finite size: losses over learning rates, and relative updates.

Decoupled decay takes the share s = (learning rate) (weight decay) of a weight in every step.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from manyheads._arrays import takes_arrays
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.task import Task
from manyheads.scaling.trained.transformers import NetworkFactors, Recipe, Setting, State, optimizer_of, prepare
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.shape import Shape
from manyheads.transformer.training import Batches, update
from manyheads.transformer.transformer import initialize
from manyheads.transformer.weights import roles

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy.typing import ArrayLike


MATRICES = ("query", "key", "value", "output", "mlp_in", "mlp_out")
"""What decays: the matrices of the blocks; gains, embeddings and read-out do not, as is usual."""


class DecayedTrainings(NamedTuple):
    """Trainings of one network over learning rates, each (rates, steps).

    Relative updates are the norm of Adam's update, without decay, over that of the weight before it, of the value
    matrices of all blocks together.
    """

    losses: NDArray[np.float64]  # before the update, in nats; not finite where training diverged
    relative_updates: NDArray[np.float64]


@takes_arrays
def train_with_decay(
    task: Task,
    parametrization: Parametrization,
    shape: Shape,
    recipe: Recipe,
    learning_rates: Float[ArrayLike, " rates"],
    shares: Float[ArrayLike, " rates"],
    key: jax.Array,
    *,
    one_rate: bool = False,
    coupled: bool = False,
) -> DecayedTrainings:
    """Train one network by Adam for each learning rate of the base, from the same weights on the same batches.

    A share is what decay takes of a weight in a step at the base. With `one_rate` every weight keeps the base's rate,
    and start and forward pass stay the parametrization's. With `coupled` the weight decay of the base is kept, so that
    the share changes with the rate of each role; otherwise the share is kept ("independent" decay).
    """
    traced = [jnp.asarray(values, jnp.float32) for values in (learning_rates, shares)]
    setting, factors, together = prepare(task, parametrization, shape, recipe, len(traced[0]))
    if one_rate:
        factors = factors._replace(learning_rates={role: jnp.float32(1.0) for role in factors.learning_rates})
    kept = {role: factors.learning_rates[role] if coupled else jnp.float32(1.0) for role in MATRICES}
    found = _trainings(setting, (recipe.steps, together), task.batches, (factors, kept), traced, key)
    return DecayedTrainings(*(np.asarray(values, np.float64) for values in found))


@partial(jax.jit, static_argnums=(0, 1))
def _trainings(
    setting: Setting,
    counts: tuple[int, int],
    batches: Batches,
    numbers: tuple[NetworkFactors, dict[str, jax.Array]],
    settings: list[jax.Array],
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    (steps, together), (factors, kept) = counts, numbers

    def norm(weights: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(weights**2))

    for_model, for_batches = jax.random.split(key)
    start = initialize(setting.config, factors.scaling, for_model, jnp.float32)
    names = roles(start.weights)

    def member(pair: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        learning_rate, share = pair
        adam = optimizer_of(setting, factors, start, learning_rate)

        def advance(state: State, step: jax.Array) -> tuple[State, tuple[jax.Array, jax.Array]]:
            weights = state[0]
            change, inner, loss = update(start, cross_entropy, batches, adam, for_batches, step, *state)
            relative = norm(change.blocks.value) / norm(weights.blocks.value)
            moved = jax.tree.map(lambda w, c, role: w * (1 - share * kept.get(role, 0.0)) + c, weights, change, names)
            return (moved, inner), (loss, relative)

        return jax.lax.scan(advance, (start.weights, adam.init(start.weights)), jnp.arange(steps))[1]

    found: tuple[jax.Array, jax.Array] = jax.lax.map(member, settings, batch_size=together if together > 1 else None)
    return found
