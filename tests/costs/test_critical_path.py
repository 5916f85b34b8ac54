"""The longest chain of products, against a brute-force walk over every path and against what is plain."""

import jax
import jax.numpy as jnp
import pytest

from manyheads.costs.cost import UnknownCost
from manyheads.costs.jax.critical_path import longest_chain

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def unrolled(steps):
    def fn(x, w):
        h, outputs = x, []
        for _ in range(steps):
            outputs.append(jnp.tanh(h @ w) @ w)
            h = jnp.tanh(h @ w) + 1
        return h, jnp.stack(outputs)

    return fn


def scanned(steps):
    def fn(x, w):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w) + 1, jnp.tanh(h @ w) @ w), x, None, length=steps)

    return fn


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_scan_is_as_deep_as_its_unrolled_loop(steps):
    assert longest_chain(scanned(steps), X, W) == longest_chain(unrolled(steps), X, W) == steps + 1


def test_products_beside_each_other_do_not_wait():
    assert longest_chain(lambda x, w: sum(x @ (w + k) for k in range(5)), X, W) == 1


def test_a_scan_without_carried_products_is_shallow():
    def fn(x, w):
        return jax.lax.scan(lambda total, row: (total + row.sum(), row @ w), 0.0, x)

    assert longest_chain(fn, X, W) == 1


def test_calls_derivatives_and_maps_are_looked_into():
    fn = jax.jit(jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w))
    assert longest_chain(fn, X, W) == 2
    assert longest_chain(jax.vmap(fn, (0, None)), jax.ShapeDtypeStruct((3, 4, 8), jnp.float32), W) == 2


def test_the_backward_pass_runs_back_through_the_chain():
    """Three layers: two products to the last tanh, one back through the last, one through the second, one for w."""

    def loss(w, x):
        return (jnp.tanh(jnp.tanh(x @ w) @ w) @ w).sum()

    assert longest_chain(loss, W, X) == 3
    assert longest_chain(jax.grad(loss), W, X) == 4


def test_a_scan_that_would_take_hours_to_follow_is_refused():
    with pytest.raises(UnknownCost, match="10,000,000,000 steps"):
        longest_chain(scanned(10**10), X, W)


def test_branches_count_by_the_deeper_one():
    def fn(p, x, w):
        return jax.lax.cond(p, lambda: x @ w @ w @ w, lambda: x @ w)

    assert longest_chain(fn, jax.ShapeDtypeStruct((), jnp.bool_), X, W) == 3


def test_a_product_in_an_open_loop_is_refused_and_an_open_loop_without_one_is_not():
    with pytest.raises(UnknownCost, match="while"):
        longest_chain(lambda x, w: jax.lax.while_loop(lambda h: h.sum() < 0, lambda h: h @ w, x), X, W)
    assert longest_chain(lambda x, w: jax.lax.while_loop(lambda h: h.sum() < 0, lambda h: h + 1, x) @ w, X, W) == 1
