"""Theorem 1: relations against flows, the velocity against automatic differentiation, refusals by assumption."""

import equinox as eqx
import jax
import numpy as np
import pytest

from manyheads.errors import ShapeError, UsageError
from manyheads.joma.systems.gradient_flow import Adaptive, Steps, descend, flow, flow_adaptively
from manyheads.joma.systems.layer import attend, draw_network, draw_upper, field, forward, pulls, token_weights
from manyheads.joma.task import Rule, Sizes, draw_setting
from manyheads.joma.theory.invariants import (
    conserved,
    conserved_per_query,
    decayed,
    drift,
    softmax_form,
    softmax_velocity,
)

SIZES = Sizes(tokens=6, queries=3, contexts=12, classes=3, neurons=5, width=12)
STEPS = Steps(0.05, 20, 12)


def follow(rng, rule, sizes=SIZES, how=flow, steps=STEPS):
    task = draw_network(sizes, rule, rng), draw_setting(sizes, rng), draw_upper(sizes, rng)
    path = how(*task, rule, steps)
    return path, token_weights(task[1], path.network.weights), task


RULES = [
    Rule("linear", "gelu", rate_ratio=0.5),
    Rule("linear", "square", decay=0.05),
    Rule("exp", "gelu", rate_ratio=2.0, temperature=0.7),
    Rule("exp", "gelu", own_weights=True),
    Rule("softmax", "gelu", temperature=2.0),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.attention}-{rule.rate_ratio}-{rule.own_weights}")
def test_the_relation_is_kept_while_the_logits_move(rng, rule):
    path, v, _ = follow(rng, rule)
    assert np.abs(drift(rule, path.times, path.network.logits, v)).max() < 1e-10
    assert np.abs(path.network.logits - path.network.logits[0]).max() > 1e-3


def test_one_query_among_several_does_not_keep_it(rng):
    path, v, _ = follow(rng, RULES[2])
    alone = conserved_per_query(RULES[2], path.network.logits, v)
    grown = np.abs(conserved(Rule("exp"), 0 * path.network.logits, v)[-1] - conserved(
        Rule("exp"), 0 * path.network.logits, v)[0]).max()  # fmt: skip
    assert alone.shape == (13, 3, 6)
    assert np.abs(alone - alone[0]).max() > 0.1 * grown


def test_relu_keeps_it_when_gates_are_held_and_loses_little_when_not(rng):
    rule = Rule("exp", "relu")
    path, v, task = follow(rng, rule)
    assert np.abs(drift(rule, path.times, path.network.logits, v)).max() < 1e-3
    exact = flow_adaptively(*task, rule, Adaptive(4.0, 2))
    held = drift(rule, exact.times, exact.network.logits, token_weights(task[1], exact.network.weights))
    assert np.abs(held).max() < 1e-10


def test_descent_drifts_in_proportion_to_the_rate(rng):
    rule = Rule("exp", "gelu")
    task = draw_network(SIZES, rule, rng), draw_setting(SIZES, rng), draw_upper(SIZES, rng)
    slips = []
    for rate in (0.1, 0.05):
        path = descend(*task, rule, Steps(rate, round(10 / rate), 1))
        v = token_weights(task[1], path.network.weights)
        slips.append(np.abs(drift(rule, path.times, path.network.logits, v)).max())
    assert 0.9 < np.log2(slips[0] / slips[1]) < 1.1


def test_the_softmax_velocity_is_the_gradient(rng):
    rule = Rule("softmax", "tanh", temperature=0.6, rate_ratio=1.7)
    sizes = Sizes(tokens=6, contexts=12, classes=3, neurons=5, width=12)
    network, setting, upper = draw_network(sizes, rule, rng), draw_setting(sizes, rng), draw_upper(sizes, rng)
    with jax.enable_x64(True):
        b, _ = eqx.filter_jit(forward)(network, setting, rule)
        g, moving = (eqx.filter_jit(f)(network, setting, upper, rule) for f in (pulls, field))
    growth, correction = softmax_velocity(rule, b, g, token_weights(setting, network.weights))
    assert np.abs(growth - correction - np.asarray(moving.logits)[0]).max() < 1e-12
    assert np.abs(growth).max() > 1e-4


@pytest.mark.parametrize("contexts", [1, 12])
def test_the_softmax_form_is_exact_for_one_context_alone(rng, contexts):
    rule = Rule("softmax", "gelu", temperature=0.8, rate_ratio=1.5)
    sizes = Sizes(tokens=6, contexts=contexts, classes=3, neurons=5, width=12)
    path, v, (_, setting, _) = follow(rng, rule, sizes, steps=Steps(0.05, 4, 60))
    with jax.enable_x64(True):
        mean = np.asarray(attend(rule, path.network.logits, setting.contexts).mean(1))
    form = softmax_form(rule, path.times, path.network.logits, v, mean)
    error = form.relative_error("integral")
    assert (error < 1e-4) == (contexts == 1)
    assert form.relative_error("constant") > 1e-3
    assert -1 <= form.correlation("squares") <= 1


def test_what_has_no_law_is_refused_with_the_assumption():
    z, v = np.zeros((2, 1, 3)), np.zeros((2, 3, 4))
    with pytest.raises(UsageError, match="without weight decay"):
        conserved(Rule("exp", decay=0.1), z, v)
    with pytest.raises(UsageError, match="equal learning rates"):
        drift(Rule("linear", decay=0.1, rate_ratio=2.0), np.arange(2.0), z, v)
    with pytest.raises(UsageError, match="only linear attention"):
        decayed(Rule("exp", decay=0.1), np.ones(3), np.arange(2.0))
    with pytest.raises(UsageError, match="softmax attention"):
        softmax_form(Rule("exp"), np.arange(2.0), z, v, np.zeros((2, 3)))
    with pytest.raises(ShapeError, match="one query"):
        softmax_form(Rule("softmax"), np.arange(2.0), np.zeros((2, 2, 3)), v, np.zeros((2, 3)))
    with pytest.raises(ShapeError, match="token weights"):
        conserved(Rule("linear", own_weights=True), z, v)
