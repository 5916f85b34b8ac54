"""Layers behind a normalization: what is found, against what the layer's weights say it must be."""

import dataclasses

import numpy as np
import pytest

from manyheads.attention import AttentionLayer
from manyheads.recovery import RecoveryRefused, compare_layers, evaluate_layer, gpt_layer
from manyheads.recovery.oracle.normalization import Normalization, projected
from manyheads.recovery.oracle.oracle import Oracle, OracleSettings
from manyheads.recovery.queries.effort import BASED
from manyheads.recovery.queries.gates.pairs import separate_heads
from manyheads.recovery.queries.gates.sphere_pairs import SpherePairs, read_norm
from manyheads.recovery.queries.subspaces.method import extract_on_sphere
from manyheads.recovery.queries.values.output_spaces import Sums
from manyheads.recovery.queries.values.ranks import gap_rank
from manyheads.recovery.refusals import FitError, NotALayer

DIM, HEADS, TRIES = 16, 2, 3
EPS = 2e-16


class Block:
    """X + layer(gain * normalize(X) + shift), or without the X."""

    def __init__(self, rng, *, centred=True, epsilon=1e-5, residual=False, change=lambda layer: layer):
        self.layer = change(gpt_layer(rng, DIM, HEADS))
        self.gain, self.shift = rng.uniform(0.6, 1.6, DIM), 0.3 * rng.standard_normal(DIM)
        self.norm, self.residual = Normalization(centred, epsilon), residual

    def __call__(self, x):
        y = evaluate_layer(self.layer, self.gain * self.norm(x) + self.shift)
        return x + y if self.residual else y

    @property
    def truth(self):
        return projected(self.layer, self.gain, self.shift, centred=self.norm.centred)

    def extract(self, rng, effort=BASED, tries=TRIES):
        for left in range(tries)[::-1]:
            oracle = Oracle(self, DIM, OracleSettings(residual=self.residual))
            try:
                return extract_on_sphere(oracle, EPS, rng, effort), oracle
            except RecoveryRefused:  # as the front door does: another draw of tokens
                if not left:
                    raise
        return None


@pytest.mark.parametrize("kind", [{}, {"residual": True, "epsilon": 1e-3}, {"centred": False}])
def test_the_layer_on_normalized_tokens_is_found(rng, kind):
    block = Block(rng, **kind)
    found, oracle = block.extract(rng)
    errors = compare_layers(block.truth, found.layer)
    assert found.layer.heads == HEADS
    assert errors.theta < 1e-6
    assert errors.projection < 1e-8
    assert errors.key_bias < 1e-5
    assert found.prepare.centred == block.norm.centred
    assert found.prepare.epsilon == pytest.approx(block.norm.epsilon, rel=1e-6)
    x = 2 * rng.standard_normal((5, 6, DIM)) + 1
    np.testing.assert_allclose(found(x), block(x) - (x if block.residual else 0), atol=1e-6)
    assert oracle.total.calls < 12 * DIM
    assert found.prepare.name in found.acts_on


def test_dead_and_uniform_heads(rng):
    def change(layer):
        theta, projection, beta = (np.array(part) for part in (layer.theta, layer.projection, layer.key_bias))
        theta[0], beta[0] = 0, 0
        theta, projection, beta = (np.concatenate([part, part[1:]]) for part in (theta, projection, beta))
        projection[2] = 0
        return AttentionLayer(theta, projection, beta, layer.bias, True)

    block = Block(rng, change=change)
    found, _ = block.extract(rng)
    assert found.layer.heads == 2
    assert np.linalg.norm(found.layer.theta, axis=(1, 2)).min() == 0
    x = rng.standard_normal((5, 6, DIM))
    np.testing.assert_allclose(found(x), block(x), atol=1e-6)


def test_a_single_head_of_full_rank(rng):
    block = Block(rng, change=lambda _: gpt_layer(rng, DIM, 1))
    found, _ = block.extract(rng)
    assert compare_layers(block.truth, found.layer).worst < 1e-7


def test_pairs_on_the_sphere_show_the_heads(rng):
    """The heads at one difference, against the projections themselves; and the tokens are on the sphere."""
    layer = gpt_layer(rng, DIM, HEADS)
    largest = []

    def ask(x, read):
        largest.append(np.abs(np.linalg.norm(x, axis=2) - 4).max())
        y = evaluate_layer(layer, x)
        return y[:, list(read)]

    basis = np.linalg.qr(rng.standard_normal((DIM, DIM)))[0]
    sums = Sums(layer.projection.sum(0), layer.bias)
    pairs = SpherePairs(ask, sums, scaled=False, near=basis[4:], far=basis[:4])
    heads = separate_heads(pairs, DIM, rng, oversampling=1.0, tries=8)
    values = heads.probe @ layer.projection  # (m, d)
    distances = np.linalg.norm(values[:, None] - heads.net.values, axis=2).min(1)
    assert distances.max() < 1e-6 * np.linalg.norm(values)
    assert max(largest) < 1e-12


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda layer: lambda x: evaluate_layer(layer, x), "no normalization"),
        (lambda layer: lambda x: np.tanh(Normalization()(x) @ layer.projection[0]), "epsilon|affine"),
        (
            lambda layer: lambda x: evaluate_layer(layer, x / (1 + np.linalg.norm(x, axis=-1, keepdims=True))),
            "no normalization",
        ),
    ],
)
def test_what_is_no_such_layer_is_refused(rng, function, message):
    with pytest.raises(NotALayer, match=message):
        extract_on_sphere(Oracle(function(gpt_layer(rng, DIM, HEADS)), DIM), EPS, rng)


def test_projections_that_cancel_behind_a_norm_are_refused_for_that(rng):
    layer = gpt_layer(rng, DIM, HEADS)
    pair = np.stack([layer.projection[0], -layer.projection[0]])
    cancelling = dataclasses.replace(layer, projection=pair)
    for bias in (layer.bias, None):
        own = dataclasses.replace(cancelling, bias=bias)
        oracle = Oracle(lambda x, own=own: evaluate_layer(own, Normalization()(x)), DIM)
        with pytest.raises(FitError, match="the projections cancel"):
            read_norm(oracle, DIM, EPS, rng)


def test_running_means_behind_a_norm_are_refused(rng):
    first, second = rng.standard_normal((2, DIM, DIM)) / 4

    def function(x):  # affine on one token, and no softmax on two
        u = Normalization()(x)
        moved = np.cumsum(u, axis=1) / np.arange(1, x.shape[1] + 1)[:, None] - u
        return u @ first + np.tanh(3 * moved) @ second

    with pytest.raises(RecoveryRefused):
        extract_on_sphere(Oracle(function, DIM), EPS, rng)


def test_heads_that_see_all_tokens_are_extracted_behind_a_norm(rng, seed):
    """A ViT block through its residual stream: every number of copies is a sequence of its own."""
    layer = gpt_layer(np.random.default_rng([seed, 3]), DIM, 2, causal=False)
    gain, shift, norm = rng.normal(1, 0.3, DIM), rng.normal(0, 0.2, DIM), Normalization(epsilon=1e-6)

    def ask(x):
        return x + evaluate_layer(layer, norm(x) * gain + shift)

    found = extract_on_sphere(Oracle(ask, DIM, OracleSettings(causal=False, residual=True)), 1e-16, rng)
    errors = compare_layers(projected(layer, gain, shift), found.layer)
    assert not found.layer.causal
    assert errors.worst < 1e-7


def test_the_widest_gap_decides_a_rank():
    assert gap_rank(np.array([1.0, 0.5, 0.1]), 1e-6) == 3
    assert gap_rank(np.array([1.0, 1e-3, 1e-9, 1e-10]), 1e-6) == 2
    assert gap_rank(np.zeros(3), 1e-6) == 0


def test_noise_leaves_fewer_digits_and_no_false_layer(rng):
    block = Block(rng)

    def noisy(x):
        y = block(x)
        return y + 1e-9 * np.sqrt(np.mean(y**2)) * rng.standard_normal(y.shape)

    for left in range(TRIES)[::-1]:
        try:
            found = extract_on_sphere(Oracle(noisy, DIM), 1e-9, rng)
            break
        except RecoveryRefused:
            if not left:
                raise
    x = rng.standard_normal((5, 6, DIM))
    assert np.mean((found(x) - block(x)) ** 2) < 1e-6 * np.mean(block(x) ** 2)
