"""Limits of a server: nothing beyond them is asked, the identities behind are exact, what does not fit is refused."""

import dataclasses
import time

import numpy as np
import pytest

import manyheads as mh
from manyheads.errors import UsageError
from manyheads.recovery import ExtractionOptions, ServerLimits, compare_layers, evaluate_layer, gpt_layer
from manyheads.recovery.oracle.oracle import Budget, Oracle, OracleSettings
from manyheads.recovery.refusals import BudgetSpent, LimitError
from manyheads.recovery.result.distributions import FittedSequences, GaussianSequences


def served(layer, limits, **settings):
    """An oracle of a layer behind a server with limits."""
    function = limits.serve(lambda x: evaluate_layer(layer, x))
    return Oracle(function, layer.dim, OracleSettings(causal=layer.causal, limits=limits, **settings))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("limits", "pad"),
    [
        (ServerLimits(min_length=7), False),
        (ServerLimits(min_length=7, max_length=7), True),
        (ServerLimits(last_row=True), False),
        (ServerLimits(last_row=True, min_length=4), False),
        (ServerLimits(max_batch=1), False),
    ],
)
def test_rows_of_a_limited_server_are_the_rows_of_the_layer(rng, limits, pad, causal):
    if pad and not causal:
        return  # a later token is seen
    layer, x = gpt_layer(rng, 6, 2, causal=causal), rng.normal(size=(4, 5, 6))
    oracle, expected = served(layer, limits, pad=pad), evaluate_layer(layer, x)
    np.testing.assert_allclose(oracle(x, read="all"), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(oracle(x), expected[:, -1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(oracle(x, read=(1, 4)), expected[:, [1, 4]], rtol=0, atol=1e-12)


def test_a_row_is_a_call_where_last_rows_are_shown(rng):
    oracle = served(gpt_layer(rng, 6, 2), ServerLimits(last_row=True))
    oracle(rng.normal(size=(3, 5, 6)), read=(2, 4))
    assert (oracle.total.calls, oracle.total.tokens, oracle.total.numbers) == (6, 3 * (3 + 5), 36)


@pytest.mark.parametrize(
    "limits",
    [
        ServerLimits(max_length=3),
        ServerLimits(min_length=6, max_length=9),
        ServerLimits(max_norm=2.0),
        ServerLimits(max_batch=3, last_row=True),
        ServerLimits(last_row=True, min_length=2, max_length=5, max_norm=3.0),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_is_extracted_within_the_limits(rng, limits, causal):
    """The server raises at the first question beyond them."""
    layer = gpt_layer(rng, 12, 2, causal=causal)
    function = limits.serve(lambda x: evaluate_layer(layer, x))
    found = mh.extract_layer(function, 12, options=ExtractionOptions(limits=limits, verify=60))
    assert found.heads == 2
    errors = compare_layers(layer, found.layer)
    assert max(errors.theta, errors.projection) < 1e-6


@pytest.mark.parametrize("rounding", [{"decimals": 5}, {"bits": 20}])
def test_rounded_answers_are_noise_of_the_stated_size(rng, rounding):
    limits = ServerLimits(**rounding)
    layer = gpt_layer(rng, 12, 2)
    function = limits.serve(lambda x: evaluate_layer(layer, x))
    found = mh.extract_layer(function, 12, options=ExtractionOptions(limits=limits, tolerance=1e-4, verify=60))
    assert found.method == "bounded"
    assert found.noise.rounding == pytest.approx(limits.spacing(1.0, "float64"), rel=20)
    assert compare_layers(layer, found.layer).theta < 1e-2


def test_answers_are_rounded_as_stated():
    y = np.array([1 + 2.0**-9, 0.75, -3.14159, 0.0])
    assert ServerLimits(bits=8).round(y).tolist() == [1.0, 0.75, -3.140625, 0.0]
    assert ServerLimits(decimals=2).round(y).tolist() == [1.0, 0.75, -3.14, 0.0]
    half = y.astype(np.float16).astype(float)
    assert np.array_equal(ServerLimits(bits=11).round(y), half)
    assert ServerLimits(bits=11).spacing(1.0, "float64") == np.finfo(np.float16).eps


@pytest.mark.parametrize(
    ("limits", "options", "message"),
    [
        (ServerLimits(max_length=2), {}, "three tokens"),
        (ServerLimits(min_length=8, max_length=8), {}, "causal=True"),
        (ServerLimits(last_row=True, min_length=2), {"rotary": True}, "positions"),
    ],
)
def test_limits_without_room_are_refused_before_anything_is_asked(limits, options, message):
    def never(x):
        raise AssertionError

    with pytest.raises(LimitError, match=message):
        mh.extract_layer(never, 8, options=ExtractionOptions(limits=limits, **options))


def test_a_method_without_room_is_refused_before_it_begins(rng):
    layer = gpt_layer(rng, 8, 2)
    limits = ServerLimits(max_length=20)
    with pytest.raises(LimitError, match="'rotary' asks sequences of 33"):
        mh.extract_layer(
            lambda x: evaluate_layer(layer, x), 8, method="rotary", options=ExtractionOptions(limits=limits)
        )


def test_nothing_beyond_the_limits_is_asked(rng):
    oracle = served(gpt_layer(rng, 4, 2), ServerLimits(max_length=3, max_norm=1.0))
    with pytest.raises(LimitError, match="4 tokens"):
        oracle(np.zeros((1, 4, 4)))
    with pytest.raises(LimitError, match="norm 2"):
        oracle(np.ones((1, 2, 4)))
    assert oracle.total.calls == 0


def test_the_rate_is_kept_and_its_waits_are_within_the_budget(rng):
    limits, asked = ServerLimits(calls_per_second=40.0), []

    def answer(x):
        asked.append((time.monotonic(), len(x)))
        return x

    Oracle(answer, 2, OracleSettings(limits=limits))(np.zeros((60, 1, 2)))
    times, sizes = np.array(asked).T
    assert sizes.sum() == 60
    assert times[-1] - times[0] >= sizes[:-1].sum() / 40 - 0.01
    hurried = Oracle(answer, 2, OracleSettings(limits=limits, budget=Budget(seconds=0.5)))
    with pytest.raises(BudgetSpent, match="rate of 40"):
        hurried(np.zeros((200, 1, 2)))


def test_an_interrupted_extraction_of_a_limited_server_resumes(tmp_path, rng):
    layer, limits = gpt_layer(rng, 8, 2), ServerLimits(max_batch=1, last_row=True, min_length=2)
    serve, asked = limits.serve(lambda x: evaluate_layer(layer, x)), []

    def fails(x):
        asked.append(x)
        if len(asked) == 300:
            raise ConnectionError
        return serve(x)

    options = ExtractionOptions(limits=limits, store=tmp_path, verify=40)
    with pytest.raises(mh.errors.ManyheadsError, match="earlier answers are kept"):
        mh.extract_layer(fails, 8, options=options)
    found = mh.extract_layer(fails, 8, options=options)
    plain = mh.extract_layer(serve, 8, options=dataclasses.replace(options, store=None))
    assert np.array_equal(found.layer.theta, plain.layer.theta)
    assert found.total.stored > 250


def test_sequences_of_the_verification_are_within_the_limits(rng):
    limits = ServerLimits(min_length=3, max_length=9, max_norm=1.5)
    draw = FittedSequences(GaussianSequences(), limits)
    stacks = draw(rng, 50, 4)
    assert sum(map(len, stacks)) == 50
    for x in stacks:
        limits.check(x)
    assert "norm of 1.5" in str(draw)
    assert "length 3" in str(draw)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_length": 0},
        {"min_length": 5, "max_length": 4},
        {"max_norm": 0.0},
        {"calls_per_second": 1e-9},
        {"calls_per_second": float("nan")},
        {"max_norm": True},
        {"bits": 1},
        {"decimals": -1},
        {"max_batch": 0},
    ],
)
def test_limits_without_meaning_are_refused(settings):
    with pytest.raises(UsageError):
        ServerLimits(**settings)


def test_an_infinite_limit_is_none():
    limits = ServerLimits(max_norm=np.inf, calls_per_second=np.inf)
    assert limits == ServerLimits()
    assert ServerLimits(max_norm=np.float32(2), calls_per_second=3) == ServerLimits(max_norm=2.0, calls_per_second=3.0)
