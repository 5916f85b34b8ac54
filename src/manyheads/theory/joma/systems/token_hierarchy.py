"""Token hierarchy of table 1: sequences of leaves that a label reaches through levels of latents.

Every token of a level is a random set of p tokens of the level below, the label is a token of the top level, and the
sequence lists the leaves that the label reaches. The latents are returned beside the data.

Source: Tian, Wang, Zhang, Chen, Du, "JoMA: Demystifying Multilayer Transformers via JOint Dynamics of MLP and
Attention", Table 1 (arXiv 2310.00535); the sets of tokens follow the authors' published configuration, in which a
hierarchy is deterministic (`keep = 1` here).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from manyheads._arrays import takes_arrays
from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.data.draws import draw_integers
from manyheads.errors import UsageError


@takes_arrays
def list_tokens(
    active: Bool[Array, "batch tokens"], length: int
) -> tuple[Int[Array, "batch length"], Bool[Array, "batch length"]]:
    """List the active tokens of each sample in rising order, padded in front with M.

    Of more active tokens than `length` the smallest are dropped. Also returned: True where there is a token.
    """
    count = active.shape[-1]
    places = jnp.where(active, jnp.arange(count, dtype=jnp.int32), -1)
    missing = max(0, length - count)
    places = jnp.pad(jnp.sort(places, axis=-1), ((0, 0), (missing, 0)), constant_values=-1)[:, -length:]
    return jnp.where(places < 0, count, places).astype(jnp.int32), places >= 0


class HierarchyBatch(NamedTuple):
    """Sequences of a token hierarchy and their latents; losses read the first two fields."""

    tokens: Int[Array, "batch places"]  # leaves in rising order, padded in front with the token `leaves`
    answers: Int[Array, " batch"]  # the label: a token of the top level
    padding_mask: Bool[Array, "batch places"]  # False on padding
    latents: tuple[Bool[Array, "batch size"], ...]  # tokens that the label reached, the lowest level first


@dataclass(frozen=True)
class HierarchyShape:
    """Sizes of a token hierarchy.

    Examples
    --------
    >>> HierarchyShape(sizes=(10, 20, 20), parts=2).places
    8
    """

    sizes: tuple[int, ...] = constrained((10, 20, 20), Constraint(least=1))  # of the levels, the lowest first
    parts: int = constrained(2, Constraint(least=1))  # tokens of the level below in each token: p
    leaves: int = constrained(39, Constraint(least=1))  # observed tokens; padding is one more
    keep: float = constrained(1.0, Constraint(least=0, most=1))  # that an active token activates a part: 1 in the paper

    def __post_init__(self) -> None:
        check_fields(self)
        below = self.leaves
        for level, size in enumerate(self.sizes):
            if self.parts > below:
                raise UsageError(
                    f"level {level}: a token of {self.parts} parts, but the level below has {below} tokens"
                )
            if size > math.comb(below, self.parts):
                raise UsageError(
                    f"level {level}: {size} different tokens of {self.parts} parts out of {below}, but there are only "
                    f"{math.comb(below, self.parts)} sets"
                )
            below = size

    @property
    def places(self) -> int:
        """Places of a sequence: the largest number of leaves that a label can reach."""
        return min(self.leaves, self.parts ** len(self.sizes))

    @property
    def labels(self) -> int:
        """Number of labels."""
        return self.sizes[-1]


class TokenHierarchy(eqx.Module):
    """Drawn hierarchy: the parts of each token in the level below.

    Examples
    --------
    >>> hierarchy = draw_hierarchy(HierarchyShape((4, 3, 3), parts=2, leaves=9), jax.random.key(0))
    >>> batch = hierarchy.draw(jax.random.key(1), 5)
    >>> batch.tokens.shape, [level.shape for level in batch.latents]
    ((5, 8), [(5, 4), (5, 3)])
    """

    parts: tuple[Bool[Array, "size below"], ...]  # one array (size, size below) of booleans a level, the lowest first
    shape: HierarchyShape = eqx.field(static=True)  # the sizes, static

    def draw(self, key: jax.Array, size: int) -> HierarchyBatch:
        """Draw uniform labels, up to a bias below 2^-32, and their sequences."""
        for_labels, for_edges = jax.random.split(key)
        return self.expand(draw_integers(for_labels, (size,), self.shape.labels), for_edges)

    def expand(self, labels: Int[Array, " batch"], key: jax.Array) -> HierarchyBatch:
        """Expand labels to sequences; the key draws the active edges if `keep` is below one."""
        return _expand(self, labels, key)


@partial(jax.jit, inline=True)
def _expand(hierarchy: TokenHierarchy, labels: jax.Array, key: jax.Array) -> HierarchyBatch:
    active = jax.nn.one_hot(labels, hierarchy.shape.labels, dtype=jnp.float32)  # (B, labels)
    reached = []
    for level in reversed(range(len(hierarchy.parts))):
        incoming = active @ hierarchy.parts[level].astype(jnp.float32)  # (B, size below), active tokens above each
        if hierarchy.shape.keep < 1:
            draws = jax.random.uniform(jax.random.fold_in(key, level), incoming.shape, jnp.float32)
            on = draws < 1 - (1 - hierarchy.shape.keep) ** incoming
        else:
            on = incoming > 0
        reached.append(on)
        active = on.astype(jnp.float32)
    tokens, padding_mask = list_tokens(reached[-1], hierarchy.shape.places)
    return HierarchyBatch(tokens, labels, padding_mask, tuple(reversed(reached[:-1])))


def draw_hierarchy(shape: HierarchyShape, key: jax.Array) -> TokenHierarchy:
    """Draw a hierarchy: at each level different sets, uniform among all choices of different sets; traceable.

    All sets of a level are drawn at once, and those that equal an earlier one are redrawn until none does. Only
    equality matters, so all sets are treated alike and the result is uniform.
    """
    below, parts = shape.leaves, []
    for level, size in enumerate(shape.sizes):
        parts.append(_different_sets(jax.random.fold_in(key, level), size, below, shape.parts))
        below = size
    return TokenHierarchy(tuple(parts), shape)


@partial(jax.jit, inline=True, static_argnums=(1, 2, 3))
def _different_sets(key: jax.Array, size: int, below: int, chosen: int) -> jax.Array:
    """Draw `size` different subsets of `chosen` elements out of `below`, as booleans (size, below)."""

    def draw(key: jax.Array) -> jax.Array:
        heights = jax.random.uniform(key, (size, below), jnp.float32)
        _, places = jax.lax.top_k(heights, chosen)
        return jnp.zeros((size, below), bool).at[jnp.arange(size)[:, None], places].set(True)

    def again(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        key, sets, missing = state
        key, fresh = jax.random.split(key)
        sets = jnp.where(missing[:, None], draw(fresh), sets)
        counts = sets.astype(jnp.int32)
        return key, sets, jnp.tril(counts @ counts.T == chosen, -1).any(1)  # (size,), equal to an earlier one

    # The first draw is a redraw of all sets: the generator, which compiles slowly, is compiled once.
    start = (key, jnp.zeros((size, below), bool), jnp.ones(size, bool))
    return jax.lax.while_loop(lambda state: state[2].any(), again, start)[1]
