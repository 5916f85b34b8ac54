"""Deformations break what they say, and the diagnostics that they name warn of it."""

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.recovery.planted.diagnostics import assumptions
from manyheads.recovery.planted.violations import DEFORMATIONS, deformed_layer


@pytest.mark.parametrize("name", DEFORMATIONS)
def test_the_diagnostic_that_is_named_warns(rng, name):
    deformation = DEFORMATIONS[name]
    layer = deformed_layer(rng, name, 24, 2)
    assert layer.theta.shape == layer.projection.shape == (2, 24, 24)
    found = assumptions(layer, deformation.inputs)
    warned = {one.name for one in found.warnings}
    if deformation.violates:
        assert deformation.violates in warned
    if name == "benign":
        assert not warned


def test_closeness_ratios_and_sums_are_those_that_are_named(rng):
    def cosine(layer):
        one, other = layer.theta[0].ravel(), layer.theta[-1].ravel()
        return one @ other / np.linalg.norm(one) / np.linalg.norm(other)

    def norms(matrices):
        return np.linalg.norm(matrices, axis=(1, 2))

    assert cosine(deformed_layer(rng, "close-heads", 8, 3)) == pytest.approx(0.95)
    assert cosine(deformed_layer(rng, "closer-heads", 8, 3)) == pytest.approx(0.995)
    np.testing.assert_allclose(norms(deformed_layer(rng, "weak-attention", 8, 3).theta), [2, 2, 0.4])
    np.testing.assert_allclose(
        norms(deformed_layer(rng, "weak-projection", 8, 3).projection), 8**0.5 * np.array([1, 1, 0.1])
    )
    np.testing.assert_allclose(norms(deformed_layer(rng, "saturated", 8, 3).theta), 8)
    np.testing.assert_allclose(norms(deformed_layer(rng, "flat", 8, 3).theta), 0.25)
    np.testing.assert_allclose(deformed_layer(rng, "cancelled", 8, 3).projection.sum(axis=0), 0, atol=1e-14)
    assert np.linalg.matrix_rank(deformed_layer(rng, "rank-one", 8, 3).theta).tolist() == [1, 1, 1]
    assert np.linalg.matrix_rank(deformed_layer(rng, "rank-two", 8, 3).projection).tolist() == [2, 2, 2]
    lattice = deformed_layer(rng, "lattice", 8, 2).theta / 0.125
    np.testing.assert_allclose(lattice, np.round(lattice), atol=1e-12)


def test_an_unknown_deformation_and_a_single_head_are_refused(rng):
    with pytest.raises(UsageError, match="expected one of benign"):
        deformed_layer(rng, "crooked", 8, 2)
    with pytest.raises(UsageError, match="two or more"):
        deformed_layer(rng, "benign", 8, 1)
