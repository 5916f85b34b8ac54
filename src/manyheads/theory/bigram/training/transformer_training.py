"""Transformer training on the task: samples as a function of a key, excess loss, and attention at the positions.

The context is followed by the query, whose output is the distribution of the target. All weights are trained on the
cross-entropy, embeddings of tokens and positions included.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from manyheads.theory.bigram.task import BigramTask
from manyheads.transformer import Shape, TokenInput, Transformer, TransformerConfig, initialize, standard_scaling

READ_OUT = 0.02  # std of the read-out at init: the first predictions are nearly uniform


class BigramSource(eqx.Module):
    """Batches of a task with equally frequent tokens: key -> tokens (B, T + 1), the query last, and targets (B,)."""

    transition: jax.Array  # (N, N)
    positions: jax.Array  # (N, Q)
    weights: jax.Array  # (N, Q)
    length: int = eqx.field(static=True)
    size: int = eqx.field(static=True)

    def __call__(self, key: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Draw a batch."""
        for_tokens, for_places, for_targets = jax.random.split(key, 3)
        tokens = jax.random.randint(for_tokens, (self.size, self.length + 1), 0, len(self.transition))
        query = tokens[:, -1]
        chosen = jax.random.categorical(for_places, jnp.log(self.weights)[query])
        attended = jnp.take_along_axis(tokens, self.positions[query, chosen][:, None], 1)[:, 0]
        return tokens, jax.random.categorical(for_targets, jnp.log(self.transition.T)[attended])


class Probe(NamedTuple):
    """Contexts with their true conditional distributions."""

    tokens: jax.Array  # (B, T + 1), the query last
    truth: np.ndarray  # distributions of the targets, (B, N)
    information: float  # of target and context given the query, in nats: the excess loss of uniform predictions
    first_alone: float  # excess loss of the best predictor from the largest weight alone, over the information


def source_of(task: BigramTask, size: int) -> BigramSource:
    """Return the batches of a task."""
    transition, positions, weights = map(jnp.asarray, (task.transition, task.positions, task.weights))
    return BigramSource(transition, positions, weights, task.length, size)


def draw_probe(task: BigramTask, size: int, key: jax.Array) -> Probe:
    """Draw contexts and compute their true conditional distributions."""
    tokens = np.asarray(source_of(task, size)(key)[0])
    query, uniform = tokens[:, -1], 1 / task.vocabulary
    columns = task.transition.T[np.take_along_axis(tokens, task.positions[query], 1)]  # (B, Q, N)
    weights = task.weights[query]
    truth = np.einsum("bq,bqn->bn", weights, columns)
    information = divergence(truth, np.full_like(truth, uniform))
    rows, first = np.arange(size), weights.argmax(1)
    share = weights[rows, first][:, None]
    alone = share * columns[rows, first] + (1 - share) * uniform
    return Probe(jnp.asarray(tokens), truth, information, divergence(truth, alone) / information)


def divergence(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Average the Kullback-Leibler divergence of distributions (B, N), in nats."""
    return float((truth * np.log(truth / predicted)).sum(1).mean())


def initialize_transformer(task: BigramTask, shape: Shape, key: jax.Array) -> Transformer:
    """Return a pre-norm transformer with biases, learned positions and a read-out of nearly uniform predictions."""
    inputs = TokenInput(task.vocabulary)
    config = TransformerConfig(
        shape, inputs, task.length + 1, task.vocabulary, read_out="last", biases=True, mlp_ratio=2
    )
    scaling = standard_scaling(shape, inputs, config.mlp_ratio)
    scaling = eqx.tree_at(lambda tree: tree.initial["unembedding"], scaling, READ_OUT)
    return initialize(config, scaling, key)


def measure(task: BigramTask, model: Transformer, probe: Probe) -> tuple[float, float]:
    """Return the excess loss over that of uniform predictions, and the share of queries whose positions rank first.

    The attention of a query to a position is the largest over layers and heads of its mean over contexts.
    """
    log_probability, patterns = _forward(model, probe.tokens)
    excess = divergence(probe.truth, np.exp(np.asarray(log_probability, float))) / probe.information
    rows = np.asarray(patterns)[..., -1, :-1]  # (L, B, H, T): the query's own row, without itself
    query, right = np.asarray(probe.tokens[:, -1]), 0
    for token, positions in enumerate(task.positions):
        attention = rows[:, query == token].mean(1).max((0, 1))  # (T,)
        right += set(np.argsort(-attention)[: task.sparsity]) == set(positions)
    return excess, right / task.vocabulary


@jax.jit
def _forward(model: Transformer, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    record = model.record(tokens, patterns=True)
    return jax.nn.log_softmax(record.outputs), record.layers.patterns
