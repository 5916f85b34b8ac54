"""Population loss and gradients against enumeration of every context, against differences and against each other."""

from itertools import product

import numpy as np
import pytest

from manyheads.errors import ShapeError
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems.population import excess, excess_of_signals, gradients, measure_overlaps


def enumerate_task(task, full_value, attention, centred=False):
    """Return loss and gradients as sums over every context, query and answer."""
    tokens, length, law = task.vocabulary, task.length, task.stationary
    loss, for_value, for_attention = 0.0, np.zeros((tokens, tokens)), np.zeros((tokens, length))
    dense = task.attention
    for context in product(range(tokens), repeat=length):
        onehot = np.eye(tokens)[list(context)].T  # (N, T)
        for query in range(tokens):
            chance = np.prod(law[list(context)]) * law[query]
            answers = task.transition @ onehot @ dense[query]  # law of the answer
            histogram = onehot @ attention[query]
            output = full_value @ histogram + (law if centred else 0)
            for answer in range(tokens):
                residual = output - np.eye(tokens)[answer]
                weight = chance * answers[answer]
                loss += weight * 0.5 * residual @ residual
                for_value += weight * np.outer(residual, histogram)
                for_attention[query] += weight * (onehot.T @ full_value.T @ residual)
    return loss, for_value, for_attention


@pytest.fixture
def task(rng):
    return draw_bigram_task(rng, 2, 4, 2, uniform=False)


def bayes_loss(task):
    """Return the loss of the best predictor."""
    mu = task.stationary
    return 0.5 * (1 - mu @ mu - task.transition_squared_norm * task.weight_squared_norm)


def test_the_excess_is_the_enumerated_loss_over_that_of_bayes(task, rng):
    value, attention = rng.standard_normal((2, 2)), rng.standard_normal((2, 4))
    attention += (1 - attention.sum(1, keepdims=True)) / 4  # with sums one both forms of the model agree
    loss, *_ = enumerate_task(task, value, attention)
    centred = value - task.stationary[:, None]
    assert excess(task, centred, attention) == pytest.approx(loss - bayes_loss(task), abs=1e-12)


def test_the_centred_form_needs_no_constraint(task, rng):
    value, attention = rng.standard_normal((2, 2)), rng.standard_normal((2, 4))
    loss, *_ = enumerate_task(task, value, attention, centred=True)
    assert excess(task, value, attention) == pytest.approx(loss - bayes_loss(task), abs=1e-12)


def test_descended_gradients_are_the_preconditioned_projected_ones(task, rng):
    value, attention = rng.standard_normal((2, 2)), rng.standard_normal((2, 4))  # rows of any sum
    value -= (value @ task.stationary)[:, None]
    value -= value.mean(0)
    _, for_value, for_attention = enumerate_task(task, value, attention, centred=True)
    found = gradients(task, value, attention)
    # right-multiplying by diag(1/mu) after removing the part along mu, which keeps W mu = 0
    step = (for_value - np.outer(for_value.sum(1), task.stationary)) / task.stationary
    assert np.abs(found.value - step).max() < 1e-12
    step = for_attention / task.stationary[:, None]
    assert np.abs(found.attention - (step - step.mean(1, keepdims=True))).max() < 1e-12


def test_gradients_are_differences_of_the_excess(rng):
    task = draw_bigram_task(rng, 4, 9, 2, uniform=False)
    mu = task.stationary
    value, attention = rng.standard_normal((4, 4)), rng.standard_normal((4, 9))
    value -= (value @ mu)[:, None]
    found, step = gradients(task, value, attention), 1e-5
    for _ in range(4):
        on_value, on_attention = rng.standard_normal((4, 4)), rng.standard_normal((4, 9))
        on_value -= (on_value @ mu)[:, None]  # along the constraints
        on_attention -= on_attention.mean(1, keepdims=True)
        up, down = (
            excess(task, value + sign * step * on_value, attention + sign * step * on_attention) for sign in (1, -1)
        )
        slope = (found.value * on_value).sum(0) @ mu + mu @ (found.attention * on_attention).sum(1)
        assert (up - down) / (2 * step) == pytest.approx(slope, abs=1e-7)


def test_bayes_loss_is_what_enumeration_gives_at_the_solution(task):
    loss, *_ = enumerate_task(task, task.transition, task.attention)
    assert bayes_loss(task) == pytest.approx(loss, abs=1e-13)


def test_overlaps_are_one_at_the_solution_and_zero_at_the_start(rng):
    task = draw_bigram_task(rng, 4, 9, 2, uniform=False)
    at_end = measure_overlaps(task, task.centred, task.attention)
    assert at_end.value_signal == pytest.approx(1)
    assert at_end.attention_signal == pytest.approx(1)
    at_start = measure_overlaps(task, np.zeros((4, 4)), np.full((4, 9), 1 / 9, np.float32))
    assert at_start.attention_signal == pytest.approx(0, abs=1e-6)
    assert at_start.attention_squared_norm == pytest.approx(1 / 9, rel=1e-6)
    # the excess at the start is what there is to learn
    start = 0.5 * task.transition_squared_norm * task.weight_squared_norm
    assert excess(task, np.zeros((4, 4)), np.full((4, 9), 1 / 9)) == pytest.approx(start)


def test_nothing_to_find_is_not_a_number():
    task = BigramTask(np.eye(2), np.full(2, 0.5), np.array([[0, 1]] * 2), np.full((2, 2), 0.5), 2)
    assert np.isnan(measure_overlaps(task, np.zeros((2, 2)), task.attention).attention_signal)


def test_weights_of_another_task_are_refused(task):
    with pytest.raises(ShapeError, match=r"\(2, 5\)"):
        excess(task, np.zeros((2, 2)), np.zeros((2, 5)))
    with pytest.raises(ShapeError, match="moves the stationary distribution by"):
        gradients(task, np.eye(2), np.zeros((2, 4)))


def test_signals_and_squared_norms_determine_the_loss_of_centred_weights(rng):
    task = draw_bigram_task(rng, 4, 12, 3)
    value, attention = rng.normal(size=(4, 4)), rng.normal(size=(4, 12))
    value -= (value @ task.stationary)[:, None]
    attention += (1 - attention.sum(1, keepdims=True)) / 12
    seen = measure_overlaps(task, value, attention)
    found = excess_of_signals(
        task, seen.value_squared_norm, seen.attention_squared_norm, seen.value_signal, seen.attention_signal
    )
    assert found == pytest.approx(excess(task, value, attention) / excess(task, 0 * value, attention), rel=1e-12)
