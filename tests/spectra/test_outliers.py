"""Singular values beyond the Marchenko-Pastur edge: the stated rate on noise, and structure that is found or hidden."""

import numpy as np
import pytest
from scipy import linalg, stats

from manyheads.spectra.levels import TRACY_WIDOM_QUANTILE, count_beyond_edge


def gaussian_squares(rows, columns, rng):
    """Draw the squared singular values of a Gaussian matrix, rows >= columns, as in `sample_stable_rank`."""
    diagonal = np.sqrt(rng.chisquare(rows - np.arange(columns)))
    beside = np.sqrt(rng.chisquare(np.arange(columns - 1, 0, -1)))
    main, off = diagonal**2, diagonal[:-1] * beside
    main[1:] += beside**2
    return linalg.eigvalsh_tridiagonal(main, off)


@pytest.mark.parametrize("shape", [(40, 40), (160, 40)])
def test_noise_has_one_in_one_of_a_hundred_cases(shape, rng):
    """False-alarm rate: 3e-6 a shape, of a binomial law at 1%."""
    draws = 600
    found = sum(count_beyond_edge(gaussian_squares(*shape, rng), *shape) > 0 for _ in range(draws))
    assert found <= stats.binom.isf(3e-6, draws, 0.01)
    assert pytest.approx(2.0234, abs=1e-4) == TRACY_WIDOM_QUANTILE


def test_spikes_are_counted_where_they_leave_the_bulk(rng):
    noise = rng.standard_normal((200, 100))
    left, right = (np.linalg.qr(rng.standard_normal((side, 3)))[0] for side in (200, 100))
    visible = (200 * 100) ** 0.25  # the phase transition of Baik, Ben Arous and Peche
    for factor, expected in ((2.0, 3), (0.5, 0)):
        matrix = noise + factor * visible * left @ right.T
        for each in (matrix, 1e-3 * matrix.T):
            assert count_beyond_edge(np.linalg.svd(each, compute_uv=False)[::-1] ** 2, *each.shape) == expected


def test_degenerate_spectra():
    assert count_beyond_edge(np.zeros(5), 8, 5) == 0
    assert count_beyond_edge(np.ones(5), 8, 5) == 0
    assert count_beyond_edge(np.ones(1), 8, 1) == 0
    assert count_beyond_edge(np.r_[np.zeros(39), 1.0], 40, 40) == 1
