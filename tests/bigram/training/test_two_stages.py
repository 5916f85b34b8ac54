"""The two-stage algorithm end to end, its switch, mirror, noise estimate and refusals."""

import numpy as np
import pytest

from manyheads.bigram.task import draw_task
from manyheads.bigram.theory.population import excess
from manyheads.bigram.training.proximal_sgd import Diverged, State, observe, start
from manyheads.bigram.training.settings import FirstStage, SecondStage, TrainingSettings
from manyheads.bigram.training.two_stages import (
    SwitchNotReached,
    boost,
    estimate_noise,
    is_mirrored,
    measure_salience,
    mirror,
    train_bigram,
)
from manyheads.errors import UsageError

GUESS = 0.15  # of K_P, which is .2: nothing here is told the truth


@pytest.mark.parametrize("finish", ["joint", "scale"])
def test_from_nothing_to_all_positions(rng, seed, finish):
    """Stage one fires at eight standard deviations; with 20,000 fresh samples a wrong position is 10 away."""
    task = draw_task(rng, 3, 200, 2)
    second = SecondStage("none") if finish == "joint" else SecondStage(batch=1024, samples=40_960, every=5)
    settings = TrainingSettings(FirstStage(GUESS, 2, growth=4.0), second, finish, held_out=500, fresh=20_000)
    done = train_bigram(task, settings, seed=seed, engine="jax")
    assert np.array_equal(np.stack(done.support), task.positions)
    zero = excess(task, *start(task))
    assert excess(task, *done.state) / zero < (0.01 if finish == "joint" else 0.1)
    assert done.salience > 8
    assert done.samples["fit"] == 20_000
    assert done.loss.samples == 500
    assert done.stopped == "switch" if finish == "joint" else done.stopped in ("held-out", "budget")


def test_a_run_is_a_function_of_its_seed(rng, seed):
    task = draw_task(rng, 3, 200, 2)
    settings = FirstStage(GUESS, 2, growth=4.0)
    one, two, other = (boost(task, settings, seed=number, engine="jax") for number in (seed, seed, seed + 1))
    np.testing.assert_array_equal(one.state.attention, two.state.attention)
    assert not np.array_equal(one.state.value, other.state.value)


def test_the_mirror_predicts_alike_and_is_seen(rng):
    task = draw_task(rng, 3, 400, 2)
    noise = 1e-3 * rng.standard_normal((3, 400))
    right = State(task.centred, (task.attention + noise).astype(np.float32))
    turned = mirror(right)
    assert is_mirrored(turned.attention)
    assert not is_mirrored(right.attention)
    np.testing.assert_allclose(mirror(turned).attention, right.attention, atol=1e-6)
    exact = State(task.centred, task.attention)
    # W -> -P, a -> 2/T - q leaves the excess 2 K_P/T, exactly
    assert excess(task, *mirror(exact)) == pytest.approx(2 * task.transition_energy / 400, rel=1e-5)


def test_salience_does_not_depend_on_the_size_of_the_noise(rng):
    row = rng.standard_normal((2, 1001))
    row[0, 3] = 40
    one, two = measure_salience(1 / 1001 + 1e-3 * row), measure_salience(1 / 1001 + 1e-6 * row)
    np.testing.assert_allclose(one.high, two.high, rtol=1e-6)
    assert abs(one.high[0] / 40 - 1) < 0.2
    assert one.high[1] < 6  # the largest of 1001 normal ones: false alarm 1e-6
    assert measure_salience(np.full((1, 1000), 1 / 1000, np.float32)).high[0] < 8  # rounding alone never fires


def test_the_noise_is_that_of_the_closed_form(rng, seed):
    """Off the true positions the variance is K_V / B up to the tokens that the residual shares: within a quarter."""
    task = draw_task(rng, 3, 600, 2)
    state = State(task.centred, start(task).attention)
    seen = observe(task, state, 512, seed=seed, engine="jax")
    expected = (task.transition_energy / 512) ** 0.5
    assert abs(estimate_noise(seen.attention, task.stationary) / expected - 1) < 0.25


def test_a_budget_that_is_too_small_is_named(rng, seed):
    task = draw_task(rng, 3, 200, 2)
    with pytest.raises(SwitchNotReached, match="no entry stands out") as caught:
        boost(task, FirstStage(GUESS, 2, growth=4.0, switch=200.0, patience=0.5), seed=seed, engine="jax")
    assert caught.value.threshold == 200.0
    assert 0 < caught.value.measured < 200  # the signal stands out by q sqrt(2 T / g K_Q), about 7, at the most


def test_divergence_is_named(rng, seed):
    task = draw_task(rng, 3, 200, 2)
    first = FirstStage(GUESS, 2, growth=4.0)
    second = SecondStage("plain", batch=2, rate=0.5, samples=2000, every=100)
    with pytest.raises(Diverged, match=r"stage two: lower its rate .* smaller rates"):
        train_bigram(task, TrainingSettings(first, second, held_out=10), seed=seed, engine="jax")
    with pytest.raises(Diverged, match="stage one: lower growth") as caught:
        boost(task, FirstStage(0.99, 2, batch=2, growth=30.0, switch=1e6), seed=seed, engine="jax")
    assert caught.value.measured > caught.value.threshold


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FirstStage(0.0, 2), "between 0 and 1"),
        (lambda: FirstStage(0.2, 0), "sparsity=0: give a whole number"),
        (lambda: FirstStage(0.2, np.nan), "sparsity=nan: give a whole number"),
        (lambda: FirstStage(0.2, 2, growth=np.nan), "positive and finite"),
        (lambda: FirstStage(0.2, 2, patience=np.inf), "positive and finite"),
        (lambda: FirstStage(0.2, 2, switch=np.nan), "stands out by 5"),
        (lambda: FirstStage(0.2, 2, settle=np.nan), "from 0 to 10"),
        (lambda: FirstStage(0.2, 2, switch=3.0), "stands out by 5"),
        (lambda: FirstStage(0.2, 2, batch=10_000).rate(100), "no gradient flow"),
        (lambda: FirstStage(0.2, 5).energy(5), "nothing is sparse"),
        (lambda: SecondStage("other"), "proximal, constrained"),
        (lambda: SecondStage(rate=2.0), "at most a half"),
        (lambda: SecondStage(rate=np.nan), "at most a half"),
        (lambda: SecondStage(ratio=np.inf), "both positive"),
        (lambda: SecondStage(every=2.5), "every=2.5: give a whole number"),
        (lambda: SecondStage(samples=10), "at least 5120"),
        (lambda: TrainingSettings(FirstStage(0.2, 2), SecondStage(batch=64)), "sets all to zero: batch above 125"),
        (lambda: TrainingSettings(FirstStage(0.2, 2), finish="other"), "round, scale"),
        (lambda: TrainingSettings(FirstStage(0.2, 2), held_out=1), "at least 2"),
        (lambda: TrainingSettings(FirstStage(0.2, 2), fresh=np.nan), "fresh=nan: give a whole number"),
    ],
)
def test_bad_settings_are_refused_before_work(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_a_strong_penalty_is_warned_of():
    with pytest.warns(UserWarning, match="by 56%"):
        TrainingSettings(FirstStage(0.2, 2), SecondStage(batch=400))
