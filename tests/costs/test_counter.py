"""The counter on every construct of a JAX program."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from manyheads.costs import UnknownCost, count
from manyheads.errors import UsageError

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)
ONE = 2 * 4**3  # one product of X with itself


def square(x):
    return x @ x


def while_below(start, bound, step, compare=lax.lt):
    def run(x):
        state = (jnp.int32(start), x)
        return lax.while_loop(lambda s: compare(s[0], bound), lambda s: (step(s[0]), square(s[1])), state)[1]

    return run


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(1, 5))
@settings(max_examples=25)
def test_known_trip_counts_are_those_of_python(start, stop, step):
    upward = while_below(start, stop, lambda i: i + step)
    assert count(upward, X).flops == ONE * len(range(start, stop, step))
    downward = while_below(start, stop, lambda i: i - step, lax.gt)
    assert count(downward, X).flops == ONE * len(range(start, stop, -step))


def test_while_loops():
    assert count(while_below(1, 100, lambda i: i * 2), X).flops == 7 * ONE
    assert count(while_below(0, 3, lambda i: jnp.minimum(i + 1, 3)), X).flops == 3 * ONE
    # The bound comes through a call and a conversion; the counter is itself found in an inner call.
    bound = jax.jit(lambda: jnp.int32(3) * 2 - jnp.int16(1).astype(jnp.int32))
    assert count(lambda x: while_below(0, bound(), jax.jit(lambda i: i + 1))(x), X).flops == 5 * ONE
    nested = while_below(0, 3, lambda i: i + 1)
    assert count(lambda x: lax.fori_loop(0, 5, lambda _, y: nested(y), x), X).flops == 15 * ONE
    # The condition runs once more than the body.
    both = lambda x: lax.while_loop(  # noqa: E731
        lambda s: (s[0] < 3) & (jnp.sum(square(s[1])) > -jnp.inf), lambda s: (s[0] + 1, s[1]), (0, x)
    )
    with pytest.raises(UnknownCost, match="while loop"):
        _ = count(both, X).flops
    assert count(both, X, trips=3).flops == 4 * ONE


def test_loops_that_end_by_data_are_named():
    def norm_bounded(x):
        return lax.while_loop(lambda y: jnp.sum(y) < 10.0, square, x)

    cost = count(norm_bounded, X)
    assert "64 multiply-adds an iteration" in cost.unknown[0]
    with pytest.raises(UnknownCost, match="trip count"):
        _ = cost.flops
    assert cost.lower_bound().flops == 0
    assumed = count(norm_bounded, X, trips=6)
    assert assumed.flops == 6 * ONE
    assert "6 times" in assumed.notes[0]
    endless = count(while_below(0, 1, lambda i: i), X)
    assert endless.unknown
    integers = count(lambda n: lax.while_loop(lambda i: i < n, lambda i: i + 1, 0), jax.ShapeDtypeStruct((), jnp.int32))
    assert integers.flops == integers.elementwise == 0  # whatever its length
    with pytest.raises(UsageError, match="trips"):
        count(norm_bounded, X, trips=-1)


def test_python_integers_are_known_and_arrays_are_not():
    def repeat(x, n):
        return lax.fori_loop(0, n, lambda _, y: square(y), x)

    assert count(repeat, X, 9).flops == 9 * ONE
    assert count(repeat, X, np.int32(9)).unknown


def test_scan():
    xs = jax.ShapeDtypeStruct((7, 4, 4), jnp.float32)
    total = count(lambda x, xs: lax.scan(lambda c, x: (c @ x, jnp.tanh(c)), x, xs), X, xs)
    assert (total.flops, total.transcendental) == (7 * ONE, 7 * 16)
    carry_only = count(lambda x, xs: lax.scan(lambda c, x: (c, square(x)), x, xs)[0], X, xs)
    assert carry_only.flops == 0  # the outputs are not used
    assert count(lambda x: lax.scan(lambda c, _: (square(c), None), x, None, length=0), X).flops == 0
    unrolled = count(lambda x: lax.scan(lambda c, _: (square(c), None), x, None, length=6, unroll=4)[0], X)
    assert unrolled.flops == 6 * ONE


def test_a_dead_carry_of_a_scan_is_not_computed():
    def step(carry, _):
        kept, spare, feeds = carry
        return (kept + feeds, square(spare), square(feeds)), None

    run = lambda x: lax.scan(step, (x, x, x), None, length=5)[0][0]  # noqa: E731
    assert count(run, X).flops == 5 * ONE  # `feeds` reaches the result, `spare` does not


def test_cond():
    branches = [lambda x: x, square, lambda x: square(square(x))]
    cost = count(lambda i, x: lax.switch(i, branches, x), jax.ShapeDtypeStruct((), jnp.int32), X)
    assert cost.flops == 2 * ONE
    assert "0, 64, 128" in cost.notes[0]
    assert count(lambda x: lax.switch(1, branches, x), X).flops == ONE
    equal = count(lambda p, x: lax.cond(p, square, lambda x: x.T @ x, x), jax.ShapeDtypeStruct((), jnp.bool_), X)
    assert (equal.flops, equal.notes) == (ONE, ())


def test_calls():
    @jax.custom_vjp
    def doubled(x):
        return square(x)

    doubled.defvjp(lambda x: (square(x), x), lambda x, g: (g @ x @ x,))

    @jax.custom_jvp
    def other(x):
        return square(x)

    other.defjvp(lambda primal, tangent: (square(*primal), tangent[0] @ primal[0]))
    for call in (jax.jit(square), jax.checkpoint(square), doubled, other, jax.named_call(square, name="n")):
        assert count(call, X).flops == ONE
    assert count(jax.value_and_grad(lambda x: doubled(x).sum()), X).flops == 3 * ONE
    assert count(jax.value_and_grad(lambda x: other(x).sum()), X).flops == 2 * ONE
    assert count(jax.grad(lambda x: doubled(x).sum()), X).flops == 2 * ONE  # the value is not used
    batch = jax.ShapeDtypeStruct((3, 4, 4), jnp.float32)
    assert count(jax.vmap(square), batch).flops == count(lambda x: lax.map(square, x), batch).flops == 3 * ONE
    assert count(lambda x: jax.jit(lambda x: (square(x), x + 1.0))(x)[1], X).flops == 0


def test_hessian_vector_product_of_a_network(reference):
    w = reference.array(4, 4)
    loss = lambda x, w: jnp.sum(jnp.tanh(x @ w) ** 2)  # noqa: E731
    hvp = lambda x, w, t: jax.jvp(lambda x: jax.grad(loss)(x, w), (x,), (t,))[1]  # noqa: E731
    assert count(hvp, X, w, X).flops == 3 * ONE  # y = x w, its tangent, and one product back


shapes = st.lists(st.integers(1, 5), min_size=0, max_size=2)


@given(shapes, shapes, shapes, shapes)
@settings(max_examples=40)
def test_products_of_any_rank(batch, rows, columns, contracted):
    left = jax.ShapeDtypeStruct((*batch, *rows, *contracted), jnp.float32)
    right = jax.ShapeDtypeStruct((*batch, *contracted, *columns), jnp.float32)
    b, r, c = len(batch), len(rows), len(contracted)
    dims = ((tuple(range(b + r, b + r + c)), tuple(range(b, b + c))), (tuple(range(b)), tuple(range(b))))
    expected = 2 * int(np.prod([*batch, *rows, *columns, *contracted]))
    assert count(lambda a, b: lax.dot_general(a, b, dims), left, right).flops == expected


def by_hand(outputs, taps, inputs, stride, spread, dilation, before):
    """(output, tap) pairs of one axis that meet an element, by walking over the padded and dilated input."""
    places = {before + i * dilation for i in range(inputs)}
    return sum((o * stride + t * spread) in places for o in range(outputs) for t in range(taps))


AXES = list(itertools.product((1, 2), (1, 2), (1, 3), ("SAME", "VALID", [(2, 1)])))


@pytest.mark.parametrize(("stride", "spread", "dilation", "padding"), AXES)
def test_convolutions(stride, spread, dilation, padding):
    x, w = jax.ShapeDtypeStruct((2, 9, 4), jnp.float32), jax.ShapeDtypeStruct((3, 2, 6), jnp.float32)
    if padding != [(2, 1)] and dilation > 1:
        padding = [(0, 0)]  # lax takes names of paddings without dilation only

    def convolve(x, w):
        return lax.conv_general_dilated(
            x, w, (stride,), padding, (dilation,), (spread,), ("NWC", "WIO", "NWC"), feature_group_count=2
        )

    outputs = jax.eval_shape(convolve, x, w).shape[1]
    total, taken = (outputs - 1) * stride + (2 * spread + 1), (9 - 1) * dilation + 1
    before = (
        {"SAME": max(total - taken, 0) // 2, "VALID": 0}.get(padding) if isinstance(padding, str) else padding[0][0]
    )
    pairs = by_hand(outputs, 3, 9, stride, spread, dilation, before)
    assert count(convolve, x, w).flops == 2 * 2 * 6 * 2 * pairs
    trained = count(jax.value_and_grad(lambda x, w: convolve(x, w).sum(), argnums=(0, 1)), x, w)
    assert trained.flops == 3 * count(convolve, x, w).flops


def test_what_is_not_a_product_is_said():
    cost = count(lambda x: jnp.linalg.cholesky(jnp.sort(x)), X)
    assert cost.flops == 0
    assert {note.split()[0] for note in cost.notes} == {"sort", "cholesky"}
    opaque = count(lambda x: jax.pure_callback(np.sin, X, x), X)
    assert "pure_callback" in opaque.unknown[0]


def test_elementwise_columns():
    cost = count(lambda x: jnp.exp(x) * 2.0 + x, X)
    assert (cost.elementwise, cost.transcendental, cost.flops) == (32, 16, 0)
    assert count(lambda x: x.sum(0).max(), X).elementwise == 16 + 4
    integers = jax.ShapeDtypeStruct((9,), jnp.int32)
    assert count(lambda i: (i * 2 + 1).sum(), integers).elementwise == 0
    assert count(lambda x, i: x.at[i].add(1.0), jax.ShapeDtypeStruct((4,), jnp.float32), integers).elementwise == 9


def test_bytes_are_inputs_constants_and_results():
    weights = np.ones((4, 5), np.float32)
    cost = count(lambda x, spare: x @ weights, X, X)
    assert cost.bytes == 4 * (16 + 20 + 20)
    assert count(jax.jit(lambda x: x @ weights), X).bytes == 4 * (16 + 20 + 20)


def test_leaves_that_are_no_arrays_pass_through():
    cost = count(
        lambda tree, how: how(tree["x"]) if tree["name"] == "a" else None, {"x": X, "name": "a", "no": None}, square
    )
    assert cost.flops == ONE


def test_counting_runs_nothing():
    huge = jax.ShapeDtypeStruct((10**6, 10**6), jnp.bfloat16)
    assert count(square, huge).flops == 2 * 10**18
