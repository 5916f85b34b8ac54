"""Ranks of arrays of JAX, and the stable rank under a trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.test_util import check_grads
from tests.spectra.test_ranks import exact

from manyheads.errors import ShapeError
from manyheads.spectra import stable_rank
from manyheads.spectra.traced_ranks import traced_stable_rank


def test_sparse_arrays_and_jax_arrays(rng):
    matrix = rng.standard_normal((60, 50)) * (rng.random((60, 50)) < 0.2)
    found = stable_rank(scipy.sparse.csr_array(matrix), tolerance=0.1)
    assert found.method == "lanczos"
    assert found.lower <= exact(matrix) <= found.upper
    array = jnp.asarray(matrix, dtype=jnp.float32)
    np.testing.assert_allclose(stable_rank(array).value, exact(matrix), rtol=1e-6)


def test_traced_twin(rng):
    stack = rng.standard_normal((3, 12, 7))
    expected = [exact(matrix) for matrix in stack]
    double = traced_stable_rank(stack)
    assert isinstance(double, np.ndarray)
    np.testing.assert_allclose(double, expected, rtol=1e-12)
    single = jax.jit(traced_stable_rank)(np.asarray(stack, np.float32))
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, expected, rtol=1e-5)
    half = jax.jit(traced_stable_rank)(np.asarray(stack, jnp.bfloat16))
    np.testing.assert_allclose(half, expected, rtol=0.05)
    tiny = jax.jit(traced_stable_rank)(np.asarray(stack * 1e-30, np.float32))
    np.testing.assert_allclose(tiny, expected, rtol=1e-5)
    with pytest.raises(ShapeError, match="columns"):
        traced_stable_rank(np.ones(3))


def test_traced_twin_gives_the_solver_one_matrix_at_a_time():
    # Two batches in one program wait for each other forever on the CPU, seen with jaxlib 0.10.2.
    program = str(jax.make_jaxpr(lambda a, b: (traced_stable_rank(a), traced_stable_rank(b)))(*np.ones((2, 5, 7, 3))))
    solved = [line for line in program.splitlines() if " eigh[" in line]
    assert solved
    assert not any("[5," in line for line in solved)


@pytest.mark.slow
def test_traced_twin_has_gradients_and_defined_edges(rng):
    matrix = rng.standard_normal((6, 4))
    with jax.enable_x64(True):
        compiled = jax.jit(traced_stable_rank)  # and one shape throughout: what takes long is to compile
        check_grads(compiled, (jnp.asarray(matrix),), order=1, modes=("rev",), rtol=1e-4)
        gradient = jax.jit(jax.grad(compiled))
        assert np.all(np.isfinite(gradient(jnp.zeros((6, 4)))))
        assert np.all(np.isfinite(gradient(jnp.eye(6, 4))))
        # the stable rank does not change with scale
        np.testing.assert_allclose(jnp.vdot(gradient(jnp.asarray(matrix)), matrix), 0.0, atol=1e-10)
    assert traced_stable_rank(np.zeros((2, 3))) == 0.0
    assert np.isnan(traced_stable_rank(np.full((2, 2), np.nan)))
