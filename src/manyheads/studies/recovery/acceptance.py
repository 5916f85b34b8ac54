"""`recovery/acceptance`: acceptance rate of certificates, its exponent (k-1)(m-1) and its small-threshold limit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.recovery.examples.stages.acceptance_rate import (
    dimension_correction,
    predict_acceptance,
    predict_small_threshold,
)
from manyheads.recovery.examples.stages.agreement import fit_simplex
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.planted.task import planted_layer, sequences
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.papers import CHEN_LI

SMALL = (0.001, 0.002, 0.004, 0.008)  # thresholds near the limit, for two heads and two tokens
SHARE = label("share of rows that are certified")
MISFIT = label("misfit")


@dataclass(frozen=True)
class Acceptance(Study):
    """Rows are certified as often as independent softmax vectors agree.

    Attributes
    ----------
    tokens, heads
        Lengths k and numbers of heads m; every pair is measured.
    dims
        Token dimensions, rising; the law is for large ones.
    thresholds
        Misfits, rising: those with which the stages work.
    layers, count
        Layers of a replicate, and sequences that each of them sees.
    scale
        Standard deviation of the logits.
    """

    name: ClassVar[str] = "recovery/acceptance"
    claim: ClassVar[str] = "Rows are certified as often as the softmax vectors of all heads agree"
    source: ClassVar = CHEN_LI
    predictions: ClassVar[int | None] = 4

    tokens: tuple[int, ...] = (2, 3, 4)
    heads: tuple[int, ...] = (2, 3)
    dims: tuple[int, ...] = (16, 96)
    thresholds: tuple[float, ...] = (0.04, 0.08, 0.16)
    layers: int = 4
    count: int = 6000
    scale: float = 2.0

    def __post_init__(self) -> None:
        if min(self.tokens) < 2 or min(self.heads) < 2 or 2 not in self.tokens or 2 not in self.heads:
            raise UsageError(f"tokens={self.tokens}, heads={self.heads}: two or more each, and the pair (2, 2)")
        if len(self.thresholds) < 2 or list(self.thresholds) != sorted(set(self.thresholds)):
            raise UsageError(f"thresholds={self.thresholds}: give two or more, rising")
        if list(self.dims) != sorted(set(self.dims)):
            raise UsageError(f"dims={self.dims}: give them rising")

    @classmethod
    def full(cls) -> Acceptance:
        """Return the study with up to four heads, and up to 128 dimensions."""
        return cls(heads=(2, 3, 4), dims=(16, 96, 256), layers=8, count=20_000)

    @classmethod
    def small(cls) -> Acceptance:
        """Return the smallest configuration in which every claim can change."""
        return cls((2,), (2,), (4, 6), (0.1, 0.2), layers=1, count=200)

    def cells(self) -> tuple[Cell, ...]:
        """Return every pair of lengths and heads in every dimension."""
        return grid(tokens=self.tokens, heads=self.heads, dim=self.dims)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the law in large dimension, by Monte Carlo over softmax vectors."""
        rng = generator(key)
        table = [
            [predict_acceptance(rng, length, heads, self.thresholds, self.scale) for heads in self.heads]
            for length in self.tokens
        ]
        coords = {"tokens": list(self.tokens), "heads": list(self.heads), "threshold": list(self.thresholds)}
        return xr.Dataset({"accepted": (("tokens", "heads", "threshold"), np.asarray(table), SHARE)}, coords=coords)

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Plant layers, label sequences with them, and fit every row with the true sum of projections."""
        rng, length, dim = generator(key), int(cell["tokens"]), int(cell["dim"])
        fitted = []
        for _ in range(self.layers):
            layer = planted_layer(rng, dim, int(cell["heads"]), scale=self.scale)
            x = sequences(rng, self.count, length, dim)
            fitted.append(fit_simplex(x, evaluate_layer(layer, x), layer.projection.sum(0))[1])
        misfit = np.sort(np.concatenate(fitted, axis=None))
        share = [np.searchsorted(misfit, limits) / misfit.size for limits in (self.thresholds, SMALL)]
        return xr.Dataset(
            {"accepted": ("threshold", share[0], SHARE), "accepted_small": ("small_threshold", share[1], SHARE)},
            coords={
                "threshold": ("threshold", list(self.thresholds), MISFIT),
                "small_threshold": ("small_threshold", list(SMALL), MISFIT),
            },
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare with the law in large dimension, with the exponent, and with the limit."""
        largest, pairs = max(self.dims), list(product(self.tokens, self.heads))

        def law(predicted: xr.Dataset, length: int, heads: int) -> np.ndarray:
            return predicted["accepted"].mean("prediction").sel(tokens=length, heads=heads).values

        def excess(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            measured = {pair: self._measured(trained, *pair, largest) for pair in pairs}  # (replicates, thresholds)
            return np.mean([np.log(measured[pair] / law(predicted, *pair)).mean(1) for pair in pairs], 0)

        def tolerance(predicted: xr.Dataset) -> float:
            slopes = {pair: self._slope(self.thresholds, law(predicted, *pair)[None])[0] for pair in pairs}
            return 2 * float(np.mean([dimension_correction(slopes[pair], pair[0], largest) for pair in pairs]))

        def error(predicted: xr.Dataset) -> float:
            drawn = np.log(predicted["accepted"].transpose("prediction", ...).values).mean((1, 2, 3))  # one a draw
            return float(drawn.std(ddof=1) / len(drawn) ** 0.5)

        def power(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            slopes = [self._slope(self.thresholds, self._measured(trained, *pair, largest)) for pair in pairs]
            exponents = [(length - 1) * (heads - 1) for length, heads in pairs]
            return np.mean([slope / exponent for slope, exponent in zip(slopes, exponents, strict=True)], 0)

        def small(trained: xr.Dataset) -> list[np.ndarray]:
            return [self._measured(trained, 2, 2, dim, "accepted_small") for dim in self.dims]

        def level(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            ratios = np.mean([shares[:, -2:] / SMALL[-2:] for shares in small(trained)], (0, 2))
            return ratios / predict_small_threshold(self.scale)

        return (
            Claim(
                f"At d = {largest} rows are certified as often as independent softmax vectors agree",
                excess,
                quantity="share of rows, measured over predicted (ln)",
                target=0.0,
                tolerance=tolerance,
                prediction_error=error,
                prediction_dof=(self.predictions or 0) - 1,
                basis="mean logarithm of measured over predicted, over all pairs and thresholds; twice the leading "
                "correction in 1/d",
            ),
            Claim(
                "In the range of use, the acceptance rate scales as the power (k-1)(m-1) of the threshold",
                power,
                quantity="exponent over (k-1)(m-1)",
                target=1.0,
                tolerance=0.1,
                expected="refuted",
                basis="slope over (k-1)(m-1), mean over pairs; at power four, a tenth changes the examples that an "
                "eight times smaller misfit needs by a factor of about two",
            ),
            Claim(
                "For two heads and two tokens the acceptance rate is linear in small thresholds",
                lambda predicted, trained: np.mean([self._slope(SMALL, shares) for shares in small(trained)], 0),
                quantity="exponent of the threshold",
                target=1.0,
                tolerance=0.12,
                basis="half of the distance from 1 to the power .77 that the law has in the range of use",
            ),
            Claim(
                "The slope of the acceptance at threshold zero is 2 sqrt 2 (1 + exp(beta^2/2)) / (beta sqrt(2 pi))",
                level,
                quantity="slope, measured over predicted",
                target=1.0,
                tolerance=2 * dimension_correction(1.0, 2, min(self.dims)),
                basis="the correction in 1/d at the smallest dimension, doubled for the approach to the limit",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show acceptance by threshold for every pair, and the slopes."""
        law = predicted["accepted"].mean("prediction")
        curves, rows = [], []
        for group, (length, heads) in enumerate(product(self.tokens, self.heads)):
            theory = law.sel(tokens=length, heads=heads).values
            title = f"{length} tokens, {heads} heads"
            measured = [self._measured(trained, length, heads, dim) for dim in self.dims]
            curves.append(spread_curve(self.thresholds, measured[-1], title, group=group))
            curves.append(Curve(tuple(self.thresholds), tuple(theory.tolist()), "", "predicted", group))
            slopes = [self._slope(self.thresholds, shares).mean() for shares in (theory[None], *measured)]
            rows.append((title, f"{(length - 1) * (heads - 1)}", *(f"{slope:.2f}" for slope in slopes)))
        return (
            Lines(
                f"Rows that are certified, d = {max(self.dims)}",
                "misfit",
                "share of rows",
                tuple(curves),
                log_x=True,
                log_y=True,
                note="Dashed: independent softmax vectors in large dimension, nothing fitted. Bands reach over "
                "replicates.",
                shows=("rows are certified as often",),
            ),
            Listing(
                "Power of the misfit",
                ("", "(k-1)(m-1)", "law", *(f"d = {dim}" for dim in self.dims)),
                tuple(rows),
                note="Fitted power of the misfit in the acceptance, and the predicted limiting power.",
            ),
        )

    def _measured(self, trained: xr.Dataset, length: int, heads: int, dim: int, name: str = "accepted") -> np.ndarray:
        """Return the shares of one cell, (replicates, thresholds); none counts as half a row."""
        shares = of_cell(trained, name, tokens=length, heads=heads, dim=dim)
        return np.maximum(shares, 0.5 / (self.layers * self.count * length))

    @staticmethod
    def _slope(thresholds: tuple[float, ...], shares: np.ndarray) -> np.ndarray:
        """Return the slope of log share over log threshold, (replicates,)."""
        return np.polyfit(np.log(thresholds), np.log(shares).T, 1)[0]
