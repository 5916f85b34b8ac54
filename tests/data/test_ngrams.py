"""The n-gram yardstick against a dictionary that follows the definition word by word."""

from collections import Counter
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.data.ngrams import ngram_losses
from manyheads.errors import UsageError


def probability(train, vocabulary, history, token):
    """The recursion of the definition, with counters."""
    if history is None:
        return 1 / vocabulary
    shorter = probability(train, vocabulary, history[1:] if history else None, token)
    size = len(history)
    after = Counter(train[i + size] for i in range(len(train) - size) if tuple(train[i : i + size]) == history)
    if not after:
        return shorter
    return (after[token] + len(after) * shorter) / (sum(after.values()) + len(after))


tokens = st.lists(st.integers(0, 3), min_size=5, max_size=25)


@given(tokens, tokens, st.integers(0, 3))
def test_equals_the_definition(train, validation, context):
    pairs = [(tuple(validation[i : i + context]), validation[i + context]) for i in range(len(validation) - context)]
    expected = -sum(log(probability(train, 4, history, token)) for history, token in pairs) / len(pairs)
    got = ngram_losses(np.array(train), np.array(validation), 4, context).mean()
    assert got == pytest.approx(expected, rel=1e-12)


@given(tokens, st.integers(0, 2))
def test_the_reference_is_a_distribution(train, context):
    history = tuple(train[:context])
    assert sum(probability(train, 4, history, token) for token in range(4)) == pytest.approx(1)


def test_without_context_it_is_the_entropy_of_frequencies(rng):
    draws = rng.choice(3, size=200_000, p=[0.5, 0.3, 0.2])
    entropy = -(np.array([0.5, 0.3, 0.2]) * np.log([0.5, 0.3, 0.2])).sum()
    # Standard error of the mean of -log p over 200,000 draws is 0.0008: five of them, and the same for the fit.
    assert ngram_losses(draws, draws, 3, 0).mean() == pytest.approx(entropy, abs=0.008)


@pytest.mark.parametrize(
    ("train", "validation", "vocabulary", "context"),
    [([0], [0, 1, 0], 2, 1), ([0, 1], [2, 1], 2, 0), ([0, -1], [0, 1], 2, 0), ([0] * 80, [0] * 80, 1000, 60)],
)
def test_what_cannot_be_counted_is_refused(train, validation, vocabulary, context):
    with pytest.raises(UsageError):
        ngram_losses(np.array(train), np.array(validation), vocabulary, context)


@given(tokens, tokens, st.integers(0, 3))
def test_every_single_loss_is_that_of_its_token(train, validation, context):
    losses = ngram_losses(np.asarray(train), np.asarray(validation), 4, context)
    wanted = [
        -log(probability(train, 4, tuple(validation[i - context : i]), validation[i]))
        for i in range(context, len(validation))
    ]
    np.testing.assert_allclose(losses, wanted, rtol=1e-12)
