"""Theorem 5 against message passing, and message passing against enumeration."""

import itertools

import numpy as np
import pytest

from manyheads.errors import ShapeError, UsageError
from manyheads.theory.joma.systems.latent_tree_task import binary_tree
from manyheads.theory.joma.theorems.latent_tree import Tree, heights, marginals, predict_cooccurrence, unroll


def draw_tree(rng, count=6):
    """Draw a tree of any shape, with two or three states a node and no symmetry."""
    parents = np.array([-1, *(int(rng.integers(node)) for node in range(1, count))])
    states = rng.integers(2, 4, count)
    rows = [rng.dirichlet(np.ones(states[node]), states[parents[node]]) for node in range(1, count)]
    return Tree(parents, rng.dirichlet(np.ones(states[0])), (None, *rows)), states


def test_messages_are_right_on_any_tree(rng):
    tree, states = draw_tree(rng)
    joint = np.zeros(states)
    for values in itertools.product(*(range(size) for size in states)):
        edges = [tree.transitions[i][values[tree.parents[i]], values[i]] for i in range(1, len(states))]
        joint[values] = tree.root[values[0]] * np.prod(edges)
    seen = joint[:, :, :, 1, :, 0]  # nodes 3 and 5 are observed
    likelihood, given = marginals(tree, {3: 1, 5: 0})
    assert likelihood == pytest.approx(seen.sum(), rel=1e-12)
    for axis, node in enumerate((0, 1, 2, 4)):
        others = tuple(other for other in range(4) if other != axis)
        np.testing.assert_allclose(given[node], seen.sum(others) / seen.sum(), rtol=1e-11)


def test_the_closed_form_is_exact_at_any_depth_and_branching(rng):
    for _ in range(20):
        depth = int(rng.integers(2, 6))
        branching = tuple(int(children) for children in rng.integers(1, 4, depth - 1))
        bias, correlation = rng.uniform(-1, 1, 3), rng.uniform(-0.95, 0.95)
        tree, above = unroll(binary_tree(branching, correlation, tuple(bias))), heights(branching)
        first = int(rng.integers(len(above)))
        given = marginals(tree, {int(tree.leaves[first]): 1})[1]
        for other in np.flatnonzero(above[first]):
            height = above[first, other]
            expected = predict_cooccurrence(correlation, height, depth, -bias.mean())
            assert given[tree.leaves[other]][1] == pytest.approx(expected, abs=1e-13)


def test_siblings_are_close_and_strangers_independent():
    found = predict_cooccurrence(0.8, [1, 2, 3, 4, 5], 6)
    np.testing.assert_allclose(found, [0.82, 0.7048, 0.6311, 0.5839, 0.5537], atol=5e-5)
    assert predict_cooccurrence(1.0, 1, 3) == 1
    assert predict_cooccurrence(0.0, 1, 3, 0.4) == 0.5


def test_the_closed_form_needs_a_symmetric_transition():
    stray = np.array([[0.8, 0.2], [0.1, 0.9]])
    tree = Tree(np.array([-1, 0, 0]), np.array([0.5, 0.5]), (None, stray, stray))
    assert abs(marginals(tree, {1: 1})[1][2][1] - predict_cooccurrence(0.8, 1, 2)) > 0.01


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: predict_cooccurrence(1.2, 1, 3), r"assumes transitions .* in \[0, 1\]"),
        (lambda: predict_cooccurrence(0.5, 1, 3, -1.5), "imbalance"),
        (lambda: predict_cooccurrence(0.5, 3, 3), "height"),
        (lambda: predict_cooccurrence(1.0, 1, 3, 1.0), "never on"),
        (lambda: heights((2, 0)), "branching"),
        (lambda: Tree(np.array([-1, 1]), np.ones(1), (None, np.ones((1, 1)))), "smaller number"),
        (lambda: Tree(np.array([-1, 0]), np.ones(1), (None, np.array([[1.2, -0.2]]))), r"leaves \[0, 1\]"),
        (lambda: marginals(unroll(binary_tree((2,), 0.5)), {9: 1}), "does not have"),
        (lambda: marginals(unroll(binary_tree((2,), 1.0)), {2: 1, 3: 0}), "probability zero"),
    ],
)
def test_what_breaks_an_assumption_is_refused(call, words):
    with pytest.raises(UsageError, match=words):
        call()
    with pytest.raises(ShapeError, match="one a node"):
        Tree(np.array([-1, 0]), np.ones(1), (None,))
