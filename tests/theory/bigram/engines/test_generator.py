import numpy as np
import pytest
from scipy import stats

from manyheads.errors import UsageError
from manyheads.theory.bigram.engines.generator import draw_step_batch, mix, pick, sample_keys, scramble, thresholds
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task

RARELY = 1e-5  # chance of a false alarm of each statistical test below


def words(seed, step=0, samples=1, length=4096):
    first, second = sample_keys(scramble(seed), np.array([step], np.uint32), np.arange(samples, dtype=np.uint32))
    return mix(np.arange(length, dtype=np.uint32), first[:, None], second[:, None])  # (samples, length)


def test_every_bit_is_even_and_follows_no_other(seed):
    drawn = words(seed, samples=32)  # 131072 words
    ones = np.stack([(drawn >> np.uint32(bit)) & np.uint32(1) for bit in range(32)]).reshape(32, -1) * 2.0 - 1
    count = ones.shape[1]
    bound = stats.norm.isf(RARELY / (2 * 32)) * count**0.5
    assert np.abs(ones.sum(1)).max() < bound
    for lag in (1, 2, 7):
        assert np.abs((ones[:, lag:] * ones[:, :-lag]).sum(1)).max() < bound
    together = np.abs(ones @ ones.T - count * np.eye(32)).max()
    assert together < stats.norm.isf(RARELY / (2 * 496)) * count**0.5


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_pairs_of_neighbours_fill_the_square(seed, shift):
    drawn = (words([seed, 1], samples=32) >> np.uint32(shift)) & np.uint32(0xF)
    for pairs in (drawn[:, 1:] * np.uint32(16) + drawn[:, :-1], drawn[1:] * np.uint32(16) + drawn[:-1]):
        counts = np.bincount(pairs.ravel(), minlength=256)
        assert stats.chisquare(counts).pvalue > RARELY


def test_streams_of_seeds_steps_and_samples_are_no_shifts_of_one_another(seed):
    streams = [words(seed + offset, step=step)[0] for offset in range(12) for step in range(4)]
    streams += list(words(seed, step=99, samples=16))
    assert len(streams) == 64
    everything = np.concatenate(streams)
    shared = len(everything) - len(np.unique(everything))
    expected = len(everything) ** 2 / 2.0**33  # 8 pairs that agree by chance; one shift by less than 4000 adds hundreds
    assert shared < stats.poisson.isf(RARELY, expected)


def test_outcomes_without_probability_are_never_drawn_and_frequencies_are_exact():
    law = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    bounds = thresholds(law)
    ends = np.array([0, bounds[1] - 1, bounds[1], 0xFFFFFFFF], np.uint32)
    assert pick(bounds, ends).tolist() == [1, 1, 3, 3]
    spaced = np.diff(np.concatenate([[0], bounds.astype(float), [2.0**32]])) / 2.0**32
    assert np.abs(spaced - law).max() < 2.0**-32


@pytest.mark.parametrize("tokens", [2, 3, 5, 12, 100, 1000])
def test_thresholds_of_an_even_law_are_those_of_one_multiplication(tokens, rng):
    drawn = rng.integers(0, 2**32, 1000, dtype=np.uint64)
    near = (np.arange(1, tokens, dtype=np.uint64) << np.uint64(32)) // np.uint64(tokens)  # at and around every bound
    drawn = np.concatenate([drawn, near, near + np.uint64(1)])
    found = np.searchsorted(thresholds(np.full(tokens, 1 / tokens)), drawn, side="right")
    np.testing.assert_array_equal(found, drawn * np.uint64(tokens) >> np.uint64(32))


def test_samples_follow_the_task(seed):
    task = draw_bigram_task(np.random.default_rng([seed, 3]), 3, 6, 2, uniform=False)
    tokens, queries, targets = draw_step_batch(task, 60_000, seed=seed, step=5)
    counts = np.bincount(tokens.ravel(), minlength=3)
    assert stats.chisquare(counts, task.stationary * counts.sum()).pvalue > RARELY
    assert stats.chisquare(np.bincount(queries), task.stationary * len(queries)).pvalue > RARELY
    for query in range(3):
        of_query = queries == query
        for token in range(3):
            # by the token at the first position alone: P(y) = w P_token + (1 - w) mu, exactly
            weight, place = task.weights[query, 0], task.positions[query, 0]
            law = weight * task.transition[:, token] + (1 - weight) * task.stationary
            seen = np.bincount(targets[of_query & (tokens[:, place] == token)], minlength=3)
            assert stats.chisquare(seen, law * seen.sum()).pvalue > RARELY


def test_a_sample_is_a_function_of_its_number(seed):
    task = draw_bigram_task(np.random.default_rng(0), 5, 11, 2)
    few, many = draw_step_batch(task, 3, seed=seed, step=2), draw_step_batch(task, 7, seed=seed, step=2)
    for one, other in zip(few, many, strict=True):
        np.testing.assert_array_equal(one, other[:3])
    assert (draw_step_batch(task, 7, seed=seed, step=3).tokens != many.tokens).any()
    assert (draw_step_batch(task, 7, seed=[seed, 1], step=2).tokens != many.tokens).any()


def test_a_large_vocabulary_takes_two_bytes():
    size = 300
    task = BigramTask(
        np.full((size, size), 1 / size), np.full(size, 1 / size), np.zeros((size, 1), int), np.ones((size, 1)), 4
    )
    tokens = draw_step_batch(task, 200, seed=0).tokens
    assert tokens.dtype == np.uint16
    assert tokens.max() > 255


@pytest.mark.parametrize("bad", [{"seed": -1}, {"seed": "x"}, {"seed": 0, "step": -1}, {"seed": 0, "step": 2**32}])
def test_seeds_and_steps_that_are_none_are_refused(bad):
    with pytest.raises(UsageError):
        draw_step_batch(draw_bigram_task(np.random.default_rng(0), 3, 4, 1), 2, **bad)
