"""`joma/hierarchical-prior`: patterns that several labels share, and whether they speed training.

A pattern a that three labels contain is learned from three times the examples. In the layer of theorem 2 this is a law;
in transformers the whole training, with latents that labels share, is compared with the same leaves without latents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import equinox as eqx
import jax
import numpy as np
import optax
import xarray as xr

from manyheads.errors import UsageError
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Lines, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cell, select_cells
from manyheads.theory.joma.systems.hidden_neurons import LatentTask, masked_cross_entropy
from manyheads.theory.joma.systems.networks.shared_patterns import (
    LeafSource,
    bayes_accuracy,
    reached_leaves,
    winning_times,
)
from manyheads.theory.joma.systems.networks.wide_layer import WideTraining
from manyheads.theory.joma.systems.token_hierarchy import HierarchyBatch, HierarchyShape
from manyheads.theory.joma.theorems.winner_take_all import reaching_time
from manyheads.theory.papers import TIAN
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.training import train
from manyheads.transformer.transformer import Transformer, initialize

LABELS = 6  # of the layer: divided by each number of labels that share a pattern
SHARED = (1, 2, 3)
LEVEL = 3.0  # of a weight whose token is won
REACHED = 0.9  # of what Bayes' rule reaches
PRIORS = ("hierarchical", "flat")


@dataclass(frozen=True)
class HierarchicalPrior(Study):
    """Times at which shared patterns are won, and updates of transformers on labels with and without latents.

    Attributes
    ----------
    learning_rate, batch
        Of SGD in the layer.
    latents
        Latents of the lower and of the upper level, and labels.
    leaves, keep
        Observed tokens, and the probability with which a leaf of a label is shown.
    width, steps, snapshots, adam
        Width of the transformer of three blocks, its updates, how often it is tested, and the rate of Adam.
    tested
        Sequences of a test.
    """

    name: ClassVar[str] = "joma/hierarchical-prior"
    claim: ClassVar[str] = "A pattern that c labels share is won c times sooner in the layer of theorem 2"
    source: ClassVar[Source] = replace(
        TIAN,
        locus="theorem 2 and the authors' reply to reviewers; the reading, that labels share a, is this study's",
    )
    revision: ClassVar[int] = 1

    learning_rate: float = 0.02
    batch: int = 16
    latents: tuple[int, ...] = (10, 20, 20)
    leaves: int = 39
    keep: float = 0.8
    width: int = 32
    steps: int = 300
    snapshots: int = 60
    adam: float = 1e-3
    tested: int = 800

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate <= 0.2 or not self.adam > 0 or not 0 < self.keep < 1 or self.batch < 1:
            raise UsageError(
                f"learning_rate={self.learning_rate}, adam={self.adam}, keep={self.keep}, batch={self.batch}: expected "
                "a rate in (0, 0.2], positive numbers, and a probability between 0 and 1"
            )
        if self.snapshots < 2 or self.steps < self.snapshots or self.steps % self.snapshots:
            raise UsageError(f"steps={self.steps}: expected a multiple of snapshots={self.snapshots}, two or more")
        if len(self.latents) < 2:
            raise UsageError(f"latents={self.latents}: expected a level of latents and the labels, or more levels")
        LatentTask(self._shape(), self.width, 3, self.steps, self.batch, tested=self.tested)  # checks the sizes

    @classmethod
    def full(cls) -> HierarchicalPrior:
        """Return the study with more labels, a wider network, and a quarter of the rate of the layer."""
        return cls(learning_rate=0.005, latents=(20, 40, 40), leaves=80, width=128, steps=600, tested=4000)

    @classmethod
    def small(cls) -> HierarchicalPrior:
        """Return the smallest configuration in which every claim can change."""
        return cls(learning_rate=0.1, latents=(5, 6), leaves=9, width=8, steps=60, snapshots=12, adam=0.01, tested=60)

    def cells(self) -> tuple[Cell, ...]:
        """Return the numbers of labels that share a pattern, and both priors of the transformer."""
        return (*grid(system=("layer",), shared=SHARED), *(Cell(system=prior, shared=0) for prior in PRIORS))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the time of theorem 2 for shared and for own patterns."""
        shared = [reaching_time(np.array([count / (2 * LABELS)]), LEVEL) for count in SHARED]
        return dataset(
            {
                "shared_time": ("shared", shared, "time until a shared pattern is won"),
                "own_time": (
                    (),
                    reaching_time(np.array([1 / (2 * LABELS)]), LEVEL),
                    "time until a pattern of one label is won",
                ),
            },
            coords={"shared": list(SHARED)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one layer or one transformer; NaN for what the other measures."""
        accuracy, shared, own, bayes = np.full(self.snapshots + 1, np.nan), np.nan, np.nan, np.nan
        if cell["system"] == "layer":
            steps = round(1.5 * reaching_time(np.array([1 / (2 * LABELS)]), LEVEL) / self.learning_rate)
            training = WideTraining(self.learning_rate, steps, self.batch, LEVEL)
            own, shared = map(float, winning_times(LABELS, int(cell["shared"]), training, key))
        else:
            accuracy, bayes = self._transformer(key, cell["system"] == "flat")
        return dataset(
            {
                "shared_time": ((), shared, "time until a shared pattern is won"),
                "own_time": ((), own, "time until a pattern of one label is won"),
                "accuracy": ("step", accuracy, "accuracy on new sequences"),
                "bayes": ((), bayes, "accuracy of Bayes' rule"),
            },
            coords={"step": (np.linspace(0, self.steps, self.snapshots + 1), "update")},
        )

    def _shape(self) -> HierarchyShape:
        return HierarchyShape(self.latents, 2, self.leaves)

    def _transformer(self, key: jax.Array, flat: bool) -> tuple[np.ndarray, float]:
        """Train on labels with latents or without and return the accuracies, and that of Bayes' rule."""
        for_leaves, for_model, for_batches, for_test = jax.random.split(key, 4)
        shape = self._shape()
        leaves = reached_leaves(shape, for_leaves, flat)
        source = LeafSource.of(leaves, self.keep, shape.places)
        test = source.hierarchy.draw(for_test, self.tested)
        config = LatentTask(shape, self.width, 3).config
        done = train(
            initialize(config, standard_scaling(config.shape, config.inputs), for_model),
            masked_cross_entropy,
            source,
            _adam(self.adam),
            self.steps,
            for_batches,
            every=self.steps // self.snapshots,
            measure=lambda snapshot: float(_accuracy(snapshot.model, test)),
        )
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        bayes = bayes_accuracy(np.asarray(leaves), self.keep, 4 * self.tested, rng)
        return np.asarray([found for _, found in done.measured]), bayes

    def claims(self) -> tuple[Claim, ...]:
        """Test the law of the layer, its control, and whether latents speed a transformer."""

        def exponent(name: str) -> Measure:
            def fitted(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                found = select_cells(trained, system="layer")[name].transpose("replicate", "cell").values
                fit = fit_exponent(np.asarray(SHARED), found)
                return fit.exponent, fit.interval

            return fitted

        def size(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            found = select_cells(trained, system="layer")["shared_time"].transpose("replicate", "cell").values
            return (found / predicted["shared_time"].values).mean(1)

        law: dict[str, Any] = {"quantity": "exponent of the time in c", "tolerance": 0.1}
        infinite = float("inf")
        return (
            Claim(
                "In a layer a pattern that c labels share is won after a time that scales as 1/c",
                exponent("shared_time"),
                target=-1.0,
                basis="gains are probabilities; finite steps of SGD and contexts that are sampled leave a few percent",
                **law,
            ),
            Claim(
                "In the same layer a pattern of one label is won at the same time whatever the others share",
                exponent("own_time"),
                target=0.0,
                basis="the control: its gain does not change",
                **law,
            ),
            Claim(
                "Shared patterns are won at the time of theorem 2",
                size,
                quantity="measured over predicted time",
                target=1.0,
                tolerance=0.1,
                basis="an equality of the flow; finite steps and sampled contexts leave a few percent",
            ),
            Claim(
                "A transformer learns labels whose latents are shared in fewer updates than labels of as many random "
                "leaves",
                lambda predicted, trained: _updates(trained, "flat") / _updates(trained, "hierarchical"),
                quantity="updates without latents over updates with them",
                target=1.0,
                tolerance=(0.0, infinite),
                resolution=0.05,
                expected="refuted",
                basis=f"an inequality, paired by seed; updates until {REACHED:g} of what Bayes' rule reaches",
            ),
            Claim(
                "Labels whose latents are shared are as easy for Bayes' rule as labels of as many random leaves",
                lambda predicted, trained: (
                    select_cell(trained, system="hierarchical", shared=0)["bayes"].values
                    - select_cell(trained, system="flat", shared=0)["bayes"].values
                ),
                quantity="difference of accuracies",
                bounds=(-1.0, 1.0),
                target=0.0,
                tolerance=0.02,
                resolution=1e-3,
                expected="refuted",
                basis="fifty sequences; labels that share latents have leaves in common",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show times in the layer against c, and the accuracy of transformers beside Bayes' rule."""
        curves = []
        for group, (name, words) in enumerate(
            (("shared_time", "shared pattern"), ("own_time", "pattern of one label"))
        ):
            found = select_cells(trained, system="layer")[name].transpose("replicate", "cell").values
            law = predicted[name].values + 0 * np.asarray(SHARED)
            curves += [
                spread_curve(SHARED, found, words, group=group),
                spread_curve(SHARED, law, "", "predicted", group),
            ]
        steps, accuracies = trained["step"].values, []
        for group, prior in enumerate(PRIORS):
            here = select_cell(trained, system=prior, shared=0)
            found = (here["accuracy"] / here["bayes"]).transpose("replicate", "step").values
            words = "labels that share latents" if prior == "hierarchical" else "labels of as many random leaves"
            accuracies.append(spread_curve(steps, found, words, group=group))
        return (
            Lines(
                "Time until a pattern is won",
                "labels that share it",
                "time",
                tuple(curves),
                log_x=True,
                log_y=True,
                note="Dashed: theorem 2. Bands range over replicates.",
                shows=("a time that scales as 1/c",),
            ),
            Lines(
                "Accuracy of a transformer over that of Bayes' rule",
                "update",
                "share of what Bayes' rule reaches",
                tuple(accuracies),
                note="New sequences. Bands range over replicates.",
                shows=("A transformer learns labels",),
            ),
        )


_adam = lru_cache(maxsize=4)(optax.adam)  # one object a learning rate, so that training compiles once


@eqx.filter_jit
def _accuracy(model: Transformer, batch: HierarchyBatch) -> jax.Array:
    return (model(batch.tokens, batch.padding_mask).argmax(-1) == batch.answers).mean()


def _updates(trained: xr.Dataset, prior: str) -> np.ndarray:
    """Return the updates to a share of Bayes' accuracy, interpolated; the last one where it is not reached."""
    here = select_cell(trained, system=prior, shared=0)
    shares = (here["accuracy"] / here["bayes"]).transpose("replicate", "step").values
    found = shares >= REACHED
    first = np.where(found.any(1), found.argmax(1), -1)
    return np.maximum(trained["step"].values[first], trained["step"].values[1])
