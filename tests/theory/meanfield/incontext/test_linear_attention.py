"""In-context regression against sampled prompts and an explicit layer, and training against the two theories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

from manyheads.errors import CertificateError, UsageError
from manyheads.theory.meanfield import InContextRegression, predict_drops, train_heads
from manyheads.theory.meanfield.incontext.crossings import count_drops, first_crossing, half_times
from manyheads.theory.meanfield.incontext.linear_attention.heads import (
    MergedHeads,
    SeparateHeads,
    draw_heads,
    sampled_loss,
)
from manyheads.theory.meanfield.incontext.linear_attention.plateau_escape import Drop, SingleDrop, predict_staircase

TASK = InContextRegression((1.0, 0.5), prompt_length=8)


def test_the_population_loss_is_the_mean_over_prompts(seed):
    first, second = jax.random.split(jax.random.key(seed))
    heads = draw_heads(first, 2, 3, 0.7)
    sample = jax.jit(jax.vmap(lambda key: sampled_loss(heads, TASK.sample(key, 2000))))
    losses = np.asarray(sample(jax.random.split(second, 20)))
    error = losses.std(ddof=1) / 20**0.5
    assert abs(losses.mean() - float(TASK.loss(heads.circuit()))) < 5 * error + 1e-4


def test_the_optimum_has_no_gradient_and_the_lowest_level():
    with jax.enable_x64(True):
        loss_and_slope = jax.jit(jax.value_and_grad(TASK.loss))
        assert np.abs(loss_and_slope(np.diag(TASK.optimum))[1]).max() < 1e-14
        for known, level in enumerate(TASK.levels):
            circuit = np.diag(TASK.optimum * (np.arange(2) < known))
            assert float(loss_and_slope(circuit)[0]) == pytest.approx(level, rel=1e-13)


def full_layer(value, matrix, prompts):
    """Linear attention with all entries, from the tokens (x, y) to the label at the query: values (H, D + 1)."""
    tokens = jnp.concatenate([prompts.inputs, prompts.outputs[..., None]], -1)
    query = jnp.concatenate([prompts.query, 0 * prompts.answer[:, None]], -1)
    scores = jnp.einsum("bne,hef,bf->hbn", tokens, matrix, query) / tokens.shape[1]
    return jnp.einsum("hbn,bne,he->b", scores, tokens, value)


def test_the_circuit_is_a_layer_of_linear_attention_whose_other_entries_have_no_gradient(seed):
    first, second = jax.random.split(jax.random.key(seed))
    heads = draw_heads(first, 2, 3, 0.7, rank=None)
    half = jax.tree.map(np.asarray, jax.jit(TASK.sample, static_argnums=1)(second, 50))
    # Each prompt with its mirror image w -> -w: expectations over the sign of w are exact.
    both = jax.tree.map(lambda part: np.concatenate([part, part]), half)
    sign = np.repeat(np.float32([1.0, -1.0]), 50)
    prompts = both._replace(outputs=both.outputs * sign[:, None], answer=both.answer * sign)
    value, matrix = np.zeros((3, 3), np.float32), np.zeros((3, 3, 3), np.float32)
    value[:, 2], matrix[:, :2, :2] = heads.value, heads.matrix

    @jax.jit
    def objective(weights):
        return ((prompts.answer - full_layer(*weights, prompts)) ** 2).mean() / 2

    loss, slopes = jax.value_and_grad(objective)((value, matrix))
    slopes = jax.tree.map(np.asarray, slopes)
    assert float(loss) == pytest.approx(float(jax.jit(sampled_loss)(heads, prompts)), rel=1e-4)
    mixed = [slopes[0][:, :2], slopes[1][:, 2, :2]]
    assert max(np.abs(slope).max() for slope in mixed) < 1e-5 * np.abs(slopes[1]).max()


def test_a_drop_solves_the_scalar_equation():
    drop = Drop(0, 0, divergence=30.0, width=1.5)
    x = np.linspace(0.02, 0.98, 25)
    slope = (drop.time_at(x + 1e-6) - drop.time_at(x - 1e-6)) / 2e-6
    np.testing.assert_allclose(slope * x**2 * (1 - x**3), 1.5, rtol=1e-6)
    np.testing.assert_allclose(drop.share(drop.time_at(x)), x, rtol=1e-9)
    assert drop.share(np.asarray([drop.half_time]))[0] ** 3 == pytest.approx(0.5)
    early = np.asarray([-1e3])  # before the drop the head grows as if nothing saturated
    np.testing.assert_allclose(drop.share(early), 1.5 / (30 + 1e3), rtol=1e-6)


@pytest.mark.parametrize("eigenvalue", [1.6, 0.4])
def test_the_half_time_of_an_aligned_head_is_that_of_its_gradient_flow(eigenvalue):
    task, initial = InContextRegression((eigenvalue,), prompt_length=10), 0.02
    moment = task.second_moment[0]
    found = solve_ivp(
        lambda time, size: size**2 * (eigenvalue**2 - moment * eigenvalue * size**3),
        (0, 2 / (eigenvalue**2 * initial)),
        [initial],
        events=lambda time, size: size[0] ** 3 - task.optimum[0] / 2,
        rtol=1e-9,
        atol=1e-12,
    )
    heads = SeparateHeads(np.full(1, initial), *[np.full((1, 1, 1), initial)] * 2)
    drop = predict_staircase(task, heads).drops[0]
    assert drop.half_time == pytest.approx(found.t_events[0][0], abs=1e-3 * drop.width)


def test_the_first_divergence_is_that_of_heads_in_a_constant_gradient(seed):
    """Integrate values, keys and queries themselves, not the scalar equation."""
    heads = draw_heads(jax.random.key(seed), 2, 3, 0.01)
    drop = predict_staircase(TASK, heads).drops[0]
    value, key, query = (np.asarray(weight) for weight in heads)
    begin = np.concatenate([value, key.ravel(), query.ravel()])

    def field(time, state):
        value, key, query = state[:3, None], state[3:9].reshape(3, 2), state[9:].reshape(3, 2)
        pulled = TASK.spectrum**2 * query
        slopes = (key * pulled).sum(1), value * pulled, value * TASK.spectrum**2 * key
        return np.concatenate([slope.ravel() for slope in slopes])

    found = solve_ivp(field, (0, drop.divergence - 1.0), begin, rtol=1e-9, atol=1e-12, method="DOP853").y[:, -1]
    assert int(np.abs(found[:3]).argmax()) == drop.head
    assert 1 / np.abs(found[:3]).max() == pytest.approx(
        TASK.spectrum[drop.direction] ** 2, rel=0.1
    )  # v = 1/(g (t* - t))


def test_separate_heads_fall_in_two_drops_at_the_predicted_times():
    heads = draw_heads(jax.random.key(1), 2, 4, 0.02)
    staircase = predict_drops(TASK, heads)
    found = train_heads(
        TASK, heads, jax.random.key(2), duration=1.3 * staircase.half_times.max(), batch=None, learning_rate=0.05
    )
    halves = half_times(found.times, np.einsum("tdd->td", found.circuits) / TASK.optimum)
    widths = np.asarray([drop.width for drop in staircase.drops])
    assert np.abs((halves - staircase.half_times) / widths)[0] < 0.5
    np.testing.assert_allclose(halves, staircase.half_times, rtol=0.2)
    assert count_drops(found.times, found.losses) == 2
    before, after = heads, found.heads  # conserved by gradient flow, and by descent up to the step length
    for weight in ("key", "query"):
        kept = [np.asarray(h.value**2 - (getattr(h, weight) ** 2).sum((1, 2))) for h in (before, after)]
        np.testing.assert_allclose(*kept, atol=0.05)


@pytest.mark.slow
def test_merged_heads_fall_in_one_logistic_drop_on_white_inputs():
    task = InContextRegression((0.8, 0.8, 0.8), prompt_length=8)
    heads = draw_heads(jax.random.key(1), 3, 4, 0.02, rank=None)
    drop = predict_drops(task, heads)
    times = np.linspace(0, 12, 30)
    initial, rate = drop.size**2 / 3**0.5, 2 * 3**0.5 * 0.8**2
    logistic = 1 / (1 + (task.optimum[0] / initial - 1) * np.exp(-rate * times))
    np.testing.assert_allclose(drop.learned(times), np.stack([logistic] * 3, 1), rtol=1e-5)
    found = train_heads(task, heads, jax.random.key(2), duration=12.0, batch=None, learning_rate=0.02)
    halves = half_times(found.times, np.einsum("tdd->td", found.circuits) / task.optimum)
    np.testing.assert_allclose(halves.mean(), drop.half_times[0], atol=0.1)
    assert count_drops(found.times, found.losses) == 1


def test_the_reduced_equation_is_the_gradient_flow_of_merged_heads(seed):
    heads = draw_heads(jax.random.key(seed), 2, 3, 1e-3, rank=None)
    covariance, moment = np.diag(TASK.spectrum), np.diag(TASK.second_moment)
    drop = predict_drops(TASK, heads)

    def field(time, state):
        value, matrix = state[:3], state[3:].reshape(3, 2, 2)
        slope = covariance**2 - moment @ np.einsum("h,hde->de", value, matrix) @ covariance
        return np.concatenate([np.einsum("hde,de->h", matrix, slope), np.multiply.outer(value, slope).ravel()])

    times = np.linspace(0.5, 1.5, 9) * drop.half_times[0]
    begin = np.concatenate([np.ravel(part) for part in heads])
    found = solve_ivp(field, (0, times[-1]), begin, t_eval=times, rtol=1e-9, atol=1e-14).y
    circuits = np.einsum("ht,hdet->tde", found[:3], found[3:].reshape(3, 2, 2, -1))
    np.testing.assert_allclose(np.einsum("tdd->td", circuits) / TASK.optimum, drop.learned(times), atol=0.01)


def test_drops_are_counted_by_the_plateaus_between_them():
    times = np.linspace(0, 10, 201)
    stairs = 1 - 0.5 / (1 + np.exp(-20 * (times - 2))) - 0.4 / (1 + np.exp(-20 * (times - 6)))
    assert count_drops(times, stairs) == 2
    assert count_drops(times, np.interp(times, [0, 10], [1.0, 0.1])) == 1
    assert count_drops(times, np.ones(201)) == 0
    assert first_crossing(times, stairs, 0.75) == pytest.approx(2, abs=0.01)
    assert first_crossing(times, stairs, 0.0) == np.inf


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: InContextRegression((0.5, 1.0)),
        lambda: InContextRegression(()),
        lambda: InContextRegression(("a",)),
        lambda: InContextRegression(0.5),
        lambda: InContextRegression((1.0,), prompt_length=0),
        lambda: draw_heads(jax.random.key(0), 2, 0, 0.1),
        lambda: draw_heads(jax.random.key(0), 2, 2, 0.0),
        lambda: train_heads(TASK, draw_heads(jax.random.key(0), 2, 2, 0.1), jax.random.key(0), duration=0.0),
        lambda: predict_drops(TASK, draw_heads(jax.random.key(0), 3, 2, 0.1)),
        lambda: predict_drops(TASK, draw_heads(jax.random.key(0), 3, 2, 0.1, rank=None)),
        lambda: predict_drops(TASK, draw_heads(jax.random.key(0), 2, 2, 0.1, rank=2)),
        lambda: predict_drops(TASK, MergedHeads(np.full(2, np.nan), np.zeros((2, 2, 2)))),
        lambda: train_heads(TASK, draw_heads(jax.random.key(0), 3, 2, 0.1), jax.random.key(0), duration=1.0),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong):
    with pytest.raises(UsageError):
        wrong()


def test_what_does_not_converge_is_refused():
    still = SeparateHeads(np.zeros(2), np.zeros((2, 1, 2)), np.zeros((2, 1, 2)))
    with pytest.raises(CertificateError, match="no head grows"):
        predict_drops(TASK, still)
    with pytest.raises(CertificateError, match="no head grows"):
        predict_drops(TASK, MergedHeads(np.zeros(2), np.zeros((2, 2, 2))))
    with pytest.raises(CertificateError, match="smaller std"):
        predict_drops(TASK, draw_heads(jax.random.key(0), 2, 2, 3.0))
    assert isinstance(predict_drops(TASK, MergedHeads(np.ones(2), np.zeros((2, 2, 2)))), SingleDrop)


@pytest.mark.slow
def test_a_training_that_diverges_is_refused():
    with pytest.raises(CertificateError, match="diverged"):
        train_heads(TASK, draw_heads(jax.random.key(0), 2, 2, 9.0), jax.random.key(0), duration=90.0, learning_rate=3.0)
