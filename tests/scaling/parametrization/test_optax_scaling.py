"""Both forms of the table, the schemes at the base shape and rescaled optimizers, by training in JAX."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manyheads.errors import UsageError
from manyheads.scaling import Parametrization
from manyheads.scaling.parametrization.optax_scaling import rescale
from manyheads.transformer import Shape, TokenInput, TransformerConfig, initialize
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.scaling import ROLES
from manyheads.transformer.training import with_weights
from manyheads.transformer.weights import roles

BASE = Shape(4, 2, 2)
LARGER = Shape(8, 4, 4)
EXPONENTS = list(product((0.5, 1.0), (0.5, 0.75, 1.0)))


def run(p, shape, optimizer, key, steps=6):
    """Train a causal model in double precision with the parametrization and return outputs and losses."""
    config = TransformerConfig(shape, TokenInput(7), 5, 7, causal=True, read_out="token", biases=True)
    scaling = jax.tree.map(jnp.float64, p.scaling(shape, config.inputs))
    table = p.table(shape)
    factors = jax.tree.map(jnp.float64, (table.column("learning_rate"), table.column("epsilon")))
    return _train(config, scaling, factors, optimizer, key, steps)


@partial(jax.jit, static_argnums=(0, 3, 5))
def _train(config, scaling, factors, optimizer, key, steps):
    """Scheme and form are traced: one program for all of them."""
    model = initialize(config, scaling, key, jnp.float64)
    batch = jax.random.randint(key, (2, 4, 5), 0, 7)
    tx = rescale(optimizer, roles(model.weights), *factors)

    def step(state, _):
        weights, memory = state
        value, gradient = jax.value_and_grad(lambda w: cross_entropy(with_weights(model, w), batch))(weights)
        updates, memory = tx.update(gradient, memory, weights)
        return (optax.apply_updates(weights, updates), memory), value

    (weights, _), losses = jax.lax.scan(step, (model.weights, tx.init(model.weights)), None, steps)
    return with_weights(model, weights)(batch[0]), losses


# An epsilon as large as the gradients and decay that is felt, so that both are tested.
OPTIMIZERS = {
    "adam": optax.adamw(0.02, eps=1e-2, weight_decay=0.5),
    "sgd": optax.sgd(0.3, momentum=0.9),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("a", "c"), [(0.5, 0.5), (1.0, 1.0)])
def test_both_forms_train_the_same_function(a, c, optimizer, seed):
    with jax.enable_x64(True):
        key = jax.random.key(seed)
        found = [
            run(Parametrization(a, c, 2.0, optimizer, BASE, form=form), LARGER, OPTIMIZERS[optimizer], key)
            for form in ("effective", "multiplier")
        ]
        (outputs, losses), (other, others) = found
        assert float(losses[-1]) < float(losses[0])
        np.testing.assert_allclose(losses, others, rtol=1e-10)
        np.testing.assert_allclose(outputs, other, rtol=0, atol=1e-9 * float(jnp.abs(outputs).max()))
        # The comparison can fail: another rate of the queries alone is seen.
        (_, plain) = run(Parametrization.mup(BASE, optimizer, a), LARGER, OPTIMIZERS[optimizer], key)
        assert np.abs(np.asarray(plain) - np.asarray(losses)).max() > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_scheme_trains_the_base_shape_alike_to_the_last_bit(optimizer, seed):
    key = jax.random.key(seed)
    with jax.enable_x64(True):
        schemes = [
            Parametrization.standard(LARGER, optimizer),
            Parametrization.mup(LARGER, optimizer),
            *(Parametrization(a, c, 1.0, optimizer, LARGER) for a, c in EXPONENTS),
        ]
        outputs = [np.asarray(run(p, LARGER, OPTIMIZERS[optimizer], key)[0]) for p in schemes]
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)


def test_rescaling_is_adam_with_epsilon_rate_and_decay_of_each_class(rng):
    """Against optax itself, called once for each class with its own numbers."""
    p = Parametrization(0.5, 0.5, 1.0, "adam", BASE)
    table = p.table(LARGER)
    weights = {role: jnp.asarray(rng.normal(size=3), jnp.float32) for role in ROLES} | {"absent": None}
    labels = {role: role for role in ROLES} | {"absent": None}
    tx = p.optax(optax.adamw(0.01, eps=0.3, weight_decay=0.2), labels, LARGER)
    state = tx.init(weights)
    singles = {
        role: optax.adamw(0.01 * row.learning_rate, eps=0.3 * row.epsilon, weight_decay=0.2 * row.weight_decay)
        for role, row in ((row.role, row) for row in table.rows)
    }
    states = {role: singles[role].init(weights[role]) for role in ROLES}
    for _ in range(3):
        gradient = {role: jnp.asarray(rng.normal(size=3), jnp.float32) for role in ROLES} | {"absent": None}
        updates, state = tx.update(gradient, state, weights)
        for role in ROLES:
            expected, states[role] = singles[role].update(gradient[role], states[role], weights[role])
            assert updates[role].dtype == jnp.float32
            np.testing.assert_allclose(updates[role], expected, rtol=2e-5, atol=1e-9)


def test_an_unknown_role_is_refused():
    with pytest.raises(UsageError, match="no role is called 'adapter'"):
        Parametrization(base=BASE).optax(optax.adam(1e-3), {"x": "adapter"}, LARGER)


def test_labels_and_weights_need_not_have_the_same_structure():
    """One name for a branch, weights that a mask leaves out, arguments that a transformation wants besides."""
    p = Parametrization(base=Shape(8, 1, 1))
    ones = {"block": [jnp.ones(2), (jnp.ones(1), None)], "table": jnp.ones(3), "kept": {"deep": jnp.ones(1)}}
    labels = {"block": "value", "table": "embedding", "kept": {"deep": "bias"}}
    chained = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())
    tx = p.optax(chained, labels, Shape(32, 1, 1))
    updates, _ = tx.update(ones, tx.init(ones), ones, value=1.0)
    learning_rate = p.table(Shape(32, 1, 1)).column("learning_rate")
    moved = {"value": updates["block"], "embedding": updates["table"], "bias": updates["kept"]}
    for role, branch in moved.items():
        assert [float(leaf[0]) for leaf in jax.tree.leaves(branch)] == pytest.approx(
            [-learning_rate[role] / p.table(Shape(32, 1, 1))[role].epsilon] * len(jax.tree.leaves(branch))
        )
    frozen = {"train": p.optax(optax.sgd(1.0), labels, Shape(32, 1, 1)), "freeze": optax.set_to_zero()}
    tx = optax.multi_transform(frozen, {"block": "train", "table": "train", "kept": "freeze"})
    masked, _ = tx.update(ones, tx.init(ones), ones)
    np.testing.assert_allclose(masked["table"], updates["table"])
    assert not masked["kept"]["deep"].any()


def test_a_weight_without_a_role_is_refused_by_name_and_at_once():
    p = Parametrization(base=BASE)
    tx = p.optax(optax.adam(1e-3), {"a": {"w": "value"}}, LARGER)
    with pytest.raises(UsageError, match=r"the weight \['a'\]\['b'\] has no role"):
        tx.init({"a": {"w": jnp.ones(1), "b": jnp.ones(1)}})
    with pytest.raises(UsageError, match=r"0\.1 is no optax transformation"):
        p.optax(0.1, {}, LARGER)
