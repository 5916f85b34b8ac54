import itertools
from collections import Counter
from fractions import Fraction

import jax
import numpy as np
import pytest
from scipy import stats

from manyheads.data.recall import Recall, RecallSource, order_blind_ceiling
from manyheads.errors import UsageError


@pytest.mark.parametrize(("candidates", "symbols"), [(1, 1), (1, 5), (5, 1), (2, 2), (3, 4), (7, 2), (6, 3), (4, 6)])
def test_ceiling_equals_enumeration_of_all_sequences(candidates, symbols):
    words = itertools.product(range(symbols), repeat=candidates)
    most = sum(max(Counter(word).values()) for word in words)
    assert order_blind_ceiling(candidates, symbols) == Fraction(most, symbols**candidates * candidates)


@pytest.mark.parametrize(("length", "symbols"), [(2, 3), (4, 3), (5, 2)])
def test_ceiling_is_the_best_of_all_functions_of_the_counts(length, symbols):
    """Enumerate the joint law of (multiset, answer): no function of the multiset does better than its largest atom."""
    joint = Counter()
    for place in range(length - 1):
        for word in itertools.product(range(symbols), repeat=length - 1):
            sequence = [*word[:place], symbols, *word[place:]]
            joint[tuple(sorted(sequence)), sequence[place + 1]] += 1
    best = {}
    for (multiset, _), count in joint.items():
        best[multiset] = max(best.get(multiset, 0), count)
    assert Recall(length, symbols).ceiling == Fraction(sum(best.values()), sum(joint.values()))


@pytest.mark.parametrize(("candidates", "symbols"), [(7, 16), (31, 16), (255, 16), (40, 3)])
def test_ceiling_agrees_with_simulation(rng, candidates, symbols):
    # Five standard errors: false alarm 6e-7 a case.
    largest = rng.multinomial(candidates, np.full(symbols, 1 / symbols), size=20_000).max(1) / candidates
    error = largest.std() / np.sqrt(largest.size)
    assert abs(largest.mean() - float(order_blind_ceiling(candidates, symbols))) < 5 * error


def test_ceiling_known_values():
    assert order_blind_ceiling(7, 16) == Recall(8).ceiling
    assert float(Recall(8).ceiling) == pytest.approx(0.2721, abs=5e-5)
    assert float(Recall(32).ceiling) == pytest.approx(0.1525, abs=5e-5)


def test_batches_follow_the_definition(seed):
    task = Recall(length=9, symbols=5)
    tokens, answers, lags = map(np.asarray, task.draw(jax.random.key(seed), 4000))
    rows, places = np.nonzero(tokens == 5)
    assert np.array_equal(rows, np.arange(4000))  # one marker each
    assert np.array_equal(tokens[rows, places + 1], answers)
    assert np.array_equal(lags, 9 - 1 - (places + 1))
    # Chi-square tests at 1e-5 each.
    assert stats.chisquare(np.bincount(places, minlength=8)).pvalue > 1e-5
    assert stats.chisquare(np.bincount(tokens[tokens < 5], minlength=5)).pvalue > 1e-5


def test_best_blind_guess_reaches_the_ceiling_on_drawn_batches(seed):
    task = Recall(length=8, symbols=16)
    tokens, answers, _ = map(np.asarray, task.draw(jax.random.key(seed), 20_000))
    counts = (tokens[:, :, None] == np.arange(16)).sum(1)
    right = (counts.argmax(1) == answers).mean()
    ceiling = float(task.ceiling)
    assert abs(right - ceiling) < 5 * np.sqrt(ceiling * (1 - ceiling) / 20_000)  # false alarm 6e-7


def test_sources_are_equal_when_their_tasks_are(seed):
    assert RecallSource(Recall(8), 4) == RecallSource(Recall(8), 4)
    batch = RecallSource(Recall(8), 4)(jax.random.key(seed))
    assert np.array_equal(batch.tokens, Recall(8).draw(jax.random.key(seed), 4).tokens)


def test_wrong_sizes_are_refused():
    for arguments in ((1, 4), (4, 1)):
        with pytest.raises(UsageError, match="at least 2"):
            Recall(*arguments)
    with pytest.raises(UsageError, match="at least 1"):
        order_blind_ceiling(0, 3)
