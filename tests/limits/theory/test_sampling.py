"""Matched normals, responses without derivatives, and factors of kernels that are barely positive."""

import numpy as np
import pytest

from manyheads.errors import CertificateError, UsageError
from manyheads.limits.theory.normals import matched_normals, signed_normals
from manyheads.limits.theory.sampled import factor, respond


def test_matched_normals_have_exact_second_moments(rng):
    drawn = matched_normals(rng, 2, 5, 64)
    flat = drawn.reshape(10, -1)
    assert np.abs(flat @ flat.T / 64 - np.eye(10)).max() < 1e-12
    with pytest.raises(UsageError, match="at least 20"):
        matched_normals(rng, 2, 5, 19)


def test_signed_normals_lose_their_odd_moments(rng):
    drawn = signed_normals(rng, 3, 64, 2)
    flat = drawn.reshape(12, -1)
    assert np.abs(flat @ flat.T / flat.shape[1] - np.eye(12)).max() < 1e-12
    value, query, key, output = drawn[:, 0].reshape(4, 4, -1)  # by group of signs
    for odd in (value * key * output, query * key * output, value * query):
        assert abs(odd.mean()) < 1e-12
    with pytest.raises(UsageError, match="groups of four"):
        signed_normals(rng, 3, 66, 2)


def test_stein_finds_the_slope_of_what_is_linear_exactly_and_of_a_square_root_law_nearly(rng):
    kernel = np.cov(rng.standard_normal((4, 50)))
    root, drawn = factor(kernel), matched_normals(rng, 1, 4, 40_000)[0]
    sources, slopes = root @ drawn, rng.standard_normal((2, 4))
    assert np.abs(respond(slopes @ sources, drawn, root) - slopes).max() < 1e-9
    cubic = respond(sources[:1] ** 3, drawn, root)[0]  # <d r^3 / d r_b> = 3 <r^2> at b = 0, nothing elsewhere
    assert np.abs(cubic - 3 * kernel[0, 0] * np.eye(4)[0]).max() < 0.5


def test_a_singular_kernel_is_factored_and_an_indefinite_one_refused(rng):
    thin = rng.standard_normal((6, 2))
    root = factor(thin @ thin.T)
    assert np.abs(root @ root.T - thin @ thin.T).max() < 1e-6 * np.trace(thin @ thin.T)
    drawn = matched_normals(rng, 1, 3, 64)[0]
    nothing = factor(np.zeros((3, 3)))  # of what is not trained: drives nothing, and what ignores it has no response
    assert np.abs(nothing).max() < 1e-99
    assert np.all(respond(np.zeros((2, 64)), drawn, nothing) == 0)
    with pytest.raises(CertificateError, match="not positive"):
        factor(np.diag([1.0, -1.0]))
    with pytest.raises(CertificateError, match="not positive"):
        factor(np.full((2, 2), np.nan))
