"""The noise of an oracle: exact functions, rounded ones, noisy ones, and functions that are no layer."""

import ml_dtypes
import numpy as np
import pytest

from manyheads.recovery import evaluate_layer, gpt_layer
from manyheads.recovery.oracle.noise_estimate import LARGEST, oracle_noise
from manyheads.recovery.oracle.oracle import Oracle, OracleSettings
from manyheads.recovery.refusals import NotALayer

DIM = 32


@pytest.fixture
def layer(rng):
    layer = gpt_layer(rng, DIM, 4)
    return lambda x: evaluate_layer(layer, x)


def measure(function, rng, residual=False, **known):
    return oracle_noise(Oracle(function, DIM, OracleSettings(residual=residual)), rng, **known)


def normalize(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * np.linspace(0.5, 2, DIM) + 0.3


@pytest.mark.parametrize(
    ("rounded", "least", "most"),
    [
        (lambda y: y, 3e-17, 2e-15),
        (lambda y: y.astype(np.float32), 1e-8, 1e-7),  # the unit is 1.2e-7: a fifth of it, see the module
        (lambda y: y.astype(np.float16), 8e-5, 8e-4),
        (lambda y: y.astype(ml_dtypes.bfloat16), 7e-4, 7e-3),
        (lambda y: y.astype(ml_dtypes.bfloat16).astype(np.float64), 7e-4, 7e-3),
    ],
)
def test_rounding_is_measured(layer, rng, rounded, least, most):
    noise = measure(lambda x: rounded(layer(x)), rng)
    assert least < noise.level < most
    assert noise.repeat == 0
    assert (noise.causal, noise.positional, noise.normalized, noise.centred) == (True, False, False, False)


@pytest.mark.parametrize("sigma", [1e-8, 1e-3])
def test_added_noise_is_measured_and_has_to_be_declared(layer, rng, sigma):
    def noisy(x):
        return layer(x) + sigma * rng.standard_normal(x.shape)

    with pytest.raises(NotALayer, match="differently each time"):
        measure(noisy, rng)
    size = np.sqrt(np.mean(layer(rng.standard_normal((200, 3, DIM))) ** 2))
    level = measure(noisy, rng, stochastic=True).level
    assert 0.5 * sigma / size < level < 3 * sigma / size  # of answers at several scales, the largest of three figures


def test_a_level_is_that_of_the_layer_beside_a_residual_connection(layer, rng):
    noise = measure(
        lambda x: (layer(x) + 100 * x).astype(np.float32) - np.float32(99) * x.astype(np.float32), rng, True
    )
    assert noise.level > 1e-6


@pytest.mark.parametrize(("dtype", "bias"), [("float64", 1e6), ("float32", 1e3), ("float32", 1e5), ("float16", 10.0)])
def test_noise_is_relative_to_what_depends_on_the_tokens(layer, rng, dtype, bias):
    """A constant that is larger by |F| / |F - c| makes the rounding as much larger."""
    constant = bias * rng.standard_normal(DIM)
    noise = measure(lambda x: (layer(x) + constant).astype(dtype), rng)
    x = rng.standard_normal((100, 1, DIM))
    unit = np.finfo(dtype).eps * np.sqrt(np.mean(constant**2) / np.mean((layer(x) - layer(0 * x)) ** 2))
    assert 0.1 * unit < noise.level < 2 * unit
    assert (noise.causal, noise.positional) == (True, False)


def test_rounding_that_hides_the_tokens_is_refused(layer, rng):
    """Noise is a fifth of the spacing of the answers: a layer is seen at half of the largest noise only."""
    x = rng.standard_normal((200, 1, DIM))
    size = np.sqrt(np.mean((layer(x) - layer(0 * x)) ** 2))

    def biased(spacing):
        bias = 1.5 * spacing / np.finfo(np.float32).eps  # between two powers of two
        return measure(lambda x: (layer(x) + bias).astype(np.float32), rng)

    limit = np.log2(5 * LARGEST * size)
    assert biased(2.0 ** np.floor(limit - 1)).level < LARGEST
    for least in (limit + 1, limit + 11):  # a few digits are left, or none
        with pytest.raises(NotALayer, match=r"beyond their rounding \(float32\)"):
            biased(2.0 ** np.ceil(least))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_mask_is_found_in_every_precision(rng, dtype):
    both = gpt_layer(rng, DIM, 4, causal=False)
    noise = measure(lambda x: evaluate_layer(both, x).astype(dtype), rng)
    assert (noise.causal, noise.positional) == (False, False)


def test_a_residual_sum_around_a_normalization_is_hinted_at(layer, rng):
    with pytest.raises(NotALayer, match="say residual=True"):
        measure(lambda x: x + layer(normalize(x)), rng)


def test_a_normalization_in_front_is_found(layer, rng):
    for function, centred in ((lambda x: layer(normalize(x)), True), (rms, False)):
        noise = measure(lambda x, f=function: x + f(x), rng, residual=True)
        assert (noise.normalized, noise.centred) == (True, centred)
        assert noise.level < 1e-13


def rms(x):
    """Normalize without centring, and read it with a matrix."""
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return normed @ np.random.default_rng(5).standard_normal((DIM, DIM)) / DIM**0.5


def test_positions_and_later_tokens_are_found(layer, rng):
    positions = rng.standard_normal((9, DIM))
    assert measure(lambda x: layer(x + positions[: x.shape[1]]), rng).positional
    both = gpt_layer(rng, DIM, 2, causal=False)
    noise = measure(lambda x: evaluate_layer(both, x), rng)
    assert (noise.causal, noise.positional) == (False, False)


def mlp(x, size=1.0):
    draw = np.random.default_rng(3)
    a, b = draw.standard_normal((DIM, 2 * DIM)), draw.standard_normal((2 * DIM, DIM))
    running = x.cumsum(1) / np.arange(1, x.shape[1] + 1)[:, None]
    return size * np.maximum(running @ a, 0) @ b / DIM


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-9])
def test_an_mlp_is_no_layer_however_small(layer, rng, size):
    with pytest.raises(NotALayer, match="not affine"):
        measure(lambda x: mlp(x, size) + (layer(x) if size < 1 else 0.0), rng)


def test_an_mlp_behind_a_layernorm_is_no_layer(rng):
    with pytest.raises(NotALayer, match="not affine"):
        measure(lambda x: mlp(normalize(x)), rng)


def test_a_kink_is_not_taken_for_noise(rng):
    with pytest.raises(NotALayer, match="not affine"):
        measure(lambda x: np.sign(x), rng)


def test_noise_that_hides_everything_is_refused(layer, rng):
    with pytest.raises(NotALayer, match="too noisy"):
        measure(lambda x: layer(x) + 0.3 * rng.standard_normal(x.shape), rng, stochastic=True)


def test_projections_that_cancel_are_measured_by_longer_sequences(rng):
    layer = gpt_layer(rng, DIM, 2, bias=False)
    projection = np.stack([layer.projection[0], -layer.projection[0]])
    noise = measure(lambda x: evaluate_layer(type(layer)(layer.theta, projection, causal=True), x), rng)
    assert noise.level < 1e-14
