r"""Hierarchical data with known latents: the latent tree of theorem 5 and the token hierarchy of Table 1.

Both generators return the latents beside the data:

* `LatentTree`: a label determines the distribution of the top latent, every child draws its state given its parent by a
  transition matrix, and the leaves are observed. `list_tokens` converts binary leaves to the sequence of those that
  are on.
* `TokenHierarchy`: every token of a level is a random set of p tokens of the level below, the label is a token of the
  top level, and the sequence lists the leaves that the label reaches.

Source: Tian, Wang, Zhang, Chen, Du, "JoMA: Demystifying Multilayer Transformers via JOint Dynamics of MLP and
Attention", section 5 and Table 1 (arXiv 2310.00535); the sets of tokens follow the authors' published configuration,
in which a hierarchy is deterministic (`keep = 1` here).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from manyheads._arrays import takes_arrays
from manyheads.data.draws import draw_integers, draw_vectors
from manyheads.errors import UsageError

STOCHASTIC = 1e-9  # tolerance of the sum of a row of probabilities


class TreeBatch(NamedTuple):
    """Samples of a latent tree.

    Attributes
    ----------
    labels
        (B,) int32.
    levels
        States of the latents, from the top (B, 1) down to the leaves (B, leaves), int32. The children of node i of a
        level are the nodes i b, ..., i b + b - 1 of the next.
    """

    labels: jax.Array
    levels: tuple[jax.Array, ...]


@dataclass(frozen=True)
class LatentTree:
    r"""A tree of latents of any depth, branching and transition.

    .. math:: s_{\text{top}} \sim P(\cdot \mid y_0), \qquad s_{\text{child}} \sim T_l(s_{\text{parent}}, \cdot),

    independently given the parent, with a uniform label :math:`y_0`.

    Attributes
    ----------
    branching
        Children of a node at each level, from the top latent downwards; theorem 5's depth L is one more than its
        length.
    transitions
        One row-stochastic matrix a level of edges, from the top downwards, as nested tuples.
    top
        Row y holds the probabilities of the top latent's states under label y.

    Raises
    ------
    UsageError
        A probability outside [0, 1], a row that does not add up to one, or matrices that do not fit together.

    Examples
    --------
    >>> tree = binary_tree((2, 3), correlation=0.8)
    >>> tree.leaves, tree.transitions[0]
    (6, ((0.9, 0.1), (0.1, 0.9)))
    >>> batch = tree.draw(jax.random.key(0), 5)
    >>> [level.shape for level in batch.levels]
    [(5, 1), (5, 2), (5, 6)]
    """

    branching: tuple[int, ...]
    transitions: tuple[tuple[tuple[float, ...], ...], ...]
    top: tuple[tuple[float, ...], ...] = ((1.0, 0.0), (0.0, 1.0))

    def __post_init__(self) -> None:
        if not self.branching or min(self.branching) < 1:
            raise UsageError(f"branching={self.branching}: expected one positive number of children per level of edges")
        if len(self.transitions) != len(self.branching):
            raise UsageError(
                f"{len(self.transitions)} transitions for {len(self.branching)} levels of edges: expected one a level"
            )
        states = check_stochastic("top", self.top)
        for level, matrix in enumerate(self.transitions):
            if len(matrix) != states:
                raise UsageError(f"the transition below level {level} has {len(matrix)} rows for {states} states")
            states = check_stochastic(f"the transition below level {level}", matrix)

    @property
    def leaves(self) -> int:
        """Number of leaves."""
        return math.prod(self.branching)

    def draw(self, key: jax.Array, size: int) -> TreeBatch:
        """Draw labels and the states of all latents.

        Labels are uniform up to a bias below 2^-32; states follow their probabilities up to the 24 bits of a float32.
        """
        return _draw_tree(self, key, size)


@partial(jax.jit, inline=True, static_argnums=(0, 2))
def _draw_tree(tree: LatentTree, key: jax.Array, size: int) -> TreeBatch:
    for_labels, for_top, for_levels = jax.random.split(key, 3)
    labels = draw_integers(for_labels, (size,), len(tree.top))
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    keys = jnp.concatenate([for_top[None], fold(for_levels, jnp.arange(len(tree.branching)))])
    nodes = np.cumprod([1, *tree.branching]).tolist()  # of each level
    draws = draw_vectors(jax.random.uniform, keys, [size * count for count in nodes], jnp.float32)
    levels = [_step(draws[0].reshape(size, 1), labels[:, None], tree.top)]
    for children, count, numbers, matrix in zip(tree.branching, nodes[1:], draws[1:], tree.transitions, strict=True):
        parents = jnp.repeat(levels[-1], children, axis=1)  # (B, nodes of the next level)
        levels.append(_step(numbers.reshape(size, count), parents, matrix))
    return TreeBatch(labels, tuple(levels))


def binary_tree(branching: tuple[int, ...], correlation: float, bias: tuple[float, ...] = (-1.0, 1.0)) -> LatentTree:
    r"""Build the tree of theorem 5: binary latents and the transition :math:`\tfrac12(1\pm\rho)` at every edge.

    State 1 stands for s = +1 (the token is present), state 0 for s = -1.

    Parameters
    ----------
    branching
        Children of a node at each level, from the top latent downwards.
    correlation
        :math:`\rho = P(\text{same}) - P(\text{other})`.
    bias
        :math:`P(s=+1 \mid y_0) - P(s=-1 \mid y_0)` of the top latent under each label; theorem 5's :math:`\rho_0` is
        minus its mean.

    Raises
    ------
    UsageError
        A correlation or a bias outside [-1, 1]: the transition would leave [0, 1].
    """
    for name, value in (("correlation", correlation), *(("bias", each) for each in bias)):
        if not -1 <= value <= 1:
            raise UsageError(
                f"{name}={value}: theorem 5 assumes transition probabilities (1 ± {name})/2 in [0, 1], so give a "
                "number in [-1, 1]"
            )
    same, other = (1 + correlation) / 2, 1 - (1 + correlation) / 2
    # Rounded, so that a row of tenths reads as tenths.
    other = round(other, 15)
    top = tuple((round(1 - (1 + each) / 2, 15), (1 + each) / 2) for each in bias)
    return LatentTree(branching, (((same, other), (other, same)),) * len(branching), top)


@takes_arrays
def list_tokens(active: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """List the active tokens of each sample in rising order, padded in front.

    Parameters
    ----------
    active
        (B, M) booleans, at most `length` of them true in a row; beyond that the smallest tokens are dropped.
    length
        Places of a sequence.

    Returns
    -------
    tuple
        Tokens (B, length) int32, M where there is none, and booleans (B, length), True where there is one.

    Examples
    --------
    >>> tokens, mask = list_tokens(jnp.array([[False, True, False, True]]), 3)
    >>> tokens.tolist(), mask.tolist()
    ([[4, 1, 3]], [[False, True, True]])
    """
    count = active.shape[-1]
    places = jnp.where(active, jnp.arange(count, dtype=jnp.int32), -1)
    missing = max(0, length - count)
    places = jnp.pad(jnp.sort(places, axis=-1), ((0, 0), (missing, 0)), constant_values=-1)[:, -length:]
    return jnp.where(places < 0, count, places).astype(jnp.int32), places >= 0


class HierarchyBatch(NamedTuple):
    """Sequences of a token hierarchy and their latents; losses read the first two fields.

    Attributes
    ----------
    tokens
        (B, T) int32, leaves in rising order, padded in front with the token `leaves`.
    answers
        (B,) int32, the label: a token of the top level.
    padding_mask
        (B, T) booleans, False on padding.
    latents
        One array (B, size) of booleans a level below the top, the lowest first: which of its tokens the label reached.
    """

    tokens: jax.Array
    answers: jax.Array
    padding_mask: jax.Array
    latents: tuple[jax.Array, ...]


@dataclass(frozen=True)
class HierarchyShape:
    """Sizes of a token hierarchy.

    Attributes
    ----------
    sizes
        Tokens of each level above the leaves, the lowest first; the last is the number of labels.
    parts
        Tokens of the level below in each token: p.
    leaves
        Observed tokens; padding is one more.
    length
        Places of a sequence; None for as many leaves as a label can reach.
    keep
        Probability that an active token activates one of its parts; 1 is the published, deterministic hierarchy.

    Raises
    ------
    UsageError
        More parts than tokens below, more tokens than different sets, sequences that can overflow, or a transition
        probability outside [0, 1].

    Examples
    --------
    >>> HierarchyShape(sizes=(10, 20, 20), parts=2).places
    8
    """

    sizes: tuple[int, ...] = (10, 20, 20)
    parts: int = 2
    leaves: int = 39
    length: int | None = None
    keep: float = 1.0

    def __post_init__(self) -> None:
        if not self.sizes or min(*self.sizes, self.leaves, self.parts) < 1:
            raise UsageError(f"sizes={self.sizes}, leaves={self.leaves}, parts={self.parts}: all must be positive")
        if not 0 <= self.keep <= 1:
            raise UsageError(f"keep={self.keep}: it is the transition probability of an edge, so it lies in [0, 1]")
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
        if self.length is not None and self.length < self.reach:
            raise UsageError(f"length={self.length}: a label can reach {self.reach} leaves, and none may be cut off")

    @property
    def reach(self) -> int:
        """Largest number of leaves that a label can reach."""
        return min(self.leaves, self.parts ** len(self.sizes))

    @property
    def places(self) -> int:
        """Places of a sequence."""
        return self.reach if self.length is None else self.length

    @property
    def labels(self) -> int:
        """Number of labels."""
        return self.sizes[-1]


class TokenHierarchy(eqx.Module):
    """Drawn hierarchy: the parts of each token in the level below.

    Attributes
    ----------
    parts
        One array (size, size below) of booleans a level, the lowest first.
    shape
        The sizes, static.

    Examples
    --------
    >>> hierarchy = draw_hierarchy(HierarchyShape((4, 3, 3), parts=2, leaves=9), jax.random.key(0))
    >>> batch = hierarchy.draw(jax.random.key(1), 5)
    >>> batch.tokens.shape, [level.shape for level in batch.latents]
    ((5, 8), [(5, 4), (5, 3)])
    """

    parts: tuple[jax.Array, ...]
    shape: HierarchyShape = eqx.field(static=True)

    def draw(self, key: jax.Array, size: int) -> HierarchyBatch:
        """Draw uniform labels, up to a bias below 2^-32, and their sequences."""
        for_labels, for_edges = jax.random.split(key)
        return self.expand(draw_integers(for_labels, (size,), self.shape.labels), for_edges)

    def expand(self, labels: jax.Array, key: jax.Array) -> HierarchyBatch:
        """Expand labels (B,) to sequences; the key draws the active edges if `keep` is below one."""
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


def check_stochastic(name: str, matrix: tuple[tuple[float, ...], ...]) -> int:
    """Check a row-stochastic matrix and return its number of columns.

    Raises
    ------
    UsageError
        An entry outside [0, 1], rows of different lengths, or a row that does not add up to one.

    Examples
    --------
    >>> check_stochastic("transition", ((0.5, 0.25, 0.25),))
    3
    """
    widths = {len(row) for row in matrix}
    if len(widths) != 1 or 0 in widths:
        raise UsageError(f"{name}: expected rows of one length, got lengths {sorted(widths)}")
    rows = np.asarray(matrix, np.float64)
    if not ((rows >= 0) & (rows <= 1)).all():
        outside = rows[~((rows >= 0) & (rows <= 1))][0]
        raise UsageError(f"{name}: the transition probability {outside} leaves [0, 1]")
    if (worst := float(np.abs(rows.sum(1) - 1).max())) > STOCHASTIC:
        raise UsageError(f"{name}: a row of probabilities misses one by {worst:.3g}")
    return rows.shape[1]


def _step(draws: jax.Array, parents: jax.Array, matrix: tuple[tuple[float, ...], ...]) -> jax.Array:
    """Sample a state given each parent by its row of a transition matrix, from uniform numbers in [0, 1)."""
    edges = jnp.asarray(np.cumsum(np.asarray(matrix, np.float64), axis=1)[:, :-1], jnp.float32)  # (states, states - 1)
    return (draws[..., None] >= edges[parents]).sum(-1).astype(jnp.int32)
