"""What is seen of a transformer in training, against its recorded patterns and singular values."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manyheads.theory.joma.text.record import record_statistics
from manyheads.transformer import Shape, TokenInput, TransformerConfig, initialize, standard_scaling
from manyheads.transformer.losses import cross_entropy


@pytest.fixture(scope="module")
def model(seed):
    config = TransformerConfig(
        Shape(4, 2, 2), TokenInput(50), length=16, outputs=50, causal=True, read_out="token", activation="relu"
    )
    return eqx.filter_jit(initialize)(config, standard_scaling(config.shape, config.inputs), jax.random.key(seed))


@pytest.mark.slow
def test_entropy_is_that_of_the_recorded_patterns(model, seed):
    tokens = jax.random.randint(jax.random.key(seed), (3, 17), 0, 50, jnp.int32)
    seen = record_statistics(model, (tokens[:, :-1], tokens[:, 1:]))
    record = eqx.filter_jit(lambda model, tokens: model.record(tokens, patterns=True).layers.patterns)
    patterns = np.asarray(record(model, tokens[:, :-1]), np.float64)  # (L, B, H, T, T)
    rows = -np.where(patterns > 0, patterns * np.log(np.where(patterns > 0, patterns, 1)), 0).sum(-1)
    np.testing.assert_allclose(seen["entropy"], rows.mean((1, 3)), atol=2e-6)
    loss = float(eqx.filter_jit(cross_entropy)(model, (tokens[:, :-1], tokens[:, 1:])))
    assert float(seen["validation_loss"]) == pytest.approx(loss)


def test_stable_ranks_are_those_of_the_singular_values(model):
    seen = record_statistics(model, tuple(jnp.zeros((2, 3, 16), jnp.int32)))
    blocks = jax.tree.map(np.asarray, model.weights.blocks)
    for layer in range(2):
        values = np.linalg.svd(blocks.mlp_in[layer].astype(float), compute_uv=False)
        assert float(seen["stable_rank"][layer]) == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-5)
        for head in range(2):
            product = blocks.query[layer, head].astype(float) @ blocks.key[layer, head].astype(float).T
            values = np.linalg.svd(product, compute_uv=False)
            assert float(seen["query_key_rank"][layer, head]) == pytest.approx(
                (values**2).sum() / values[0] ** 2, rel=1e-4
            )
