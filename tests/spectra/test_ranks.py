import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spectra.test_coherences import Stored

from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.spectra import stable_rank
from manyheads.spectra.ranks import lanczos_error


class Products:
    """A matrix known by its products and its norm."""

    def __init__(self, matrix):
        self.shape = matrix.shape
        self.frobenius = float(np.linalg.norm(matrix))
        self.matvec = lambda v: matrix @ v
        self.rmatvec = lambda u: matrix.T @ u


def with_singular_values(values, rows, columns, rng):
    u = np.linalg.qr(rng.standard_normal((rows, values.size)))[0]
    v = np.linalg.qr(rng.standard_normal((columns, values.size)))[0]
    return (u * values) @ v.T


def exact(matrix):
    squares = np.linalg.svd(np.asarray(matrix, dtype=float), compute_uv=False) ** 2
    return squares.sum() / squares[0]


SPECTRA = {
    "gaussian": None,
    "one spike": lambda n: np.r_[4.0 * np.sqrt(n), np.ones(n - 1)],
    "flat": lambda n: np.ones(n),
    "power law": lambda n: np.arange(1, n + 1.0) ** -0.5,
    "decades": lambda n: np.logspace(0, -12, n),
    # the top is a pair that differs by less than a step of Lanczos resolves: residuals mislead here
    "clustered": lambda n: np.r_[1.0, 1 - 1e-7, np.linspace(0.9999, 0.5, n - 2)],
    "hidden top": lambda n: np.r_[1.05, np.full(n - 1, 1.0)],
}


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("shape", [(96, 40), (48, 160)])
def test_every_method_agrees_with_the_svd_and_keeps_its_bounds(rng, kind, shape):
    side = min(shape)
    values = SPECTRA[kind]
    matrix = rng.standard_normal(shape) if values is None else with_singular_values(values(side), *shape, rng)
    expected = exact(matrix)
    for options in (
        {"method": "gram"},
        {"method": "lanczos", "certificate": "cholesky", "rng": rng},
        {"method": "lanczos", "certificate": "cholesky", "rng": rng, "tolerance": 1e-6},
    ):
        found = stable_rank(matrix, **options)
        assert found.lower <= expected * (1 + 1e-12)
        assert expected <= found.upper * (1 + 1e-12)
        assert found.lower <= found.value <= found.upper
        assert found.upper / found.lower - 1 <= options.get("tolerance", 1e-3) * (1 + 1e-9)
        assert found.sigma_low <= np.linalg.norm(matrix, 2) * (1 + 1e-12) <= found.sigma_high * (1 + 2e-12)
        np.testing.assert_allclose(found.frobenius, np.linalg.norm(matrix), rtol=1e-12)
    gram = stable_rank(matrix)
    assert (gram.method, gram.certificate, gram.steps) == ("gram", "exact", 0)
    np.testing.assert_allclose(gram.value, expected, rtol=1e-11)


@pytest.mark.parametrize("kind", SPECTRA)
def test_the_probabilistic_certificate_keeps_its_bounds(rng, kind):
    """False-alarm rate: 30 starts, each wrong with probability at most 1e-9."""
    side = 64
    values = SPECTRA[kind]
    for _ in range(30):
        matrix = (
            rng.standard_normal((80, side)) if values is None else with_singular_values(values(side), 80, side, rng)
        )
        found = stable_rank(Products(matrix), tolerance=0.05, rng=rng)
        assert found.lower <= exact(matrix) * (1 + 1e-12) <= found.upper * (1 + 2e-12)
        assert found.certificate in ("frobenius", "probability")
        assert found.upper / found.lower - 1 <= 0.05 * (1 + 1e-9)


def test_the_certificate_is_never_wrong_where_the_start_misses_the_top(rng):
    """A start orthogonal to the top vector: Lanczos converges to the second value with a vanishing residual."""
    matrix = np.diag(np.r_[1.5, 1.0, np.linspace(0.6, 0.1, 38)])
    start = np.r_[0.0, rng.standard_normal(39)]
    with pytest.raises(CertificateError, match="certify"):
        stable_rank(matrix, "lanczos", certificate="cholesky", start=start)
    with pytest.raises(UsageError, match="random start"):
        stable_rank(matrix, "lanczos", certificate="probability", start=start)


def test_a_lone_spike_is_proved_without_a_gram_matrix(rng):
    matrix = with_singular_values(np.r_[10.0, np.full(63, 0.5)], 100, 64, rng)
    assert stable_rank(matrix, "lanczos", rng=rng).certificate == "frobenius"
    low_rank = stable_rank(Products(matrix[:, :1] @ matrix[:1]), rng=rng)
    assert low_rank.certificate == "frobenius"
    np.testing.assert_allclose([low_rank.value, low_rank.lower], 1.0, rtol=1e-9)


@pytest.mark.parametrize("kind", [np.float64, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(90, 30), (30, 90)])
def test_rows_read_when_indexed_give_the_same(rng, kind, shape):
    matrix = rng.standard_normal(shape).astype(kind)
    for scale in (1, 2.0**-120):
        scaled = (matrix * np.asarray(scale, kind)).astype(kind)
        assert stable_rank(Stored(scaled)) == stable_rank(scaled)
    lanczos = {"method": "lanczos", "tolerance": 0.05}
    assert stable_rank(Stored(matrix), **lanczos) == stable_rank(matrix, **lanczos)


def test_a_warm_start_needs_no_more_steps(rng):
    matrix = rng.standard_normal((300, 200))
    first = stable_rank(matrix, "lanczos", rng=rng)
    again = stable_rank(matrix + 1e-3 * rng.standard_normal(matrix.shape), "lanczos", start=first.vector)
    assert first.vector.shape == (200,)
    assert again.steps <= first.steps
    wide = stable_rank(matrix.T, "lanczos", start=first.vector)
    np.testing.assert_allclose(wide.value, exact(matrix), rtol=1e-3)


@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 20),
    exponent=st.integers(-300, 290),
    number=st.integers(0, 2**32 - 1),
)
def test_range_rotations_transposition_and_scale(rows, columns, exponent, number):
    rng = np.random.default_rng(number)
    rank = int(rng.integers(1, min(rows, columns) + 1))
    matrix = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns))
    found = stable_rank(matrix)
    assert 1.0 <= found.lower <= found.value <= found.upper <= min(rows, columns)
    assert found.value <= rank * (1 + 1e-9)
    rotation = np.linalg.qr(rng.standard_normal((rows, rows)))[0]
    for other in (rotation @ matrix, matrix.T, matrix * 10.0**exponent):
        np.testing.assert_allclose(stable_rank(other).value, found.value, rtol=1e-9)


def test_effective_rank_and_participation_ratio_are_their_definitions(rng):
    """Equal singular values give their number; 4, 3, 2, 1 the entropy of .4, .3, .2, .1 and 30^2 / 354."""
    rotation = np.linalg.qr(rng.standard_normal((9, 9)))[0]
    four = stable_rank(1e-200 * rotation[:, :4] @ np.diag([4.0, 3, 2, 1]) @ np.eye(4, 6))
    assert four.effective_rank == pytest.approx(
        np.exp(-(np.array([0.4, 0.3, 0.2, 0.1]) @ np.log([0.4, 0.3, 0.2, 0.1])))
    )
    assert four.participation_ratio == pytest.approx(900 / 354)
    for rank in (1, 3, 9):
        same = stable_rank(rotation[:, :rank] @ rotation[:rank])
        assert same.effective_rank == pytest.approx(rank, rel=1e-9)
        assert same.participation_ratio == pytest.approx(rank, rel=1e-9)
    for shape in ((300, 40), (40, 300), (700, 700)):
        matrix = rng.standard_normal(shape)
        values = np.linalg.svd(matrix, compute_uv=False)
        p, found = values / values.sum(), stable_rank(matrix)
        assert found.effective_rank == pytest.approx(np.exp(-(p @ np.log(p))), rel=1e-6)
        assert found.participation_ratio == pytest.approx((values**2).sum() ** 2 / (values**4).sum(), rel=1e-9)
        assert found.value <= found.participation_ratio <= found.effective_rank <= min(shape)
    nothing = stable_rank(np.zeros((3, 2)))
    assert nothing.effective_rank == nothing.participation_ratio == 0
    assert np.isnan(stable_rank(matrix, "lanczos", rng=rng).effective_rank)


def test_closed_forms():
    assert stable_rank(np.eye(5)).value == pytest.approx(5.0, rel=1e-12)
    assert stable_rank(np.ones((4, 7))).value == pytest.approx(1.0, rel=1e-12)
    assert stable_rank(np.diag([3, 2, 1])).value == pytest.approx(14 / 9, rel=1e-12)
    assert stable_rank(np.arange(1.0, 5.0)[:, None]).value == 1.0
    zero = stable_rank(np.zeros((3, 4)))
    assert (zero.value, zero.lower, zero.upper, zero.method) == (0.0, 0.0, 0.0, "zero")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8])
def test_other_dtypes_are_converted_and_not_rounded(rng, dtype):
    matrix = (rng.standard_normal((500, 400)) * 20).astype(dtype)
    expected = exact(matrix.astype(np.float64))
    np.testing.assert_allclose(stable_rank(matrix).value, expected, rtol=1e-10)
    found = stable_rank(matrix, "lanczos", rng=rng, certificate="probability", tolerance=0.05)
    assert found.lower <= expected <= found.upper


def test_wrong_use_is_named(rng):
    matrix = rng.standard_normal((6, 5))
    for bad in (np.nan, np.inf):
        with pytest.raises(UsageError, match="NaN or infinite"):
            stable_rank(np.where(matrix == matrix[2, 3], bad, matrix))
    with pytest.raises(ShapeError, match="two axes"):
        stable_rank(matrix[0])
    with pytest.raises(ShapeError, match="two axes"):
        stable_rank(np.zeros((0, 3)))
    with pytest.raises(UsageError, match="method"):
        stable_rank(matrix, "svd")
    with pytest.raises(UsageError, match="tolerance"):
        stable_rank(matrix, tolerance=0.0)
    with pytest.raises(UsageError, match="without its entries"):
        stable_rank(Products(matrix), "gram")
    nameless = Products(matrix)
    del nameless.frobenius
    with pytest.raises(UsageError, match="frobenius"):
        stable_rank(nameless)
    with pytest.raises(CertificateError, match="certify"):
        stable_rank(rng.standard_normal((200, 150)), "lanczos", tolerance=1e-13, rng=rng)
    with pytest.raises(UsageError, match="frobenius=nan"):
        stable_rank(Products(matrix * np.nan), tolerance=0.1)


def test_lanczos_error_is_kept_by_the_bare_ritz_value(rng):
    """At failure 1e-3 over 200 starts the chance of more than 8 misses is below 1e-12 (Poisson, mean 0.2)."""
    from manyheads.spectra.bidiagonal import golub_kahan

    side, steps = 100, 10
    matrix = np.diag(np.sqrt(np.linspace(1.0, 0.0, side)))
    error = lanczos_error(side, steps, failure=1e-3)
    assert error < 1
    misses = sum(1 - golub_kahan(matrix, steps, rng=rng).ritz[0] ** 2 > error for _ in range(200))
    assert misses <= 8
    # and the bound is not vacuous: a third of the steps misses it
    assert all(1 - golub_kahan(matrix, 2, rng=rng).ritz[0] ** 2 > 0.03 for _ in range(5))


@pytest.mark.parametrize("method", ["gram", "lanczos"])
def test_the_largest_numbers_of_float64(method):
    # Entries of 2**1023 and more: their power of two is no number, nor is the Frobenius norm.
    found = stable_rank(np.diag([1.7e308, 1.7e308, 0.85e308]), method=method)
    assert found.lower <= 2.25 <= found.upper
    np.testing.assert_allclose(found.sigma_high, 1.7e308, rtol=2e-3)
    assert found.frobenius == np.inf
