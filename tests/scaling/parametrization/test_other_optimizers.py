"""Lion and schedule-free AdamW under the table: updates of known size, the same run as with one optimizer a class."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manyheads.scaling import Parametrization
from manyheads.transformer import Shape

ROLES = {
    "embedding": "embedding",
    "query": "query",
    "unembedding": "unembedding",
    "value": "value",
}  # sorted, as JAX sorts them
BASE, SHAPE = Shape(8, 4, 2), Shape(16, 8, 4)
RATE, DECAY = 1e-2, 0.1


def gradients(weights, step):
    """Some gradients that depend on the weights, of sizes that differ by class."""
    keys = jax.random.split(jax.random.key(step), len(weights))
    return {name: 10.0**-n * (jax.random.normal(key, w.shape) + w)
            for n, (key, (name, w)) in enumerate(zip(keys, weights.items(), strict=True))}  # fmt: skip


def run(transformation, weights, steps=5):
    state = transformation.init(weights)
    for step in range(steps):
        updates, state = transformation.update(gradients(weights, step), state, weights)
        weights = optax.apply_updates(weights, updates)
    return weights, state


def alone(make, row):
    """One optimizer for one class: its rate, and the decay that takes the same share of a weight."""
    return make(learning_rate=RATE * row.learning_rate, weight_decay=DECAY / row.learning_rate)


@pytest.mark.parametrize("name", ["lion", "schedule_free_adamw"])
def test_one_wrapped_optimizer_is_one_optimizer_a_class(name, seed):
    # Without an epsilon: Lion has none, and the one of Adam has a factor of its own in the table.
    make = optax.lion if name == "lion" else lambda **given: optax.contrib.schedule_free_adamw(eps=0.0, **given)
    keys = jax.random.split(jax.random.key(seed), len(ROLES))
    weights = {role: jax.random.normal(key, (6, 5)) for role, key in zip(ROLES, keys, strict=True)}
    p = Parametrization(0.5, base=BASE)
    table = p.table(SHAPE)
    found, state = run(p.optax(make(learning_rate=RATE, weight_decay=DECAY), ROLES, SHAPE), weights)
    apart = optax.multi_transform({role: alone(make, table[role]) for role in ROLES}, ROLES)
    expected, _ = run(apart, weights)
    for role in ROLES:
        np.testing.assert_allclose(found[role], expected[role], rtol=2e-4, atol=1e-6)
    if name == "schedule_free_adamw":  # the average is kept in units of the base
        ratios = {role: table[role].learning_rate for role in ROLES}
        scaled = {role: found[role] / ratios[role] for role in ROLES}
        averages = optax.contrib.schedule_free_eval_params(state, scaled)
        for role in ROLES:
            own = alone(make, table[role])
            start, own_state = run_one(own, weights, role)
            theirs = optax.contrib.schedule_free_eval_params(own_state, start)
            np.testing.assert_allclose(averages[role] * ratios[role], theirs, rtol=2e-4, atol=1e-6)


def run_one(transformation, weights, role, steps=5):
    """Run one class alone, on the gradients that it has among the others."""
    number, w = list(weights).index(role), weights[role]
    state = transformation.init(w)
    for step in range(steps):
        key = jax.random.split(jax.random.key(step), len(weights))[number]
        gradient = 10.0**-number * (jax.random.normal(key, w.shape) + w)
        updates, state = transformation.update(gradient, state, w)
        w = optax.apply_updates(w, updates)
    return w, state


def test_every_entry_of_a_lion_moves_by_the_rate(seed):
    weights = {role: jax.random.normal(jax.random.key(seed), (6, 5)) for role in ROLES}
    p = Parametrization(0.5, base=BASE)
    wrapped = p.optax(optax.lion(RATE, weight_decay=0.0), ROLES, SHAPE)
    updates, _ = wrapped.update(gradients(weights, seed), wrapped.init(weights), weights)
    for role in ROLES:
        np.testing.assert_allclose(jnp.abs(updates[role]), RATE * p.table(SHAPE)[role].learning_rate, rtol=1e-5)
