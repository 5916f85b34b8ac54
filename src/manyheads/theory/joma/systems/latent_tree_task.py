r"""Latent tree of theorem 5: a label, a tree of latents below it, and its observed leaves.

The label determines the distribution of the top latent, and every child draws its state given its parent by a
transition matrix.

Source: Tian, Wang, Zhang, Chen, Du, "JoMA: Demystifying Multilayer Transformers via JOint Dynamics of MLP and
Attention", section 5 (arXiv 2310.00535).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from manyheads.data.draws import draw_integers, draw_vectors
from manyheads.errors import UsageError

STOCHASTIC = 1e-9  # tolerance of the sum of a row of probabilities


class TreeBatch(NamedTuple):
    """Labels and states of a latent tree, int32, levels from the top (B, 1) down to the leaves (B, leaves).

    The children of node i of a level are the nodes i b, ..., i b + b - 1 of the next.
    """

    labels: Int[Array, " batch"]
    levels: tuple[Int[Array, "batch nodes"], ...]


@dataclass(frozen=True)
class LatentTree:
    r"""A tree of latents of any depth, branching and transition.

    .. math:: s_{\text{top}} \sim P(\cdot \mid y_0), \qquad s_{\text{child}} \sim T_l(s_{\text{parent}}, \cdot),

    independently given the parent, with a uniform label :math:`y_0`.

    Examples
    --------
    >>> tree = binary_tree((2, 3), correlation=0.8)
    >>> tree.leaves, tree.transitions[0]
    (6, ((0.9, 0.1), (0.1, 0.9)))
    >>> batch = tree.draw(jax.random.key(0), 5)
    >>> [level.shape for level in batch.levels]
    [(5, 1), (5, 2), (5, 6)]
    """

    branching: tuple[int, ...]  # children of a node at each level, from the top downwards; L - 1 levels
    transitions: tuple[tuple[tuple[float, ...], ...], ...]  # a row-stochastic matrix a level, from the top downwards
    top: tuple[tuple[float, ...], ...] = ((1.0, 0.0), (0.0, 1.0))  # row y: the top latent under label y

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

    @partial(jax.jit, inline=True, static_argnums=(0, 2))
    def draw(self, key: jax.Array, size: int) -> TreeBatch:
        """Draw labels and the states of all latents.

        Labels are uniform up to a bias below 2^-32; states follow their probabilities up to the 24 bits of a float32.
        """
        for_labels, for_top, for_levels = jax.random.split(key, 3)
        labels = draw_integers(for_labels, (size,), len(self.top))
        fold = jax.vmap(jax.random.fold_in, (None, 0))
        keys = jnp.concatenate([for_top[None], fold(for_levels, jnp.arange(len(self.branching)))])
        nodes = np.cumprod([1, *self.branching]).tolist()  # of each level
        draws = draw_vectors(jax.random.uniform, keys, [size * count for count in nodes], jnp.float32)
        levels = [_step(draws[0].reshape(size, 1), labels[:, None], self.top)]
        for children, count, part, matrix in zip(self.branching, nodes[1:], draws[1:], self.transitions, strict=True):
            parents = jnp.repeat(levels[-1], children, axis=1)  # (B, nodes of the next level)
            levels.append(_step(part.reshape(size, count), parents, matrix))
        return TreeBatch(labels, tuple(levels))


def binary_tree(branching: tuple[int, ...], correlation: float, bias: tuple[float, ...] = (-1.0, 1.0)) -> LatentTree:
    r"""Build the tree of theorem 5: binary latents and the transition :math:`\tfrac12(1\pm\rho)` at every edge.

    State 1 stands for s = +1 (the token is present), state 0 for s = -1. The correlation is
    :math:`\rho = P(\text{same}) - P(\text{other})`; the bias is :math:`P(s=+1 \mid y_0) - P(s=-1 \mid y_0)` of the
    top latent under each label, and theorem 5's :math:`\rho_0` is minus its mean.
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


def check_stochastic(name: str, matrix: Any) -> int:
    """Check a row-stochastic matrix and return its number of columns; UsageError if it is none."""
    widths = {len(row) for row in matrix}
    if len(widths) != 1 or 0 in widths:
        raise UsageError(f"{name}: expected rows of one length, got lengths {sorted(widths)}")
    rows = np.asarray(matrix, np.float64)
    if not ((rows >= 0) & (rows <= 1)).all():
        outside = rows[~((rows >= 0) & (rows <= 1))][0]
        raise UsageError(f"{name}: the transition probability {outside} leaves [0, 1]")
    if (worst := float(np.abs(rows.sum(1) - 1).max())) > STOCHASTIC:
        raise UsageError(f"{name}: the probabilities of a row must add up to one, which misses by {worst:.3g}")
    return rows.shape[1]


def _step(draws: jax.Array, parents: jax.Array, matrix: tuple[tuple[float, ...], ...]) -> jax.Array:
    """Sample a state given each parent by its row of a transition matrix, from uniform numbers in [0, 1)."""
    edges = jnp.asarray(np.cumsum(np.asarray(matrix, np.float64), axis=1)[:, :-1], jnp.float32)  # (states, states - 1)
    return (draws[..., None] >= edges[parents]).sum(-1).astype(jnp.int32)
