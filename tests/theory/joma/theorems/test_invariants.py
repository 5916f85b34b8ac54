"""Theorem 1: relations against flows, the velocity against automatic differentiation, refusals by assumption."""

import equinox as eqx
import jax
import numpy as np
import pytest
from tests.theory.joma.problems import STEPS, draw

from manyheads.errors import ShapeError, UsageError
from manyheads.theory.joma.systems.gradient_flow import (
    AdaptiveSteps,
    FixedSteps,
    adaptive_gradient_flow,
    gradient_descent,
    gradient_flow,
)
from manyheads.theory.joma.systems.layer import attend, forward, token_weights, vector_field
from manyheads.theory.joma.task import JomaTask, UpdateRule
from manyheads.theory.joma.theorems.invariants import (
    conserved_quantity,
    decayed_quantity,
    drift,
    per_query_quantity,
    softmax_relation,
)


def follow(rng, rule):
    problem = draw(rng, rule)
    path = gradient_flow(*problem, rule, STEPS)
    return path, token_weights(problem[1], path.network.weights), problem


RULES = [
    UpdateRule("linear", "gelu", learning_rate_ratio=0.5),
    UpdateRule("linear", "square", weight_decay=0.05),
    UpdateRule("exp", "gelu", learning_rate_ratio=2.0, temperature=0.7),
    UpdateRule("exp", "gelu", per_query_weights=True),
    UpdateRule("softmax", "gelu", temperature=2.0),
    UpdateRule("sigmoid", "gelu", learning_rate_ratio=2.0, temperature=0.7),
    UpdateRule("square", "gelu", learning_rate_ratio=0.5, temperature=1.3),
    UpdateRule("normalized-sigmoid", "gelu", temperature=0.7),
]


@pytest.mark.parametrize(
    "rule",
    [*RULES[1:3], *(pytest.param(rule, marks=pytest.mark.slow) for rule in (RULES[0], *RULES[3:]))],
    ids=lambda rule: f"{rule.attention}-{rule.learning_rate_ratio}-{rule.per_query_weights}",
)
def test_the_relation_is_kept_while_the_logits_move(rng, rule):
    """What drifts is the error of the integrator: of order four, so 16 times smaller at half the step."""
    problem, drifts = draw(rng, rule), []
    for steps in (STEPS, FixedSteps(STEPS.step / 2, 2 * STEPS.stride, STEPS.records)):
        path = gradient_flow(*problem, rule, steps)
        v = token_weights(problem[1], path.network.weights)
        drifts.append(np.abs(drift(rule, path.times, path.network.logits, v)).max())
    size = max(1.0, np.abs(path.network.logits).max(), np.square(v).sum(-1).max())
    horizon, step = path.times[-1], STEPS.step
    rounding = np.finfo(float).eps * size * 2 * horizon / step  # one of each step
    assert drifts[1] < drifts[0] / 8 + rounding  # a relation that moves has drifts of one size
    assert drifts[0] < horizon * step**4 / 120 * size  # the fifth derivative of what moves at rates of order one
    assert np.abs(path.network.logits - path.network.logits[0]).max() > 1e-3


def test_one_query_among_several_does_not_keep_it(rng):
    path, v, _ = follow(rng, RULES[2])
    alone = per_query_quantity(RULES[2], path.network.logits, v)
    grown = np.abs(conserved_quantity(UpdateRule("exp"), 0 * path.network.logits, v)[-1] - conserved_quantity(
        UpdateRule("exp"), 0 * path.network.logits, v)[0]).max()  # fmt: skip
    assert alone.shape == (61, 3, 6)
    assert np.abs(alone - alone[0]).max() > 0.1 * grown


@pytest.mark.slow
def test_relu_keeps_it_when_gates_are_held_and_loses_little_when_not(rng):
    rule = UpdateRule("exp", "relu")
    path, v, problem = follow(rng, rule)
    assert np.abs(drift(rule, path.times, path.network.logits, v)).max() < 1e-3
    exact = adaptive_gradient_flow(*problem, rule, AdaptiveSteps(4.0, 2))
    held = drift(rule, exact.times, exact.network.logits, token_weights(problem[1], exact.network.weights))
    assert np.abs(held).max() < 1e-10


@pytest.mark.slow
def test_descent_drifts_in_proportion_to_the_rate(rng):
    rule = UpdateRule("exp", "gelu")
    problem = draw(rng, rule)
    slips = []
    for rate in (0.1, 0.05):
        path = gradient_descent(*problem, rule, FixedSteps(rate, round(10 / rate), 1))
        v = token_weights(problem[1], path.network.weights)
        slips.append(np.abs(drift(rule, path.times, path.network.logits, v)).max())
    assert 0.9 < np.log2(slips[0] / slips[1]) < 1.1


def velocity_terms(rule, network, task, loss):
    """Both terms of dz/dt under softmax attention: r/T sum_k (v_k v_k' - E[g_k phi'_k b b^T] v_k)."""
    b, preactivations = forward(network, task, rule)
    g = -len(b) * jax.grad(lambda a: loss(rule.function(a), task))(preactivations)  # (N, K)
    v, scale = token_weights(task, network.weights), rule.learning_rate_ratio / rule.temperature
    seen = ((b @ v) * g).sum(1, keepdims=True)
    return scale * (v * (b.T @ g / len(b))).sum(1), scale * (b * seen).mean(0)


def test_the_softmax_velocity_is_the_gradient(rng):
    rule = UpdateRule("softmax", "tanh", temperature=0.6, learning_rate_ratio=1.7)
    network, task, upper = draw(rng, rule)
    task = eqx.tree_at(lambda t: t.queries, task, 0 * task.queries)
    with jax.enable_x64(True):
        growth, correction = map(np.asarray, eqx.filter_jit(velocity_terms)(rule, network, task, upper))
        moving = eqx.filter_jit(vector_field)(network, task, upper, rule)
    assert np.abs(growth - correction - np.asarray(moving.logits)[0]).max() < 1e-12
    assert np.abs(growth).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("contexts", [1, 12])
def test_the_softmax_form_is_exact_for_one_context_alone(rng, contexts):
    rule = UpdateRule("softmax", "gelu", temperature=0.8, learning_rate_ratio=1.5)
    network, task, upper = draw(rng, rule)
    rows = np.arange(12) % contexts  # one query, and one context repeated or twelve
    frame = task.token_embeddings, task.query_embeddings
    task = JomaTask(task.contexts[rows], 0 * task.queries, task.labels[rows], *frame)
    path = gradient_flow(network, task, upper, rule, STEPS)
    v, logits = token_weights(task, path.network.weights), path.network.logits[:, :1]
    with jax.enable_x64(True):
        mean = np.asarray(attend(rule, logits, task.contexts).mean(1))
    form = softmax_relation(rule, path.times, logits, v, mean)
    error = form.relative_error("moving_mean")
    assert (error < 1e-4) == (contexts == 1)
    assert form.relative_error("fixed_mean") > 1e-3
    assert -1 <= form.correlation("squares") <= 1


def test_what_has_no_law_is_refused_with_the_assumption():
    z, v = np.zeros((2, 1, 3)), np.zeros((2, 3, 4))
    with pytest.raises(UsageError, match="without weight decay"):
        conserved_quantity(UpdateRule("exp", weight_decay=0.1), z, v)
    with pytest.raises(UsageError, match="equal learning rates"):
        drift(UpdateRule("linear", weight_decay=0.1, learning_rate_ratio=2.0), np.arange(2.0), z, v)
    with pytest.raises(UsageError, match="only linear attention"):
        decayed_quantity(UpdateRule("exp", weight_decay=0.1), np.ones(3), np.arange(2.0))
    with pytest.raises(UsageError, match="softmax attention"):
        softmax_relation(UpdateRule("exp"), np.arange(2.0), z, v, np.zeros((2, 3)))
    with pytest.raises(ShapeError, match="one query"):
        softmax_relation(UpdateRule("softmax"), np.arange(2.0), np.zeros((2, 2, 3)), v, np.zeros((2, 3)))
    with pytest.raises(ShapeError, match="token weights"):
        conserved_quantity(UpdateRule("linear", per_query_weights=True), z, v)
