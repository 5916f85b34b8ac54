"""Norms of queries and keys, caps, windows, terms of position: extracted, saved, and refused where they are others."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from tests.recovery.score_layers import KINDS, planted_score_layer

from manyheads.errors import ShapeError, UsageError
from manyheads.recovery import ExtractionOptions, RecoveryRefused, extract_layer, load_layer, save_layer
from manyheads.recovery.layers.evaluation import softmax
from manyheads.recovery.layers.matching import function_error
from manyheads.recovery.layers.scores import ScoreLayer
from manyheads.recovery.oracle.limits import ServerLimits
from manyheads.recovery.queries.scores.links import classify, fit_norm, relative_norms
from manyheads.recovery.refusals import FitError

DIM, HEADS = 16, 2
FEW = ExtractionOptions(scores=True, verify=60)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_extracted_and_named(kind, tmp_path):
    layer = planted_score_layer(np.random.default_rng(1), DIM, HEADS, kind)
    found = extract_layer(layer, DIM, seed=1, options=FEW)
    assert (found.heads, found.method) == (HEADS, "scores")
    assert found.layer.parts() == layer.parts() != []
    assert (found.layer.window, found.layer.cap is None) == (layer.window, layer.cap is None)
    for part in ("key_norm", "slopes", "sink", "value_bias"):
        assert (getattr(found.layer, part) is None) == (getattr(layer, part) is None)
    x = np.random.default_rng(2).standard_normal((8, 40, DIM))
    assert function_error(layer, found.layer, x) < 1e-7
    again = load_layer(save_layer(tmp_path / "layer.safetensors", found.layer))
    assert isinstance(again, ScoreLayer)
    np.testing.assert_array_equal(again(x), found.layer(x))


@pytest.mark.parametrize("kind", ["cap", "window", "ALiBi and biases", "buckets"])
def test_answers_in_single_precision(kind):
    layer = planted_score_layer(np.random.default_rng(1), DIM, HEADS, kind)
    found = extract_layer(lambda x: layer(x).astype(np.float32), DIM, seed=1, options=FEW)
    assert found.heads == HEADS
    assert found.layer.parts() == layer.parts()
    x = np.random.default_rng(2).standard_normal((8, 40, DIM))
    assert function_error(layer, found.layer, x) < 1e-6


def test_parts_are_found_up_to_what_the_function_determines():
    """The cap, slopes, and ratios of Theta to norms; a norm alone is free up to a factor."""
    rng = np.random.default_rng(0)
    capped = planted_score_layer(rng, DIM, HEADS, "cap")
    assert extract_layer(capped, DIM, options=FEW).layer.cap == pytest.approx(capped.cap, rel=1e-5)
    sloped = planted_score_layer(rng, DIM, HEADS, "ALiBi and biases")
    found = extract_layer(sloped, DIM, options=FEW).layer
    np.testing.assert_allclose(np.sort(found.slopes), np.sort(sloped.slopes), atol=1e-5)
    normed = planted_score_layer(rng, DIM, HEADS, "head norms")
    found = extract_layer(normed, DIM, options=FEW).layer
    apart = np.linalg.norm(normed.projection[:, None] - found.projection, axis=(2, 3))
    for head, own in enumerate(apart.argmin(1)):
        true, mine = normed.key_norm[head, :-1, :-1], found.key_norm[own, :-1, :-1]
        mine = mine * (np.trace(true) / np.trace(mine))
        assert np.linalg.norm(true - mine) < 1e-4 * np.linalg.norm(true)


@pytest.mark.parametrize("kind", ["sinks", "sinks, biases and window", "sinks and ALiBi"])
@pytest.mark.parametrize("seed", [0, 1])
def test_sinks_make_scores_known_whole(kind, seed):
    """The logit of the sink, biases of values, and the forms with what depends on the query alone."""
    layer = planted_score_layer(np.random.default_rng(seed), DIM, HEADS, kind)
    found = extract_layer(layer, DIM, seed=seed, options=FEW).layer
    order = np.linalg.norm(layer.projection[:, None] - found.projection, axis=(2, 3)).argmin(1)
    np.testing.assert_allclose(found.sink[order], layer.sink, atol=1e-6)
    for offset in (1, 2, 9):
        np.testing.assert_allclose(found.form(offset)[order], layer.form(offset), atol=1e-5)
    if "biases" in kind:
        np.testing.assert_allclose(found.value_bias[order], layer.value_bias, atol=1e-6)


@pytest.mark.parametrize(
    "logit", [lambda x: np.sin(3 * x[..., 0]), lambda x: np.arange(x.shape[1]) ** 0.5 + 0 * x[..., 0]]
)
def test_sinks_that_are_no_constants_are_refused(logit):
    """Negative controls: a sink that depends on the query by no form, and one that grows with the row."""
    base = planted_score_layer(np.random.default_rng(0), DIM, HEADS, "window")

    def strange(x):
        sinks = np.broadcast_to(logit(x)[None, :, :, None], (HEADS, *x.shape[:2], 1))
        weights = softmax(np.concatenate([ScoreLayer.logits(base, x), sinks], axis=-1))[..., :-1]
        return sum((weights[head] @ x) @ base.projection[head] for head in range(HEADS))

    with pytest.raises(RecoveryRefused):
        extract_layer(strange, DIM, options=ExtractionOptions(scores=True, tries=1, verify=60))


def test_a_function_of_single_tokens_is_no_layer_with_sinks(rng):
    inner = rng.standard_normal((2, DIM, DIM)) / DIM**0.5
    with pytest.raises(RecoveryRefused):
        extract_layer(lambda x: np.tanh(x @ inner[0]) @ inner[1], DIM, options=ExtractionOptions(scores=True, tries=1))


def test_small_scores_and_sharp_ones_behind_norms_are_extracted():
    """Untrained layers attend nearly evenly at tokens of length sqrt(d); trained norms do not let scores be small."""
    for kind in ("cap", "sinks"):
        base = planted_score_layer(np.random.default_rng(2), DIM, HEADS, kind)
        found = extract_layer(lambda x, base=base: base(0.05 * x), DIM, seed=2, options=FEW)
        assert (found.heads, len(found.tried)) == (HEADS, 1)
        assert found.certificate.largest_error < 1e-12
    for seed in (0, 1):
        base = planted_score_layer(np.random.default_rng(seed), DIM, HEADS, "head norms")
        sharp = dataclasses.replace(base, query_norm=base.query_norm / 10)
        found = extract_layer(sharp, DIM, seed=seed, options=FEW)
        assert (found.heads, len(found.tried)) == (HEADS, 1)
        assert found.certificate.largest_error < 1e-8


@pytest.mark.parametrize("kind", ["head norms", "ALiBi and biases", "sinks"])
def test_one_head_is_extracted(kind):
    layer = planted_score_layer(np.random.default_rng(0), 8, 1, kind)
    assert extract_layer(layer, 8, options=FEW).heads == 1


def test_rotations_that_see_later_tokens_are_refused():
    """Negative control of the layers that see later tokens: forms that differ at every offset."""
    base = planted_score_layer(np.random.default_rng(0), DIM, HEADS, "window")
    forms = [base.turns.form(t) for t in range(1, 41)]

    def both_ways(x):
        wide = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2)
        apart = np.abs(np.arange(x.shape[1])[:, None] - np.arange(x.shape[1]))
        y = 0.0
        for head in range(HEADS):
            turned = np.array([form[head] for form in forms])[apart]
            y = y + softmax(np.einsum("nrd,rjde,nje->nrj", wide, turned, wide)) @ x @ base.projection[head]
        return y

    short = ServerLimits(max_length=40)
    with pytest.raises(RecoveryRefused, match="causal layers alone"):
        extract_layer(both_ways, DIM, options=ExtractionOptions(scores=True, tries=1, verify=60, limits=short))


def test_a_long_window_shows_where_long_sequences_are_taken():
    layer = replace(planted_score_layer(np.random.default_rng(0), DIM, HEADS, "window"), window=200)
    limits = ServerLimits(max_length=260)
    found = extract_layer(layer, DIM, options=replace(FEW, limits=limits)).layer
    assert found.window == 200
    assert getattr(extract_layer(layer, DIM, options=FEW).layer, "window", None) is None  # nor do the sequences differ


def test_scores_of_another_kind_are_refused():
    """Negative controls: cubes of forms have no link, and a bump over distances is neither turn nor term."""
    rng = np.random.default_rng(0)
    base = planted_score_layer(rng, DIM, HEADS, "window")

    def cubed(x):
        scores = ScoreLayer.logits(base, x)
        seen = np.isfinite(scores)
        weights = softmax(np.where(seen, np.where(seen, scores, 0.0) ** 3, -np.inf))
        return sum((weights[head] @ x) @ base.projection[head] for head in range(HEADS))

    def swelling(x):
        length = x.shape[1]
        apart = np.arange(length)[:, None] - np.arange(length)
        factor = 1 + 0.5 * np.sin(np.maximum(apart, 0) ** 2)
        scores = np.where(apart >= 0, np.nan_to_num(ScoreLayer.logits(base, x), neginf=0.0) * factor, -np.inf)
        return sum((softmax(scores)[head] @ x) @ base.projection[head] for head in range(HEADS))

    for function in (cubed, swelling):
        with pytest.raises(RecoveryRefused):
            extract_layer(function, DIM, options=ExtractionOptions(scores=True, tries=1, verify=60))


def test_links_are_told_apart():
    scores = np.linspace(-3, 3, 40)[:, None]
    assert classify(scores, 2 * scores, 1e-15) == ("form", None)
    assert classify(scores, scores, 1e-15) == ("norm", None)
    kind, cap = classify(5 * np.tanh(scores / 5), 5 * np.tanh(2 * scores / 5), 1e-15)
    assert (kind, cap) == ("cap", pytest.approx(5))
    with pytest.raises(FitError, match="scores of another kind"):
        classify(scores**3, (2 * scores) ** 3, 1e-15)


def test_norms_follow_from_sums_of_keys(rng):
    theta, keys = rng.standard_normal((5, DIM)), rng.standard_normal((7, DIM))

    def scores(x):
        return (theta @ x.T / np.linalg.norm(x, axis=1))[:, :, None]

    ratio, rest = relative_norms(scores(keys[:1])[:, 0], scores(keys[1:]), scores(keys[1:] + keys[0]))
    np.testing.assert_allclose(ratio[:, 0], np.linalg.norm(keys[1:], axis=1) / np.linalg.norm(keys[0]))
    assert rest < 1e-12


def test_a_layer_says_what_does_not_fit():
    layer = planted_score_layer(np.random.default_rng(0), DIM, HEADS, "buckets")
    with pytest.raises(ShapeError, match="slopes of shape"):
        ScoreLayer(layer.forms, layer.projection, slopes=np.zeros(HEADS + 1))
    with pytest.raises(UsageError, match="position terms are known"):
        layer(np.zeros((1, 201, DIM)))


@pytest.mark.parametrize("count", [40, 400])
def test_the_misfit_of_a_norm_is_relative_and_of_one_token(rng, count):
    """Squares of norms that err by a share s leave s of one token, however many there are."""
    tokens, root = rng.normal(size=(count, 4)), rng.normal(size=(4, 4))
    squares = ((tokens @ root) ** 2).sum(1) + 0.5
    form, rest = fit_norm(tokens, np.sqrt(squares), np.eye(4))
    np.testing.assert_allclose(form[:4, :4], root @ root.T, rtol=0, atol=1e-10)
    assert form[4, 4] == pytest.approx(0.5)
    assert rest < 1e-12
    signs = rng.choice([-1.0, 1.0], count)
    _, rest = fit_norm(tokens, np.sqrt(squares / (1 + 0.01 * signs)), np.eye(4))
    assert rest == pytest.approx(0.01, rel=0.25)
