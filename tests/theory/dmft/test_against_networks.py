"""The theory against a second solver, another estimator, and networks; without responses none of it would hold."""

import numpy as np
import pytest
from tests.theory.dmft.one_block import solve_one_block
from tests.theory.dmft.tangents import TangentHeads
from tests.theory.dmft.test_recursion import rms, solve, tokens

from manyheads.statistics import fit_exponent
from manyheads.theory.dmft.branches.attention_infinite_heads import InfiniteHeadsAttention
from manyheads.theory.dmft.branches.attention_infinite_key_dim import InfiniteKeyDimAttention
from manyheads.theory.dmft.finite.ensembles import Network, train_networks
from manyheads.theory.dmft.finite.problems import digits_problem
from manyheads.theory.dmft.problem import Problem


@pytest.mark.parametrize("embedding", [True, False])
def test_one_block_solves_the_equations_of_one_block(embedding, rng):
    weights = np.array([0.5, 0.3, 0.0])  # the last sample is not trained on
    problem = Problem(
        tokens(rng), np.array([1.0, -1.0, 1.0]), weights, steps=6, learning_rate=0.3, branch=0.8, embedding=embedding
    )
    other = solve_one_block(problem)
    for responses in (True, False):
        found = solve(problem, InfiniteKeyDimAttention(), responses=responses)
        gaps = [
            np.abs(found.outputs[..., 0] - other.outputs).max(),
            np.abs(np.array([looks[0]["logits"] for looks in found.observables]) - other.logits).max(),
            np.abs(found.pooled - other.pooled).max(),
        ]
        assert (max(gaps) < 1e-13) == responses
    assert np.abs(other.logits).max() > 1e-3  # attention moves


@pytest.mark.slow
def test_responses_without_derivatives_are_those_of_tangents(rng):
    problem = Problem(tokens(rng, 2), np.array([1.0, -1.0]), steps=4, learning_rate=0.5)
    exact = np.mean([solve(problem, InfiniteHeadsAttention(4, 2048), rng=rng).outputs for _ in range(4)], 0)
    without = solve(problem, InfiniteHeadsAttention(4, 2048), rng=rng, responses=False).outputs
    along = (exact - without) / ((exact - without) ** 2).sum()
    found = [solve(problem, TangentHeads(4, 1024, 512), rng=rng).outputs for _ in range(8)]
    shares = [float(((each - without) * along).sum()) for each in found]  # one with responses, zero without
    error = np.std(shares, ddof=1) / np.sqrt(len(shares))
    assert abs(np.mean(shares) - 1) < 6 * error + 0.01 < 0.2  # 0.01: the error of what they are compared with


@pytest.mark.slow
def test_networks_approach_infinite_key_dimension_at_the_rate_of_their_size(rng):
    """Two blocks, four heads: single networks as N^(-1/2), the variance over heads as 1/N, the mean faster."""
    problem = Problem(tokens(rng), np.array([1.0, -1.0, 1.0]), steps=6, learning_rate=0.3, richness=0.75, depth=2)
    limit, without = (solve(problem, InfiniteKeyDimAttention(), responses=responses) for responses in (True, False))
    sizes, errors, variances = (4, 16), [], []
    for size in sizes:
        drawn = rng.integers(0, 2**31, 192).tolist()
        found = train_networks(problem, Network(size, 4), drawn, chunk=192)
        squares = ((found.output.values - limit.outputs) ** 2).reshape(8, -1)
        errors.append(np.sqrt(squares.mean(1)))
        variances.append(found.logit_variance.values[:, -1].mean(-1).reshape(8, -1).mean(1))
    # Eight groups of 24 networks know a power to about 0.05; corrections of relative order 1/N move it by 0.1.
    for values, power in ((errors, -0.5), (variances, -1.0)):
        interval = fit_exponent(sizes, np.stack(values, axis=1), level=0.999).interval
        assert interval.low - 0.2 < power < interval.high + 0.2
        assert interval.high < power / 2
    mean, noise = found.output.values.mean(0), rms(found.output.values.std(0)) / np.sqrt(192)
    near, far = (rms(mean - solution.outputs) < 4 * noise + 0.02 for solution in (limit, without))
    assert near
    assert not far


@pytest.mark.slow
@pytest.mark.parametrize(("exponent", "least", "most"), [(0.5, 1.12, 1.5), (1.0, 0.9, 1.1)])
def test_what_is_sent_back_grows_with_the_key_dimension_at_logit_exponent_one_half(exponent, least, most, rng):
    """Infinitely many heads: the backward variable below attention, in units of that above it, over training."""
    problem, growths = digits_problem(2, 0, steps=12, learning_rate=0.15, richness=1.5), []
    for key_dim in (4, 64):
        found = solve(problem, InfiniteHeadsAttention(key_dim, 8192 // key_dim, exponent), rng=rng)
        below, above = (np.trace(found.backward[:, level], axis1=1, axis2=2) for level in (0, 1))
        growths.append(np.sqrt(below / above)[-1] / np.sqrt(below / above)[0])
    assert least < growths[1] / growths[0] < most  # 1.26 and 0.99
