"""Refusals: NaN is refused on both sides, and figures, results and notes travel between processes."""

import pickle

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.recovery import ExtractionOptions
from manyheads.recovery.refusals import FitError, NotALayer


def test_nan_is_neither_small_nor_large_enough():
    for check, good, bad in ((FitError.if_above, 1.0, 1.5), (FitError.if_below, 1.0, 0.5)):
        check(good, 1.0, "fine")
        for figure in (bad, float("nan")):
            with pytest.raises(FitError, match="too much") as refused:
                check(figure, 1.0, "too much")
            assert refused.value.threshold == 1.0
            assert refused.value.measured == pytest.approx(figure, nan_ok=True)


def test_a_refusal_survives_the_way_back_from_another_process():
    error = NotALayer("it is none", 0.5, 0.1, result={"heads": 2})
    error.add_note("tried once")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is NotALayer
    assert str(back) == str(error) == "it is none (measured 0.5, threshold 0.1)"
    assert (back.measured, back.threshold, back.result, back.__notes__) == (0.5, 0.1, {"heads": 2}, ["tried once"])


@pytest.mark.parametrize("value", [True, np.array([1.0, 2.0]), "1", 0.0])
def test_budgets_are_single_positive_numbers(value):
    with pytest.raises(UsageError, match=r"most_calls=.*expected a positive number"):
        ExtractionOptions(most_calls=value)
