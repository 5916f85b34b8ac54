r"""Table 1's statistic with its controls: how well the best hidden neuron of a layer follows a latent.

For a batch of sequences let :math:`a_k` be the indicator of latent k of level s and :math:`h_j` the activation of
hidden neuron j of layer s, the largest over the tokens of the sequence. The statistic of level s is

.. math:: \mathrm{score}_s = \frac1{K_s} \sum_k \max_j \mathrm{corr}(a_k, h_j).

It is a maximum over all neurons of a layer and says nothing by itself: of so many neurons some follow a latent by
chance. It is therefore returned with what the same computation gives

* on the network before training (`untrained`),
* on the same network trained as long with labels that are drawn anew for every sequence (`shuffled`),
* with the latents of another label, all sequences of a label keeping one (`permuted`),
* in the other layers of the trained network, on average (`other_layers`).

The controls are this module's own. Source of the statistic: Tian, Wang, Zhang, Chen, Du, "JoMA", Table 1 (arXiv
2310.00535).
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from manyheads._arrays import takes_arrays
from manyheads.data.draws import draw_integers
from manyheads.errors import UsageError
from manyheads.joma.systems.latent_tree import HierarchyBatch, HierarchyShape, TokenHierarchy, draw_hierarchy
from manyheads.statistics import Interval, PairedComparison, mean_interval, paired_comparison
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.inputs import TokenInput
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.shape import Shape
from manyheads.transformer.training import fit, with_weights
from manyheads.transformer.transformer import Transformer, initialise


@dataclass(frozen=True)
class NeuronSetting:
    """What is trained on what.

    The network is the published one up to an output projection and biases in the attention, which the published one has
    not, and padding, which is masked here and attended to there: post-norm blocks of one causal head and a ReLU MLP of
    four times the width, no positions, read out at the last token.

    Attributes
    ----------
    hierarchy
        Sizes of the hierarchy; each seed draws its own.
    width
        Width d of the stream; a layer has 4 d hidden neurons.
    layers
        Blocks, at least one for each level of latents.
    steps, batch, rate, decay
        Adam's steps, sequences of a step, learning rate, and weight decay (added to the gradient).
    tested
        Sequences on which the statistic is measured, all labels equally often.
    """

    hierarchy: HierarchyShape = field(default_factory=HierarchyShape)
    width: int = 32
    layers: int = 3
    steps: int = 400
    batch: int = 64
    rate: float = 1e-3
    decay: float = 1e-4
    tested: int = 480

    def __post_init__(self) -> None:
        levels = len(self.hierarchy.sizes) - 1
        if levels < 1:
            raise UsageError(f"sizes={self.hierarchy.sizes}: a level of latents lies between the leaves and the labels")
        if self.hierarchy.labels < 2:
            raise UsageError(f"sizes={self.hierarchy.sizes}: with one label there is nothing to learn")
        if self.layers < levels:
            raise UsageError(f"layers={self.layers}: {levels} levels of latents are compared with one layer each")
        if min(self.width, self.steps, self.batch) < 1 or self.tested < 2 * self.hierarchy.labels:
            raise UsageError(
                f"width={self.width}, steps={self.steps}, batch={self.batch}, tested={self.tested}: all must be "
                f"positive, and each of {self.hierarchy.labels} labels is tested twice or more"
            )

    @property
    def config(self) -> TransformerConfig:
        """The transformer."""
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
    """The statistic of each level with its controls; see the module.

    Every array ends in the levels of latents, the lowest first; what is measured over several seeds has them in front.
    """

    trained: Any  # (..., levels)
    untrained: Any  # (..., levels)
    shuffled: Any  # (..., levels)
    permuted: Any  # (..., levels)
    other_layers: Any  # (..., levels)
    accuracy: Any  # (...) share of labels that the trained network names


@dataclass(frozen=True)
class NeuronTable:
    """Scores over seeds, with intervals and paired comparisons.

    Attributes
    ----------
    scores
        (seeds, levels) each.
    """

    scores: NeuronScores

    def intervals(self, level: float = 0.99) -> dict[str, tuple[Interval, ...]]:
        """Return Student's interval of every score at every level of latents, over the seeds."""
        return {
            name: tuple(mean_interval(column, level) for column in np.atleast_2d(np.asarray(values).T))
            for name, values in self.scores._asdict().items()
        }

    def gains(self, control: str, level: float = 0.99) -> tuple[PairedComparison, ...]:
        """Compare the trained network with a control, seed by seed, at every level of latents.

        Raises
        ------
        UsageError
            No such control.
        """
        controls = NeuronScores._fields[1:5]
        if control not in controls:
            raise UsageError(f"control={control!r}: choose one of {', '.join(controls)}")
        pairs = zip(np.asarray(self.scores.trained).T, np.asarray(getattr(self.scores, control)).T, strict=True)
        rng = np.random.default_rng(0)  # signs of the test only, and from fifteen seeds on
        return tuple(paired_comparison(a, b, level=level, rng=rng) for a, b in pairs)


@takes_arrays
def best_correlations(latents: Any, neurons: Any, centred: bool = True) -> jax.Array:
    r"""Correlate every latent with every neuron and take the best: :math:`\max_j \mathrm{corr}(a_k, h_j)`.

    Parameters
    ----------
    latents
        (n, K) indicators.
    neurons
        (n, F) activations.
    centred
        Subtract means; without it the correlation is a cosine.

    Returns
    -------
    Array
        (K,); NaN for a latent that never changes. A neuron that never changes follows nothing and counts as zero.

    Examples
    --------
    >>> best = best_correlations(np.array([[1, 1], [0, 1], [1, 1]]), np.array([[2.0, 1.0], [0.0, 5.0], [2.0, 3.0]]))
    >>> [round(float(value), 4) for value in best]
    [1.0, nan]
    """
    a, h = jnp.asarray(latents, jnp.float32), jnp.asarray(neurons, jnp.float32)
    changes = jnp.ptp(a, axis=0) > 0
    if centred:
        a, h = a - a.mean(0), h - h.mean(0)

    def unit(columns: jax.Array) -> jax.Array:
        norms = jnp.linalg.norm(columns, axis=0)
        return columns / jnp.where(norms > 0, norms, 1)

    return jnp.where(changes, (unit(a).T @ unit(h)).max(1), jnp.nan)


def pool_neurons(model: Transformer, batch: HierarchyBatch) -> tuple[jax.Array, jax.Array]:
    """Return each neuron's largest activation over the shown tokens, (layers, B, hidden), and the outputs."""
    record = model.record(batch.tokens, shown=batch.shown)
    hidden = record.layers.hidden  # (layers, B, T, hidden)
    assert hidden is not None
    # After a ReLU nothing is negative, so padding at zero never is the largest.
    return jnp.where(batch.shown[..., None], hidden, 0).max(-2), record.outputs


@takes_arrays
def score_layers(neurons: jax.Array, latents: tuple[jax.Array, ...], centred: bool = True) -> jax.Array:
    """Average the best correlations of a level over its latents, for every layer and level: (layers, levels)."""
    columns = [
        jax.vmap(lambda layer, level=level: jnp.nanmean(best_correlations(level, layer, centred)))(neurons)
        for level in latents
    ]
    return jnp.stack(columns, axis=1)


@eqx.filter_jit
def train_and_score(setting: NeuronSetting, key: jax.Array, centred: bool = True) -> NeuronScores:
    """Draw a hierarchy, train on it and on shuffled labels, and score: one seed, compiled once a setting."""
    for_data, for_model, for_batches, for_test, for_permutation = jax.random.split(key, 5)
    hierarchy = draw_hierarchy(setting.hierarchy, for_data)
    config = setting.config
    untrained = initialise(config, standard_scaling(config.shape, config.inputs), for_model)

    optimiser = make_optimiser(setting.rate, setting.decay)

    def after(shuffled: jax.Array) -> Any:
        def batches(key: jax.Array) -> HierarchyBatch:
            return _draw_batch(hierarchy, setting.batch, shuffled, key)

        return fit(untrained, shown_cross_entropy, batches, optimiser, setting.steps, for_batches)[0].weights

    # One after the other, side by side saves no time; what is traced once is compiled once.
    weights = jax.tree.map(
        lambda start, both: jnp.concatenate([both, start[None]]),
        untrained.weights,
        jax.lax.map(after, jnp.array([False, True])),
    )
    labels = jnp.arange(setting.tested, dtype=jnp.int32) % setting.hierarchy.labels
    batch = hierarchy.expand(labels, for_test)
    other = hierarchy.expand(swap_labels(labels, setting.hierarchy.labels, for_permutation), for_test)

    def look(weights: Any) -> tuple[jax.Array, jax.Array]:
        neurons, outputs = pool_neurons(with_weights(untrained, weights), batch)
        tables = [score_layers(neurons, latents, centred) for latents in (batch.latents, other.latents)]
        return jnp.stack(tables), (outputs.argmax(-1) == batch.answers).mean()

    tables, accuracies = jax.lax.map(look, weights)  # (trained shuffled untrained, latents, layers, levels)
    levels = jnp.arange(len(batch.latents))
    own = tables[:, :, levels, levels]  # layer s against level s
    return NeuronScores(
        trained=own[0, 0],
        untrained=own[2, 0],
        shuffled=own[1, 0],
        permuted=own[0, 1],
        other_layers=(tables[0, 0].sum(0) - own[0, 0]) / max(1, setting.layers - 1),
        accuracy=accuracies[0],
    )


def tabulate_neurons(setting: NeuronSetting, keys: jax.Array, centred: bool = True) -> NeuronTable:
    """Train one network a key, each on a hierarchy of its own, and return the statistic with all its controls.

    Parameters
    ----------
    setting
        Data, network and training.
    keys
        (seeds,) JAX keys, at least two: one seed has no interval.
    centred
        Subtract means; without it correlations are cosines.

    Raises
    ------
    UsageError
        Fewer than two keys.

    Examples
    --------
    >>> setting = NeuronSetting(HierarchyShape((6, 6), leaves=9), width=2, layers=1, steps=2, batch=2, tested=12)
    >>> table = tabulate_neurons(setting, jax.random.split(jax.random.key(0), 2))
    >>> table.scores.trained.shape, len(table.intervals()["untrained"]), len(table.gains("shuffled"))
    ((2, 1), 1, 1)
    """
    if len(keys) < 2:
        raise UsageError(f"{len(keys)} key: intervals need two seeds or more")
    scores = [train_and_score(setting, key, centred) for key in keys]
    return NeuronTable(jax.tree.map(lambda *seeds: np.stack([np.asarray(each) for each in seeds]), *scores))


@takes_arrays
def swap_labels(labels: Any, count: int, key: jax.Array) -> Any:
    """Give every label of `count` another one in exchange, one to one.

    A cyclic shift by a random distance: a random permutation would leave one label in its place on average.
    """
    return (labels + jax.random.randint(key, (), 1, count, jnp.int32)) % count


def shown_cross_entropy(model: Transformer, batch: HierarchyBatch) -> jax.Array:
    """Average the cross-entropy over the answers of a batch with padding."""
    return cross_entropy(lambda tokens: model(tokens, batch.shown), batch)


@lru_cache(maxsize=16)
def make_optimiser(rate: float, decay: float) -> optax.GradientTransformation:
    """Return Adam with weight decay added to the gradient, one object for equal arguments."""
    return optax.chain(optax.add_decayed_weights(decay), optax.adam(rate))


def _draw_batch(hierarchy: TokenHierarchy, size: int, shuffled: jax.Array, key: jax.Array) -> HierarchyBatch:
    """Draw a batch with its labels, or with labels that have nothing to do with the sequences."""
    for_batch, for_labels = jax.random.split(key)
    batch = hierarchy.draw(for_batch, size)
    return batch._replace(
        answers=jnp.where(shuffled, draw_integers(for_labels, (size,), hierarchy.shape.labels), batch.answers)
    )
