"""The task: what is drawn has the laws that are stated, and what makes no task is refused with its figure."""

import numpy as np
import pytest
from scipy import stats

from manyheads.errors import ShapeError, UsageError
from manyheads.theory.bigram.task import (
    BigramTask,
    draw_bigram_task,
    draw_correlated,
    stationary_distribution,
    typical_squared_norm,
)


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("vocabulary", [2, 3, 30])
def test_a_drawn_task_is_one(rng, vocabulary, uniform):
    task = draw_bigram_task(rng, vocabulary, 40, 3, uniform=uniform)
    law = task.stationary
    assert np.abs(task.transition @ law - law).max() < 1e-12
    assert task.attention.sum(1) == pytest.approx(np.ones(vocabulary))
    assert (task.attention > 0).sum() == 3 * vocabulary
    target = 2.4 / (vocabulary + 5) * (1 - law @ law)
    assert task.transition_squared_norm == pytest.approx(typical_squared_norm(vocabulary) if uniform else target)
    assert task.attention_squared_norm == pytest.approx(law @ (task.attention**2).sum(1) - 1 / 40)
    assert task.weights.min() > 0.2 / 3
    if uniform:
        assert task.transition.sum(1) == pytest.approx(np.ones(vocabulary))


@pytest.mark.parametrize("squared_norm", [0.01, 0.5])
def test_every_possible_squared_norm_can_be_drawn(rng, squared_norm):
    task = draw_bigram_task(rng, 4, 40, 2, squared_norm=squared_norm, uniform=False)
    assert task.transition_squared_norm == pytest.approx(squared_norm)


def test_samples_have_the_law_of_the_task(rng):
    """Chi-squared over (query, token at the position, answer); a correct sampler fails once in 10^6."""
    task = draw_bigram_task(rng, 3, 6, 2, uniform=False)
    batch = task.draw(rng, 60_000)
    for position in (task.positions[0, 0], task.positions[1, 1]):
        counts = np.zeros((3, 3, 3))
        np.add.at(counts, (batch.queries, batch.tokens[:, position], batch.targets), 1)
        law = task.stationary
        shares = task.attention[:, position]  # (query,)
        answers = (
            shares[:, None, None] * task.transition.T + (1 - shares[:, None, None]) * law
        )  # (query, token, answer)
        expected = 60_000 * law[:, None, None] * law[:, None] * answers
        assert stats.chisquare(counts.ravel(), expected.ravel()).pvalue > 1e-6


def test_a_correlation_is_what_was_asked_for(rng):
    task = draw_bigram_task(rng, 6, 20, 2, uniform=False)
    law = task.stationary
    for correlation in (-1, -0.3, 0, 0.7, 1):
        value = draw_correlated(rng, task, correlation)
        assert law @ (value**2).sum(0) == pytest.approx(task.transition_squared_norm)
        assert law @ (value * task.centred).sum(0) == pytest.approx(
            correlation * task.transition_squared_norm, abs=1e-14
        )
        assert np.abs(value @ law).max() < 1e-14
        assert np.abs(value.sum(0)).max() < 1e-14


def test_stationary_laws_are_found(rng):
    columns = rng.dirichlet(np.ones(7), size=7).T
    power = np.linalg.matrix_power(columns, 200)[:, 0]
    assert stationary_distribution(columns) == pytest.approx(power)


GOOD = {
    "transition": np.array([[0.75, 0.5], [0.25, 0.5]]),
    "stationary": np.array([2, 1]) / 3,
    "positions": np.array([[0, 3], [1, 2]]),
    "weights": np.array([[0.5, 0.5], [0.9, 0.1]]),
    "length": 5,
}
BAD = {
    "column 1 of transition sums to 0": {"transition": np.array([[0.75, 0.4], [0.25, 0.5]])},
    "token 1 is unreachable": {"transition": np.array([[1, 0.5], [0, 0.5]]), "stationary": np.array([1.0, 0.0])},
    "moves stationary by 0": {"stationary": np.array([0.5, 0.5])},
    "stationary sums to 0": {"stationary": np.array([0.6, 0.3])},
    "an entry -0.25": {"transition": np.array([[1.25, 0.5], [-0.25, 0.5]])},
    "an entry nan": {"transition": np.array([[np.nan, 0.5], [0.25, 0.5]])},
    "2 positions a query in a context of 1": {"length": 1},
    "reach from 0 to 3 in a context of 3": {"length": 3},
    r"positions of query 1 are \[2, 1\]": {"positions": np.array([[0, 3], [2, 1]])},
    "weights of query 1 sum to 1.1": {"weights": np.array([[0.5, 0.5], [0.9, 0.2]])},
    "an entry 0.0: weights are positive": {"weights": np.array([[0.5, 0.5], [1, 0]])},
}
MISSHAPEN = {
    "give integers": {"positions": np.array([[0, 3.0], [1, 2]])},
    r"transition \(2, 3\)": {"transition": np.ones((2, 3)) / 2},
    r"positions \(2,\)": {"positions": np.array([0, 1])},
}


@pytest.mark.parametrize("words", [*BAD, *MISSHAPEN])
def test_what_is_no_task_is_refused(words):
    BigramTask(**GOOD)
    with pytest.raises(ShapeError if words in MISSHAPEN else UsageError, match=words):
        BigramTask(**GOOD | (BAD | MISSHAPEN)[words])


def test_other_nonsense_is_refused(rng):
    task = draw_bigram_task(rng, 2, 10, 1)
    with pytest.raises(UsageError, match="more than one distribution is stationary"):
        stationary_distribution(np.eye(3))
    with pytest.raises(UsageError, match="unreachable"):
        stationary_distribution([[1, 0.5], [0, 0.5]])
    with pytest.raises(UsageError, match="squared_norm=0"):
        draw_bigram_task(rng, 3, 10, 2, squared_norm=0.9)
    with pytest.raises(UsageError, match="sparsity=11"):
        draw_bigram_task(rng, 3, 10, 11)
    with pytest.raises(UsageError, match="two tokens"):
        draw_correlated(rng, task, 0.5)
    with pytest.raises(UsageError, match="correlation=nan"):
        draw_correlated(rng, task, float("nan"))
    with pytest.raises(UsageError, match="size=0"):
        task.draw(rng, 0)
    with pytest.raises(ValueError, match="read-only"):
        task.transition[0, 0] = 1
