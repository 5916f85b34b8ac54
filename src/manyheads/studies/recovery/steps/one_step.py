"""`recovery/one-step`: distance of one gradient step from the sum of projections, against the stable rank.

A single head that starts at zero attends uniformly. One gradient step of the squared loss on its projection gives the
correlation of stage one, (1/kN) sum X^T 1 1^T Y, while the gradient on its attention matrix is zero. What the step
makes of unlimited examples is measured beside its closed form: the sampling error of the inputs' covariance, which has
a known mean, is taken out, and norms come from two halves of the examples, so that noise averages to zero.
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
from manyheads.recovery.examples.stages.crude_sum import measure_moments, predict_bias
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.planted.task import equal_spectrum_layer, sequences
from manyheads.statistics import fit_exponent
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.study import Cell, Claim, Lines, Listing, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.papers import CHEN_LI

Array = NDArray[np.float64]

BLOCK = 5000  # sequences that are drawn at a time
FEW = 8  # examples for each dimension, of the step from few
WIDTH = 2  # dimensions for each unit of rank, where the dimension grows with it
FAMILIES = {
    "growing": "dimension grows with the rank",
    "fixed": "fixed dimension",
    "shifted": "dimension grows, tokens of mean one in norm",
}
FIGURES = {
    "operator": "relative error in operator norm",
    "frobenius": "relative error in Frobenius norm",
    "bias": "predicted relative error in Frobenius norm",
    "few": "relative error in operator norm, 8 d examples",
}


@dataclass(frozen=True)
class OneStep(Study):
    """One gradient step from a head at zero finds the sum of projections up to the inverse root of the stable rank.

    Attributes
    ----------
    ranks
        Stable ranks of the attention matrices, rising. The dimension is twice the rank, or twice the largest.
    heads, tokens
        Heads m and length k.
    scale
        Standard deviation of the logits.
    count
        Sequences of each half.
    """

    name: ClassVar[str] = "recovery/one-step"
    claim: ClassVar[str] = "One gradient step from zero is r^-1/2 close to the sum of projections"
    source: ClassVar[Source] = replace(CHEN_LI, locus="crude sum by one gradient step; power and constant derived here")

    ranks: tuple[int, ...] = (4, 8, 16, 32)
    heads: int = 2
    tokens: int = 3
    scale: float = 1.0
    count: int = 10_000

    def __post_init__(self) -> None:
        if len(self.ranks) < 2 or list(self.ranks) != sorted(set(self.ranks)) or min(self.ranks) < 1:
            raise UsageError(f"ranks={self.ranks}: give two or more positive ones, rising")
        if self.heads < 1 or self.tokens < 2 or self.count < 1 or not self.scale > 0:
            raise UsageError(
                f"heads={self.heads}, tokens={self.tokens}, count={self.count}, scale={self.scale}: give a head, two "
                "tokens, a sequence and a positive scale or more"
            )

    @classmethod
    def full(cls) -> OneStep:
        """Return the study up to rank 128, in 256 dimensions."""
        return cls(ranks=(4, 8, 16, 32, 64, 128), count=100_000)

    @classmethod
    def small(cls) -> OneStep:
        """Return the smallest configuration in which every claim can change."""
        return cls(ranks=(1, 2), count=200)

    def cells(self) -> tuple[Cell, ...]:
        """Return every rank, in dimensions that grow with it, in the largest one, and with shifted tokens."""
        return grid(family=tuple(FAMILIES), rank=self.ranks)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the power of the stable rank in both norms, where the dimension is fixed and logits are."""
        powers = [-0.5, 0.0]
        return xr.Dataset(
            {"power": ("norm", powers, label("power of the rank"))}, coords={"norm": ["operator", "frobenius"]}
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Take the step on a layer of one stable rank."""
        for_layer, for_data, for_prediction = generator(key).spawn(3)
        family, rank = str(cell["family"]), int(cell["rank"])
        dim = WIDTH * (max(self.ranks) if family == "fixed" else rank)
        layer = equal_spectrum_layer(for_layer, dim, self.heads, rank, scale=self.scale)
        total = np.asarray(layer.projection).sum(0)
        mean = np.full(dim, (family == "shifted") / dim**0.5)
        halves = []
        for _ in range(2):
            inputs, cross, rows = np.zeros((dim, dim)), np.zeros((dim, dim)), 0
            for begin in range(0, self.count, BLOCK):
                x = mean + sequences(for_data, min(BLOCK, self.count - begin), self.tokens, dim)
                moments = measure_moments(x, evaluate_layer(layer, x))
                inputs, cross, rows = inputs + moments.inputs, cross + moments.cross, rows + moments.rows
            known = self.tokens * np.outer(mean, mean)  # of the inputs' covariance, beyond the identity
            halves.append((cross - inputs @ total) / rows + known @ total)
        x = mean + sequences(for_data, FEW * dim, self.tokens, dim)
        moments = measure_moments(x, evaluate_layer(layer, x))
        bias = predict_bias(layer, self.tokens, for_prediction)
        values = {
            "operator": _operator_norm(*halves) / np.linalg.norm(total, 2),
            "frobenius": math.sqrt(max(float(np.vdot(*halves)), 1e-30)) / np.linalg.norm(total),
            "bias": np.linalg.norm(bias) / np.linalg.norm(total),
            "few": np.linalg.norm(moments.cross / moments.rows - total, 2) / np.linalg.norm(total, 2),
        }
        return xr.Dataset({name: ((), float(value), label(FIGURES[name])) for name, value in values.items()})

    def claims(self) -> tuple[Claim, ...]:
        """Fit powers of the rank, and compare the error with its closed form."""

        def power(name: str, family: str) -> Measure:
            return lambda predicted, trained: fit_exponent(self.ranks, self._path(trained, name, family))

        def ratio(predicted: xr.Dataset, trained: xr.Dataset) -> Array:
            cell = {"family": "fixed", "rank": self.ranks[-1]}
            return np.asarray(of_cell(trained, "frobenius", **cell) / of_cell(trained, "bias", **cell))

        reach = math.log(self.ranks[-1] / self.ranks[0])
        slack = self.scale**2 / self.ranks[0] / reach
        correction = "corrections are of relative order scale^2/r; at the least rank one moves the slope by this much"
        return (
            Claim(
                "With logits of fixed size one gradient step from zero comes as close to the sum of projections, in "
                "operator norm, as r^-1/2, r the stable rank, which grows with the dimension",
                power("operator", "growing"),
                quantity="power of the stable rank",
                target=lambda predicted: float(predicted["power"].sel(norm="operator")),
                tolerance=slack,
                basis=correction,
            ),
            Claim(
                "In a fixed dimension the Frobenius norm of the error does not depend on the stable rank",
                power("frobenius", "fixed"),
                quantity="power of the stable rank",
                target=lambda predicted: float(predicted["power"].sel(norm="frobenius")),
                tolerance=slack,
                basis=correction,
            ),
            Claim(
                "At the largest rank the error is that of the closed form sum_i c Theta_i W_i, c = 1 - E sum_j a_j^2",
                ratio,
                quantity="error over that of the closed form, Frobenius norms",
                target=1.0,
                tolerance=2 * self.scale**2 / self.ranks[-1],
                basis="corrections are of relative order scale^2/r, doubled",
            ),
            Claim(
                "Control: for tokens whose mean is not zero the error does not fall with the stable rank",
                power("operator", "shifted"),
                quantity="power of the stable rank",
                target=0.0,
                tolerance=0.25,
                basis="k |mean|^2 of the projection along the mean is left whatever the rank; half of the power 1/2",
            ),
            Claim(
                f"Control: from {FEW} examples a dimension the error does not fall with the stable rank",
                power("few", "growing"),
                quantity="power of the stable rank",
                target=0.0,
                tolerance=0.25,
                basis="the covariance of so few inputs is off by a constant in operator norm; half of the power 1/2",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the errors against the stable rank, and their means."""
        shown = (
            ("operator", "growing"),
            ("frobenius", "fixed"),
            ("bias", "fixed"),
            ("operator", "shifted"),
            ("few", "growing"),
        )
        curves = tuple(
            spread_curve(
                self.ranks,
                self._path(trained, name, family),
                f"{FIGURES[name]}, {FAMILIES[family]}",
                "predicted" if name == "bias" else "trained",
                group,
            )
            for name, family, group in ((*pair, (0, 1, 1, 2, 3)[place]) for place, pair in enumerate(shown))
        )
        rows = [
            (FAMILIES[family], FIGURES[name], *(f"{value:.3g}" for value in self._path(trained, name, family).mean(0)))
            for family in FAMILIES
            for name in FIGURES
        ]
        return (
            Lines(
                "Error of one gradient step from zero, by stable rank",
                "stable rank",
                "relative error",
                curves,
                log_x=True,
                log_y=True,
                note="Bands reach over replicates.",
                shows=("With logits of fixed size", "In a fixed dimension", "Control: for tokens"),
            ),
            Listing("Means over replicates", ("", "", *(f"r = {rank}" for rank in self.ranks)), tuple(rows)),
        )

    def _path(self, trained: xr.Dataset, name: str, family: str) -> Array:
        """Return a figure of one family, (replicates, ranks)."""
        return np.stack([of_cell(trained, name, family=family, rank=rank) for rank in self.ranks], axis=1)


def _operator_norm(one: Array, other: Array) -> float:
    """Return the operator norm of what two noisy matrices share: singular vectors of one, value in the other."""
    values = []
    for chosen, tested in ((one, other), (other, one)):
        left, _, right = np.linalg.svd(chosen)
        values.append(abs(float(left[:, 0] @ tested @ right[0])))
    return sum(values) / 2
