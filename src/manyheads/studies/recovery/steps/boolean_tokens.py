"""`recovery/boolean-tokens`: how far logits of Boolean tokens are from normal ones, on lattices and far from them.

Logits are taken from an attention matrix and a query, and their distribution over Boolean keys is computed without
sampling. A signed permutation has the largest stable rank, no heavy row or column, and entries on a lattice; giving its
entries sizes between one half and three halves takes it off the lattice. A dense normal matrix is beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from manyheads.errors import UsageError
from manyheads.recovery.planted.boolean_logits import (
    edgeworth_distance_to_normal,
    lattice_distance_to_normal,
    measure_gap,
)
from manyheads.recovery.planted.task import normal_matrix
from manyheads.statistics import fit_exponent
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.papers import CHEN_LI

Array = NDArray[np.float64]

KINDS = {
    "lattice": "signed permutation",
    "scaled": "signed permutation, entries of random sizes",
    "dense": "normal matrix",
}
FIGURES = {
    "distance": "Kolmogorov distance to the normal distribution",
    "near": "probability of |u| <= 1/d, over the normal one",
    "leading": "leading order of the distance",
}


@dataclass(frozen=True)
class BooleanTokens(Study):
    """A Gaussian estimate for Boolean tokens is off by 1/sqrt(d) on lattices and by 1/d far from them.

    Attributes
    ----------
    dims
        Dimensions d, rising and even.
    queries
        Queries for each attention matrix; figures are means over them.
    """

    name: ClassVar[str] = "recovery/boolean-tokens"
    claim: ClassVar[str] = "Gaussian estimates of Boolean logits are off by d^-1/2; far from lattices by 1/d"
    source: ClassVar[Source] = replace(
        CHEN_LI, locus="Boolean tokens and lattices, as told in the talk; laws derived here"
    )

    dims: tuple[int, ...] = (16, 32, 64, 128)
    queries: int = 8

    def __post_init__(self) -> None:
        even = all(dim % 2 == 0 for dim in self.dims)
        if len(self.dims) < 2 or list(self.dims) != sorted(set(self.dims)) or not even or self.dims[0] < 2:
            raise UsageError(f"dims={self.dims}: give two or more even numbers, rising")
        if self.queries < 1:
            raise UsageError(f"queries={self.queries}: give one or more")

    @classmethod
    def full(cls) -> BooleanTokens:
        """Return the study up to 512 dimensions."""
        return cls(dims=(16, 32, 64, 128, 256, 512))

    @classmethod
    def small(cls) -> BooleanTokens:
        """Return the smallest configuration in which every claim can change."""
        return cls(dims=(4, 8), queries=1)

    def cells(self) -> tuple[Cell, ...]:
        """Return every kind of attention matrix in every dimension."""
        return grid(kind=tuple(KINDS), dim=self.dims)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the distance on a lattice, and the powers of the dimension far from lattices."""
        floor = [lattice_distance_to_normal(dim) for dim in self.dims]
        powers = [-0.5, -1.0, -1.0]
        return xr.Dataset(
            {"floor": ("dim", floor, label(FIGURES["leading"])), "power": ("kind", powers, label("power of d"))},
            coords={"dim": list(self.dims), "kind": list(KINDS)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Compare the logits of some queries of one attention matrix with normal ones."""
        rng, dim, kind = generator(key), int(cell["dim"]), str(cell["kind"])
        if kind == "dense":
            theta = normal_matrix(rng, dim, 1.0)
        else:
            sizes = rng.uniform(0.5, 1.5, dim) if kind == "scaled" else np.ones(dim)
            sizes *= 2.0 * rng.integers(0, 2, dim) - 1
            theta = np.zeros((dim, dim))
            theta[rng.permutation(dim), np.arange(dim)] = sizes
        found = []
        for query in 2.0 * rng.integers(0, 2, (self.queries, dim)) - 1:
            weights = query @ theta
            leading = lattice_distance_to_normal(dim) if kind == "lattice" else edgeworth_distance_to_normal(weights)
            found.append((*measure_gap(weights, 1 / dim), leading))
        means = np.mean(found, axis=0)
        return xr.Dataset(
            {name: ((), float(value), label(FIGURES[name])) for name, value in zip(FIGURES, means, strict=True)}
        )

    def claims(self) -> tuple[Claim, ...]:
        """Fit the powers of the dimension, and compare the largest with the closed forms."""

        def power(name: str, kind: str) -> Measure:
            return lambda predicted, trained: fit_exponent(self.dims, self._path(trained, name, kind))

        def floor(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            measured = self._path(trained, "distance", "lattice")[:, -1]
            return float(measured.mean() / predicted["floor"].values[-1])

        def edgeworth(kind: str) -> Measure:
            return lambda predicted, trained: (
                self._path(trained, "distance", kind)[:, -1] / self._path(trained, "leading", kind)[:, -1]
            )

        def near(kind: str) -> Measure:
            return lambda predicted, trained: self._path(trained, "near", kind)[:, -1]

        least, most = self.dims[0], self.dims[-1]
        return (
            Claim(
                "On a lattice the distance of Boolean logits to normal ones falls as d^-1/2 only, at full stable rank",
                power("distance", "lattice"),
                quantity="power of the dimension d",
                target=-0.5,
                tolerance=1 / least,
                basis="corrections of relative order 1/d",
            ),
            Claim(
                "The distance on a lattice is half of the largest atom, (2 pi d)^-1/2",
                floor,
                quantity="distance over the closed form, largest dimension",
                target=1.0,
                tolerance=1 / most,
                basis="Stirling's next term, 1/(4 d), and the density's curvature over a step, four times as much",
            ),
            Claim(
                "Off the lattice, all else equal, the distance falls as 1/d",
                power("distance", "scaled"),
                quantity="power of the dimension d",
                target=-1.0,
                tolerance=0.25,
                basis="half of the distance of the two laws' powers",
            ),
            Claim(
                "For a dense matrix the distance falls as 1/d",
                power("distance", "dense"),
                quantity="power of the dimension d",
                target=-1.0,
                tolerance=0.25,
                basis="half of the distance of the two laws' powers",
            ),
            Claim(
                "For a dense matrix the distance is the fourth-cumulant term of Edgeworth's expansion",
                edgeworth("dense"),
                quantity="distance over the closed form, largest dimension",
                target=1.0,
                tolerance=9 / most,
                basis="the terms of sixth order are at most 9/d of it for normal weights",
            ),
            Claim(
                "On a lattice a logit lies within 1/d of zero sqrt(d) times as often as the Gaussian estimate says",
                power("near", "lattice"),
                quantity="power of the dimension d",
                target=0.5,
                tolerance=1 / least,
                basis="one atom, sqrt(2/(pi d)), over 2/(d sqrt(2 pi)); corrections of relative order 1/d",
            ),
            Claim(
                "For a dense matrix the Gaussian estimate of logits within 1/d of zero is right below "
                "the floor of 1/sqrt(d)",
                near("dense"),
                quantity="probability over the Gaussian one, largest dimension",
                target=1.0,
                tolerance=3 / most,
                basis="Edgeworth's correction of the density at zero is 3/(4 d) for normal weights; four of them",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show distance and probability against the dimension."""
        distances: list[Curve] = []
        for group, (kind, words) in enumerate(KINDS.items()):
            distances.append(spread_curve(self.dims, self._path(trained, "distance", kind), words, group=group))
            leading = tuple(self._path(trained, "leading", kind).mean(0).tolist())
            dims = tuple(map(float, self.dims))
            distances.append(Curve(dims, leading, f"leading order, {words}", "predicted", group))
        near = tuple(
            spread_curve(self.dims, self._path(trained, "near", kind), words, group=group)
            for group, (kind, words) in enumerate(KINDS.items())
        )
        rows = [
            (words, FIGURES[name], *(f"{value:.3g}" for value in self._path(trained, name, kind).mean(0)))
            for kind, words in KINDS.items()
            for name in FIGURES
        ]
        return (
            Lines(
                "Distance of the logits to the Gaussian estimate, by dimension",
                "dimension",
                "Kolmogorov distance",
                tuple(distances),
                True,
                True,
                note="Exact, or by inversion of the characteristic function; nothing is sampled but the layers.",
                shows=("On a lattice the distance", "Off the lattice"),
            ),
            Lines(
                "Logits near zero",
                "dimension",
                "probability over the Gaussian one",
                near,
                True,
                True,
                shows=("On a lattice a logit",),
            ),
            Listing("Means over replicates", ("", "", *(f"d = {dim}" for dim in self.dims)), tuple(rows)),
        )

    def _path(self, trained: xr.Dataset, name: str, kind: str) -> Array:
        """Return a figure of one kind, (replicates, dims)."""
        return np.stack([of_cell(trained, name, kind=kind, dim=dim) for dim in self.dims], axis=1)
