"""Decoding with and without a cache."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.costs import Cost, Experts, Latent, ModelShape, count, generation_cost, kv_cache_bytes, transformer_cost
from manyheads.costs.formulas.decoding import token_cost
from manyheads.errors import UsageError


@pytest.mark.parametrize("context", [1, 2, 64])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_one_token(reference, context, kv_heads):
    shape = ModelShape(1, 48, 4, kv_heads=kv_heads)
    w = reference.block_weights(48, 4, kv_heads, 12, 192)
    cache = reference.array(2, kv_heads, context - 1, 12)
    step = count(
        lambda w, x, k, v: reference.decode_step(w, x, k, v, 4, kv_heads), w, reference.array(2, 1, 48), cache, cache
    )
    formula = token_cost(shape, context, batch=2)
    assert (step.flops, step.bytes) == (formula.flops, formula.bytes)


def test_published_figures():
    shape = ModelShape(1, 48, 4)
    assert [token_cost(shape, context, 2).flops for context in (1, 64, 512)] == [110_976, 135_168, 307_200]


@settings(max_examples=30)
@given(st.integers(0, 40), st.integers(0, 20), st.integers(1, 4), st.integers(1, 3))
def test_generation_is_its_formula(prompt, generated, batch, layers):
    d = 12
    shape = ModelShape(layers, d, 3)
    per_token = (8 + 4 * 4) * d * d
    steps = generated * batch * per_token + 4 * batch * d * (generated * prompt + generated * (generated + 1) // 2)
    prefill = transformer_cost(shape, prompt, batch).flops if prompt else 0
    assert generation_cost(shape, prompt, generated, batch).flops == layers * steps + prefill
    anew = sum(transformer_cost(shape, prompt + step, batch).flops for step in range(1, generated + 1))
    assert generation_cost(shape, prompt, generated, batch, cache=False).flops == anew


@settings(max_examples=60)
@given(
    st.tuples(st.integers(0, 12), st.integers(0, 14), st.integers(0, 12)),
    st.booleans(),
    st.sampled_from(["exact", "halved", "dense", "mac", "chinchilla"]),
)
def test_generation_equals_the_sum_over_its_steps(sizes, cache, convention):
    """Every item, stage and column, with windows that the prompt or the text outgrows, or not."""
    prompt, generated, window = sizes
    shape = ModelShape(2, 12, 3, kv_heads=1, vocabulary=11, window=window, positions="rotary", notes=("a note",))
    total = transformer_cost(shape, prompt, 2) if cache and prompt else Cost()
    for length in range(prompt + 1, prompt + generated + 1):
        total = total + (token_cost(shape, length, 2) if cache else transformer_cost(shape, length, 2))
    assert generation_cost(shape, prompt, generated, 2, cache, convention) == total.to(convention)


def test_a_book_is_counted_as_fast_as_a_word():
    shape = ModelShape(32, 4096, 32, vocabulary=32000, window=4096)
    start = time.process_time()
    cost = generation_cost(shape, 10**6, 10**12)
    assert time.process_time() - start < 0.5
    # Far beyond the window every token costs the same.
    far = token_cost(shape, 10**6).flops
    assert cost.flops == transformer_cost(shape, 10**6).flops + 10**12 * far


@given(st.integers(1, 30), st.integers(1, 30))
def test_cached_steps_compute_exactly_one_causal_pass(prompt, generated):
    """Counted exactly, reading and generating costs what one causal pass over all tokens costs."""
    shape = ModelShape(2, 12, 3, kv_heads=1, vocabulary=11)
    whole = transformer_cost(shape, prompt + generated)
    parts = generation_cost(shape, prompt, generated)
    assert (parts.flops, parts.elementwise, parts.transcendental) == (
        whole.flops,
        whole.elementwise,
        whole.transcendental,
    )


def test_window_bounds_cache_and_cost():
    shape = ModelShape(2, 12, 3, window=8)
    assert token_cost(shape, 100).flops == token_cost(shape, 8).flops
    assert kv_cache_bytes(shape, 100) == kv_cache_bytes(shape, 8) == 2 * 8 * 2 * 12 * 4


def test_cache_of_a_known_model():
    """LLaMA 3 8B keeps 128 KiB a token in 16 bits."""
    shape = ModelShape(32, 4096, 32, kv_heads=8, itemsize=2)
    assert kv_cache_bytes(shape, 1) == 128 * 1024


def test_refusals():
    with pytest.raises(UsageError, match="causal=True"):
        token_cost(ModelShape(1, 12, 3, causal=False), 4)
    for prompt, generated in ((-1, 4), (4, -1), (4, 1.0), (True, 4)):
        with pytest.raises(UsageError, match="expected an integer of at least 0"):
            generation_cost(ModelShape(1, 12, 3), prompt, generated)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_generation_over_kinds_and_experts_is_the_sum_of_its_steps(cache, batch):
    """Windows of several kinds and the number of experts that a step reads are kinks of their own."""
    near = ModelShape(2, 8, 2, mlp_hidden=0, window=5, experts=Experts(9, 2, 4))
    far = ModelShape(1, 8, 2, window=11, latent=Latent(3, 2, 2))
    shape = ModelShape(3, 8, 2, vocabulary=7, kinds=(near, far))
    found = generation_cost(shape, 3, 20, batch, cache)
    steps = [
        token_cost(shape, length, batch) if cache else transformer_cost(shape, length, batch) for length in range(4, 24)
    ]
    steps += [transformer_cost(shape, 3, batch)] if cache else []
    for figure in ("flops", "elementwise", "transcendental", "bytes"):
        assert getattr(found, figure) == sum(getattr(step, figure) for step in steps)
