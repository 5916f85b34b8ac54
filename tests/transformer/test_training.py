"""The training loop: what it computes does not depend on how it is cut, mapped or watched."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manyheads.data.recall import Recall, RecallSource
from manyheads.errors import ShapeError, UsageError
from manyheads.transformer.baselines import BaselineConfig, PooledMLP, initialize_pooled
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.inputs import PatchInput, TokenInput
from manyheads.transformer.losses import accuracy, cross_entropy
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.shape import Shape
from manyheads.transformer.training import count_weights, fit, member_bytes, print_loss, train, with_weights
from manyheads.transformer.transformer import initialize

SOURCE = RecallSource(Recall(length=3, symbols=2), 32)
CONFIG = TransformerConfig(Shape(4, 2, 1), TokenInput(3), length=3, outputs=2, mlp_ratio=2, activation="relu")
SCALING = standard_scaling(CONFIG.shape, CONFIG.inputs, CONFIG.mlp_ratio)
OPTIMIZER = optax.adam(1e-2)
STEPS = 60


def build(key):
    return initialize(CONFIG, SCALING, key)


def build_small(key):
    """A model for what does not depend on the model, different from key to key without a draw, which compiles slowly.

    With one layer it once had an array without entries, which no map can cut into chunks.
    """
    config = BaselineConfig(TokenInput(3), outputs=2, width=4, hidden=6, layers=1)
    shapes = jax.eval_shape(lambda key: initialize_pooled(config, key), key).weights
    draw = np.random.default_rng(0)
    share = jax.random.key_data(key)[-1].astype(jnp.float32) / 2.0**32
    drawn = jax.tree.map(lambda leaf: (0.5 + share) * jnp.asarray(draw.normal(size=leaf.shape), leaf.dtype), shapes)
    return PooledMLP(drawn, config)


@pytest.fixture(scope="module")
def unchunked(seed):
    return train(build(jax.random.key(seed)), cross_entropy, SOURCE, OPTIMIZER, STEPS, jax.random.key(seed + 1))


def cheap_batches(key):
    """Batches that differ from key to key without a draw: the random generator takes longest to compile."""
    word = jax.random.key_data(key)[-1]
    tokens = (word >> jnp.arange(48, dtype=jnp.uint32).reshape(16, 3) % 31).astype(jnp.int32) & 1
    return tokens, tokens[:, 1]


def same(first, second):
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(a, b) for a, b in leaves)


@pytest.mark.slow
def test_training_learns_the_task(unchunked, seed):
    # Two candidates: the order-blind ceiling is 3/4 and log 2 the loss of ignorance.
    batch = SOURCE.task.draw(jax.random.key(seed + 9), 500)
    assert unchunked.losses[:5].mean() > 0.5
    assert unchunked.losses[-5:].mean() < 0.6 * unchunked.losses[:5].mean()
    assert float(accuracy(unchunked.model, batch)) > 0.85


def train_small(seed, **options):
    return train(
        build_small(jax.random.key(seed)),
        cross_entropy,
        cheap_batches,
        OPTIMIZER,
        STEPS,
        jax.random.key(seed),
        **options,
    )


@pytest.fixture(scope="module")
def small(seed):
    return train_small(seed)


@pytest.mark.parametrize("every", [7, *(pytest.param(every, marks=pytest.mark.slow) for every in (60, 1000))])
def test_chunks_change_nothing_bit_for_bit(small, seed, every):
    seen = []
    again = train_small(seed, every=every, measure=lambda snapshot: seen.append(snapshot) or snapshot.step)
    assert same(again.model.weights, small.model.weights)
    assert np.array_equal(again.losses, small.losses)
    steps = [0, *range(every, STEPS, every), STEPS]
    assert again.measured == [(step, step) for step in steps]
    assert same(seen[0].model.weights, build_small(jax.random.key(seed)).weights)
    assert same(seen[-1].model.weights, again.model.weights)
    assert all(np.array_equal(shot.losses, small.losses[: shot.step]) for shot in seen)
    assert len(np.unique(small.losses)) == STEPS  # every step has a batch of its own


@pytest.mark.slow
def test_other_keys_give_other_batches_and_chunks_train_the_weights_alone(unchunked, seed):
    key = jax.random.key(seed + 1)
    other = train(build(jax.random.key(seed)), cross_entropy, SOURCE, OPTIMIZER, STEPS, jax.random.key(seed + 2))
    assert other.losses[0] != unchunked.losses[0]
    again = train(build(jax.random.key(seed)), cross_entropy, SOURCE, OPTIMIZER, STEPS, key, every=7)
    assert same(again.model.weights, unchunked.model.weights)
    assert np.array_equal(again.losses, unchunked.losses)
    assert same(again.model.scaling, SCALING)


def test_fit_follows_the_definition_of_a_step(seed):
    """Three steps of gradient descent by hand."""
    rate, key = 0.1, jax.random.key(seed)
    model = build_small(jax.random.key(seed))
    fitted, losses = jax.jit(lambda model: fit(model, cross_entropy, cheap_batches, optax.sgd(rate), 3, key))(model)
    weights = model.weights
    slopes = jax.jit(jax.value_and_grad(lambda weights, batch: cross_entropy(with_weights(model, weights), batch)))
    for step in range(3):
        value, slope = slopes(weights, cheap_batches(jax.random.fold_in(key, step)))
        np.testing.assert_allclose(losses[step], value, rtol=1e-4)
        weights = jax.tree.map(lambda w, g: w - rate * g, weights, slope)
    for got, expected in zip(jax.tree.leaves(fitted.weights), jax.tree.leaves(weights), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_print_loss_shows_progress(capsys):
    train(
        build_small(jax.random.key(0)),
        cross_entropy,
        cheap_batches,
        OPTIMIZER,
        2,
        jax.random.key(1),
        measure=print_loss,
    )
    first, last = capsys.readouterr().out.splitlines()
    assert first == "step      0  loss nan"
    assert re.fullmatch(r"step      2  loss \d\.\d{4}", last)


@pytest.mark.slow
def test_member_bytes_grow_with_what_the_backward_pass_keeps():
    key = jax.random.key(0)
    small, large = (
        member_bytes(build, cross_entropy, RecallSource(SOURCE.task, size), OPTIMIZER, key) for size in (100, 1100)
    )
    fixed = 4 * 4 * count_weights(build(key))  # weights, gradient, two moments
    assert small > fixed
    # At least the stream in and between the branches, the hidden layer and the patterns for each further sequence.
    assert large - small > 1000 * 4 * (3 * (2 * 8 + 16) + 2 * 9)


@pytest.mark.slow
def test_a_loss_of_ones_own_trains_patches_in_float64(seed, rng):
    def squared_error(model, batch):
        return 0.5 * jnp.square(batch[1] - model(batch[0])[:, 0]).mean()

    config = TransformerConfig(Shape(2, 2, 1), PatchInput(3), length=2, outputs=1, mlp_ratio=0, norm="none")
    with jax.enable_x64(True):
        x, y = jnp.asarray(rng.normal(size=(6, 2, 3))), jnp.asarray(rng.normal(size=6))
        model = initialize(config, standard_scaling(config.shape, config.inputs), jax.random.key(seed), np.float64)
        done = train(model, squared_error, lambda key: (x, y), optax.sgd(1e-3), 5, jax.random.key(seed))
        assert done.model.weights.unembedding.dtype == np.float64
        assert done.losses.dtype == np.float64
        np.testing.assert_allclose(done.losses[0], 0.5 * np.square(y - model(x)[:, 0]).mean(), rtol=1e-12)
    assert (np.diff(done.losses) < 0).all()


def test_losses_by_hand(rng):
    logits, answers = rng.normal(size=(4, 3, 5)), rng.integers(0, 5, (4, 3))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.mean([np.log(p[i, j, answers[i, j]]) for i in range(4) for j in range(3)])
    loss = jax.jit(lambda *batch: cross_entropy(jnp.asarray, batch))
    assert float(loss(logits, answers)) == pytest.approx(expected, rel=1e-5)
    right = np.mean([logits[i, j].argmax() == answers[i, j] for i in range(4) for j in range(3)])
    assert float(jax.jit(lambda *batch: accuracy(jnp.asarray, batch))(logits, answers)) == pytest.approx(right)


def test_wrong_use_is_refused():
    model = build(jax.random.key(0))
    for steps, every in ((0, None), (3, 0)):
        with pytest.raises(UsageError, match="at least 1"):
            train(model, cross_entropy, SOURCE, OPTIMIZER, steps, jax.random.key(0), every=every)
    with pytest.raises(ShapeError, match="answers"):
        cross_entropy(lambda x: jnp.zeros((2, 5, 3)), (None, jnp.zeros(2, int)))
