"""Servers of a vocabulary: layers come back from rows of a table, tables that do not suffice are refused before."""

import numpy as np
import pytest

import manyheads as mh
from manyheads.errors import UsageError
from manyheads.recovery import ExtractionOptions, ServerLimits, compare_layers, evaluate_layer, gpt_layer
from manyheads.recovery.oracle.oracle import Oracle, OracleSettings
from manyheads.recovery.queries.gates.table_pairs import TablePairs, find_logits, find_pair_heads, order_triangle
from manyheads.recovery.queries.values.output_spaces import Sums
from manyheads.recovery.refusals import LimitError, RecoveryRefused


def extract(layer, table, function=None, **settings):
    limits = ServerLimits(vocabulary=table, **settings)
    served = limits.serve(function or (lambda x: evaluate_layer(layer, x)))
    return mh.extract_layer(served, layer.dim, options=ExtractionOptions(limits=limits, verify=60))


def pairs_of(layer, table):
    oracle = Oracle(lambda x: evaluate_layer(layer, x), layer.dim, OracleSettings())
    return TablePairs(oracle, Sums(layer.projection.sum(0), layer.bias), table, 1e-16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_a_layer_comes_back_from_the_tokens_of_a_table(rng, heads, causal):
    """The server raises at the first token that is no row; Gaussian tokens are answered too, by linearity."""
    layer = gpt_layer(rng, 12, heads, causal=causal)
    table = 0.7 * rng.normal(size=(60, 12)) + 0.1
    found = extract(layer, table)
    assert found.method == "vocabulary"
    assert compare_layers(layer, found.layer).worst < 1e-6
    assert found.layer.causal == causal
    assert "vocabulary" in found.certificate.distribution
    x = rng.normal(size=(5, 7, 12))
    np.testing.assert_allclose(evaluate_layer(found.layer, x), evaluate_layer(layer, x), rtol=0, atol=1e-6)


def test_short_sequences_of_the_last_row(rng):
    layer = gpt_layer(rng, 10, 2)
    found = extract(layer, 0.7 * rng.normal(size=(60, 10)), max_length=16, last_row=True, min_length=2)
    assert compare_layers(layer, found.layer).worst < 1e-6


def test_logits_of_a_pair_are_found_where_units_lie_in_the_span_of_the_answers(rng):
    """Both of every head: of the row at the one token, and of the row at the other."""
    layer, table = gpt_layer(rng, 40, 8), rng.normal(size=(2, 40))
    pairs = pairs_of(layer, table)
    a, b = table
    moved = (layer.theta @ (a - b)).T  # (d, m)
    bias = layer.key_bias @ (a - b)
    exact = np.stack([b @ moved + bias, -(a @ moved) - bias], axis=1)
    found = find_logits(pairs.respond(a[None], b[None])[0], 8, pairs.design(None))
    distance = np.abs(found[:, None] - exact[None]).max(-1)
    assert sorted(distance.argmin(1)) == list(range(8))
    assert distance.min(1).max() < 1e-4
    assert find_logits(pairs.respond(a[None], b[None])[0] * 0 + 1, 8, pairs.design(None)) is None


def test_heads_of_a_pair_are_those_of_the_layer(rng):
    layer, table = gpt_layer(rng, 12, 3), rng.normal(size=(3, 12))
    pairs = pairs_of(layer, table)
    parts = []
    for near, own in ((0, 1), (1, 2), (0, 2)):
        answers = pairs.respond(table[[near]], table[[own]])[0]
        found = find_pair_heads(pairs, answers)
        exact = (table[near] - table[own]) @ layer.projection
        distance = np.linalg.norm(found.values[:, None] - exact[None], axis=-1)
        assert sorted(distance.argmin(1)) == [0, 1, 2]
        assert distance.min(1).max() < 1e-6
        parts.append(found.values)
    # The triangle puts heads of all three pairs in one order.
    second, third = order_triangle(parts[0], parts[1][[2, 0, 1]], parts[2][[1, 2, 0]])
    np.testing.assert_allclose(parts[0] + second, third, rtol=0, atol=1e-5)
    assert order_triangle(parts[0], second, 2 * third) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: np.c_[table[:, :-1], np.full(len(table), 2.0)], "span 9 of 10"),
        (lambda table: table[:, :4] @ np.ones((4, 10)) + 0 * table, "span 1 of 10"),
        (lambda table: table[:10], "span 9 of 10"),
        (lambda table: table[:16], "28 are needed"),
    ],
)
def test_tables_that_do_not_suffice_are_refused_before_anything_is_asked(rng, change, message):
    """Also one that spans the space, and not by differences: a constant column hides a direction."""
    table = change(rng.normal(size=(60, 10)))

    def never(x):
        raise AssertionError

    with pytest.raises(LimitError, match=message):
        extract(gpt_layer(rng, 10, 2), table, never)


def test_two_layers_agree_on_a_table_whose_differences_do_not_span(rng):
    """The condition is necessary: what is constant on the table moves between Theta, beta and c unseen."""
    layer = gpt_layer(rng, 6, 2)
    table = rng.normal(size=(20, 6))
    table[:, -1] = 2.0
    theta, beta = layer.theta.copy(), layer.key_bias.copy()
    change = rng.normal(size=(2, 6))
    theta[:, -1] += change  # the last coordinate of every query is 2
    beta -= 2.0 * change
    other = type(layer)(theta, layer.projection, beta, layer.bias, causal=True)
    x = table[rng.integers(20, size=(8, 5))]
    np.testing.assert_allclose(evaluate_layer(other, x), evaluate_layer(layer, x), rtol=0, atol=1e-12)
    free = rng.normal(size=(8, 5, 6))
    assert np.abs(evaluate_layer(other, free) - evaluate_layer(layer, free)).max() > 0.01


def test_an_mlp_on_tokens_of_a_table_is_refused(rng):
    gate = rng.normal(size=(10, 10))
    with pytest.raises(RecoveryRefused, match="affine"):
        extract(gpt_layer(rng, 10, 2), rng.normal(size=(60, 10)), lambda x: np.tanh(x @ gate))


def test_what_asks_free_vectors_is_refused(rng):
    table = rng.normal(size=(60, 10))
    limits = ServerLimits(vocabulary=table)
    layer = gpt_layer(rng, 10, 2)
    with pytest.raises(LimitError, match="no rows of the vocabulary"):
        mh.extract_layer(
            lambda x: evaluate_layer(layer, x), 10, method="subspaces", options=ExtractionOptions(limits=limits)
        )
    with pytest.raises(UsageError, match="expected embeddings"):
        mh.extract_layer(lambda x: x, 9, options=ExtractionOptions(limits=limits))


def test_answers_of_a_vocabulary_are_stored_and_not_asked_again(tmp_path, rng):
    layer, table = gpt_layer(rng, 8, 2), 0.7 * rng.normal(size=(40, 8))
    limits = ServerLimits(vocabulary=table, max_length=24)
    options = ExtractionOptions(limits=limits, verify=40, store=tmp_path)
    served = limits.serve(lambda x: evaluate_layer(layer, x))
    first, again = (mh.extract_layer(served, 8, options=options) for _ in range(2))
    assert np.array_equal(first.layer.theta, again.layer.theta)
    assert again.total.stored > 0.9 * again.total.calls - 10
