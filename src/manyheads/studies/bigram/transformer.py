"""`bigram/transformer`: softmax attention, MLP, LayerNorm and Adam on the task, from scratch and pretrained.

A transformer of two layers learns the embeddings of tokens and positions together with everything else. It starts from
scratch, or from weights that were pretrained on a short context: with the same transition at other positions, with
another transition, or with targets that depend on nothing. The embeddings of positions are always drawn anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import equinox as eqx
import jax
import numpy as np
import optax
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Lines, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, unstack
from manyheads.theory.bigram.setups import redraw_positions, replicate_seed
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems.sample_complexity import STAGE_ONE_OFFSET
from manyheads.theory.bigram.training.transformer_training import draw_probe, initialize_transformer, measure, source_of
from manyheads.theory.papers import REN
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.shape import Shape
from manyheads.transformer.training import train
from manyheads.transformer.transformer import Transformer

INITS = {
    "scratch": "from scratch",
    "same": "pretrained, same transition",
    "other": "pretrained, other transition",
    "shuffled": "pretrained on shuffled targets",
}
RECORDS = 80
PROBE = 256  # contexts on which the excess loss is measured
EARLY, HALF = 0.9, 0.5  # of the excess loss of uniform predictions


@dataclass(frozen=True)
class BigramTransformer(Study):
    """Samples until a transformer leaves the plateau of a sparse contextual bigram, by length and init.

    Attributes
    ----------
    lengths
        Context lengths T, increasing; weights are pretrained at the first.
    vocabulary, sparsity
        N and Q of the task.
    key_dim, heads, depth
        Shape of the transformer.
    batch, steps
        Of a training, the pretraining included.
    learning_rate
        Of Adam.
    """

    name: ClassVar[str] = "bigram/transformer"
    claim: ClassVar[str] = "A two-layer transformer with Adam learns the task in two stages, and transfers"
    source: ClassVar = replace(REN, locus="abstract: two stages, and transfer of pretrained values; linear attention")

    lengths: tuple[int, ...] = (8, 32)
    vocabulary: int = 3
    sparsity: int = 2
    key_dim: int = 8
    heads: int = 2
    depth: int = 2
    batch: int = 64
    steps: int = 320
    learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        check_rising("lengths", self.lengths)
        if len(self.lengths) < 2 or self.steps < RECORDS or not self.learning_rate > 0:
            raise UsageError(
                f"lengths={self.lengths}, steps={self.steps}, learning_rate={self.learning_rate}: give two lengths or "
                f"more, {RECORDS} steps or more and a positive learning rate"
            )

    @classmethod
    def full(cls) -> BigramTransformer:
        """Return the study with twice the width, up to 128 tokens."""
        return cls(lengths=(8, 32, 128), key_dim=16, steps=1600)

    @classmethod
    def small(cls) -> BigramTransformer:
        """Return the smallest configuration in which every claim can change."""
        return cls(lengths=(4, 6), key_dim=4, depth=1, batch=8, steps=RECORDS)

    def cells(self) -> tuple[Cell, ...]:
        """Return every init at every length."""
        return grid(init=tuple(INITS), length=self.lengths)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the growth of the plateau escape of linear attention, T (ln T + 1.3) up to a factor."""
        lengths = np.asarray(self.lengths, float)
        law = lengths * (np.log(lengths) + STAGE_ONE_OFFSET)
        return dataset(
            {"growth": ("length", law / law[0], "samples of linear attention over those of the first length")},
            coords={"length": list(self.lengths)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Pretrain where the cell asks for it, train, and record excess loss and ranking of the positions."""
        length, init = int(cell["length"]), str(cell["init"])
        for_first, for_model, for_batches, for_probe = jax.random.split(key, 4)
        task = self._task(replicate_seed(key), length)
        model = initialize_transformer(task, self._shape, for_model)
        if init != "scratch":
            old = self._pretrain(replicate_seed(key), init, for_first)
            fresh = model.weights.positional
            model = eqx.tree_at(lambda tree: tree.weights, model, old.weights._replace(positional=fresh))
        probe = draw_probe(task, PROBE, for_probe)
        every = self.steps // RECORDS
        done = train(
            model,
            cross_entropy,
            source_of(task, self.batch),
            _optimizer(self.learning_rate),
            RECORDS * every,
            for_batches,
            every=every,
            measure=lambda snapshot: measure(task, snapshot.model, probe),
        )
        excess, ranked = np.array([figures for _, figures in done.measured]).T  # (RECORDS + 1,)
        samples = np.arange(RECORDS + 1) * every * self.batch
        return dataset(
            {
                "excess": ("progress", excess, "excess loss"),
                "ranked": ("progress", ranked, "share of queries whose positions rank first"),
                "early": ((), _first(excess < EARLY, samples), f"samples to {EARLY:g} of the excess", "samples"),
                "half": ((), _first(excess < HALF, samples), f"samples to {HALF:g} of the excess", "samples"),
                "ranking": ((), _first(ranked == 1, samples), "samples until all positions rank first", "samples"),
                "final": ((), excess[-RECORDS // 4 :].mean(), "excess loss of the last quarter"),
                "alone": ((), probe.first_alone, "excess loss of the first position alone"),
            },
            coords={"progress": (samples, "samples drawn")},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare the two stages, the growth with the length, transfer with its controls, and the final loss."""
        return (*self._stages(), *self._transfers())

    def _stages(self) -> tuple[Claim, ...]:
        last, lengths = self.lengths[-1], np.asarray(self.lengths, float)

        def plateau(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            chosen = {"init": "scratch", "length": last}
            return (unstack(trained, "early").sel(chosen) / unstack(trained, "half").sel(chosen)).values

        def order(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return self._ratio(trained, ("half", "scratch"), ("ranking", "scratch"))

        def growth(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            half = unstack(trained, "half").sel(init="scratch").transpose("replicate", "length").values
            fit = fit_exponent(lengths, half * lengths / predicted["growth"].values)
            return fit.exponent, fit.interval

        def final(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            chosen = {"init": "scratch", "length": last}
            return (unstack(trained, "final").sel(chosen) / unstack(trained, "alone").sel(chosen)).values

        return (
            Claim(
                f"Training from scratch has two stages: the first tenth of the loss takes more than half of the "
                f"samples to the half, at T = {last}",
                plateau,
                quantity="samples to .9 over samples to .5 of the excess loss",
                target=1.0,
                tolerance=0.5,
                resolution=1 / RECORDS,
                basis="under exponential growth both are .9 e-foldings apart, of the five and more before",
            ),
            Claim(
                f"The attention ranks all positions first before the loss is halved, at T = {last} (log2 ratio)",
                order,
                quantity="samples to half of the loss over those to the ranking (log2)",
                target=0.0,
                tolerance=(0.0, float("inf")),
                resolution=1 / RECORDS,
                basis="an inequality: the log ratio is positive, as for linear attention",
            ),
            Claim(
                "The samples of the plateau escape grow as T (ln T + 1.3), as those of linear attention under SGD "
                "(exponent after division)",
                growth,
                quantity="exponent of T",
                target=1.0,
                tolerance=0.25,
                basis="a factor of 1.4 over these lengths",
            ),
            Claim(
                f"At the end the loss is below that of the larger position alone, at T = {last} (ratio)",
                final,
                quantity="final excess loss over that of one position",
                target=0.0,
                tolerance=1.0,
                basis="a transformer that keeps one position of each query, like softmax attention under SGD, has one "
                "or more",
            ),
        )

    def _transfers(self) -> tuple[Claim, ...]:
        last = self.lengths[-1]

        def gain(init: str) -> Callable[[xr.Dataset, xr.Dataset], Any]:
            return lambda predicted, trained: self._ratio(trained, ("half", "scratch"), ("half", init))

        def growth(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            half = unstack(trained, "half").sel(init="same").transpose("replicate", "length").values
            fit = fit_exponent(self.lengths, half)
            return fit.exponent, fit.interval

        logarithm = float(np.polyfit(np.log(self.lengths), np.log(np.log(self.lengths)), 1)[0])

        def beyond(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return self._ratio(trained, ("half", "other"), ("half", "same"))

        resolution = 1 / RECORDS
        return (
            Claim(
                f"Weights pretrained on the same transition halve the loss from fewer samples, at T = {last} (log2 "
                "ratio)",
                gain("same"),
                quantity="samples from scratch over those of pretrained weights (log2)",
                target=0.0,
                tolerance=(0.0, float("inf")),
                resolution=resolution,
                basis="an inequality: the log ratio is positive",
            ),
            Claim(
                "Samples from weights pretrained on the same transition grow no faster than the logarithm of the "
                "length (exponent)",
                growth,
                quantity="exponent of T",
                target=logarithm,
                tolerance=(float("inf"), 0.25),
                basis="the exponent of ln T at these lengths, and a factor of 1.4 over them above",
            ),
            Claim(
                f"It is the transition that transfers: another one needs more samples, at T = {last} (log2 ratio)",
                beyond,
                quantity="samples after another transition over those after the same (log2)",
                target=0.0,
                tolerance=(0.0, float("inf")),
                resolution=resolution,
                basis="an inequality: in the theory the correlation of the values alone counts",
            ),
            Claim(
                f"Weights pretrained on targets that depend on nothing do not help, at T = {last} (log2 ratio)",
                gain("shuffled"),
                quantity="samples from scratch over those of weights of the control (log2)",
                target=0.0,
                tolerance=(float("inf"), 0.5),
                resolution=resolution,
                basis="negative control: a gain of more than half a doubling would not be knowledge of the task",
            ),
        )

    def _ratio(self, trained: xr.Dataset, over: tuple[str, str], under: tuple[str, str]) -> np.ndarray:
        """Return log2 of the ratio of two numbers of samples (variable, init) at the longest context, (replicates,)."""
        figures = [
            unstack(trained, name).sel(init=init, length=self.lengths[-1]).values for name, init in (over, under)
        ]
        return np.asarray(np.log2(figures[0] / figures[1]))

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show loss and ranking over samples at the longest context, and samples by length."""
        last = self.lengths[-1]

        def over_samples(name: str, inits: tuple[str, ...]) -> tuple[Any, ...]:
            table = unstack(trained, name).sel(length=last).transpose("init", "replicate", "progress")
            return tuple(
                spread_curve(trained["progress"].values, table.sel(init=init).values, INITS[init], group=group)
                for group, init in enumerate(inits)
            )

        half = unstack(trained, "half").transpose("init", "replicate", "length")
        by_length = [
            spread_curve(self.lengths, half.sel(init=init).values, label, group=group)
            for group, (init, label) in enumerate(INITS.items())
        ]
        level = float(np.median(half.sel(init="scratch").isel(length=0)))
        law = level * predicted["growth"].values[None]
        by_length.append(spread_curve(self.lengths, law, "linear attention, up to a factor", "predicted", 0))
        return (
            Lines(
                f"Loss, {last} tokens",
                "samples drawn",
                "excess loss / that of uniform predictions",
                over_samples("excess", tuple(INITS)),
                note="Bands: replicates.",
                shows=("Training from scratch has", "same transition halve"),
            ),
            Lines(
                f"Ranking of the positions, {last} tokens",
                "samples drawn",
                "share of queries",
                over_samples("ranked", tuple(INITS)),
                note="Bands: replicates.",
                shows=("ranks all positions first",),
            ),
            Lines(
                "Samples to half of the loss",
                "context length [tokens]",
                "samples",
                tuple(by_length),
                log_x=True,
                log_y=True,
                note="Bands: replicates; a training that did not get there counts with its budget.",
                shows=("plateau escape grow as",),
            ),
        )

    @property
    def _shape(self) -> Shape:
        return Shape(self.key_dim, self.heads, self.depth)

    def _task(self, seed: list[int], length: int) -> BigramTask:
        """Return the task of a replicate: one transition for all lengths."""
        rng = np.random.default_rng([*seed, 3])
        task = draw_bigram_task(rng, self.vocabulary, self.lengths[0], self.sparsity)
        return redraw_positions(task, length, np.random.default_rng([*seed, 4, length]))

    def _pretrain(self, seed: list[int], init: str, key: jax.Array) -> Transformer:
        """Train at the first length, at other positions."""
        drawn = draw_bigram_task(np.random.default_rng([*seed, 5]), self.vocabulary, self.lengths[0], self.sparsity)
        task = drawn if init == "other" else replace(drawn, transition=self._task(seed, self.lengths[0]).transition)
        source = source_of(task, self.batch)
        if init == "shuffled":
            uniform = np.full_like(task.transition, 1 / self.vocabulary)
            source = eqx.tree_at(lambda tree: tree.transition, source, jax.numpy.asarray(uniform))
        for_model, for_batches = jax.random.split(key)
        model = initialize_transformer(task, self._shape, for_model)
        return train(model, cross_entropy, source, _optimizer(self.learning_rate), self.steps, for_batches).model


def _first(reached: np.ndarray, samples: np.ndarray) -> float:
    """Return the samples at the first record that is reached, the budget without one; at least those of one record."""
    return float(max(samples[int(reached.argmax()) if reached.any() else -1], samples[1]))


@lru_cache(maxsize=4)
def _optimizer(learning_rate: float) -> optax.GradientTransformation:
    """Build one object for equal arguments: training compiles once per optimizer."""
    return optax.adam(learning_rate)
