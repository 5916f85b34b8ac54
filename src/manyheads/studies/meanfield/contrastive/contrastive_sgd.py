"""`meanfield/contrastive-sgd`: SGD in n dimensions against the overlap ODE, from exact and from random overlaps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_integers, check_rising
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.theory.meanfield.contrastive.ode import overlap_trajectory
from manyheads.theory.meanfield.contrastive.sgd import train_overlaps
from manyheads.theory.meanfield.contrastive.sgd_covariance import sgd_covariance
from manyheads.theory.meanfield.contrastive.stationary_states import growth_rates, norms_without_features
from manyheads.theory.meanfield.contrastive.task import ContrastiveTask
from manyheads.theory.papers import MENG

START = (0.15, 0.1, 0.5)  # Q_1, Q_2, q
ESCAPE = 0.3  # cosine at which a feature counts as found
ORDER = ("Q1", "Q2", "q")


@dataclass(frozen=True)
class ContrastiveSgd(Study):
    """Distance of SGD from the ODE by dimension, and the time to find a feature from random weights.

    Attributes
    ----------
    dimensions
        n, increasing.
    horizon, records
        End time in samples per dimension, and the number of times at which SGD and ODE are compared.
    runs
        Runs of a replicate from exact initial overlaps, and as many from random weights.
    escape_horizon
        End time of the runs from random weights; a run that has found no feature by then counts with this time.
    """

    name: ClassVar[str] = "meanfield/contrastive-sgd"
    claim: ClassVar[str] = "SGD for contrastive learning follows the overlap ODE with error n^(-1/2)"
    source: ClassVar[Source] = replace(
        MENG, locus="abstract: limit of high dimension; loss, ODE, fluctuations and escape time are derived here"
    )

    revision: ClassVar[int] = 2

    dimensions: tuple[int, ...] = (50, 100, 200, 400, 800, 1600, 3200)
    horizon: float = 30.0
    records: int = 50
    runs: int = 16
    escape_horizon: float = 40.0

    def __post_init__(self) -> None:
        check_integers(self, "records", "runs")
        if not (0 < self.horizon < float("inf") and 0 < self.escape_horizon < float("inf")):
            raise UsageError(f"horizon={self.horizon}, escape_horizon={self.escape_horizon}: expected positive times")
        check_rising("dimensions", self.dimensions, least=8)

    @classmethod
    def small(cls) -> ContrastiveSgd:
        """Return the smallest configuration in which every claim can change."""
        return cls(dimensions=(16, 32), horizon=3.0, records=3, runs=2, escape_horizon=4.0)

    @classmethod
    def full(cls) -> ContrastiveSgd:
        """Return the study up to 12,800 dimensions."""
        return cls(dimensions=(50, 100, 200, 400, 800, 1600, 3200, 6400, 12_800))

    def cells(self) -> tuple[Cell, ...]:
        """Return every dimension."""
        return grid(dimension=self.dimensions)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the trajectory of the ODE, deviations by linear response, and the slope of the escape time in ln n."""
        task = ContrastiveTask()
        path = overlap_trajectory(task, START, self._times())
        variances = np.einsum("tii->ti", sgd_covariance(task, START, self._times()))
        rates = growth_rates(task, (0.0, 0.0, norms_without_features(task)[-1]))
        return dataset(
            {
                "trajectory": (("time", "order"), path, "overlaps and squared norm"),
                "fluctuation": ((), variances.mean() ** 0.5, "sqrt n times the rms distance, by linear response"),
                "escape_slope": ((), 1 / (2 * rates.max()), "escape time per ln n", "samples per dimension"),
            },
            {"time": (self._times(), "time", "samples per dimension"), "order": list(ORDER)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train by SGD from exact initial overlaps, and from random weights until a feature is found."""
        task, dimension = ContrastiveTask(), int(cell["dimension"])
        rng = np.random.default_rng([*np.asarray(jax.random.key_data(key)).ravel().tolist(), dimension])
        path = train_overlaps(task, np.tile(START, (self.runs, 1)), dimension, self._times(), rng)
        norm = norms_without_features(task)[-1]
        start = np.full((self.runs, 3), norm)
        start[:, :2] = rng.standard_normal((self.runs, 2)) * np.sqrt(norm / dimension)
        times = np.linspace(0, self.escape_horizon, 161)
        random = train_overlaps(task, start, dimension, times, rng)
        found = np.abs(random[..., :2]).max(-1) > ESCAPE * np.sqrt(random[..., 2])  # (times, runs)
        escape = np.where(found.any(0), times[found.argmax(0)], self.escape_horizon)
        return dataset(
            {
                "trajectory": (("time", "run", "order"), path, "overlaps and squared norm"),
                "escape": ((), np.median(escape), "median time to find a feature", "samples per dimension"),
            },
            {"time": (self._times(), "time", "samples per dimension"), "order": list(ORDER)},
        )

    def _times(self) -> np.ndarray:
        return np.linspace(0, self.horizon, self.records + 1)[1:]

    def claims(self) -> tuple[Claim, ...]:
        """Compare the error's exponent and size, and the growth of the escape time, with the theory."""
        sizes, largest = np.asarray(self.dimensions, float), self.dimensions[-1]

        def slope(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return fit_exponent(sizes, _errors(predicted, trained))

        def escape(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            times = trained["escape"].transpose("replicate", "cell").values
            logs = np.log(sizes) - np.log(sizes).mean()
            return times @ logs / (logs @ logs)

        return (
            Claim(
                "The rms distance between SGD in n dimensions and the overlap ODE scales as n^(-1/2)",
                slope,
                quantity="exponent of n",
                target=-0.5,
                tolerance=(0.25, 0.1),
                basis="fluctuations of a mean over n coordinates; corrections of order 1/n make the slope steeper at "
                "the smallest dimensions",
            ),
            Claim(
                f"At n = {largest} the rms distance is that of linear response to the noise of the samples (ratio)",
                lambda predicted, trained: (
                    _errors(predicted, trained)[:, -1] * largest**0.5 / float(predicted["fluctuation"])
                ),
                quantity="distance, measured over predicted",
                target=1.0,
                tolerance=0.25,
                basis="the squared distance of a run has a standard deviation of 1.2 means, so that a replicate "
                "of 16 runs has 0.15 of the root; corrections are of relative order 1/n",
            ),
            Claim(
                "From random weights the time to find a feature grows as ln(n) / (2 rate), rate the growth rate at "
                "Q = 0",
                escape,
                quantity="growth of the time per unit of ln n",
                target=lambda predicted: float(predicted["escape_slope"]),
                tolerance=lambda predicted: 0.25 * float(predicted["escape_slope"]),
                basis="initial overlaps of size n^(-1/2) grow exponentially; a quarter for the smallest dimensions, "
                "whose initial overlaps are no longer small",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show one run at the smallest and the largest dimension beside the ODE, errors, and escape times."""
        sizes, errors = np.asarray(self.dimensions, float), _errors(predicted, trained)
        times = tuple(predicted["time"].values.tolist())
        curves = []
        for group, name in enumerate(ORDER):
            line = tuple(predicted["trajectory"].sel(order=name).values.tolist())
            curves.append(Curve(times, line, f"{name}, ODE", "predicted", group))
            for place, role in ((0, "reference"), (-1, "trained")):
                run = trained["trajectory"].isel(cell=place, replicate=0, run=0).sel(order=name).values
                label = f"{name}, n = {self.dimensions[place]}" if role == "trained" else ""
                curves.append(Curve(times, tuple(run.tolist()), label, role, group))  # type: ignore[arg-type]
        law = float(predicted["fluctuation"]) / sizes**0.5
        escape = trained["escape"].transpose("replicate", "cell").values
        rise = float(predicted["escape_slope"]) * (np.log(sizes) - np.log(sizes).mean()) + escape.mean()
        return (
            Lines(
                "Overlaps and squared norm: ODE and one run of SGD",
                "time [samples per dimension]",
                "overlaps Q1, Q2 and squared norm q",
                tuple(curves),
                note=f"Grey: n = {self.dimensions[0]}, the same quantities.",
            ),
            Lines(
                f"Distance of SGD from the ODE: n^({fit_exponent(sizes, errors).exponent:.2f})",
                "dimension n",
                "rms distance over Q1, Q2, q",
                (
                    spread_curve(sizes, errors, "SGD"),
                    Curve(tuple(sizes.tolist()), tuple(law.tolist()), "linear response", "predicted"),
                ),
                log_x=True,
                log_y=True,
                note="Band: replicates. Dashed: nothing is fitted.",
            ),
            Lines(
                "Time to find a feature from random weights",
                "dimension n",
                "median time [samples per dimension]",
                (
                    spread_curve(sizes, escape, "SGD"),
                    Curve(tuple(sizes.tolist()), tuple(rise.tolist()), "ln(n) / (2 rate)", "predicted"),
                ),
                log_x=True,
                note="Band: replicates. Dashed: the predicted slope, through the mean.",
                shows=("From random weights",),
            ),
        )


def _errors(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
    """Return the rms distances over runs, times and Q1, Q2, q: (replicates, dimensions)."""
    squares = (trained["trajectory"] - predicted["trajectory"]) ** 2
    return np.sqrt(squares.mean(("time", "run", "order")).transpose("replicate", "cell").values)
