"""`joma/salient-first`: order and times in which components of different salience are learned (theorem 4).

One neuron and its attention are trained by SGD. With the loss whose gradient flow is that of theorem 4, times and rates
are those of the theorem; with the squared loss the order is the same, at the rates of its own law.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel
from manyheads.study.tables import dataset, select_cell
from manyheads.theory.joma.systems.components import LOSSES, train_components
from manyheads.theory.joma.systems.recording import SGDOptions
from manyheads.theory.joma.theorems.salient_first import (
    EXP,
    REGRESSION,
    affine_offset,
    deficit_ratio,
    exact_time,
    final_rate,
)
from manyheads.theory.papers import TIAN

LOSS_NAMES = {"matched": "matched loss", "squared": "squared loss"}
LAWS = {"matched": EXP, "squared": REGRESSION}
EARLY, LATE = 6.0, 12.0  # log deficits between which the slope is measured: deficits of 2e-3 and 6e-6
TOKEN_PROBABILITY = 0.9  # that a token is in a batch
RECORDS = 1024
LEVELS = np.linspace(0.25, LATE, 32)
RATIO = "ratio of the log deficits of the two largest targets"
PAIRED = 3.0  # log deficit of the second component at which the ratio with the third is measured


@dataclass(frozen=True)
class SalientFirst(Study):
    """Times, rates and order in which trained components converge, beside theorem 4.

    Attributes
    ----------
    targets
        mu of the three components under the matched loss, rising.
    squared_targets
        mu under the squared loss, rising; rates there grow as exp(mu²), so these are smaller.
    resolution
        Learning rate times the final rate of the fastest component: the relative decrease of its deficit per step.
    """

    name: ClassVar[str] = "joma/salient-first"
    claim: ClassVar[str] = "Salient components are learned first: ln(1/delta) = exp(mu^2/2) t - B(mu)"
    source: ClassVar[Source] = replace(
        TIAN, locus="theorem 4; exact time, offset and the law of the squared loss are derived here"
    )
    vectorized: ClassVar[bool] = True

    targets: tuple[float, float, float] = (1.0, 2.0, 2.5)
    squared_targets: tuple[float, float, float] = (1.0, 1.5, 2.0)
    resolution: float = 0.004

    def __post_init__(self) -> None:
        for name in ("targets", "squared_targets"):
            values = getattr(self, name)
            if not 0 < values[0] < values[1] < values[2] <= 4:
                raise UsageError(f"{name}={values}: expected three positive targets in rising order, 4 at most")
        if not 0 < self.resolution <= 0.2:
            raise UsageError(f"resolution={self.resolution}: expected a number in (0, 0.2]")

    @classmethod
    def full(cls) -> SalientFirst:
        """Return the study at a quarter of the learning rate."""
        return cls(resolution=0.001)

    @classmethod
    def small(cls) -> SalientFirst:
        """Return the smallest configuration in which every claim can change."""
        return cls(resolution=0.2)

    def cells(self) -> tuple[Cell, ...]:
        """Return the two losses."""
        return grid(loss=LOSSES)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return exact times, final rates and offsets of every component under both losses."""
        mu = {loss: np.asarray(self._targets(loss)) for loss in LOSSES}
        times = [exact_time(mu[loss], LEVELS[:, None], LAWS[loss]).T for loss in LOSSES]  # (component, level)
        pair = mu["matched"][2], mu["matched"][1]
        rates, offsets = (np.stack([of(mu[loss], LAWS[loss]) for loss in LOSSES]) for of in (final_rate, affine_offset))
        limit = float(final_rate(pair[0]) / final_rate(pair[1]))
        return dataset(
            {
                "time": (("loss", "component", "level"), np.stack(times), "time"),
                "rate": (("loss", "component"), rates, "slope of the affine law"),
                "offset": (("loss", "component"), offsets, "offset of the affine law"),
                "ratio": ((), float(deficit_ratio(*pair, PAIRED)), RATIO),
                "ratio_limit": ((), limit, "its limit"),
            },
            coords={"loss": list(LOSSES), "level": (LEVELS, "log deficit ln(1/δ)")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one neuron with its attention, and measure when its components reach each log deficit."""
        loss = str(cell["loss"])
        targets = self._targets(loss)
        training = self._training(loss)
        found = train_components(jnp.asarray(targets, jnp.float64), loss, training, TOKEN_PROBABILITY, key)
        clock = jnp.linspace(0.0, training.learning_rate * training.steps, RECORDS + 1)
        # Deficits decrease; the fastest reaches rounding, beyond all levels, and is held there.
        deficits = jax.lax.cummax(jnp.where(jnp.isfinite(found), found, 30.0), axis=0)
        times = jax.vmap(lambda column: jnp.interp(LEVELS, column, clock), 1)(deficits)  # (component, level)
        early, late = (jax.vmap(lambda c, at=at: jnp.interp(at, c, clock), 1)(deficits) for at in (EARLY, LATE))
        moment = jnp.interp(PAIRED, deficits[:, 1], clock)
        ratio = jnp.interp(moment, clock, deficits[:, 2]) / PAIRED
        return dataset(
            {
                "time": (("component", "level"), times, "time"),
                "slope": ("component", (LATE - EARLY) / (late - early), "slope of ln(1/δ) in time"),
                "late_time": ("component", late, f"time of ln(1/δ) = {LATE:g}"),
                "ratio": ((), ratio, RATIO),
            },
            coords={"level": (LEVELS, "log deficit ln(1/δ)")},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test slopes, offset, order and overshoot."""
        steps = self.resolution / TOKEN_PROBABILITY
        bias = f"a step takes ln(1 - x) for x, x up to {steps:.2g}; 2% for chance and the remainder of the affine law"
        slack = steps + 0.02

        def slope(loss: str, which: int) -> Measure:
            def ratio(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                slopes = select_cell(trained, loss=loss)["slope"].values[:, which]
                return slopes / predicted.sel(loss=loss)["rate"].values[which]

            return ratio

        def offset(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            theory = predicted.sel(loss="matched")
            offsets = select_cell(trained, loss="matched")["late_time"].values * theory["rate"].values - LATE
            return offsets[:, 1] / theory["offset"].values[1]

        def exponential(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            target = np.asarray(self.squared_targets)[2]
            return select_cell(trained, loss="squared")["slope"].values[:, 2] / np.exp(target**2 / 2)

        def lead(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            times = select_cell(trained, loss="squared")["late_time"].values  # (replicate, component)
            return np.diff(-np.log(times), axis=1).min(1)

        def ratio(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return select_cell(trained, loss="matched")["ratio"].values

        return (
            *(
                Claim(
                    f"Under the {LOSS_NAMES[loss]} ln(1/delta) of target {self._targets(loss)[which]:g} grows at the "
                    "final rate r(mu) of its law",
                    slope(loss, which),
                    quantity="rate, measured over predicted",
                    target=1.0,
                    tolerance=slack,
                    basis=bias,
                )
                for loss in LOSSES
                for which in (0, 2)
            ),
            Claim(
                "Under the matched loss the offset of ln(1/delta) of the middle target is B(mu)",
                offset,
                quantity="offset, measured over predicted",
                target=1.0,
                tolerance=lambda predicted: (
                    slack * (1 + LATE / float(predicted["offset"].sel(loss="matched").values[1]))
                ),
                basis=f"{bias}; relative to B, an error of the whole time counts (B + L)/B times",
            ),
            Claim(
                "Under the squared loss ln(1/delta) of the largest target grows at rate exp(mu^2/2) of theorem 4",
                exponential,
                quantity="rate, measured over predicted",
                target=1.0,
                tolerance=slack,
                basis=f"{bias}; the rate of this loss is (1 + mu^2) exp(mu^2)",
                expected="refuted",
            ),
            Claim(
                "Under the squared loss components are learned in the order of their salience",
                lead,
                quantity="relative lead of the earlier component",
                target=0.1,
                tolerance=(0.0, float("inf")),
                basis="an inequality: each converges a tenth earlier at least than the next less salient one",
            ),
            Claim(
                "Under the matched loss the ratio of log deficits is bounded by its limit exp((mu_j^2 - mu_k^2)/2)",
                ratio,
                quantity="ratio of log deficits",
                target=lambda predicted: float(predicted["ratio_limit"]),
                tolerance=(float("inf"), 0.0),
                basis="an inequality; in theory the ratio exceeds its limit if the waiting time of the larger target "
                "is the shorter one",
                expected="refuted",
            ),
            Claim(
                "Under the matched loss the ratio of log deficits is that of the exact learning times",
                ratio,
                quantity="ratio of log deficits",
                target=lambda predicted: float(predicted["ratio"]),
                tolerance=lambda predicted: 2 * slack * float(predicted["ratio"]),
                basis=f"{bias}; two times are compared",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show log deficits over time and the rates of the affine law."""
        shown: list[Panel] = []
        for loss in LOSSES:
            cell, theory = select_cell(trained, loss=loss), predicted.sel(loss=loss)
            curves = []
            for which, target in enumerate(self._targets(loss)):
                times = cell["time"].values[:, which]  # (replicate, level)
                # Times are measured, so a band would lie along the axis: every replicate is drawn.
                curves += [
                    Curve(tuple(row), tuple(LEVELS.tolist()), f"μ = {target:g}" if not number else "", group=which)
                    for number, row in enumerate(times.tolist())
                ]
                expected = tuple(theory["time"].values[which].tolist())
                curves.append(Curve(expected, tuple(LEVELS.tolist()), f"μ = {target:g}, theory", "predicted", which))
            shown.append(
                Lines(
                    f"{LOSS_NAMES[loss].capitalize()}: log deficits",
                    "time [steps × learning rate]",
                    "ln(1/δ)",
                    tuple(curves),
                    log_x=True,
                    note="One solid line per replicate; dashed, exact times of theory.",
                    shows=(f"Under the {LOSS_NAMES[loss]}",),
                )
            )
        rows = tuple(
            (
                LOSS_NAMES[loss],
                f"{target:g}",
                f"{float(select_cell(trained, loss=loss)['slope'].values[:, which].mean()):.4g}",
                f"{float(predicted['rate'].sel(loss=loss).values[which]):.4g}",
                f"{float(np.exp(target**2 / 2)):.4g}",
                f"{float(predicted['offset'].sel(loss=loss).values[which]):.4g}",
            )
            for loss in LOSSES
            for which, target in enumerate(self._targets(loss))
        )
        columns = ("loss", "μ", "slope, trained", "slope, theory", "e^(μ²/2)", "offset B, theory")
        note = f"Slopes between ln(1/δ) = {EARLY:g} and {LATE:g}."
        return (*shown, Listing("Rates of the affine law", columns, rows, note=note))

    def _targets(self, loss: str) -> tuple[float, float, float]:
        return self.targets if loss == "matched" else self.squared_targets

    def _training(self, loss: str) -> SGDOptions:
        mu, law = self._targets(loss), LAWS[loss]
        rate = self.resolution / float(final_rate(mu[2], law))
        horizon = 1.1 * float(exact_time(mu[0], LATE, law))
        return SGDOptions(rate, RECORDS * -(-int(horizon / rate) // RECORDS), RECORDS)
