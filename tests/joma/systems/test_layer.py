"""The layer, its field, and the paths: against loops, finite differences, and paths of another method."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.joma.systems.gradient_flow import Adaptive, Steps, descend, flow, flow_adaptively
from manyheads.joma.systems.layer import (
    ConstantPull,
    Network,
    draw_network,
    draw_upper,
    field,
    forward,
    objective,
    pulls,
)
from manyheads.joma.task import Rule, Sizes, draw_setting

SIZES = Sizes(tokens=5, queries=2, contexts=8, classes=3, neurons=4, width=9)


def draw(rng, rule, sizes=SIZES):
    return draw_network(sizes, rule, rng), draw_setting(sizes, rng), draw_upper(sizes, rng)


@pytest.mark.parametrize("attention", ["linear", "exp", "softmax"])
@pytest.mark.parametrize("own", [False, True])
def test_the_loss_is_what_loops_over_the_definition_give(rng, attention, own):
    rule = Rule(attention, "tanh", temperature=0.7, own_weights=own)
    network, setting, upper = draw(rng, rule)
    total = 0.0
    for x, q, label in zip(setting.contexts, setting.queries, setting.labels, strict=True):
        s = network.logits[q] / 0.7
        b = s * x if attention == "linear" else np.exp(s) * x
        b = b / b.sum() if attention == "softmax" else b
        f = setting.token_embeddings @ b + setting.query_embeddings[:, q]
        scores = upper.upper @ np.tanh((network.weights[q] if own else network.weights).T @ f)
        total += np.log(np.exp(scores).sum()) - scores[label]
    with jax.enable_x64(True):
        assert abs(float(eqx.filter_jit(objective)(network, setting, upper, rule)) - total / 8) < 1e-12


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_the_field_is_downhill_by_finite_differences(rng, attention):
    rule = Rule(attention, "gelu", rate_ratio=3.0, decay=0.2)
    network, setting, upper = draw(rng, rule)
    direction = Network(rng.normal(size=network.logits.shape), rng.normal(size=network.weights.shape))
    with jax.enable_x64(True):
        moving = eqx.filter_jit(field)(network, setting, upper, rule)

        def loss(by):
            moved = Network(network.logits + by * direction.logits, network.weights + by * direction.weights)
            return float(eqx.filter_jit(objective)(moved, setting, upper, rule))

    with jax.enable_x64(True):
        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
        moving = jax.tree.map(np.asarray, moving)
    along = (moving.logits / -3.0 - 0.2 * network.logits) * direction.logits
    along = float(along.sum() + ((-moving.weights - 0.2 * network.weights) * direction.weights).sum())
    assert abs(slope - along) < 1e-8


def test_attention_to_absent_tokens_is_zero_and_its_gradient_finite(rng):
    rule = Rule("softmax", "gelu")
    network, setting, upper = draw(rng, rule)
    contexts = setting.contexts.copy()
    contexts[:, 0], contexts[:, 1] = 0, contexts[:, 0] + contexts[:, 1]
    setting = type(setting)(
        contexts, setting.queries, setting.labels, setting.token_embeddings, setting.query_embeddings
    )
    with jax.enable_x64(True):
        b, _ = eqx.filter_jit(forward)(network, setting, rule)
        moving = eqx.filter_jit(field)(network, setting, upper, rule)
    assert (np.asarray(b)[:, 0] == 0).all()
    assert np.isfinite(moving.logits).all()
    assert np.abs(np.asarray(moving.logits)[:, 0]).max() == 0


def test_the_fixed_step_is_of_order_four_and_meets_the_adaptive_path(rng):
    rule = Rule("exp", "gelu")
    task = draw(rng, rule)
    fine = flow_adaptively(*task, rule, Adaptive(4.0, 2, 1e-12, 1e-14))
    errors = [np.abs(flow(*task, rule, Steps.until(4.0, h, 2)).network.weights - fine.network.weights).max()
              for h in (0.5, 0.25)]  # fmt: skip
    assert fine.network.weights.dtype == np.float64
    assert fine.losses[0] > fine.losses[-1]
    assert errors[1] < 1e-6
    assert 3.0 < np.log2(errors[0] / errors[1]) < 5.5


def test_with_kinks_the_adaptive_path_keeps_near_a_fine_fixed_one(rng):
    rule = Rule("exp", "relu")
    task = draw(rng, rule)
    fine = flow(*task, rule, Steps.until(4.0, 1e-3, 2))
    path = flow_adaptively(*task, rule, Adaptive(4.0, 2))
    assert np.abs(path.network.weights - fine.network.weights).max() < 2e-2  # the margin, 1e-3, times what gates do


def test_a_path_that_cannot_end_says_so(rng):
    rule = Rule("exp", "relu")
    task = draw(rng, rule)
    task[0].weights[:] *= 3.0  # strong enough for gates to move
    with pytest.raises(CertificateError, match="did not come to its end"):
        flow_adaptively(*task, rule, Adaptive(40.0, 2, crossings=-1))


@pytest.mark.parametrize("follow", [flow, descend])
def test_paths_vmap_over_seeds(rng, follow):
    rule, steps = Rule("exp", "relu"), Steps(0.1, 2, 3)
    tasks = [draw(rng, rule) for _ in range(2)]
    with jax.enable_x64(True):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tasks)
        together = np.asarray(jax.vmap(lambda *task: follow(*task, rule, steps))(*stacked).network.logits)
    alone = np.stack([follow(*task, rule, steps).network.logits for task in tasks])
    assert together.shape == (2, 4, 2, 5)
    assert np.abs(together - alone).max() < 1e-12
    assert np.abs(together[0] - together[1]).max() > 1e-6


def test_batches_vmap_over_keys(rng, seed):
    rule, steps = Rule("linear", "square", rate_ratio=0.5), Steps(0.1, 1, 2)
    task, keys = draw(rng, rule), jax.random.split(jax.random.key(seed), 2)
    with jax.enable_x64(True):
        traced = jax.tree.map(jnp.asarray, task)
        together = np.asarray(jax.vmap(lambda key: descend(*traced, rule, steps, (key, 3)).network.weights)(keys))
    alone = np.stack([descend(*task, rule, steps, (key, 3)).network.weights for key in keys])
    assert alone.dtype == np.float64  # a key does not decide the precision
    assert np.abs(together - alone).max() < 1e-12
    assert np.abs(together[0] - together[1]).max() > 1e-6


def test_descent_is_the_step_written_out_and_batches_differ(rng, seed):
    rule = Rule("linear", "square", rate_ratio=0.5)
    network, setting, upper = draw(rng, rule)
    path = descend(network, setting, upper, rule, Steps(0.1, 1, 2))
    with jax.enable_x64(True):
        moving = eqx.filter_jit(field)(network, setting, upper, rule)
    assert np.abs(path.network.weights[1] - network.weights - 0.1 * np.asarray(moving.weights)).max() < 1e-14
    noisy = descend(network, setting, upper, rule, Steps(0.1, 1, 2), (jax.random.key(seed), 3))
    assert np.abs(np.asarray(noisy.network.weights)[1] - path.network.weights[1]).max() > 1e-6


def test_pulls_are_what_the_loss_loses_by_each_input(rng):
    rule = Rule("exp", "tanh")
    network, setting, upper = draw(rng, rule)
    with jax.enable_x64(True):
        g = eqx.filter_jit(pulls)(network, setting, upper, rule)
        b, before = eqx.filter_jit(forward)(network, setting, rule)
        moving = eqx.filter_jit(field)(network, setting, upper, rule)
        f = np.asarray(b) @ setting.token_embeddings.T + setting.query_embeddings.T[setting.queries]
    assert before.shape == g.shape == (8, 4)
    assert np.abs(f.T @ np.asarray(g) / 8 - np.asarray(moving.weights)).max() < 1e-12  # w' = E[g phi' f]


def test_wrong_shapes_and_clocks_are_refused(rng):
    network, setting, upper = draw(rng, Rule("exp"))
    with pytest.raises(ShapeError, match="own_weights"):
        flow(network, setting, upper, Rule("exp", own_weights=True), Steps(0.1, 1, 1))
    with pytest.raises(ShapeError, match="pulls"):
        flow(network, setting, ConstantPull(np.ones((3, 4))), Rule("exp"), Steps(0.1, 1, 1))
    with pytest.raises(UsageError, match="positive"):
        Steps(0.0)
    with pytest.raises(UsageError, match="positive"):
        Adaptive(-1.0)
