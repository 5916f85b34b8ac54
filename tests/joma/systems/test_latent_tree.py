"""Hierarchical data against enumeration and closed forms."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from manyheads.errors import UsageError
from manyheads.joma.systems.latent_tree import HierarchyShape, LatentTree, binary_tree, draw_hierarchy, list_tokens

SHAPE = HierarchyShape(sizes=(6, 5, 4), parts=2, leaves=9)


def test_pairs_of_leaves_follow_theorem_five(rng, seed):
    """P(y_l = 1 | y_m = 1) by the height of the common ancestor; nine binomial tests at 1e-6: false alarm 1e-5."""
    rho, bias = float(rng.uniform(0.3, 0.9)), (float(rng.uniform(-1, 0)), float(rng.uniform(0, 1)))
    leaves = np.asarray(binary_tree((2, 2, 2), rho, bias).draw(jax.random.key(seed), 4000).levels[-1]) == 1
    rho_0, depth = -sum(bias) / 2, 4
    for height, other in ((1, 1), (2, 2), (3, 4)):
        chance = 0.5 * (1 + rho ** (2 * height) - 2 * rho ** (depth - 1) * rho_0) / (1 - rho ** (depth - 1) * rho_0)
        here = leaves[:, 0]
        assert stats.binomtest(int((leaves[:, other] & here).sum()), int(here.sum()), chance).pvalue > 1e-6
    # The marginal of each leaf, to which the ratio above is blind.
    for leaf in range(6):
        assert stats.binomtest(int(leaves[:, leaf].sum()), 4000, (1 - rho ** (depth - 1) * rho_0) / 2).pvalue > 1e-6


def test_any_number_of_states_and_any_transition(seed):
    """Three states, a matrix a level: the law of a leaf is the product of the matrices."""
    first, second = ((0.7, 0.2, 0.1), (0.0, 0.5, 0.5)), ((0.1, 0.9), (1.0, 0.0), (0.3, 0.7))
    tree = LatentTree((3, 1), (first, second), top=((0.25, 0.75),))
    batch = tree.draw(jax.random.key(seed), 4000)
    law = np.array([0.25, 0.75]) @ np.array(first) @ np.array(second)
    counts = np.bincount(np.asarray(batch.levels[-1])[:, 2], minlength=2)
    assert stats.chisquare(counts, 4000 * law).pvalue > 1e-6
    assert (np.asarray(batch.levels[1]).max(), np.asarray(batch.labels).max()) == (2, 0)
    # A forbidden transition never happens: state 1 of the top never leads to state 0 below it.
    top, below = np.asarray(batch.levels[0])[:, 0], np.asarray(batch.levels[1])
    assert not (below[top == 1] == 0).any()


def test_full_correlation_copies_the_label(seed):
    batch = binary_tree((2, 3), 1.0).draw(jax.random.key(seed), 50)
    assert (np.asarray(batch.levels[-1]) == np.asarray(batch.labels)[:, None]).all()


def test_trees_that_are_none_are_refused():
    for correlation in (1.2, -1.01, float("nan")):
        with pytest.raises(UsageError, match=r"theorem 5 assumes transition probabilities"):
            binary_tree((2,), correlation)
    with pytest.raises(UsageError, match="bias"):
        binary_tree((2,), 0.5, (2.0,))
    with pytest.raises(UsageError, match=r"leaves \[0, 1\]"):
        LatentTree((2,), (((1.5, -0.5), (0.5, 0.5)),))
    with pytest.raises(UsageError, match="misses one"):
        LatentTree((2,), (((0.6, 0.5), (0.5, 0.5)),))
    with pytest.raises(UsageError, match="one length"):
        LatentTree((2,), (((1.0,), (0.5, 0.5)),))
    with pytest.raises(UsageError, match="2 rows for 1 states"):
        LatentTree((2,), (((1.0,), (1.0,)),), top=((1.0,),))
    with pytest.raises(UsageError, match="one a level"):
        LatentTree((2, 2), (((1.0, 0.0), (0.0, 1.0)),))
    with pytest.raises(UsageError, match="branching"):
        binary_tree((0,), 0.5)


def test_tokens_are_listed_in_order_with_padding_in_front(rng):
    active = rng.random((20, 6)) < 0.5
    tokens, shown = (np.asarray(part) for part in list_tokens(jnp.asarray(active), 7))
    for row, kept, there in zip(active, tokens, shown, strict=True):
        expected = np.flatnonzero(row)
        assert kept[there].tolist() == expected.tolist()
        assert there.tolist() == [False] * (7 - len(expected)) + [True] * len(expected)
        assert (kept[~there] == 6).all()


def test_a_hierarchy_expands_as_sets_do(seed, rng):
    """Against unions of Python sets, every label."""
    hierarchy = draw_hierarchy(SHAPE, jax.random.key(seed))
    parts = [[set(np.flatnonzero(row)) for row in np.asarray(level)] for level in hierarchy.parts]
    for level in parts:
        assert all(len(each) == 2 for each in level)
        assert len({frozenset(each) for each in level}) == len(level)
    batch = hierarchy.expand(jnp.arange(4), jax.random.key(0))
    for label in range(4):
        upper = parts[2][label]
        lower = set().union(*(parts[1][token] for token in upper))
        leaves = set().union(*(parts[0][token] for token in lower))
        assert set(np.flatnonzero(np.asarray(batch.latents[1][label]))) == upper
        assert set(np.flatnonzero(np.asarray(batch.latents[0][label]))) == lower
        row, there = np.asarray(batch.tokens[label]), np.asarray(batch.padding_mask[label])
        assert row[there].tolist() == sorted(leaves)


def test_drawn_sets_are_uniform(seed):
    """Ordered pairs of different 2-subsets of 3: six outcomes, one chi-square test at 1e-6."""
    shape = HierarchyShape(sizes=(2,), parts=2, leaves=3)
    draw = jax.jit(jax.vmap(lambda key: draw_hierarchy(shape, key).parts[0]))
    sets = np.asarray(draw(jax.random.split(jax.random.key(seed), 3000))) @ np.array([1, 2, 4])
    pairs = list(itertools.permutations((3, 5, 6), 2))
    counts = [int(((sets == pair).all(1)).sum()) for pair in pairs]
    assert sum(counts) == 3000
    assert stats.chisquare(counts).pvalue > 1e-6


def test_edges_fail_at_their_rate(seed):
    """One token of two parts: each is on with probability `keep`, tested at 1e-6."""
    shape = HierarchyShape(sizes=(1,), parts=2, leaves=2, keep=0.7)
    batch = draw_hierarchy(shape, jax.random.key(seed)).draw(jax.random.key(seed + 1), 3000)
    count = int(np.asarray(batch.padding_mask).sum())
    assert stats.binomtest(count, 6000, 0.7).pvalue > 1e-6


def test_hierarchies_that_do_not_fit_are_refused():
    for change, says in (
        ({"parts": 10}, "the level below has 9"),
        ({"sizes": (40,)}, "there are only 36 sets"),
        ({"length": 7}, "can reach 8 leaves"),
        ({"keep": 1.1}, r"lies in \[0, 1\]"),
        ({"keep": float("nan")}, r"lies in \[0, 1\]"),
        ({"sizes": ()}, "must be positive"),
        ({"leaves": 0}, "must be positive"),
    ):
        with pytest.raises(UsageError, match=says):
            HierarchyShape(**({"sizes": (6, 5, 4), "parts": 2, "leaves": 9} | change))
    assert SHAPE.places == min(9, 2**3)
    assert math.comb(9, 2) == 36
