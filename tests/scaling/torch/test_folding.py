"""Folding in PyTorch against the house's transformer, trained from the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.scaling.torch_models import PLAIN, plain, train

from manyheads.scaling import (
    BaseHyperparameters,
    Parametrization,
    torch_groups,
)
from manyheads.transformer import Shape, TokenInput, TransformerConfig, initialize
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.training import with_weights
from manyheads.transformer.weights import roles

pytestmark = pytest.mark.torch

START, GROWN = Shape(4, 2, 2), Shape(8, 3, 3)
TUNED = BaseHyperparameters(
    learning_rate=3e-3, epsilon=1e-3, weight_decay=0.1
)  # an epsilon of the size of gradients, so that it counts
VOCABULARY, LENGTH, STEPS = 7, 6, 6


def copy_weights(model, weights, shape, branch, logit):
    """Write the house's weights into the plain module, times the factors that its forward pass lacks."""
    import torch

    def put(tensor, array, factor=1.0):
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.array(array)).reshape(tensor.shape) * factor)

    put(model.embedding.weight, weights.embedding)
    put(model.positions, weights.positional)
    put(model.unembedding.weight, weights.unembedding.T)
    put(model.unembedding.bias, weights.unembedding_bias)
    put(model.final_norm.weight, weights.final_gain)
    put(model.final_norm.bias, weights.final_shift)
    factors = {"query": logit, "output": branch, "mlp_out": branch}
    for number, block in enumerate(model.blocks):
        own = jax.tree.map(lambda array, number=number: array[number], weights.blocks)
        for name in ("query", "key", "value"):  # (H, d, N) -> (H N, d)
            put(getattr(block, name).weight, getattr(own, name).transpose(0, 2, 1), factors.get(name, 1.0))
        put(block.output.weight, own.output.reshape(shape.width, -1).T, branch)
        put(block.mlp_in.weight, own.mlp_in.T)
        put(block.mlp_out.weight, own.mlp_out.T, branch)
        for name in ("query", "key", "value", "output", "mlp_in", "mlp_out"):
            put(getattr(block, name).bias, getattr(own, f"{name}_bias"), factors.get(name, 1.0))
        for name in ("attention", "mlp"):
            norm = getattr(block, f"{name}_norm")
            put(norm.weight, getattr(own, f"{name}_gain"))
            put(norm.bias, getattr(own, f"{name}_shift"))


def folded_curves(optimizer, a, c, seed):
    """Losses of the house's transformer, of the plain torch module with folded groups, and of that without groups."""
    import torch

    hyperparameters = TUNED if optimizer == "adam" else BaseHyperparameters(learning_rate=0.1, weight_decay=0.1)
    p = Parametrization(a, c, richness=0.5, optimizer=optimizer, base=START)
    branch, logit = (GROWN.depth / START.depth) ** -c, (GROWN.key_dim / START.key_dim) ** (0.5 - a)
    config = TransformerConfig(
        GROWN, TokenInput(VOCABULARY), LENGTH, VOCABULARY, causal=True, read_out="token", biases=True
    )
    with jax.enable_x64(True):
        key = jax.random.key(seed)
        model = initialize(config, p.scaling(GROWN, config.inputs), key, jnp.float64)
        # Biases away from zero: they have to be folded as well.
        weights = jax.tree.map(lambda x: x + 0.01 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), model.weights)
        model = with_weights(model, weights)
        tokens = jax.random.randint(jax.random.fold_in(key, 1), (4, LENGTH + 1), 0, VOCABULARY)
        tx = optax.adamw(
            hyperparameters.learning_rate, eps=hyperparameters.epsilon, weight_decay=hyperparameters.weight_decay
        )
        if optimizer == "sgd":
            tx = optax.chain(
                optax.add_decayed_weights(hyperparameters.weight_decay), optax.sgd(hyperparameters.learning_rate)
            )
        expected = house_curve(model, p.optax(tx, roles(weights), GROWN), tokens)
        twins = [plain(GROWN, VOCABULARY, LENGTH) for _ in range(2)]
        for twin in twins:
            copy_weights(twin, model.weights, GROWN, branch, logit)
        tokens = torch.from_numpy(np.array(tokens))
    kind = torch.optim.AdamW if optimizer == "adam" else torch.optim.SGD
    groups = torch_groups(p, twins[0], hyperparameters, PLAIN, GROWN), [{"params": list(twins[1].parameters())}]
    made = [kind(each, lr=hyperparameters.learning_rate) for each in groups]
    curves = [train(twin, optimizer, tokens, STEPS) for twin, optimizer in zip(twins, made, strict=True)]
    return expected, *curves


def house_curve(model, tx, tokens):
    """Train the house's transformer on the next token, in full batch; return the losses."""
    batch, weights = (tokens[:, :-1], tokens[:, 1:]), model.weights
    state, losses = tx.init(weights), []

    @jax.jit
    def step(weights, state):
        loss, gradient = jax.value_and_grad(lambda w: cross_entropy(with_weights(model, w), batch))(weights)
        updates, state = tx.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    for _ in range(STEPS):
        weights, state, loss = step(weights, state)
        losses.append(float(loss))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "a", "c"), [("adam", 1.0, 1.0), ("adam", 0.5, 0.75), ("sgd", 1.0, 0.5), ("sgd", 0.5, 1.0)]
)
def test_folded_torch_trains_as_the_house_does(optimizer, a, c, seed):
    """Same weights, several steps in double precision, every role present: the losses are the same numbers."""
    expected, folded, without = folded_curves(optimizer, a, c, seed)
    assert expected[-1] < expected[0] - 1e-3
    assert folded == pytest.approx(expected, rel=0, abs=1e-6)
    assert max(abs(np.subtract(without, expected))) > 1e-4
