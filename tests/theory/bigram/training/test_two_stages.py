"""The two-stage algorithm end to end, its switch, sign flip, noise estimate and refusals."""

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.theorems.population import excess
from manyheads.theory.bigram.training.proximal_sgd import Diverged, State, batch_gradients, initial_state
from manyheads.theory.bigram.training.settings import FirstStage, SecondStage, TrainingSettings
from manyheads.theory.bigram.training.two_stages import (
    SwitchNotReached,
    estimate_noise,
    flip_signs,
    is_sign_flipped,
    robust_z_scores,
    run_stage_one,
    train_bigram,
)

GUESS = 0.15  # of K_P, which is .2: nothing here is told the truth


@pytest.mark.parametrize("kind", ["none", pytest.param("proximal", marks=pytest.mark.slow)])
def test_from_scratch_to_all_positions(rng, seed, kind):
    """Stage one fires at eight standard deviations; with 20,000 fresh samples a wrong position is 10 away."""
    task = draw_bigram_task(rng, 3, 200, 2)
    second = SecondStage(kind, batch=1024, samples=40_960, every=5)
    settings = TrainingSettings(FirstStage(GUESS, 2, noise_ratio=4.0), second, held_out=500, fresh=20_000)
    done = train_bigram(task, settings, seed=seed, engine="jax")
    assert np.array_equal(np.stack(done.support), task.positions)
    zero = excess(task, *initial_state(task))
    assert excess(task, *done.state) / zero < 0.01
    assert done.z_score > 8
    assert done.samples["fit"] == 20_000
    assert done.loss.samples == 500
    assert done.stopped == "switch" if kind == "none" else done.stopped in ("held-out", "budget")


def test_a_run_is_a_function_of_its_seed(rng, seed):
    task = draw_bigram_task(rng, 3, 200, 2)
    settings = FirstStage(GUESS, 2, noise_ratio=4.0)
    one, two, other = (run_stage_one(task, settings, seed=number, engine="jax") for number in (seed, seed, seed + 1))
    np.testing.assert_array_equal(one.state.attention, two.state.attention)
    assert not np.array_equal(one.state.value, other.state.value)


def test_the_sign_flipped_solution_predicts_alike_and_is_detected(rng):
    task = draw_bigram_task(rng, 3, 400, 2)
    noise = 1e-3 * rng.standard_normal((3, 400))
    right = State(task.centred, (task.attention + noise).astype(np.float32))
    turned = flip_signs(right)
    assert is_sign_flipped(turned.attention)
    assert not is_sign_flipped(right.attention)
    np.testing.assert_allclose(flip_signs(turned).attention, right.attention, atol=1e-6)
    exact = State(task.centred, task.attention)
    # W -> -P, a -> 2/T - q leaves the excess 2 K_P/T, exactly
    assert excess(task, *flip_signs(exact)) == pytest.approx(2 * task.transition_squared_norm / 400, rel=1e-5)


def test_z_scores_do_not_depend_on_the_size_of_the_noise(rng):
    row = rng.standard_normal((2, 1001))
    row[0, 3] = 40
    one, two = robust_z_scores(1 / 1001 + 1e-3 * row), robust_z_scores(1 / 1001 + 1e-6 * row)
    np.testing.assert_allclose(one.high, two.high, rtol=1e-6)
    assert abs(one.high[0] / 40 - 1) < 0.2
    assert one.high[1] < 6  # the largest of 1001 normal ones: false alarm 1e-6
    assert robust_z_scores(np.full((1, 1000), 1 / 1000, np.float32)).high[0] < 8  # rounding alone never fires


def test_the_noise_is_that_of_the_closed_form(rng, seed):
    """Off the true positions the variance is K_V / B up to the tokens that the residual shares: within a quarter."""
    task = draw_bigram_task(rng, 3, 600, 2)
    state = State(task.centred, initial_state(task).attention)
    seen = batch_gradients(task, state, 512, seed=seed, engine="jax")
    expected = (task.transition_squared_norm / 512) ** 0.5
    assert abs(estimate_noise(seen.attention, task.stationary) / expected - 1) < 0.25


def test_a_budget_that_is_too_small_is_named(rng, seed):
    task = draw_bigram_task(rng, 3, 200, 2)
    with pytest.raises(SwitchNotReached, match="no weight is significant") as caught:
        run_stage_one(task, FirstStage(GUESS, 2, noise_ratio=4.0, switch=200.0, patience=0.5), seed=seed, engine="jax")
    assert caught.value.threshold == 200.0
    assert 0 < caught.value.measured < 200  # the signal stands out by q sqrt(2 T / g K_Q), about 7, at the most


def test_divergence_is_named(rng, seed):
    task = draw_bigram_task(rng, 3, 200, 2)
    first = FirstStage(GUESS, 2, noise_ratio=4.0)
    second = SecondStage("plain", batch=2, growth=0.5, samples=2000, every=100)
    with pytest.raises(Diverged, match=r"stage two: lower its growth per step .* smaller learning rates"):
        train_bigram(task, TrainingSettings(first, second, held_out=10), seed=seed, engine="jax")
    with pytest.raises(Diverged, match="stage one: lower noise_ratio") as caught:
        run_stage_one(task, FirstStage(0.99, 2, batch=2, noise_ratio=30.0, switch=1e6), seed=seed, engine="jax")
    assert caught.value.measured > caught.value.threshold


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FirstStage(0.0, 2), "positive number below 1"),
        (lambda: FirstStage(0.2, 0), "sparsity=0: expected an integer"),
        (lambda: FirstStage(0.2, np.nan), "sparsity=nan: expected an integer"),
        (lambda: FirstStage(0.2, 2, noise_ratio=np.nan), "noise_ratio=nan: expected a positive number"),
        (lambda: FirstStage(0.2, 2, patience=np.inf), "patience=inf: expected a positive number"),
        (lambda: FirstStage(0.2, 2, switch=np.nan), "above 5"),
        (lambda: FirstStage(0.2, 2, extra=np.nan), "extra=nan: expected a number of at least 0 and below 10"),
        (lambda: FirstStage(0.2, 2, switch=3.0), "above 5"),
        (lambda: FirstStage(0.2, 2, batch=10_000).growth(100), "too fast for gradient flow"),
        (lambda: FirstStage(0.2, 5).squared_norm(5), "give fewer positions"),
        (lambda: SecondStage("other"), "choose from proximal, plain"),
        (lambda: SecondStage(growth=2.0), "at most 0.5"),
        (lambda: SecondStage(growth=np.nan), "at most 0.5"),
        (lambda: SecondStage(ratio=np.inf), "positive number"),
        (lambda: SecondStage(every=2.5), "every=2.5: expected an integer"),
        (lambda: SecondStage(samples=10), "at least 5120"),
        (
            lambda: TrainingSettings(FirstStage(0.2, 2), SecondStage(batch=64)),
            "sets all to zero: use a batch above 125",
        ),
        (lambda: TrainingSettings(FirstStage(0.2, 2), held_out=1), "at least 2"),
        (lambda: TrainingSettings(FirstStage(0.2, 2), fresh=np.nan), "fresh=nan: expected an integer"),
    ],
)
def test_bad_settings_are_refused_before_work(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_a_strong_penalty_is_warned_of():
    with pytest.warns(UserWarning, match="by 56%"):
        TrainingSettings(FirstStage(0.2, 2), SecondStage(batch=400))


@pytest.mark.parametrize(
    ("vocabulary", "length", "sparsity"), [(3, 40, 2), (20, 5000, 2), (10, 500, 4), (50, 100_000, 1)]
)
def test_default_settings_exist_for_every_size(rng, vocabulary, length, sparsity):
    settings = TrainingSettings.for_task(draw_bigram_task(rng, vocabulary, length, sparsity))
    assert settings.first.growth(length) <= 0.1 or settings.first.batch == 1
    assert settings.second.shrinkage(settings.first) <= 0.35 * (1 + 1e-9)
