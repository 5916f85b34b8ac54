"""The softmax step against automatic differentiation, and the takeover against its closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.theory.bigram.engines.generator import draw_step_batch
from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.training.proximal_sgd import Diverged
from manyheads.theory.bigram.training.softmax_training import (
    SoftmaxSettings,
    SoftmaxState,
    as_linear,
    descend_softmax,
    initial_softmax_state,
    predict_second_weight,
)

BATCH = 64  # one of four queries is missing in one of 10^7 batches; the same shapes throughout compile once


@pytest.mark.parametrize("token_logits", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_step_is_the_gradient_of_the_loss(rng, seed, token_logits):
    task = draw_bigram_task(rng, 4, 12, 2)
    positions = rng.standard_normal((4, 12)).astype(np.float32)
    tokens = rng.standard_normal((4, 4)).astype(np.float32) * token_logits
    state = SoftmaxState(task.centred + 0.0, positions, tokens)
    settings = SoftmaxSettings(BATCH, 0.1, 0.2, "constant", token_logits=token_logits)
    after = descend_softmax(task, state, settings, 1, seed=seed, first_step=3)
    batch, law = draw_step_batch(task, BATCH, seed=seed, step=3), task.stationary

    def loss(value, positions, tokens):
        logits = positions[batch.queries] + tokens[batch.queries[:, None], batch.tokens]
        weights = jax.nn.softmax(logits, axis=1)
        seen = jnp.einsum("bt,btn->bn", weights, np.eye(4)[batch.tokens]) - law  # W mu = 0 is kept
        return 0.5 * ((law + seen @ value.T - np.eye(4)[batch.targets]) ** 2).sum(1).mean()

    with jax.enable_x64(True):
        by_value, by_position, by_token = jax.jit(jax.grad(loss, (0, 1, 2)))(
            jnp.asarray(state.value), jnp.asarray(positions, float), jnp.asarray(tokens, float)
        )
    np.testing.assert_allclose(after.value, state.value - 0.1 * np.asarray(by_value) / law, atol=1e-6)
    np.testing.assert_allclose(after.positions, positions - 0.2 * np.asarray(by_position) / law[:, None], atol=1e-5)
    moved = 0.2 * np.asarray(by_token) / law[:, None] if token_logits else 0.0
    np.testing.assert_allclose(after.tokens, tokens - moved, atol=1e-5)


@pytest.mark.slow
def test_steps_may_be_cut_anywhere(rng, seed):
    task = draw_bigram_task(rng, 3, 12, 1)
    settings = SoftmaxSettings(8, 0.1, 0.05, "adam", token_logits=True)
    whole = descend_softmax(task, initial_softmax_state(task), settings, 6, seed=seed)
    half = descend_softmax(task, initial_softmax_state(task), settings, 3, seed=seed)
    halves = descend_softmax(task, half, settings, 3, seed=seed, first_step=3)
    for one, two in zip(jax.tree.leaves(whole), jax.tree.leaves(halves), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_the_scaled_rate_moves_the_largest_weight_as_the_linear_model_does(rng, seed):
    """With a small rate the largest weight moves by -eta (G - a.G), whatever its size."""
    task = draw_bigram_task(rng, 4, 12, 2)
    logits = np.zeros((4, 12), np.float32)
    logits[:, 0] = 3.0
    state = SoftmaxState(task.centred + 0.0, logits, np.zeros((4, 4), np.float32))
    constant = descend_softmax(task, state, SoftmaxSettings(BATCH, 0.0, 1e-2, "constant"), 1, seed=seed)
    scaled = descend_softmax(task, state, SoftmaxSettings(BATCH, 0.0, 1e-2, "scaled"), 1, seed=seed)
    largest = as_linear(state).attention.max(1, keepdims=True)
    moves = (scaled.positions - logits) / np.where(constant.positions == logits, np.nan, constant.positions - logits)
    np.testing.assert_allclose(np.nanmedian(moves, axis=1), largest[:, 0] ** -2.0, rtol=1e-3)


@pytest.mark.slow
def test_logits_of_tokens_are_scaled_by_the_largest_share_of_a_token(rng, seed):
    task = draw_bigram_task(rng, 4, 12, 2)
    logits = rng.standard_normal((4, 4)).astype(np.float32)
    state = SoftmaxState(task.centred + 0.0, np.zeros((4, 12), np.float32), logits)
    one, two = (
        descend_softmax(task, state, SoftmaxSettings(BATCH, 0.0, 1.0, rule, token_logits=True), 1, seed=seed).tokens
        for rule in ("constant", "scaled")
    )
    shares = task.stationary * np.exp(logits)
    largest = (shares / shares.sum(1, keepdims=True)).max(1)
    np.testing.assert_allclose(
        np.linalg.norm(two - logits, axis=1) / np.linalg.norm(one - logits, axis=1), largest**-2.0, rtol=1e-3
    )


@pytest.mark.parametrize("share", [0.55, 0.7])
def test_the_takeover_leaves_the_second_weight_where_the_closed_form_says(share):
    """Integrate a' = a^2 q for both positions from 1/T, in steps of ln a1, until the first weight is one tenth."""
    length, step, first, second = 10**6, 1e-3, 1e-6, 1e-6
    while first < 0.1:
        second += step * second**2 * (1 - share) / (first * share)
        first *= np.exp(step)
    assert second == pytest.approx(predict_second_weight(length, share, 1 - share), rel=0.02)


def test_bad_requests_are_refused(rng):
    task = draw_bigram_task(rng, 3, 12, 1)
    with pytest.raises(UsageError, match="scaled, constant, adam"):
        SoftmaxSettings(8, 0.1, 0.1, "other")
    for batch, rates, words in (
        (0, (0.1, 0.1), "batch=0"),
        (8, (-1.0, 0.1), "value_learning_rate=-1"),
        (8, (0, np.inf), "inf"),
    ):
        with pytest.raises(UsageError, match=words):
            SoftmaxSettings(batch, *rates)
    with pytest.raises(UsageError, match="first_step=-1"):
        descend_softmax(task, initial_softmax_state(task), SoftmaxSettings(8, 0.1, 0.1), 1, seed=0, first_step=-1)
    with pytest.raises(UsageError, match="smaller <= larger"):
        predict_second_weight(10, 0.3, 0.7)
    with pytest.raises(Diverged, match="smaller learning rates"):
        descend_softmax(task, initial_softmax_state(task), SoftmaxSettings(8, 1e6, 0.1), 8, seed=0)
