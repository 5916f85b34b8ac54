"""Functions as users bring them: what once was refused, took minutes, or was accepted with a part missing."""

import time

import numpy as np
import pytest
from tests.recovery.mixed_layers import normalize
from tests.recovery.random_functions import BIASES, DTYPES, KINDS, attempt, is_wrong
from tests.recovery.rotary_layers import planted_rotary_layer

from manyheads.attention import AttentionLayer
from manyheads.errors import ShapeError, UsageError
from manyheads.recovery import (
    ExtractionOptions,
    compare_layers,
    evaluate_layer,
    extract_layer,
    gpt_layer,
    learn_layer,
    sequences,
)
from manyheads.recovery.examples.learning import LearningOptions
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.refusals import FitError, NoFit, NotALayer, VerificationError

QUIET = ExtractionOptions(progress=False)


def extracted(layer, dtype="float64", **said):
    return extract_layer(
        lambda x: evaluate_layer(layer, x).astype(dtype), layer.dim, options=ExtractionOptions(progress=False, **said)
    )


@pytest.mark.slow
def test_a_sample_of_random_functions_states_its_errors(seed):
    """Five, drawn like those of the acceptance row."""
    order = np.random.default_rng([seed, 71]).permutation(len(KINDS) * len(DTYPES) * len(BIASES))
    chosen = [index for index in order if KINDS[index % len(KINDS)] != "rotary"][:5]
    rows = []
    for index in map(int, chosen):
        kind, rest = KINDS[index % len(KINDS)], index // len(KINDS)
        rows.append(attempt(kind, DTYPES[rest % len(DTYPES)], BIASES[rest // len(DTYPES)], [seed, index]))
    assert not [row for row in rows if is_wrong(row) or row.end == "unnamed"]


def test_a_bias_of_millions_is_no_part_of_the_error(rng):
    """Three heads behind a constant: found with all heads, or refused; never one head beside a tiny error."""
    plain = gpt_layer(rng, 12, 3, bias=False)
    size = np.sqrt(np.mean(evaluate_layer(plain, rng.standard_normal((50, 4, 12))) ** 2))
    constant = 3e6 * size * rng.standard_normal(12)
    layer = AttentionLayer(plain.theta, plain.projection, plain.key_bias, constant, causal=True)
    with pytest.raises(NotALayer, match="beyond their rounding"):
        extracted(layer, "float32")
    found = extracted(layer)
    assert found.heads == 3
    assert compare_layers(layer, found.layer).theta < 1e-3


def test_the_student_is_measured_against_what_depends_on_the_tokens(rng):
    plain = gpt_layer(rng, 4, 1, bias=False, causal=False)
    layer = AttentionLayer(plain.theta, plain.projection, None, 1e4 * rng.standard_normal(4))
    x = sequences(rng, 400, 3, 4)
    y = evaluate_layer(layer, x)
    found = learn_layer(x, y, 1, options=LearningOptions(bias=True))
    assert found.certificate.variance < 1e-6 * np.mean(y**2)
    with pytest.raises(NoFit):  # float32 leaves four digits of it
        learn_layer(x, y.astype(np.float32), 1, options=LearningOptions(bias=True))


@pytest.mark.parametrize(("dim", "heads", "causal"), [(8, 2, True), (12, 3, False), (9, 9, True)])
def test_heads_of_rank_one_are_found(rng, dim, heads, causal):
    layer = gpt_layer(rng, dim, heads, rank=1, causal=causal)
    found = extracted(layer)
    assert (found.heads, found.method) == (heads, "subspaces")
    assert compare_layers(layer, found.layer).worst < 1e-5


def test_rank_one_beside_wider_heads(rng):
    layer = gpt_layer(rng, 12, 2, rank=4)
    left, values, right = np.linalg.svd(layer.projection[0])
    projection = np.stack([values[0] * np.outer(left[:, 0], right[0]), layer.projection[1]])
    layer = AttentionLayer(layer.theta, projection, layer.key_bias, layer.bias, causal=True)
    assert compare_layers(layer, extracted(layer).layer).worst < 1e-5


@pytest.mark.parametrize("causal", [True, False])
def test_answers_in_float16_show_their_mask(rng, causal):
    found = extracted(gpt_layer(rng, 8, 1, causal=causal), "float16", causal=causal, tolerance=1e-4)
    assert (found.noise.causal, found.noise.positional, found.heads) == (causal, False, 1)


def test_many_heads_are_refused_before_they_take_minutes(rng):
    layer = gpt_layer(rng, 64, 64, rank=1)
    start = time.process_time()
    with pytest.raises(FitError, match="64 heads have"):
        extracted(layer, tries=1)
    assert time.process_time() - start < 10


def test_a_layernorm_in_front_of_full_attention_is_found_out(rng):
    layer = gpt_layer(rng, 12, 2, causal=False)
    found = extract_layer(lambda x: evaluate_layer(layer, normalize(x)), 12, options=QUIET)
    assert (found.method, found.heads, found.layer.causal) == ("sphere", 2, False)
    assert found.certificate.largest_error < 1e-12


def test_a_window_shows_in_long_sequences(rng):
    layer = gpt_layer(rng, 6, 2)

    def windowed(x):
        rows = [evaluate_layer(layer, x[:, max(0, t - 16) : t + 1])[:, -1] for t in range(x.shape[1])]
        return np.stack(rows, axis=1)

    with pytest.raises(VerificationError):
        extract_layer(windowed, 6, options=ExtractionOptions(progress=False, tries=1))


@pytest.mark.slow
def test_positions_turned_in_single_precision_are_found():
    """RoPE whose sines and cosines are float32 beside weights in float64, as transformers computes them."""
    layer = planted_rotary_layer(np.random.default_rng(1), 8, 2, gain=1.0)
    turns = layer.turns
    rounded = np.random.default_rng(2).standard_normal((128, 128))  # of a plane's norm, not a function of the offset

    def function(x):
        length = x.shape[1]
        logits = layer.logits(x)
        logits = np.where(np.isfinite(logits), logits * (1 + 3e-8 * rounded[:length, :length]), -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return sum((weights[i] @ x) @ layer.projection[i] for i in range(2)) + layer.bias

    assert turns is not None
    found = extract_layer(function, 8, options=ExtractionOptions(rotary=True, progress=False, tries=1))
    assert (found.heads, found.reason) == (2, "positions that were turned in single precision")
    assert compare_layers(layer, found.layer).theta < 0.01


def test_rotary_layers_are_compared_offset_by_offset(rng):
    layer = planted_rotary_layer(rng, 8, 2)
    swapped = RotaryLayer(layer.forms[:, ::-1], layer.projection[::-1], layer.bias)
    errors = compare_layers(layer, swapped)
    assert (errors.worst, errors.permutation) == (0.0, (1, 0))
    forms = layer.forms.copy()
    forms[5] *= 1.5
    assert compare_layers(layer, RotaryLayer(forms, layer.projection, layer.bias)).theta == pytest.approx(0.5)
    with pytest.raises(ShapeError, match="one without"):
        compare_layers(layer, gpt_layer(rng, 8, 2))


@pytest.mark.parametrize("dim", [200_000, 10**9])
def test_a_dimension_that_memory_does_not_hold_is_refused_before_work(dim):
    def never(x):
        raise AssertionError("asked")

    with pytest.raises(UsageError, match=f"dim={dim}: .* GB"):
        extract_layer(never, dim, options=QUIET)


def test_sequences_that_memory_does_not_hold_are_refused_before_work():
    with pytest.raises(UsageError, match="verify=1000000000"):
        extract_layer(lambda x: x, 8, options=ExtractionOptions(verify=10**9, progress=False))
