"""`joma/salient-first`: components are learned in the order of their salience, at the times that theory computes.

One neuron and its attention are trained by SGD. With the loss that theorem 4 silently assumes, times and rates are the
theorem's; with the squared loss the order is the same, and the rates are others, just as computable.
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
from manyheads.joma.systems.components import LOSSES, Descent, train_components
from manyheads.joma.theory.salient_first import EXP, REGRESSION, affine_offset, deficit_ratio, exact_time, final_rate
from manyheads.study import Cell, Curve, Lines, Listing, Panel, Source, Study, Verdict, grid

LOSS_NAMES = {"matched": "matched loss", "squared": "squared loss"}
LAWS = {"matched": EXP, "squared": REGRESSION}
EARLY, LATE = 6.0, 12.0  # log deficits between which a slope is read off: deficits of 2e-3 and 6e-6
SHARE = 0.9  # of the tokens in a batch
RECORDS = 1024
LEVELS = np.linspace(0.25, LATE, 32)
PAIRED = 3.0  # log deficit of the second component at which it is compared with the third


@dataclass(frozen=True)
class SalientFirst(Study):
    """Times, rates and order in which trained components reach their targets, beside theorem 4.

    Attributes
    ----------
    targets
        mu of the three components under the matched loss, rising.
    squared_targets
        mu under the squared loss, rising; rates there grow as exp(mu²), so these are smaller.
    resolution
        Learning rate times the fastest component's final rate: how far the fastest deficit shrinks in one step.
    """

    name: ClassVar[str] = "joma/salient-first"
    claim: ClassVar[str] = (
        "salient components are learned first: ln(1/deficit) = exp(mu²/2) t - B(mu), B in closed form"
    )
    source: ClassVar[Source] = replace(
        SOURCE, locus="theorem 4; exact time, offset and the law of the squared loss are derived here"
    )
    vectorised: ClassVar[bool] = True

    targets: tuple[float, float, float] = (1.0, 2.0, 2.5)
    squared_targets: tuple[float, float, float] = (1.0, 1.5, 2.0)
    resolution: float = 0.004

    def __post_init__(self) -> None:
        for name in ("targets", "squared_targets"):
            values = getattr(self, name)
            if not 0 < values[0] < values[1] < values[2] <= 4:
                raise UsageError(f"{name}={values}: expected three positive targets in rising order, 4 at most")
        if not 0 < self.resolution <= 0.2:
            raise UsageError(f"resolution={self.resolution}: a step must shrink deficits by a fifth at most")

    @classmethod
    def full(cls) -> SalientFirst:
        """Return the study at a quarter of the learning rate."""
        return cls(resolution=0.001)

    def cells(self) -> tuple[Cell, ...]:
        """Return the two losses."""
        return grid(loss=LOSSES)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return exact times, final rates and offsets of every component under both losses."""
        mu = {loss: np.asarray(self._targets(loss)) for loss in LOSSES}
        times = [exact_time(mu[loss], LEVELS[:, None], LAWS[loss]).T for loss in LOSSES]  # (component, level)
        pair = mu["matched"][2], mu["matched"][1]
        return xr.Dataset(
            {
                "time": (("loss", "component", "level"), np.stack(times), {"long_name": "time", "units": "1"}),
                "rate": (
                    ("loss", "component"),
                    np.stack([final_rate(mu[loss], LAWS[loss]) for loss in LOSSES]),
                    {"long_name": "slope of the affine law", "units": "1"},
                ),
                "offset": (
                    ("loss", "component"),
                    np.stack([affine_offset(mu[loss], LAWS[loss]) for loss in LOSSES]),
                    {"long_name": "offset of the affine law", "units": "1"},
                ),
                "ratio": (
                    (),
                    float(deficit_ratio(*pair, PAIRED)),
                    {"long_name": "ratio of the log deficits of the two largest targets", "units": "1"},
                ),
                "ratio_limit": (
                    (),
                    float(final_rate(pair[0]) / final_rate(pair[1])),
                    {"long_name": "its limit", "units": "1"},
                ),
            },
            coords={"loss": list(LOSSES), "level": ("level", LEVELS, {"long_name": "log deficit ln(1/δ)"})},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one neuron with its attention, and read off when its components have come how far."""
        loss = str(cell["loss"])
        targets = self._targets(loss)
        training = self._training(loss)
        found = train_components(jnp.asarray(targets, jnp.float64), loss, training, key)
        clock = jnp.linspace(0.0, training.rate * training.steps, RECORDS + 1)
        # Deficits only shrink: the fastest runs into the last digit, beyond all levels, and is held there.
        deficits = jax.lax.cummax(jnp.where(jnp.isfinite(found.log_deficits), found.log_deficits, 30.0), axis=0)
        times = jax.vmap(lambda column: jnp.interp(LEVELS, column, clock), 1)(deficits)  # (component, level)
        early, late = (jax.vmap(lambda c, at=at: jnp.interp(at, c, clock), 1)(deficits) for at in (EARLY, LATE))
        moment = jnp.interp(PAIRED, deficits[:, 1], clock)
        return xr.Dataset(
            {
                "time": (("component", "level"), times, {"long_name": "time", "units": "1"}),
                "slope": (
                    "component",
                    (LATE - EARLY) / (late - early),
                    {"long_name": "slope of ln(1/δ) in time", "units": "1"},
                ),
                "late_time": ("component", late, {"long_name": f"time of ln(1/δ) = {LATE:g}", "units": "1"}),
                "ratio": (
                    (),
                    jnp.interp(moment, clock, deficits[:, 2]) / PAIRED,
                    {"long_name": "ratio of the log deficits of the two largest targets", "units": "1"},
                ),
            },
            coords={"level": ("level", LEVELS, {"long_name": "log deficit ln(1/δ)"})},
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare slopes, offsets, times, the order and the overshoot."""
        steps = self.resolution / SHARE
        bias = f"a step takes ln(1 - x) for x, x up to {steps:.2g}; 2% for chance and what the law leaves out"
        slack = steps + 0.02
        mean = {loss: self._cell(trained, loss) for loss in LOSSES}
        theory = {loss: predicted.sel(loss=loss) for loss in LOSSES}
        squared = np.asarray(self.squared_targets)
        order = mean["squared"]["late_time"].values  # (replicate, component)
        offsets = mean["matched"]["late_time"].values * theory["matched"]["rate"].values - LATE
        return (
            *(
                Verdict.from_samples(
                    f"{LOSS_NAMES[loss]}: the component of target {self._targets(loss)[which]:g} relaxes at r(mu)",
                    mean[loss]["slope"].values[:, which] / theory[loss]["rate"].values[which],
                    target=1.0,
                    tolerance=slack,
                    basis=bias,
                )
                for loss in LOSSES
                for which in (0, 2)
            ),
            Verdict.from_samples(
                "matched loss: the delay of the middle component is the offset B of theory",
                offsets[:, 1] / theory["matched"]["offset"].values[1],
                target=1.0,
                tolerance=slack * (1 + LATE / float(theory["matched"]["offset"].values[1])),
                basis=f"{bias}; relative to B, an error of the whole time counts (B + L)/B times",
            ),
            Verdict.from_samples(
                "squared loss: theorem 4's rate exp(mu²/2) holds for the largest target",
                mean["squared"]["slope"].values[:, 2] / np.exp(squared[2] ** 2 / 2),
                target=1.0,
                tolerance=slack,
                basis=f"{bias}; the rate of this loss is (1 + mu²) exp(mu²)",
                expected="refuted",
            ),
            Verdict.from_samples(
                "squared loss: the more salient a component, the earlier it is learned",
                np.diff(-np.log(order), axis=1).min(1),
                target=0.1,
                tolerance=(0.0, float("inf")),
                basis="an inequality: each arrives a tenth earlier at least than the next less salient one",
            ),
            Verdict.from_samples(
                "matched loss: the limit of the ratio of log deficits bounds the ratio at all times",
                mean["matched"]["ratio"].values,
                target=float(predicted["ratio_limit"]),
                tolerance=(float("inf"), 0.0),
                basis="an inequality; theory has the ratio pass its limit where the larger target waits less",
                expected="refuted",
            ),
            Verdict.from_samples(
                "matched loss: it passes its limit as far as the exact times say",
                mean["matched"]["ratio"].values,
                target=float(predicted["ratio"]),
                tolerance=2 * slack * float(predicted["ratio"]),
                basis=f"{bias}; two times are compared",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show log deficits in time, trained on predicted, and the rates."""
        shown: list[Panel] = []
        for loss in LOSSES:
            cell, theory = self._cell(trained, loss), predicted.sel(loss=loss)
            curves = []
            for which, target in enumerate(self._targets(loss)):
                times = cell["time"].values[:, which]  # (replicate, level)
                # Times are what is measured: a band would lie along the axis, so every replicate is drawn.
                curves += [
                    Curve(tuple(row), tuple(LEVELS.tolist()), f"μ = {target:g}" if not number else "", group=which)
                    for number, row in enumerate(times.tolist())
                ]
                expected = tuple(theory["time"].values[which].tolist())
                curves.append(Curve(expected, tuple(LEVELS.tolist()), f"μ = {target:g}, theory", "predicted", which))
            shown.append(
                Lines(
                    f"{LOSS_NAMES[loss].capitalize()}: how close components have come",
                    "time [steps × rate]",
                    "ln(1/δ)",
                    tuple(curves),
                    log_x=True,
                    note="One solid line a replicate. Each becomes straight in time: e^(mu²/2) t - B, or its own rate.",
                )
            )
        rows = tuple(
            (
                LOSS_NAMES[loss],
                f"{target:g}",
                f"{float(self._cell(trained, loss)['slope'].values[:, which].mean()):.4g}",
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

    def _training(self, loss: str) -> Descent:
        mu, law = self._targets(loss), LAWS[loss]
        rate = self.resolution / float(final_rate(mu[2], law))
        horizon = 1.1 * float(exact_time(mu[0], LATE, law))
        return Descent(rate, RECORDS * -(-int(horizon / rate) // RECORDS), SHARE, RECORDS)

    def _cell(self, trained: xr.Dataset, loss: str) -> xr.Dataset:
        found = trained.isel(cell=int(np.flatnonzero(trained["loss"].values == loss)[0]))
        return found.transpose("replicate", ...)
