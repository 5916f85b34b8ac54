r"""Patterns that several labels share: a layer under constant gains, and labels with and without a hierarchy above.

In the layer each of C labels has a token of its own and one that it shares with c - 1 others. A context shows one of
both. By theorem 2 gains are probabilities: 1/(2C) for an own token, c/(2C) for a shared one, which is won c times
sooner. For transformers the flat counterpart of a hierarchy gives each label as many leaves as it has there, at random:
only the latents that labels share are gone.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from manyheads._arrays import takes_arrays
from manyheads.theory.joma.systems.networks.wide_layer import WideTraining, race
from manyheads.theory.joma.systems.token_hierarchy import HierarchyBatch, HierarchyShape, TokenHierarchy, draw_hierarchy


@partial(jax.jit, static_argnames=("labels", "shared", "training"))
def winning_times(labels: int, shared: int, training: WideTraining, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Train on sampled contexts from zero; return the mean times at which own and shared tokens reach the level.

    Tokens 0 to C - 1 are the labels' own, token C + y // c is shared. Every token has a neuron of its own.
    """
    groups = -(-labels // shared)

    def speed(number: jax.Array) -> jax.Array:
        for_label, for_kind = jax.random.split(jax.random.fold_in(key, number))
        label = jax.random.randint(for_label, (training.batch,), 0, labels)
        token = jnp.where(jax.random.bernoulli(for_kind, 0.5, label.shape), label, labels + label // shared)
        return training.learning_rate * (token[:, None] == jnp.arange(labels + groups)).mean(0)

    start = jnp.zeros(labels + groups)
    _, times = race(start, start, training, speed)
    return times[:labels].mean(), times[labels:].mean()


def reached_leaves(shape: HierarchyShape, key: jax.Array, flat: bool) -> Bool[Array, "labels leaves"]:
    """Draw a hierarchy and return which leaves its labels reach; `flat` redraws them for each label, as many."""
    for_hierarchy, for_leaves = jax.random.split(key)
    reached = jnp.eye(shape.labels)
    for parts in reversed(draw_hierarchy(shape, for_hierarchy).parts):
        reached = (reached @ parts.astype(reached.dtype) > 0).astype(reached.dtype)
    if flat:
        reached = jax.random.permutation(for_leaves, reached, axis=1, independent=True)
    return reached > 0


class LeafSource(eqx.Module):
    """Batches of labels and those of their leaves that are kept, each with probability `keep`."""

    hierarchy: TokenHierarchy
    size: int = eqx.field(static=True, default=64)

    @classmethod
    def of(cls, reached: Bool[Array, "labels leaves"], keep: float, places: int) -> "LeafSource":
        """Wrap the leaves of each label as a hierarchy of one level."""
        labels, leaves = reached.shape
        return cls(TokenHierarchy((reached,), HierarchyShape((labels,), places, leaves, keep)))

    def __call__(self, key: jax.Array) -> HierarchyBatch:
        """Draw a batch."""
        return self.hierarchy.draw(key, self.size)


@takes_arrays
def bayes_accuracy(
    reached: Bool[np.ndarray, "labels leaves"], keep: float, samples: int, rng: np.random.Generator
) -> float:
    """Estimate the accuracy of Bayes' rule, which knows the leaves of each label; ties count by their chance."""
    sets = np.asarray(reached, bool)
    labels = np.arange(samples) % len(sets)
    seen = sets[labels] & (rng.random((samples, sets.shape[1])) < keep)
    # A label is possible if it has all leaves that are seen; more leaves of its own make it less likely.
    possible = ~(seen[:, None] & ~sets).any(-1)
    weight = possible * (1 - keep) ** (sets.sum(1) - seen.sum(1, keepdims=True)).clip(0)
    best = weight == weight.max(1, keepdims=True)
    return float((best[np.arange(samples), labels] / best.sum(1)).mean())
