"""Declared claims give the verdicts that the constructors give, by what their measure returns."""

import json
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from tests.study.toys import SOURCE, Averages

import manyheads as mh
from manyheads.errors import UsageError
from manyheads.statistics import Interval, fit_exponent
from manyheads.statistics.verdicts import replicates_to_decide
from manyheads.study import Claim, Verdict, near
from manyheads.study.base import decide

STATED = {"tolerance": 0.5, "basis": "a test"}
REGION = near(1, 0.5)


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
        assert Claim("c", measured, REGION, "a test").verdict() == verdict


def test_an_undecided_exponent_says_how_many_replicates_decide(rng):
    sizes = (4, 8, 16)
    values = np.asarray(sizes) ** 0.9 * np.exp(0.4 * rng.normal(size=(6, 3)))
    fit = fit_exponent(sizes, values)
    verdict = Claim("c", fit, near(1, 0.2), "a test").verdict()
    assert (verdict.figure, verdict.interval) == (fit.exponent, (fit.interval.low, fit.interval.high))
    needed = replicates_to_decide(fit.replicate_exponents, 1.0, 0.2, level=0.99)
    assert verdict.replicates_needed == (needed if verdict.outcome == "inconclusive" else None)


def test_options_of_samples_are_those_of_the_verdict(rng):
    samples = 2 + 0.1 * rng.normal(size=6)
    options = {"prediction_error": 0.02, "prediction_dof": 7, "resolution": 0.01}
    claim = Claim("c", samples, near(2, (0.3, 0.1)), "a test", expected="refuted", **options)
    stated = {"target": 2.0, "tolerance": (0.3, 0.1), "basis": "a test", "expected": "refuted"}
    assert claim.verdict() == Verdict.from_samples("c", samples, **stated, **options)


@pytest.mark.parametrize("measured", [1.0, Interval(0, 1), (0.5, Interval(0, 1))])
@pytest.mark.parametrize("option", [{"resolution": 0.1}, {"prediction_error": 0.1}])
def test_options_that_would_be_ignored_are_refused(measured, option):
    with pytest.raises(UsageError, match="would be ignored"):
        Claim("c", measured, REGION, "a test", **option).verdict()


def test_the_scale_of_an_older_version_names_the_logarithm():
    with pytest.raises(UsageError, match=r"no scale, given 'log'; of a ratio measure `st\.log`"):
        Claim("a", np.ones(4), REGION, "a test", scale="log")
    assert replace(Claim("a", np.ones(4), REGION, "a test"), text="b").text == "b"


def test_samples_have_one_axis():
    with pytest.raises(UsageError, match=r"shape \(2, 3\)"):
        Claim("c", np.ones((2, 3)), REGION, "a test").verdict()


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

        def claims(self, theory, trained):
            low = Claim("c", 1.0, near(0, 0.5), "a test", expected="refuted")
            yield from (low, replace(low, text="derived", derived=True))

    for study, expected in ((Sized(), "refuted"), (Sized.full(), "refuted"), (Sized(repeats=7), None)):
        first, derived = decide(study, xr.Dataset(), xr.Dataset())
        assert (first.expected, derived.expected) == (expected, "refuted")
        assert first.as_expected
        assert Verdict.from_json(json.loads(json.dumps(first.to_json()))) == first
