"""Margins of images, words as tokens, masked tokens, shared patterns: against direct computations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manyheads.data import TextWindows
from manyheads.data.characters import cut_words, read_words
from manyheads.errors import ShapeError, UsageError
from manyheads.theory.joma.systems.networks.label_order import class_mean_margins, labelled_digits
from manyheads.theory.joma.systems.networks.shared_patterns import bayes_accuracy, reached_leaves
from manyheads.theory.joma.systems.token_hierarchy import HierarchyShape
from manyheads.theory.joma.text.variants import LanguageWindows, read_tokens


def test_margins_are_those_of_means_that_leave_the_image_out(rng):
    images, labels = rng.normal(size=(12, 2, 3)), np.arange(12) % 3
    found = class_mean_margins(images, labels)
    for i in range(12):
        others = np.arange(12) != i
        distances = [((images[i] - images[(labels == c) & others].mean(0)) ** 2).sum() for c in range(3)]
        own = distances.pop(labels[i])
        np.testing.assert_allclose(found[i], min(distances) - own, rtol=1e-10)
    with pytest.raises(ShapeError, match="two or more each"):
        class_mean_margins(images[:4], np.array([0, 0, 1, 2]))


def test_shuffled_labels_are_the_same_labels_in_another_order():
    real, shuffled = (labelled_digits(100, kind)[1] for kind in (False, True))
    assert sorted(real) == sorted(shuffled)
    assert (real != shuffled).any()


def test_words_of_a_file_are_counted_and_rare_ones_share_a_token(tmp_path):
    text = tmp_path / "text"
    text.write_text("The cat, the dog. " * 30 + "once", encoding="utf-8")
    vocabulary, (training, validation) = read_words(text, 4)
    assert vocabulary == ("", "the", ",", ".")
    assert cut_words("The cat,") == ["the", "cat", ","]
    assert training[:6].tolist() == [1, 0, 2, 1, 0, 3]
    assert len(training) + len(validation) == 181
    size, shuffled = read_tokens("shuffled", text, 4)
    assert size == 4
    assert np.bincount(shuffled[0]).tolist() == np.bincount(training).tolist()
    with pytest.raises(UsageError, match="two tokens or more"):
        read_words(text, 1)


def test_masked_tokens_are_asked_for_and_no_others_are_hidden():
    batches = LanguageWindows(TextWindows(np.arange(200) % 7, 50, 20), mask_token=7)
    inputs, targets, asked = batches(jax.random.key(0))
    assert ((inputs == 7) == asked).all()
    assert (jnp.where(asked, targets, inputs) == targets).all()
    assert 0.1 < asked[:, 1:].mean() < 0.2
    assert (targets < 7).all()


def test_flat_labels_have_as_many_leaves_as_hierarchical_ones_at_other_places():
    shape = HierarchyShape((6, 8, 8), 2, 20)
    hierarchical, flat = (np.asarray(reached_leaves(shape, jax.random.key(1), flat)) for flat in (False, True))
    assert (hierarchical.sum(1) == flat.sum(1)).all()
    assert (hierarchical != flat).any()
    assert hierarchical.sum(1).max() <= shape.places


def test_bayes_rule_has_the_accuracy_of_an_enumeration(rng):
    sets, keep = np.array([[1, 1, 0], [0, 1, 1], [1, 1, 1]], bool), 0.6
    total = 0.0
    for seen in itertools.product([False, True], repeat=3):
        likely = [np.prod(np.where(each, np.where(seen, keep, 1 - keep), np.where(seen, 0.0, 1.0))) for each in sets]
        total += max(likely) / 3
    assert abs(bayes_accuracy(sets, keep, 60_000, rng) - total) < 0.01
