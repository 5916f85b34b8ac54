"""The counter on every construct of a JAX program."""

import itertools
from collections import Counter
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas, sparse
from jax.extend.core import primitives as jax_primitives
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from manyheads.costs import count
from manyheads.costs.cost import UnknownCost
from manyheads.costs.jax import counter, jaxpr, primitives
from manyheads.costs.jax.critical_path import longest_chain
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


def test_loops_that_end_by_data_are_named(monkeypatch):
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
    monkeypatch.setattr(jaxpr, "LONGEST_SIMULATION", 1000)
    assert "runs over 1,000 iterations" in count(while_below(0, 1, lambda i: i), X).unknown[0]
    integers = count(lambda n: lax.while_loop(lambda i: i < n, lambda i: i + 1, 0), jax.ShapeDtypeStruct((), jnp.int32))
    assert integers.flops == integers.elementwise == 0  # whatever its length
    with pytest.raises(UsageError, match="trips"):
        count(norm_bounded, X, trips=-1)


def test_integers_with_a_value_are_known_and_shapes_are_not():
    def repeat(x, n):
        return lax.fori_loop(0, n, lambda _, y: square(y), x)

    for bound in (9, np.int32(9), np.array(9), jnp.int32(9)):
        assert count(repeat, X, bound).flops == 9 * ONE
    assert "known integer scalars" in count(repeat, X, jax.ShapeDtypeStruct((), jnp.int32)).unknown[0]


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


def test_a_switch_costs_the_branch_that_is_taken_and_under_vmap_all_of_them():
    branches = [lambda x: x, square, lambda x: square(square(x))]
    for index, products in ((0, 0), (1, 1), (2, 2), (7, 2), (-1, 0)):  # an index outside is clamped
        assert count(lambda x, index=index: lax.switch(index, branches, x), X).flops == products * ONE
        assert (
            count(jax.jit(lambda x, index=index: lax.switch(jnp.int32(index), branches, x)), X).flops == products * ONE
        )
        assert count(lambda i, x: lax.switch(i, branches, x), index, X).flops == products * ONE
    indices, batch = jax.ShapeDtypeStruct((5,), jnp.int32), jax.ShapeDtypeStruct((5, 4, 4), jnp.float32)
    assert count(jax.vmap(lambda i, x: lax.switch(i, branches, x)), indices, batch).flops == 5 * 3 * ONE


def test_what_is_not_a_product_is_said():
    cost = count(jnp.sort, X)
    assert (cost.flops, cost.elementwise) == (0, 0)
    assert [note.split()[0] for note in cost.notes] == ["sort"]
    opaque = count(lambda x: jax.pure_callback(np.sin, X, x), X)
    assert "pure_callback" in opaque.unknown[0]


def test_convolutions_of_any_length_are_counted_at_once():
    signal = jax.ShapeDtypeStruct((1, 1, 10**9), jnp.float32)
    kernel = jax.ShapeDtypeStruct((1, 1, 3), jnp.float32)
    assert count(lambda x, w: lax.conv(x, w, (1,), "VALID"), signal, kernel).flops == 2 * 3 * (10**9 - 2)
    assert count(lambda x, w: lax.conv(x, w, (1,), "SAME"), signal, kernel).flops == 2 * (3 * 10**9 - 2)


class Tallied(float):
    """A number that counts the operations on it by kind."""

    done: ClassVar = Counter()

    def _do(self, kind, value):
        Tallied.done[kind] += 1
        return Tallied(value)

    def __mul__(self, other):
        return self._do("*", float(self) * float(other))

    def __rsub__(self, other):
        return self._do("-", float(other) - float(self))

    def __sub__(self, other):
        return self._do("-", float(self) - float(other))

    def __truediv__(self, other):
        return self._do("/", float(self) / float(other))

    def root(self):
        return self._do("root", float(self) ** 0.5)


def lu_by_hand(a):
    m, n = len(a), len(a[0])
    for k in range(min(m, n)):
        for i in range(k + 1, m):
            a[i][k] = a[i][k] / a[k][k]
            for j in range(k + 1, n):
                a[i][j] = a[i][j] - a[i][k] * a[k][j]


def cholesky_by_hand(a):
    for k in range(len(a)):
        a[k][k] = a[k][k].root()
        for i in range(k + 1, len(a)):
            a[i][k] = a[i][k] / a[k][k]
        for i in range(k + 1, len(a)):
            for j in range(k + 1, i + 1):
                a[i][j] = a[i][j] - a[i][k] * a[j][k]


def substitute_by_hand(a, right, unit):
    for i in range(len(a)):
        for column in range(len(right[0])):
            for j in range(i):
                right[i][column] = right[i][column] - a[i][j] * right[j][column]
            right[i][column] = right[i][column] if unit else right[i][column] / a[i][i]


def tallied(rows, columns):
    Tallied.done.clear()
    return [[Tallied(1 + 9 * (i == j) + 0.1 * i) for j in range(columns)] for i in range(rows)]


def figures(cost):
    return cost.flops // 2, cost.elementwise, cost.transcendental


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 2), (5, 5), (3, 6), (6, 3), (1, 4)])
def test_factorizations_count_what_the_textbook_computes(m, n):
    lu_by_hand(tallied(m, n))
    done = dict(Tallied.done)
    batch = jax.ShapeDtypeStruct((3, m, n), jnp.float32)
    assert figures(count(lax.linalg.lu, batch)) == (3 * done.get("*", 0), 3 * done.get("/", 0), 0)
    if m == n:
        cholesky_by_hand(tallied(n, n))
        done = [3 * Tallied.done[kind] for kind in ("*", "/", "root")]
        bare = lambda x: lax.linalg.cholesky(x, symmetrize_input=False)  # noqa: E731
        # Beside the decomposition, what is above the diagonal is set to zero: one choice an element.
        macs, elementwise, roots = figures(count(bare, batch))
        assert [macs, elementwise - 3 * n * n, roots] == done
    for unit, left in itertools.product((False, True), (False, True)):
        substitute_by_hand(tallied(n, n), tallied(n, 4), unit)
        right = jax.ShapeDtypeStruct((n, 4) if left else (4, n), jnp.float32)
        solve = lambda a, b, u=unit, s=left: lax.linalg.triangular_solve(a, b, left_side=s, unit_diagonal=u)  # noqa: E731
        counted = figures(count(solve, jax.ShapeDtypeStruct((n, n), jnp.float32), right))
        assert counted == (Tallied.done["*"], Tallied.done["/"], 0)


def test_linear_systems_cost_their_factorization_and_their_solves():
    """The sum of k^2 over k < n multiply-adds for an LU, and n (n - 1) for each right-hand side."""
    n = 8
    square, sides = jax.ShapeDtypeStruct((n, n), jnp.float32), jax.ShapeDtypeStruct((n, 3), jnp.float32)
    lu, solve = sum(k * k for k in range(n)), n * (n - 1)
    assert count(jnp.linalg.solve, square, sides).flops == 2 * (lu + 3 * solve)
    assert count(jnp.linalg.inv, square).flops == 2 * (lu + n * solve)
    assert count(lambda a: jnp.linalg.slogdet(a)[1], square).flops == 2 * lu
    # The gradient solves the transposed system, and takes an outer product of two vectors.
    vector = jax.ShapeDtypeStruct((n,), jnp.float32)
    gradient = jax.grad(lambda a, b: jnp.linalg.solve(a, b).sum())
    assert count(gradient, square, vector).flops == 2 * (lu + 2 * solve + n * n)
    exponential = count(jax.scipy.linalg.expm, square)
    assert not exponential.unknown
    # At least the products of the Pade approximant of degree 13, at most 16 squarings more, and one solve.
    products = [(exponential.flops // 2 - lu - n * solve - extra * n**3) for extra in range(6, 23)]
    assert 0 in products


@pytest.mark.parametrize("method", ["scan", "scan_unrolled", "sort", "compare_all"])
def test_searching_is_no_product(method):
    vector = jax.ShapeDtypeStruct((9,), jnp.float32)
    assert count(lambda a, v: jnp.searchsorted(a, v, method=method), vector, vector).flops == 0


UNDETERMINED = {
    "svd": jnp.linalg.svd, "eigh": jnp.linalg.eigh, "eig": jnp.linalg.eig, "schur": jax.scipy.linalg.schur,
    "fft": jnp.fft.fft, "qr": jnp.linalg.qr,
}  # fmt: skip


@pytest.mark.parametrize("name", UNDETERMINED)
def test_work_that_depends_on_data_or_library_is_unknown(name):
    cost = count(lambda x: UNDETERMINED[name](square(x)), X)
    assert cost.unknown[0].startswith(name)
    with pytest.raises(UnknownCost, match=name):
        _ = cost.flops
    assert cost.lower_bound().flops == ONE


def sharded(body, **specs):
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    return jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec(**specs), check_vma=False
    )


def test_programs_that_run_on_every_device_or_grid_point():
    assert count(sharded(square), X).flops == ONE
    assert count(jax.pmap(square), jax.ShapeDtypeStruct((1, 4, 4), jnp.float32)).flops == ONE
    summed = count(sharded(lambda x: lax.psum(square(x), "i")), X)
    assert summed.flops == ONE
    assert "between devices" in summed.notes[0]
    assert longest_chain(sharded(lambda x: square(square(x))), X) == 2
    abstract = AbstractMesh((2, 3), ("i", "j"))  # more devices than there are here
    many = jax.shard_map(square, mesh=abstract, in_specs=PartitionSpec("i", "j"), out_specs=PartitionSpec("i", "j"))
    assert count(many, jax.ShapeDtypeStruct((2 * 4, 3 * 4), jnp.float32)).flops == 6 * ONE
    one = jax.shard_map(
        square, mesh=abstract, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"), axis_names={"i"}
    )
    assert count(one, jax.ShapeDtypeStruct((2 * 4, 4), jnp.float32)).flops == 2 * ONE

    def kernel(x, out):
        out[...] = x[...] @ x[...]

    assert count(pallas.pallas_call(kernel, out_shape=X, grid=(3, 2)), X).flops == 6 * ONE


@pytest.mark.parametrize("outer", [0, 1, 2, 5])
def test_inner_loops_that_end_by_the_outer_counter(outer):
    inner = lambda i, y: lax.fori_loop(0, i * i, lambda _, z: square(z), y)  # noqa: E731
    squares = sum(i * i for i in range(outer))
    assert count(lambda x: lax.fori_loop(0, outer, inner, x), X).flops == squares * ONE
    assert count(lambda x, n: lax.fori_loop(0, n, inner, x), X, outer).flops == squares * ONE
    deeper = lambda i, y: lax.fori_loop(0, i, inner, y)  # noqa: E731
    total = sum(sum(j * j for j in range(i)) for i in range(outer))
    assert count(lambda x: lax.fori_loop(0, outer, deeper, x), X).flops == total * ONE


def test_bounds_that_the_program_computes():
    """Powers are followed; an element of a constant array is not, and the reason does not call it data alone."""

    def run(bound):
        return count(lambda x, n: lax.fori_loop(0, bound(n), lambda _, y: square(y), x), X, 3)

    for power in (2, 3):
        assert run(lambda n, power=power: lax.integer_pow(n, power)).flops == 3**power * ONE
    assert run(lambda n: lax.square(n)).flops == 9 * ONE
    cost = run(lambda n: jnp.max(jnp.array([2, 5])))
    assert "elements of arrays" in cost.unknown[0]
    with pytest.raises(UnknownCost, match="trip count"):
        _ = cost.flops


def test_constant_group_sizes_are_not_called_data():
    left, right = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((3, 4, 5), jnp.float32)
    cost = count(lambda a, b: lax.ragged_dot(a, b, jnp.array([2, 3, 3])), left, right)
    assert "which are data" not in cost.unknown[0]
    with pytest.raises(UnknownCost) as caught:
        _ = cost.flops
    assert "trip count" not in str(caught.value)  # there is no loop


def test_reasons_of_refusal_are_those_of_the_primitive(monkeypatch):
    """Each names what stands in the way; none says that a program is absent where its parameters hold one."""
    left, right = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((3, 4, 5), jnp.float32)
    ragged = count(lax.ragged_dot, left, right, jax.ShapeDtypeStruct((3,), jnp.int32)).unknown[0]
    assert "group sizes" in ragged
    assert f"at most {8 * 4 * 5} multiply-adds" in ragged
    stored = sparse.BCOO.fromdense(jnp.eye(4))
    assert "sparse array" in count(lambda m, v: m @ v, stored, jnp.ones((4, 4))).unknown[0]
    assert "outside of the program" in count(lambda x: jax.pure_callback(np.sin, X, x), X).unknown[0]
    with pytest.raises(UnknownCost, match="outside of the program"):
        longest_chain(lambda x: jax.pure_callback(np.sin, X, x), X)
    assert longest_chain(lambda m, v: m @ (m @ v), stored, jnp.ones((4, 4))) == 2
    monkeypatch.setattr(counter.jaxpr, "LONGEST_WALK", 3)
    triangle = lambda x: lax.fori_loop(0, 5, lambda i, y: lax.fori_loop(0, i, lambda _, z: square(z), y), x)  # noqa: E731
    assert "the counter of a loop around it" in count(triangle, X).unknown[0]


def test_every_primitive_of_this_jax_is_known():
    """Or has a rule of its own."""
    table = set().union(*(value for value in vars(primitives).values() if isinstance(value, frozenset)))
    rules = {
        "dot_general", "conv_general_dilated", "scan", "while", "cond", "lu", "cholesky", "triangular_solve",
        "custom_linear_solve", "reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum",
    }  # fmt: skip
    calls = {
        "call",
        "closed_call",
        "custom_jvp_call",
        "custom_lin",
        "custom_vjp_call",
        "jit",
        "pjit",
        "remat2",
        "checkpoint",
    }
    public = {getattr(jax_primitives, name).name for name in dir(jax_primitives) if name.endswith("_p")}
    assert public - table - rules - calls - {"xla_pmap"} == set()  # JAX 0.9 lists it; its pmap is a shard_map


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
