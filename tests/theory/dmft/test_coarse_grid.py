"""Coarse grids in time: exact where they must be, near to every step where they are not, and they know how near."""

from dataclasses import replace

import numpy as np
import pytest

from manyheads.errors import CertificateError, UsageError
from manyheads.theory.dmft import (
    Network,
    Problem,
    Sampling,
    infinite_depth,
    infinite_heads,
    infinite_key_dim,
    recursion,
    train_networks,
)
from manyheads.theory.dmft.branches.attention_infinite_key_dim import InfiniteKeyDimAttention
from manyheads.theory.dmft.grids import coarse_grid
from manyheads.theory.dmft.grids.coarse_grid import TimeGrid, mean_errors, start_interval
from manyheads.theory.dmft.grids.depth import finite_depth_step
from manyheads.theory.dmft.ntk import neural_tangent_kernel
from manyheads.theory.dmft.recursion import solve_recursion


def tokens(rng, samples, length, features=6):
    drawn = rng.standard_normal((samples, length, features))
    return drawn / np.sqrt((drawn**2).mean(-1, keepdims=True))


def rms(values):
    return float(np.sqrt(np.mean(np.asarray(values) ** 2)))


def problems(rng, steps=72):
    """A pooled problem with a sample outside the loss, and one with mini-batches, many classes and a causal mask."""
    labels = np.eye(3)[rng.integers(0, 3, (2, 2))]
    batches = (1 + rng.random((steps, 2, 2))) / 6
    return {
        "pooled": Problem(
            tokens(rng, 3, 2),
            np.array([1.0, -1.0, 1.0]),
            np.array([0.5, 0.5, 0.0]),
            steps=steps,
            learning_rate=0.05,
            norm=True,
        ),
        "batches": Problem(
            tokens(rng, 2, 2), labels, batches, steps, 0.06, loss="cross-entropy", read_out="token", causal=True
        ),
    }


@pytest.mark.parametrize("every", [1, 3, 5, 27])
@pytest.mark.parametrize("steps", [1, 2, 10, 12, 13, 16, 19, 22, 97, 200])
def test_every_step_of_training_is_counted_once(every, steps):
    problem = Problem(np.ones((1, 1, 2)), np.ones(1), steps=steps)
    grid = TimeGrid.of(problem, every)
    for each in (grid, grid.tripled()):
        assert all(length % 2 for length in each.lengths)
        assert each.times[-1] == steps - 1
        assert np.all(np.diff(each.times) > 0)
        assert np.array_equal(each.memory[each.shown].sum(1), each.starts)  # as many gradients as steps before
        assert np.all(np.triu(each.memory) == 0)
    assert len(np.setdiff1d(grid.tripled().starts, grid.starts)) <= 1
    assert (grid.tripled().lengths == grid.lengths) == (max(grid.lengths, default=1) == 1)


def test_single_steps_are_the_training_itself(rng):
    for problem in problems(rng, steps=12).values():
        started = [[InfiniteKeyDimAttention().start(problem, rng)] for _ in range(2)]
        whole = solve_recursion(problem, started[:1], finite_depth_step(problem))
        single = TimeGrid(problem, (*[1] * 8, 3), np.eye(problem.outputs))
        coarse = solve_recursion(single.moments, started[1:], finite_depth_step(problem), grid=single)
        assert np.abs(whole.outputs[:9] - coarse.outputs[:9]).max() < 1e-14


@pytest.mark.parametrize("learning_rate", [0.02, 0.5])
def test_in_the_lazy_limit_intervals_of_any_length_are_exact(learning_rate, rng):
    """Gradients stay what they are: errors that take every step are right, where one long step would diverge."""
    problem = replace(problems(rng)["pooled"], learning_rate=learning_rate, richness=1e-5, steps=60, norm=False)
    kernel = neural_tangent_kernel(problem)
    shares = np.sqrt(problem.loss_weights[0])
    fastest = learning_rate * np.linalg.eigvalsh(shares[:, None] * kernel * shares)[-1]
    assert (27 * fastest > 4) == (learning_rate == 0.5)
    assert fastest < 1.9
    found = infinite_key_dim(problem, every=27)
    every_step = infinite_key_dim(problem)
    assert np.abs(found.output - every_step.output.sel(step=found.step)).max() < 1e-5


def test_a_wrong_kernel_is_learned(rng):
    """Outputs of descent with a known kernel, from a guess of twice its size in a wrong frame."""
    problem = replace(problems(rng)["pooled"], steps=65)
    kernel, learning_rate = neural_tangent_kernel(problem), problem.learning_rate
    shares = problem.loss_weights[0][:, None]
    gaps = []
    for guess in (2 * np.diag(np.diag(kernel)), kernel):
        grid = TimeGrid(problem, (1, 1, 1, 1, *(5,) * 12), guess)
        state, output, exact, gap = start_interval(grid), np.zeros((3, 1)), [np.zeros((3, 1))], []
        for _ in range(65):
            exact.append(exact[-1] + learning_rate * kernel @ (shares * (problem.flat_targets - exact[-1])))
        used = np.zeros((len(grid.times), 3, 1))
        for moment, time in enumerate(grid.times):
            output = learning_rate * kernel @ np.tensordot(grid.memory[moment, :moment], used[:moment], 1)
            used[moment], state = mean_errors(grid, state, moment, output, used[:moment])
            gap.append(rms(output - exact[time]))
        gaps.append(max(gap))
    assert gaps[0] < 0.02
    assert gaps[1] < 1e-12


def test_noise_of_outputs_that_have_arrived_is_not_learned(rng):
    """Outputs of sampled branches scatter by a millionth; a kernel that believes them grows until they diverge."""
    worst = 0.0
    for _ in range(8):
        problem = Problem(tokens(rng, 2, 2), np.array([1.0, -1.0]), steps=200, learning_rate=0.3)
        kernel, shares = neural_tangent_kernel(problem), problem.loss_weights[0][:, None]
        grid = TimeGrid.of(problem, 9, kernel)
        state, used, exact = start_interval(grid), np.zeros((len(grid.times), 2, 1)), [np.zeros((2, 1))]
        for _ in range(200):
            exact.append(exact[-1] + problem.learning_rate * kernel @ (shares * (problem.flat_targets - exact[-1])))
        for moment, time in enumerate(grid.times):
            output = problem.learning_rate * kernel @ np.tensordot(grid.memory[moment, :moment], used[:moment], 1)
            output += 1e-6 * rng.standard_normal(output.shape)
            used[moment], state = mean_errors(grid, state, moment, output, used[:moment])
            worst = max(worst, float(np.abs(output - exact[time]).max()))
    assert worst < 1e-3  # learned from, noise makes more of six in ten draws, and up to 1e26


@pytest.mark.slow
def test_what_was_not_foreseen_is_made_good(rng, monkeypatch):
    gaps = {True: 0.0, False: 0.0}
    for _ in range(3):
        problem = replace(problems(rng, steps=48)["pooled"], norm=False)
        exact = infinite_key_dim(problem)
        for corrected in gaps:
            with monkeypatch.context() as patch:
                if not corrected:
                    patch.setattr(coarse_grid, "_correct", lambda grid, state, moment, found, past: state)
                found = infinite_key_dim(problem, every=3)
            gaps[corrected] += rms(found.output - exact.output.sel(step=found.step))
    assert gaps[True] < 0.9 * gaps[False]  # of 14 draws single ones have ratios of 0.24 to 0.82


# The claim is an estimate. Over 40 draws of either problem and both grids gap / claim had a median of 0.23 at most, and
# a greatest value of 0.77 (pooled, logarithms scatter by 0.6 at most) and 1.3 (batches, by 0.75; the loss by 1.2, and
# its greatest was 0.81): factors of two and three leave more than three such deviations from the median. The geometric
# mean over variables and grids was 0.19 (pooled, scatter 0.24) and 0.12 (batches, 0.43) over 36 others: 0.02 and 0.6
# are 3.7 deviations away or more.
@pytest.mark.parametrize(("name", "slack"), [("pooled", 2), pytest.param("batches", 3, marks=pytest.mark.slow)])
def test_the_error_is_known(name, slack, rng):
    problem = problems(rng)[name]
    exact = infinite_key_dim(problem)
    assert rms(exact.pooled[-1] - exact.pooled[0]) > 0.1 * rms(exact.pooled[0])  # features move
    errors, shares = {}, []
    for every in (3, 9):
        found = infinite_key_dim(problem, every=every)
        assert found.sizes["step"] < problem.steps / 2
        for variable in ("output", "loss", "stream", "pooled"):
            gap, claim = rms(found[variable] - exact[variable].sel(step=found.step)), rms(found[f"{variable}_error"])
            assert gap < slack * claim
            shares.append(gap / claim)
            errors[variable, every] = gap
    assert 0.02 < np.exp(np.mean(np.log(shares))) < 0.6
    assert errors["output", 9] < 0.06 * rms(exact.output)
    kept = infinite_key_dim(replace(problem, richness=1e-4), every=9).output  # what is not learned is no such answer
    assert rms(kept - exact.output.sel(step=kept.step)) > 5 * errors["output", 9]


@pytest.mark.slow
def test_networks_trained_step_by_step_follow_the_limit_on_few_moments(rng):
    problem = replace(problems(rng)["pooled"], richness=1.5, norm=False)
    found = infinite_key_dim(problem, every=27)
    drawn = rng.integers(0, 2**31, 24).tolist()
    outputs = train_networks(problem, Network(64, 1), drawn, chunk=24).output.sel(step=found.step)
    mean, noise = outputs.mean("seed"), rms(outputs.std("seed")) / np.sqrt(24)
    assert rms(mean - found.output) < 4 * noise + 0.01
    still = infinite_key_dim(replace(problem, richness=1e-4), every=27).output
    assert rms(mean - still) > 1.5 * rms(mean - found.output)


@pytest.mark.slow
def test_all_doors_take_a_coarse_grid_and_say_what_it_costs(rng):
    problem = Problem(tokens(rng, 2, 2), np.array([1.0, -1.0]), steps=16, learning_rate=0.1)
    for solve in (
        lambda **fields: infinite_heads(problem, 2, **fields),
        lambda **fields: infinite_depth(problem, **fields),
    ):
        exact, found = solve(), solve(every=3)
        gap = found.output - exact.output.sel(step=found.step)
        assert found.sizes["step"] < 16
        assert rms(gap) < 3 * rms(found.output_error) + 0.003  # heads: two draws of samples, about 0.001 each


@pytest.mark.slow
def test_an_error_that_is_asked_for_makes_the_grid_finer(rng):
    problem = Problem(tokens(rng, 2, 2), np.array([1.0, -1.0]), steps=40, learning_rate=0.1)
    rough = infinite_key_dim(problem, every=9)
    wanted = rms(rough.output_error) / 10
    finer = infinite_key_dim(problem, every=9, sampling=Sampling(tolerance=wanted))
    assert rms(finer.output_error) <= wanted
    assert rough.sizes["step"] < finer.sizes["step"]
    all_steps = infinite_key_dim(problem, every=9, sampling=Sampling(tolerance=1e-15))
    assert np.array_equal(all_steps.output, infinite_key_dim(problem).output)
    bound = 1.01 * rough.attrs["planned_bytes"]
    with pytest.raises(CertificateError, match="short intervals") as caught:
        infinite_key_dim(problem, every=9, sampling=Sampling(tolerance=wanted, memory=bound))
    assert rms(caught.value.partial.output_error) == pytest.approx(caught.value.measured)


@pytest.mark.slow
def test_noise_of_samples_makes_no_grid_finer():
    """It is in the difference of grids, too, but more samples and not more moments take it away."""
    problem = Problem(2 * np.eye(4).reshape(2, 2, 4), np.array([1.0, -1.0]), steps=13, learning_rate=0.02)
    rough = infinite_heads(problem, 2, every=3, sampling=Sampling(seed=3))
    wanted = rms(rough.output_error) / 1.1  # what samples of this seed reach by themselves, not with the grid's
    found = infinite_heads(problem, 2, every=3, sampling=Sampling(seed=3, tolerance=wanted))
    assert rms(found.output_error) <= wanted
    assert found.sizes == rough.sizes
    with pytest.raises(CertificateError, match="samples are more than") as caught:
        infinite_heads(problem, 2, every=3, sampling=Sampling(seed=3, tolerance=1e-6, most=1024))
    assert np.array_equal(caught.value.partial.output_error, rough.output_error)  # the grid's is not forgotten


def test_where_longer_intervals_diverge_the_error_is_not_known(rng, monkeypatch):
    problem = Problem(tokens(rng, 2, 2), np.array([1.0, -1.0]), steps=30, learning_rate=0.1)

    def wild(grid, state, moment, output, past):
        length = (*grid.lengths, 1)[grid.intervals[moment]]
        errors, state = mean_errors(grid, state, moment, output, past)
        return errors * (1e9 if length > 3 else 1), state

    monkeypatch.setattr(recursion, "mean_errors", wild)
    with pytest.raises(CertificateError, match="longer ones diverge") as caught:
        infinite_key_dim(problem, every=3)
    assert caught.value.partial.sizes["step"] < 30
    assert np.isinf(caught.value.partial.output_error).all()
    exact = infinite_key_dim(problem, every=3, sampling=Sampling(tolerance=1e-15))
    assert np.array_equal(exact.output, infinite_key_dim(problem).output)
    with pytest.raises(CertificateError, match="shorter than 9 steps"):
        infinite_key_dim(replace(problem, steps=60), every=9)


def test_what_has_no_coarse_grid_is_refused_with_the_way_round(rng):
    problem = problems(rng)["pooled"]
    with pytest.raises(UsageError, match="tangent kernel"):
        start_interval(TimeGrid.of(problem, every=9))
    for wrong in (4, 0, -3, 3.0, np.nan):
        with pytest.raises(UsageError, match=r"odd|an integer"):
            infinite_key_dim(problem, every=wrong)
    with pytest.raises(CertificateError, match=r"or richness \("):  # at single steps: no interval is to blame
        infinite_key_dim(replace(problem, learning_rate=1e30), every=9)
    with pytest.raises(UsageError, match="momentum 0 at the rate"):
        infinite_key_dim(replace(problem, momentum=0.5), every=9)
    with pytest.raises(UsageError, match=r"`every=\d+` solves"):
        infinite_key_dim(problem, sampling=Sampling(memory=2e7))
