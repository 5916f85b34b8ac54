"""Where the span is lost: interpolation between strengths, and what a refusal counts."""

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.recovery.planted.task import planted_layer, sequences
from manyheads.studies.recovery.thresholds import Thresholds, find_threshold, lose_span
from manyheads.study.execution.units import predict

STUDY = Thresholds(strengths=(0.0, 0.5, 0.9), dim=4, count=200)


def test_the_threshold_is_where_the_error_crosses_one_half():
    assert find_threshold([0.1, 0.3, 0.7], [0.0, 2.0, 4.0]) == pytest.approx(3.0)
    assert find_threshold([0.1, 0.9, 0.2], [1.0, 0.5, 0.0]) == pytest.approx(0.75)
    assert find_threshold([0.1, 0.2, 0.3], [1.0, 2.0, 7.0]) == 7.0  # kept throughout: the last figure
    assert find_threshold([0.6, 0.8, 0.9], [1.0, 2.0, 7.0]) == 1.0  # lost from the start


def test_too_few_rows_lose_the_span(rng):
    layer = planted_layer(rng, 6, 2)
    assert lose_span(layer, sequences(rng, 30, 2, 6)) == 1.0
    assert lose_span(layer, sequences(rng, 4000, 2, 6, distribution="gaussian")) < 0.3


def test_bounds_are_those_of_the_diagnostics():
    bounds = predict(STUDY, None)
    assert float(bounds["bound"].sel(assumption="cancellation")) == 0.2
    assert not bool(bounds["upper"].sel(assumption="cancellation"))
    assert bool(bounds["upper"].sel(assumption="norms"))
    assert np.isfinite(bounds["bound"]).all()


@pytest.mark.parametrize(
    "fields", [{"strengths": (0.0,)}, {"strengths": (0.1, 0.5)}, {"strengths": (0.0, 1.0)}, {"count": 5}]
)
def test_strengths_without_a_threshold_are_refused(fields):
    with pytest.raises(UsageError):
        Thresholds(**fields)
