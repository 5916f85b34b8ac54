"""Diagnostics against enumeration, Monte Carlo, and layers whose figures are known."""

import itertools
import math

import numpy as np
import pytest

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery.planted import diagnostics
from manyheads.recovery.planted.diagnostics import assumptions, lattice_distance
from manyheads.recovery.planted.task import gpt_layer, planted_layer, sequences


@pytest.mark.parametrize("inputs", ["boolean", "gaussian"])
def test_the_deviation_of_logits_agrees_with_samples(rng, inputs):
    layer = planted_layer(rng, 12, 3, scale=1.5, key_bias=True)
    layer = AttentionLayer(layer.theta * np.array([1.0, 0.2, 3.0])[:, None, None], layer.projection, layer.key_bias)
    found = assumptions(layer, inputs)
    x = sequences(rng, 40_000, 2, 12, distribution=inputs)
    logits = layer.logits(x)[..., 0, 1]  # (n, m): the first token looks at the second
    sampled = np.asarray(logits).std(axis=0)
    # kurtosis below 12 for a bilinear form of normal vectors: five standard errors of a deviation are 4.2%
    assert found["smallest logits"].value == pytest.approx(sampled.min(), rel=0.045)
    assert found["largest logits"].value == pytest.approx(sampled.max(), rel=0.045)


def test_the_least_subset_sum_is_that_of_all_subsets_and_its_bound_lies_below(rng, monkeypatch):
    layer = planted_layer(rng, 3, 6)
    ratios = [
        np.linalg.norm(layer.projection[list(chosen)].sum(axis=0))
        / math.sqrt(np.sum(layer.projection[list(chosen)] ** 2))
        for size in range(1, 7)
        for chosen in itertools.combinations(range(6), size)
    ]
    exact = assumptions(layer)["least subset sum"].value
    assert exact == pytest.approx(min(ratios))
    assert exact <= assumptions(layer)["effective sum"].value
    monkeypatch.setattr(diagnostics, "ENUMERATED", 5)
    assert assumptions(layer)["least subset sum"].value <= exact


def test_where_a_subset_sums_to_zero_two_tokens_allow_two_layers(rng):
    layer = planted_layer(rng, 5, 3, key_bias=True)
    projection = layer.projection.copy()
    projection[2] = -projection[0]
    signs = np.array([-1.0, 1.0, -1.0])
    one = AttentionLayer(layer.theta, projection, layer.key_bias)
    other = AttentionLayer(
        layer.theta * signs[:, None, None], projection * signs[:, None, None], layer.key_bias * signs[:, None]
    )
    x = sequences(rng, 20, 3, 5, distribution="gaussian")
    np.testing.assert_allclose(one(x[:, :2]), other(x[:, :2]), atol=1e-12)
    assert np.abs(one(x) - other(x)).max() > 1e-3  # three tokens tell them apart
    found = assumptions(one, "gaussian")
    assert found["least subset sum"].value == pytest.approx(0, abs=1e-7)
    assert found["effective sum"].healthy


def test_figures_of_matrices_that_are_known():
    identity, unit = np.eye(4), np.zeros((4, 4))
    unit[1, 2] = 3.0
    found = assumptions(AttentionLayer(np.stack([identity, unit]), np.stack([identity, 2 * identity])))
    expected = {
        "coherence of attention": 0.0,
        "coherence of projections": 1.0,
        "stable rank of attention": 1.0,
        "stable rank of projections": 4.0,
        "diagonal share": 1.0,
        "trace share": 4.0,  # 16 / 4: of the operator norm 16, in units of the stable rank
        "column share": 1.0,
        "ratio of attention norms": 1.5,
        "ratio of projection norms": 2.0,
        "effective sum": 3 / math.sqrt(5),
        "least subset sum": 1.0,
        "smallest logits": 2.0,
        "largest logits": 3.0,
        "distance from lattices": 0.0,
    }
    assert {one.name: one.value for one in found} == pytest.approx(expected, abs=1e-12)
    assert len(str(found).splitlines()) == 1 + len(expected)
    assert "rank one" in str(found)


def test_lattices_are_found_through_noise_scale_and_size(rng):
    lattice = 0.37 * rng.integers(-5, 6, (12, 12))
    assert lattice_distance(lattice) < 1e-12
    noise = 0.05 * 0.37 * rng.standard_normal((12, 12))
    # distance = sqrt(12) * .05, a chi deviation of at most 30% at 144 entries, and less by the refined spacing
    assert 0.6 * math.sqrt(12) * 0.05 < lattice_distance(lattice + noise) < 1.3 * math.sqrt(12) * 0.05
    normal = rng.standard_normal((12, 12))
    assert lattice_distance(normal) > 0.5
    assert lattice_distance(normal * 1e-6) == pytest.approx(lattice_distance(normal))
    large = rng.integers(-5, 6, (100, 100)) / 3
    assert lattice_distance(large) < 1e-12
    assert lattice_distance(np.zeros((3, 3))) == 0


def test_gaussian_tokens_ask_for_no_lattice_and_no_rank(rng):
    found = assumptions(gpt_layer(rng, 12, 12), "gaussian")  # heads of rank one
    with pytest.raises(UsageError, match="there are"):
        found["distance from lattices"]
    assert found["stable rank of attention"].healthy


def test_dead_heads_have_figures_too(rng):
    layer = planted_layer(rng, 4, 2)
    dead = AttentionLayer(
        layer.theta * np.array([1.0, 0])[:, None, None], layer.projection * np.array([0, 1.0])[:, None, None]
    )
    found = assumptions(dead)
    assert found["ratio of attention norms"].value == math.inf
    assert found["least subset sum"].value == 0
    assert not found["smallest logits"].healthy


def test_bad_layers_and_inputs_are_refused(rng):
    layer = planted_layer(rng, 4, 2)
    with pytest.raises(UsageError, match="gaussian"):
        assumptions(layer, "uniform")
    with pytest.raises(UsageError, match="finite"):
        assumptions(AttentionLayer(layer.theta * np.nan, layer.projection))
