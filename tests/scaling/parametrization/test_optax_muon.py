"""Muon of optax, scaled by the table, against a hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.scaling.parametrization.test_muon import muon, polar

from manyheads.transformer import Shape, TokenInput, TransformerConfig, initialize
from manyheads.transformer.weights import roles

BASE = Shape(8, 4, 2)


@pytest.mark.slow
def test_optax_moves_every_matrix_as_the_table_says(rng):
    """Against exact polar factors: one step from zero momentum, whole and by heads."""
    shape = Shape(4, 4, 1)
    config = TransformerConfig(shape, TokenInput(5), 3, 5, mlp_ratio=1)
    for split in ("whole", "heads"):
        p = muon(split, "match_rms_adamw", base=Shape(4, 2, 1))
        weights = initialize(config, p.scaling(shape, config.inputs, 1), jax.random.key(0)).weights
        tx = optax.contrib.muon(
            0.02,
            ns_steps=12,
            ns_coeffs=(1.875, -1.25, 0.375),  # converges to the polar factor, where the usual ones hover around it
            adam_learning_rate=3e-3,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=p.muon.dimensions(weights),
        )
        gradient = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), weights)
        scaled = p.optax(tx, roles(weights), shape)
        moved, _ = jax.jit(scaled.update)(gradient, scaled.init(weights), weights)
        value = np.asarray(gradient.blocks.value[0]).transpose(0, 2, 1)  # (H, N, d)
        if split == "whole":
            wanted = polar(value.reshape(16, 16)).reshape(4, 4, 16)
        else:
            wanted = np.stack([polar(head) for head in value])
        rate = 0.02 * p.table(shape)["value"].learning_rate * 0.2 * 16**0.5
        np.testing.assert_allclose(moved.blocks.value[0].transpose(0, 2, 1), -rate * wanted, rtol=0, atol=0.03 * rate)
        adam = 3e-3 * (1 + 0.9 / 1.9)  # the first step of its AdamW, which has Nesterov momentum
        np.testing.assert_allclose(np.abs(moved.embedding), adam, rtol=0.01)
