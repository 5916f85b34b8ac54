"""`meanfield/saddle-escape`: time at which a missed feature is learned, against its initial size and prompt length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from scipy.optimize import brentq

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.theory.meanfield.incontext.circle import CircleState, circle_flow, circle_loss, escape_rate
from manyheads.theory.meanfield.incontext.crossings import first_crossing
from manyheads.theory.meanfield.incontext.landscape import saddle_levels
from manyheads.theory.meanfield.incontext.particles import circle_particles, particle_flow
from manyheads.theory.meanfield.incontext.task import circle_task
from manyheads.theory.papers import KIM

LEARNED, FOREIGN = 0.3, 0.6  # amplitudes of the target that is learned first, and of the foreign harmonics
LEVEL = 0.25  # of the loss: half the last saddle's
ESCAPES = 4.0  # times at which the flow ends, in predicted escape times of the default foreign mass
SHORTEST = 1e-3  # in units of g n^(-1/2), from which the radius of the flat region is sought


@dataclass(frozen=True)
class SaddleEscape(Study):
    """Escape time of particles on a quadrature grid from sizes eps, and the region that finite prompts make flat.

    Attributes
    ----------
    sizes
        Initial amplitudes eps of the missed target, falling.
    width, nodes
        Particles at equidistant angles, and nodes of the circle.
    lengths
        Pairs of a prompt at which the radius of the flat region is measured, rising.
    records
        Recorded times.
    """

    name: ClassVar[str] = "meanfield/saddle-escape"
    claim: ClassVar[str] = "A missed feature is learned after (g^2/kappa) ln(1/eps), g^2 its foreign mass"
    source: ClassVar[Source] = replace(
        KIM,
        locus="abstract: saddles are escaped; basins at n pairs are of radius n^(-1/4) at most. The rate, the escape "
        "time and the radius are derived here",
    )

    sizes: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5)
    width: int = 2048
    nodes: int = 256
    lengths: tuple[int, ...] = (100, 1000, 10_000, 100_000)
    records: int = 801

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or list(self.sizes) != sorted(set(self.sizes), reverse=True) or self.sizes[-1] <= 0:
            raise UsageError(f"sizes={self.sizes}: expected two or more positive numbers, falling")
        check_rising("lengths", self.lengths, least=2)

    @classmethod
    def full(cls) -> SaddleEscape:
        """Return the study down to initial sizes of one millionth."""
        return cls(sizes=(1e-2, 1e-3, 1e-4, 1e-5, 1e-6))

    @classmethod
    def small(cls) -> SaddleEscape:
        """Return the smallest configuration in which every claim can change."""
        return cls(sizes=(1e-1, 3e-2), width=64, nodes=16, lengths=(10, 100), records=41)

    def cells(self) -> tuple[Cell, ...]:
        """Return every initial size."""
        return grid(size=self.sizes)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the escape times and the loss of the closed equations, and the saddle levels."""
        times, rate = self._times(), escape_rate(FOREIGN**2)
        flows = [circle_flow(np.diag([LEARNED, size]), FOREIGN * np.eye(2), times).loss for size in self.sizes]
        found = [rate * first_crossing(times, loss, LEVEL) for loss in flows]
        return dataset(
            {
                "time": ("size", found, "escape time of the closed equations times the rate"),
                "loss": (("size", "moment"), np.stack(flows), "loss of the closed equations"),
                "levels": ("saddle", saddle_levels(np.eye(2)), "losses of the saddles"),
            },
            {"size": (list(self.sizes), "initial amplitude"), "moment": (times, "time")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Draw the foreign amplitude, let particles escape, and measure where finite prompts make the loss flat."""
        foreign = float(FOREIGN * jax.random.uniform(key, (), jnp.float64, 0.9, 1.1))
        times, rate = self._times(), escape_rate(foreign**2)
        start = circle_particles(np.diag([LEARNED, float(cell["size"])]), foreign * np.eye(2), self.width)
        flow = particle_flow(circle_task(nodes=self.nodes), start, times, layers="outer")
        return dataset(
            {
                "time": ((), rate * first_crossing(times, flow.loss, LEVEL), "escape time times the predicted rate"),
                "loss": ("moment", flow.loss, "loss of particles"),
                "radius": (
                    "length",
                    [_flat_radius(foreign, n) for n in self.lengths],
                    "radius of the flat region: amplitude over g at which the growth is a quarter of infinite prompts'",
                ),
                "slope": ("length", [_growth(1e-6, foreign, n) for n in self.lengths], "relative growth near zero"),
            },
            {"length": (list(self.lengths), "pairs of a prompt"), "moment": (times, "time")},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare the slope of the escape time, its level, and the exponent of the flat radius."""
        logs = np.log(1 / np.asarray(self.sizes))

        def slope(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            times = trained["time"].transpose("replicate", "cell").values
            return np.array([np.polyfit(logs, each, 1)[0] for each in times])

        def radius(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            values = trained["radius"].isel(cell=0).transpose("replicate", "length").values
            return fit_exponent(self.lengths, values)

        def growth(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return trained["slope"].isel(cell=0).max("length").values

        return (
            Claim(
                "The escape time grows as (g^2/kappa) ln(1/eps) (slope times the predicted rate)",
                slope,
                quantity="slope times the predicted rate",
                target=lambda predicted: float(np.polyfit(logs, predicted["time"].values, 1)[0]),
                tolerance=0.01,
                basis="corrections of relative size eps^2/g^2 at the largest eps, and the time between records",
            ),
            Claim(
                "The flat region of finite prompts, here no basin, is within the paper's bound n^(-1/4) on the radius "
                "of basins (exponent)",
                radius,
                quantity="exponent of n",
                target=-0.25,
                tolerance=(np.inf, 0.0),
                basis="the paper's bound on basins; here the loss falls as h^4 from h = 0, and the figure is the "
                "exponent of the radius at which the growth is a quarter of that of infinite prompts",
            ),
            Claim(
                "The radius at which finite prompts quarter the growth of a missed feature scales as n^(-1/2)",
                radius,
                quantity="exponent of n",
                target=-0.5,
                tolerance=0.02,
                basis="the growth depends on h^2 n / g^2 alone, up to corrections of order 1/n",
            ),
            Claim(
                "At finite n the loss has no curvature along the amplitude h of a missed feature at h = 0 (growth "
                "rate at h = 1e-6 g over that of infinite n, largest over n)",
                growth,
                quantity="relative growth rate",
                target=0.0,
                tolerance=1e-6,
                basis="the loss falls as h^4 n / 4 g^4: relative growth of order h^2 n / g^2 at h = 1e-6 g",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the staircase of losses with the saddle levels, and the escape time against the initial size."""
        logs = np.log(1 / np.asarray(self.sizes))
        times = trained["time"].transpose("replicate", "cell").values
        slopes = [np.polyfit(logs, each, 1)[0] for each in times]
        clock, rate = predicted["moment"].values, escape_rate(FOREIGN**2)
        stairs = []
        for place, (size, loss) in enumerate(zip(self.sizes, predicted["loss"].values, strict=True)):
            kept = clock <= 1.15 * float(predicted["time"][place]) / rate  # nothing happens after the escape
            x, y = (tuple(each[kept].tolist()) for each in (clock, loss))
            stairs.append(Curve(x, y, f"eps = {size:g}", "predicted", place))
        ends = (0.0, max(stair.x[-1] for stair in stairs))
        levels = [
            Curve(ends, (float(each),) * 2, "saddle levels" if not place else "", "reference")
            for place, each in enumerate(np.unique(predicted["levels"].values))
        ]
        return (
            Lines(
                f"Staircase of the loss: the saddle is left after {_listed(predicted['time'].values)} times g^2/kappa",
                "mean-field time",
                "loss",
                (*stairs, *levels),
                note=f"Closed equations. Particles leave the saddle after {_listed(times.mean(0))} times g^2/kappa.",
            ),
            Lines(
                f"Escape time: {np.mean(slopes):.4f} (g^2/kappa) ln(1/eps) + constant",
                "ln(1/eps), eps the initial amplitude",
                "escape time in units of g^2/kappa",
                (
                    spread_curve(logs, times, "particles"),
                    Curve(tuple(logs.tolist()), tuple(predicted["time"].values.tolist()), "closed", "predicted"),
                ),
                note="The predicted slope is 1. Band: replicates, each with a g of its own.",
            ),
        )

    def _times(self) -> np.ndarray:
        return np.linspace(0.0, ESCAPES + 1.25 * np.log(1 / self.sizes[-1]), self.records) / escape_rate(FOREIGN**2)


@jax.jit
def _slope_of(signal: jax.Array, foreign: jax.Array, length: jax.Array) -> jax.Array:
    """Return minus the slope of the loss in the amplitude of the missed target, over the amplitude."""

    def loss(h: jax.Array) -> jax.Array:
        learned = jnp.diag(jnp.stack([jnp.asarray(LEARNED, h.dtype), h]))
        return circle_loss(CircleState(learned, foreign * jnp.eye(2)), length)

    return -jax.grad(loss)(signal) / signal


def _growth(relative: float, foreign: float, length: int) -> float:
    """Return the growth rate of a missed target at a size in units of g, over that of infinite prompts at zero."""
    return (
        float(_slope_of(jnp.asarray(relative * foreign), jnp.asarray(foreign), jnp.asarray(float(length)))) * foreign**2
    )


def _flat_radius(foreign: float, length: int) -> float:
    """Return the smallest amplitude, in units of g, at which the growth is a quarter of that of infinite prompts."""
    scale = length**-0.5
    end = brentq(lambda log: _growth(np.exp(log) * scale, foreign, length) - 0.25, np.log(SHORTEST), 0.0)
    return float(np.exp(end)) * scale


def _listed(times: np.ndarray) -> str:
    return ", ".join(f"{each:.2f}" for each in times)
