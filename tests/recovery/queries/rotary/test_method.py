"""Layers with rotary positions: forms, turns and frequencies, and what refuses."""

import dataclasses
import itertools

import numpy as np
import pytest
from tests.recovery.rotary_layers import planted_rotary_layer

from manyheads.errors import UsageError
from manyheads.recovery import RecoveryRefused, evaluate_layer, gpt_layer
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import ACCURATE, SPARING, Effort
from manyheads.recovery.queries.gates.count_gates import CountGate, ask_counts, find_counted_heads
from manyheads.recovery.queries.logits.ledger import LedgerReader, alternate, plan
from manyheads.recovery.queries.nets.sigmoid_network import fit_nets
from manyheads.recovery.queries.rotary.method import extract_rotary
from manyheads.recovery.refusals import FitError, NotALayer

DIM, HEADS, TRIES = 12, 2, 3
EPS = 2e-16


def extract(layer, rng, effort=SPARING):
    for left in range(TRIES)[::-1]:
        try:
            return extract_rotary(Oracle(layer, layer.dim), EPS, rng, effort)
        except RecoveryRefused:  # as the front door does: another draw of tokens
            if not left:
                raise
    return None


def matched(truth, found):
    """Heads of the found layer in the order of the truth."""
    apart = np.linalg.norm(truth.projection[:, None] - found.projection, axis=(2, 3))
    order = apart.argmin(1)
    assert sorted(order) == list(range(len(truth.projection)))
    return order


def test_forms_turns_and_frequencies(rng):
    layer = planted_rotary_layer(rng, DIM, HEADS, base=50.0)
    found = extract(layer, rng)
    order = matched(layer, found.layer)
    np.testing.assert_allclose(found.layer.projection[order], layer.projection, atol=1e-7)
    for offset in (1, 2, 3, 7, 40):  # the last one was never asked about
        np.testing.assert_allclose(found.layer.attention(offset)[order], layer.attention(offset), atol=1e-6)
    zero, true = (part + part.swapaxes(1, 2) for part in (found.layer.attention(0)[order], layer.attention(0)))
    np.testing.assert_allclose(zero, true, atol=1e-6)
    for mine, true in zip(found.layer.turns.frequencies(), layer.turns.frequencies(), strict=True):
        np.testing.assert_allclose(mine, true, atol=1e-6)
    x = rng.standard_normal((4, 20, DIM))
    np.testing.assert_allclose(found(x), layer(x), atol=1e-6)


def test_accurate_settings_ask_more():
    plain, accurate = SPARING, ACCURATE
    assert accurate.extra > plain.extra
    assert accurate.excess > plain.excess
    assert accurate.share < plain.share


def test_logits_of_offsets_without_turns(rng):
    """Forms of different offsets that are no rotations of each other: every offset is asked about."""
    layer = planted_rotary_layer(rng, DIM, HEADS)
    factor = rng.uniform(0.3, 1.2, (5, HEADS, 1, 1))
    layer = RotaryLayer(
        np.concatenate([layer.forms[:5] * factor, layer.forms[5:]]), layer.projection, layer.bias, layer.turns
    )
    found = extract(layer, rng, Effort(offsets=5))
    assert found.layer.turns is None
    x = rng.standard_normal((4, 5, DIM))
    np.testing.assert_allclose(found(x), layer(x), atol=1e-6)
    with pytest.raises(UsageError, match="offsets 0 to 4"):
        found(np.zeros((1, 6, DIM)))


def test_a_uniform_head_among_others(rng):
    layer = planted_rotary_layer(rng, DIM, HEADS)
    forms = layer.forms.copy()
    forms[:, 0] = 0
    first = (0 * layer.turns.first[0], *layer.turns.first[1:])
    layer = RotaryLayer(forms, layer.projection, layer.bias, dataclasses.replace(layer.turns, first=first))
    found = extract(layer, rng)
    x = rng.standard_normal((4, 16, DIM))
    np.testing.assert_allclose(found(x), layer(x), atol=1e-6)


def test_the_count_gate_is_rational_in_the_number_of_zeros(rng):
    layer = planted_rotary_layer(rng, DIM, HEADS)
    oracle, direction = Oracle(layer, DIM), rng.standard_normal(DIM)
    gate = CountGate(np.array([1.0, 0.7]), np.array([3, 5]))
    answers = ask_counts(oracle, layer.bias, gate, direction)[0]
    for answer, scale, count in zip(answers, gate.scales, gate.counts, strict=True):
        odds = np.exp(scale**2 * np.einsum("d,mde,e->m", direction, layer.attention(0), direction))
        expected = np.einsum("m,d,mde->e", odds / (odds + count), direction, layer.projection)
        np.testing.assert_allclose(answer, expected, atol=1e-10)
    heads = find_counted_heads(oracle, layer.bias, layer.projection.sum(0), EPS, rng)
    values = heads.direction @ layer.projection
    assert np.linalg.norm(values[:, None] - heads.net.values, axis=2).min(1).max() < 1e-7 * np.linalg.norm(values)
    kept = ask_counts(oracle, layer.bias, heads.gate, heads.direction)[0]
    assert fit_nets(heads.gate.net, kept, heads.net.slopes).residual < 1e-10


def test_logits_of_all_pairs_of_a_sequence(rng):
    layer = planted_rotary_layer(rng, DIM, HEADS)
    reader = LedgerReader(Oracle(layer, DIM), layer.bias, layer.projection)
    tokens = rng.standard_normal((6, DIM))
    ledger = reader.read(tokens, np.arange(6).reshape(2, 3), np.array([1, 2, 5]))
    assert len(ledger.logits) == 12
    for query, key, offset, logits in zip(ledger.query, ledger.key, ledger.offset, ledger.logits, strict=True):
        expected = np.einsum("d,mde,e->m", tokens[query], layer.attention(offset), tokens[key])
        np.testing.assert_allclose(logits, expected, atol=1e-8)


@pytest.mark.parametrize("sizes", [(3, 5, 4), (4, 6, 5), (2, 4, 2)])
def test_walks_take_every_step_and_plans_are_met(sizes):
    first, second, length = sizes
    steps = {(a, b) for piece in alternate(first, second, length).tolist() for a, b in itertools.pairwise(piece)}
    assert steps == {(a, b) for a in range(first) for b in range(first, first + second)} | {
        (b, a) for a in range(first) for b in range(first, first + second)
    }
    needed, shown = {0: 9, 1: 20, 6: 7, 7: 3}, dict.fromkeys(range(20), 0)
    for positions, count in plan(needed, 4):
        for row in range(len(positions)):
            for column in range(row + 1):
                shown[positions[row] - positions[column]] += count
    assert all(shown[offset] >= wanted for offset, wanted in needed.items())


def test_what_cannot_be_extracted_is_refused(rng):
    biased = planted_rotary_layer(rng, 4, HEADS, key_bias=0.5)
    with pytest.raises(RecoveryRefused):
        extract_rotary(Oracle(biased, 4), EPS, rng)
    with pytest.raises(NotALayer, match="not linear"):
        extract_rotary(Oracle(np.tanh, DIM), EPS, rng)
    uniform = RotaryLayer(np.zeros((40, 1, DIM + 1, DIM + 1)), rng.standard_normal((1, DIM, DIM)))
    with pytest.raises(FitError, match="no head attends"):
        extract_rotary(Oracle(uniform, DIM), EPS, rng)


def test_a_layer_without_positions_is_one_whose_heads_do_not_turn(rng):
    plain = gpt_layer(rng, DIM, HEADS, key_bias=False)
    layer = Oracle(lambda x: evaluate_layer(plain, x), DIM)
    layer.dim = DIM
    found = extract_rotary(layer, EPS, rng)
    for angles in found.layer.turns.frequencies():
        np.testing.assert_allclose(angles, 0, atol=1e-3)
    x = rng.standard_normal((4, 9, DIM))
    np.testing.assert_allclose(found(x), evaluate_layer(plain, x), atol=1e-6)


@pytest.mark.slow
def test_noise_leaves_fewer_digits(rng):
    layer = planted_rotary_layer(rng, DIM, HEADS)

    def noisy(x):
        y = layer(x)
        return y + 1e-9 * np.sqrt(np.mean(y**2)) * rng.standard_normal(y.shape)

    for left in range(TRIES)[::-1]:
        try:
            found = extract_rotary(Oracle(noisy, DIM), 1e-9, rng)
            break
        except RecoveryRefused:
            if not left:
                raise
    x = rng.standard_normal((5, 8, DIM))
    assert np.mean((found(x) - layer(x)) ** 2) < 1e-6 * np.mean(layer(x) ** 2)
