"""Latent trees against theorem 5, matrix products and refusals."""

import jax
import numpy as np
import pytest
from scipy import stats

from manyheads.errors import UsageError
from manyheads.theory.joma.systems.latent_tree_task import LatentTree, binary_tree


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    with pytest.raises(UsageError, match="add up to one"):
        LatentTree((2,), (((0.6, 0.5), (0.5, 0.5)),))
    with pytest.raises(UsageError, match="one length"):
        LatentTree((2,), (((1.0,), (0.5, 0.5)),))
    with pytest.raises(UsageError, match="2 rows for 1 states"):
        LatentTree((2,), (((1.0,), (1.0,)),), top=((1.0,),))
    with pytest.raises(UsageError, match="one a level"):
        LatentTree((2, 2), (((1.0, 0.0), (0.0, 1.0)),))
    with pytest.raises(UsageError, match="branching"):
        binary_tree((0,), 0.5)
