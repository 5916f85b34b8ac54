r"""Table 1: correlation of latents with their best hidden neuron, with controls.

For a batch of sequences let :math:`a_k` be the indicator of latent k of level s and :math:`h_j` the activation of
hidden neuron j of layer s, the largest over the tokens of the sequence. The statistic of level s is

.. math:: \mathrm{score}_s = \frac1{K_s} \sum_k \max_j \mathrm{corr}(a_k, h_j).

It is a maximum over all neurons of a layer, and high by chance where these are many. The same statistic is therefore
returned

* of the network before training (`untrained`),
* of the same network trained as long on random labels, drawn anew for every sequence (`shuffled`),
* with the latents of another label (`permuted`),
* averaged over the other layers of the trained network (`other_layers`).

The controls are added here. Source of the statistic: Tian, Wang, Zhang, Chen, Du, "JoMA", Table 1 (arXiv
2310.00535).
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from manyheads._arrays import takes_arrays
from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.data.draws import draw_integers
from manyheads.errors import UsageError
from manyheads.theory.joma.systems.token_hierarchy import HierarchyBatch, HierarchyShape, TokenHierarchy, draw_hierarchy
from manyheads.transformer import Shape, TokenInput, Transformer, TransformerConfig, initialize, standard_scaling
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.training import fit, with_weights


@dataclass(frozen=True)
class LatentTask:
    """Hierarchical data, transformer and training of the statistic.

    The network is the published one, except that its attention has an output projection and biases and masks padding:
    post-norm blocks of one causal head and a ReLU MLP of four times the width, no positions, read out at the last
    token.
    """

    hierarchy: HierarchyShape = field(default_factory=HierarchyShape)  # sizes of the hierarchy; each seed draws its own
    width: int = constrained(32, Constraint(least=1))  # width d of the stream; a layer has 4 d hidden neurons
    layers: int = 3  # blocks, at least one for each level of latents
    steps: int = constrained(400, Constraint(least=1))  # of Adam
    batch: int = constrained(64, Constraint(least=1))
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4  # added to the gradient
    tested: int = 480  # sequences on which the statistic is measured, all labels equally often

    def __post_init__(self) -> None:
        check_fields(self)
        levels = len(self.hierarchy.sizes) - 1
        if levels < 1:
            raise UsageError(
                f"sizes={self.hierarchy.sizes}: expected a level of latents between the leaves and the labels"
            )
        if self.hierarchy.labels < 2:
            raise UsageError(f"sizes={self.hierarchy.sizes}: expected two labels or more")
        if self.layers < levels:
            raise UsageError(f"layers={self.layers}: expected one or more for each of {levels} levels of latents")
        if self.tested < 2 * self.hierarchy.labels:
            raise UsageError(f"tested={self.tested}: expected twice the {self.hierarchy.labels} labels or more")

    @property
    def config(self) -> TransformerConfig:
        """Configuration of the transformer."""
        return TransformerConfig(
            Shape(self.width, 1, self.layers),
            TokenInput(self.hierarchy.leaves + 1),
            length=self.hierarchy.places,
            outputs=self.hierarchy.labels,
            causal=True,
            read_out="last",
            positions="none",
            norm="post",
            biases=True,
            activation="relu",
        )


class NeuronScores(NamedTuple):
    """Statistic of each level, the lowest first, with its controls; see the module."""

    trained: Float[Array, " levels"]
    untrained: Float[Array, " levels"]
    shuffled: Float[Array, " levels"]
    permuted: Float[Array, " levels"]
    other_layers: Float[Array, " levels"]
    accuracy: Float[Array, ""]  # of the trained network


@takes_arrays
def best_correlations(
    latents: Float[ArrayLike, "samples latents"], neurons: Float[ArrayLike, "samples neurons"]
) -> Float[Array, " latents"]:
    r"""Compute the largest correlation of each latent with a neuron, :math:`\max_j \mathrm{corr}(a_k, h_j)`.

    NaN for a constant latent; a constant neuron has correlation zero.
    """
    a, h = jnp.asarray(latents, jnp.float32), jnp.asarray(neurons, jnp.float32)
    changes = jnp.ptp(a, axis=0) > 0
    a, h = a - a.mean(0), h - h.mean(0)

    def unit(columns: jax.Array) -> jax.Array:
        norms = jnp.linalg.norm(columns, axis=0)
        return columns / jnp.where(norms > 0, norms, 1)

    return jnp.where(changes, (unit(a).T @ unit(h)).max(1), jnp.nan)


def pool_neurons(
    model: Transformer, batch: HierarchyBatch
) -> tuple[Float[Array, "layers batch hidden"], Float[Array, "batch labels"]]:
    """Compute the largest activation of each neuron over the tokens, and the outputs."""
    record = model.record(batch.tokens, padding_mask=batch.padding_mask)
    hidden = record.layers.hidden  # (layers, B, T, hidden)
    assert hidden is not None
    # After a ReLU nothing is negative, so padding at zero never is the maximum.
    return jnp.where(batch.padding_mask[..., None], hidden, 0).max(-2), record.outputs


@takes_arrays
def score_layers(
    neurons: Float[Array, "layers batch hidden"], latents: tuple[Bool[Array, "batch size"], ...]
) -> Float[Array, "layers levels"]:
    """Average the best correlations over the latents of each level, for every layer."""
    columns = [
        jax.vmap(lambda layer, level=level: jnp.nanmean(best_correlations(level, layer)))(neurons) for level in latents
    ]
    return jnp.stack(columns, axis=1)


@eqx.filter_jit
def train_and_score(task: LatentTask, key: jax.Array) -> NeuronScores:
    """Draw a hierarchy, train on its labels and on random labels, and score; compiled once per task."""
    for_data, for_model, for_batches, for_test, for_permutation = jax.random.split(key, 5)
    hierarchy = draw_hierarchy(task.hierarchy, for_data)
    config = task.config
    untrained = initialize(config, standard_scaling(config.shape, config.inputs), for_model)

    optimizer = make_optimizer(task.learning_rate, task.weight_decay)

    def after(shuffled: jax.Array) -> Any:
        def batches(key: jax.Array) -> HierarchyBatch:
            return _draw_batch(hierarchy, task.batch, shuffled, key)

        return fit(untrained, masked_cross_entropy, batches, optimizer, task.steps, for_batches)[0].weights

    # In sequence, since side by side saves no time; traced and compiled once.
    weights = jax.tree.map(
        lambda start, both: jnp.concatenate([both, start[None]]),
        untrained.weights,
        jax.lax.map(after, jnp.array([False, True])),
    )
    labels = jnp.arange(task.tested, dtype=jnp.int32) % task.hierarchy.labels
    batch = hierarchy.expand(labels, for_test)
    other = hierarchy.expand(swap_labels(labels, task.hierarchy.labels, for_permutation), for_test)

    def measure(weights: Any) -> tuple[jax.Array, jax.Array]:
        neurons, outputs = pool_neurons(with_weights(untrained, weights), batch)
        tables = [score_layers(neurons, latents) for latents in (batch.latents, other.latents)]
        return jnp.stack(tables), (outputs.argmax(-1) == batch.answers).mean()

    tables, accuracies = jax.lax.map(measure, weights)  # (trained shuffled untrained, latents, layers, levels)
    levels = jnp.arange(len(batch.latents))
    own = tables[:, :, levels, levels]  # layer s against level s
    return NeuronScores(
        trained=own[0, 0],
        untrained=own[2, 0],
        shuffled=own[1, 0],
        permuted=own[0, 1],
        other_layers=(tables[0, 0].sum(0) - own[0, 0]) / max(1, task.layers - 1),
        accuracy=accuracies[0],
    )


@takes_arrays
def swap_labels(labels: Int[Array, " n"], count: int, key: jax.Array) -> Int[Array, " n"]:
    """Map every label of `count` to another one by a random cyclic shift, which has no fixed points."""
    return (labels + jax.random.randint(key, (), 1, count, jnp.int32)) % count


def masked_cross_entropy(model: Transformer, batch: HierarchyBatch) -> jax.Array:
    """Compute the cross-entropy of a batch with padding."""
    return cross_entropy(lambda tokens: model(tokens, batch.padding_mask), batch)


@lru_cache(maxsize=16)
def make_optimizer(learning_rate: float, weight_decay: float) -> optax.GradientTransformation:
    """Build Adam with weight decay added to the gradient, one object for equal arguments."""
    return optax.chain(optax.add_decayed_weights(weight_decay), optax.adam(learning_rate))


def _draw_batch(hierarchy: TokenHierarchy, size: int, shuffled: jax.Array, key: jax.Array) -> HierarchyBatch:
    """Draw a batch with its labels, or with random labels."""
    for_batch, for_labels = jax.random.split(key)
    batch = hierarchy.draw(for_batch, size)
    return batch._replace(
        answers=jnp.where(shuffled, draw_integers(for_labels, (size,), hierarchy.shape.labels), batch.answers)
    )
