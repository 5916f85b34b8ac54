"""The core: closed form = jaxpr counter = enumeration, as integers."""

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.costs import attention_cost, count
from manyheads.costs.conventions import Convention
from manyheads.costs.shapes import AttentionShape
from manyheads.errors import UsageError

RUN = Convention(causal="dense")


def arrays(reference, shape):
    q = reference.array(shape.batch, shape.heads, shape.queries, shape.head_dim)
    k = reference.array(shape.batch, shape.kv_heads, shape.keys, shape.head_dim)
    v = reference.array(shape.batch, shape.kv_heads, shape.keys, shape.value_dim)
    return q, k, v


def assert_forward_equal(reference, shape):
    formula = attention_cost(shape, convention=RUN)
    counted = count(lambda q, k, v: reference.core(q, k, v, shape.causal), *arrays(reference, shape))
    figures = ("flops", "elementwise", "transcendental", "bytes")
    assert [getattr(counted, name) for name in figures] == [getattr(formula, name) for name in figures], shape


def assert_training_equal(reference, shape):
    def both(q, k, v, cotangent):
        out, back = jax.vjp(lambda *qkv: reference.core(*qkv, shape.causal), q, k, v)
        return out, back(cotangent)

    out = reference.array(shape.batch, shape.heads, shape.queries, shape.value_dim)
    counted = count(both, *arrays(reference, shape), out)
    formula = attention_cost(shape, training=True, convention=RUN)
    assert (counted.flops, counted.bytes) == (formula.flops, formula.bytes), shape


@pytest.mark.slow
def test_every_small_shape(reference):
    for batch, groups, per_group, n, m, dk, dv in reference.half(*[(1, 2)] * 3, (1, 3), (3, 4), (1, 2), (1, 3)):
        shape = AttentionShape(n, groups * per_group, dk, m, dv, groups, batch, causal=n == 3)
        assert_forward_equal(reference, shape)
        if batch == 2:
            assert_training_equal(reference, shape)


size = st.integers(1, 5000)


@settings(max_examples=12)  # two polynomials that differ agree at hardly any random sizes
@given(
    st.tuples(size, size, st.integers(1, 256), st.integers(1, 256)), st.tuples(*[st.integers(1, 16)] * 3), st.booleans()
)
def test_random_large_shapes(reference, sizes, heads, causal):
    (n, m, dk, dv), (groups, per_group, batch) = sizes, heads
    shape = AttentionShape(min(n, m), groups * per_group, dk, max(n, m), dv, groups, batch, causal)
    assert_forward_equal(reference, shape)
    assert_training_equal(reference, shape)


@pytest.mark.parametrize("window", [0, 1, 2, 4, 9])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 5), (3, 5), (5, 5)])
def test_causal_exact_is_what_a_program_without_masked_pairs_computes(reference, n, m, window):
    shape = AttentionShape(n, 2, 3, keys=m, value_dim=4, batch=2, causal=True, window=window)
    counted = count(lambda q, k, v: reference.core_by_rows(q, k, v, window), *arrays(reference, shape))
    assert counted.flops == attention_cost(shape).flops
    assert counted.transcendental == attention_cost(shape).transcendental


def test_published_figures():
    """Two sequences of 64, 4 heads of 12."""
    shape = AttentionShape(64, 4, 12, batch=2)
    assert attention_cost(shape).flops == 1_572_864
    assert attention_cost(shape, training=True).flops == 4_718_592
    again = attention_cost(shape, training=True, convention="flash").flops
    assert again == 1_572_864 * 7 // 2  # forward, and 2.5 times that backward


def test_flash_convention_is_that_of_the_flash_attention_paper():
    shape = AttentionShape(2048, 16, 64, batch=3, causal=True)
    forward = 4 * 2048**2 * 64 * 16 * 3 // 2
    assert attention_cost(shape, convention="flash").flops == forward
    assert attention_cost(shape, training=True, convention="flash").flops == forward + forward * 5 // 2


def test_refusals():
    with pytest.raises(UsageError, match="cannot be the last"):
        AttentionShape(5, 2, 4, keys=3, causal=True)
    with pytest.raises(UsageError, match="do not divide"):
        AttentionShape(5, 6, 4, kv_heads=4)
    with pytest.raises(UsageError, match="queries=0"):
        AttentionShape(0, 6, 4)
    with pytest.raises(UsageError, match="window of both sides"):
        AttentionShape(4, 6, 4, keys=5, window=2)
