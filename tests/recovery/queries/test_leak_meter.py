"""The leak meter's law against attacks that are really made."""

import numpy as np
import pytest

from manyheads.recovery import ExtractionOptions, evaluate_layer, extract_layer, gpt_layer
from manyheads.recovery.layers.scores import ScoreLayer
from manyheads.recovery.queries.leak_meter import START, LeakMeter, measure_leak
from manyheads.recovery.results import Recovery
from manyheads.recovery.studies.noisy_extraction import (
    Server,
    _jacobian,
    attack,
    build_layer,
    free_numbers,
    least_calls,
)

QUIET = ExtractionOptions(progress=False, verify=50)


@pytest.mark.parametrize("noise", [1e-3, 1e-2])
def test_the_law_is_that_of_an_attack(rng, noise):
    """Behind noise the calls of an attack are those of the law, within a factor of 1.6."""
    for_layer, for_server, for_queries = rng.spawn(3)
    server = Server(build_layer("gpt2", for_layer, 8, 2), 8, for_server, noise)
    cost = attack("gpt2", server, for_queries, 1e-7, 2)
    expected = LeakMeter(8, 2, 250, 1e-7).calls(noise)
    assert expected / 1.6 < cost.calls < 1.6 * expected
    assert cost.error <= 1e-7
    assert server.honest() == pytest.approx(noise**2, rel=0.1)


def test_the_parts_of_the_law():
    meter = LeakMeter(16, 4, 900, 1e-6)
    assert meter.calls(0.1) / meter.calls(0.01) == pytest.approx(100, rel=1e-3)
    assert meter.calls(START / 10) == pytest.approx(meter.start, rel=0.01)
    assert meter.limit(0.0) == 900 / 64
    assert meter.limit(0.1) == pytest.approx(900 * 0.01 / (1e-6 * 64))
    tenfold = meter.tenfold()
    assert meter.calls(tenfold.noise) == pytest.approx(10 * meter.start)
    assert tenfold.loss == tenfold.noise**2


@pytest.mark.parametrize(("heads", "biases", "factor"), [(1, False, 64), (2, True, 64), (2, False, 1024)])
def test_a_meter_reads_the_layer_that_was_found(rng, heads, biases, factor):
    layer = gpt_layer(rng, 8, heads, key_bias=biases)
    leak = measure_leak(extract_layer(lambda x: evaluate_layer(layer, x), 8, options=QUIET), 1e-6)
    assert leak["limit"] == pytest.approx(
        LeakMeter(8, heads, 1, 1e-6).limit(0.0) * (4 * 64 - 128 / heads + 8 + 8 * biases * heads), rel=0.1
    )
    assert leak["norm_factor"] == factor


def test_a_meter_of_a_layer_with_rotary_positions(rng):
    """The law is that of an attack, within a factor of 1.6, and the start is what the attack asks."""
    for_layer, for_server, for_queries = rng.spawn(3)
    layer = build_layer("llama", for_layer, 8, 2)
    options = ExtractionOptions(progress=False, verify=50, rotary=True)
    leak = measure_leak(extract_layer(layer, 8, options=options), 1e-6)
    assert leak["limit"] == free_numbers("llama", 8, 2) / 32
    assert leak["norm_factor"] is None
    assert all(one["calls"] > one["limit"] for one in leak["defences"])
    noise = 1e-2
    cost = attack("llama", Server(layer, 8, for_server, noise), for_queries, 1e-6, 2)
    expected = next(one["calls"] for one in leak["defences"] if one["name"] == "noise 0.01")
    assert expected / 1.6 < cost.calls < 1.6 * expected


def test_no_law_is_stated_for_other_scores(rng):
    found = Recovery(ScoreLayer(np.zeros((2, 1, 3, 3)), np.ones((1, 2, 2)), cap=9.0), None, (), "scores")
    assert measure_leak(found, 1e-6) is None


def test_the_jacobian_is_that_of_the_layer(rng):
    layer = gpt_layer(rng, 3, 2)
    x = rng.standard_normal((2, 4, 3))
    step = 1e-6
    moved = [
        evaluate_layer(type(layer)(layer.theta + sign * direction, *parts(layer)), x).ravel()
        for direction in [step * basis(layer.theta.shape, 4)]
        for sign in (1, -1)
    ]
    np.testing.assert_allclose(_jacobian(layer, x)[:, 4], (moved[0] - moved[1]) / (2 * step), atol=1e-8)


def test_small_tokens_cost_the_sixth_or_tenth_power(seed):
    for heads, biases, power in ((1, False, -6), (2, False, -10)):
        calls = [
            least_calls("gpt2", np.random.default_rng([seed, 3]), (4, heads), 4, scale, 100, biases)
            for scale in (0.05, 0.1)
        ]
        assert np.log2(calls[1] / calls[0]) == pytest.approx(power, abs=0.4)


def parts(layer):
    return layer.projection, layer.key_bias, layer.bias, layer.causal


def basis(shape, place):
    unit = np.zeros(np.prod(shape))
    unit[place] = 1.0
    return unit.reshape(shape)
