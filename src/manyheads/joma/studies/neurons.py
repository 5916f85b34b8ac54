"""`joma/neurons`: whether training makes hidden neurons follow the latents of the data.

Transformers of several layers learn the label of hierarchical data with known latents. The correlation of each latent
with its best hidden neuron stands beside the same figure before training, after training on labels that mean nothing,
against permuted latents, and in the other layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.joma.source import SOURCE
from manyheads.joma.systems.hidden_neurons import NeuronSetting, train_and_score
from manyheads.joma.systems.latent_tree import HierarchyShape
from manyheads.study import Cell, Listing, Panel, Source, Study, Verdict

SCORES = {
    "trained": "after training",
    "untrained": "before training",
    "shuffled": "after training on labels drawn anew",
    "permuted": "against the latents of another label",
    "other_layers": "in the other layers, trained",
}
COUNTS = 0.1  # the smallest rise that a table of two digits with spreads up to 0.05 over seeds could be about


@dataclass(frozen=True)
class Neurons(Study):
    """The published statistic is high without any training, and training does not raise it.

    Attributes
    ----------
    lower, upper
        Latents of the lowest and of the next level, one entry a hierarchy.
    labels, parts, leaves
        Labels, parts of a token, and tokens of the data.
    keeps
        Transition probabilities of an edge; each below one is tried on the first hierarchy.
    width, layers, steps, batch, rate
        The transformer and its training with Adam.
    tested
        Sequences on which correlations are measured.
    """

    name: ClassVar[str] = "joma/neurons"
    claim: ClassVar[str] = "hidden neurons follow latents as well before training as after: a maximum over many neurons"
    source: ClassVar[Source] = replace(SOURCE, locus="table 1; its controls are added here")
    revision: ClassVar[int] = 2

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
    rate: float = 1e-3
    tested: int = 480

    def __post_init__(self) -> None:
        if not self.lower or len(self.lower) != len(self.upper):
            raise UsageError(f"lower={self.lower}, upper={self.upper}: give both, one entry a hierarchy")
        if not self.keeps or self.keeps[0] != 1.0:
            raise UsageError(f"keeps={self.keeps}: the first is 1, the published data")
        for cell in self.cells():
            self._setting(cell)  # refuses sizes that do not fit

    @classmethod
    def full(cls) -> Neurons:
        """Return the study at the published width and rate."""
        return cls(width=1024, steps=5000, batch=128, rate=1e-4, parts=3, tested=1280)

    def cells(self) -> tuple[Cell, ...]:
        """Return every hierarchy, and the first one again where edges may fail."""
        cells = [Cell(hierarchy=position, keep=1.0) for position in range(len(self.lower))]
        return (*cells, *(Cell(hierarchy=0, keep=keep) for keep in self.keeps[1:]))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return what the published reading of the table implies: training makes the correlation."""
        about = {"long_name": "rise by training that the table would be about", "units": "1"}
        return xr.Dataset({"rise": ((), COUNTS, about)})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one network on its labels and one on labels drawn anew, and score both."""
        scores = train_and_score(self._setting(cell), key)
        values = {
            name: ("level", np.asarray(getattr(scores, name), np.float64), {"long_name": text, "units": "1"})
            for name, text in SCORES.items()
        }
        accuracy = ((), float(scores.accuracy), {"long_name": "accuracy", "units": "1"})
        level = ("level", [0, 1], {"long_name": "level of latents"})
        return xr.Dataset({**values, "accuracy": accuracy}, coords={"level": level})

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare the trained network with its controls, seed by seed, averaged over the cells."""
        published = trained.isel(cell=np.flatnonzero(trained["keep"].values == 1.0))
        rise = float(predicted["rise"])

        def gap(level: int, control: str) -> np.ndarray:
            return np.asarray((trained["trained"] - trained[control]).sel(level=level).mean("cell").values)

        def implied(level: int, control: str, claim: str) -> Verdict:
            basis = "a table of two digits, with spreads over seeds up to 0.05, is about a tenth or more"
            return Verdict.from_samples(
                claim, gap(level, control), target=rise, tolerance=(0.0, np.inf), expected="refuted", basis=basis
            )

        def equal(level: int, claim: str) -> Verdict:
            basis = "the rise that the table would be about, either way"
            return Verdict.from_samples(claim, gap(level, "untrained"), target=0.0, tolerance=rise, basis=basis)

        def above(level: int, claim: str) -> Verdict:
            basis = "an inequality, replicate by replicate: the maximum over neurons is in both"
            return Verdict.from_samples(claim, gap(level, "permuted"), target=0.0, tolerance=(0.0, np.inf), basis=basis)

        return (
            Verdict.from_samples(
                "the networks learn the published task",
                published["accuracy"].mean("cell").values,
                target=1.0,
                tolerance=(0.2, 0.0 + 1 / self.labels),
                resolution=1 / (self.labels * published.sizes["cell"]),
                basis=f"four labels of five, where chance is one of {self.labels}: whatever training brings is there",
            ),
            implied(0, "untrained", "training makes the neurons of the first layer follow the lowest latents"),
            implied(1, "untrained", "training makes the neurons of the second layer follow the next latents"),
            implied(0, "shuffled", "it is the labels that make neurons follow the lowest latents"),
            implied(1, "shuffled", "it is the labels that make neurons follow the next latents"),
            equal(0, "before training the correlation with the lowest latents is the same to a tenth"),
            equal(1, "before training the correlation with the next latents is the same to a tenth"),
            above(0, "neurons follow the lowest latents better than those of another label"),
            above(1, "neurons follow the next latents better than those of another label"),
            implied(1, "other_layers", "the next latents are followed in the second layer and not in the others"),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the table with its controls, mean and spread over replicates."""

        def entry(values: xr.DataArray) -> str:
            spread = float(values.std("replicate", ddof=1)) if values.sizes["replicate"] > 1 else 0.0
            return f"{float(values.mean('replicate')):.2f} ± {spread:.2f}"

        tables = []
        for level in (0, 1):
            rows = []
            for position, cell in enumerate(self.cells()):
                here = trained.isel(cell=position)
                sizes = self._setting(cell).hierarchy.sizes
                values = (entry(here[name].sel(level=level)) for name in SCORES)
                rows.append((f"{sizes[0]}, {sizes[1]}", f"{cell['keep']:g}", entry(here["accuracy"]), *values))
            tables.append(
                Listing(
                    f"Correlation of latents of level {level} with their best neuron",
                    ("latents", "keep", "accuracy", *SCORES.values()),
                    tuple(rows),
                    note=f"Layer {level} of {self.layers}, {4 * self.width} neurons; mean and standard deviation over "
                    "replicates. The published table shows the first of these columns.",
                )
            )
        return tuple(tables)

    def _setting(self, cell: Cell) -> NeuronSetting:
        position = int(cell["hierarchy"])
        sizes = (self.lower[position], self.upper[position], self.labels)
        shape = HierarchyShape(sizes, self.parts, self.leaves, keep=float(cell["keep"]))
        return NeuronSetting(shape, self.width, self.layers, self.steps, self.batch, rate=self.rate, tested=self.tested)
