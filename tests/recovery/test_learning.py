"""Passive learning: what it recovers, how many heads it finds, what it refuses, and what its certificate says."""

import numpy as np
import pytest

import manyheads as mh
from manyheads.errors import ShapeError, UsageError
from manyheads.recovery import (
    LearningOptions,
    PolishSettings,
    StudentSettings,
    compare_layers,
    learn_layer,
    planted_layer,
    sequences,
)
from manyheads.recovery.learning import error_of_noise
from manyheads.recovery.refusals import NoFit
from manyheads.recovery.student import draw_sample, draw_start, fit_student, free_numbers, relative_error, search
from manyheads.recovery.tangents import Examples, Form

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
    assert [stage.name for stage in found.stages][-1] == "2 heads"


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


@pytest.mark.parametrize("noise", [0.1, "estimate"])
def test_noisy_labels_give_the_heads_and_an_honest_certificate(rng, seed, noise):
    _, x, y = problem(rng, count=1500, dim=4)
    noisy = y + 0.1 * rng.normal(size=y.shape)
    few = StudentSettings(restarts=2, polish=PolishSettings(steps=10, inner=40))
    options = LearningOptions(noise=noise, most_heads=3, student=few)
    found = learn_layer(x, noisy, seed=seed, options=options)
    assert found.heads == 2
    share = 0.01 / np.mean(noisy**2)
    # the median of chi^2_12 / 12 is 0.95; that of 150 of them lies within 15% but once in 10^4
    assert found.certificate.median_error == pytest.approx(0.95 * share, rel=0.2)
    clean = np.mean((np.asarray(found.layer(x)) - y) ** 2) / np.mean(y**2)
    assert clean < 0.05 * share * np.mean(noisy**2) / np.mean(y**2)


def test_noise_that_nobody_mentioned_is_refused_with_its_size(rng):
    _, x, y = problem(rng, heads=1)
    with pytest.raises(NoFit, match=r"say noise= \(up to 0\.1") as refusal:
        learn_layer(x, y + 0.1 * rng.normal(size=y.shape), 1, options=LearningOptions(student=StudentSettings(1)))
    assert refusal.value.result.heads == 1
    assert refusal.value.measured > refusal.value.threshold


def test_another_function_is_refused(rng):
    x = sequences(rng, 300, 3, 4)
    few = StudentSettings(restarts=1, evaluations=60, polish=PolishSettings(steps=5, inner=30))
    options = LearningOptions(most_heads=2, student=few)
    with pytest.raises(NoFit, match="1 to 2 heads"):
        learn_layer(x, np.sin(3 * x @ rng.normal(size=(4, 4))), options=options)
    with pytest.raises(NoFit):
        learn_layer(x, rng.normal(size=x.shape), options=LearningOptions(noise="estimate", most_heads=2, student=few))


def test_six_stages_take_shards_and_give_the_same_kind_of_certificate(rng, seed):
    layer, x, y = problem(rng, count=6000, length=2, dim=4)
    found = learn_layer([(x[:3000], y[:3000]), lambda: (x[3000:], y[3000:])], method="six-stage", seed=seed)
    assert (found.heads, found.method) == (2, "six-stage")
    assert largest(compare_layers(layer, found.layer)) < 1e-9
    assert found.certificate.sequences == 300
    with pytest.raises(UsageError, match="six stages"):
        learn_layer(x, y, method="six-stage", options=LearningOptions(causal=True))


def test_the_tolerance_for_noise_is_met_by_the_truth_and_not_by_less(rng):
    layer, x, y = problem(rng)
    noisy = Examples(x, y + 0.1 * rng.normal(size=y.shape))
    allowed = error_of_noise(0.1, noisy, 2, noisy)
    left = relative_error(layer, noisy)
    assert left < allowed < left * (1 + 100 / y.size) * (1 + 12 * (2 / y.size) ** 0.5)


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
        (lambda x, y: ((x, 0 * y), {}), UsageError, "zero"),
        (lambda x, y: ((x,), {}), UsageError, "x without y"),
        (lambda x, y: (([],), {}), UsageError, "no shard"),
        (lambda x, y: (([(x, y), (x[:, :2], y[:, :2])],), {}), UsageError, "not of one kind"),
        (lambda x, y: ((x[:30], y[:30], 9), {}), UsageError, "give 77 sequences"),
        (lambda x, y: ((x[:3], y[:3]), {}), UsageError, "too few to hold out"),
        (lambda x, y: ((x, y, 0), {}), UsageError, "heads=0"),
        (lambda x, y: ((x, y), {"method": "stages"}), UsageError, "student, six-stage"),
    ],
)
def test_bad_input_is_refused(rng, change, error, words):
    _, x, y = problem(rng)
    arguments, named = change(x, y)
    with pytest.raises(error, match=words):
        learn_layer(*arguments, **named)


@pytest.mark.parametrize(
    "options",
    [{"noise": -1.0}, {"noise": "some"}, {"tolerance": 0.0}, {"held_out": 0.5}, {"most_heads": 0}, {"confidence": 1.0}],
)
def test_bad_options_are_refused(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        LearningOptions(**options)
    with pytest.raises(UsageError, match="labels"):
        StudentSettings(labels=1.0)
