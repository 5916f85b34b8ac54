"""`joma/clouds`: a neuron trained by SGD on samples of isotropic clouds, beside the flow of theorem 3.

Not only where the neuron goes is predicted, but also how far single samples throw it off the way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.joma.source import SOURCE
from manyheads.joma.systems.activations import find_nonlinearity
from manyheads.joma.systems.gaussian_mixture import Mixture, Training, train_neuron
from manyheads.joma.theory.gaussian_mixture import predict_fluctuations
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Lines, Panel, Source, Study, Verdict, grid, spread_curve

CENTRES = ((1.5, 0.5, 0.0, -0.5), (-1.0, 1.0, 0.5, 0.0), (0.0, -0.5, 1.0, 1.0))
SHARES = (0.5, 0.3, 0.2)
GRADIENTS = (1.0, -0.6, 0.4)
START = (0.3, 0.6, 0.2, 0.4)
OFFSET = 0.2
SNAPSHOTS = 16


@dataclass(frozen=True)
class Clouds(Study):
    """Path of a really trained neuron against the gradient flow, by the number of samples it is trained on.

    Attributes
    ----------
    samples
        Samples of one training, each seen once and alone: powers of two from 64, in rising order.
    horizon
        Time of the flow; the learning rate is the horizon over the number of samples.
    spread
        Standard deviation of the clouds.
    decay
        Weight decay.
    neurons
        Independent trainings in one replicate.
    activation
        A name of `manyheads.joma.task.ACTIVATIONS`.
    """

    name: ClassVar[str] = "joma/clouds"
    claim: ClassVar[str] = "SGD on isotropic clouds follows theorem 3's flow, and strays from it as 1/sqrt(samples)"
    source: ClassVar[Source] = replace(SOURCE, locus="theorem 3; the fluctuations are derived here")
    vectorised: ClassVar[bool] = True

    samples: tuple[int, ...] = (4096, 16384, 65536)
    horizon: float = 6.0
    spread: float = 0.7
    decay: float = 0.5
    neurons: int = 64
    activation: str = "relu"

    def __post_init__(self) -> None:
        powers = all(size >= 64 and size & (size - 1) == 0 for size in self.samples)
        if len(self.samples) < 2 or not powers or list(self.samples) != sorted(set(self.samples)):
            raise UsageError(f"samples={self.samples}: expected two powers of two or more, from 64, in rising order")
        if not (self.horizon > 0 and self.spread > 0 and self.decay >= 0) or self.neurons < 2:
            raise UsageError(f"{self}: horizon and spread must be positive, decay zero or more, neurons two or more")
        find_nonlinearity(self.activation)

    @classmethod
    def full(cls) -> Clouds:
        """Return the study up to a million samples."""
        return cls(samples=(4096, 16384, 65536, 262144, 1048576))

    def cells(self) -> tuple[Cell, ...]:
        """Return the numbers of samples."""
        return grid(samples=self.samples)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the flow, the variance of SGD about it over the rate, and the bias of its steps over the rate."""
        times = np.linspace(0, self.horizon, SNAPSHOTS + 1)
        mixture, activation = self._mixture(), find_nonlinearity(self.activation)
        found = predict_fluctuations(mixture, activation, np.asarray(START), times, self.decay)
        variance = np.diagonal(found.covariance, axis1=1, axis2=2)
        names = {"time": ("time", times, {"long_name": "time, steps × rate"})}
        path, one = ("time", "coordinate"), {"units": "1"}
        return xr.Dataset(
            {
                "path": (path, found.path, {"long_name": "weights of the flow", **one}),
                "variance": (path, variance, {"long_name": "variance of SGD over the rate", **one}),
                "bias": (path, found.bias, {"long_name": "bias of finite steps over the rate", **one}),
            },
            coords=names,
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train independent neurons on fresh samples, one at a time."""
        size = int(cell["samples"])
        training = Training(self.horizon / size, size, decay=self.decay, snapshots=SNAPSHOTS)
        keys = jax.random.split(jax.random.fold_in(key, self.samples.index(size)), self.neurons)
        mixture = jax.tree.map(jnp.asarray, self._mixture())
        activation, start = find_nonlinearity(self.activation), jnp.asarray(START, jnp.float64)
        paths = jax.vmap(lambda each: train_neuron(mixture, activation, start, training, each))(keys)
        attributes = {"long_name": "weights of trained neurons", "units": "1"}
        times = np.linspace(0, self.horizon, SNAPSHOTS + 1)
        return xr.Dataset(
            {"path": (("neuron", "time", "coordinate"), paths, attributes)},
            coords={"time": ("time", times, {"long_name": "time, steps × rate"})},
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare the distance from the flow with its rate and its size, and the mean path with the flow."""
        away = (trained["path"] - predicted["path"]).isel(time=slice(1, None))
        squares = (away**2).sum("coordinate").mean(("neuron", "time")).transpose("replicate", "cell").values
        fit = fit_exponent(np.asarray(self.samples), squares**0.5)
        rate = self.horizon / self.samples[-1]
        variance = predicted["variance"].isel(time=slice(1, None))
        count = trained.sizes["replicate"] * self.neurons
        mean = away.isel(cell=-1).mean(("neuron", "replicate")) - rate * predicted["bias"].isel(time=slice(1, None))
        scores = np.abs(mean / (rate * variance / count) ** 0.5)
        return (
            Verdict.from_interval(
                "the distance from the flow falls as the square root of the number of samples",
                fit.interval,
                figure=fit.exponent,
                target=-0.5,
                tolerance=0.1,
                basis="linear noise; terms of the next order are some hundredths of the shortest training's distance",
            ),
            Verdict.from_samples(
                "its mean square is what the covariance of one sample's gradient says",
                squares[:, -1] / float(rate * variance.sum("coordinate").mean()),
                target=1.0,
                tolerance=0.3,
                basis="linear noise at the longest training; three tenths for the chance of a few hundred neurons",
            ),
            Verdict.exact(
                "the mean path of the longest training is the flow, in standard errors",
                float(scores.max()),
                target=0.0,
                tolerance=6.0,
                basis=f"{scores.size} scores: 5.3 is passed once in ten thousand runs; the rest is left to curvature",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the paths, and the distance by the number of samples."""
        times = predicted["time"].values
        curves = []
        for which in range(len(START)):
            found = trained["path"].isel(cell=0, coordinate=which).transpose("replicate", "neuron", "time").values
            flow = predicted["path"].isel(coordinate=which).values
            curves.append(spread_curve(times, found.reshape(-1, len(times)), f"weight {which + 1}", group=which))
            curves.append(spread_curve(times, flow[None], f"weight {which + 1}, theory", "predicted", which))
        away = (trained["path"] - predicted["path"]).isel(time=slice(1, None))
        distance = (away**2).sum("coordinate").mean(("neuron", "time")).transpose("replicate", "cell").values ** 0.5
        sizes = np.asarray(self.samples, float)
        law = (
            self.horizon / sizes * float(predicted["variance"].isel(time=slice(1, None)).sum("coordinate").mean())
        ) ** 0.5
        return (
            Lines(
                f"Weights of neurons trained on {self.samples[0]:,} samples",
                "time [steps × rate]",
                "weight",
                tuple(curves),
                note="Bands reach over all neurons of all replicates; dashed, the flow of theorem 3.",
            ),
            Lines(
                "Distance from the flow",
                "samples",
                "root mean square distance",
                (spread_curve(sizes, distance, "trained"), spread_curve(sizes, law[None], "theory", "predicted")),
                log_x=True,
                log_y=True,
                note="Over neurons and times. Dashed: from the covariance of one sample's gradient, nothing is fitted.",
            ),
        )

    def _mixture(self) -> Mixture:
        return Mixture(np.asarray(CENTRES), np.asarray(SHARES), np.asarray(GRADIENTS), self.spread, OFFSET)
