"""Projections, MLP, block and model against the counter, and against published formulas."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.costs import ModelShape, count, transformer_cost
from manyheads.costs.conventions import Convention
from manyheads.costs.formulas.depth import crossover_length
from manyheads.costs.formulas.memory import stored_matrices
from manyheads.errors import UsageError

DENSE = Convention(causal="dense")
PLAIN = ModelShape(layers=1, width=48, heads=4, causal=False)


def weights_of(reference, shape):
    return reference.block_weights(
        shape.width, shape.heads, shape.kv_heads, shape.head_dim, shape.mlp_hidden, shape.gated
    )


def block_of(reference, shape):
    return functools.partial(reference.block, heads=shape.heads, kv_heads=shape.kv_heads, causal=shape.causal)


def assert_block_equal(reference, shape, length, batch):
    w, x = weights_of(reference, shape), reference.array(batch, length, shape.width)
    block = block_of(reference, shape)
    pass_through = count(block, w, x)
    formula = transformer_cost(shape, length, batch, convention=DENSE)
    assert (pass_through.flops, pass_through.bytes) == (formula.flops, formula.bytes)
    assert (
        count(reference.train_all(block), w, x).flops
        == transformer_cost(shape, length, batch, True, convention=DENSE).flops
    )
    # Without gradient of the input; the reference norm has no gain whose gradient would ask for it.
    bare = replace(shape, layers=1)
    alone = transformer_cost(bare, length, batch, training=True, input_gradient=False, convention=DENSE)
    assert count(reference.train(block), w, x).flops == alone.flops


@pytest.mark.slow
def test_every_small_block(reference):
    for width, groups, per_group, dim, gated in reference.half((1, 4), (1, 2), (1, 2), (1, 3), (False, True)):
        shape = ModelShape(1, width, groups * per_group, 5, groups, dim, gated, causal=dim == 3)
        assert_block_equal(reference, shape, length=3, batch=2)


@pytest.mark.slow
@settings(max_examples=12)
@given(st.tuples(*[st.integers(1, 512)] * 3), st.tuples(*[st.integers(1, 8)] * 3), st.booleans(), st.booleans())
def test_random_large_blocks(reference, sizes, heads, gated, causal):
    (width, hidden, length), (groups, per_group, batch) = sizes, heads
    shape = ModelShape(1, width, groups * per_group, hidden, groups, 1 + hidden % 64, gated, causal=causal)
    assert_block_equal(reference, shape, length, batch)


def test_parts_of_a_block(reference):
    shape = replace(PLAIN, kv_heads=2)
    w, x = weights_of(reference, shape), reference.array(2, 64, 48)
    flops = {name: row["flops"] for name, row in transformer_cost(shape, 64, 2).breakdown().items()}
    mlp = flops["mlp in"] + flops["mlp out"]
    assert count(reference.mlp, w, x).flops == mlp == 4 * 4 * 2 * 64 * 48**2
    projections = count(lambda w, x: (x @ w["q"], x @ w["k"], x @ w["v"], x @ w["o"]), w, x)
    assert projections.flops == flops["query, key, value"] + flops["output projection"]
    whole = count(lambda w, x: reference.mha(w, x, 4, 2, False), w, x).flops
    assert whole == flops["attention core"] + projections.flops == 3_342_336
    assert transformer_cost(shape, 64, 2).flops == whole + mlp


def test_published_figures():
    assert transformer_cost(PLAIN, 64, 2).flops == 8_650_752
    assert transformer_cost(PLAIN, 64, 2, training=True).flops == 25_952_256
    assert transformer_cost(PLAIN, 64, 2, training=True, input_gradient=False).flops == 24_182_784
    needed = Convention(causal="dense", recompute="block-needed")
    assert transformer_cost(PLAIN, 64, 2, training=True).to(needed).flops == 32_243_712
    assert transformer_cost(PLAIN, 64, 2, training=True).to("megatron").flops == 4 * 8_650_752


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_scan_of_twelve_layers(reference, gated, remat):
    shape = ModelShape(12, 24, 4, 36, 2, gated=gated, causal=True)
    w = reference.stacked(weights_of(reference, shape), 12)
    x = reference.array(2, 10, 24)
    block = block_of(reference, shape)
    body = jax.checkpoint(block) if remat else block

    def model(w, x):
        return jax.lax.scan(lambda x, w: (body(w, x), None), x, w)[0]

    forward, training = transformer_cost(shape, 10, 2), transformer_cost(shape, 10, 2, training=True)
    recompute = "block-needed" if remat else "none"
    assert count(model, w, x).flops == forward.to("dense").flops
    expected = training.to(Convention(causal="dense", recompute=recompute)).flops
    assert count(reference.train_all(model), w, x).flops == expected
    # A scan computes the same in every iteration: the first block's input gradient is not saved.
    assert count(reference.train(model), w, x).flops == expected
    last = 12 * 2 * 2 * 10 * 24 * 36
    assert expected == (4 * forward.to("dense").flops - last if remat else 3 * forward.to("dense").flops)


def test_remat_of_blocks_in_a_python_loop(reference):
    shape = ModelShape(3, 8, 2, 12, causal=False)
    w, x = [weights_of(reference, shape)] * 3, reference.array(1, 5, 8)
    block = jax.checkpoint(block_of(reference, shape))

    def model(w, x):
        for layer in w:
            x = block(layer, x)
        return x

    expected = transformer_cost(shape, 5, training=True, input_gradient=False)
    assert count(reference.train(model), w, x).flops == expected.to(Convention(recompute="block-needed")).flops


@pytest.mark.parametrize("one_hot", [False, True])
def test_language_model(reference, one_hot):
    shape = ModelShape(2, 12, 3, vocabulary=17, causal=True, positions="none", norm="none", itemsize=4)
    block = block_of(reference, shape)
    w = {"embed": reference.array(17, 12), "layers": [weights_of(reference, shape)] * 2, "out": reference.array(12, 17)}

    def model(w, tokens):
        x = jax.nn.one_hot(tokens, 17, dtype=jnp.float32) @ w["embed"] if one_hot else w["embed"][tokens]
        for layer in w["layers"]:
            x = block(layer, x)
        return x @ w["out"]

    tokens = jax.ShapeDtypeStruct((2, 7), jnp.int32)
    convention = Convention(causal="dense", embedding="onehot" if one_hot else "gather")
    formula = transformer_cost(shape, 7, 2, convention=convention)
    counted = count(model, w, tokens)
    assert (counted.flops, counted.bytes) == (formula.flops, formula.bytes)
    training = transformer_cost(shape, 7, 2, training=True, convention=convention)
    assert count(reference.train(model), w, tokens).flops == training.flops


def test_patches_and_classes(reference):
    shape = ModelShape(1, 12, 3, causal=False, patch_features=20, special_tokens=1, classes=5)
    block = block_of(reference, shape)
    w = {
        "patch": reference.array(20, 12),
        "token": reference.array(1, 1, 12),
        "layer": weights_of(reference, shape),
        "head": reference.array(12, 5),
    }

    def model(w, patches):
        x = patches @ w["patch"]
        x = jnp.concatenate([jnp.broadcast_to(w["token"], (x.shape[0], 1, 12)), x], 1)
        return block(w["layer"], x)[:, 0] @ w["head"]

    x = reference.array(2, 8, 20)
    assert count(model, w, x).flops == transformer_cost(shape, 9, 2).flops
    assert count(reference.train(model), w, x).flops == transformer_cost(shape, 9, 2, training=True).flops
    with pytest.raises(UsageError, match="no patch"):
        transformer_cost(shape, 1)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 2048), st.integers(1, 50000), st.integers(1, 16))
def test_megatron_convention_is_its_equation(layers, heads, length, vocabulary, batch):
    """Narayanan et al. 2021, equation 3, times 16 l h to stay in integers."""
    width = 16 * heads
    shape = ModelShape(layers, width, heads, vocabulary=vocabulary)
    ours = transformer_cost(shape, length, batch, training=True, convention="megatron").flops
    tokens = batch * length
    assert (
        ours
        == 96 * tokens * layers * width**2 + 16 * tokens * length * layers * width + 6 * tokens * width * vocabulary
    )


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 2048), st.integers(1, 50000))
def test_palm_convention_is_its_appendix(layers, heads, length, vocabulary):
    """6 N + 12 L H Q T a token, with a tied embedding (Chowdhery et al. 2022, appendix B)."""
    shape = ModelShape(layers, 16 * heads, heads, vocabulary=vocabulary, tied=True)
    ours = transformer_cost(shape, length, training=True, convention="palm").flops
    assert ours == length * (6 * stored_matrices(shape) + 12 * layers * heads * 16 * length)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 2048), st.integers(1, 50000))
def test_chinchilla_convention_is_its_appendix(layers, heads, n, vocabulary):
    """Hoffmann et al. 2022, appendix F, item by item."""
    d, ffw = 16 * heads, 40 * heads
    shape = ModelShape(layers, d, heads, ffw, vocabulary=vocabulary)
    embeddings = 2 * n * vocabulary * d
    attention = 2 * 3 * n * d * d + 2 * n * n * d + 3 * heads * n * n + 2 * n * n * d + 2 * n * d * d
    dense = 2 * n * (d * ffw + d * ffw)
    logits = 2 * n * d * vocabulary
    forward = embeddings + layers * (attention + dense) + logits
    assert transformer_cost(shape, n, convention="chinchilla").flops == forward
    assert transformer_cost(shape, n, training=True, convention="chinchilla").flops == 3 * forward


def test_activations_count_what_they_compute(reference):
    x = reference.array(7, 12)
    written = {
        "relu": lambda x: jnp.where(x > 0, x, 0.0),
        "tanh": jnp.tanh,
        "silu": lambda x: x / (1.0 + jnp.exp(-x)),
        "gelu": lambda x: x * (1.0 + jax.lax.erf(x * 0.7071)) * 0.5,
        "gelu-tanh": lambda x: x * (1.0 + jnp.tanh((x + (x * x) * x * 0.0447) * 0.798)) * 0.5,
    }
    for name, fn in written.items():
        shape = ModelShape(1, 4, 1, 12, activation=name, biases="none")
        formula = transformer_cost(shape, 7).breakdown()["activation"]
        counted = count(fn, x)
        # relu as a maximum is one operation; the comparison with select is two.
        expected = formula["elementwise"] + (7 * 12 if name == "relu" else 0)
        assert (counted.elementwise, counted.transcendental) == (expected, formula["transcendental"]), name


def test_attention_outgrows_the_block_at_the_crossover():
    for shape in (ModelShape(1, 48, 4, causal=False), ModelShape(1, 48, 6, 96, 2, 8, True, causal=False)):
        at = crossover_length(shape)
        assert at.denominator == 1
        rows = transformer_cost(shape, int(at), 3).breakdown()
        core = rows.pop("attention core")["flops"]
        assert core == sum(row["flops"] for row in rows.values())
    assert crossover_length(PLAIN) == (2 + 4) * 48


def test_refusals():
    with pytest.raises(UsageError, match="head_dim"):
        ModelShape(1, 10, 3)
    with pytest.raises(UsageError, match="unembedding"):
        ModelShape(1, 12, 3, unembedding=True)
    with pytest.raises(UsageError, match="activation"):
        ModelShape(1, 12, 3, activation="mish")
    with pytest.raises(UsageError, match="at least 1"):
        transformer_cost(PLAIN, 0)
    with pytest.raises(UsageError, match="known are"):
        transformer_cost(PLAIN, 4, convention="mfu")
