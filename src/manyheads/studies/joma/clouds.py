"""`joma/clouds`: a neuron trained by SGD on an isotropic mixture, beside the flow of theorem 3 and its fluctuations."""

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.theory.joma.systems.gaussian_mixture import Mixture, find_nonlinearity, train_neuron
from manyheads.theory.joma.systems.recording import SGDOptions
from manyheads.theory.joma.theorems.gaussian_mixture import linear_noise_approximation
from manyheads.theory.papers import TIAN

MEANS = ((1.5, 0.5, 0.0, -0.5), (-1.0, 1.0, 0.5, 0.0), (0.0, -0.5, 1.0, 1.0))
PROBABILITIES = (0.5, 0.3, 0.2)
GRADIENTS = (1.0, -0.6, 0.4)
INIT = (0.3, 0.6, 0.2, 0.4)
OFFSET = 0.2
SNAPSHOTS = 16
TIME = "time, steps × learning rate"


class Clouds(st.Study):
    """Weights of neurons trained by SGD against the gradient flow, by number of samples."""

    name = "joma/clouds"
    claim = "SGD on an isotropic mixture follows theorem 3 up to noise of order n^(-1/2)"
    source = TIAN.at("theorem 3; the fluctuations are derived here")
    vectorized = True
    grid = {"samples": "samples"}

    samples: tuple[int, ...] = st.sweep(
        (4096, 16384, 65536),
        "samples of one training, each used once with batch size one: powers of two",
        least=64,
        small=(64, 256),
        full=(4096, 16384, 65536, 262144, 1048576),
    )
    horizon: float = st.setting(6.0, "time of the flow: learning rate times samples", above=0, small=2.0)
    std: float = st.setting(0.7, "standard deviation of the mixture components", above=0)
    weight_decay: float = st.setting(0.5, "of SGD", least=0)
    neurons: int = st.setting(64, "independent trainings in one replicate", least=2, small=2)
    activation: str = st.setting("relu", "a name of `manyheads.theory.joma.task.ACTIVATIONS`", small="identity")

    def check(self) -> None:
        if any(size & (size - 1) for size in self.samples):
            raise st.UsageError(f"samples={self.samples}: expected powers of two")
        find_nonlinearity(self.activation)

    def predict(self, key: st.Key) -> st.Record:
        times, path = np.linspace(0, self.horizon, SNAPSHOTS + 1), ("time", "coordinate")
        mixture, activation = self._mixture(), find_nonlinearity(self.activation)
        found = linear_noise_approximation(mixture, activation, np.asarray(INIT), times, self.weight_decay)
        variance = np.diagonal(found.covariance, axis1=1, axis2=2)
        return {
            "time": ("time", times, TIME),
            "path": (path, found.path, "weights of the flow"),
            "variance": (path, variance, "variance of SGD over the learning rate"),
            "bias": (path, found.bias, "bias of finite steps over the learning rate"),
        }

    def train(self, key: st.Key, samples: int) -> st.Record:
        training = SGDOptions(self.horizon / samples, samples, SNAPSHOTS)
        keys = jax.random.split(self.independent(key, samples=samples), self.neurons)
        mixture = jax.tree.map(jnp.asarray, self._mixture())
        activation, start = find_nonlinearity(self.activation), jnp.asarray(INIT, jnp.float64)
        paths = jax.vmap(lambda each: train_neuron(mixture, activation, start, training, self.weight_decay, each))(keys)
        return {
            "time": ("time", np.linspace(0, self.horizon, SNAPSHOTS + 1), TIME),
            "path": (("neuron", "time", "coordinate"), paths, "weights of trained neurons"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        law = theory.isel(time=slice(1, None))  # without the initialization
        away = (trained["path"] - theory["path"]).isel(time=slice(1, None))
        squares = (away**2).sum("coordinate").mean(("neuron", "time"))
        scatter = self.horizon / trained["samples"] * law["variance"].sum("coordinate").mean()
        what = "root mean square distance from the flow"
        yield st.Claim(
            "The rms distance of SGD from the gradient flow of theorem 3 scales as n^(-1/2) with n samples",
            st.exponent((squares**0.5).rename(None), "samples", "n", what, scatter**0.5),
            st.near(-0.5, 0.1),
            "linear noise; the next order is some hundredths of the distance of the shortest training",
        )
        text = "The mean square distance of SGD from the flow is that of the linear-noise approximation"
        basis = "linear noise at the longest training; three tenths for the chance of a few hundred neurons"
        quantity = "squared distance, measured over predicted"
        yield st.Claim(text, (squares / scatter).isel(samples=-1), st.near(1, 0.3), basis, quantity)
        learning_rate, count = self.horizon / self.samples[-1], trained.sizes["replicate"] * self.neurons
        mean = away.isel(samples=-1).mean(("neuron", "replicate")) - learning_rate * law["bias"]
        yield st.Claim(
            "The mean weights of the longest training are those of the gradient flow (largest z-score)",
            abs(mean / (learning_rate * law["variance"] / count) ** 0.5).max(),
            st.near(0, 6),
            f"{SNAPSHOTS * len(INIT)} scores: 5.3 is exceeded once in ten thousand runs; the rest is left to curvature",
            "largest z-score",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        def weights(data: xr.Dataset) -> dict[str, xr.DataArray]:
            return {f"weight {which + 1}": data["path"].isel(coordinate=which) for which in range(len(INIT))}

        title, both = f"Weights of neurons trained on {self.samples[0]:,} samples", (trained.isel(samples=0), theory)
        note = "Bands range over all neurons of all replicates; dashed, the flow of theorem 3."
        yield st.lines(title, "time", "weight", *map(weights, both), over=("replicate", "neuron"), note=note)

    def _mixture(self) -> Mixture:
        return Mixture(np.asarray(MEANS), np.asarray(PROBABILITIES), np.asarray(GRADIENTS), self.std, OFFSET)
