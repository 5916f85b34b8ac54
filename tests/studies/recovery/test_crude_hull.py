"""Spans from right and from biased sums of projections, against the number of examples."""

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.recovery.examples.stages.hull import HullSettings, find_hull, measure_span_error, span_of
from manyheads.recovery.examples.stages.shards import open_shards
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.planted.task import equal_spectrum_layer, sequences
from manyheads.studies.recovery.steps.crude_hull import CrudeHull


def test_more_examples_help_a_right_sum_and_not_a_biased_one(rng):
    """Any bias of a tenth does it, not only that of the crude sum: a random one of that Frobenius norm."""
    layer = equal_spectrum_layer(rng, 8, 2, 8, scale=2.0)
    total = layer.projection.sum(0)
    noise = rng.standard_normal(total.shape)
    biased = total + 0.1 * np.linalg.norm(total) / np.linalg.norm(noise) * noise
    x = sequences(rng, 40_000, 2, 8)
    y, settings = evaluate_layer(layer, x), HullSettings(kept=1024)
    errors = {
        (name, count): measure_span_error(
            span_of(find_hull(open_shards((x[:count], y[:count])), one, 2, settings)), layer.theta
        )
        for name, one in (("true", total), ("biased", biased))
        for count in (4000, 40_000)
    }
    assert errors["true", 40_000] < errors["true", 4000] / 4
    assert errors["biased", 40_000] > 8 * errors["true", 40_000]
    assert errors["biased", 40_000] > errors["biased", 4000] / 4


@pytest.mark.parametrize("fields", [{"ranks": (3, 13)}, {"counts": (400,)}, {"scale": -1.0}, {"ranks": (6, 3)}])
def test_sizes_without_a_power_are_refused(fields):
    with pytest.raises(UsageError):
        CrudeHull(**fields)
