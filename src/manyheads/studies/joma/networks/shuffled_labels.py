"""`joma/shuffled-labels`: simple patterns first, and what the rank becomes, on real and on shuffled labels.

Vision transformers learn handwritten digits with their labels, and with the same labels in random order, which can
only be learned by heart. The images and both kinds of labels are the same for all networks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr

from manyheads.curves.drop_and_rise import replicated_drop_and_rise
from manyheads.errors import UsageError
from manyheads.spectra import expected_stable_rank
from manyheads.statistics import spearman
from manyheads.study import Cell, Claim, Lines, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Curve, Panel, spread_curve
from manyheads.study.tables import dataset, select_cell
from manyheads.study.verdicts import Expected
from manyheads.theory.joma.systems.networks.label_order import (
    CLASSES,
    LabelledImages,
    class_mean_margins,
    digit_config,
    image_statistics,
    labelled_digits,
)
from manyheads.theory.papers import TIAN
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.training import train
from manyheads.transformer.transformer import initialize

LABELS = ("real", "shuffled")
RANKS = {"lower_rank": "stable rank of the lower MLP matrix", "upper_rank": "stable rank of the upper MLP matrix"}
CLEAR, NEGLIGIBLE = 0.3, 0.1  # rank correlations: clearly there, and negligible
CLEAR_CHANGE = 0.1  # nat
GROUPS = 4  # of images, from the simplest to the hardest, in the picture


@dataclass(frozen=True)
class ShuffledLabels(Study):
    """Order in which vision transformers learn images, and the ranks of their MLPs, on real and shuffled labels.

    Attributes
    ----------
    samples
        Images, the first of the data.
    width, heads, depth
        Of the transformer.
    batch, steps, snapshots, learning_rate
        Images of a step, updates of Adam, how often the statistics are recorded, and its rate.
    """

    name: ClassVar[str] = "joma/shuffled-labels"
    claim: ClassVar[str] = "Images that class means decide are learned first, with shuffled labels too"
    source: ClassVar[Source] = replace(TIAN, locus="the authors' reply to reviewers; the statistics are this study's")
    revision: ClassVar[int] = 1

    samples: int = 256
    width: int = 32
    heads: int = 4
    depth: int = 2
    batch: int = 32
    steps: int = 720
    snapshots: int = 180
    learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        if not 4 * CLASSES <= self.samples <= 1797 or self.heads < 1 or self.width % self.heads or self.depth < 1:
            raise UsageError(
                f"samples={self.samples}, width={self.width}, heads={self.heads}, depth={self.depth}: expected "
                f"{4 * CLASSES} to 1797 images, a width that the heads divide, and a layer or more"
            )
        if self.snapshots < 2 or self.steps < self.snapshots or self.steps % self.snapshots:
            raise UsageError(f"steps={self.steps}: expected a multiple of snapshots={self.snapshots}, two or more")
        if self.batch < 1 or not self.learning_rate > 0:
            raise UsageError(f"batch={self.batch}, learning_rate={self.learning_rate}: expected positive numbers")

    @classmethod
    def full(cls) -> ShuffledLabels:
        """Return the study with four times the images."""
        return cls(samples=1024, width=64, steps=4000, snapshots=200, learning_rate=1e-3)

    @classmethod
    def small(cls) -> ShuffledLabels:
        """Return the smallest configuration in which every claim can change."""
        return cls(samples=40, width=8, heads=2, batch=16, steps=60, snapshots=6, learning_rate=0.01)

    def cells(self) -> tuple[Cell, ...]:
        """Return both kinds of labels."""
        return grid(labels=LABELS)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the margin of each image under the means of its classes, and the levels of entropy and rank."""
        margins = [class_mean_margins(*labelled_digits(self.samples, kind == "shuffled")) for kind in LABELS]
        return dataset(
            {
                "margin": (("labels", "image"), margins, "margin under the means of the classes"),
                "uniform": (
                    (),
                    float(np.log(digit_config(self.width, self.heads, 1).length)),
                    "uniform entropy",
                    "nat",
                ),
                "random_rank": ((), expected_stable_rank(4 * self.width, self.width), "stable rank of a random matrix"),
            },
            coords={"labels": list(LABELS), "image": (np.arange(self.samples), "image")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one network and record what it classifies rightly, entropy and ranks."""
        images, labels = map(jnp.asarray, labelled_digits(self.samples, cell["labels"] == "shuffled"))
        config = digit_config(self.width, self.heads, self.depth)
        for_model, for_batches = jax.random.split(key)
        done = train(
            initialize(config, standard_scaling(config.shape, config.inputs), for_model),
            cross_entropy,
            LabelledImages(images, labels, self.batch),
            _adam(self.learning_rate),
            self.steps,
            for_batches,
            every=self.steps // self.snapshots,
            measure=lambda snapshot: jax.tree.map(np.asarray, image_statistics(snapshot.model, images, labels)),
        )
        values = {name: np.stack([found[name] for _, found in done.measured]) for name in done.measured[0][1]}
        right, every = values["right"].astype(np.float64), self.steps // self.snapshots
        return dataset(
            {
                "accuracy": ("step", right.mean(1), "accuracy on the images that are trained on"),
                "time": ("image", every * (1 - right).sum(0), "updates for which an image is classified wrongly"),
                "entropy": (("step", "layer"), values["entropy"], "attention entropy", "nat"),
                **{name: (("step", "layer"), values[name], words) for name, words in RANKS.items()},
            },
            coords={
                "step": (np.asarray([step for step, _ in done.measured]), "update"),
                "image": (np.arange(self.samples), "image"),
                "layer": (np.arange(self.depth), "layer, from the bottom"),
            },
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test the order and its control, both ends of the rank, and drop and rebound of the entropy."""
        infinite = float("inf")
        correlation: dict[str, Any] = {"quantity": "rank correlation", "bounds": (-1.0, 1.0), "resolution": 1e-3}

        def accuracy(labels: str) -> Claim:
            return Claim(
                f"The networks fit the {labels} labels",
                lambda predicted, trained: _cell(trained, labels)["accuracy"].isel(step=-1).values,
                quantity="accuracy",
                bounds=(0.0, 1.0),
                target=1.0,
                tolerance=(0.05, 0.01),
                resolution=1 / self.samples,
                basis="nineteen of twenty images: times of learning exist for nearly all",
            )

        def final_rank(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            ends = [_rank(trained, labels, "lower_rank")[:, -1] for labels in LABELS]
            return (ends[1] - ends[0]) / float(predicted["random_rank"])

        def change(name: str, labels: str) -> Measure:
            def fall(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                curves = _rank(trained, labels, name)
                return (curves[:, 0] - curves[:, -1]) / float(predicted["random_rank"])

            return fall

        def low_end(name: str, labels: str, expected: Expected) -> Claim:
            return Claim(
                f"From a start of high rank training on {labels} labels ends at half the {RANKS[name]}",
                change(name, labels),
                quantity="fall of the stable rank (of the random level)",
                target=0.5,
                tolerance=(0.0, infinite),
                expected=expected,
                resolution=1e-5,
                basis="an inequality; a random matrix has the level one. Mean over layers",
            )

        def entropy(layer: int, words: str, part: str, expected: Expected) -> Claim:
            verb = "drops" if part == "drop" else "rebounds"
            return Claim(
                f"In a vision transformer the attention entropy of the {words} {verb} by a tenth of a nat",
                lambda predicted, trained: getattr(
                    replicated_drop_and_rise(_curves(trained, "real", "entropy", layer)),
                    part,
                ),
                quantity="drop or rise (nat)",
                target=CLEAR_CHANGE,
                tolerance=(0.0, infinite),
                expected=expected,
                resolution=1e-5,
                basis="an inequality; a tenth of a nat is a third of the rebound in published runs on text. Minimum "
                "and rise are located on the other seeds",
            )

        return (
            accuracy("real"),
            accuracy("shuffled"),
            Claim(
                "Real labels are fit to nine tenths in less than half the updates of shuffled ones",
                lambda predicted, trained: _reach(trained, "shuffled") / _reach(trained, "real"),
                quantity="ratio of updates",
                target=2.0,
                tolerance=(0.0, infinite),
                resolution=0.1,
                basis="an inequality, paired by seed",
            ),
            Claim(
                "With real labels images of a large margin under the class means are learned first",
                lambda predicted, trained: -_with_margins(predicted, trained, "real"),
                target=CLEAR,
                tolerance=(0.0, infinite),
                basis=f"an inequality: from {CLEAR} on the order is clearly there. Sign: early with a large margin",
                **correlation,
            ),
            Claim(
                "With shuffled labels the margin does not tell when an image is learned",
                lambda predicted, trained: -_with_margins(predicted, trained, "shuffled"),
                target=0.0,
                tolerance=NEGLIGIBLE,
                expected="refuted",
                basis=f"the control: correlations up to {NEGLIGIBLE} are negligible",
                **correlation,
            ),
            Claim(
                "With real labels independent networks learn the images in one order",
                lambda predicted, trained: _with_others(trained, "real"),
                target=CLEAR,
                tolerance=(0.0, infinite),
                basis="an inequality; each network beside the mean of the others",
                **correlation,
            ),
            Claim(
                "With shuffled labels independent networks share no order",
                lambda predicted, trained: _with_others(trained, "shuffled"),
                target=0.0,
                tolerance=NEGLIGIBLE,
                expected="refuted",
                basis=f"the same; correlations up to {NEGLIGIBLE} are negligible",
                **correlation,
            ),
            Claim(
                "Shuffled labels end at a higher stable rank of the lower MLP matrix than real ones",
                final_rank,
                expected="refuted",
                quantity="difference of stable ranks (of the random level)",
                target=0.0,
                tolerance=(0.0, infinite),
                resolution=1e-5,
                basis="an inequality, paired by seed",
            ),
            low_end("lower_rank", "real", "refuted"),
            low_end("upper_rank", "real", "refuted"),
            entropy(0, "bottom layer", "drop", "holds"),
            entropy(0, "bottom layer", "rise", "refuted"),
            entropy(-1, "top layer", "drop", "holds"),
            entropy(-1, "top layer", "rise", "refuted"),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show accuracy, when simple and hard images are learned, entropy and ranks."""
        steps, note = trained["step"].values, "Bands range over replicates."
        accuracy = [
            spread_curve(steps, _cell(trained, kind)["accuracy"].values, f"{kind} labels", group=group)
            for group, kind in enumerate(LABELS)
        ]
        shown: list[Panel] = [
            Lines(
                "Accuracy on the images", "update", "accuracy", tuple(accuracy), note=note, shows=("Real labels are",)
            ),
            self._times(predicted, trained),
        ]
        for name, label, claim in (
            ("entropy", "attention entropy [nat]", "of the bottom layer drops"),
            ("lower_rank", "stable rank of the lower MLP matrix", "Shuffled labels end"),
            ("upper_rank", "stable rank of the upper MLP matrix", "half the stable rank of the upper"),
        ):
            curves = [
                spread_curve(steps, _curves(trained, kind, name, layer), f"{kind}, layer {layer}", group=group)
                for group, (kind, layer) in enumerate((kind, layer) for kind in LABELS for layer in range(self.depth))
            ]
            level = "uniform" if name == "entropy" else "random_rank"
            ends, value = (float(steps[0]), float(steps[-1])), float(predicted[level])
            words = "uniform attention" if name == "entropy" else "random matrix"
            curves.append(Curve(ends, (value, value), words, "reference"))
            shown.append(Lines(label[0].upper() + label[1:], "update", label, tuple(curves), note=note, shows=(claim,)))
        return tuple(shown)

    def _times(self, predicted: xr.Dataset, trained: xr.Dataset) -> Panel:
        """Show the mean time of images by the quarter of their margin."""
        curves = []
        for group, kind in enumerate(LABELS):
            order = np.argsort(-predicted["margin"].sel(labels=kind).values)
            times = _cell(trained, kind)["time"].transpose("replicate", "image").values
            means = np.stack([times[:, part].mean(1) for part in np.array_split(order, GROUPS)], axis=1)
            curves.append(spread_curve(range(GROUPS), means, f"{kind} labels", group=group))
        return Lines(
            "Updates until an image is learned, by its margin under the class means",
            "images, a quarter each",
            "updates classified wrongly",
            tuple(curves),
            note="Bands range over replicates.",
            shows=("large margin under the class means are learned first",),
            x_ticks=("largest margin", "second", "third", "smallest margin"),
        )


_adam = lru_cache(maxsize=4)(optax.adam)  # one object a learning rate, so that training compiles once


def _cell(trained: xr.Dataset, labels: str) -> xr.Dataset:
    return select_cell(trained, labels=labels)


def _curves(trained: xr.Dataset, labels: str, name: str, layer: int) -> np.ndarray:
    """Return the curves of one layer, (replicates, steps)."""
    return _cell(trained, labels)[name].isel(layer=layer).transpose("replicate", "step").values


def _rank(trained: xr.Dataset, labels: str, name: str) -> np.ndarray:
    """Return the mean stable rank over layers, (replicates, steps)."""
    return _cell(trained, labels)[name].mean("layer").transpose("replicate", "step").values


def _reach(trained: xr.Dataset, labels: str) -> np.ndarray:
    """Return the updates after which nine tenths are classified rightly; the last one where they never are."""
    found = _cell(trained, labels)["accuracy"].transpose("replicate", "step").values >= 0.9
    return trained["step"].values[np.where(found.any(1), found.argmax(1), -1)].astype(float)


def _correlate(x: np.ndarray, y: np.ndarray) -> float:
    """Return the rank correlation, 0 where one side is constant."""
    return spearman(x, y).value if np.ptp(x) > 0 and np.ptp(y) > 0 else 0.0


def _with_margins(predicted: xr.Dataset, trained: xr.Dataset, labels: str) -> np.ndarray:
    margins = predicted["margin"].sel(labels=labels).values
    times = _cell(trained, labels)["time"].transpose("replicate", "image").values
    return np.asarray([_correlate(each, margins) for each in times])


def _with_others(trained: xr.Dataset, labels: str) -> np.ndarray:
    """Correlate the times of each network with the mean times of the others."""
    times = _cell(trained, labels)["time"].transpose("replicate", "image").values
    if len(times) < 2:
        raise UsageError("one replicate: the order of independent networks needs two or more")
    return np.asarray([_correlate(each, times.sum(0) - each) for each in times])
