import numpy as np
import pytest
from scipy import integrate, linalg, stats

from manyheads.errors import UsageError
from manyheads.spectra import stable_rank
from manyheads.spectra.levels import (
    causal_entropy_level,
    expected_stable_rank,
    marchenko_pastur_density,
    marchenko_pastur_edges,
    random_coherence,
    random_stable_rank,
)

SHAPES = [(16, 16), (64, 16), (16, 100), (200, 200)]


def sample_stable_rank(rows, columns, draws, rng):
    """Draw stable ranks of Gaussian matrices from their exact law, without forming a matrix.

    Householder reflections leave a Gaussian matrix with a bidiagonal one of independent chi entries, of the same
    singular values in law (Dumitriu and Edelman, J. Math. Phys. 43, 2002, theorem 3.4).
    """
    large, small = max(rows, columns), min(rows, columns)
    diagonal = np.sqrt(rng.chisquare(large - np.arange(small), (draws, small)))
    beside = np.sqrt(rng.chisquare(np.arange(small - 1, 0, -1), (draws, small - 1)))
    squares = np.sum(diagonal**2, axis=1) + np.sum(beside**2, axis=1)
    main, off = diagonal**2, diagonal[:, :-1] * beside  # the Gram matrix of the bidiagonal matrix: tridiagonal
    main[:, 1:] += beside**2
    if small == 1:
        return np.ones(draws)
    last = (small - 1, small - 1)
    top = [linalg.eigvalsh_tridiagonal(d, e, select="i", select_range=last)[0] for d, e in zip(main, off, strict=True)]
    return squares / np.array(top)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variance", [1.0, 0.04])
def test_density_has_mass_one_and_the_mean_of_the_gram_matrix(shape, variance):
    low, high = marchenko_pastur_edges(*shape, variance)
    # sines of an angle remove the square roots at the edges
    centre, radius = (low + high) / 2, (high - low) / 2

    def moment(power):
        def integrand(angle):
            x = centre + radius * np.sin(angle)
            return x**power * marchenko_pastur_density(x, *shape, variance) * radius * np.cos(angle)

        return integrate.quad(integrand, -np.pi / 2, np.pi / 2, limit=200)[0]

    assert moment(0) == pytest.approx(1.0, rel=1e-6)
    assert moment(1) == pytest.approx(variance * max(shape), rel=1e-6)
    assert np.all(marchenko_pastur_density([low * 0.99, high * 1.01], *shape, variance) == 0)


def test_a_large_matrix_follows_the_density(rng):
    squares = np.linalg.svd(rng.standard_normal((400, 200)), compute_uv=False) ** 2
    low, high = marchenko_pastur_edges(400, 200)
    for quantile in (0.25, 0.5, 0.75):
        cut = np.quantile(squares, quantile)
        mass = integrate.quad(marchenko_pastur_density, low, cut, args=(400, 200), limit=200)[0]
        # eigenvalues are rigid: counts fluctuate by a few out of 200
        assert mass == pytest.approx(quantile, abs=0.03)
    assert high * 0.9 < squares.max() < high * 1.1


@pytest.mark.parametrize("shape", [(5, 5), (12, 4), (3, 9), (1, 6)])
def test_the_bidiagonal_law_is_that_of_gaussian_matrices(rng, shape):
    """False-alarm rate 1e-5 for each shape: two-sample Kolmogorov-Smirnov test."""
    fast = sample_stable_rank(*shape, 3000, rng)
    dense = rng.standard_normal((3000, *shape))
    squares = np.linalg.svd(dense, compute_uv=False) ** 2
    direct = squares.sum(axis=1) / squares[:, 0]
    if min(shape) == 1:
        np.testing.assert_allclose(fast, 1.0)
        np.testing.assert_allclose(direct, 1.0)
    else:
        assert stats.ks_2samp(fast, direct).pvalue > 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_the_closed_form_is_within_half_a_percent_of_simulation(rng, shape):
    """False-alarm rate below 1e-6: the allowance on top of 0.5% is five standard errors."""
    sample = sample_stable_rank(*shape, 1500, rng)
    error = sample.std() / np.sqrt(sample.size)
    assert abs(sample.mean() - expected_stable_rank(*shape)) < 0.005 * sample.mean() + 5 * error
    assert random_stable_rank(*shape) < sample.mean()


def test_finite_matrices_approach_the_edge():
    gaps = [expected_stable_rank(4**k, 4**k) / random_stable_rank(4**k, 4**k) - 1 for k in (5, 7, 9)]
    # relative distance to the edge falls as n^(-2/3): by 4^(4/3) for each factor 16
    np.testing.assert_allclose(np.array(gaps[:-1]) / gaps[1:], 4 ** (4 / 3), rtol=0.1)


def test_a_dense_gaussian_matrix_sits_at_its_level(rng):
    value = stable_rank(rng.standard_normal((512, 384))).value
    sample = sample_stable_rank(512, 384, 200, rng)
    assert abs(value - sample.mean()) < 8 * sample.std()
    assert stable_rank(rng.standard_normal((512, 384)) + 1).value < 10


@pytest.mark.parametrize("dimension", [1, 2, 3, 8, 300])
def test_random_coherence_against_its_integral(dimension):
    if dimension == 1:
        expected = 1.0
    else:
        weight = (dimension - 3) / 2
        # cos has density ∝ (1 - x²)^((d - 3)/2); in the angle it is sin^(d - 2)
        power = 2 * weight + 1
        top = integrate.quad(lambda a: abs(np.cos(a)) * np.sin(a) ** power, 0, np.pi, points=[np.pi / 2])[0]
        expected = top / integrate.quad(lambda a: np.sin(a) ** power, 0, np.pi)[0]
    assert random_coherence(dimension) == pytest.approx(expected, rel=1e-9)
    assert random_coherence(dimension) == pytest.approx(np.sqrt(2 / (np.pi * dimension)), rel=0.3 / dimension)


def test_causal_entropy_level_is_the_mean_of_the_rows():
    for length in (1, 2, 35, 1000):
        assert causal_entropy_level(length) == pytest.approx(np.mean(np.log(np.arange(1, length + 1))), abs=1e-12)


def test_wrong_use_is_named():
    for bad in (
        lambda: marchenko_pastur_edges(0, 3),
        lambda: marchenko_pastur_edges(2, 3, -1.0),
        lambda: random_coherence(0),
        lambda: causal_entropy_level(0),
    ):
        with pytest.raises(UsageError, match="expected"):
            bad()
