"""The solver against what it must equal: closed forms, an exact linear branch, and networks of finite size."""

from dataclasses import replace

import numpy as np
import pytest

from manyheads.theory.dmft.branches.attention_infinite_heads import InfiniteHeadsAttention
from manyheads.theory.dmft.branches.attention_infinite_key_dim import InfiniteKeyDimAttention, UniformAttention
from manyheads.theory.dmft.branches.mlp import InfiniteWidthMLP
from manyheads.theory.dmft.finite.ensembles import Network, train_networks
from manyheads.theory.dmft.grids.depth import continuum_step, extrapolate, finite_depth_step
from manyheads.theory.dmft.ntk import neural_tangent_kernel, ntk_outputs
from manyheads.theory.dmft.problem import Problem
from manyheads.theory.dmft.recursion import solve_recursion


def tokens(rng, samples=3, length=2, features=6):
    """Tokens of unit mean square."""
    drawn = rng.standard_normal((samples, length, features))
    return drawn / np.sqrt((drawn**2).mean(-1, keepdims=True))


def solve(problem, *branches, rng=None, responses=True, cells=None):
    rng = rng or np.random.default_rng(0)
    if cells is None:
        layers = [[branch.start(problem, rng)] for _ in range(problem.depth) for branch in branches]
        return solve_recursion(problem, layers, finite_depth_step(problem), responses=responses)
    layers = [[branch.start(problem, rng) for branch in branches] for _ in range(cells)]
    return solve_recursion(problem, layers, continuum_step(problem, cells))


def rms(difference):
    return float(np.sqrt(np.mean(difference**2)))


def problems(rng):
    """Problems of every kind: pooled or per token, both losses, mini-batches, momentum, norms, causal, frozen W_0."""
    labels = np.eye(3)[rng.integers(0, 3, (3, 2))]
    inputs, targets = tokens(rng), rng.choice([-1.0, 1.0], 3)
    batches = rng.random((6, 3, 2))
    return {
        "plain": Problem(inputs, targets, steps=6, learning_rate=0.3, depth=3),
        "norm-momentum": Problem(inputs, targets, steps=6, learning_rate=0.3, depth=2, norm=True, momentum=0.7),
        "everything": Problem(
            inputs,
            labels,
            batches,
            steps=6,
            learning_rate=0.3,
            depth=3,
            depth_exponent=0.5,
            loss="cross-entropy",
            read_out="token",
            causal=True,
            embedding=False,
        ),
    }


@pytest.mark.parametrize("name", ["plain", "norm-momentum", "everything"])
def test_the_lazy_limit_is_kernel_descent_and_the_first_step_always(name, rng):
    problem = problems(rng)[name]
    lazy = ntk_outputs(problem)
    assert np.abs(solve(replace(problem, richness=1e-4), InfiniteKeyDimAttention()).outputs - lazy).max() < 1e-7
    rich = solve(problem, InfiniteKeyDimAttention()).outputs
    assert np.abs(rich - lazy).max() > 1e-4  # the test is not about nothing
    if not problem.norm:
        assert np.abs(rich[1] - lazy[1]).max() < 1e-13


def test_the_neural_tangent_kernel_of_pooled_attention_is_the_printed_one(rng):
    problem = problems(rng)["plain"]
    step, pooled = problem.branch / problem.depth, problem.pooling @ problem.gram @ problem.pooling.T
    kernel = pooled * (2 * (1 + step**2) ** 3 + 2 * problem.branch**2 * (1 + step**2) ** 2)
    first = problem.learning_rate * kernel @ (problem.loss_weights[0][:, None] * problem.flat_targets)
    assert np.abs(ntk_outputs(problem)[1] - first).max() < 1e-13


@pytest.mark.parametrize("activation", ["erf", "relu"])
def test_a_lazy_perceptron_has_its_closed_kernel(activation, rng):
    problem = Problem(tokens(rng), rng.choice([-1.0, 1.0], 3), steps=3, learning_rate=0.3, richness=1e-3, norm=True)
    found = solve(problem, InfiniteKeyDimAttention(), InfiniteWidthMLP(activation, 8192), rng=rng).outputs
    exact = ntk_outputs(problem, activation)
    # Sampling: a relative 1/sqrt(8192) for each of a few kernels; without the frozen twin the error is above one.
    assert rms(found - exact) < 0.03 * rms(exact)


@pytest.mark.parametrize("activation", ["erf", "relu"])
def test_a_token_of_zeros_learns_nothing_in_the_lazy_limit(activation, rng):
    inputs = tokens(rng, 3, 1)
    inputs[0] = 0
    whole = neural_tangent_kernel(Problem(inputs, np.ones(3)), activation)
    assert np.array_equal(whole[0], np.zeros(3))
    assert np.abs(whole[1:, 1:] - neural_tangent_kernel(Problem(inputs[1:], np.ones(2)), activation)).max() < 1e-14


def test_one_token_attends_to_itself_so_attention_is_a_linear_branch(rng):
    problem = Problem(tokens(rng, 4, 1), rng.choice([-1.0, 1.0], 4), steps=6, learning_rate=0.3, depth=2)
    exact = solve(problem, InfiniteKeyDimAttention())
    linear = solve(problem, InfiniteWidthMLP("identity", 512), rng=rng)  # matched moments make what is linear exact
    assert np.abs(exact.outputs - linear.outputs).max() < 1e-6
    assert np.abs(exact.backward - linear.backward).max() < 1e-5
    heads = solve(problem, InfiniteHeadsAttention(2, 512), rng=rng)
    assert np.abs(exact.outputs - heads.outputs).max() < 1e-6


def test_responses_without_derivatives_are_those_of_the_exact_branch(rng):
    """Many coordinates a head: sampled heads approach the branch of infinite key dimension."""
    problem = Problem(tokens(rng), rng.choice([-1.0, 1.0], 3), steps=5, learning_rate=0.5, richness=1.5)
    exact = solve(problem, InfiniteKeyDimAttention())
    sampled = [solve(problem, InfiniteHeadsAttention(key_dim, 2048 // key_dim)) for key_dim in (4, 64)]
    errors = [rms(march.outputs - exact.outputs) for march in sampled]
    assert errors[1] < errors[0] / 4
    assert errors[1] < 0.1 * rms(exact.outputs - solve(problem, InfiniteKeyDimAttention(), responses=False).outputs)
    logits = exact.observables[-1][0]["logits"]
    assert rms(sampled[1].observables[-1][0]["logits"] - logits) < 0.2 * rms(logits)


CASES = {
    "key-dim": (
        (InfiniteKeyDimAttention(),),
        Network(32, 4),
        {"norm": True, "causal": True, "momentum": 0.5, "depth": 2},
    ),
    "heads": (
        (InfiniteHeadsAttention(4, 512, 0.5), InfiniteWidthMLP("gelu", 2048)),
        Network(4, 32, 0.5, "gelu"),
        {"norm": True},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_networks_of_finite_size_scatter_around_the_limit(name, rng):
    branches, network, fields = CASES[name]
    problem = Problem(tokens(rng), np.array([1.0, -1.0, 1.0]), **({"steps": 6, "learning_rate": 0.4} | fields))
    limit, without = (solve(problem, *branches, responses=responses).outputs for responses in (True, False))
    drawn = rng.integers(0, 2**31, 24)
    outputs = train_networks(problem, network, drawn.tolist(), chunk=24).output.values  # (seed, step, output, class)
    mean, error = outputs.mean(0), rms(outputs.std(0)) / np.sqrt(len(drawn))
    # Bias falls like one over the width; noise of the mean is `error`, four of which fail once in 10,000.
    assert rms(mean - limit) < 4 * error + 0.02
    assert rms(mean - without) > 2 * rms(mean - limit)


@pytest.mark.parametrize("norm", [False, True])
def test_the_continuum_is_of_second_order_and_where_finite_depth_goes(norm, rng):
    problem = Problem(tokens(rng), np.array([1.0, -1.0, 1.0]), steps=5, learning_rate=0.3, norm=norm)
    fine = solve(problem, InfiniteKeyDimAttention(), cells=16)
    errors = [rms(solve(problem, InfiniteKeyDimAttention(), cells=cells).outputs - fine.outputs) for cells in (2, 4)]
    assert 3 < errors[0] / errors[1] < 5.5
    deep = [solve(replace(problem, depth=depth), InfiniteKeyDimAttention()) for depth in (8, 16)]
    gaps = [rms(march.outputs - fine.outputs) for march in deep]
    assert 1.4 < gaps[0] / gaps[1] < 2.3
    assert rms(extrapolate(*deep).outputs - fine.outputs) < gaps[1] / 2.5


def test_at_depth_exponent_one_half_attention_stays_uniform(rng):
    problem = Problem(tokens(rng), np.array([1.0, -1.0, 1.0]), steps=5, learning_rate=0.3, depth_exponent=0.5)
    gaps, logits = [], []
    for depth in (16, 32):
        deep = replace(problem, depth=depth)
        whole, uniform = solve(deep, InfiniteKeyDimAttention()), solve(deep, UniformAttention())
        gaps.append(rms(whole.outputs - uniform.outputs))
        logits.append(rms(whole.observables[-1][depth // 2]["logits"]))
    assert gaps[1] < gaps[0] / 1.4
    assert logits[1] < logits[0] / 1.5


def test_with_an_mlp_finite_depth_goes_to_the_continuum(rng):
    problem = Problem(tokens(rng), np.array([1.0, -1.0, 1.0]), steps=4, learning_rate=0.3, norm=True)
    branches = (InfiniteKeyDimAttention(), InfiniteWidthMLP("gelu", 1024))
    limit = solve(problem, *branches, cells=4, rng=np.random.default_rng(1)).outputs
    deep = [solve(replace(problem, depth=depth), *branches, rng=np.random.default_rng(1)) for depth in (4, 12)]
    gaps = [rms(march.outputs - limit) for march in deep]
    assert gaps[1] < gaps[0] / 1.7
