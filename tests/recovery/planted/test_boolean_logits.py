"""Distance of Boolean logits to normal ones: enumeration, inversion and closed forms agree."""

import numpy as np
import pytest
from scipy.special import ndtr

from manyheads.errors import UsageError
from manyheads.recovery.planted import boolean_logits
from manyheads.recovery.planted.boolean_logits import (
    edgeworth_distance_to_normal,
    enumerate_logits,
    lattice_distance_to_normal,
    measure_gap,
)


def test_inversion_agrees_with_enumeration(rng, monkeypatch):
    weights = rng.uniform(0.5, 1.5, 18)
    exact = measure_gap(weights, 0.1)
    monkeypatch.setattr(boolean_logits, "ENUMERATED", 4)
    inverted = measure_gap(weights, 0.1)
    assert inverted.distance == pytest.approx(exact.distance, abs=2e-4)  # places are 0.02 apart, 2^18 atoms
    assert inverted.near == pytest.approx(exact.near, rel=5e-3)


def test_equal_weights_are_binomial_and_half_of_the_largest_atom_is_left(rng):
    signs = 2.0 * rng.integers(0, 2, 14) - 1
    values = enumerate_logits(signs / 14**0.5)
    grid = np.linspace(-4, 4, 2001)
    after = np.searchsorted(values, grid + 1e-9, side="right") / len(values)
    found = measure_gap(3 * signs, 1 / 14)
    assert found.distance == pytest.approx(np.abs(after - ndtr(grid)).max(), abs=2e-3)
    assert found.near == pytest.approx(np.mean(np.abs(values) < 1 / 14) / (2 * ndtr(1 / 14) - 1), rel=1e-12)
    for dim in (100, 1000):
        assert measure_gap(np.ones(dim), 0.1).distance == pytest.approx(lattice_distance_to_normal(dim), rel=1 / dim)


def test_edgeworth_is_the_limit_far_from_lattices(rng):
    """The constant is the largest |He_3 phi| over twelve, and the ratio of the distances approaches one as 1/d."""
    grid = np.linspace(0, 5, 100_001)
    peak = np.abs((grid**3 - 3 * grid) * np.exp(-(grid**2) / 2)).max() / (2 * np.pi) ** 0.5
    assert edgeworth_distance_to_normal(np.ones(10)) == pytest.approx(peak / 120, rel=1e-6)
    for dim in (64, 256):
        weights = rng.standard_normal(dim)
        ratio = measure_gap(weights, 0.1).distance / edgeworth_distance_to_normal(weights)
        assert ratio == pytest.approx(1, abs=12 / dim)


def test_weights_that_cannot_be_compared_are_refused():
    pytest.importorskip("jax")
    from manyheads.studies.recovery.steps.boolean_tokens import BooleanTokens

    with pytest.raises(UsageError, match="near a lattice"):
        measure_gap(np.repeat([1.0, 2.0], 20), 0.1)
    with pytest.raises(UsageError, match="not zero"):
        measure_gap(np.zeros(4), 0.1)
    for fields in ({"dims": (16,)}, {"dims": (15, 16)}, {"queries": 0}):
        with pytest.raises(UsageError):
            BooleanTokens(**fields)
