"""`meanfield/sparse-penalty`: SGD with an L1 penalty against McKean-Vlasov particles, for a sparse feature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array

from manyheads.errors import UsageError, check_integers
from manyheads.statistics import fit_exponent, fit_exponent_to_means
from manyheads.statistics.exponents import LARGEST_RELATIVE_ERROR, ExponentFit
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.theory.meanfield.contrastive.particles import simulate_particles
from manyheads.theory.meanfield.contrastive.sgd import train_overlaps, train_weights
from manyheads.theory.meanfield.contrastive.task import ContrastiveTask
from manyheads.theory.papers import MENG

START = (0.15, 0.1, 0.5)  # Q_1, Q_2, q
STRENGTH = 0.15  # of the L1 penalty
BLOCK = 20  # coordinates in which feature 1 has two entries that are not zero
ORDER = ("Q1", "Q2", "q")


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


DISCRETIZATION = 2e-3  # of the particles: an eighth of the smallest error that SGD is found to have


@dataclass(frozen=True)
class SparsePenalty(Study):
    """Distance of SGD with an L1 penalty from the particles by dimension, and its cosine beside that of weight decay.

    Attributes
    ----------
    dimensions
        n, increasing multiples of 20.
    particles, steps
        Number of particles, and of time steps, of the prediction.
    horizon, records
        End time in samples per dimension, and number of times that are compared.
    runs
        Independent runs of a replicate at the largest dimension, over which the squared distance is averaged: its
        standard deviation is 1.2 times its mean. At n there are as many more as a step is cheaper, in inverse
        proportion to n.
    """

    name: ClassVar[str] = "meanfield/sparse-penalty"
    claim: ClassVar[str] = "SGD with an L1 penalty follows McKean-Vlasov particles with error n^(-1/2)"
    source: ClassVar[Source] = replace(
        MENG, locus="abstract: limit of high dimension; the particles and the penalty are derived here"
    )
    revision: ClassVar[int] = 3

    dimensions: tuple[int, ...] = (200, 400, 800, 1600)
    particles: int = 20_000
    steps: int = 640
    horizon: float = 30.0
    records: int = 32
    runs: int = 8

    def __post_init__(self) -> None:
        check_integers(self, "runs")
        sizes = (*self.dimensions, self.particles)
        if len(self.dimensions) < 2 or any(size % BLOCK for size in sizes):
            raise UsageError(f"dimensions={self.dimensions}, particles={self.particles}: expected multiples of {BLOCK}")

    @classmethod
    def small(cls) -> SparsePenalty:
        """Return the smallest configuration in which every claim can change."""
        return cls(dimensions=(20, 40), particles=400, steps=16, horizon=1.0, records=2, runs=1)

    def cells(self) -> tuple[Cell, ...]:
        """Return every dimension."""
        return grid(dimension=self.dimensions)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return overlaps and squared norm of the particles; their random numbers are fixed, their error is small."""
        features, weights = draw_coordinates(self.particles, 1, np.random.default_rng(0))
        path = simulate_particles(
            ContrastiveTask(weight_decay=0.0),
            weights[0],
            features,
            self.horizon,
            jax.random.key(0),
            sign_penalty,
            self.steps,
            self.records,
            tolerance=DISCRETIZATION,
        )
        return dataset(
            {
                "trajectory": (("time", "order"), path.states[1:], "overlaps and squared norm"),
                "discrepancy": ((), path.discrepancy, "change with steps of twice the length"),
            },
            {"time": (path.times[1:], "time", "samples per dimension"), "order": list(ORDER)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train several times with the L1 penalty, and with weight decay, from weights of the same overlaps."""
        size = int(cell["dimension"])
        rng = np.random.default_rng([*np.asarray(jax.random.key_data(key)).ravel().tolist(), size])
        times = np.linspace(0, self.horizon, self.records + 1)[1:]
        runs = self.runs * self.dimensions[-1] // size
        features, weights = draw_coordinates(size, runs, rng)
        path = train_weights(ContrastiveTask(weight_decay=0.0), weights, features, times, rng, sign_penalty)
        states = np.concatenate([path @ features.T / size, (path**2).mean(2, keepdims=True)], 2)
        decayed = train_overlaps(ContrastiveTask(), np.tile(START, (runs, 1)), size, [self.horizon], rng)
        cosines = [(ends[:, 0] / ends[:, 2] ** 0.5).mean() for ends in (states[-1], decayed[-1])]
        return dataset(
            {
                "mean": (("time", "order"), states.mean(1), "overlaps and squared norm, mean over runs"),
                "variance": (("time", "order"), states.var(1), "their variance over runs"),
                "trajectory": (("time", "order"), states[:, 0], "overlaps and squared norm of the first run"),
                "cosine": ("penalty", cosines, "cosine of weights and the sparse feature at the end, mean over runs"),
            },
            {"time": (times, "time", "samples per dimension"), "order": list(ORDER), "penalty": ["L1", "L2"]},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare the distance's exponent with the theory, and the two penalties with each other."""

        def gain(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            cosines = trained["cosine"].isel(cell=-1).transpose("replicate", "penalty").values
            return cosines[:, 0] - cosines[:, 1]

        return (
            Claim(
                "The mean squared distance between SGD with an L1 penalty and McKean-Vlasov particles scales as 1/n "
                f"from n = {self.dimensions[0]} on",
                self._exponent,
                quantity="exponent of n",
                target=-1.0,
                tolerance=0.3,
                basis="fluctuations of a mean over n coordinates. At n = 100 rare runs add 0.4 to n times the squared "
                "distance (relative), from 200 on at most 0.1: 0.06 in the exponent; the rest is three standard errors "
                "of means over 12 replicates, whose runs scatter by 1.2 means",
            ),
            Claim(
                f"For a sparse feature an L1 penalty of {STRENGTH} gives a larger cosine than weight decay of "
                f"{ContrastiveTask().weight_decay} at n = {self.dimensions[-1]} (gain)",
                gain,
                quantity="gain of the cosine",
                target=0.0,
                tolerance=(0.0, float("inf")),
                basis="an inequality: the gain is positive",
            ),
        )

    def _exponent(self, predicted: xr.Dataset, trained: xr.Dataset) -> ExponentFit:
        """Fit the power of n to the means over replicates; to each replicate where they do not resolve the means."""
        squares = squared_distances(predicted, trained)
        means, errors = squares.mean(0), squares.std(0) / max(len(squares) - 1, 1) ** 0.5
        if len(squares) < 2 or (errors > LARGEST_RELATIVE_ERROR * means).any():
            return fit_exponent(self.dimensions, squares)
        return fit_exponent_to_means(self.dimensions, means, errors, dof=len(squares) - 1)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show particles and one run of SGD, and the distance by dimension."""
        times, sizes = tuple(predicted["time"].values.tolist()), np.asarray(self.dimensions, float)
        curves = []
        for group, name in enumerate(ORDER):
            pair = (
                (predicted, f"{name}, particles", "predicted"),
                (trained.isel(cell=-1, replicate=0), f"{name}, SGD", "trained"),
            )
            for data, label, role in pair:
                line = tuple(data["trajectory"].sel(order=name).values.tolist())
                curves.append(Curve(times, line, label, role, group))  # type: ignore[arg-type]
        squares = squared_distances(predicted, trained)
        law = squares.mean(0)[-1] * sizes[-1] / sizes
        return (
            Lines(
                f"L1 penalty: particles and one run of SGD, n = {self.dimensions[-1]}",
                "time [samples per dimension]",
                "overlaps Q1, Q2 and squared norm q",
                tuple(curves),
            ),
            Lines(
                f"Distance of SGD from the particles: n times its square is {squares.mean(0)[0] * sizes[0]:.3f} at n = "
                f"{sizes[0]:g}, {squares.mean(0)[-1] * sizes[-1]:.3f} at {sizes[-1]:g}",
                "dimension n",
                "mean squared distance over Q1, Q2, q",
                (
                    spread_curve(sizes, squares, "SGD"),
                    Curve(tuple(sizes.tolist()), tuple(law.tolist()), "1/n", "predicted"),
                ),
                log_x=True,
                log_y=True,
                note="Band: replicates. Dashed: the law, through the largest dimension.",
            ),
        )


def squared_distances(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
    """Return the mean squared distances over runs, times and Q1, Q2, q: (replicates, dimensions)."""
    squares = (trained["mean"] - predicted["trajectory"]) ** 2 + trained["variance"]
    return squares.mean(("time", "order")).transpose("replicate", "cell").values
