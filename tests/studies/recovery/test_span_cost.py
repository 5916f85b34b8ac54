"""Counted operations against the shapes of what is computed, and the examples that a wanted error takes."""

import numpy as np
import pytest
import xarray as xr

from manyheads.errors import UsageError
from manyheads.recovery.examples.stages.hull import HullSettings, choose_rows, find_bottom_dense
from manyheads.recovery.examples.stages.shards import open_shards
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.planted.task import planted_layer, sequences
from manyheads.studies.recovery.steps.span_cost import KEPT, REWEIGHINGS, SpanCost, count_operations, examples_for


@pytest.mark.parametrize("length", [2, 3])
def test_operations_are_those_of_the_equations_that_are_kept(length, rng):
    dim, count = 4, 3000
    layer = planted_layer(rng, dim, 2)
    x = sequences(rng, count, length, dim, distribution="gaussian")
    settings = HullSettings(kept=KEPT * dim**2 // (length - 1), reweighings=REWEIGHINGS)
    parts, _ = choose_rows(open_shards((x, evaluate_layer(layer, x))), layer.projection.sum(0), settings)
    equations = sum(part.targets.size for part in parts)
    _, vectors = find_bottom_dense(parts, [part.trust for part in parts], 3)
    weighings = (count_operations(count, dim, length) - x.shape[0] * length * dim**2) / (1 + REWEIGHINGS)
    unknowns = len(vectors)
    # The row at the threshold is not kept
    assert weighings == pytest.approx(equations * unknowns**2 + 4 / 3 * unknowns**3, rel=2 / (KEPT * dim**2))


def test_the_examples_for_a_wanted_error_are_read_off_the_power_law():
    errors = xr.DataArray([[[3.0, 0.3], [30.0, 3.0]]], {"count": [100, 1000]}, ("replicate", "dim", "count"))
    np.testing.assert_allclose(examples_for(0.1, errors), [[3000.0, 30000.0]])


@pytest.mark.parametrize("fields", [{"dims": (8,)}, {"shapes": ((3, 2),)}, {"counts": (2, 1)}, {"wanted": 1.5}])
def test_sizes_without_a_power_are_refused(fields):
    with pytest.raises(UsageError):
        SpanCost(**fields)
