"""`joma/neurons`: correlation of hidden neurons with the latents of hierarchical data (Table 1), with controls.

The correlation of each latent with its best hidden neuron is compared with that before training, after training on
random labels, with the latents of another label, and in the other layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.study import Cell, Claim, Lines, Listing, Source, Study
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cells
from manyheads.theory.joma.systems.hidden_neurons import LatentTask, train_and_score
from manyheads.theory.joma.systems.token_hierarchy import HierarchyShape
from manyheads.theory.papers import TIAN

SCORES = {
    "trained": "trained",
    "untrained": "untrained",
    "shuffled": "trained on random labels",
    "permuted": "latents of another label",
    "other_layers": "other layers, trained",
}
RISE = 0.1  # the smallest difference that a table of two digits with standard deviations up to 0.05 can show


@dataclass(frozen=True)
class Neurons(Study):
    """Statistic of Table 1 after training, with its controls.

    Attributes
    ----------
    lower, upper
        Latents of the lowest and of the next level, one entry per hierarchy.
    labels, parts, leaves
        Labels, parts of a token, and tokens of the data.
    keeps
        Transition probabilities of an edge; those below one are applied to the first hierarchy.
    width, layers, steps, batch, learning_rate
        The transformer and its training with Adam.
    tested
        Sequences on which the correlations are measured.
    """

    name: ClassVar[str] = "joma/neurons"
    claim: ClassVar[str] = "Training does not raise the correlation of hidden neurons with latents (Table 1)"
    source: ClassVar[Source] = replace(TIAN, locus="table 1; its controls are added here")
    revision: ClassVar[int] = 3

    lower: tuple[int, ...] = (10, 20)
    upper: tuple[int, ...] = (20, 30)
    labels: int = 20
    parts: int = 2
    leaves: int = 39
    keeps: tuple[float, ...] = (1.0, 0.8)
    width: int = 32
    layers: int = 3
    steps: int = 200
    batch: int = 32
    learning_rate: float = 1e-3
    tested: int = 480

    def __post_init__(self) -> None:
        if not self.lower or len(self.lower) != len(self.upper):
            raise UsageError(f"lower={self.lower}, upper={self.upper}: expected one entry per hierarchy in both")
        if not self.keeps or self.keeps[0] != 1.0:
            raise UsageError(f"keeps={self.keeps}: expected 1 first, as in the published data")
        for cell in self.cells():
            self._task(cell)  # checks the sizes

    @classmethod
    def full(cls) -> Neurons:
        """Return the study at the published width and rate."""
        return cls(width=1024, steps=5000, batch=128, learning_rate=1e-4, parts=3, tested=1280)

    @classmethod
    def small(cls) -> Neurons:
        """Return the smallest configuration in which every claim can change."""
        return cls(
            (8,), (8,), 6, leaves=9, keeps=(1.0,), width=8, layers=2, steps=150, batch=12, learning_rate=0.01, tested=12
        )

    def cells(self) -> tuple[Cell, ...]:
        """Return every hierarchy, and the first one with transition probabilities below one."""
        cells = [Cell(hierarchy=position, keep=1.0) for position in range(len(self.lower))]
        return (*cells, *(Cell(hierarchy=0, keep=keep) for keep in self.keeps[1:]))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the smallest rise by training that the reading of the published table implies."""
        return dataset({"rise": ((), RISE, "smallest rise by training that the table can show")})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one network on its labels and one on random labels, and score both."""
        scores = train_and_score(self._task(cell), key)
        values = {name: ("level", np.asarray(getattr(scores, name), np.float64), text) for name, text in SCORES.items()}
        return dataset(
            {**values, "accuracy": ((), float(scores.accuracy), "accuracy")},
            coords={"level": ([0, 1], "level of latents")},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare the trained network with its controls, seed by seed, averaged over the cells."""

        def gap(level: int, control: str) -> Measure:
            return lambda predicted, trained: (
                (trained["trained"] - trained[control]).sel(level=level).mean("cell").values
            )

        def rise(predicted: xr.Dataset) -> float:
            return float(predicted["rise"])

        def implied(level: int, control: str, claim: str) -> Claim:
            return Claim(
                claim,
                gap(level, control),
                quantity="difference of correlations",
                bounds=(-2.0, 2.0),
                target=rise,
                tolerance=(0.0, np.inf),
                expected="refuted",
                basis="a table of two digits with standard deviations up to 0.05 shows differences from a tenth on",
            )

        def equal(level: int, claim: str) -> Claim:
            basis = "the smallest difference that the table can show, either way"
            return Claim(
                claim,
                gap(level, "untrained"),
                quantity="difference of correlations",
                bounds=(-2.0, 2.0),
                target=0.0,
                tolerance=rise,
                basis=basis,
            )

        def above(level: int, claim: str) -> Claim:
            basis = "an inequality, replicate by replicate: both are maxima over the same neurons"
            return Claim(
                claim,
                gap(level, "permuted"),
                quantity="difference of correlations",
                bounds=(-2.0, 2.0),
                target=0.0,
                tolerance=(0.0, np.inf),
                basis=basis,
            )

        def accuracy(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return select_cells(trained, keep=1.0)["accuracy"].mean("cell").values

        return (
            Claim(
                "The networks learn the published task",
                accuracy,
                quantity="accuracy",
                bounds=(0.0, 1.0),
                target=1.0,
                tolerance=(0.2, 0.0 + 1 / self.labels),
                resolution=1 / (self.labels * len(self.lower)),
                basis=f"four labels of five, where chance is one of {self.labels}: the effects of training are present",
            ),
            implied(
                0, "untrained", "Training raises the correlation of neurons of the first layer with latents of level 0"
            ),
            implied(
                1, "untrained", "Training raises the correlation of neurons of the second layer with latents of level 1"
            ),
            implied(0, "shuffled", "Training on the labels, not on random ones, raises the correlation with level 0"),
            implied(1, "shuffled", "Training on the labels, not on random ones, raises the correlation with level 1"),
            equal(0, "Before training the correlation with level 0 is the same to a tenth"),
            equal(1, "Before training the correlation with level 1 is the same to a tenth"),
            above(0, "The correlation with latents of level 0 exceeds that with the latents of another label"),
            above(1, "The correlation with latents of level 1 exceeds that with the latents of another label"),
            implied(1, "other_layers", "The second layer correlates with level 1 more than the other layers do"),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show correlations beside those of the controls, as curves and as tables over replicates."""

        def entry(values: xr.DataArray) -> str:
            std = float(values.std("replicate", ddof=1)) if values.sizes["replicate"] > 1 else 0.0
            return f"{float(values.mean('replicate')):.2f} ± {std:.2f}"

        tables: list[Panel] = []
        for level, ordinal in enumerate(("first", "second")):
            tables.append(self._curves(trained, level, ordinal))
            rows = []
            for position, cell in enumerate(self.cells()):
                here = trained.isel(cell=position)
                sizes = self._task(cell).hierarchy.sizes
                values = (entry(here[name].sel(level=level)) for name in SCORES)
                rows.append((f"{sizes[0]}, {sizes[1]}", f"{cell['keep']:g}", entry(here["accuracy"]), *values))
            tables.append(
                Listing(
                    f"Correlation of latents of level {level} with their best neuron",
                    ("latents", "keep", "accuracy", *SCORES.values()),
                    tuple(rows),
                    note=f"Layer {level} of {self.layers}, {4 * self.width} neurons; mean and standard deviation over "
                    "replicates. The published table has the column of trained networks.",
                )
            )
        return tuple(tables)

    def _curves(self, trained: xr.Dataset, level: int, ordinal: str) -> Panel:
        sizes = [self._task(cell).hierarchy.sizes for cell in self.cells()]
        names = [f"{size[0]}, {size[1]}; keep {cell['keep']:g}" for size, cell in zip(sizes, self.cells(), strict=True)]
        values = {name: trained[name].sel(level=level).transpose("replicate", "cell").values for name in SCORES}
        return Lines(
            f"Neurons of the {ordinal} layer",
            "latents of the levels, and share that is kept",
            "correlation with the best neuron",
            tuple(
                spread_curve(range(len(names)), values[name], label, group=group)
                for group, (name, label) in enumerate(SCORES.items())
            ),
            note=f"Latents of level {level}. Bars range over replicates.",
            shows=(f"Training raises the correlation of neurons of the {ordinal} layer",),
            x_ticks=tuple(names),
        )

    def _task(self, cell: Cell) -> LatentTask:
        position = int(cell["hierarchy"])
        sizes = (self.lower[position], self.upper[position], self.labels)
        shape = HierarchyShape(sizes, self.parts, self.leaves, keep=float(cell["keep"]))
        return LatentTask(
            shape, self.width, self.layers, self.steps, self.batch, learning_rate=self.learning_rate, tested=self.tested
        )
