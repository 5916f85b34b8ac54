"""Samples until the positions rank first: against simulated ranks and against training."""

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.studies.bigram.screening import NOISE_RATIO, ScreeningCost
from manyheads.theory.bigram.searches import geometric_mean
from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.theorems.sample_complexity import predict_position_ranking, ranking_probability


def test_the_probability_is_that_of_simulated_ranks(rng):
    task = draw_bigram_task(rng, 3, 40, 2)
    ratios, draws = np.array([4.0, 7.0, 10.0]), 4000
    entries = rng.standard_normal((draws, 3, 40))
    counts = []
    for ratio in ratios:
        size = np.abs(entries + ratio * task.attention)
        attended = np.take_along_axis(size, np.broadcast_to(task.positions, (draws, 3, 2)), 2)
        others = np.where(task.attention > 0, 0.0, size)
        counts.append((attended.min(2) > others.max(2)).all(1).mean())
    assert np.ptp(counts) > 0.2
    assert np.abs(np.array(counts) - ranking_probability(task, ratios)).max() < 5 * 0.5 / draws**0.5


def test_the_samples_grow_slower_than_the_square_root_of_the_length_beyond_its_logarithm(rng):
    study, lengths = ScreeningCost(), (1000, 4000, 16_000, 64_000)
    samples = [predict_position_ranking(study._task(length, rng), NOISE_RATIO, rng) for length in lengths]
    slope = np.polyfit(np.log(lengths), [np.log(paths).mean() for paths in samples], 1)[0]
    assert 0.1 < slope < 0.57  # that of sqrt(T ln T) at these lengths is .56
    with pytest.raises(UsageError, match="noise_ratio=0"):
        predict_position_ranking(study._task(1000, rng), 0.0, rng)


@pytest.mark.slow
def test_training_ranks_the_positions_after_the_predicted_samples(rng):
    study, runs = ScreeningCost(), 24
    trained = [study._train(study._task(4000, rng), seed) for seed in range(runs)]
    predicted = predict_position_ranking(study._task(4000, rng), NOISE_RATIO, rng)
    # a run scatters by .76 in the logarithm; five deviations of the mean, and two evaluations for the law itself
    assert abs(np.log(geometric_mean(trained) / geometric_mean(predicted))) < 5 * 0.76 / runs**0.5 + 2 * np.log(1.12)
