"""Error rates of the verdict rule, simulated: limits are left by a correct rule with probability 1e-5."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from manyheads.errors import UsageError
from manyheads.statistics import Interval, decide, mean_interval
from manyheads.statistics.intervals import half_widths, mean_of, standard_error_of
from manyheads.statistics.verdicts import (
    MOST_REPLICATES,
    _decision_probability,
    acceptance_region,
    replicates_to_decide,
    sequence_factor,
)

DRAWS = 20_000
INF = math.inf


def outcomes(rng, truth, count, target, tolerance):
    """Verdicts of many experiments with unit spread."""
    samples = truth + rng.standard_normal((DRAWS, count))
    figures, half = mean_of(samples), half_widths(standard_error_of(samples), count - 1, 0.99)
    return np.array(
        [decide(f, Interval(f - h, f + h), target, tolerance) for f, h in zip(figures.tolist(), half, strict=True)]
    )


def limits(rate):
    return stats.binom.ppf([1e-5, 1 - 1e-5], DRAWS, rate) / DRAWS


@pytest.mark.parametrize(
    ("low", "high", "tolerance", "expected"),
    [
        (-0.5, 0.5, 1.0, "holds"),
        (-1.0, 1.0, 1.0, "holds"),  # touching the edge from inside
        (-1.0, 1.0 + 1e-12, 1.0, "inconclusive"),
        (1.0, 2.0, 1.0, "inconclusive"),  # touching it from outside
        (1.0 + 1e-12, 2.0, 1.0, "refuted"),
        (-3.0, -1.5, 1.0, "refuted"),
        (-3.0, 3.0, 1.0, "inconclusive"),
        (-INF, INF, 1.0, "inconclusive"),
        (0.0, 0.0, 0.0, "holds"),  # an exact figure and an exact claim
        (1e-300, 1e-300, 0.0, "refuted"),
        (-5.0, 0.5, (INF, 1.0), "holds"),
        (-INF, 0.5, (INF, 1.0), "holds"),
        (1.5, 2.0, (INF, 1.0), "refuted"),
        (-5.0, 0.5, (0.5, INF), "inconclusive"),
        (-0.4, 7.0, (0.5, INF), "holds"),
    ],
)
def test_boundaries(low, high, tolerance, expected):
    figure = 0.0 if math.isinf(low) and math.isinf(high) else (low if math.isinf(high) else high)
    assert decide(figure, Interval(low, high), 0.0, tolerance) == expected


@pytest.mark.parametrize("figure", [math.nan, INF, -INF])
def test_a_figure_that_is_no_number_decides_nothing(figure):
    assert decide(figure, Interval(-0.1, 0.1), 0.0, 1.0) == "inconclusive"


@pytest.mark.parametrize(
    ("target", "tolerance", "message"),
    [
        (0.0, -1.0, "tolerance"),
        (0.0, math.nan, "tolerance"),
        (0.0, (0.1, math.nan), "tolerance"),
        (0.0, INF, "cannot be missed"),
        (0.0, (INF, INF), "cannot be missed"),
        (INF, 1.0, "target"),
        (math.nan, 1.0, "target"),
    ],
)
def test_claims_that_are_none(target, tolerance, message):
    with pytest.raises(UsageError, match=message):
        decide(0.0, Interval(0, 1), target, tolerance)


@given(
    st.tuples(*[st.floats(-3, 3)] * 4).map(sorted),
    st.floats(-2, 2),
    st.one_of(st.floats(0, 2), st.tuples(st.floats(0, 2), st.floats(0, 2))),
)
def test_a_narrower_interval_never_overturns_a_verdict(ends, target, tolerance):
    a, b, c, d = ends
    wide, narrow = (decide(b, Interval(*pair), target, tolerance) for pair in ((a, d), (b, c)))
    assert wide in ("inconclusive", narrow)
    region = acceptance_region(target, tolerance)
    assert (wide == "holds") == (region.contains(a) and region.contains(d))


@pytest.mark.parametrize("count", [3, 8])
def test_truth_on_the_edge_is_said_to_hold_half_a_percent_of_the_time(rng, count):
    found = outcomes(rng, 5.0, count, 0.0, (INF, 5.0))
    low, high = limits(0.005)
    assert low <= np.mean(found == "holds") <= high
    assert low <= np.mean(found == "refuted") <= high
    # with a second edge in reach it holds less often, never more
    assert np.mean(outcomes(rng, 1.0, count, 0.0, 1.0) == "holds") <= high


@pytest.mark.parametrize("count", [3, 8])
def test_truth_outside_hardly_ever_holds(rng, count):
    assert np.mean(outcomes(rng, 1.3, count, 0.0, 1.0) == "holds") <= limits(0.005)[1]


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("tolerance", [0.0, 0.3, 2.0])
def test_truth_at_the_centre_is_refuted_at_most_once_in_a_hundred(rng, count, tolerance):
    rate = np.mean(outcomes(rng, 0.0, count, 0.0, tolerance) == "refuted")
    low, high = limits(0.01)
    assert rate <= high
    if tolerance == 0:
        assert rate >= low  # the level is used up, not padded


@pytest.mark.parametrize("count", [4, 12])
@pytest.mark.parametrize("margin", [1.0, 2.5])
def test_power_is_that_of_the_noncentral_t(rng, count, margin):
    """Truth inside by `margin` spreads: holds with the power of a one-sided t test at level 0.5%."""
    power = stats.nct.sf(stats.t.isf(0.005, count - 1), count - 1, margin * math.sqrt(count))
    low, high = limits(power)
    assert low <= np.mean(outcomes(rng, -margin, count, 0.0, (INF, 0.0)) == "holds") <= high
    assert low <= np.mean(outcomes(rng, margin, count, 0.0, (INF, 0.0)) == "refuted") <= high


@pytest.mark.parametrize(("now", "total"), [(4, 12), (4, 80), (10, 40)])
@pytest.mark.parametrize("tolerance", [0.7, (INF, 0.4)])
def test_predictive_probability_against_simulation(rng, now, total, tolerance):
    """Draw truth from the posterior and the missing replicates from the truth.

    The formula leaves out the variation of the final spread about its expectation: allowed 0.02. The simulation of
    20,000 draws adds 4.3 standard errors (1e-5).
    """
    pilot = rng.standard_normal(now)
    pilot = 0.2 + (pilot - pilot.mean()) / pilot.std(ddof=1)
    region = acceptance_region(0.0, tolerance)
    ends = region.low - 0.2, region.high - 0.2
    predicted = _decision_probability(ends, (now, total), (0.99, 0.0), (1.0, 1.0))
    sigma = np.sqrt((now - 1) / rng.chisquare(now - 1, DRAWS))
    truth = 0.2 + sigma / math.sqrt(now) * rng.standard_normal(DRAWS)
    new = truth[:, None] + sigma[:, None] * rng.standard_normal((DRAWS, total - now))
    samples = np.concatenate([np.broadcast_to(pilot, (DRAWS, now)), new], axis=1)
    figure, half = mean_of(samples), half_widths(standard_error_of(samples), total - 1, 0.99)
    inside = (figure - half >= region.low) & (figure + half <= region.high)
    outside = (figure + half < region.low) | (figure - half > region.high)
    measured = np.mean(inside | outside)
    assert abs(measured - predicted) <= 0.02 + 4.3 * math.sqrt(0.25 / DRAWS)


@pytest.mark.slow
def test_the_promised_number_of_replicates_decides(rng):
    """Whole procedure, truths spread evenly: at a true rate of 80% of 250 it fails with probability 1e-5."""
    decided = undecided = 0
    while decided + undecided < 250:
        truth = rng.uniform(-4, 4)
        pilot = truth + rng.standard_normal(4)
        count = replicates_to_decide(pilot, 0.0, 1.5)
        if count in (None, 4):
            continue
        samples = np.concatenate([pilot, truth + rng.standard_normal(count - 4)])
        outcome = decide(samples.mean(), mean_interval(samples), 0.0, 1.5)
        undecided, decided = undecided + (outcome == "inconclusive"), decided + (outcome != "inconclusive")
    assert decided >= stats.binom.ppf(1e-5, 250, 0.8)
    assert decided <= stats.binom.ppf(1 - 1e-5, 250, 0.9)  # and the number is not a wasteful one


def test_replicates_to_decide_edge_cases(rng):
    pilot = [0.1, -0.2, 0.15, 0.0, -0.1]
    assert replicates_to_decide(pilot, 0.0, 5.0) == 5  # decided already
    assert replicates_to_decide(pilot, 5.0, 0.5) == 5
    assert replicates_to_decide([0.3], 0.0, 1.0) is None
    assert replicates_to_decide([0.3, 0.3], 0.0, 0.3) == 2  # exact and on the closed edge
    assert replicates_to_decide(pilot, 0.0, 0.05, prediction_error=0.2) is None
    first, second = replicates_to_decide(pilot, 0.0, 0.2), replicates_to_decide(pilot, 0.0, 0.2, prediction_error=0.05)
    assert 5 < first <= second
    assert replicates_to_decide(pilot, 0.0, 0.2, power=0.5) <= first
    assert replicates_to_decide(pilot, 0.0, 1e-4, power=0.999) in (None, MOST_REPLICATES)
    for bad in ({"power": 1.0}, {"level": 0.0}, {"prediction_error": -1.0}, {"prediction_error": INF}):
        with pytest.raises(UsageError):
            replicates_to_decide(pilot, 0.0, 0.2, **bad)
    with pytest.raises(UsageError, match="NaN"):
        replicates_to_decide([0.1, math.nan], 0.0, 0.2)


def test_a_tighter_claim_needs_more_replicates(rng):
    pilot = rng.standard_normal(6) * 0.1
    pilot -= pilot.mean()
    needed = [replicates_to_decide(pilot, 0.0, tolerance) for tolerance in (1.0, 0.1, 0.05, 0.02)]
    assert needed[0] == 6
    assert needed[1] < needed[2] < needed[3]


def test_equal_samples_on_an_edge_do_not_say_how_many_more():
    # the prediction's own error reaches over the edge, and nothing is known of the spread
    assert replicates_to_decide([0.0, 0.0, 0.0], 0.1, 0.1, prediction_error=0.05) is None


def test_huge_samples_ask_for_as_many_replicates_as_their_shape():
    pilot = np.array([0.3, -0.2, 0.4, -0.3, 0.1, 0.2])
    plain = replicates_to_decide(pilot, 0.0, 0.3)
    for scale in (1e-250, 1e250):
        assert replicates_to_decide(pilot * scale, 0.0, 0.3 * scale) == plain
    assert replicates_to_decide([-1e308, 1e308], 0.0, 1.0) is None


def test_a_sequence_holds_at_all_times_together(rng):
    """At level 0.8 from three samples on at most a fifth of the walks ever leave it, and Student's most of them."""
    first, last, walks = 3, 300, 2000
    counts = np.arange(first, last + 1)
    samples = rng.standard_normal((walks, last))
    sums, squares = (np.cumsum(samples**power, axis=1)[:, first - 1 :] for power in (1, 2))
    spread = np.sqrt((squares - sums**2 / counts) / (counts - 1) / counts)
    student = half_widths(1.0, counts - 1, 0.8) * spread
    factors = np.array([sequence_factor(0.8, first, count) for count in counts])
    ever, naive = (np.mean((np.abs(sums / counts) > half).any(axis=1)) for half in (student * factors, student))
    assert ever <= stats.binom.ppf(1 - 1e-5, walks, 0.2) / walks
    assert ever > 0.08  # the level is nearly used up
    assert naive > 0.5


def test_a_sequence_widens_slowly_and_begins_with_its_first_samples():
    factors = [sequence_factor(0.99, 8, count) for count in (8, 16, 64, 512)]
    assert 1.4 < factors[0] < factors[1] < factors[2] < factors[3] < 1.6
    for first, now in ((1, 4), (8, 7)):
        with pytest.raises(UsageError, match="sequence"):
            sequence_factor(0.99, first, now)
    assert math.isfinite(sequence_factor(0.99, 2, 2))
