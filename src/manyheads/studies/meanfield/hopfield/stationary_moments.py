"""`meanfield/stationary-moments`: time averages of finite networks with 1-bit tokens against those of the mean field.

A chaotic orbit of a finite network leaves the mean-field orbit after a time of order log N, so single tokens cannot be
compared. The averages <m_c> and <m_c^2> over a long orbit can: they differ by the error of a time average, and by a
bias of order 1/N once N is well above gamma^2 / M. On orbits that do not expand nearby ones the first part vanishes as
N^(-1/2). At eps = 0 the map is odd, so attractors come in mirrored pairs and averages over both are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study
from manyheads.study.claims import Measure
from manyheads.study.panels import Listing, Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.theory.meanfield.hopfield.mean_field import mean_field_trajectory
from manyheads.theory.meanfield.hopfield.network import OneBitNetwork
from manyheads.theory.meanfield.hopfield.simulation import simulate_network
from manyheads.theory.papers import POC_LOPEZ

EARLY = 100  # tokens of the comparison token by token
CHUNK = 16  # orbits of the mean field in memory at a time


@dataclass(frozen=True)
class StationaryMoments(Study):
    """Time averages of overlaps and of their squares in finite networks, by number of neurons.

    Attributes
    ----------
    regular, chaotic
        Output inverse temperatures of orbits that are locked or quasi-periodic, and of chaotic ones.
    neurons
        N, increasing; multiples of the number of types.
    transient, steps
        Tokens before the averages, and averaged tokens.
    runs, orbits
        Finite networks of each size, and orbits of the mean field, the latter from random first tokens.
    positional_weight
        eps, positive.
    """

    name: ClassVar[str] = "meanfield/stationary-moments"
    claim: ClassVar[str] = "In chaos time averages converge to the mean field as N grows, tokens do not"
    source: ClassVar[Source] = replace(POC_LOPEZ, locus="mean-field limit; errors of time averages are derived here")

    regular: tuple[float, ...] = (1.0, 1.255)
    chaotic: tuple[float, ...] = (1.28, 1.4, 2.0)
    neurons: tuple[int, ...] = (300, 3000, 30_000, 300_000, 3_000_000, 30_000_000)
    transient: int = 2000
    steps: int = 38_000
    runs: int = 4
    orbits: int = 48
    positional_weight: float = 0.02

    def __post_init__(self) -> None:
        if not 0 < self.positional_weight <= 1:
            raise UsageError(
                f"positional_weight={self.positional_weight:g}: at eps = 0 the map is odd, and averages over mirrored "
                "attractors are zero without meaning; expected a number above 0 and up to 1"
            )
        check_rising("neurons", self.neurons)
        if min(self.steps, self.orbits) < 2 or self.runs < 1 or self.transient < 0:
            raise UsageError("expected steps and orbits of 2 or more, runs of 1 or more, and no negative transient")

    @classmethod
    def small(cls) -> StationaryMoments:
        """Return the smallest configuration in which every claim can change."""
        return cls((1.0,), (1.4,), (30, 300), transient=4, steps=40, runs=2, orbits=2)

    @property
    def betas(self) -> tuple[float, ...]:
        """All output inverse temperatures."""
        return self.regular + self.chaotic

    def network(self) -> OneBitNetwork:
        """Return the published network with this weight of the positional bits."""
        return replace(OneBitNetwork.published(), positional_weight=self.positional_weight)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the moments of the mean field, the error of a time average, and the first tokens of its orbit."""
        network, rng, moments, early = self.network(), np.random.default_rng(0), [], []
        for begin in range(0, self.orbits, CHUNK):
            first = rng.uniform(-1, 1, (len(self.betas), CHUNK, network.types))
            if not begin:
                first[:, 0] = network.output[0]
            betas = np.repeat(np.array(self.betas)[:, None], CHUNK, 1)
            orbits = mean_field_trajectory(network, betas, self.transient + self.steps, initial=first)
            moments.append(_moments(orbits[:, :, self.transient :]))
            early.append(orbits[:, 0, :EARLY])
        found = np.concatenate(moments, 1)[:, : self.orbits]  # (beta, orbit, moment)
        return dataset(
            {
                "moments": (("beta", "moment"), found.mean(1), "time averages of overlaps and of their squares"),
                "averaging": ("beta", found.var(1, ddof=1).mean(1) ** 0.5, "rms error of a time average"),
                "early": (("beta", "token", "feature"), early[0], "overlaps of the first tokens"),
            },
            {"beta": (list(self.betas), "output inverse temperature"), "moment": _names(network.features)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Run finite networks and measure their time averages."""
        network, rng = self.network(), np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
        sizes = np.repeat(np.asarray(self.neurons)[:, None], self.runs, 1)
        moments, early = [], []
        for beta in self.betas:
            orbits = simulate_network(network, beta, self.transient + self.steps, sizes, rng)
            moments.append(_moments(orbits[:, :, self.transient :]))
            early.append(orbits[:, :, :EARLY])
        dims = ("beta", "neurons", "run")
        return dataset(
            {
                "moments": ((*dims, "moment"), moments, "time averages of overlaps and of their squares"),
                "early": ((*dims, "token", "feature"), early, "overlaps of the first tokens"),
            },
            {
                "beta": (list(self.betas), "output inverse temperature"),
                "neurons": (list(self.neurons), "neurons N"),
                "moment": _names(network.features),
            },
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test how deviations of time averages and of single tokens depend on N."""
        return (
            *(self._power(beta) for beta in self.regular),
            *(self._level(beta) for beta in self.chaotic),
            *(self._single(beta) for beta in self.chaotic),
        )

    def _exponent(self, name: str, beta: float) -> Measure:
        """Return the measure that fits the exponent of the deviations of a variable at one temperature."""
        return lambda predicted, trained: fit_exponent(
            np.asarray(self.neurons), deviations(predicted, trained, name, beta)
        )

    def _power(self, beta: float) -> Claim:
        return Claim(
            f"At beta = {beta:g}, not chaotic, time averages deviate from the mean field by N to a power of -1 to -1/2",
            self._exponent("moments", beta),
            quantity="exponent of N",
            target=-0.75,
            tolerance=0.35,
            basis="bias by noise has exponent -1, the noise of an average -1/2; a tenth is allowed on either side",
        )

    def _level(self, beta: float) -> Claim:
        def ratio(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            error = float(predicted["averaging"].sel(beta=beta))
            return deviations(predicted, trained, "moments", beta)[:, -1] / error

        return Claim(
            f"At beta = {beta:g}, chaotic, time averages at the largest N deviate by the error of an average (ratio)",
            ratio,
            quantity="deviation over the error of an average",
            target=1.0,
            tolerance=1.0,
            basis=f"rms over {self.orbits} orbits of the mean field, averaged as long; the error of an average is "
            "the tolerance as well",
        )

    def _single(self, beta: float) -> Claim:
        return Claim(
            f"At beta = {beta:g}, chaotic, the first {EARLY} tokens deviate from the mean field by N^(-1/2)",
            self._exponent("early", beta),
            quantity="exponent of N",
            target=-0.5,
            tolerance=0.05,
            basis="the exponent of noise that does not grow; a tenth of it is allowed",
            expected="refuted",
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the deviations of time averages and of single tokens, and the moments at the largest size."""
        return (self._averages(predicted, trained), self._tokens(predicted, trained), self._table(predicted, trained))

    def _averages(self, predicted: xr.Dataset, trained: xr.Dataset) -> Lines:
        ends, curves = (float(self.neurons[0]), float(self.neurons[-1])), []
        for group, beta in enumerate(self.betas):
            curves.append(
                spread_curve(
                    self.neurons, deviations(predicted, trained, "moments", beta), f"β = {beta:g}", group=group
                )
            )
            if beta in self.chaotic:
                error = float(predicted["averaging"].sel(beta=beta))
                label = "error of a time average" if beta == self.chaotic[0] else ""
                curves.append(Curve(ends, (error, error), label, "predicted", group))
        largest = max(deviations(predicted, trained, "moments", beta)[:, -1].mean() for beta in self.betas)
        return Lines(
            f"Deviation of time averages from the mean field: at most {largest:.2g} at N = {self.neurons[-1]:,}",
            "neurons N",
            "rms deviation of <m>, <m²>",
            tuple(curves),
            log_x=True,
            log_y=True,
            note=f"Averages over {self.steps:,} tokens of {self.runs} runs a replicate; bands: replicates. Dashed: "
            "orbits of the mean field itself, averaged as long.",
        )

    def _tokens(self, predicted: xr.Dataset, trained: xr.Dataset) -> Lines:
        slopes = [fit_exponent(self.neurons, deviations(predicted, trained, "early", beta)) for beta in self.chaotic]
        ends = sorted(slope.exponent for slope in slopes)
        return Lines(
            f"Deviation of the first {EARLY} tokens: N^({ends[0]:.2f}) to N^({ends[-1]:.2f}) in chaos",
            "neurons N",
            "rms deviation of overlaps",
            tuple(
                spread_curve(self.neurons, deviations(predicted, trained, "early", beta), f"β = {beta:g}", group=group)
                for group, beta in enumerate(self.betas)
            ),
            log_x=True,
            log_y=True,
            note="Token by token, from the same first token.",
        )

    def _table(self, predicted: xr.Dataset, trained: xr.Dataset) -> Listing:
        found = trained["moments"].isel(cell=0, neurons=-1).mean(("replicate", "run"))
        names = predicted["moment"].values.tolist()
        rows = tuple(
            (f"{beta:g}", system, *(f"{value:.3g}" for value in data["moments"].sel(beta=beta).values))
            for beta in self.betas
            for system, data in (
                ("mean field", predicted),
                (f"N = {self.neurons[-1]:,}", found.to_dataset(name="moments")),
            )
        )
        return Listing(
            "Stationary moments", ("β", "system", *names), rows, f"Mean over all runs and {self.orbits} orbits."
        )


def deviations(predicted: xr.Dataset, trained: xr.Dataset, name: str, beta: float) -> np.ndarray:
    """Return the rms deviation from the mean field over runs and all else, (replicates, sizes)."""
    squares = (trained[name].isel(cell=0).sel(beta=beta) - predicted[name].sel(beta=beta)) ** 2
    others = [dim for dim in squares.dims if dim not in ("replicate", "neurons")]
    return squares.mean(others).transpose("replicate", "neurons").values ** 0.5


def _moments(overlaps: np.ndarray) -> np.ndarray:
    """Return the averages of overlaps and of their squares over tokens: (..., tokens, M) to (..., 2 M)."""
    return np.concatenate([overlaps.mean(-2), (overlaps**2).mean(-2)], axis=-1)


def _names(features: int) -> list[str]:
    return [f"<m{at + 1}{power}>" for power in ("", "²") for at in range(features)]
