"""Verdicts: the rule as it is used, from intervals, samples and exact figures."""

import json
import math

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.statistics import Interval
from manyheads.study import Verdict

INF = math.inf


def test_the_three_outcomes():
    given = {"claim": "c", "target": 1.0, "tolerance": 0.5, "basis": "b"}
    assert Verdict.from_interval(interval=Interval(0.6, 1.4), **given).outcome == "holds"
    assert Verdict.from_interval(interval=Interval(1.6, 2.4), **given).outcome == "refuted"
    assert Verdict.from_interval(interval=Interval(1.4, 1.6), **given).outcome == "inconclusive"


def test_few_replicates_never_confirm_and_more_are_asked_for(rng):
    few = Verdict.from_samples("c", [0.9, 1.2], target=1.0, tolerance=0.2, basis="b")
    assert few.outcome == "inconclusive"
    assert few.replicates_needed is None or few.replicates_needed > 2
    many = Verdict.from_samples("c", 1 + 0.1 * rng.normal(size=200), target=1.0, tolerance=0.2, basis="b")
    assert many.outcome == "holds"
    assert many.replicates_needed is None


def test_the_predictions_error_widens_the_interval(rng):
    samples = 1 + 0.01 * rng.normal(size=20)
    given = {"target": 1.0, "tolerance": 0.1, "basis": "b"}
    sharp = Verdict.from_samples("c", samples, **given)
    blunt = Verdict.from_samples("c", samples, **given, prediction_error=0.2)
    assert (sharp.outcome, blunt.outcome) == ("holds", "inconclusive")
    # Normal quantile 2.576 times 0.2, and the samples' own small part on top.
    assert blunt.interval[1] - blunt.interval[0] == pytest.approx(2 * 2.576 * 0.2, rel=0.02)


@pytest.mark.parametrize(
    ("figure", "tolerance", "outcome"),
    [(3, (0, INF), "holds"), (-1, (0, INF), "refuted"), (-1, (INF, 0), "holds"), (0, 0, "holds"), (1, 0, "refuted")],
)
def test_exact_figures_and_one_sided_claims(figure, tolerance, outcome):
    verdict = Verdict.exact("c", figure, target=0, tolerance=tolerance, basis="integers")
    assert verdict.outcome == outcome
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json(), allow_nan=False))) == verdict


def test_a_nan_is_never_a_success():
    with pytest.raises(UsageError, match="nan"):
        Verdict.exact("c", math.nan, target=0, tolerance=1, basis="b")
    with pytest.raises(UsageError, match="NaN"):
        Verdict.from_samples("c", [np.nan, 1.0], target=0, tolerance=1, basis="b")


def test_a_claim_needs_a_basis_and_must_be_able_to_fail():
    with pytest.raises(UsageError, match="from what"):
        Verdict.exact("c", 0, target=0, tolerance=1, basis=" ")
    with pytest.raises(UsageError, match="able to fail"):
        Verdict.exact("c", 0, target=0, tolerance=INF, basis="b")


def test_expectation_is_part_of_the_verdict():
    verdict = Verdict.exact("c", 2, target=0, tolerance=1, basis="b", expected="refuted")
    assert verdict.outcome == "refuted"
    assert verdict.as_expected


def test_an_interval_ends_where_the_quantity_does():
    samples = np.array([0.97, 0.99, 1.0, 1.0])
    stated = {"target": 1.0, "tolerance": (0.1, 0.0), "basis": "an accuracy of 0.9"}
    free, bounded = (Verdict.from_samples("c", samples, **stated, **more) for more in ({}, {"bounds": (0.0, 1.0)}))
    assert free.interval[1] > 1 == bounded.interval[1]
    assert free.interval[0] == bounded.interval[0]
    assert (free.outcome, bounded.outcome) == ("inconclusive", "holds")
    silent = Verdict.from_samples("c", np.ones(3), **stated, bounds=(0.0, 1.0))
    assert (silent.interval, silent.outcome) == ((0.0, 1.0), "inconclusive")
    with pytest.raises(UsageError, match="beyond the bounds"):
        Verdict.from_interval("c", Interval(1.5, 2.0), **stated, bounds=(0.0, 1.0))
