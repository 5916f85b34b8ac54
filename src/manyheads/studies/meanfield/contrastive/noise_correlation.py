"""`meanfield/noise-correlation`: correlation of the augmentation noise of two views against the learned cosine.

The correlation rho enters twice: through the variance of a step, tau^2 D, which a negative rho reduces, and through the
drift, where it changes the norm of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_integers
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cell
from manyheads.theory.meanfield.contrastive.quadrature import Nodes
from manyheads.theory.meanfield.contrastive.sgd import train_overlaps
from manyheads.theory.meanfield.contrastive.stationary_states import stationary_states
from manyheads.theory.meanfield.contrastive.task import ContrastiveTask, sparse_feature
from manyheads.theory.papers import MENG

START = (0.6, 0.6)  # Q, q
NODES = Nodes(32, 12, 32)


def one_feature(augmentation_std: float, correlation: float, learning_rate: float) -> ContrastiveTask:
    """Return the task of one feature, a sign."""
    return ContrastiveTask(
        (sparse_feature(),), augmentation_std=augmentation_std, correlation=correlation, learning_rate=learning_rate
    )


def stationary_cosine(task: ContrastiveTask, nodes: Nodes = NODES) -> float:
    """Return the cosine of the stable stationary state that has learned the feature; 0 if there is none."""
    for start in ((0.9, 0.95), START, (0.4, 0.3)):
        found = stationary_states(task, [start], nodes)
        if learned := [abs(state.cosines[0]) for state in found if state.stable and abs(state.overlaps[0]) > 0.01]:
            return max(learned)
    return 0.0


@dataclass(frozen=True)
class NoiseCorrelation(Study):
    """Stationary cosine of weights and feature by the correlation of the augmentation noise, in two regimes.

    Attributes
    ----------
    moderate, strong
        Standard deviation of the augmentation noise and learning rate of the two regimes.
    dimension, runs
        n, and runs of a replicate.
    burn_in, horizon
        Times between which the cosine is averaged.
    """

    name: ClassVar[str] = "meanfield/noise-correlation"
    claim: ClassVar[str] = "Negatively correlated augmentation noise helps if it is moderate, hurts if strong"
    source: ClassVar[Source] = replace(
        MENG, locus="abstract: negatively correlated noise yields better performance; the regimes are derived here"
    )

    revision: ClassVar[int] = 2

    moderate: tuple[float, float] = (0.5, 2.0)
    strong: tuple[float, float] = (1.0, 0.5)
    dimension: int = 1000
    runs: int = 16
    burn_in: float = 40.0
    horizon: float = 140.0

    def __post_init__(self) -> None:
        check_integers(self, "runs")
        check_integers(self, "dimension", least=3)
        if not 0 <= self.burn_in < self.horizon < float("inf"):
            raise UsageError(f"burn_in={self.burn_in}, horizon={self.horizon}: expected 0 <= burn_in < horizon")

    @classmethod
    def small(cls) -> NoiseCorrelation:
        """Return the smallest configuration in which every claim can change."""
        return cls(dimension=40, runs=2, burn_in=1.0, horizon=3.0)

    def cells(self) -> tuple[Cell, ...]:
        """Return no augmentation noise, and independent and negatively correlated noise in both regimes."""
        std, rate = self.moderate
        settings = [(0.0, rate, 0.0), *((std, rate, rho) for rho in (-0.9, -0.5, 0.0, 0.5))]
        settings += [(self.strong[0], self.strong[1], rho) for rho in (-0.9, 0.0)]
        return tuple(Cell(noise=noise, learning_rate=rate, correlation=rho) for noise, rate, rho in settings)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the stationary cosine of the ODE in every cell, and for smaller learning rates."""
        cosines = [stationary_cosine(_task(cell)) for cell in self.cells()]
        std, rate = self.moderate
        scales = np.array([0.25, 0.5, 1.0])
        table = [[stationary_cosine(one_feature(std, rho, rate * s)) for rho in (-0.9, 0.0)] for s in scales]
        return dataset(
            {
                "cosine": ("setting", cosines, "stationary cosine"),
                "benefit": ("learning_rate", -np.diff(table)[:, 0], "gain in cosine by a correlation of -0.9"),
            },
            {"learning_rate": (rate * scales, "learning rate"), "setting": [cell.slug for cell in self.cells()]},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train by SGD and average the cosine over time and runs; all cells see the same random numbers."""
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
        times = np.linspace(self.burn_in, self.horizon, 101)
        path = train_overlaps(_task(cell), np.tile(START, (self.runs, 1)), self.dimension, times, rng)
        cosine = np.abs(path[..., 0]) / np.sqrt(path[..., 1])
        return dataset({"cosine": ((), cosine.mean(), "stationary cosine")})

    def claims(self) -> tuple[Claim, ...]:
        """Test the two statements of the abstract on noise, and the size of the effect in both regimes."""
        (std, rate), (large, slow) = self.moderate, self.strong

        def gain(noise: float, learning_rate: float) -> Callable[[xr.Dataset, xr.Dataset], np.ndarray]:
            def measured(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
                negative, independent = (
                    select_cell(trained, noise=noise, learning_rate=learning_rate, correlation=rho)["cosine"].values
                    for rho in (-0.9, 0.0)
                )
                return negative - independent

            return measured

        def expected(noise: float, learning_rate: float) -> Callable[[xr.Dataset], float]:
            places = {
                (cell["noise"], cell["learning_rate"], cell["correlation"]): i for i, cell in enumerate(self.cells())
            }

            def predicted_gain(predicted: xr.Dataset) -> float:
                values = predicted["cosine"].values
                return float(values[places[noise, learning_rate, -0.9]] - values[places[noise, learning_rate, 0.0]])

            return predicted_gain

        def loss_by_noise(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            clean, noisy = (
                select_cell(trained, noise=noise, learning_rate=rate, correlation=0.0)["cosine"].values
                for noise in (0.0, std)
            )
            return clean - noisy

        def half(gain: Callable[[xr.Dataset], float]) -> Callable[[xr.Dataset], float]:
            return lambda predicted: abs(gain(predicted)) / 2

        better = "Negatively correlated augmentation noise gives a larger cosine than independent noise"
        basis = "half the predicted effect: corrections of order 1/n cancel in the difference of paired runs"
        return (
            Claim(
                f"Independent augmentation noise of {std:g} lowers the stationary cosine (decrease)",
                loss_by_noise,
                quantity="decrease of the cosine",
                target=0.0,
                tolerance=(0.0, float("inf")),
                basis="an inequality: the decrease is positive",
            ),
            Claim(
                f"{better}: gain by rho = -0.9 at noise {std:g}, learning rate {rate:g}",
                gain(std, rate),
                quantity="gain of the cosine",
                target=expected(std, rate),
                tolerance=half(expected(std, rate)),
                basis=basis,
            ),
            Claim(
                f"{better}: gain by rho = -0.9 at noise {large:g}, learning rate {slow:g}",
                gain(large, slow),
                quantity="gain of the cosine",
                target=0.0,
                tolerance=(0.0, float("inf")),
                expected="refuted",
                basis="the abstract's statement: the gain is positive",
            ),
            Claim(
                f"At noise {large:g} and learning rate {slow:g} negative correlation lowers the cosine by as much as "
                "the ODE says",
                gain(large, slow),
                quantity="gain of the cosine",
                target=expected(large, slow),
                tolerance=half(expected(large, slow)),
                basis=basis,
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the cosine against rho in the moderate regime, for SGD and the ODE, and the gain by learning rate."""
        std, rate = self.moderate
        inside = [i for i, c in enumerate(self.cells()) if c["noise"] == std and c["learning_rate"] == rate]
        rho = tuple(float(self.cells()[i]["correlation"]) for i in inside)
        sampled = trained["cosine"].transpose("replicate", "cell").values[:, inside]
        theory = tuple(predicted["cosine"].values[inside].tolist())
        rates, benefit = predicted["learning_rate"].values, predicted["benefit"].values
        law = benefit[-1] * (rates / rates[-1]) ** 2
        return (
            Lines(
                f"Noise {std:g}, learning rate {rate:g}: rho = {rho[0]:g} changes the cosine by "
                f"{theory[0] - theory[-1]:+.4f} against rho = {rho[-1]:g}",
                "correlation rho of the augmentation noise",
                "stationary cosine of weights and feature",
                (spread_curve(rho, sampled, f"SGD, n = {self.dimension}"), Curve(rho, theory, "ODE", "predicted")),
                note="Band: replicates.",
            ),
            Lines(
                f"Gain by rho = -0.9 instead of 0: {benefit[-1]:.4f} at learning rate {rates[-1]:g}",
                "learning rate",
                "gain in cosine",
                (
                    Curve(tuple(rates.tolist()), tuple(benefit.tolist()), "ODE"),
                    Curve(tuple(rates.tolist()), tuple(law.tolist()), "square of the learning rate", "reference"),
                ),
                log_x=True,
                log_y=bool((benefit > 0).all()),
                note="Grey: the law of the variance of a step, through the last point.",
            ),
        )


def _task(cell: Cell) -> ContrastiveTask:
    return one_feature(float(cell["noise"]), float(cell["correlation"]), float(cell["learning_rate"]))
