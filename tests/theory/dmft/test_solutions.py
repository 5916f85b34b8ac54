"""The three front doors: what they refuse, what they announce, and that they stop when they know enough."""

import resource
import time
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import k0
from tests.theory.dmft.one_block import solve_one_block

from manyheads.errors import CertificateError, UsageError
from manyheads.theory.dmft import Problem, Sampling, infinite_depth, infinite_heads, infinite_key_dim


@pytest.fixture
def task(rng):
    drawn = rng.standard_normal((2, 2, 6))
    inputs = drawn / np.sqrt((drawn**2).mean(-1, keepdims=True))
    return Problem(inputs, np.array([1.0, -1.0]), steps=4, learning_rate=0.3)


def test_what_is_no_limit_is_refused_with_the_way_round(task):
    with pytest.raises(UsageError, match="infinite_heads"):
        infinite_key_dim(task, logit_exponent=0.5)
    with pytest.raises(UsageError, match="key_dim"):
        infinite_depth(task, logit_exponent=0.5)
    with pytest.raises(UsageError, match="GB"):
        infinite_key_dim(task, sampling=Sampling(memory=1e4))
    for wrong in ({"key_dim": 0}, {"key_dim": 1.5}, {"cells": 0}, {"cells": 1.5}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            infinite_depth(task, **wrong)
    with pytest.raises(UsageError, match="cells"):  # the number of blocks there, but not by this name
        infinite_depth(replace(task, depth_exponent=0.5), cells=0)
    for wrong in (
        {"samples": 0},
        {"samples": 9000.5},
        {"most": np.nan},
        {"tolerance": 0.0},
        {"memory": np.nan},
        {"seed": -1},
        {"seed": None},
        {"seed": 0.5},
    ):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Sampling(**wrong)


def test_a_refusal_is_quick_and_offers_what_can_be_done(task):
    with pytest.raises(UsageError, match=r"`every=\d+` solves .* fits") as caught:
        infinite_key_dim(replace(task, steps=1_000_000))  # a second; hours, where work grows like its square
    assert "infinite_depth" not in str(caught.value)
    with pytest.raises(UsageError, match="infinite_depth"):
        infinite_key_dim(replace(task, depth=2, momentum=0.5), sampling=Sampling(memory=1e4))
    with pytest.raises(UsageError, match=r"cells$"):
        infinite_depth(replace(task, momentum=0.5), sampling=Sampling(memory=1e4))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("change", [{}, {"depth": 10**9}, {"steps": 10**9}, {"depth": 10**400}, {"steps": 10**400}])
def test_any_size_is_judged_before_work(task, change, every):
    """A billion cells, layers or steps: refused from a closed form, before a list of them is laid out."""
    start, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def solve(exponent):
        sized = replace(task, depth_exponent=exponent, **change)
        if "depth" in change:
            return infinite_key_dim(sized, every=every)
        return infinite_depth(sized, cells=4 if change else 10**9, every=every)

    for exponent in (0.5, 0.75, 1.0):
        with pytest.raises(UsageError, match=r"GB|expected an integer (from 1 to|of at least 1 and at most)"):
            solve(exponent)
    assert time.process_time() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000  # kilobytes


@pytest.mark.parametrize("solve", [infinite_key_dim, infinite_depth, lambda problem: infinite_heads(problem, 2)])
def test_a_rate_too_large_ends_in_a_named_error_that_keeps_what_came_before(solve, task):
    wild = replace(task, learning_rate=100.0, steps=8)
    with pytest.raises(CertificateError, match="diverges") as caught:
        solve(wild)
    partial = caught.value.partial
    before = partial.sizes["step"]
    assert 0 < before < wild.steps
    assert np.all(np.isfinite(partial.output))
    if solve in (infinite_key_dim, infinite_depth):  # of samples one half is left
        assert np.allclose(partial.output, solve(replace(wild, steps=before)).output)


def test_where_nothing_is_trained_yet_nothing_moves(task):
    resting = replace(task, steps=2, weights=np.array([[0.0, 0.0], [1.0, 1.0]]))
    for solved in (infinite_heads(resting, 2, activation="gelu"), infinite_key_dim(resting)):
        assert np.all(solved.output == 0)
    later = infinite_key_dim(replace(task, steps=3, weights=np.array([[0.0, 0.0], [0.5, 0.5], [0.5, 0.5]])))
    at_once = infinite_key_dim(replace(task, steps=2))
    assert np.abs(later.output.values[2] - at_once.output.values[1]).max() < 1e-14


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_noise_does_not_grow_as_training_gets_lazy(activation, task):
    """Responses have a noise of one over the richness but frozen neurons are subtracted, signs of heads cancel."""
    lazy = replace(task, richness=1e-4, steps=3)
    solved = infinite_heads(lazy, 2, activation=activation, sampling=Sampling(samples=512))
    assert float(np.sqrt((solved.output_error**2).mean())) < 0.05


def test_sampling_goes_on_until_the_error_is_small_enough(task):
    few = infinite_heads(task, 2, sampling=Sampling(samples=256))
    reached = float(np.sqrt((few.output_error**2).mean()))
    better = infinite_heads(task, 2, sampling=Sampling(samples=256, tolerance=reached / 3))
    assert float(np.sqrt((better.output_error**2).mean())) <= reached / 3
    with pytest.raises(CertificateError, match="most") as caught:
        infinite_heads(task, 2, sampling=Sampling(samples=256, tolerance=1e-9, most=512))
    assert caught.value.partial.output_error.mean() == pytest.approx(caught.value.measured, rel=1)
    halved = replace(task, depth_exponent=0.5, steps=2)  # what is extrapolated reaches the error, not its parts
    solved = infinite_depth(halved, key_dim=2, cells=2, sampling=Sampling(samples=256, tolerance=0.02))
    assert 0 < float(np.sqrt((solved.output_error**2).mean())) <= 0.02


def test_the_error_of_two_halves_is_the_error(task):
    exact = infinite_heads(task, 2, sampling=Sampling(seed=99, samples=4096)).output
    solved = [infinite_heads(task, 2, sampling=Sampling(seed=seed, samples=256)) for seed in range(16)]
    measured = np.sqrt(np.mean([((one.output - exact) ** 2).values for one in solved]))
    claimed = np.sqrt(np.mean([(one.output_error**2).values for one in solved]))
    assert 0.4 < measured / claimed < 2.5


def test_depth_goes_to_its_limit_at_every_exponent(task):
    for exponent, cells in ((1.0, 8), (0.5, 16)):
        there = replace(task, depth_exponent=exponent)
        limit = infinite_depth(there, cells=cells).output
        gaps = [
            float(np.sqrt(((infinite_key_dim(replace(there, depth=depth)).output - limit) ** 2).mean()))
            for depth in (8, 16)
        ]
        assert gaps[1] < gaps[0] / 1.4
    with pytest.raises(UsageError, match="1/2 and 1 only"):
        infinite_depth(replace(task, depth_exponent=0.75), key_dim=2)


def test_a_loss_at_infinite_depth_is_that_of_the_outputs(task):
    long = replace(task, depth_exponent=0.5, steps=24, learning_rate=0.05)  # intervals of three steps are stable
    for solved in (infinite_depth(long, cells=2), infinite_depth(long, cells=2, every=3)):
        squares = ((solved.output.values[..., 0] - task.targets[:, 0]) ** 2).mean(-1) / 2
        assert np.allclose(solved.loss, squares, rtol=1e-12)


def test_attention_that_stays_uniform_is_shown_like_any_other(task):
    solved = infinite_depth(replace(task, depth_exponent=0.75, causal=True), cells=2)
    assert solved.logits.dims == ("step", "layer", "sample", "token", "key")
    assert np.all(solved.logits == 0)
    assert np.array_equal(solved.attention.values[-1, 1, 0], [[1, 0], [0.5, 0.5]])


def test_the_distribution_over_heads_is_that_of_a_product_of_gaussians(task):
    """Before training q and k are independent Gaussians: with one component their product has known quantiles."""
    samples = 65_536
    solved = infinite_heads(replace(task, steps=2), 1, sampling=Sampling(samples=samples))
    start = solved.isel(step=0, layer=0)
    assert np.allclose(start.attention.sum("key"), 1)
    assert np.all(start.attention > 0)
    squares = (task.inputs**2).mean(-1)  # of queries and keys
    scale = np.sqrt(squares[:, :, None] * squares[:, None, :])
    # Of a product of two standard normals, 95% are below 1.595 and 75% below 0.365 (its density is K_0(|x|)/pi). Heads
    # come in fours, whose products are one up to its sign: quantiles are those of its size in a quarter of the samples.
    for share, wanted in ((0.95, 1.595), (0.75, 0.365)):
        above, below = (start.logit_quantiles.sel(quantile=each, method="nearest") for each in (share, 1 - share))
        size = 2 * share - 1
        error = np.sqrt(size * (1 - size) / (samples / 4)) / (2 * k0(wanted) / np.pi)
        assert np.abs(above / scale - wanted).max() < 6 * error < 0.12
        assert np.abs(above + below).max() < 1e-12 * float(scale.max())


def test_two_time_functions_are_those_of_a_second_solver(rng):
    problem = Problem(rng.standard_normal((3, 2, 5)), rng.standard_normal(3), steps=4, learning_rate=0.8, richness=1.2)
    solved, other = infinite_key_dim(problem, keep="two-time"), solve_one_block(problem)
    n = problem.steps * problem.rows
    np.testing.assert_allclose(solved.correlation.values[0].reshape(n, n), other.correlation, atol=1e-12)
    dressed = other.dressing[:, None] * other.response  # its backward variable is not dressed with c Delta
    np.testing.assert_allclose(solved.backward_response.values[0].reshape(n, n), dressed, atol=1e-12)
    assert np.abs(dressed).max() > 1e-3
    stream = [solved.correlation.values[0, t, :, t] for t in range(problem.steps)]
    np.testing.assert_allclose(solved.stream.values[:, 0], stream, atol=1e-12)


def test_the_first_step_follows_the_neural_tangent_kernel_that_is_returned(rng):
    problem = Problem(rng.standard_normal((3, 2, 5)), rng.standard_normal(3), steps=2, learning_rate=0.4, depth=2)
    solved = infinite_key_dim(problem, keep="two-time")
    first = problem.learning_rate * solved.ntk.values @ (problem.targets[:, 0] / 3)
    np.testing.assert_allclose(solved.output.values[1, :, 0], first, rtol=1e-10)
    assert "ntk" not in infinite_key_dim(problem)


def test_two_time_functions_of_halves_have_errors_and_need_every_step(rng):
    problem = Problem(rng.standard_normal((2, 2, 5)), rng.standard_normal(2), steps=3, learning_rate=0.4)
    solved = infinite_heads(problem, 2, sampling=Sampling(samples=512), keep="two-time")
    assert (solved.response_error.values >= 0).all()
    later = solved.response.values[0, 1, :, 2]  # no response to what comes later
    assert (later == 0).all()
    with_mlp = infinite_key_dim(problem, activation="erf", keep="two-time")  # logits are of one branch of the two
    assert (with_mlp.sizes["branch"], with_mlp.sizes["layer"]) == (2, 1)
    with pytest.raises(UsageError, match="every=1"):
        infinite_key_dim(problem, every=3, keep="two-time")
    with pytest.raises(UsageError, match="two-time"):
        infinite_key_dim(problem, keep="all")
