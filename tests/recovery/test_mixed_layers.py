"""Functions of mixed difficulty: no certificate is wrong, and every failure has a name."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.recovery.mixed_layers import CHANGES, IMPOSSIBLE, KINDS, Outcome, build, run_case, surprise

from manyheads.recovery.result.certificates import Certificate

LAYERS, DIM, NEW, FALSE_ALARM = 28, 12, 200, 1e-4
SLOW = {
    "Theta within 1e-3": 1,
    "collinear W": 1,
    "noise 1e-5": 1,
    "noise 1e-3": 1,
    "noise 1e-8": 1,
    "float32": 1,
    "capped logits": 1,
}
"""Kinds that take long, and how many of them are looked at here."""

HOPELESS = ("collinear W", "noise 1e-3", "rare region", "capped logits")


@pytest.fixture(scope="module")
def outcomes(seed):
    kinds = [kind for kind, count in SLOW.items() for _ in range(count)]
    quick = [kind for kind in KINDS if kind not in SLOW]
    kinds += [quick[index % len(quick)] for index in range(LAYERS - len(kinds))]
    streams = np.random.default_rng([seed, 17]).spawn(LAYERS)
    cases = [build(kind, rng, DIM) for kind, rng in zip(kinds, streams, strict=True)]
    return [run_case(hurried(case), seed, NEW) for case in cases]


def hurried(case):
    """What ends in a refusal or a rejection is tried with one seed: further ones take as long and say the same."""
    return replace(case, options=replace(case.options, tries=1)) if case.kind in HOPELESS else case


@pytest.mark.slow
def test_no_statement_is_false(outcomes):
    stated = [outcome for outcome in outcomes if outcome.certificate]
    assert len(stated) > LAYERS / 2
    assert min(map(surprise, stated)) > FALSE_ALARM / LAYERS


@pytest.mark.slow
def test_every_failure_has_a_name_and_no_acceptance_is_bad(outcomes):
    assert not [outcome for outcome in outcomes if outcome.end == "unnamed"]
    assert not [outcome for outcome in outcomes if outcome.bad_accept]
    assert not [outcome for outcome in outcomes if outcome.kind in IMPOSSIBLE and outcome.end == "accepted"]


@pytest.mark.slow
def test_attention_layers_are_accepted(outcomes):
    """One in ten may be refused: two heads that are nearly one, or a head that is nearly dead, may be so by chance."""
    healthy = [outcome for outcome in outcomes if outcome.kind in CHANGES and outcome.kind not in IMPOSSIBLE]
    assert len(healthy) > 15
    assert sum(outcome.end != "accepted" for outcome in healthy) <= len(healthy) / 10


def test_the_surprise_is_that_of_the_order_statistic(rng):
    certificate = Certificate(1.0, 0.5, 0.1, 0.9, 12, 1.0, 1.0, "")
    draws = rng.random((20000, 12 + 20))
    counts = (draws[:, 12:] > draws[:, :12].max(1, keepdims=True)).sum(1)
    for count in (0, 1, 3, 6):
        expected = surprise(Outcome("", "accepted", "", certificate, count=count, new=20))
        # five standard deviations: a false alarm in 1e-6
        assert abs((counts >= count).mean() - expected) <= 5 * math.sqrt(expected * (1 - expected) / 20000)
