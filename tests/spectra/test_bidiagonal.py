import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.linalg import aslinearoperator

from manyheads.errors import ShapeError, UsageError
from manyheads.spectra.bidiagonal import golub_kahan


@given(rows=st.integers(1, 24), columns=st.integers(1, 24), number=st.integers(0, 2**32 - 1))
def test_all_steps_give_all_singular_values(rows, columns, number):
    rng = np.random.default_rng(number)
    matrix = rng.standard_normal((rows, columns)) * np.exp(rng.uniform(-8, 8))
    found = golub_kahan(matrix, rows + columns, rng=rng)
    expected = np.linalg.svd(matrix, compute_uv=False)
    np.testing.assert_allclose(found.ritz[: expected.size], expected, rtol=1e-9, atol=1e-12 * expected[0])
    assert found.exhausted
    np.testing.assert_allclose(found.captured, np.sum(matrix**2), rtol=1e-9)


def test_a_residual_is_the_distance_to_some_singular_value(rng):
    matrix = rng.standard_normal((120, 80))
    exact = np.linalg.svd(matrix, compute_uv=False)
    for steps in (3, 10, 25):
        found = golub_kahan(matrix, steps, rng=rng)
        assert found.ritz.size == found.steps == steps
        distance = np.abs(found.ritz[:, None] - exact).min(axis=1)
        assert np.all(distance <= found.residuals + 1e-12 * exact[0])
        assert found.ritz[0] <= exact[0] * (1 + 1e-12)


def test_ritz_vector_residual_and_coupling_are_what_they_say(rng):
    matrix = rng.standard_normal((60, 90))
    found = golub_kahan(matrix, 12, rng=rng)
    image = matrix @ found.vector
    np.testing.assert_allclose(np.linalg.norm(image), found.ritz[0], rtol=1e-12)
    residual = np.linalg.norm(matrix.T @ image / found.ritz[0] - found.ritz[0] * found.vector)
    np.testing.assert_allclose(residual, found.residuals[0], rtol=1e-9)
    # an orthonormal basis of the same Krylov space, made the plain way
    start = golub_kahan(matrix, 1, start=found.vector).vector
    krylov = [start]
    for _ in range(4):
        krylov.append(matrix.T @ (matrix @ krylov[-1]))
        krylov[-1] /= np.linalg.norm(krylov[-1])
    basis = np.linalg.qr(np.stack(krylov, axis=1))[0]
    again = golub_kahan(matrix, 5, start=start)
    gram = matrix.T @ matrix
    np.testing.assert_allclose(again.captured, np.trace(basis.T @ gram @ basis), rtol=1e-6)
    outside = gram @ basis - basis @ (basis.T @ gram @ basis)
    np.testing.assert_allclose(again.coupling, np.linalg.norm(outside, 2), rtol=1e-5)


@pytest.mark.parametrize("rank", [1, 3])
def test_low_rank_exhausts_the_space(rng, rank):
    matrix = rng.standard_normal((50, rank)) @ rng.standard_normal((rank, 40))
    found = golub_kahan(matrix, 30, rng=rng)
    assert found.exhausted
    assert found.steps <= rank + 1
    np.testing.assert_allclose(found.ritz[0], np.linalg.norm(matrix, 2), rtol=1e-12)


def test_products_only(rng):
    matrix = rng.standard_normal((30, 20))
    vector = rng.standard_normal(20)
    expected = golub_kahan(matrix, 6, start=vector).ritz
    for other in (scipy.sparse.csr_array(matrix), aslinearoperator(matrix), matrix.astype(np.float32)):
        np.testing.assert_allclose(golub_kahan(other, 6, start=vector).ritz, expected, rtol=1e-5)


def test_wrong_use_is_named():
    matrix = np.eye(3)
    with pytest.raises(UsageError, match="start"):
        golub_kahan(matrix, 2)
    with pytest.raises(UsageError, match="steps"):
        golub_kahan(matrix, 0, rng=np.random.default_rng(0))
    with pytest.raises(UsageError, match="zero or not finite"):
        golub_kahan(matrix, 2, start=np.zeros(3))
    with pytest.raises(ShapeError, match="start"):
        golub_kahan(matrix, 2, start=np.ones(4))
    with pytest.raises(ShapeError, match="two axes"):
        golub_kahan(np.ones(3), 2, start=np.ones(3))
    with pytest.raises(ShapeError, match="real"):
        golub_kahan(1j * matrix, 2, start=np.ones(3))
    with pytest.raises(UsageError, match="NaN"):
        golub_kahan(np.full((3, 3), np.nan), 2, start=np.ones(3))
