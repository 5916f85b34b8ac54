"""`recovery/span-cost`: examples and operations that the span takes, against dimension, length and heads.

Stages four and five are run on ever more examples, with the true sum of projections, so that nothing but the number of
rows in which the heads agree limits them. Operations are counted from the shapes of what is computed. Tokens are
normal: short Boolean ones repeat, and ties among the best rows are another matter.
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
from manyheads.recovery.examples.stages.hull import HullSettings, find_hull
from manyheads.recovery.examples.stages.shards import open_shards
from manyheads.recovery.examples.stages.span import measure_span_error, span_of
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.planted.task import planted_layer, sequences
from manyheads.statistics import fit_exponent
from manyheads.statistics.exponents import ExponentFit
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.study import Cell, Claim, Lines, Listing, Source, Study
from manyheads.study.claims import FromPrediction, Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.papers import CHEN_LI

Array = NDArray[np.float64]

KEPT = 16  # rows that are kept, for each of the d^2 entries
REWEIGHINGS = 2


@dataclass(frozen=True)
class SpanCost(Study):
    """Examples for the span grow as d^2, and as a power of the inverse error that rises with length and heads.

    Attributes
    ----------
    dims
        Token dimensions d, rising, for two tokens and two heads.
    shapes
        Lengths and heads (k, m) in the least dimension but one.
    counts
        Sequences, rising.
    wanted
        Error of the span whose examples are compared between dimensions.
    """

    name: ClassVar[str] = "recovery/span-cost"
    claim: ClassVar[str] = "Examples for the span grow as d^2, and faster with length and heads"
    source: ClassVar[Source] = replace(CHEN_LI, locus="time (dk)^O(m^3) of the main theorem; powers derived here")

    dims: tuple[int, ...] = (6, 8, 12, 16)
    shapes: tuple[tuple[int, int], ...] = ((2, 2), (3, 2), (4, 2), (2, 3))
    counts: tuple[int, ...] = (2000, 4000, 8000, 16_000, 32_000)
    wanted: float = 0.05

    def __post_init__(self) -> None:
        for name in ("dims", "counts"):
            sizes = getattr(self, name)
            if len(sizes) < 2 or list(sizes) != sorted(set(sizes)) or sizes[0] < 2:
                raise UsageError(f"{name}={sizes}: give two or more from 2 on, rising")
        if self.shapes[:1] != ((2, 2),) or any(min(shape) < 2 for shape in self.shapes):
            raise UsageError(f"shapes={self.shapes}: give (2, 2) first, then lengths and heads from 2 on")
        if not 0 < self.wanted < 1:
            raise UsageError(f"wanted={self.wanted}: give an error between 0 and 1")

    @classmethod
    def full(cls) -> SpanCost:
        """Return the study up to 24 dimensions and 256,000 sequences."""
        return cls(dims=(8, 12, 16, 24), counts=(4000, 16_000, 64_000, 256_000))

    @classmethod
    def small(cls) -> SpanCost:
        """Return the smallest configuration in which every claim can change."""
        return cls(dims=(3, 4), shapes=((2, 2), (3, 2)), counts=(800, 1600), wanted=0.2)

    def cells(self) -> tuple[Cell, ...]:
        """Return every dimension for two tokens and heads, every other shape, and the control."""
        shapes = [(dim, 2, 2) for dim in self.dims] + [(self.dims[1], *shape) for shape in self.shapes[1:]]
        planted = [Cell(labels="planted", dim=dim, tokens=length, heads=heads) for dim, length, heads in shapes]
        return (*planted, Cell(labels="shuffled", dim=self.dims[1], tokens=2, heads=2))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the powers of error and dimension.

        m heads agree in the k - 1 free weights of a row to epsilon with a probability of order epsilon^((k-1)(m-1)), so
        that the worst of a fixed number of the best of N rows is off by N^(-1/((k-1)(m-1))). The rows that are kept are
        proportional to the d^2 entries of a matrix, and the probability does not depend on d.
        """
        powers = [-1 / ((length - 1) * (heads - 1)) for length, heads in self.shapes]
        return xr.Dataset(
            {
                "error_power": ("shape", powers, label("power of the examples in the span's error")),
                "dim_power": ((), 2.0, label("power of the dimension in the examples")),
            }
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Find the span from ever more of the same examples."""
        rng, dim, length, heads = generator(key), int(cell["dim"]), int(cell["tokens"]), int(cell["heads"])
        layer = planted_layer(rng, dim, heads)
        x = sequences(rng, self.counts[-1], length, dim, distribution="gaussian")
        y = evaluate_layer(layer, x)
        if cell["labels"] == "shuffled":
            y = rng.permutation(y)
        total = np.asarray(layer.projection).sum(0)
        settings = HullSettings(kept=max(KEPT * dim**2 // (length - 1), 1), reweighings=REWEIGHINGS)
        errors = [
            measure_span_error(
                span_of(find_hull(open_shards((x[:count], y[:count])), total, heads, settings)), np.asarray(layer.theta)
            )
            for count in self.counts
        ]
        return xr.Dataset(
            {"error": ("count", errors, label("share of an attention matrix outside the span"))},
            coords={"count": list(self.counts)},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Fit the powers of dimension and error."""
        base = self.dims[1]

        def examples(predicted: xr.Dataset, trained: xr.Dataset) -> ExponentFit:
            return fit_exponent(self.dims, self._examples(trained))

        def operations(predicted: xr.Dataset, trained: xr.Dataset) -> ExponentFit:
            needed = self._examples(trained)
            spent = [[count_operations(n, dim, 2) for n, dim in zip(row, self.dims, strict=True)] for row in needed]
            return fit_exponent(self.dims, spent)

        def slope(length: int, heads: int) -> Measure:
            def fit(predicted: xr.Dataset, trained: xr.Dataset) -> ExponentFit:
                return fit_exponent(self.counts, self._errors(trained, base, length, heads))

            return fit

        def error_power(place: int) -> FromPrediction[float]:
            return lambda predicted: float(predicted["error_power"][place])

        infinite = math.inf
        return (
            Claim(
                f"The examples that bring the span within {self.wanted:g} grow as d^2",
                examples,
                quantity="power of the dimension d",
                target=lambda predicted: float(predicted["dim_power"]),
                tolerance=0.5,
                basis="neither d nor d^3: half of the distance to them",
            ),
            Claim(
                "The operations on so many examples grow as d^6 at most: normal equations of d^2 unknowns",
                operations,
                quantity="power of the dimension d",
                target=6.0,
                tolerance=(infinite, 0.0),
                basis="rows are kept in proportion to d^2, and each costs d^4; an eigenproblem of d^2 costs d^6",
            ),
            *(
                Claim(
                    f"For {length} tokens and {heads} heads the examples grow no faster than the power "
                    f"{(length - 1) * (heads - 1)} of the inverse error",
                    slope(length, heads),
                    quantity="power of the number of examples in the error",
                    target=error_power(place),
                    tolerance=(infinite, 0.1),
                    basis="saturated rows agree more cheaply than the limit says, which makes the error fall faster; a "
                    "tenth for the scatter of the best rows",
                )
                for place, (length, heads) in enumerate(self.shapes)
            ),
            Claim(
                "Control: from shuffled labels no number of examples gives the span",
                lambda predicted, trained: self._errors(trained, base, 2, 2, "shuffled")[:, -1],
                quantity="share of an attention matrix outside the span, most examples",
                bounds=(0.0, 1.0),
                target=1.0,
                tolerance=(0.5, infinite),
                basis="two random directions of d^2 leave nearly all outside; half of it",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the error against examples, and what each dimension takes."""
        by_dim = tuple(
            spread_curve(self.counts, self._errors(trained, dim, 2, 2), f"d = {dim}", group=group)
            for group, dim in enumerate(self.dims)
        )
        by_shape = tuple(
            spread_curve(
                self.counts, self._errors(trained, self.dims[1], *shape), "k = {}, m = {}".format(*shape), group=group
            )
            for group, shape in enumerate(self.shapes)
        )
        needed = np.exp(np.log(self._examples(trained)).mean(0))
        rows = [
            (str(dim), f"{count:.0f}", f"{count_operations(count, dim, 2):.3g}")
            for dim, count in zip(self.dims, needed, strict=True)
        ]
        return (
            Lines(
                "Error of the span by examples and dimension, two tokens and heads",
                "examples",
                "share outside the span",
                by_dim,
                True,
                True,
                shows=("grow as d^2",),
            ),
            Lines(
                f"Error of the span by tokens k and heads m, {self.dims[1]} dimensions",
                "examples",
                "share outside the span",
                by_shape,
                True,
                True,
                shows=("no faster",),
            ),
            Listing(f"What an error of {self.wanted:g} takes", ("d", "examples", "multiply-adds"), tuple(rows)),
        )

    def _examples(self, trained: xr.Dataset) -> Array:
        """Return the examples at which the fitted power law reaches the wanted error, (replicates, dims)."""
        found = []
        for dim in self.dims:
            logs = np.log(self._errors(trained, dim, 2, 2))
            place = np.log(self.counts) - np.mean(np.log(self.counts))
            slopes = logs @ place / (place @ place)
            found.append(np.mean(np.log(self.counts)) + (math.log(self.wanted) - logs.mean(1)) / slopes)
        return np.exp(np.stack(found, axis=1))

    def _errors(self, trained: xr.Dataset, dim: int, tokens: int, heads: int, labels: str = "planted") -> Array:
        return of_cell(trained, "error", labels=labels, dim=dim, tokens=tokens, heads=heads)


def count_operations(count: float, dim: int, length: int) -> float:
    """Return the multiply-adds of stages four and five on so many sequences, to leading order in d.

    Certificates project every token, k d^2 a sequence. Every weighing forms the Gram matrix of (k-1) equations for each
    kept row, of d^2 + 1 unknowns, and solves its eigenproblem, 4/3 of the cube.
    """
    unknowns = dim**2 + 1
    equations = KEPT * dim**2 // (length - 1) * (length - 1)
    return count * length * dim**2 + (REWEIGHINGS + 1) * (equations * unknowns**2 + 4 / 3 * unknowns**3)
