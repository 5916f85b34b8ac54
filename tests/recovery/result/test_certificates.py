"""The certificate: its statement has the coverage it claims, and says what it says."""

import json
import math

import numpy as np
import pytest
from scipy.stats import binom

from manyheads.errors import UsageError
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.result.certificates import Verification, certify, exceeding_share, oracle_errors
from manyheads.recovery.result.distributions import GaussianSequences, ShortSequences

FALSE_ALARM = 1e-5


def test_the_share_is_that_of_the_order_statistic():
    # All n draws fall below the (1 - eps) quantile with probability (1 - eps)^n, which is to be delta.
    for n, delta in ((1, 0.5), (20, 0.3), (400, 1e-4)):
        assert math.isclose((1 - exceeding_share(n, 1 - delta)) ** n, delta, rel_tol=1e-9)
    assert round(exceeding_share(400, 1 - 1e-4), 3) == 0.023


@pytest.mark.parametrize("kind", ["heavy tail", "ties", "rare"])
def test_the_statement_is_false_as_often_as_it_says(rng, kind):
    """Errors whose distribution is known: the share above the largest of n is computed, not estimated."""
    n, delta, trials = 30, 0.2, 2000
    eps = exceeding_share(n, 1 - delta)
    u = rng.random((trials, n))
    if kind == "heavy tail":
        largest = (u**-3.0).max(1)
        beyond = largest ** (-1 / 3)  # P(u^-3 > t)
    elif kind == "ties":
        largest = np.floor(4 * u).max(1)
        beyond = (3 - largest) / 4
    else:
        largest = np.where(u < eps * 1.0001, 1.0, 0.0).max(1)  # just too frequent to be missed
        beyond = np.where(largest == 0, eps * 1.0001, 0.0)
    false = int((beyond > eps).sum())
    assert false <= binom.isf(FALSE_ALARM, trials, delta)
    if kind != "ties":  # the bound is attained: a smaller eps would not do
        assert false >= binom.ppf(FALSE_ALARM, trials, delta)


def test_the_statement_holds_for_a_predictor_that_errs_on_some_sequences(rng):
    """End to end: an oracle and a prediction that differ where the first token points one way, at every frequency."""
    settings = Verification(sequences=25, confidence=0.7, distribution=GaussianSequences((2, 3), (1.0,)))
    eps, false, trials = exceeding_share(25, 0.7), 0, 300
    for _ in range(trials):
        cut = rng.normal()
        oracle = Oracle(lambda x: 2 * x, 2)
        certificate = certify(oracle, lambda x, cut=cut: 2 * x + np.where(x[:, :1, :1] > cut, 1e-2, 0.0), rng, settings)
        share = 0.5 * math.erfc(cut / 2**0.5) if certificate.largest_error < 1e-6 else 0.0
        false += share > eps
    assert false <= binom.isf(FALSE_ALARM, trials, 0.3)


def test_a_certificate_says_what_was_measured(rng):
    oracle = Oracle(lambda x: x + 1, 4)
    settings = Verification(sequences=50, confidence=0.99, tolerance=1e-3)
    found = certify(oracle, lambda x: 1.1 * (x + 1), rng, settings)
    assert not found.accepted
    assert found.exceeding == exceeding_share(50, 0.99)
    assert oracle.counts["verification"].calls == 50
    text = str(found)
    for words in ("confidence 1 - 0.01", "8.8% of the sequences", "50 fresh ones", "length 2, 4, 8, 16"):
        assert words in text
    record = json.loads(json.dumps(found.to_json()))
    assert record["accepted"] is False
    assert record["statement"] == text
    assert certify(oracle, lambda x: x + 1, rng, settings).largest_error == 0


def test_rounds_share_the_doubt(rng):
    found = certify(Oracle(np.sin, 2), np.sin, rng, Verification(sequences=40, confidence=0.9, rounds=2))
    assert found.exceeding == pytest.approx(exceeding_share(40, 0.95), rel=1e-12)
    assert found.confidence == 0.9


def test_predictions_that_are_not_finite_have_an_infinite_error(rng):
    found = certify(Oracle(np.sin, 2), lambda x: np.full_like(x, np.nan), rng, Verification(sequences=5))
    assert found.largest_error == np.inf
    assert not found.accepted
    json.dumps(found.to_json(), allow_nan=False)


def test_errors_are_squares_averaged_over_a_sequence(rng):
    def draw(rng, count, dim):
        return [np.zeros((count - 2, 1, dim)), np.ones((2, 3, dim))]

    errors = oracle_errors(Oracle(lambda x: 2 * x, 4), lambda x: 0 * x, rng, 5, draw)
    assert np.array_equal(errors.squared, [0, 0, 0, 4, 4])
    assert errors.variance == pytest.approx(4 * 0.4 * 0.6)  # 2 of 5 sequences answer 2, the others 0
    assert np.allclose(errors.relative, errors.squared / errors.variance)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_constant_does_not_count(rng, dtype):
    """The answers' variance is the unit, and rounding that hides it leaves no certificate."""
    seed, settings = int(rng.integers(1000)), Verification(sequences=60)

    def relative(bias):
        function = Oracle(lambda x: (2 * x + bias).astype(dtype), 3)
        return certify(function, lambda x: 2.02 * x + bias, np.random.default_rng(seed), settings)

    plain, moved = relative(0.0), relative(1e3)
    assert moved.variance == pytest.approx(plain.variance, rel=1e-3)
    assert moved.largest_error == pytest.approx(plain.largest_error, rel=0.01)
    hidden = certify(Oracle(lambda x: (2 * x + 1e9).astype("float32"), 3), lambda x: 0 * x + 1e9, rng, settings)
    assert hidden.largest_error == np.inf


def test_short_sequences_are_those_of_the_distribution(rng):
    stacks = ShortSequences(GaussianSequences(), 8)(rng, 900, 2)
    assert sum(map(len, stacks)) == 900
    counts = {k: sum(len(x) for x in stacks if x.shape[1] == k) for k in (2, 4, 8)}
    assert sum(counts.values()) == 900
    assert min(counts.values()) > 200  # 300 expected, seven standard deviations
    assert "those of at most 8 tokens" in str(ShortSequences(GaussianSequences(), 8))
    with pytest.raises(UsageError, match="of 1 to 1 tokens"):
        ShortSequences(GaussianSequences(), 1)(rng, 5, 2)


def test_the_default_sequences_are_those_it_names(rng):
    stacks = GaussianSequences()(rng, 4000, 3)
    assert sorted(x.shape[1] for x in stacks) == [2, 4, 8, 16, 32, 64, 128]
    long = sum(len(x) for x in stacks if x.shape[1] > 16)
    assert abs(long - 4000 * 3 / 19) < 6 * (4000 * 3 / 19 * 16 / 19) ** 0.5
    assert sum(map(len, stacks)) == 4000
    sizes = np.concatenate([np.sqrt((x**2).mean((1, 2))) for x in stacks if x.shape[1] == 16])
    # 48 numbers a sequence: the sample scale is within 5 of its standard errors, scale/sqrt(96), of one of the three
    apart = np.abs(sizes[:, None] / np.array([0.5, 1, 2]) - 1).min(1)
    assert apart.max() < 5 / 96**0.5
    assert all(len(x) > 660 for x in stacks if x.shape[1] <= 16)  # 842 expected, 7 standard deviations


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Verification(sequences=0),
        lambda: Verification(confidence=1.0),
        lambda: Verification(tolerance=0.0),
        lambda: Verification(rounds=0),
        lambda: GaussianSequences(lengths=()),
        lambda: GaussianSequences(scales=(0.0,)),
        lambda: certify(
            Oracle(np.sin, 2),
            np.sin,
            np.random.default_rng(0),
            Verification(distribution=lambda rng, count, dim: [np.ones((1, 2, dim))]),
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong):
    with pytest.raises(UsageError):
        wrong()


def test_the_smallest_doubt_that_a_float_holds_is_shared():
    assert exceeding_share(400, 1 - 2.0**-53, rounds=2) == pytest.approx(1 - 2.0 ** (-54 / 400))
