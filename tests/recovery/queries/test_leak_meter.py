"""The leak meter against attacks that are really made, and the Cramér-Rao bound against differences."""

from types import SimpleNamespace

import numpy as np
import pytest
from tests.recovery.random_start_attack import attack

from manyheads.attention import AttentionLayer
from manyheads.recovery import ExtractionOptions, ServerLimits, evaluate_layer, extract_layer, gpt_layer
from manyheads.recovery.layers.scores import ScoreLayer
from manyheads.recovery.queries.cramer_rao import Factors, information, query_cost
from manyheads.recovery.queries.leak_meter import LeakMeter, measure_leak, name_bound
from manyheads.recovery.result.results import Recovery
from manyheads.studies.recovery.noisy_extraction import build_layer, free_numbers

QUIET = ExtractionOptions(progress=False, verify=50)


def found_layer(layer, method="subspaces"):
    """Return a layer as if it had been extracted."""
    certificate = SimpleNamespace(largest_error=1e-20)
    return Recovery(layer, certificate, (), method)


@pytest.mark.parametrize(("dim", "heads", "rank", "causal"), [(6, 1, 3, True), (5, 2, 2, False)])
def test_no_price_is_above_what_a_random_start_needs(dim, heads, rank, causal, rng):
    """An attack by short Gaussian tokens, which meter and package know nothing of, is never cheaper.

    It has found the layer if its error is what noise leaves to first order; six standard deviations are for its tail.
    """
    layer = gpt_layer(rng, dim, heads, rank=rank, causal=causal)
    leak = measure_leak(found_layer(layer), 1e-4)
    for noise, numbers in ((0.01, 8), (0.1, 40)):
        calls = int(np.ceil(numbers * leak["counting"]))
        error, mean, std = attack(lambda x: evaluate_layer(layer, x), (dim, heads, rank), causal, noise, calls, rng)
        assert error < mean + 6 * std
        meter = measure_leak(found_layer(layer), error)
        priced = next(one["cheapest"] for one in meter["defences"] if one["noise"] == noise)
        assert priced <= calls


@pytest.mark.parametrize(
    ("each", "bits", "target", "calls"),
    [
        (6.5, 4, 1e-6, 170),
        (6.5, 4, 1e-8, 230),
        (6.5, 4, 1e-10, 294),
        (6.5, 6, 1e-6, 134),
        (6.5, 6, 1e-10, 254),
        (6.5, 8, 1e-6, 94),
        (6.5, 8, 1e-10, 214),
        (12.5, 6, 1e-6, 280),
        (12.5, 6, 1e-8, 397),
        (14.5, 6, 1e-6, 279),
        (14.5, 6, 1e-8, 429),
    ],
)
def test_rounding_is_priced_below_measured_attacks(each, bits, target, calls):
    """Questions on rounding thresholds, as measured; noise of the same size takes up to millions of calls."""
    meter = LeakMeter(each, target, each)
    assert 0.7 * calls < meter.behind_rounding(bits).cheapest <= calls


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_rounding_bounds_calls_by_the_bits_that_parameters_take(bits):
    """Parameters to within 2^-b take as many numbers of b bits, and to within 4^-b twice as many."""
    for numbers in (1, 2):
        assert LeakMeter(6.5, 4.0 ** (-bits * numbers), None).behind_rounding(bits).bound == pytest.approx(
            6.5 * numbers
        )


@pytest.mark.slow
def test_noise_is_priced_below_measured_attacks():
    """Calls to 1e-6 at noise 1e-3, 1e-2 and 1e-1, by tokens of standard deviation three."""
    leak = measure_leak(found_layer(gpt_layer(np.random.default_rng(7), 8, 2, causal=True)), 1e-6)
    for one, measured in zip(leak["defences"], (26, 55, 3737), strict=False):
        assert leak["counting"] <= one["bound"] <= one["cheapest"] <= measured
        assert one["loss"] == one["noise"] ** 2


@pytest.mark.slow
def test_the_bound_of_the_queries_is_that_of_many(rng):
    layer = gpt_layer(np.random.default_rng(100), 4, 2, rank=2, causal=True)
    own, x = Factors.of(layer), rng.standard_normal((6000, 4, 4))
    sphere = 10 * x / np.linalg.norm(x, axis=-1, keepdims=True)
    bound = query_cost(own, sphere, information(own, x)) * 0.1**2 / 1e-5
    found = measure_leak(found_layer(layer), 1e-5)["defences"][2]["bound"]
    assert 0.97 * bound < found < 1.06 * bound


def test_behind_noise_a_large_layer_has_no_price(rng):
    leak = measure_leak(found_layer(gpt_layer(rng, 16, 4)), 1e-6)
    priced = {one["name"]: one["cheapest"] is not None for one in leak["defences"]}
    assert priced == {name: name.startswith("rounding") for name in priced}


def test_a_meter_says_where_no_attack_was_run(rng):
    layer = gpt_layer(rng, 4, 1)
    for limits, words in (
        (ServerLimits(max_norm=2.0), "shorter than"),
        (ServerLimits(last_row=True), "last row only"),
        (ServerLimits(max_length=3), "3 tokens"),
    ):
        leak = measure_leak(found_layer(layer), 1e-6, limits)
        assert words in leak["unmeasured"]
        assert {name_bound(one) for one in leak["defences"]} == {"counting bound", "bits of the answers"}
        assert all(one["cheapest"] is None for one in leak["defences"])
    assert measure_leak(found_layer(layer), 1e-6, ServerLimits(max_norm=6.0))["unmeasured"] == ""
    other = ScoreLayer(np.zeros((2, 1, 3, 3)), np.ones((1, 2, 2)), cap=9.0)
    assert measure_leak(found_layer(other, "scores"), 1e-6) is None
    assert measure_leak(found_layer(layer, "sphere"), 1e-6) is None


def test_a_meter_of_a_layer_with_rotary_positions_gives_no_price(rng):
    layer = build_layer("llama", rng, 8, 2)
    options = ExtractionOptions(progress=False, verify=50, rotary=True)
    leak = measure_leak(extract_layer(layer, 8, options=options), 1e-6)
    assert leak["counting"] == free_numbers("llama", 8, 2) / 32
    assert "RoPE" in leak["unmeasured"]
    assert all(one["cheapest"] is None for one in leak["defences"])


def test_free_parameters_are_the_rank_of_the_jacobian(rng):
    """Also where heads share keys and values."""
    for shared in (False, True):
        query, key, value = (rng.standard_normal((3, 5, 2)) for _ in range(3))
        key, value = (np.repeat(part[:1], 3, axis=0) if shared else part for part in (key, value))
        bias = np.einsum("mr,mdr->md", rng.standard_normal((3, 2)), key)
        layer = AttentionLayer(
            query @ key.swapaxes(1, 2) / 4, value @ rng.standard_normal((3, 2, 5)), bias / 4, causal=True
        )
        own = Factors.of(layer)
        jacobian = own.jacobian(rng.standard_normal((60, 4, 5)))
        assert np.linalg.matrix_rank(jacobian, tol=1e-9 * np.linalg.norm(jacobian)) == own.free
        assert own.free == (5 + 2 * 6 + 3 * 12 + 3 * 10 if shared else 5 + 3 * (12 + 6 + 10 + 6))


@pytest.mark.parametrize("causal", [True, False])
def test_the_jacobian_is_that_of_the_layer(causal, rng):
    """Every column, by differences of merged weights; the first two of three heads share keys and values."""
    draw = rng.standard_normal
    groups = [0, 0, 1]
    parts = [
        [draw(size) / 2 for _ in range(count)] for count, size in ((3, (4, 2)), (2, (3, 2)), (2, (3, 2)), (3, (2, 3)))
    ]
    own = Factors(*parts, groups, groups, causal)
    x, step = draw((2, 4, 3)), 1e-6

    def answers(query, key, value, output):
        logits = np.array([one @ key[group].T for one, group in zip(query, groups, strict=True)])
        projection = np.array([value[group] @ one for one, group in zip(output, groups, strict=True)])
        return evaluate_layer(AttentionLayer(logits[:, :-1], projection, logits[:, -1], None, causal), x).ravel()

    def by_differences(kind, index):
        columns = []
        for place in np.ndindex(parts[kind][index].shape):
            moved = []
            for sign in (1, -1):
                changed = [[each.copy() for each in part] for part in parts]
                changed[kind][index][place] += sign * step
                moved.append(answers(*changed))
            columns.append((moved[0] - moved[1]) / (2 * step))
        return columns

    order = [(kind, group if kind in (1, 2) else head) for head, group in enumerate(groups) for kind in range(4)]
    expected = [column for kind, index in dict.fromkeys(order) for column in by_differences(kind, index)]
    jacobian = own.jacobian(x)
    np.testing.assert_array_equal(jacobian[:, :3], np.tile(np.eye(3), (8, 1)))  # output bias
    np.testing.assert_allclose(jacobian[:, 3:], np.stack(expected, axis=1), atol=1e-8)


def test_gaussian_sequences_cost_the_free_parameters(rng):
    """phi = p / (k d) where the design is the test distribution, and less for longer tokens."""
    own = Factors.of(gpt_layer(rng, 4, 1))
    x = rng.standard_normal((200, 4, 4))
    wide = information(own, x)
    assert query_cost(own, x, wide) == pytest.approx(own.free / 16, rel=1e-6)
    assert query_cost(own, 2 * x, wide) < 0.5 * own.free / 16


@pytest.mark.parametrize(("heads", "rank", "power"), [(1, 4, -6), (2, 2, -6)])
def test_small_tokens_cost_the_sixth_power_where_ranks_are_known(heads, rank, power, seed):
    rng = np.random.default_rng([seed, 3])
    own = Factors.of(gpt_layer(rng, 4, heads, rank=rank, key_bias=False))
    x = rng.standard_normal((150, 4, 4))
    calls = [query_cost(own, scale * x, information(own, x)) for scale in (0.05, 0.1)]
    assert np.log2(calls[1] / calls[0]) == pytest.approx(power, abs=0.4)
