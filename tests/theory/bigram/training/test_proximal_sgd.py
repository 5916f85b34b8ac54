import dataclasses
import importlib.util
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manyheads.errors import ExtraMissing, ShapeError, UsageError
from manyheads.theory.bigram.engines import reference
from manyheads.theory.bigram.engines.generator import draw_step_batch
from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.training.proximal_sgd import (
    Diverged,
    State,
    StepSettings,
    batch_gradients,
    choose_engine,
    descend,
    initial_state,
)

PLAIN = StepSettings(batch=24, value_learning_rate=0.05, attention_learning_rate=0.03)


def problem(rng, tokens=4, length=30, uniform=False):
    task = draw_bigram_task(rng, tokens, length, 2, uniform=uniform)
    value = rng.normal(size=(tokens, tokens)) * 0.3
    return task, State(value, rng.dirichlet(np.ones(length), tokens).astype(np.float32))


def differentiated(task, state, batch):
    """Both gradients by automatic differentiation of the mean loss over dense one-hot contexts."""
    eye, law = np.eye(task.vocabulary), task.stationary

    def loss(value, attention):
        contexts = jnp.asarray(eye[batch.tokens])  # (B, T, N)
        seen = jnp.einsum("btn,bt->bn", contexts, attention[batch.queries])
        return 0.5 * jnp.sum((law + seen @ value.T - eye[batch.targets]) ** 2) / len(batch.targets)

    with jax.enable_x64(True):
        slopes = jax.jit(jax.grad(loss, argnums=(0, 1)))(state.value, state.attention.astype(float))
        by_value, by_attention = (np.asarray(slope) for slope in slopes)
    by_value = (by_value - by_value.sum(1, keepdims=True) * law) / law  # W mu = 0 stays, in the metric of mu
    by_attention = by_attention / law[:, None]
    return by_value, by_attention - by_attention.mean(1, keepdims=True)


@pytest.mark.parametrize("uniform", [True, False])
def test_gradients_are_those_of_the_loss(rng, seed, uniform):
    task, state = problem(rng, uniform=uniform)
    found = batch_gradients(task, state, 24, seed=seed, step=3, engine="jax")
    by_value, by_attention = differentiated(task, state, draw_step_batch(task, 24, seed=seed, step=3))
    np.testing.assert_allclose(found.value, by_value, atol=1e-6)
    np.testing.assert_allclose(found.attention, by_attention, atol=1e-6)
    np.testing.assert_allclose(found.std, np.std(by_attention, axis=1), atol=1e-6)


def test_a_query_without_samples_has_no_gradient(rng):
    task, state = problem(rng)
    found = batch_gradients(task, state, 1, seed=0, engine="jax")
    (query,) = draw_step_batch(task, 1, seed=0).queries
    assert (found.std == 0).tolist() == [k != query for k in range(4)]


@pytest.mark.slow
def test_gradients_have_the_closed_form_mean(rng, seed):
    # On the constraint set the expected gradients are |A|^2 W - <Q,A> Pt and K_V (a - 1/T) - K_VP (q - 1/T).
    task, state = problem(rng, tokens=3, length=10, uniform=True)
    law, target = task.stationary, task.centred
    value = state.value - (state.value @ law)[:, None]
    attention = state.attention.astype(float)
    parts = [
        batch_gradients(task, State(value, attention), 4000, seed=[seed, 8], step=n, engine="jax") for n in range(40)
    ]
    energy, product = law @ (attention**2).sum(1), law @ (attention * task.attention).sum(1)
    norm, cross = law @ (value**2).sum(0), law @ (value * target).sum(0)
    expected = (
        energy * value - product * target,
        norm * (attention - 0.1) - cross * (task.attention - 0.1),
    )
    for drawn, exact in zip(zip(*[(part.value, part.attention) for part in parts], strict=True), expected, strict=True):
        error = np.std(drawn, axis=0, ddof=1) / 40**0.5
        assert np.abs((np.mean(drawn, axis=0) - exact) / error).max() < 7  # 39 entries, t law: false alarm below 1e-5


def test_a_batch_in_blocks_is_the_whole_batch(rng, monkeypatch):
    task, state = problem(rng)
    whole = batch_gradients(task, state, 24, seed=1, engine="jax")
    monkeypatch.setattr(reference, "BLOCK", 7 * task.length)  # three blocks and three samples of a fourth
    monkeypatch.setattr(
        reference, "mean_gradients", jax.jit(reference.mean_gradients.__wrapped__, static_argnames="batch")
    )
    parts = batch_gradients(task, state, 24, seed=1, engine="jax")
    np.testing.assert_allclose(parts.value, whole.value, atol=1e-12)
    np.testing.assert_allclose(parts.attention, whole.attention, atol=1e-6)


def test_a_step_is_the_gradient_and_the_prox(rng):
    task, state = problem(rng)
    settings = dataclasses.replace(PLAIN, penalty=0.8)
    slope = batch_gradients(task, state, 24, seed=5, step=2, engine="jax")
    moved = descend(task, state, settings, 1, seed=5, first_step=2, engine="jax")
    np.testing.assert_allclose(moved.value, state.value - 0.05 * slope.value, atol=1e-12)
    rows = state.attention.astype(float) - 0.03 * slope.attention
    threshold = 0.03 * 0.8

    np.testing.assert_allclose(moved.attention, np.sign(rows) * np.maximum(np.abs(rows) - threshold, 0), atol=1e-7)
    assert (moved.attention == 0).any()


def test_descending_in_two_parts_is_descending_once(rng, seed):
    task, state = problem(rng)
    whole = descend(task, state, PLAIN, 10, seed=seed, engine="jax")
    half = descend(task, state, PLAIN, 4, seed=seed, engine="jax")
    parts = descend(task, half, PLAIN, 6, seed=seed, first_step=4, engine="jax")
    np.testing.assert_array_equal(parts.value, whole.value)
    np.testing.assert_array_equal(parts.attention, whole.attention)
    assert (descend(task, state, PLAIN, 4, seed=[seed, 1], engine="jax").value != half.value).any()


def test_the_projection_keeps_sums_and_the_state_given(rng):
    task = draw_bigram_task(rng, 4, 30, 2, uniform=False)
    before = initial_state(task)
    after = descend(task, before, PLAIN, 30, seed=0, engine="jax")
    assert not before.value.any()
    assert after.value.any()
    np.testing.assert_allclose(after.value @ task.stationary, 0, atol=1e-14)
    np.testing.assert_allclose(after.value.sum(0), 0, atol=1e-14)
    np.testing.assert_allclose(after.attention.sum(1), 1, atol=1e-5)
    assert descend(task, after, PLAIN, 0, seed=0, engine="jax").value.tolist() == after.value.tolist()


def test_divergence_is_named_with_step_and_figure(rng):
    task, state = problem(rng)
    wild = StepSettings(8, 60.0, 60.0)
    with pytest.raises(Diverged, match=r"diverged in step (\d+)") as caught:
        descend(task, state, wild, 500, seed=0, first_step=100, engine="jax")
    step = int(caught.value.message.split("step ")[1].split(":")[0])
    assert 100 <= step < 200
    assert not caught.value.measured <= caught.value.threshold
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    calm = descend(task, state, wild, step - 100, seed=0, first_step=100, engine="jax")  # all steps before that one
    assert np.abs(calm.value).max() <= caught.value.threshold


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch": 0}, "batch=0"),
        ({"value_learning_rate": -1.0}, "value_learning_rate"),
        ({"attention_learning_rate": float("nan")}, "attention_learning_rate"),
        ({"penalty": float("inf")}, "penalty"),
        ({"penalty": 40.0}, "would set all of it to zero"),
    ],
)
def test_settings_that_can_only_fail_are_refused(rng, change, says):
    task, state = problem(rng)
    with pytest.raises(UsageError, match=says):
        descend(task, state, dataclasses.replace(PLAIN, **change), 1, seed=0, engine="jax")


def test_states_and_steps_that_do_not_fit_are_refused(rng):
    task, state = problem(rng)
    with pytest.raises(ShapeError, match=r"this task needs \(4, 4\) and \(4, 30\)"):
        descend(task, State(state.value, state.attention[:, :-1]), PLAIN, 1, seed=0)
    with pytest.raises(UsageError, match="not finite"):
        batch_gradients(task, State(state.value * np.nan, state.attention), 4, seed=0)
    with pytest.raises(UsageError, match="first_step=4294967296"):
        descend(task, state, PLAIN, 1, seed=0, first_step=2**32)
    with pytest.raises(UsageError, match="one of jax, numba"):
        descend(task, state, PLAIN, 1, seed=0, engine="torch")


def test_without_the_extra_jax_takes_over_and_numba_by_name_is_missed(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not installed
    assert choose_engine(None) == "jax"
    with pytest.raises(ExtraMissing, match=r"manyheads\[fast\]"):
        choose_engine("numba")


def test_the_default_engine_is_what_is_installed():
    assert choose_engine(None) == ("numba" if importlib.util.find_spec("numba") else "jax")
