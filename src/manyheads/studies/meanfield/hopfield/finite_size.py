"""`meanfield/hopfield-finite-size`: overlaps of finite networks with 1-bit tokens against the mean-field map.

Where the map contracts, overlaps deviate from it by N^(-1/2), with a constant that linear response gives. Attention
multiplies noise by gamma / sqrt(M), so the law needs N well above gamma^2 / M; below that the deviation falls slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, unstack
from manyheads.theory.meanfield.hopfield.fluctuations import overlap_fluctuations
from manyheads.theory.meanfield.hopfield.mean_field import mean_field_trajectory
from manyheads.theory.meanfield.hopfield.network import OneBitNetwork
from manyheads.theory.meanfield.hopfield.simulation import simulate_network
from manyheads.theory.papers import POC_LOPEZ

SLOPE = 0.05  # tolerance of a fitted exponent
LEVEL = 0.05  # tolerance of the mean squared error, relative to linear response


@dataclass(frozen=True)
class FiniteSize(Study):
    """Deviation of the overlaps of finite networks from the mean-field map, by number of neurons.

    Attributes
    ----------
    weak, strong
        Output inverse temperatures beta: one far below the first bifurcation, one near it.
    neurons
        N, increasing; multiples of the number of types.
    asymptotic
        Size from which N^(-1/2) is expected at the larger beta.
    steps, runs
        Tokens compared, and runs behind each figure.
    """

    name: ClassVar[str] = "meanfield/hopfield-finite-size"
    claim: ClassVar[str] = "Overlaps of N neurons deviate from the mean-field map by N^(-1/2)"
    source: ClassVar[Source] = replace(POC_LOPEZ, locus="mean-field limit; the error and its constant are derived here")

    weak: float = 0.5
    strong: float = 1.0
    neurons: tuple[int, ...] = (300, 3000, 30_000, 300_000, 3_000_000, 30_000_000, 300_000_000)
    asymptotic: int = 30_000
    steps: int = 100
    runs: int = 1024

    def __post_init__(self) -> None:
        sizes = np.asarray(self.neurons)
        if min((sizes >= self.asymptotic).sum(), (sizes <= self.asymptotic).sum()) < 2 or (np.diff(sizes) <= 0).any():
            raise UsageError(
                f"neurons={self.neurons}: expected increasing sizes, two or more on each side of {self.asymptotic}"
            )

    @classmethod
    def small(cls) -> FiniteSize:
        """Return the smallest configuration in which every claim can change."""
        return cls(neurons=(30, 300, 3000), asymptotic=300, steps=8, runs=4)

    def cells(self) -> tuple[Cell, ...]:
        """Return every size at both temperatures."""
        return grid(beta=(self.weak, self.strong), neurons=self.neurons)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return sqrt(N) times the root mean square deviation, by linear response."""
        network, betas = OneBitNetwork.published(), (self.weak, self.strong)
        found = [(overlap_fluctuations(network, beta, self.steps) ** 2).mean() ** 0.5 for beta in betas]
        return dataset(
            {"constant": ("beta", found, "sqrt(N) times the rms deviation of overlaps, linear response")},
            {"beta": (list(betas), "output inverse temperature")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Run finite networks and measure their rms deviation over runs, tokens and features."""
        network, beta, size = OneBitNetwork.published(), float(cell["beta"]), int(cell["neurons"])
        rng = np.random.default_rng([*np.asarray(jax.random.key_data(key)).ravel(), size])
        exact = mean_field_trajectory(network, beta, self.steps)
        found = simulate_network(network, beta, self.steps, np.full(self.runs, size), rng)
        return dataset({"error": ((), ((found - exact) ** 2).mean() ** 0.5, "rms deviation of overlaps")})

    def claims(self) -> tuple[Claim, ...]:
        """Test the exponent on both sides of gamma^2 / M, and the constant at the largest size."""
        sizes, network = np.asarray(self.neurons), OneBitNetwork.published()
        scale = network.gain**2 / network.features

        def slope(beta: float, kept: np.ndarray) -> Measure:
            return lambda predicted, trained: fit_exponent(sizes[kept], errors(trained, beta)[:, kept])

        def level(beta: float) -> Measure:
            def measure(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                constant = float(predicted["constant"].sel(beta=beta))
                return errors(trained, beta)[:, -1] ** 2 * sizes[-1] / constant**2

            return measure

        law = "noise of independent bits has exponent -1/2; a tenth of it is allowed"
        response = "corrections of relative order gamma^2/(M N), below 0.1%, and 5% allowed"
        return (
            Claim(
                f"At beta = {self.weak:g} overlaps deviate from the mean-field map by N^(-1/2)",
                slope(self.weak, sizes > 0),
                quantity="exponent of N",
                target=-0.5,
                tolerance=SLOPE,
                basis=law,
            ),
            Claim(
                f"At beta = {self.strong:g} overlaps deviate by N^(-1/2) from N = {self.asymptotic:,} on",
                slope(self.strong, sizes >= self.asymptotic),
                quantity="exponent of N",
                target=-0.5,
                tolerance=SLOPE,
                basis=law,
            ),
            Claim(
                f"At beta = {self.strong:g} overlaps deviate by N^(-1/2) already below N = {self.asymptotic:,}",
                slope(self.strong, sizes <= self.asymptotic),
                quantity="exponent of N",
                target=-0.5,
                tolerance=SLOPE,
                basis=f"{law}; attention multiplies noise, and gamma^2/M = {scale:,.0f} neurons are needed",
                expected="refuted",
            ),
            *(
                Claim(
                    f"At beta = {beta:g} and the largest N the squared deviation is that of linear response (ratio)",
                    level(beta),
                    quantity="squared deviation, measured over predicted",
                    target=1.0,
                    tolerance=LEVEL,
                    basis=response,
                )
                for beta in (self.weak, self.strong)
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the deviation against the number of neurons, beside linear response."""
        curves = []
        for group, beta in enumerate((self.weak, self.strong)):
            found = errors(trained, beta)
            line = float(predicted["constant"].sel(beta=beta)) / np.sqrt(self.neurons)
            curves += [
                spread_curve(self.neurons, found, f"β = {beta:g}", group=group),
                Curve(
                    tuple(map(float, self.neurons)),
                    tuple(line.tolist()),
                    "" if group else "linear response",
                    "predicted",
                    group,
                ),
            ]
        network = OneBitNetwork.published()
        scale, ends = network.gain**2 / network.features, [curve.y for curve in curves]
        level = (min(map(min, ends)), max(map(max, ends)))
        slope = fit_exponent(np.asarray(self.neurons), errors(trained, self.weak)).exponent
        curves.append(Curve((scale, scale), level, "N = γ²/M", "reference"))
        return (
            Lines(
                f"Deviation from the mean-field map: N^({slope:.2f}) at β = {self.weak:g}",
                "neurons N",
                "rms deviation of overlaps",
                tuple(curves),
                log_x=True,
                log_y=True,
                note=f"{self.runs} runs of {self.steps} tokens a replicate. Linear response needs N well above "
                f"γ²/M = {scale:,.0f}. Bands: replicates.",
            ),
        )


def errors(trained: xr.Dataset, beta: float) -> np.ndarray:
    """Return the deviations at one temperature, (replicates, sizes)."""
    return unstack(trained, "error").sel(beta=beta).transpose("replicate", "neurons").values
