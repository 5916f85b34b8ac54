"""Declared claims give the verdicts that the constructors give, by what their measure returns."""

import json
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from tests.study.toys import SOURCE, Averages

import manyheads as mh
from manyheads.errors import UsageError
from manyheads.statistics import Interval, fit_exponent, replicates_to_decide
from manyheads.study import Claim, Verdict
from manyheads.study.base import decide

STATED = {"tolerance": 0.5, "basis": "a test"}


def constant(value):
    return lambda predicted, trained: value


def test_the_kind_of_the_figure_chooses_the_rule(rng):
    samples, interval, wide = 1 + 0.1 * rng.normal(size=5), Interval(0.9, 1.3), Interval(0.9, 1.9)
    rules = (
        (samples, Verdict.from_samples("c", samples, target=1.0, **STATED)),
        (list(samples), Verdict.from_samples("c", samples, target=1.0, **STATED)),
        (interval, Verdict.from_interval("c", interval, target=1.0, **STATED)),
        ((1.2, interval), Verdict.from_interval("c", interval, figure=1.2, target=1.0, **STATED)),
        ((1.2, wide, 9), Verdict.from_interval("c", wide, figure=1.2, target=1.0, replicates_needed=9, **STATED)),
        (1.2, Verdict.exact("c", 1.2, target=1.0, **STATED)),
        (xr.DataArray(3), Verdict.exact("c", 3.0, target=1.0, **STATED)),
    )
    for measured, verdict in rules:
        assert Claim("c", constant(measured), target=1.0, **STATED).verdict(xr.Dataset(), xr.Dataset()) == verdict


def test_an_undecided_exponent_says_how_many_replicates_decide(rng):
    sizes = (4, 8, 16)
    values = np.asarray(sizes) ** 0.9 * np.exp(0.4 * rng.normal(size=(6, 3)))
    fit = fit_exponent(sizes, values)
    verdict = Claim("c", constant(fit), target=1.0, tolerance=0.2, basis="a test").verdict(xr.Dataset(), xr.Dataset())
    assert (verdict.figure, verdict.interval) == (fit.exponent, (fit.interval.low, fit.interval.high))
    needed = replicates_to_decide(fit.replicate_exponents, 1.0, 0.2, level=0.99)
    assert verdict.replicates_needed == (needed if verdict.outcome == "inconclusive" else None)


def test_what_the_theory_says_may_come_from_the_prediction(rng):
    samples = 2 + 0.1 * rng.normal(size=6)
    predicted = xr.Dataset({"mean": 2.0, "error": 0.02, "margin": 0.3, "fails": True})
    claim = Claim(
        "c",
        lambda predicted, trained: trained["x"].values,
        target=lambda predicted: float(predicted["mean"]),
        tolerance=lambda predicted: (float(predicted["margin"]), 0.1),
        basis="a test",
        expected=lambda predicted: "refuted" if predicted["fails"] else "holds",
        prediction_error=lambda predicted: float(predicted["error"]),
        prediction_dof=7,
        resolution=0.01,
    )
    assert claim.verdict(predicted, xr.Dataset({"x": ("replicate", samples)})) == Verdict.from_samples(
        "c",
        samples,
        target=2.0,
        tolerance=(0.3, 0.1),
        basis="a test",
        expected="refuted",
        prediction_error=0.02,
        prediction_dof=7,
        resolution=0.01,
    )


@pytest.mark.parametrize("measured", [1.0, Interval(0, 1), (0.5, Interval(0, 1))])
@pytest.mark.parametrize("option", [{"resolution": 0.1}, {"prediction_error": 0.1}])
def test_options_that_would_be_ignored_are_refused(measured, option):
    with pytest.raises(UsageError, match="would be ignored"):
        Claim("c", constant(measured), target=1.0, **STATED, **option).verdict(xr.Dataset(), xr.Dataset())


def test_samples_have_one_axis():
    with pytest.raises(UsageError, match=r"shape \(2, 3\)"):
        Claim("c", constant(np.ones((2, 3))), target=1.0, **STATED).verdict(xr.Dataset(), xr.Dataset())


def test_a_study_without_claims_is_refused(tmp_path):
    class Silent(mh.Study):
        name, claim, source = "toy/silent", "nothing", SOURCE
        __dataclass_params__ = Averages.__dataclass_params__

        def predict(self, key):
            return xr.Dataset()

        train = predict

    with pytest.raises(UsageError, match=r"list its claims in claims\(\)"):
        mh.run(Silent(), store=tmp_path)


def test_expectations_belong_to_the_default_configurations():
    class Sized(Averages):
        repeats: int = 50

        @classmethod
        def full(cls):
            return cls(repeats=500)

        def claims(self):
            low = Claim("c", constant(1.0), target=0.0, **STATED, expected="refuted")
            return (low, replace(low, text="derived", expected=lambda predicted: "refuted"))

    for study, expected in ((Sized(), "refuted"), (Sized.full(), "refuted"), (Sized(repeats=7), None)):
        first, derived = decide(study, xr.Dataset(), xr.Dataset())
        assert (first.expected, derived.expected) == (expected, "refuted")
        assert first.as_expected
        assert Verdict.from_json(json.loads(json.dumps(first.to_json()))) == first
