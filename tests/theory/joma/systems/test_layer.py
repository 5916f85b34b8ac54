"""The layer, its field, and the paths: against loops, finite differences, and paths of another method."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp
from tests.theory.joma.problems import STEPS, draw

from manyheads.errors import CertificateError, ShapeError, UsageError
from manyheads.theory.joma.systems.gradient_flow import (
    AdaptiveSteps,
    FixedSteps,
    adaptive_gradient_flow,
    gradient_descent,
    gradient_flow,
)
from manyheads.theory.joma.systems.layer import LayerParameters, LinearLoss, forward, objective, vector_field
from manyheads.theory.joma.task import UpdateRule


@pytest.mark.parametrize("attention", ["linear", "exp", "softmax"])
@pytest.mark.parametrize("own", [False, True])
def test_the_loss_is_what_loops_over_the_definition_give(rng, attention, own):
    rule = UpdateRule(attention, "tanh", temperature=0.7, per_query_weights=own)
    network, task, upper = draw(rng, rule)
    total = 0.0
    for x, q, label in zip(task.contexts, task.queries, task.labels, strict=True):
        s = network.logits[q] / 0.7
        b = s * x if attention == "linear" else np.exp(s) * x
        b = b / b.sum() if attention == "softmax" else b
        f = task.token_embeddings @ b + task.query_embeddings[:, q]
        scores = upper.upper @ np.tanh((network.weights[q] if own else network.weights).T @ f)
        total += np.log(np.exp(scores).sum()) - scores[label]
    with jax.enable_x64(True):
        assert abs(float(eqx.filter_jit(objective)(network, task, upper, rule)) - total / 12) < 1e-12


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_the_field_is_downhill_by_finite_differences(rng, attention):
    rule = UpdateRule(attention, "gelu", learning_rate_ratio=3.0, weight_decay=0.2)
    network, task, upper = draw(rng, rule)
    direction = LayerParameters(rng.normal(size=network.logits.shape), rng.normal(size=network.weights.shape))
    with jax.enable_x64(True):
        moving = eqx.filter_jit(vector_field)(network, task, upper, rule)

        def loss(by):
            moved = LayerParameters(network.logits + by * direction.logits, network.weights + by * direction.weights)
            return float(eqx.filter_jit(objective)(moved, task, upper, rule))

    with jax.enable_x64(True):
        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
        moving = jax.tree.map(np.asarray, moving)
    along = (moving.logits / -3.0 - 0.2 * network.logits) * direction.logits
    along = float(along.sum() + ((-moving.weights - 0.2 * network.weights) * direction.weights).sum())
    assert abs(slope - along) < 1e-8


def test_attention_to_absent_tokens_is_zero_and_its_gradient_finite(rng):
    rule = UpdateRule("softmax", "gelu")
    network, task, upper = draw(rng, rule)
    contexts = task.contexts.copy()
    contexts[:, 0], contexts[:, 1] = 0, contexts[:, 0] + contexts[:, 1]
    task = type(task)(contexts, task.queries, task.labels, task.token_embeddings, task.query_embeddings)
    with jax.enable_x64(True):
        b, _ = eqx.filter_jit(forward)(network, task, rule)
        moving = eqx.filter_jit(vector_field)(network, task, upper, rule)
    assert (np.asarray(b)[:, 0] == 0).all()
    assert np.isfinite(moving.logits).all()
    assert np.abs(np.asarray(moving.logits)[:, 0]).max() == 0


@pytest.mark.slow
def test_the_fixed_step_is_of_order_four(rng):
    rule = UpdateRule("exp", "gelu")
    network, task, upper = draw(rng, rule)
    field, size = eqx.filter_jit(vector_field), network.logits.size

    def slope(t, y):
        state = LayerParameters(y[:size].reshape(network.logits.shape), y[size:].reshape(network.weights.shape))
        return np.concatenate([np.asarray(part).ravel() for part in jax.tree.leaves(field(state, task, upper, rule))])

    with jax.enable_x64(True):
        start = np.concatenate([network.logits.ravel(), network.weights.ravel()])
        fine = solve_ivp(slope, (0, 12.0), start, "DOP853", rtol=1e-11, atol=1e-13).y[size:, -1]
    coarse = [gradient_flow(network, task, upper, rule, FixedSteps(0.2 / n, n, 60)) for n in (1, 2)]
    errors = [np.abs(path.network.weights[-1].ravel() - fine).max() for path in coarse]
    assert coarse[0].network.weights.dtype == np.float64
    assert coarse[0].losses[0] > coarse[0].losses[-1]
    assert errors[1] < 1e-6
    assert 3.0 < np.log2(errors[0] / errors[1]) < 5.5


@pytest.mark.slow
def test_with_kinks_the_adaptive_path_keeps_near_a_fine_fixed_one(rng):
    rule = UpdateRule("exp", "relu")
    problem = draw(rng, rule)
    fine = gradient_flow(*problem, rule, FixedSteps.until(4.0, 1e-3, 60))
    path = adaptive_gradient_flow(*problem, rule, AdaptiveSteps(4.0, 2))
    # The margin, 1e-3, times what gates do.
    assert np.abs(path.network.weights - fine.network.weights[::30]).max() < 2e-2


@pytest.mark.slow
def test_a_path_that_cannot_end_says_so(rng):
    rule = UpdateRule("exp", "relu")
    problem = draw(rng, rule)
    problem[0].weights[:] *= 3.0  # strong enough for gates to move
    with pytest.raises(CertificateError, match="did not reach its horizon"):
        adaptive_gradient_flow(*problem, rule, AdaptiveSteps(40.0, 2, crossings=-1))


@pytest.mark.slow
def test_flows_vmap_over_seeds(rng):
    rule = UpdateRule("exp", "gelu")
    problems = [draw(rng, rule) for _ in range(2)]
    with jax.enable_x64(True):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)
        together = np.asarray(jax.vmap(lambda *p: gradient_flow(*p, rule, STEPS))(*stacked).network.logits)
    alone = np.stack([gradient_flow(*problem, rule, STEPS).network.logits for problem in problems])
    assert together.shape == (2, 61, 3, 6)
    assert np.abs(together - alone).max() < 1e-12
    assert np.abs(together[0] - together[1]).max() > 1e-6


@pytest.mark.slow
def test_descents_vmap_over_seeds_and_keys(rng, seed):
    rule, steps = UpdateRule("linear", "square", learning_rate_ratio=0.5), FixedSteps(0.1, 1, 2)
    problems, keys = [draw(rng, rule) for _ in range(2)], jax.random.split(jax.random.key(seed), 2)
    with jax.enable_x64(True):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)
        descend = jax.vmap(lambda key, *p: gradient_descent(*p, rule, steps, (key, 3)).network.weights)
        together = np.asarray(descend(keys, *stacked))
    pairs = zip(keys, problems, strict=True)
    alone = np.stack([gradient_descent(*p, rule, steps, (key, 3)).network.weights for key, p in pairs])
    other = gradient_descent(*problems[0], rule, steps, (keys[1], 3)).network.weights
    whole = gradient_descent(*problems[0], rule, steps).network.weights
    assert alone.dtype == np.float64  # a key does not decide the precision
    assert np.abs(together - alone).max() < 1e-12
    assert min(np.abs(alone[0] - each).max() for each in (alone[1], other, whole)) > 1e-6


def test_descent_is_the_step_written_out(rng):
    rule = UpdateRule("linear", "square", learning_rate_ratio=0.5)
    network, task, upper = draw(rng, rule)
    path = gradient_descent(network, task, upper, rule, FixedSteps(0.1, 1, 2))
    with jax.enable_x64(True):
        moving = eqx.filter_jit(vector_field)(network, task, upper, rule)
    assert np.abs(path.network.weights[1] - network.weights - 0.1 * np.asarray(moving.weights)).max() < 1e-14


def test_wrong_shapes_and_clocks_are_refused(rng):
    network, task, upper = draw(rng, UpdateRule("exp"))
    with pytest.raises(ShapeError, match="per_query_weights"):
        gradient_flow(network, task, upper, UpdateRule("exp", per_query_weights=True), FixedSteps(0.1, 1, 1))
    with pytest.raises(ShapeError, match="gradients"):
        gradient_flow(network, task, LinearLoss(np.ones((3, 4))), UpdateRule("exp"), FixedSteps(0.1, 1, 1))
    with pytest.raises(UsageError, match="positive"):
        FixedSteps(0.0)
    with pytest.raises(UsageError, match="positive"):
        AdaptiveSteps(-1.0)
