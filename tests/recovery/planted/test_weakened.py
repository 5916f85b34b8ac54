"""Families of layers that give up one assumption: both ends, and only what is named changes."""

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.recovery.planted.diagnostics import assumptions
from manyheads.recovery.planted.task import planted_layer
from manyheads.recovery.planted.violations import WEAKENINGS, weakened_layer

ENDS = {
    "coherence": 1.0,
    "cancellation": 0.0,
    "rank": 1.0,
    "diagonal": 1.0,
    "column": 1.0,
    "norms": 1e4,
    "lattice": 0.0,
}


@pytest.mark.parametrize("name", WEAKENINGS)
def test_a_family_goes_from_the_layer_to_the_violation(name, rng):
    layer = planted_layer(rng, 6, 2)
    diagnostic, last = WEAKENINGS[name].diagnostic, 1 - 1e-4
    start, end = (weakened_layer(layer, name, strength) for strength in (0.0, last))
    if name != "coherence":  # its first layer has orthogonal attention matrices
        np.testing.assert_allclose(start.theta, layer.theta, atol=1e-12)
    np.testing.assert_allclose(start.projection, layer.projection, atol=1e-12)
    assert assumptions(end)[diagnostic].value == pytest.approx(ENDS[name], rel=1e-3, abs=2e-3)
    figures = [assumptions(weakened_layer(layer, name, t))[diagnostic] for t in (0.0, 0.5, last)]
    assert figures[0].healthy
    assert not figures[2].healthy
    for one in {"attention", "projection"} - {{"norms": "attention", "cancellation": "projection"}.get(name)}:
        assert assumptions(end)[f"ratio of {one} norms"].value == pytest.approx(1.0)


def test_what_is_no_family_is_refused(rng):
    layer = planted_layer(rng, 4, 2)
    with pytest.raises(UsageError, match="coherence"):
        weakened_layer(layer, "colour", 0.5)
    with pytest.raises(UsageError, match="two heads"):
        weakened_layer(planted_layer(rng, 4, 3), "rank", 0.5)
    with pytest.raises(UsageError, match="0 to 1"):
        weakened_layer(layer, "rank", 1.5)
