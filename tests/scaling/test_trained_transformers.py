"""Motions against a training written out by hand; the sweep against single runs; parametrizations at the base."""

import jax
import numpy as np
import pytest
from tests.scaling.adam import adam_steps

from manyheads.errors import UsageError
from manyheads.scaling import Parametrization
from manyheads.scaling.task import digits_task, text_task
from manyheads.scaling.trained.transformers import TWINS, Recipe, inputs_of, measure_updates, sweep_losses
from manyheads.transformer import Shape, initialize
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.training import with_weights
from manyheads.transformer.weights import roles

BASE = Shape(4, 2, 2)
SHAPE = Shape(8, 2, 2)
P = Parametrization(0.5, 1.0, base=BASE)


@pytest.fixture(scope="module")
def task():
    return digits_task(batch=16)


@jax.jit
def slopes(model, batch):
    return jax.grad(lambda weights: cross_entropy(with_weights(model, weights), batch))(model.weights)


@pytest.mark.slow
def test_motions_are_those_of_a_training_by_hand(task, seed):
    """Adam with each class's own numbers, in NumPy; hidden inputs recomputed from the definition."""
    key, learning_rate, steps = jax.random.key(seed), 0.01, 3
    with jax.enable_x64(True):  # as in a study: compiled once for this test and the contract's rows
        found = measure_updates(task, P, SHAPE, Recipe(epsilon=1e-4), learning_rate, (1, steps), key)

    config, table = task.config(SHAPE), P.table(SHAPE)
    for_model, for_batches, for_probe = jax.random.split(key, 3)
    start = initialize(config, P.scaling(SHAPE, config.inputs), for_model)
    numbers = {row.role: (learning_rate * row.learning_rate, 1e-4 * row.epsilon) for row in table.rows}
    batches = [task.batches(jax.random.fold_in(for_batches, step)) for step in range(steps)]
    weights, _ = adam_steps(
        start.weights, lambda weights, batch: (0.0, slopes(with_weights(start, weights), batch)), batches, numbers
    )
    probe = task.batches(for_probe)[0]
    before, now = start.record(probe), with_weights(start, weights).record(probe)

    def rms(array):
        return float(np.sqrt(np.mean(np.square(np.asarray(array, np.float64)))))

    assert found.outputs[1] == pytest.approx(rms(now.outputs - before.outputs), rel=1e-3)
    assert found.residual[1] == pytest.approx(rms(now.layers.stream[-1] - before.layers.stream[-1]), rel=1e-3)
    logit = SHAPE.key_dim**-0.5  # at exponent 1/2 the base's logits keep their scale
    a_now, a_before = (
        logit * np.einsum("lbhqn,lbhkn->lbhqk", record.layers.queries, record.layers.keys) for record in (now, before)
    )
    assert found.logits[1] == pytest.approx(rms(a_now - a_before), rel=1e-3)
    assert found.logits_start == pytest.approx(rms(a_before), rel=1e-4)
    assert found.head_variance[1] == pytest.approx(a_now.var(axis=2).mean(), rel=1e-3)
    keys = [for_model, *(jax.random.fold_in(for_model, number) for number in range(1, TWINS))]
    twins = [initialize(config, P.scaling(SHAPE, config.inputs), key).record(probe) for key in keys]
    each = [np.einsum("lbhqn,lbhkn->lbhqk", twin.layers.queries, twin.layers.keys) for twin in twins]
    assert found.head_variance_start == pytest.approx(
        logit**2 * np.mean([a.var(axis=2).mean() for a in each]), rel=1e-3
    )
    stack = np.stack([np.asarray(twin.layers.stream[-1], np.float64).reshape(-1, SHAPE.width) for twin in twins])
    kernels = stack @ stack.transpose(0, 2, 1) / SHAPE.width
    assert found.kernel_std == pytest.approx(np.sqrt(kernels.var(axis=0, ddof=1).mean()), rel=1e-3)
    streams = [now.start, now.layers.stream[0]]
    moved = []
    for layer, stream in enumerate(streams):
        z = np.asarray(stream, np.float64)
        z = (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + config.epsilon)
        z = z * np.asarray(weights.blocks.attention_gain[layer])
        moved.append(np.einsum("btd,hdn->bhtn", z, weights.blocks.query[layer] - start.weights.blocks.query[layer]))
    assert found.query_by_weights[1] == pytest.approx(rms(np.stack(moved)), rel=1e-3)


def test_every_matrix_of_the_blocks_acts_on_its_inputs(task, seed):
    """What is taken for the inputs of a matrix gives, times the matrix, what the network computed with it."""
    config, p = task.config(SHAPE), Parametrization(base=SHAPE)
    model = initialize(config, p.scaling(SHAPE, config.inputs), jax.random.key(seed))
    record = model.record(task.batches(jax.random.key(seed))[0], patterns=True)
    layers, found = record.layers, {}
    for role in ("query", "key", "value", "output", "mlp_in", "mlp_out"):
        product, given = inputs_of(role, model, record)
        found[role] = np.einsum(product, given, getattr(model.weights.blocks, role))
    computed = {"query": layers.queries, "key": layers.keys, "value": layers.values}
    computed |= {"output": layers.attention, "mlp_out": layers.mlp}
    for role, expected in computed.items():
        np.testing.assert_allclose(found[role], expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(jax.nn.gelu(found["mlp_in"], approximate=False), layers.hidden, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_sweep_is_its_single_runs_and_schemes_agree_at_the_base(task, seed):
    key, learning_rates = jax.random.key(seed), [1e-3, 1e-2, 3.0]
    recipe = Recipe(steps=8)
    with jax.enable_x64(True):  # as in a study: compiled once for this test and the contract's row
        together = sweep_losses(task, P, BASE, recipe, learning_rates, key)
        standard = sweep_losses(task, Parametrization.standard(BASE), BASE, recipe, learning_rates, key)
        alone = sweep_losses(
            task, P, BASE, recipe, [learning_rates[1]] * 3, key
        )  # three again: the same compiled program
    assert together.shape == (3, 8)
    assert together[0, 0] == together[1, 0] == together[2, 0]
    np.testing.assert_array_equal(together, standard)
    np.testing.assert_allclose(alone, together[[1, 1, 1]], rtol=1e-4)
    assert not np.allclose(together[0], together[1])


@pytest.mark.slow
def test_gradient_descent_takes_its_own_table_and_measures_what_is_asked_for(task, seed):
    """One step written out: every weight moves by its class's rate times its gradient."""
    p, key, learning_rate = Parametrization(1.0, 1.0, optimizer="sgd", base=BASE), jax.random.key(seed), 0.1
    found = measure_updates(task, p, SHAPE, Recipe(), learning_rate, (1,), key, fields=("outputs",))
    assert [name for name, value in found._asdict().items() if value is not None] == ["outputs"]
    config, factors = task.config(SHAPE), p.table(SHAPE).column("learning_rate")
    for_model, for_batches, for_probe = jax.random.split(key, 3)
    start = initialize(config, p.scaling(SHAPE, config.inputs), for_model)
    batch, probe = task.batches(jax.random.fold_in(for_batches, 0)), task.batches(for_probe)[0]
    gradient = slopes(start, batch)
    moved = jax.tree.map(
        lambda role, w, g: w - learning_rate * factors[role] * g, roles(start.weights), start.weights, gradient
    )
    change = np.asarray(with_weights(start, moved)(probe) - start(probe), np.float64)
    assert found.outputs[0] == pytest.approx(np.sqrt(np.mean(change**2)), rel=1e-3)


def test_the_text_task_predicts_the_next_character():
    task = text_task(batch=2, length=8)
    inputs, answers = map(np.asarray, jax.jit(lambda key: task.batches(key))(jax.random.key(0)))
    assert inputs.shape == answers.shape == (2, 8)
    assert (inputs[:, 1:] == answers[:, :-1]).all()
    assert task.config(BASE).causal
    assert int(inputs.max()) < task.config(BASE).outputs


@pytest.mark.parametrize(
    "call",
    [
        lambda: digits_task(batch=0),
        lambda: text_task(batch=0),
        lambda: Recipe(epsilon=-1.0),
        lambda: Recipe(steps=0),
        lambda: measure_updates(None, P, BASE, Recipe(), 0.1, (4, 4), None),
        lambda: measure_updates(None, P, BASE, Recipe(), 0.1, (), None),
        lambda: measure_updates(None, P, BASE, Recipe(), 0.1, (4,), None, fields=("speed",)),
    ],
)
def test_wrong_use_is_refused(call):
    with pytest.raises(UsageError):
        call()
