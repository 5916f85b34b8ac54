r"""Theorem 5: co-occurrence of two leaves in a hierarchical binary latent tree (HBLT).

Dictionary: latents :math:`s = \pm 1`, the transition :math:`\tfrac12(1 \pm \rho)` at every binary edge, depth L (L - 1
binary edges from the top latent to a leaf, and the label above), :math:`\rho_0 = \mathbb E_{y_0}[P(s=-1|y_0) -
P(s=+1|y_0)]`, and H the height of the lowest common ancestor of leaves l and m. Since :math:`\mathbb E\,s_l s_m =
\rho^{2H}` and :math:`\mathbb E\,s_l = -\rho^{L-1}\rho_0`,

.. math:: P(y_l = 1 \mid y_m = 1) = \frac12\,\frac{1 + \rho^{2H} - 2 \rho^{L-1} \rho_0}{1 - \rho^{L-1} \rho_0}.

It holds for any branching, since only the path between the leaves enters. `Tree` and `marginals` solve arbitrary trees
exactly by message passing, independently of the formula and without symmetric transitions.

Tian et al. (2023), JoMA: Demystifying multilayer transformers via joint dynamics of MLP and attention, theorem 5;
message passing: Pearl (1982), Reverend Bayes on inference engines.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import ArrayLike, Float, Int

from manyheads._arrays import check_arrays, takes_arrays
from manyheads.errors import ShapeError, UsageError
from manyheads.theory.joma.systems.latent_tree_task import LatentTree, check_stochastic

Array = np.ndarray


@takes_arrays
def predict_cooccurrence(
    correlation: Float[ArrayLike, "*shape"],
    height: Int[ArrayLike, "*shape"],
    depth: Int[ArrayLike, "*shape"],
    imbalance: Float[ArrayLike, "*shape"] = 0.0,
) -> Float[np.ndarray, "*shape"]:
    r"""Compute the probability that a leaf is on, given that another leaf is on.

    Parameters
    ----------
    correlation
        rho in [-1, 1].
    height
        H, edges from the leaves up to their lowest common ancestor: 1 for siblings, at most `depth` - 1.
    depth
        L >= 2.
    imbalance
        rho_0 in [-1, 1]: positive if the top latent is off more often than on.

    Returns
    -------
    Array
        float64, the broadcast shape.

    Raises
    ------
    UsageError
        A correlation or imbalance for which a transition probability leaves [0, 1], a height outside the tree, or a
        leaf that is never on.

    Examples
    --------
    >>> predict_cooccurrence(0.8, [1, 2, 3], 6).round(4).tolist()
    [0.82, 0.7048, 0.6311]
    >>> predict_cooccurrence(1.2, 1, 3)
    Traceback (most recent call last):
        ...
    manyheads.errors.UsageError: correlation=1.2: theorem 5 assumes transitions (1 ± correlation)/2 in [0, 1]
    """
    rho, rho0 = np.asarray(correlation, np.float64), np.asarray(imbalance, np.float64)
    for name, value in (("correlation", rho), ("imbalance", rho0)):
        if not np.all(np.abs(value) <= 1):
            raise UsageError(f"{name}={value}: theorem 5 assumes transitions (1 ± {name})/2 in [0, 1]")
    h, length = np.asarray(height), np.asarray(depth)
    if not (np.all(h == np.floor(h)) and np.all(length == np.floor(length)) and np.all((h >= 1) & (h <= length - 1))):
        raise UsageError(f"height={height!r}, depth={depth!r}: expected whole numbers with 1 <= height <= depth - 1")
    tilt = rho ** (length - 1) * rho0
    if np.any(tilt >= 1):
        raise UsageError("the leaf is never on at this correlation and imbalance: expected a smaller one of either")
    return np.asarray((1 + rho ** (2 * h) - 2 * tilt) / (2 * (1 - tilt)))


@dataclass(frozen=True, eq=False)
class Tree:
    """Latent variables on an arbitrary rooted tree.

    Raises `ShapeError` or `UsageError`: arrays that do not fit together; probabilities outside [0, 1] or rows that do
    not add up to one.

    Examples
    --------
    >>> flip = np.array([[0.9, 0.1], [0.1, 0.9]])
    >>> tree = Tree(np.array([-1, 0, 0]), np.array([0.5, 0.5]), (None, flip, flip))
    >>> tree.leaves.tolist()
    [1, 2]
    """

    parents: Int[np.ndarray, " nodes"]  # smaller numbers than their own; -1 for the root, node 0
    root: Float[np.ndarray, " states"]  # probabilities of the root's states, shape (S_0,)
    transitions: tuple[Float[np.ndarray, "parent own"] | None, ...]  # P(own | parent), (S_parent, S_own); None at first

    def __post_init__(self) -> None:
        for name in ("parents", "root", "transitions"):
            object.__setattr__(self, name, check_arrays(getattr(self, name), name))
        parents = np.asarray(self.parents)
        count = len(parents)
        if count < 1 or parents[0] != -1 or np.any(parents[1:] < 0) or np.any(parents[1:] >= np.arange(1, count)):
            raise UsageError(f"parents={parents}: expected -1 for node 0 and a smaller number for every other node")
        if len(self.transitions) != count:
            raise ShapeError(f"{len(self.transitions)} transitions for {count} nodes: expected one a node")
        check_stochastic("the root's probabilities", np.asarray(self.root)[None])
        states = [len(self.root)]
        for node in range(1, count):
            matrix = self.transitions[node]
            if matrix is None or np.ndim(matrix) != 2 or len(matrix) != states[parents[node]]:
                shape = np.shape(matrix) if matrix is not None else None
                raise ShapeError(f"transition of node {node} has shape {shape}: expected {states[parents[node]]} rows")
            states.append(check_stochastic(f"the transition of node {node}", matrix))

    @property
    def leaves(self) -> Int[np.ndarray, " leaves"]:
        """Nodes without children, in rising order."""
        return np.setdiff1d(np.arange(len(self.parents)), self.parents)


def marginals(tree: Tree, evidence: Mapping[int, int]) -> tuple[float, tuple[Array, ...]]:
    """Compute the probability of the evidence, and of every state of every node given it, by message passing.

    The evidence maps observed nodes to their states. Exact up to rounding, in time proportional to the number of nodes.

    Raises `UsageError`: a node or state that does not exist, or evidence of probability zero.
    """
    count = len(tree.parents)
    sizes = [len(tree.root), *(matrix.shape[1] for matrix in tree.transitions if matrix is not None)]
    local = [np.ones(size) for size in sizes]
    for node, state in evidence.items():
        if not (0 <= node < count and 0 <= state < sizes[node]):
            raise UsageError(f"evidence {node}: {state} names a node or a state that the tree does not have")
        local[node] = np.eye(sizes[node])[state]
    below = [factor.copy() for factor in local]  # P(evidence at and below the node | its state)
    upward: list[Array] = [np.ones(0)] * count
    for node in range(count - 1, 0, -1):  # children have larger numbers, so their messages are complete
        upward[node] = _transition(tree, node) @ below[node]  # (S_parent,)
        below[tree.parents[node]] *= upward[node]
    above = [np.asarray(tree.root, np.float64)]  # P(state of the node, evidence elsewhere)
    siblings = _products_without_one(tree, local, upward)
    for node in range(1, count):
        parent = int(tree.parents[node])
        above.append((above[parent] * siblings[node]) @ _transition(tree, node))
    likelihood = float(above[0] @ below[0])
    if not likelihood > 0:
        raise UsageError(f"evidence {dict(evidence)} has probability zero: expected evidence that can occur")
    joint = [up * down for up, down in zip(above, below, strict=True)]
    return likelihood, tuple(each / each.sum() for each in joint)


def unroll(tree: LatentTree) -> Tree:
    """Convert a `LatentTree` to a `Tree`: node 0 is the label, node 1 the top latent, the leaves come last."""
    parents, transitions = [-1, 0], [None, np.asarray(tree.top)]
    level = [1]
    for children, matrix in zip(tree.branching, tree.transitions, strict=True):
        first = len(parents)
        parents += [parent for parent in level for _ in range(children)]
        transitions += [np.asarray(matrix)] * (len(parents) - first)
        level = list(range(first, len(parents)))
    labels = len(tree.top)
    return Tree(np.asarray(parents), np.full(labels, 1 / labels), tuple(transitions))


def heights(branching: tuple[int, ...]) -> Int[np.ndarray, "leaves leaves"]:
    """Compute the height of the lowest common ancestor of every pair of leaves of a regular tree."""
    if not branching or min(branching) < 1:
        raise UsageError(f"branching={branching}: expected one positive number per level")
    leaf = np.arange(math.prod(branching))
    found = np.zeros((len(leaf), len(leaf)), int)
    for up in range(len(branching)):
        group = leaf // math.prod(branching[len(branching) - up :])
        found += group[:, None] != group[None]
    return found


def _transition(tree: Tree, node: int) -> Array:
    matrix = tree.transitions[node]
    assert matrix is not None  # only the root has none, which `Tree` checks
    return matrix


def _products_without_one(tree: Tree, local: list[Array], upward: list[Array]) -> list[Array]:
    """Multiply, for each node, the evidence of its parent and the messages of its siblings, without division."""
    children: list[list[int]] = [[] for _ in tree.parents]
    for node in range(1, len(tree.parents)):
        children[tree.parents[node]].append(node)
    found = [np.ones(0)] * len(tree.parents)
    for parent, family in enumerate(children):
        before = local[parent]
        for node in family:
            found[node] = before
            before = before * upward[node]
        after = np.ones(len(local[parent]))
        for node in reversed(family):
            found[node] = found[node] * after
            after = after * upward[node]
    return found
