"""Token hierarchies against enumeration with sets, and the uniformity of their draws."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from manyheads.errors import UsageError
from manyheads.theory.joma.systems.token_hierarchy import HierarchyShape, draw_hierarchy, list_tokens

SHAPE = HierarchyShape((8, 8, 6), leaves=9)  # that of the hidden neurons: compiled once


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
    batch = hierarchy.expand(jnp.arange(6), jax.random.key(0))
    for label in range(6):
        upper = parts[2][label]
        lower = set().union(*(parts[1][token] for token in upper))
        leaves = set().union(*(parts[0][token] for token in lower))
        assert set(np.flatnonzero(np.asarray(batch.latents[1][label]))) == upper
        assert set(np.flatnonzero(np.asarray(batch.latents[0][label]))) == lower
        row, there = np.asarray(batch.tokens[label]), np.asarray(batch.padding_mask[label])
        assert row[there].tolist() == sorted(leaves)


@pytest.mark.slow
def test_drawn_sets_are_uniform(seed):
    """Ordered pairs of different 2-subsets of 3: six outcomes, one chi-square test at 1e-6."""
    shape = HierarchyShape(sizes=(2,), parts=2, leaves=3)
    draw = jax.jit(jax.vmap(lambda key: draw_hierarchy(shape, key).parts[0]))
    sets = np.asarray(draw(jax.random.split(jax.random.key(seed), 3000))) @ np.array([1, 2, 4])
    pairs = list(itertools.permutations((3, 5, 6), 2))
    counts = [int(((sets == pair).all(1)).sum()) for pair in pairs]
    assert sum(counts) == 3000
    assert stats.chisquare(counts).pvalue > 1e-6


@pytest.mark.slow
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
        ({"keep": 1.1}, "at least 0 and at most 1"),
        ({"keep": float("nan")}, "at least 0 and at most 1"),
        ({"sizes": ()}, "expected one or more integers"),
        ({"leaves": 0}, "at least 1"),
    ):
        with pytest.raises(UsageError, match=says):
            HierarchyShape(**({"sizes": (6, 5, 4), "parts": 2, "leaves": 9} | change))
    assert SHAPE.places == min(9, 2**3)
