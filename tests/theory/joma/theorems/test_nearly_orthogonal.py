"""Theorem 1 for embeddings that are not orthogonal, against trajectories and by hand."""

import numpy as np
import pytest
from tests.theory.joma.problems import SIZES, STEPS

from manyheads.errors import ShapeError, UsageError
from manyheads.theory.joma.systems.gradient_flow import gradient_flow
from manyheads.theory.joma.systems.layer import LayerParameters, draw_upper
from manyheads.theory.joma.task import UpdateRule, draw_joma_task
from manyheads.theory.joma.theorems.nearly_orthogonal import (
    drift_bound,
    drift_from_couplings,
    integrate_couplings,
    random_drift,
    random_gram,
    token_sum,
    with_gram,
)


def test_a_trajectory_in_fewer_dimensions_than_tokens_keeps_the_sum_and_drifts_by_its_couplings(rng):
    rule = UpdateRule("exp", "gelu", temperature=1.5, learning_rate_ratio=0.7)
    gram = random_gram(SIZES.tokens, 4, rng)
    task = draw_joma_task(SIZES, rng)
    task = type(task)(task.contexts, 0 * task.queries, task.labels, task.token_embeddings, task.query_embeddings)
    task, loss = with_gram(task, gram), draw_upper(SIZES, rng)
    init = LayerParameters(rng.normal(size=(1, SIZES.tokens)), 0.3 * rng.normal(size=(SIZES.tokens + 1, SIZES.neurons)))
    path = gradient_flow(init, task, loss, rule, STEPS)
    logits, weights = np.asarray(path.network.logits), np.asarray(path.network.weights)
    total = token_sum(rule, logits, weights, task.query_embeddings[:, 0])
    assert np.abs(total - total[0]).max() < 1e-10
    couplings, lengths = integrate_couplings(path, task, loss, rule)
    relation = logits[:, 0] - 0.7 / 3 * ((task.token_embeddings.T @ weights) ** 2).sum(-1)
    drift = relation - relation[0]
    assert np.abs(drift[-1]).max() > 1e-3
    np.testing.assert_allclose(drift, drift_from_couplings(rule, gram, couplings), atol=1e-7)
    assert (np.abs(drift[-1]) < drift_bound(rule, gram, lengths)).all()


def test_the_drift_of_random_directions_has_the_predicted_root_mean_square(rng):
    rule, couplings = UpdateRule("linear"), rng.normal(size=(5, 5))
    drifts = [drift_from_couplings(rule, random_gram(5, 50, rng), couplings) for _ in range(2000)]
    np.testing.assert_allclose(np.std(drifts, axis=0), random_drift(rule, 50, couplings), rtol=0.1)


def test_rules_without_the_law_and_shapes_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="linear or exp attention"):
        token_sum(UpdateRule("softmax"), np.zeros((1, 3)), np.zeros((4, 2)), np.ones(4))
    with pytest.raises(ShapeError, match="couplings"):
        drift_bound(UpdateRule("exp"), np.eye(3), np.zeros((2, 2)))
