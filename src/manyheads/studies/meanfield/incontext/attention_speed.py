"""`meanfield/attention-speed`: finite learning rate of the attention matrix against the two-timescale limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.theory.meanfield.incontext.circle import circle_flow
from manyheads.theory.papers import KIM

SIGNAL, FOREIGN, SCATTER = np.diag([0.3, 0.03]), 0.6 * np.eye(2), 0.01
FAST, SLOW = 1e3, 1e2  # the law is claimed from FAST on, and denied up to SLOW


@dataclass(frozen=True)
class AttentionSpeed(Study):
    """RMS error of the loss trajectory of a joint flow, whose attention learns r times as fast as the particles.

    Attributes
    ----------
    speeds
        Learning rate r of the attention matrix over that of the particles, rising.
    duration, records
        Last time and number of recorded times.
    """

    name: ClassVar[str] = "meanfield/attention-speed"
    claim: ClassVar[str] = "The two-timescale limit errs as 1/r at attention speed r, but only from r = 1000"
    revision: ClassVar[int] = 2
    source: ClassVar[Source] = replace(KIM, locus="two-timescale limit; the error at finite speed is derived here")

    speeds: tuple[float, ...] = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
    duration: float = 150.0
    records: int = 300

    def __post_init__(self) -> None:
        speeds = list(self.speeds)
        ends = sum(each <= SLOW for each in speeds), sum(each >= FAST for each in speeds)
        if speeds != sorted(set(speeds)) or speeds[0] <= 0 or min(ends) < 2:
            raise UsageError(f"speeds={self.speeds}: expected two up to {SLOW:g} and two from {FAST:g} on, rising")

    @classmethod
    def full(cls) -> AttentionSpeed:
        """Return the study with twice as many speeds."""
        return cls(speeds=(1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5))

    @classmethod
    def small(cls) -> AttentionSpeed:
        """Return the smallest configuration in which every claim can change."""
        return cls(speeds=(10.0, 100.0, 1e3, 1e4), duration=2.0, records=4)

    def cells(self) -> tuple[Cell, ...]:
        """Return every speed."""
        return grid(speed=self.speeds)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the order of the error."""
        return dataset({"order": ((), -1.0, "exponent of r of the error")})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Draw a start, integrate the joint flow and the limit, and compare the losses."""
        times = self._times()
        drawn = SCATTER * np.asarray(jax.random.normal(key, (2, 2, 2), jnp.float64))
        start = SIGNAL + drawn[0], FOREIGN + drawn[1]
        limit = circle_flow(*start, times)
        found = circle_flow(*start, times, attention_speed=float(cell["speed"]), tolerance=1e-8)
        error = float(np.sqrt(np.mean((found.loss - limit.loss) ** 2)))
        return dataset(
            {
                "error": ((), error, "root mean square error of the loss"),
                "loss": ("moment", found.loss, "loss of the joint flow"),
                "limit": ("moment", limit.loss, "loss of the two-timescale limit from the same start"),
            },
            {"moment": (times, "time")},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Fit the order of the error at fast attention, and at slow."""

        def order(chosen: np.ndarray) -> Any:
            def measure(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                values = trained["error"].transpose("replicate", "cell").values[:, chosen]
                return fit_exponent(np.asarray(self.speeds)[chosen], values)

            return measure

        speeds = np.asarray(self.speeds)
        return (
            Claim(
                f"The error of the two-timescale limit decreases as 1/r for attention speeds r from {FAST:g} on",
                order(speeds >= FAST),
                quantity="exponent of r",
                target=lambda predicted: float(predicted["order"]),
                tolerance=0.1,
                basis="the next order: at r = 1000 it is a tenth of the first",
            ),
            Claim(
                f"The error of the two-timescale limit decreases as 1/r for speeds up to {SLOW:g} already",
                order(speeds <= SLOW),
                quantity="exponent of r",
                target=-1.0,
                tolerance=0.1,
                basis="the same tolerance; near a saddle the curvature of the loss in W is small, and W lags",
                expected="refuted",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the error against the speed with the first order through its end, and loss trajectories."""
        speeds = np.asarray(self.speeds)
        errors = trained["error"].transpose("replicate", "cell").values
        clock = tuple(trained["moment"].values.tolist())
        line = errors[:, -1].mean() * speeds[-1] / speeds
        slope = fit_exponent(speeds[speeds >= FAST], errors[:, speeds >= FAST]).exponent
        fall = errors[:, 0].mean() / errors[:, -1].mean()
        losses = trained["loss"].isel(replicate=0).transpose("cell", "moment").values
        limit = trained["limit"].isel(replicate=0, cell=0).values
        return (
            Lines(
                f"Error of the two-timescale limit: r^({slope:.2f}) from r = {FAST:g} on",
                "attention speed r",
                "RMS error of the loss",
                (
                    spread_curve(speeds, errors, "joint flow"),
                    Curve(tuple(speeds.tolist()), tuple(line.tolist()), "1/r through the last", "reference"),
                ),
                log_x=True,
                log_y=True,
                note=f"From r = {speeds[0]:g} to {speeds[-1]:g} the error falls "
                f"{fall:{',.0f' if fall >= 100 else '.3g'}}-fold. Band: replicates with starts of their own.",
            ),
            Lines(
                "Loss at finite attention speed",
                "mean-field time",
                "loss",
                (
                    *(
                        Curve(clock, tuple(loss.tolist()), f"r = {speed:g}", group=place)
                        for place, (speed, loss) in enumerate(zip(speeds, losses, strict=True))
                    ),
                    Curve(clock, tuple(limit.tolist()), "limit", "reference"),
                ),
                note=f"One start. Mean error of all: {errors.mean(0)[0]:.2g} at r = {speeds[0]:g}, "
                f"{errors.mean(0)[-1]:.2g} at r = {speeds[-1]:g}.",
            ),
        )

    def _times(self) -> np.ndarray:
        return np.linspace(0.0, self.duration, self.records + 1)[1:]
