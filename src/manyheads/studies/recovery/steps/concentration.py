"""`recovery/concentration`: variance of softmax attention, and of its conditional expectation given Hamming weights.

Logits of fixed size make a softmax pattern that is random however many tokens or dimensions there are. Given how many
ones each coordinate has over the tokens of a sequence, that is given the sum of the tokens, its expectation is close to
uniform: this is what lets one gradient step from uniform attention see the projections. Patterns with the same Hamming
weights are drawn by permuting every coordinate over the tokens; the variance of the conditional expectation is the
covariance of two of them, without bias.
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
from manyheads.recovery.layers.evaluation import softmax
from manyheads.recovery.planted.task import equal_spectrum_layer, sequences
from manyheads.statistics import fit_exponent, fit_exponent_to_means
from manyheads.statistics.exponents import ExponentFit
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.papers import CHEN_LI

Array = NDArray[np.float64]

COPIES = 8  # sequences with the same Hamming weights
SERIES = {
    "tokens": "more tokens",
    "dims": "more dimensions",
    "diagonal": "more dimensions, diagonal attention matrix",
}
FIGURES = {"pattern": "variance of the pattern", "given": "variance of its expectation given Hamming weights"}
DIAGONAL = label("squared norm of the diagonal, over that in general position")


@dataclass(frozen=True)
class Concentration(Study):
    """Softmax attention does not concentrate; its conditional expectation given Hamming weights does.

    Attributes
    ----------
    tokens
        Lengths k, rising, in `dims[0]` dimensions.
    dims
        Dimensions d, rising, of `tokens[0]` tokens; the stable rank is d as well.
    scale
        Standard deviation of the logits.
    layers
        Attention matrices of a replicate: their diagonals differ.
    count
        Hamming weights that are drawn for each of them; eight sequences for each.
    """

    name: ClassVar[str] = "recovery/concentration"
    claim: ClassVar[str] = "Softmax does not concentrate; given Hamming weights its expectation does"
    revision: ClassVar[int] = 2
    source: ClassVar[Source] = replace(CHEN_LI, locus="example of the talk; both laws and their constants derived here")

    tokens: tuple[int, ...] = (4, 8, 16)
    dims: tuple[int, ...] = (8, 16, 32)
    scale: float = 0.5
    layers: int = 8
    count: int = 2000

    def __post_init__(self) -> None:
        for name, least in (("tokens", 2), ("dims", 1)):
            sizes = getattr(self, name)
            if len(sizes) < 2 or list(sizes) != sorted(set(sizes)) or min(sizes) < least:
                raise UsageError(f"{name}={sizes}: give two or more from {least} on, rising")
        if self.layers < 1 or self.count < 2 or not self.scale > 0:
            given = f"layers={self.layers}, count={self.count}, scale={self.scale}"
            raise UsageError(f"{given}: give one or more, two or more, and a positive scale")

    @classmethod
    def full(cls) -> Concentration:
        """Return the study up to 32 tokens and 64 dimensions."""
        return cls((4, 8, 16, 32), (8, 16, 32, 64), count=10_000)

    @classmethod
    def small(cls) -> Concentration:
        """Return the smallest configuration in which every claim can change."""
        return cls((2, 4), (2, 4), layers=1, count=400)

    def cells(self) -> tuple[Cell, ...]:
        """Return rising lengths, and rising dimensions for both kinds of attention matrices."""
        lengths = [Cell(series="tokens", size=size) for size in self.tokens]
        return (*lengths, *(Cell(series=name, size=size) for name in ("dims", "diagonal") for size in self.dims))

    def predict(self, key: jax.Array) -> xr.Dataset:
        r"""Return both variances to leading order in the size of the logits.

        With :math:`z = x_r \Theta x_j^\top` and k A = 1 + z - mean_j z, the pattern has the variance
        beta^2 (1 - 1/k) over all its entries. Given the sum S of the tokens, those of one coordinate are exchangeable,
        so that every logit has the same expectation but that of a token with itself, and

        .. math:: \mathbb{E}[\mathrm{tr} A | S] = 1 + \sum_c \Theta_{cc} (1 - S_c^2 / k^2), \qquad
                  \mathrm{Var} = 2 (k - 1) \|\mathrm{diag}\, \Theta\|^2 / k^3 .

        Over all entries this is the variance of the trace over k - 1. The squared diagonal is beta^2 / d for a matrix
        in general position, and beta^2 for one that is diagonal.
        """
        pattern, given = [], []
        for cell in self.cells():
            length, dim = self._sizes(cell)
            diagonal = self.scale**2 / (1 if cell["series"] == "diagonal" else dim)
            pattern.append(self.scale**2 * (1 - 1 / length))
            given.append(2 * diagonal / length**3)
        return xr.Dataset(
            {name: ("place", values, label(FIGURES[name])) for name, values in (("pattern", pattern), ("given", given))}
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Measure both variances over all entries of the pattern, for several attention matrices."""
        rng, found = generator(key), []
        for each in rng.spawn(self.layers):
            found.append(self._measure(each, cell))
        pattern, given, diagonal = np.mean(found, axis=0)
        measured = {
            name: ((), float(value), label(FIGURES[name])) for name, value in (("pattern", pattern), ("given", given))
        }
        return xr.Dataset(measured).assign(diagonal=((), float(diagonal), DIAGONAL))

    def claims(self) -> tuple[Claim, ...]:
        """Fit the powers of length and dimension."""

        def power(series: str) -> Measure:
            def fit(predicted: xr.Dataset, trained: xr.Dataset) -> ExponentFit:
                return fit_exponent(self._ladder(series), self._path(trained, "pattern", series))

            return fit

        def power_of_mean(series: str) -> Measure:
            def fit(predicted: xr.Dataset, trained: xr.Dataset) -> ExponentFit:
                values = self._path(trained, "given", series)  # single estimates may be negative, their mean is not
                if series == "tokens":  # one matrix at all lengths: its diagonal is a common factor
                    values = values / self._path(trained, "diagonal", series)
                errors = values.std(0, ddof=1) / len(values) ** 0.5
                return fit_exponent_to_means(self._ladder(series), values.mean(0), errors, dof=len(values) - 1)

            return fit

        def ratio(predicted: xr.Dataset, trained: xr.Dataset) -> Array:
            place = len(self.tokens) + len(self.dims) - 1
            law = float(predicted["given"].values[place]) * self._path(trained, "diagonal", "dims")[:, -1]
            return np.asarray(self._path(trained, "given", "dims")[:, -1] / law)

        apart = "half of the distance of the two laws' powers"
        return (
            Claim(
                "The variance of a softmax pattern does not fall with the number of tokens",
                power("tokens"),
                quantity="power of the length k",
                target=0.0,
                tolerance=(0.25, math.inf),
                basis="an inequality: beta^2 (1 - 1/k) rises; a quarter for the error of the slope",
            ),
            Claim(
                "The variance of a softmax pattern does not fall with the dimension",
                power("dims"),
                quantity="power of the dimension d",
                target=0.0,
                tolerance=0.25,
                basis="logits keep their size; a quarter, for corrections of order 1/d",
            ),
            Claim(
                "The variance of its conditional expectation given Hamming weights falls as k^-3",
                power_of_mean("tokens"),
                quantity="power of the length k",
                target=-3.0,
                tolerance=0.5,
                basis="neither k^-2 nor k^-4: half of the distance to them",
            ),
            Claim(
                "The variance of its conditional expectation given Hamming weights falls as 1/d",
                power_of_mean("dims"),
                quantity="power of the dimension d",
                target=-1.0,
                tolerance=0.5,
                basis=apart,
            ),
            Claim(
                "At the largest dimension the variance of the conditional expectation is 2 |diag Theta|^2 / k^3",
                ratio,
                quantity="variance over that of the closed form",
                target=1.0,
                tolerance=2 * self.scale**2,
                basis="the next order is scale^2 relative to it, doubled",
            ),
            Claim(
                "Control: for a diagonal attention matrix the variance does not fall with the dimension",
                power_of_mean("diagonal"),
                quantity="power of the dimension d",
                target=0.0,
                tolerance=0.5,
                basis=apart,
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show both variances against length and dimension."""
        panels: list[Panel] = []
        texts = {
            "tokens": ("tokens", "number of tokens", ("with the number of tokens", "falls as k^-3")),
            "dims": ("dimension", "dimension", ("with the dimension", "falls as 1/d")),
        }
        for axis, (words, what, shows) in texts.items():
            curves: list[Curve] = []
            for group, (name, series) in enumerate((n, s) for s in SERIES for n in FIGURES):
                if (series == "tokens") == (axis == "tokens"):
                    sizes = self._ladder(series)
                    title = FIGURES[name] + ", diagonal attention matrix" * (series == "diagonal")
                    values = self._path(trained, name, series)
                    curves.append(spread_curve(sizes, np.maximum(values, 1e-9), title, group=group))
                    law = tuple(predicted[name].values[self._places(series)].tolist())
                    told = "" if any(curve.role == "predicted" for curve in curves) else "leading order, dashed"
                    curves.append(Curve(tuple(map(float, sizes)), law, told, "predicted", group))
            panels.append(
                Lines(
                    f"Variance of the attention pattern against the {what}",
                    words,
                    "variance, all entries",
                    tuple(curves),
                    True,
                    True,
                    shows=shows,
                )
            )
        rows = [
            (SERIES[series], FIGURES[name], str(size), f"{measured:.3g}", f"{law:.3g}")
            for series in SERIES
            for name in FIGURES
            for size, measured, law in zip(
                self._ladder(series),
                self._path(trained, name, series).mean(0),
                predicted[name].values[self._places(series)],
                strict=True,
            )
        ]
        columns = ("", "", "size", "measured", "leading order")
        return (*panels, Listing("Means over replicates", columns, tuple(rows)))

    def _measure(self, rng: np.random.Generator, cell: Cell) -> tuple[float, float, float]:
        """Return both variances for one attention matrix, and the squared norm of its diagonal."""
        for_layer, for_data = rng.spawn(2)
        length, dim = self._sizes(cell)
        if cell["series"] == "diagonal":
            theta = self.scale / dim**0.5 * np.diag((-1.0) ** np.arange(dim))  # no trace: logits keep their mean
        else:
            theta = np.asarray(equal_spectrum_layer(for_layer, dim, 1, dim, scale=self.scale).theta[0])
        x = sequences(for_data, self.count, length, dim)
        traces, squares, mean = np.empty((COPIES, self.count)), 0.0, np.zeros((length, length))
        for copy in range(COPIES):
            x = for_data.permuted(x, axis=1)  # every coordinate by itself, over the tokens
            pattern = softmax((x @ theta) @ x.transpose(0, 2, 1))
            traces[copy] = np.trace(pattern, axis1=1, axis2=2)
            squares, mean = squares + float(np.square(pattern).sum()), mean + pattern.sum(0)
        drawn = COPIES * self.count
        own = float(np.trace(mean)) / length / drawn  # expected weight of a token on itself; the others share the rest
        expected = length * own**2 + (1 - own) ** 2 * length / (length - 1)
        between = traces.mean(0).var(ddof=1) - traces.var(0, ddof=1).mean() / COPIES
        diagonal = float(np.sum(np.diag(theta) ** 2)) * dim / self.scale**2
        return squares / drawn - expected, float(between) / (length - 1), diagonal

    def _sizes(self, cell: Cell) -> tuple[int, int]:
        """Return length and dimension of a cell."""
        size = int(cell["size"])
        return (size, self.dims[0]) if cell["series"] == "tokens" else (self.tokens[0], size)

    def _ladder(self, series: str) -> tuple[int, ...]:
        return self.tokens if series == "tokens" else self.dims

    def _places(self, series: str) -> list[int]:
        return [place for place, cell in enumerate(self.cells()) if cell["series"] == series]

    def _path(self, trained: xr.Dataset, name: str, series: str) -> Array:
        """Return a figure of one series, (replicates, sizes)."""
        return np.stack([of_cell(trained, name, series=series, size=size) for size in self._ladder(series)], axis=1)
