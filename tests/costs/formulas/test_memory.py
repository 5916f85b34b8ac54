"""Weights and activations, against the arrays of a network that is written out."""

import jax
import pytest

from manyheads.costs import ModelShape, transformer_cost
from manyheads.costs.formulas.memory import activation_bytes, embedding_table, stored_matrices
from manyheads.errors import UsageError


@pytest.mark.parametrize("gated", [False, True])
def test_weights_are_the_sizes_of_the_matrices(reference, gated):
    shape = ModelShape(3, 12, 4, 20, 2, 5, gated, vocabulary=7)
    w = reference.block_weights(12, 4, 2, 5, 20, gated)
    blocks = 3 * sum(leaf.size for leaf in jax.tree.leaves(w))
    assert stored_matrices(shape) == blocks + 2 * embedding_table(shape)
    assert embedding_table(shape) == 7 * 12


def test_bytes_are_those_of_tables_heads_ids_and_logits():
    """An encoder whose tied table is only looked up, with a head on every position and one on the class token."""
    shape = ModelShape(
        1, 4, 2, mlp_hidden=8, vocabulary=7, unembedding=False, tied=True, causal=False, itemsize=2,
        token_classes=3, classes=5, class_width=8, pooled=True,
    )  # fmt: skip
    block, table, pooler, heads = 4 * 4 * 4 + 2 * 4 * 8, 7 * 4, 4 * 4, 4 * 3 + 8 * 5
    ids, logits = 4 * (6 * 2), 6 * 2 * 3 + 2 * 5
    assert transformer_cost(shape, 6, 2).bytes == ids + 2 * (block + table + pooler + heads + logits)


@pytest.mark.parametrize("gated", [False, True])
def test_activations_are_what_the_products_read(reference, gated):
    """Every kept array is read by a product, an activation or a norm: listed by hand for one block."""
    b, n, d, h, g, dk, hidden = 2, 5, 12, 4, 2, 3, 20
    shape = ModelShape(3, d, h, hidden, g, dk, gated)
    tokens = [(b, n, d)] * 4  # input, normed input, middle state, normed middle state
    heads = [(b, h, n, dk), (b, g, n, dk), (b, g, n, dk), (b, h, n, dk)]  # q, k, v, mixture
    inner = [(b, n, hidden)] * (3 if gated else 2)
    kept = sum(reference.array(*shape).size for shape in (*tokens, *heads, *inner))
    assert activation_bytes(shape, n, b) == 3 * 4 * (kept + b * h * n * n)
    assert activation_bytes(shape, n, b, "scores") == 3 * 4 * (kept + b * h * n)
    assert activation_bytes(shape, n, b, "block") == 3 * 4 * b * n * d


def test_refusals():
    with pytest.raises(UsageError, match="recompute"):
        activation_bytes(ModelShape(1, 12, 3), 4, recompute="all")
    with pytest.raises(UsageError, match="at least 1"):
        activation_bytes(ModelShape(1, 12, 3), 0)
