"""Attention layer under an MLP: forward pass, losses, the vector field of gradient flow, and training on mini-batches.

`manyheads.theory.joma.systems.gradient_flow` integrates the field.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from manyheads._arrays import follows_caller, takes_arrays
from manyheads.errors import ShapeError
from manyheads.theory.joma.task import JomaTask, Sizes, UpdateRule

FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {  # of the logits over the temperature, by attention
    "linear": lambda scaled: scaled,
    "exp": jnp.exp,
    "sigmoid": jax.nn.sigmoid,
    "square": jnp.square,
    "normalized-sigmoid": jax.nn.sigmoid,
}

OPTIMIZERS = {"sgd": optax.identity(), "adam": optax.scale_by_adam()}

Loss: TypeAlias = Callable[[jax.Array, JomaTask], jax.Array]


class LayerParameters(eqx.Module):
    """Trained parameters of the layer: logits z, and weights W shared by all queries or one matrix per query."""

    logits: Float[Any, "*states queries tokens"]
    weights: Float[Any, "*states width neurons"] | Float[Any, "*states queries width neurons"]


class CrossEntropy(eqx.Module):
    """Mean cross-entropy, in nats, of classes read out by a fixed upper layer."""

    upper: Float[Any, "classes neurons"]

    def __call__(self, hidden: Float[Array, "samples neurons"], task: JomaTask) -> Float[Array, ""]:
        """Compute the loss of hidden values."""
        scores = jax.nn.log_softmax(hidden @ self.upper.T)  # (N, C)
        return -jnp.take_along_axis(scores, task.labels[:, None], axis=1).mean()


class LinearLoss(eqx.Module):
    """Loss -mean_n g_n . h_n with constant gradients g: the stationary gradient of theorem 2."""

    gradients: Float[Any, "samples neurons"]

    def __call__(self, hidden: Float[Array, "samples neurons"], task: JomaTask) -> Float[Array, ""]:
        """Compute the loss of hidden values."""
        if hidden.shape != self.gradients.shape:
            raise ShapeError(
                f"gradients {self.gradients.shape}: expected the shape of the hidden values, {hidden.shape}"
            )
        return -(hidden * self.gradients).sum(-1).mean()


class LogisticLoss(eqx.Module):
    """Logistic loss of the sum of the hidden values, its sign the parity of the label: a gradient that fades."""

    scale: Float[Any, ""]

    def __call__(self, hidden: Float[Array, "samples neurons"], task: JomaTask) -> Float[Array, ""]:
        """Compute the loss of hidden values."""
        signs = 2 * (jnp.asarray(task.labels) % 2) - 1
        return self.scale * jax.nn.softplus(-signs * hidden.sum(-1)).mean()


def draw_parameters(sizes: Sizes, rule: UpdateRule, rng: np.random.Generator) -> LayerParameters:
    """Draw normal logits of std 0.2, of mean 1 for linear and square attention, and weights of std 0.3, float64."""
    logits = 0.2 * rng.normal(size=(sizes.queries, sizes.tokens)) + (rule.attention in ("linear", "square"))
    own = (sizes.queries,) if rule.per_query_weights else ()
    return LayerParameters(logits, 0.3 * rng.normal(size=(*own, sizes.width, sizes.neurons)))


def draw_upper(sizes: Sizes, rng: np.random.Generator) -> CrossEntropy:
    """Draw the upper layer behind a cross-entropy: normal, variance 1/K, float64."""
    return CrossEntropy(rng.normal(size=(sizes.classes, sizes.neurons)) * sizes.neurons**-0.5)


@takes_arrays
def attend(
    rule: UpdateRule, logits: Float[Array, "... tokens"], contexts: Float[Array, "... tokens"]
) -> Float[Array, "... tokens"]:
    """Compute the attention b from logits and frequencies."""
    scaled = logits / rule.temperature
    if rule.attention == "softmax":
        return jax.nn.softmax(scaled + jnp.log(contexts), axis=-1)  # frequency 0: log is -inf, attention exactly 0
    b = FUNCTIONS[rule.attention](scaled) * contexts
    return b / b.sum(-1, keepdims=True) if rule.attention == "normalized-sigmoid" else b


def forward(
    network: LayerParameters, task: JomaTask, rule: UpdateRule
) -> tuple[Float[Array, "samples tokens"], Float[Array, "samples neurons"]]:
    """Compute the attention b and the pre-activations W^T f."""
    logits, weights, queries = jnp.asarray(network.logits), jnp.asarray(network.weights), jnp.asarray(task.queries)
    if weights.ndim != 2 + rule.per_query_weights:
        raise ShapeError(
            f"weights {weights.shape} with per_query_weights={rule.per_query_weights}: expected (d, K) or (Q, d, K)"
        )
    b = attend(rule, logits[queries], jnp.asarray(task.contexts))  # (N, M)
    f = b @ task.token_embeddings.T + jnp.asarray(task.query_embeddings).T[queries]  # (N, d)
    return b, jnp.einsum("nd,ndk->nk", f, weights[queries]) if rule.per_query_weights else f @ weights


@takes_arrays
def objective(
    network: LayerParameters,
    task: JomaTask,
    loss: Loss,
    rule: UpdateRule,
    gates: Bool[Array, "samples neurons"] | None = None,
) -> Float[Array, ""]:
    """Compute the loss; `gates` replace the ReLU's own."""
    _, preactivations = forward(network, task, rule)
    hidden = rule.function(preactivations) if gates is None else jnp.where(gates, preactivations, 0.0)
    return loss(hidden, task)


@takes_arrays
def vector_field(
    network: LayerParameters,
    task: JomaTask,
    loss: Loss,
    rule: UpdateRule,
    gates: Bool[Array, "samples neurons"] | None = None,
) -> LayerParameters:
    """Compute the time derivative of logits and weights under gradient flow with weight decay."""
    gradient = jax.grad(objective)(network, task, loss, rule, gates)
    return LayerParameters(
        -rule.learning_rate_ratio * (gradient.logits + rule.weight_decay * network.logits),
        -(gradient.weights + rule.weight_decay * network.weights),
    )


@takes_arrays
def token_weights(task: JomaTask, weights: Float[Any, "... width neurons"]) -> Any:
    """Project the weights on the token embeddings, v = U_C^T W, (..., M, K)."""
    return task.token_embeddings.T @ weights


@follows_caller
def train_layer(
    problem: tuple[LayerParameters, JomaTask, CrossEntropy],
    rule: UpdateRule,
    optimizer: str,
    learning_rate: float,
    steps: int,
    batch: int,
    seed: int,
) -> tuple[LayerParameters, Any]:
    """Train logits, weights and the upper matrix; return the trained layer and the decrease of the loss over all data.

    `optimizer` is a name of `OPTIMIZERS`. Batches are drawn with replacement.
    """
    clock = jnp.asarray(learning_rate, float), jnp.asarray(steps), jnp.asarray(seed)
    return _train(problem, rule.traced(), optimizer, clock, batch)


@eqx.filter_jit
def _train(problem: Any, rule: UpdateRule, optimizer: str, clock: Any, batch: int) -> tuple[LayerParameters, jax.Array]:
    layer, task, upper = jax.tree.map(jnp.asarray, problem)
    learning_rate, steps, seed = clock
    transform, key = OPTIMIZERS[optimizer], jax.random.key(seed)

    def loss(parameters: tuple[LayerParameters, CrossEntropy], samples: JomaTask) -> jax.Array:
        return objective(parameters[0], samples, parameters[1], rule)

    def advance(number: jax.Array, state: Any) -> Any:
        parameters, memory = state
        rows = jax.random.randint(jax.random.fold_in(key, number), (batch,), 0, len(task.contexts))
        updates, memory = transform.update(jax.grad(loss)(parameters, task.take(rows)), memory)
        return jax.tree.map(lambda p, u: p - learning_rate * u, parameters, updates), memory

    start = (layer, upper)
    end, _ = jax.lax.fori_loop(0, steps, advance, (start, transform.init(start)))
    return end[0], loss(start, task) - loss(end, task)
