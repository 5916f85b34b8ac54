"""`meanfield/sparse-penalty`: SGD with an L1 penalty against McKean-Vlasov particles, for a sparse feature."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import manyheads.study as st
from manyheads.statistics.exponents import LARGEST_RELATIVE_ERROR
from manyheads.theory.meanfield.contrastive.particles import simulate_particles
from manyheads.theory.meanfield.contrastive.sgd import train_overlaps, train_weights
from manyheads.theory.meanfield.contrastive.task import ContrastiveTask
from manyheads.theory.papers import MENG

START = (0.15, 0.1, 0.5)  # Q_1, Q_2, q
STRENGTH = 0.15  # of the L1 penalty
BLOCK = 20  # coordinates in which feature 1 has two entries that are not zero
ORDER = ("Q1", "Q2", "q")
DISCRETIZATION = 2e-3  # of the particles: an eighth of the smallest error that SGD is found to have


class SparsePenalty(st.Study):
    """Distance of SGD with an L1 penalty from the particles by dimension, and its cosine beside that of weight decay.

    The squared distance of a run has a standard deviation of 1.2 times its mean, so it is averaged over `runs` at the
    largest dimension, and at n over as many more as a step is cheaper, in inverse proportion to n.
    """

    name = "meanfield/sparse-penalty"
    claim = "SGD with an L1 penalty follows McKean-Vlasov particles with error n^(-1/2)"
    source = MENG.at("abstract: limit of high dimension; the particles and the penalty are derived here")
    revision = 3
    grid = {"dimension": "dimensions"}

    dimensions: tuple[int, ...] = st.sweep(
        (200, 400, 800, 1600), "dimensions n", least=BLOCK, multiple=BLOCK, small=(20, 40)
    )
    particles: int = st.setting(20_000, "particles of the prediction", multiple=BLOCK, small=400)
    steps: int = st.setting(640, "time steps of the prediction", small=16)
    horizon: float = st.setting(30.0, "end time in samples per dimension", small=1.0)
    records: int = st.setting(32, "times that are compared", small=2)
    runs: int = st.setting(8, "independent runs of a replicate at the largest dimension", least=1, small=1)

    def predict(self, key: st.Key) -> st.Record:
        """Return overlaps and squared norm of the particles; their random numbers are fixed, their error is small."""
        features, weights = draw_coordinates(self.particles, 1, np.random.default_rng(0))
        system = ContrastiveTask(weight_decay=0.0), weights[0], features, self.horizon, jax.random.key(0), sign_penalty
        path = simulate_particles(*system, self.steps, self.records, tolerance=DISCRETIZATION)
        return {
            "trajectory": (("time", "order"), path.states[1:], "overlaps and squared norm"),
            "discrepancy": ((), path.discrepancy, "change with steps of twice the length"),
            "time": ("time", path.times[1:], "time", "samples per dimension"),
            "order": ("order", list(ORDER), "order parameter"),
            "dimension": ("dimension", list(self.dimensions), "dimension n"),
        }

    def train(self, key: st.Key, dimension: int) -> st.Record:
        rng = st.generator(key, dimension)
        times = np.linspace(0, self.horizon, self.records + 1)[1:]
        runs = self.runs * self.dimensions[-1] // dimension
        features, weights = draw_coordinates(dimension, runs, rng)
        path = train_weights(ContrastiveTask(weight_decay=0.0), weights, features, times, rng, sign_penalty)
        states = np.concatenate([path @ features.T / dimension, (path**2).mean(2, keepdims=True)], 2)
        decayed = train_overlaps(ContrastiveTask(), np.tile(START, (runs, 1)), dimension, [self.horizon], rng)
        cosines = [(ends[:, 0] / ends[:, 2] ** 0.5).mean() for ends in (states[-1], decayed[-1])]
        return {
            "mean": (("time", "order"), states.mean(1), "overlaps and squared norm, mean over runs"),
            "variance": (("time", "order"), states.var(1), "their variance over runs"),
            "trajectory": (("time", "order"), states[:, 0], "overlaps and squared norm of the first run"),
            "cosine": ("penalty", cosines, "cosine of weights and the sparse feature at the end, mean over runs"),
            "time": ("time", times, "time", "samples per dimension"),
            "order": ("order", list(ORDER), "order parameter"),
            "penalty": ("penalty", ["L1", "L2"], "penalty"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        squares = ((trained["mean"] - theory["trajectory"]) ** 2 + trained["variance"]).mean(("time", "order"))
        means, count = squares.mean("replicate"), squares.sizes["replicate"]
        errors = squares.std("replicate") / max(count - 1, 1) ** 0.5
        resolved = count > 1 and bool((errors <= LARGEST_RELATIVE_ERROR * means).all())
        exponent = st.exponent_of_mean if resolved else st.exponent
        yield st.Claim(
            "The mean squared distance between SGD with an L1 penalty and McKean-Vlasov particles scales as 1/n "
            f"from n = {self.dimensions[0]} on",
            exponent(squares, "dimension", "n", "mean squared distance over Q1, Q2, q"),
            st.near(-1, 0.3),
            "fluctuations of a mean over n coordinates. At n = 100 rare runs add 0.4 to n times the squared "
            "distance (relative), from 200 on at most 0.1: 0.06 in the exponent; the rest is three standard errors "
            "of means over 12 replicates, whose runs scatter by 1.2 means",
        )
        cosine = trained["cosine"].isel(dimension=-1)
        yield st.Claim(
            f"For a sparse feature an L1 penalty of {STRENGTH} gives a larger cosine than weight decay of "
            f"{ContrastiveTask().weight_decay} at n = {self.dimensions[-1]} (gain)",
            cosine.sel(penalty="L1") - cosine.sel(penalty="L2"),
            st.above(0),
            "an inequality: the gain is positive",
            "gain of the cosine",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        title = f"L1 penalty: particles and one run of SGD, n = {self.dimensions[-1]}"
        run, law = trained["trajectory"].isel(dimension=-1, replicate=0), theory["trajectory"]
        yield st.lines(title, "time", "overlaps Q1, Q2 and squared norm q", {"SGD": run}, {"particles": law})


def sign_penalty(weights: Array) -> Array:
    """Return phi of an L1 penalty, a subgradient at zero."""
    return STRENGTH * jnp.sign(weights)


def draw_coordinates(size: int, runs: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return features (2, size), a tenth of the first one not zero, and weights (runs, size) with the state START."""
    sparse = np.zeros(BLOCK)
    sparse[[0, BLOCK // 2]] = np.sqrt(BLOCK / 2)
    dense = np.repeat([1.0, -1.0], BLOCK // 2)
    features = np.stack([np.tile(sparse, size // BLOCK), np.tile(dense, size // BLOCK)])
    rest = rng.standard_normal((runs, size))
    rest -= rest @ features.T / size @ features
    rest *= np.sqrt((START[2] - START[0] ** 2 - START[1] ** 2) / (rest**2).mean(1, keepdims=True))
    return features, np.array(START[:2]) @ features + rest
