"""Passive learning: what it recovers, how many heads it finds, what it refuses, and what its certificate says."""

import re

import numpy as np
import pytest

import manyheads as mh
from manyheads.attention import AttentionLayer
from manyheads.errors import ShapeError, UsageError
from manyheads.recovery import (
    LearningOptions,
    compare_layers,
    evaluate_layer,
    learn_layer,
    planted_layer,
    sequences,
)
from manyheads.recovery.examples import learning
from manyheads.recovery.examples.head_count import eliminate_heads
from manyheads.recovery.examples.holdout import drift_of_errors, error_of_noise, note_undetermined
from manyheads.recovery.examples.student import (
    StudentSettings,
    draw_sample,
    draw_start,
    fit_student,
    free_numbers,
    search,
)
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings, descend
from manyheads.recovery.fit.variable_projection import Examples, Form, Tangent
from manyheads.recovery.layers.evaluation import relative_error
from manyheads.recovery.planted.violations import deformed_layer
from manyheads.recovery.refusals import NoFit
from manyheads.recovery.result.results import StageLog

FORM = {"key_bias": True, "bias": True, "causal": True}


def problem(rng, *, count=600, length=3, dim=5, heads=2, **form):
    layer = planted_layer(rng, dim, heads, **form)
    x = sequences(rng, count, length, dim, distribution="gaussian")
    return layer, x, np.asarray(layer(x))


def largest(errors):
    return max(errors.theta, errors.projection, errors.key_bias, errors.bias)


@pytest.mark.parametrize("form", [{}, FORM], ids=["plain", "biases, causal"])
def test_layer_and_number_of_heads_are_found_exactly(rng, seed, form):
    layer, x, y = problem(rng, **form)
    found = mh.learn_layer(x, y, seed=seed, options=LearningOptions(**form))
    assert found.heads == 2
    assert found.method == "student"
    assert largest(compare_layers(layer, found.layer)) < 1e-9
    assert found.certificate.accepted
    assert found.certificate.largest_error < 1e-20
    assert found.stages[-1].name == "elimination, heads: 1"


@pytest.mark.parametrize(
    ("method", "noise"),
    [
        ("student", 0.0),
        pytest.param("student", 0.05, marks=pytest.mark.slow),
        pytest.param("six-stage", 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_number_that_is_too_large_is_reduced_to_the_layers_own(rng, seed, method, noise):
    layer = planted_layer(rng, 4, 2, scale=2.0)
    x = rng.choice([-1.0, 1.0], (3000, 2, 4))
    y = layer(x) + noise * rng.normal(size=x.shape)
    found = learn_layer(x, y, 3, method=method, seed=seed, options=LearningOptions(noise=noise))
    assert found.heads == 2
    assert largest(compare_layers(layer, found.layer)) < (0.1 if noise else 1e-9)
    assert found.notes[0].startswith("3 heads were reduced to 2")
    assert ("would not show" in " ".join(found.notes)) == bool(noise)
    last = found.stages[-1]
    assert last.name == "elimination, heads: 1"
    assert last.figures["told_apart"]
    assert last.figures["held_out_error"] > 0.01


@pytest.mark.parametrize(
    ("noise", "share", "kept"),
    [(0.0, 1e-5, True), (0.05, 0.1, True), pytest.param(0.05, 1e-3, False, marks=pytest.mark.slow)],
)
def test_a_weak_head_is_kept_where_labels_show_it(rng, noise, share, kept):
    """The refined error of the smaller layer is that of the head; noise of .05 hides one of 1e-3."""
    layer, x, _ = problem(rng, count=3000, heads=3, dim=4)
    weak = AttentionLayer(layer.theta, np.array([1, 1, share])[:, None, None] * np.asarray(layer.projection))
    y = evaluate_layer(weak, x) + noise * rng.normal(size=x.shape)
    parts = Examples(x[:2000], y[:2000]), Examples(x[2000:], y[2000:])
    fit = descend(Tangent.at(parts[0], np.asarray(weak.theta, np.float64)), GaussNewtonSettings())
    log = StageLog()
    found = eliminate_heads(fit.layer, *parts, log, GaussNewtonSettings(steps=20, inner=100))
    assert found.layer.heads == (3 if kept else 2)
    if noise:  # three standard errors of the sum of squares of normal numbers of variance noise^2
        expected = 3 * noise**2 * np.sqrt(2 * y[2000:].size) / np.sum((y[2000:] - y[2000:].mean((0, 1))) ** 2)
        assert found.unseen == pytest.approx(expected, rel=0.25)
    if kept:
        assert log.stages[-1].figures["held_out_error"] > found.error + (0 if noise else 1e-14)


def test_signs_beside_a_head_of_constant_logits_are_said_to_be_open(rng):
    """With the sign of the other head changed, and W of the constant one, the labels of two tokens stay."""
    layer, x, _ = problem(rng, dim=4, length=2)
    theta, w = (np.asarray(each, np.float64) for each in (layer.theta, layer.projection))
    flat = AttentionLayer(np.stack([theta[0], 0 * theta[0]]), w)
    turned = AttentionLayer(np.stack([-theta[0], 0 * theta[0]]), np.stack([-w[0], w[1] + 2 * w[0]]))
    opposite = AttentionLayer(np.stack([theta[0], -theta[0]]), w)
    np.testing.assert_allclose(evaluate_layer(flat, x), evaluate_layer(turned, x), rtol=0, atol=1e-12)
    for each, said in ((flat, "has constant logits"), (opposite, "have opposite Theta"), (layer, "")):
        examples = Examples(x, evaluate_layer(each, x))
        notes = [note for note in note_undetermined(each, examples, examples) if "leave signs open" in note]
        assert len(notes) == bool(said)
        assert said in "".join(notes)


def test_a_head_below_the_tolerance_is_named_as_one_that_would_not_show(rng, seed):
    layer, x, _ = problem(rng, heads=2, dim=4)
    share = np.array([1, 1e-6])[:, None, None]
    weak = AttentionLayer(layer.theta, share * np.asarray(layer.projection))
    found = learn_layer(x, evaluate_layer(weak, x), seed=seed)
    assert found.heads == 2 or any("would not show" in note for note in found.notes)


def test_the_same_seed_gives_the_same_numbers_whatever_the_shards(rng):
    _, x, y = problem(rng)
    once = learn_layer(x, y, 2, seed=5)
    again = learn_layer(iter([(x[:200], y[:200]), lambda: (x[200:], y[200:])]), heads=2, seed=5)
    np.testing.assert_array_equal(once.layer.theta, again.layer.theta)
    other = learn_layer(x, y, 2, seed=6)
    assert other.stages[0].figures["evaluations"] != once.stages[0].figures["evaluations"] or (
        not np.array_equal(other.layer.theta, once.layer.theta)
    )


def test_single_precision_is_promoted_and_bears_its_rounding(rng):
    layer, x, _ = problem(rng)
    x = x.astype(np.float32)
    found = learn_layer(x, np.asarray(layer(x.astype(np.float64))).astype(np.float32), 2)
    assert found.layer.theta.dtype == np.float64
    assert 1e-10 < largest(compare_layers(layer, found.layer)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.1, "estimate"])
def test_noisy_labels_give_the_heads_and_an_honest_certificate(rng, seed, noise):
    _, x, y = problem(rng, count=700, dim=3)
    noisy = y + 0.1 * rng.normal(size=y.shape)
    few = StudentSettings(restarts=2, evaluations=100, refinement=GaussNewtonSettings(steps=8, inner=30))
    options = LearningOptions(noise=noise, most_heads=3, student=few)
    found = learn_layer(x, noisy, seed=seed, options=options)
    assert found.heads == 2
    share = 0.01 / np.mean(noisy**2)
    # the median of chi^2_9 / 9 is 0.927; of 70 of them its standard error is 7%
    assert found.certificate.median_error == pytest.approx(0.927 * share, rel=0.35)
    assert found.certificate.tolerance < np.inf
    assert "noise in them counted" in str(found.certificate)
    clean = np.mean((np.asarray(found.layer(x)) - y) ** 2) / np.mean(y**2)
    assert clean < 0.05 * share * np.mean(noisy**2) / np.mean(y**2)  # p / n = 36 / 5000


def test_a_mean_that_is_larger_on_unseen_sequences_is_refused(rng, monkeypatch):
    """The held-out examples chose; what they chose must hold of others, though no single sequence is bounded."""
    _, x, y = problem(rng, count=400, dim=3, heads=1)
    noisy = y + 0.1 * rng.normal(size=y.shape)
    few = StudentSettings(restarts=1, evaluations=60, refinement=GaussNewtonSettings(steps=5, inner=20))
    split = learning._split

    def spoiled(*arguments):
        train, held_out, unseen = split(*arguments)
        return train, held_out, Examples(unseen.x, unseen.y + 0.3 * rng.normal(size=unseen.y.shape))

    for noise, words in ((0.1, "larger than the tolerance"), ("estimate", "standard errors")):
        options = LearningOptions(noise=noise, most_heads=2, student=few)
        assert learn_layer(x, noisy, 1, options=options).heads == 1
        with monkeypatch.context() as patch:
            patch.setattr(learning, "_split", spoiled)
            with pytest.raises(NoFit, match=words) as refusal:
                learn_layer(x, noisy, 1, options=options)
        assert refusal.value.result.certificate.sequences == 40


def test_noise_that_nobody_mentioned_is_refused_with_its_size(rng):
    _, x, y = problem(rng, heads=1)
    with pytest.raises(NoFit, match=r"say noise= \(up to ") as refusal:
        learn_layer(x, y + 0.1 * rng.normal(size=y.shape), 1, options=LearningOptions(student=StudentSettings(1)))
    said = float(re.search(r"up to ([\d.]+)", str(refusal.value))[1])
    assert said == pytest.approx(0.1, rel=0.1)
    assert refusal.value.result.heads == 1
    assert refusal.value.measured > refusal.value.threshold


def test_another_function_is_refused(rng):
    x = sequences(rng, 300, 3, 4)
    few = StudentSettings(restarts=1, evaluations=60, refinement=GaussNewtonSettings(steps=5, inner=30))
    options = LearningOptions(most_heads=2, student=few)
    with pytest.raises(NoFit, match="1 to 2 heads"):
        learn_layer(x, np.sin(3 * x @ rng.normal(size=(4, 4))), options=options)
    with pytest.raises(NoFit):
        learn_layer(x, rng.normal(size=x.shape), options=LearningOptions(noise="estimate", most_heads=2, student=few))


def test_six_stages_take_shards_and_give_the_same_kind_of_certificate(rng, seed):
    """The last shard is smaller than what is held out."""
    layer, x, y = problem(rng, count=2500, length=2, dim=3, heads=1)
    shards = iter([(x[:2400], y[:2400]), lambda: (x[2400:], y[2400:])])
    found = learn_layer(shards, method="six-stage", seed=seed, options=LearningOptions(most_heads=1))
    assert (found.heads, found.method) == (1, "six-stage")
    assert largest(compare_layers(layer, found.layer)) < 1e-9
    assert found.certificate.sequences == 250
    assert found.certificate.tolerance == 1e-6


@pytest.mark.parametrize("option", ["causal", "bias", "key_bias"])
def test_the_six_stages_refuse_what_they_do_not_know_before_they_load(option):
    with pytest.raises(UsageError, match=f"^{option}: the six stages"):
        learn_layer([pytest.fail], method="six-stage", options=LearningOptions(**{option: True}))


def test_the_tolerance_for_noise_is_met_by_the_truth_and_not_by_less(rng):
    layer, x, y = problem(rng)
    noisy = Examples(x, y + 0.1 * rng.normal(size=y.shape))
    allowed = error_of_noise(0.1, noisy, 2, noisy)
    left = relative_error(layer, noisy)
    assert left < allowed < left * (1 + 100 / y.size) * (1 + 12 * (2 / y.size) ** 0.5)


def test_what_two_tokens_leave_open_is_noted(rng):
    """Heads whose projections sum to zero are turned: the function is the same, and the note names them."""
    layer = deformed_layer(rng, "cancelled", 5, 3)
    pair = type(layer)(layer.theta, np.stack([layer.projection[0], layer.projection[1], -layer.projection[0]]))
    turned = type(pair)(pair.theta * [[[-1]], [[1]], [[-1]]], pair.projection * [[[-1]], [[1]], [[-1]]])
    x = sequences(rng, 80, 2, 5, distribution="gaussian")
    np.testing.assert_allclose(evaluate_layer(turned, x), evaluate_layer(pair, x), atol=1e-12)
    for one, heads in ((layer, "0, 1, 2"), (pair, "0, 2")):
        examples = Examples(x, evaluate_layer(one, x))
        (note,) = note_undetermined(one, examples, examples)
        assert f"heads {heads} may" in note
        longer = sequences(rng, 80, 3, 5)
        assert note_undetermined(one, *[Examples(longer, evaluate_layer(one, longer))] * 2) == ()
    ordinary = planted_layer(rng, 5, 2)
    examples = Examples(x, evaluate_layer(ordinary, x))
    assert note_undetermined(ordinary, examples, examples) == ()
    flat = x * [1, 1, 1, 1, 0]
    (note,) = note_undetermined(ordinary, *[Examples(flat, evaluate_layer(ordinary, flat))] * 2)
    assert "4 of 5 dimensions" in note


def test_a_sum_that_noise_hides_is_noted_and_one_that_shows_is_not(rng):
    layer = deformed_layer(rng, "cancelled", 4, 2)
    x = sequences(rng, 500, 2, 4, distribution="gaussian")
    for shift, open_ in ((1e-3, True), (1.0, False)):
        one = type(layer)(layer.theta, layer.projection + shift * np.eye(4))
        examples = Examples(x, evaluate_layer(one, x) + 0.1 * rng.normal(size=x.shape))
        assert bool(note_undetermined(one, examples, examples)) is open_


def test_the_drift_is_in_standard_errors(rng):
    layer, x, y = problem(rng, count=2000)
    noisy = y + 0.1 * rng.normal(size=y.shape)
    same, other = Examples(x[:1000], noisy[:1000]), Examples(x[1000:], noisy[1000:])
    assert abs(drift_of_errors(layer, same, other)) < 5
    worse = Examples(x[1000:], y[1000:] + 1.2 * (noisy - y)[1000:])
    expected = 0.44 / (2 / 15000 * (1 + 1.44**2)) ** 0.5
    assert drift_of_errors(layer, same, worse) == pytest.approx(expected, rel=0.3)
    exact = Examples(x[:50], y[:50])
    assert drift_of_errors(layer, exact, exact) == 0.0


def test_searches_end_by_counts(rng):
    _, x, y = problem(rng)
    examples = Examples(x, y)
    settings = StudentSettings(evaluations=3)
    here, used = search(examples, 2, rng, until=0.0, settings=settings)
    assert used <= 5  # the last line search may finish
    assert here.loss < 1
    fit = fit_student(
        examples, examples, 2, rng, wanted=1e-20, settings=StudentSettings(restarts=2, evaluations=1, reach=1e-9)
    )
    assert (fit.restarts, fit.products, fit.converged) == (2, 0, False)


def test_starts_and_samples(rng):
    layer, x, y = problem(rng, count=2000, **FORM)
    examples = Examples(10 * x, y, Form(**FORM))
    theta = draw_start(examples, 2, rng)
    logits = np.einsum("nd,de,ne->n", 10 * x[:, 0], theta[0, :5], 10 * x[:, 1])
    assert logits.std() == pytest.approx(0.5, rel=0.6)  # 25 entries decide its size: sqrt(2/25) is one deviation, 0.28
    assert free_numbers(examples, 2) == sum(
        np.size(part) for part in (layer.theta, layer.projection, layer.key_bias, layer.bias)
    )
    assert len(draw_sample(examples, 2, 6.0, rng)) == int(np.ceil(6 * 115 / 15))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x, y: ((x[0], y[0]), {}), ShapeError, "one shape"),
        (lambda x, y: ((x, np.where(x == x[3, 0, 1], np.nan, y)), {}), UsageError, r"NaN.*\(3, 0, 1\)"),
        (lambda x, y: ((x, 0 * y), {}), UsageError, "do not depend"),
        (lambda x, y: ((x,), {}), UsageError, "x without y"),
        (lambda x, y: (([],), {}), UsageError, "no shard"),
        (lambda x, y: (([(x, y), (x[:, :2], y[:, :2])],), {}), UsageError, "not of one kind"),
        (lambda x, y: ((x[:30], y[:30], 9), {}), UsageError, "give 77 sequences"),
        (lambda x, y: ((x[:3], y[:3]), {}), UsageError, "too few to hold out"),
        (lambda x, y: ((x, y, 0), {}), UsageError, "heads=0"),
        (lambda x, y: ((x, y, 2.0), {}), UsageError, r"heads=2\.0"),
        (lambda x, y: ((x, y, True), {}), UsageError, "heads=True"),
        (lambda x, y: ((x, y), {"seed": -1}), UsageError, "seed=-1"),
        (lambda x, y: ((x, y), {"options": {"noise": 1}}), UsageError, "LearningOptions"),
        (lambda x, y: ((x[:, :1], y[:, :1]), {}), UsageError, "one token"),
        (lambda x, y: ((x * 1e160, y), {}), UsageError, r"x holds .*1e\+75"),
        (lambda x, y: ((x, y * 1e-170), {}), UsageError, "y holds .*1e-75"),
        (lambda x, y: (([x[0].tolist(), [[1.0]]], y[:2]), {}), ShapeError, "no array"),
        (lambda x, y: ((x + 0j, y), {}), ShapeError, "complex"),
        (lambda x, y: ((None,), {}), UsageError, "NoneType"),
        (lambda x, y: (([(x, y, y)],), {}), UsageError, "tuple of 3"),
        (lambda x, y: (([(x, y), lambda: None],), {"method": "six-stage"}), UsageError, "shard 1 is a NoneType"),
        (lambda x, y: (([(x, y), (x, y[1:])],), {"method": "six-stage"}), ShapeError, "shard 1 of shapes"),
        (lambda x, y: ((x, y, 26), {"method": "six-stage"}), UsageError, "25 at most"),
        (lambda x, y: ((x, y), {"method": "stages"}), UsageError, "student, six-stage"),
    ],
)
def test_bad_input_is_refused(rng, change, error, words):
    _, x, y = problem(rng)
    arguments, named = change(x, y)
    with pytest.raises(error, match=words):
        learn_layer(*arguments, **named)


@pytest.mark.parametrize("method", ["student", "six-stage"])
def test_a_shard_that_raises_is_named(rng, method):
    def unreadable():
        raise OSError("no such disk")

    _, x, y = problem(rng, count=20)
    with pytest.raises(OSError, match="no such disk") as raised:
        learn_layer([(x, y), unreadable], method=method)
    assert "shard 1" in raised.value.__notes__[0]
    whole = learn_layer(lambda: (x, y), heads=1, options=LearningOptions(tolerance=np.inf))
    assert whole.certificate.sequences == 2


@pytest.mark.parametrize(
    "options",
    [{"noise": -1.0}, {"noise": "some"}, {"tolerance": 0.0}, {"held_out": 0.5}, {"most_heads": 0}, {"confidence": 1.0}],
)
def test_bad_options_are_refused(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        LearningOptions(**options)
    with pytest.raises(UsageError, match="labels"):
        StudentSettings(labels=1.0)
