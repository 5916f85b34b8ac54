"""Preflight of a JAX training: the same words and the same result; the updates of arrays, as those of PyTorch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manyheads.errors import UsageError
from manyheads.scaling import Parametrization, preflight
from manyheads.scaling.preflight_checks.training import Training

BASE = (8, 2, 2)
P = Parametrization(base=(8, 2, 2))
TOKENS, VOCABULARY = 8, 11


def norm(x):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def make(p):
    """Return `make` of a stack of MLP blocks under `lax.scan`, of a parametrization or, for None, the usual one."""

    def made(shape, seed):
        d, table = shape.width, (p or Parametrization.standard(P.base)).table(shape)
        factors, branch = table.column("initial"), table.branch
        keys = jax.random.split(jax.random.key(seed), 5)
        stds = {"table": ("embedding", 0.5), "up": ("mlp_in", 16**-0.5), "down": ("mlp_out", 16**-0.5)}
        stds |= {"out": ("unembedding", 16**-0.5)}
        sizes = {
            "table": (VOCABULARY, d),
            "up": (shape.depth, d, d),
            "down": (shape.depth, d, d),
            "out": (d, VOCABULARY),
        }
        weights = {
            name: std * factors[role] * jax.random.normal(key, sizes[name])
            for key, (name, (role, std)) in zip(keys, stds.items(), strict=False)
        }
        roles = {name: role for name, (role, _) in stds.items()}

        def loss(weights, tokens):
            def block(x, layer):
                up, down = layer
                return x + branch * jax.nn.gelu(norm(x) @ up) @ down, None

            x, _ = jax.lax.scan(block, weights["table"][tokens], (weights["up"], weights["down"]))
            logits = norm(x) @ weights["out"]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, (3 * tokens + 1) % VOCABULARY)
            return losses.mean(), {"stream": x, "outputs": logits}

        adam = optax.adam(3e-3)
        optimizer = p.optax(adam, roles, shape) if p else adam
        batches = [jax.random.randint(key, (8, TOKENS), 0, VOCABULARY) for key in jax.random.split(keys[-1], 3)]
        return weights, optimizer, batches, loss, roles

    return made


def run(p, axes, **changes):
    given = {"seeds": range(3), "steps": 2, "parametrization": P} | changes
    return preflight(make(p), BASE, axes=axes, **given)


@pytest.mark.slow
def test_a_right_training_passes_and_the_usual_one_grows():
    assert run(P, {"heads": (2, 8)}).passed
    found = run(None, {"heads": (2, 8)})
    assert {"['up']", "['down']"} <= {each.module for each in found.broken}
    assert "['table']" not in {each.module for each in found.broken}


def test_an_update_is_the_product_of_the_change_with_its_input():
    """One step of gradient descent on a linear model: (W_1 - W_0) x in closed form."""

    def linear(shape, seed):
        w = 0.1 * seed + jnp.ones((3, shape.width))
        return {"w": w}, optax.sgd(0.5), [jnp.eye(3)], lambda weights, x: (x @ weights["w"]).mean()

    found = preflight(linear, (4, 2, 1), axes={"heads": (2, 4)}, seeds=range(2), steps=1)
    (growth,) = found.growths  # the gradient is 1 / (3 width): the update falls as 1 / H
    assert growth.module == "['w']"
    assert growth.fit.exponent == pytest.approx(-1, abs=1e-5)


@pytest.mark.slow
def test_the_search_for_the_best_rate_finds_the_one_of_a_quadratic():
    """Gradient descent on (x w - 1)^2 / 2 is best at the rate 1/|x|^2, here about 1/width: it halves when H doubles."""

    def quadratic(shape, seed):
        x = 1 + 0.1 * jax.random.normal(jax.random.key(seed), (shape.width,))
        start = {"w": jnp.full(shape.width, 0.1 * (seed + 1))}
        return start, optax.sgd(1 / 16), [x], lambda weights, x: (x @ weights["w"] - 1) ** 2 / 2

    factors = 2.0 ** np.arange(-3, 4)
    found = preflight(
        quadratic, (4, 4, 1), axes={"heads": (2, 8)}, seeds=range(3), steps=1, rate_factors=factors, train=8
    )
    (search,) = found.transfers
    assert search.outcome == "refuted"
    assert search.drift.fit.exponent == pytest.approx(-1, abs=0.1)
    assert any(each.startswith("the learning rate along H drifts by a factor 0.5") for each in found.faults())


@pytest.mark.slow
def test_a_module_of_equinox_is_trained_with_its_functions():
    def made(shape, seed):
        mlp = eqx.nn.MLP(3, 1, shape.width, 1, key=jax.random.key(seed))
        return mlp, optax.sgd(0.1), [jnp.eye(3)], lambda model, x: (jax.vmap(model)(x) ** 2).mean()

    found = preflight(made, (4, 2, 1), axes={"heads": (2, 4)}, seeds=range(2), steps=1)
    assert {".layers[*].weight", ".layers[*].bias"} == {each.module for each in found.growths}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (({}, optax.sgd(1.0), [0]), "without a loss"),
        (({"w": jnp.ones(3)}, "adam", [0], len), "needs an optax transformation"),
        (({"w": jnp.ones(3)}, optax.sgd(1.0), [0], lambda w, x: w["w"]), "the loss is no number"),
    ],
)
def test_what_is_no_jax_training_is_refused(made, said):
    with pytest.raises(UsageError, match=said):
        preflight(lambda shape, seed: Training(*made), (4, 2, 1), axes={"heads": (2, 4)}, seeds=range(2))
