import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.errors import UsageError
from manyheads.transformer.baselines import (
    BaselineConfig,
    count_baseline,
    initialize_pooled,
    initialize_recurrent,
    match_hidden,
)
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.inputs import PatchInput, TokenInput, VectorInput
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.shape import Shape
from manyheads.transformer.training import count_weights
from manyheads.transformer.transformer import initialize

TOKENS = BaselineConfig(TokenInput(7), outputs=3, width=4, hidden=6, layers=2)
CONFIGS = [
    TOKENS,
    dataclasses.replace(TOKENS, layers=1),
    dataclasses.replace(TOKENS, inputs=PatchInput(5), layers=3),
    dataclasses.replace(TOKENS, inputs=VectorInput(4)),
]
INITIALIZE = {"pooled": initialize_pooled, "recurrent": initialize_recurrent}


def random_input(config, rng):
    if isinstance(config.inputs, TokenInput):
        return rng.permuted(np.tile(np.arange(7), (2, 1)), axis=1)[:, :5]
    return rng.normal(size=(2, 5, config.inputs.dim)).astype(np.float32)


def with_biases(model, rng):
    biases = jnp.asarray(rng.normal(size=model.weights.biases.shape), jnp.float32)
    return dataclasses.replace(model, weights=model.weights._replace(biases=biases))


def by_loops(kind, model, sequence):
    w, layers = jax.tree.map(lambda array: np.asarray(array, float), model.weights), model.config.layers
    if w.embedding is None:
        tokens = list(sequence)
    else:
        tokens = [w.embedding[t] if np.ndim(t) == 0 else t @ w.embedding for t in sequence]
    if kind == "pooled":
        total = np.zeros(model.config.hidden)
        for token in tokens:
            z = np.maximum(token @ w.first + w.biases[0], 0)
            for layer in range(1, layers):
                z = np.maximum(z @ w.deeper[layer - 1] + w.biases[layer], 0)
            total += z
        return np.maximum(total / len(tokens) @ w.mixing, 0) @ w.unembedding
    state = np.zeros(model.config.hidden)
    for token in tokens:
        state = np.tanh(token @ w.first + state @ w.recurrent + w.biases[0])
        for layer in range(1, layers):
            state = np.tanh(state @ w.deeper[layer - 1] + w.biases[layer])
    return state @ w.unembedding


@pytest.mark.parametrize("kind", INITIALIZE)
@pytest.mark.parametrize(
    "config", [CONFIGS[0], CONFIGS[2], *(pytest.param(CONFIGS[place], marks=pytest.mark.slow) for place in (1, 3))]
)
def test_forward_equals_loops_and_counts_are_exact(kind, config, seed, rng):
    model = with_biases(jax.jit(INITIALIZE[kind], static_argnums=0)(config, jax.random.key(seed)), rng)
    x = random_input(config, rng)
    expected = np.array([by_loops(kind, model, sequence) for sequence in x])
    np.testing.assert_allclose(model(x), expected, atol=1e-4 * max(1, np.abs(expected).max()))
    assert count_weights(model) == count_baseline(config)


@pytest.mark.parametrize("config", CONFIGS)
def test_pooled_is_blind_to_order_and_recurrent_is_not(config, seed, rng):
    x = random_input(config, rng)
    reversed_ = x[:, ::-1]
    pooled = with_biases(initialize_pooled(config, jax.random.key(seed)), rng)
    np.testing.assert_allclose(pooled(x), pooled(reversed_), atol=1e-4)
    recurrent = with_biases(initialize_recurrent(config, jax.random.key(seed)), rng)
    assert np.abs(recurrent(x) - recurrent(reversed_)).max() > 1e-3


@given(st.integers(2, 48), st.integers(1, 3), st.integers(2_000, 200_000))
def test_matched_models_have_as_many_weights(width, layers, target):
    config = BaselineConfig(TokenInput(17), outputs=16, width=width, hidden=1, layers=layers)
    try:
        matched = match_hidden(config, target)
    except UsageError:
        # Refused only if no hidden width at this embedding comes within the tolerance.
        hidden = range(1, 500)
        counts = [count_baseline(dataclasses.replace(config, hidden=h)) for h in hidden]
        assert min(abs(count / target - 1) for count in counts) > 0.01
        return
    assert abs(count_baseline(matched) / target - 1) <= 0.01
    assert (matched.layers, matched.inputs, matched.outputs) == (layers, config.inputs, 16)


@pytest.mark.parametrize("length", [8, 16, 32])
def test_three_models_of_the_recall_task_have_equal_sizes(length):
    config = TransformerConfig(Shape(16, 2, 2), TokenInput(17), length, 16, mlp_ratio=2, activation="relu")
    scaling = standard_scaling(config.shape, config.inputs, 2)
    size = count_weights(jax.eval_shape(lambda key: initialize(config, scaling, key), jax.random.key(0)))
    for kind in INITIALIZE:
        baseline = match_hidden(BaselineConfig(config.inputs, 16, width=32, hidden=1), size)
        model = jax.eval_shape(lambda key, b=baseline, k=kind: INITIALIZE[k](b, key), jax.random.key(0))
        assert abs(count_weights(model) / size - 1) <= 0.01


def test_wrong_use_is_refused():
    with pytest.raises(UsageError, match="layers=0"):
        dataclasses.replace(TOKENS, layers=0)
    with pytest.raises(UsageError, match="width=4"):
        dataclasses.replace(TOKENS, inputs=VectorInput(5))
    with pytest.raises(UsageError, match="no baseline"):
        match_hidden(TOKENS, 40)
