"""Rounding, held-out loss and the fits, against the exact population loss, normal equations and planted answers."""

import numpy as np
import pytest
from tests.theory.bigram.theorems.test_population import bayes_loss

from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.theorems.population import excess
from manyheads.theory.bigram.training.proximal_sgd import State, initial_state
from manyheads.theory.bigram.training.rounding import (
    check_support,
    estimate_loss,
    find_support,
    refit_jointly,
    refit_scale,
    round_attention,
    sample_support,
)


@pytest.fixture
def task(rng):
    return draw_bigram_task(rng, 4, 30, 2)


def test_the_estimated_loss_is_the_exact_one(rng, task):
    state = State(0.7 * task.centred, (0.9 * task.attention + 0.1 / 30).astype(np.float32))
    loss = estimate_loss(state, task.stationary, task.draw(rng, 4000))
    exact = bayes_loss(task) + excess(task, *state)
    assert abs(loss.mean - exact) < 4.5 * loss.error  # false alarm 7e-6
    assert loss.error < 0.01


def test_sparse_rows_are_summed_like_dense_ones(rng, task):
    batch = task.draw(rng, 200)
    sparse = State(task.centred, task.attention.astype(np.float32))
    tiny = np.where(sparse.attention == 0, np.float32(1e-12), sparse.attention)
    dense = estimate_loss(State(task.centred, tiny), task.stationary, batch)
    assert dense.mean == pytest.approx(estimate_loss(sparse, task.stationary, batch).mean, rel=1e-9)


def test_rounding_keeps_the_product_and_removes_the_noise(rng, task):
    noise = 0.01 * rng.standard_normal((4, 30))
    rough = State(task.centred / 3, (3 * task.attention + noise).astype(np.float32))
    rounded = round_attention(rough, task.stationary)
    assert np.array_equal(np.stack(find_support(rounded.attention)), task.positions)
    np.testing.assert_allclose(rounded.attention.sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(rounded.value, task.centred, atol=0.02)


def test_a_row_with_nothing_positive_becomes_uniform(task):
    state = State(task.centred, -task.attention.astype(np.float32))
    rounded = round_attention(state, task.stationary)
    np.testing.assert_allclose(rounded.attention, 1 / 30, rtol=1e-6)
    np.testing.assert_array_equal(rounded.value, task.centred)


def test_support_samples_have_the_distribution_of_whole_contexts(rng, task):
    """Mean of W[y, x] at the true positions is K_VP times the weight: 4.5 standard errors either way."""
    support = tuple(task.positions)
    seen = sample_support(rng, task, support, 20_000)
    scores = task.centred[seen.targets[:, None], seen.tokens]  # (n, Q)
    for query in range(4):
        rows = scores[seen.queries == query]
        expected = task.transition_squared_norm * task.weights[query]
        assert (np.abs(rows.mean(0) - expected) < 4.5 * rows.std(0) / len(rows) ** 0.5).all()


def test_the_fitted_scale_is_the_best_one(rng, task):
    wrong = State(3 * task.centred, task.attention.astype(np.float32))
    seen = sample_support(rng, task, tuple(task.positions), 20_000)
    fitted = refit_scale(wrong, task.stationary, seen)
    factor = fitted.value[0, 0] / task.centred[0, 0]
    # the standard error of the factor is below sqrt(tr R / (n K_P |Q|^2)); five of them
    assert abs(factor - 1) < 5 / (20_000 * task.transition_squared_norm * task.weight_squared_norm) ** 0.5
    with pytest.raises(CertificateError, match="nothing to scale"):
        refit_scale(initial_state(task), task.stationary, seen)


def test_the_joint_fit_finds_weights_and_values_from_even_weights(rng, task):
    even = State(np.zeros((4, 4)), (0.5 * (task.attention > 0)).astype(np.float32))
    seen = sample_support(rng, task, tuple(task.positions), 20_000)
    fitted = refit_jointly(even, task.stationary, seen)
    parameters = (task.vocabulary - 1) ** 2 + task.vocabulary
    # each parameter costs at most half a residual variance of (1 - 1/N) over n in excess; ten times that
    allowed = 10 * 0.5 * parameters / 20_000 / excess(task, *initial_state(task))
    assert excess(task, *fitted) / excess(task, *initial_state(task)) < allowed


def test_sifting_keeps_the_true_positions_among_false_ones(rng, task):
    wide = tuple(np.unique([*row, *rng.choice(30, 6, replace=False)]) for row in task.positions)
    seen = sample_support(rng, task, wide, 20_000)
    rough = np.zeros((4, 30), np.float32)
    for query, row in enumerate(wide):
        rough[query, row] = 0.05
    rough += 0.3 * task.attention.astype(np.float32)
    found = check_support(State(np.zeros((4, 4)), rough), task.stationary, seen, 2)
    assert np.array_equal(np.stack(found), task.positions)  # every weight is 15 standard errors or more from zero


def test_bad_requests_are_refused(rng, task):
    with pytest.raises(UsageError, match="share"):
        round_attention(initial_state(task), task.stationary, share=1.0)
    with pytest.raises(ShapeError, match="one or more for each query"):
        sample_support(rng, task, (np.array([0]),), 10)
