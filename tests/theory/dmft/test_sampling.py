"""Matched normals, responses without derivatives, and factors of kernels that are barely positive."""

import numpy as np
import pytest

from manyheads.errors import CertificateError, UsageError
from manyheads.theory.dmft.branches.attention_infinite_heads import InfiniteHeadsAttention
from manyheads.theory.dmft.branches.attention_infinite_key_dim import InfiniteKeyDimAttention
from manyheads.theory.dmft.branches.branch import BranchOutput, BranchProcess
from manyheads.theory.dmft.branches.gaussian_fields import factor, matched_normals, signed_normals, stein_response
from manyheads.theory.dmft.branches.mlp import InfiniteWidthMLP
from manyheads.theory.dmft.dataset import Trajectory
from manyheads.theory.dmft.grids.depth import finite_depth_step
from manyheads.theory.dmft.problem import Problem
from manyheads.theory.dmft.recursion import solve_recursion


def test_matched_normals_have_exact_second_moments(rng):
    drawn = matched_normals(rng, 2, 5, 64)
    flat = drawn.reshape(10, -1)
    assert np.abs(flat @ flat.T / 64 - np.eye(10)).max() < 1e-12
    with pytest.raises(UsageError, match="at least 20"):
        matched_normals(rng, 2, 5, 19)


def test_signed_normals_lose_their_odd_moments(rng):
    drawn = signed_normals(rng, 3, 64, 2)
    flat = drawn.reshape(12, -1)
    assert np.abs(flat @ flat.T / flat.shape[1] - np.eye(12)).max() < 1e-12
    value, query, key, output = drawn[:, 0].reshape(4, 4, -1)  # by group of signs
    for odd in (value * key * output, query * key * output, value * query):
        assert abs(odd.mean()) < 1e-12
    with pytest.raises(UsageError, match="groups of four"):
        signed_normals(rng, 3, 66, 2)


def test_stein_finds_the_slope_of_what_is_linear_exactly_and_of_a_square_root_law_nearly(rng):
    kernel = np.cov(rng.standard_normal((4, 50)))
    root, drawn = factor(kernel), matched_normals(rng, 1, 4, 40_000)[0]
    sources, slopes = root @ drawn, rng.standard_normal((2, 4))
    assert np.abs(stein_response(slopes @ sources, drawn, root) - slopes).max() < 1e-9
    cubic = stein_response(sources[:1] ** 3, drawn, root)[0]  # <d r^3 / d r_b> = 3 <r^2> at b = 0, nothing elsewhere
    assert np.abs(cubic - 3 * kernel[0, 0] * np.eye(4)[0]).max() < 0.5


def test_a_singular_kernel_is_factored_and_an_indefinite_one_refused(rng):
    thin = rng.standard_normal((6, 2))
    root = factor(thin @ thin.T)
    assert np.abs(root @ root.T - thin @ thin.T).max() < 1e-6 * np.trace(thin @ thin.T)
    drawn = matched_normals(rng, 1, 3, 64)[0]
    nothing = factor(np.zeros((3, 3)))  # of what is not trained: drives nothing, and what ignores it has no response
    assert np.abs(nothing).max() < 1e-99
    assert np.all(stein_response(np.zeros((2, 64)), drawn, nothing) == 0)
    with pytest.raises(CertificateError, match="not positive"):
        factor(np.diag([1.0, -1.0]))
    with pytest.raises(CertificateError, match="not positive"):
        factor(np.full((2, 2), np.nan))


class Broken(BranchProcess):
    """A process that writes with a wrong covariance from the third moment on."""

    def __init__(self, process, size):
        self.process, self.size = process, size

    def forward(self, inputs):
        answer = self.process.forward(inputs)
        wrong = self.size * np.ones_like(answer.covariance) if inputs.moment == 2 else answer.covariance
        return BranchOutput(wrong, answer.response)

    def backward(self, inputs):
        return self.process.backward(inputs)


@pytest.mark.parametrize("size", [-1e3, np.nan])
@pytest.mark.parametrize("sampled", [InfiniteHeadsAttention(2, 512), InfiniteWidthMLP("erf", 512)])
def test_a_kernel_that_is_none_ends_the_march_and_what_came_before_is_kept(size, sampled, rng):
    problem = Problem(rng.standard_normal((2, 2, 4)), np.array([1.0, -1.0]), steps=4, learning_rate=0.1, depth=2)

    def start(broken):
        first = InfiniteKeyDimAttention().start(problem, rng)
        return [[Broken(first, size) if broken else first], [sampled.start(problem, np.random.default_rng(0))]]

    whole = solve_recursion(problem, start(broken=False), finite_depth_step(problem))
    with pytest.raises(CertificateError, match="not positive semi-definite: sample more") as caught:
        solve_recursion(problem, start(broken=True), finite_depth_step(problem))
    assert isinstance(caught.value.partial, Trajectory)
    assert np.array_equal(caught.value.partial.outputs, whole.outputs[:2])
    assert not caught.value.measured >= caught.value.threshold


@pytest.mark.parametrize("sampled", [InfiniteHeadsAttention(2, 64), InfiniteWidthMLP("erf", 64)])
def test_too_few_samples_are_refused_with_the_number_that_is_enough(sampled, rng):
    problem = Problem(rng.standard_normal((2, 2, 4)), np.array([1.0, -1.0]), steps=12, learning_rate=0.1)
    with pytest.raises(UsageError, match=r"at least \d+ are needed"):
        sampled.start(problem, rng)


def test_equal_samples_make_singular_kernels_and_are_one(rng):
    tokens = rng.standard_normal((1, 2, 4))
    single = Problem(tokens, np.ones(1), steps=3, learning_rate=0.1)
    double = Problem(np.repeat(tokens, 2, axis=0), np.ones(2), steps=3, learning_rate=0.1)
    for sampled in (InfiniteHeadsAttention(2, 4096), InfiniteWidthMLP("erf", 8192)):
        found = [
            solve_recursion(each, [[sampled.start(each, np.random.default_rng(0))]], finite_depth_step(each)).outputs
            for each in (single, double)
        ]
        assert np.abs(found[1][:, 0] - found[1][:, 1]).max() < 1e-3
        assert np.abs(found[1][:, 0] - found[0][:, 0]).max() < 0.05
