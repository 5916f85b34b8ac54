import dataclasses

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtri

from manyheads.bigram.engines.gaussian import BLOCK, draw_normals
from manyheads.bigram.engines.generator import mix, sample_keys, scramble, to_normal
from manyheads.bigram.task import draw_task
from manyheads.bigram.theory.noise import attention_noise, row_coefficients
from manyheads.bigram.training import gaussian_sgd as population
from manyheads.bigram.training.gaussian_sgd import simulate
from manyheads.bigram.training.proximal_sgd import Diverged, State, StepSettings, start
from manyheads.errors import UsageError

SETTINGS = StepSettings(batch=400, value_rate=0.1, attention_rate=0.2)


def problem(rng, tokens=4, length=60):
    task = draw_task(rng, tokens, length, 2)
    attention = rng.dirichlet(np.ones(length), tokens).astype(np.float32)
    return task, State(task.centred * 0.5, attention)


def excess(task, value, attention):
    """The expected loss above its least value, term by term for every query, for any value and attention."""
    spread = np.diag(task.stationary) - np.outer(task.stationary, task.stationary)
    total = 0.0
    for share, row, truth in zip(task.stationary, attention, task.attention, strict=True):
        own = row @ row * np.trace(value @ spread @ value.T)
        both = row @ truth * np.trace(value @ spread @ task.centred.T)
        total += 0.5 * share * (own - 2 * both + truth @ truth * np.trace(task.centred @ spread @ task.centred.T))
    return total


def test_without_noise_a_step_follows_the_slope_of_the_loss(rng):
    task, state = problem(rng)
    moved = simulate(task, state, SETTINGS, 1, seed=0, noise="none", engine="jax")
    tiny, law = 1e-6, task.stationary
    for direction in rng.normal(size=(5, *state.attention.shape)):
        inside = direction - direction.mean(1, keepdims=True)
        ends = [excess(task, state.value, state.attention + sign * tiny * inside) for sign in (1, -1)]
        slope = (ends[0] - ends[1]) / (2 * tiny)
        step = (state.attention - moved.attention).astype(float) / SETTINGS.attention_rate
        np.testing.assert_allclose((step * inside * law[:, None]).sum(), slope, rtol=1e-3, atol=2e-6)
    for direction in rng.normal(size=(5, *state.value.shape)):
        inside = direction - (direction @ law)[:, None]
        ends = [excess(task, state.value + sign * tiny * inside, state.attention) for sign in (1, -1)]
        slope = (ends[0] - ends[1]) / (2 * tiny)
        step = (state.value - moved.value) / SETTINGS.value_rate
        np.testing.assert_allclose((step * inside * law).sum(), slope, rtol=1e-5, atol=1e-9)


def test_the_noise_of_a_row_has_its_size_no_mean_and_no_correlation(rng, seed):
    # T is no multiple of the block; every pair of positions has covariance s^2 (1[t=u] - 1/T).
    length = 2 * BLOCK + 300
    task, state = problem(rng, length=length)
    still = simulate(task, state, SETTINGS, 1, seed=0, noise="none", engine="jax").attention
    draws = [simulate(task, state, SETTINGS, 1, seed=[seed, n], engine="jax").attention - still for n in range(12)]
    sigma = attention_noise(task, state.value, row_coefficients(task, state.attention), SETTINGS.batch)
    noise = np.stack(draws).astype(float) / (SETTINGS.attention_rate * sigma[:, None])  # (12, N, T)
    np.testing.assert_allclose(noise.mean(2), 0, atol=1e-5)
    for rows in noise:
        for row in rows:
            assert stats.chi2(length - 1).cdf((row**2).sum()) == pytest.approx(0.5, abs=0.4999999)
    # blocks: sums over the first block have variance L (1 - L / T)
    sums = noise[:, :, :BLOCK].sum(2).ravel() / (BLOCK * (1 - BLOCK / length)) ** 0.5
    assert stats.chi2(len(sums)).cdf((sums**2).sum()) == pytest.approx(0.5, abs=0.499999)
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-5


def test_steps_are_a_function_of_seed_and_number(rng, seed):
    task, state = problem(rng)
    whole = simulate(task, state, SETTINGS, 6, seed=seed, engine="jax")
    half = simulate(task, state, SETTINGS, 2, seed=seed, engine="jax")
    parts = simulate(task, half, SETTINGS, 4, seed=seed, first_step=2, engine="jax")
    np.testing.assert_allclose(parts.value, whole.value, atol=1e-9)
    np.testing.assert_allclose(parts.attention, whole.attention, atol=1e-7)
    np.testing.assert_allclose(whole.attention.sum(1), 1, atol=1e-5)
    assert (simulate(task, state, SETTINGS, 2, seed=[seed, 1], engine="jax").value != half.value).any()


def test_a_soft_threshold_clears_the_noise(rng):
    task, state = problem(rng, length=400)
    state = State(task.centred, (0.5 * task.attention + 0.5 / 400).astype(np.float32))
    shrinking = dataclasses.replace(SETTINGS, strength=0.06, constrained=False)
    after = simulate(task, state, shrinking, 30, seed=0, engine="jax")
    assert ((after.attention != 0) == (task.attention > 0)).mean() > 0.97
    cleared = simulate(task, state, dataclasses.replace(shrinking, strength=0.3), 30, seed=0, engine="jax")
    assert not cleared.attention.any()


def test_what_can_only_fail_is_refused(rng):
    task, state = problem(rng)
    with pytest.raises(UsageError, match="constrained=False"):
        simulate(task, state, dataclasses.replace(SETTINGS, strength=0.1), 1, seed=0)
    with pytest.raises(UsageError, match="noise='loud'"):
        simulate(task, state, SETTINGS, 1, seed=0, noise="loud")
    with pytest.raises(UsageError, match="take its mean off"):
        simulate(task, State(state.value + 1, state.attention), SETTINGS, 1, seed=0)
    with pytest.raises(Diverged, match="in step 3"):
        simulate(task, state, dataclasses.replace(SETTINGS, attention_rate=1e4), 1, seed=0, first_step=3)


def test_normals_are_the_quantiles_of_their_words(rng):
    words = np.concatenate([rng.integers(0, 2**32, 20_000), 2 ** np.arange(32), np.arange(64)]).astype(np.uint32)
    exact = ndtri(((words >> 1).astype(float) + 0.5) / 2**32) * np.where(words & 1, 1, -1)
    np.testing.assert_allclose(to_normal(words), exact, atol=4e-5)


def check_normals(normals):
    """False alarms: 1e-4 in the first line, below 1e-5 in the others."""
    assert stats.kstest(normals, "norm").pvalue > 1e-4
    for edge in (3.0, 4.0, 4.5, 5.0):
        expected = 2 * stats.norm.sf(edge) * len(normals)
        count = int((np.abs(normals) > edge).sum())
        assert stats.poisson(expected).cdf(count) > 2e-6, edge
        assert stats.poisson(expected).sf(count - 1) > 2e-6, edge


def test_normals_have_the_right_tails(seed):
    first, second = sample_keys(scramble([seed, 4]), np.zeros(1, np.uint32), np.arange(10, dtype=np.uint32))
    check_normals(to_normal(mix(np.arange(100_000, dtype=np.uint32), first[:, None], second[:, None])).ravel())


@pytest.mark.fast
def test_compiled_normals_are_the_same(seed):
    first, second = sample_keys(scramble([seed, 4]), np.zeros(1, np.uint32), np.arange(20, dtype=np.uint32))
    drawn = np.stack([draw_normals(100_001, *key) for key in zip(first, second, strict=True)])
    expected = to_normal(mix(np.arange(100_001, dtype=np.uint32), first[:, None], second[:, None]))
    np.testing.assert_allclose(drawn, expected, atol=4e-6)
    check_normals(drawn.ravel())


@pytest.mark.fast
@pytest.mark.parametrize("noise", ["full", "start", "none"])
@pytest.mark.parametrize("strength", [0.0, 0.01])
def test_engines_agree(rng, seed, noise, strength):
    task, state = problem(rng, length=BLOCK + 77)
    settings = dataclasses.replace(SETTINGS, strength=strength, constrained=False)
    one = simulate(task, state, settings, 15, seed=seed, noise=noise, engine="jax")
    two = simulate(task, state, settings, 15, seed=seed, noise=noise, engine="numba", workers=3)
    np.testing.assert_allclose(two.value, one.value, atol=1e-6)
    np.testing.assert_allclose(two.attention, one.attention, atol=1e-6)
    assert population.NOISES == ("none", "start", "full")
    assert np.abs(one.attention - start(task).attention).max() > 1e-4
