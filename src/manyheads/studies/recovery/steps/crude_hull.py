"""`recovery/crude-hull`: span of the attention matrices from the crude and from the refined sum of projections.

The crude sum is off by a matrix whose Frobenius norm does not know the stable rank, and so are the tokens that it
projects: below that size a misfit says nothing of a row, and examples, more of which only lower the misfit of the best
rows, do not help. The hull is fitted with the crude sum, with the sum from the rows of the largest margin under the
hull's point nearest to zero, with that from all rows, and with the true sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from manyheads.errors import UsageError
from manyheads.recovery.examples.stages.crude_sum import estimate_crude_sum
from manyheads.recovery.examples.stages.hull import HullSettings, find_hull
from manyheads.recovery.examples.stages.refined_sum import RefinementSettings, refine_sum
from manyheads.recovery.examples.stages.shards import open_shards
from manyheads.recovery.examples.stages.span import measure_span_error, span_of
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.planted.task import equal_spectrum_layer, sequences
from manyheads.statistics import fit_exponent
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.study import Cell, Claim, Lines, Listing, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.papers import CHEN_LI

Array = NDArray[np.float64]

SUMS = {
    "crude": "crude sum",
    "margin": "refined by the rows of the largest margin",
    "all": "refined by all rows",
    "true": "true sum",
}
HEADS = 2


@dataclass(frozen=True)
class CrudeHull(Study):
    """The crude hull's span has an error that neither examples nor stable rank remove; high-margin rows do.

    Attributes
    ----------
    ranks
        Stable ranks of the attention matrices, rising, up to `dim`.
    counts
        Sequences of two tokens, rising.
    dim
        Token dimension d.
    scale
        Standard deviation of the logits.
    """

    name: ClassVar[str] = "recovery/crude-hull"
    claim: ClassVar[str] = "The crude hull does not give the span at any stable rank; high-margin rows do"
    source: ClassVar[Source] = replace(CHEN_LI, locus="crude hull, and its refinement, as told in the talk")

    ranks: tuple[int, ...] = (3, 6, 12)
    counts: tuple[int, ...] = (4000, 16_000, 64_000)
    dim: int = 12
    scale: float = 2.0

    def __post_init__(self) -> None:
        for name in ("ranks", "counts"):
            sizes = getattr(self, name)
            if len(sizes) < 2 or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise UsageError(f"{name}={sizes}: give two or more positive ones, rising")
        if self.ranks[-1] > self.dim or not self.scale > 0:
            raise UsageError(f"ranks={self.ranks}, dim={self.dim}, scale={self.scale}: ranks up to dim, positive scale")

    @classmethod
    def full(cls) -> CrudeHull:
        """Return the study in 16 dimensions, with up to 256,000 sequences."""
        return cls(ranks=(4, 8, 16), counts=(8000, 32_000, 128_000, 256_000), dim=16)

    @classmethod
    def small(cls) -> CrudeHull:
        """Return the smallest configuration in which every claim can change."""
        return cls(ranks=(3, 6), counts=(1500, 6000), dim=6)

    def cells(self) -> tuple[Cell, ...]:
        """Return every stable rank with every number of sequences."""
        return grid(rank=self.ranks, count=self.counts)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the powers of the number of examples, where a fixed number of the best rows is kept.

        Two heads agree to a misfit epsilon in a share of order epsilon of the rows of two tokens, so that the worst of
        the best rows has a misfit of order 1/N, and so has the span, if the sum is right.
        """
        names = ["crude", "true"]
        return xr.Dataset({"power": ("sum", [0.0, -1.0], label("power of the examples"))}, coords={"sum": names})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Fit the hull with every sum of projections, and measure the span's error and the sum's."""
        for_layer, for_data = generator(key).spawn(2)
        layer = equal_spectrum_layer(for_layer, self.dim, HEADS, int(cell["rank"]), scale=self.scale)
        x = sequences(for_data, int(cell["count"]), 2, self.dim)
        data = open_shards((x, evaluate_layer(layer, x)))
        settings, found = HullSettings(kept=16 * self.dim**2), {}
        total = np.asarray(layer.projection).sum(0)
        crude = estimate_crude_sum(data, "correlation")[0]
        hulls = {"crude": find_hull(data, crude, HEADS, settings)}
        sums = {"crude": crude, "true": total}
        for name, share in (("margin", 0.01), ("all", 1.0)):
            refinement = RefinementSettings("margin", margin=share)
            sums[name] = refine_sum(data, hulls["crude"].nearest, refinement)
        for name, one in sums.items():
            hull = hulls.get(name) or find_hull(data, one, HEADS, settings)
            found[f"span_{name}"] = (
                measure_span_error(span_of(hull), np.asarray(layer.theta)),
                f"share of an attention matrix outside the span, {SUMS[name]}",
            )
            error = float(np.linalg.norm(one - total) / np.linalg.norm(total))
            found[f"sum_{name}"] = (error, f"relative error of the {SUMS[name]}")
        return xr.Dataset({name: ((), value, label(words)) for name, (value, words) in found.items()})

    def claims(self) -> tuple[Claim, ...]:
        """Fit the powers of examples and of the stable rank, and compare the spans."""

        def with_examples(name: str) -> Measure:
            return lambda predicted, trained: fit_exponent(self.counts, self._by_count(trained, name, self.ranks[-1]))

        def with_rank(predicted: xr.Dataset, trained: xr.Dataset) -> object:
            return fit_exponent(self.ranks, self._by_rank(trained, "span_crude"))

        def gain(name: str) -> Measure:
            def measure(predicted: xr.Dataset, trained: xr.Dataset) -> Array:
                return np.log(self._by_rank(trained, "span_crude") / self._by_rank(trained, name))[:, -1]

            return measure

        infinite = math.inf
        apart = "a quarter: the two laws' powers, 0 and -1, are four of them apart"
        return (
            Claim(
                "At full stable rank the error of the crude hull's span does not fall with the number of examples",
                with_examples("span_crude"),
                quantity="power of the number of examples",
                target=lambda predicted: float(predicted["power"].sel(sum="crude")),
                tolerance=(0.25, infinite),
                basis=apart,
            ),
            Claim(
                "With the most examples the error of the crude hull's span does not fall with the stable rank",
                with_rank,
                quantity="power of the stable rank",
                target=0.0,
                tolerance=(0.25, infinite),
                basis="half of the power 1/2 of the crude sum's error in operator norm",
            ),
            Claim(
                "The sum from the rows of the largest margin halves the error of the crude hull's span, "
                "at full stable rank",
                gain("span_margin"),
                quantity="fall of the error (ln)",
                target=math.log(2),
                tolerance=(0.0, infinite),
                basis="an inequality: the logarithm of the ratio of errors is above ln 2",
            ),
            Claim(
                "With the rows of the largest margin the error falls with the number of examples",
                with_examples("span_margin"),
                quantity="power of the number of examples",
                target=-0.25,
                tolerance=(infinite, 0.0),
                basis=apart,
            ),
            Claim(
                "With the true sum the error falls as the inverse of the number of examples",
                with_examples("span_true"),
                quantity="power of the number of examples",
                target=lambda predicted: float(predicted["power"].sel(sum="true")),
                tolerance=0.25,
                basis=apart,
            ),
            Claim(
                "Control: the same regression on all rows does not halve the error",
                gain("span_all"),
                quantity="fall of the error (ln)",
                target=math.log(2),
                tolerance=(infinite, 0.0),
                basis="an inequality: the logarithm of the ratio of errors is below ln 2",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the span's error against examples and stable rank."""
        by_count = tuple(
            spread_curve(self.counts, self._by_count(trained, f"span_{name}", self.ranks[-1]), words, group=group)
            for group, (name, words) in enumerate(SUMS.items())
        )
        by_rank = tuple(
            spread_curve(self.ranks, self._by_rank(trained, f"span_{name}"), words, group=group)
            for group, (name, words) in enumerate(SUMS.items())
        )
        rows = [
            (what, words, *(f"{value:.3g}" for value in self._by_rank(trained, f"{kind}_{name}").mean(0)))
            for kind, what in (("sum", "sum of projections"), ("span", "span"))
            for name, words in SUMS.items()
        ]
        axis = "share outside the span"
        return (
            Lines(
                "Error of the span against examples, full stable rank",
                "examples",
                axis,
                by_count,
                True,
                True,
                shows=("At full stable rank", "With the rows of the largest margin", "With the true sum"),
            ),
            Lines(
                "Error of the span against stable rank, most examples",
                "stable rank",
                axis,
                by_rank,
                True,
                True,
                shows=("With the most examples",),
            ),
            Listing("Relative errors, most examples", ("", "", *(f"r = {rank}" for rank in self.ranks)), tuple(rows)),
        )

    def _by_count(self, trained: xr.Dataset, name: str, rank: int) -> Array:
        return np.stack([of_cell(trained, name, rank=rank, count=count) for count in self.counts], axis=1)

    def _by_rank(self, trained: xr.Dataset, name: str) -> Array:
        """Return a figure with the most examples, (replicates, ranks)."""
        return np.stack([of_cell(trained, name, rank=rank, count=self.counts[-1]) for rank in self.ranks], axis=1)
