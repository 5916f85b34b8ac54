"""`limits/approach`: convergence of transformers trained with Adam to the largest one along N, H and L."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.scaling.axes import LETTERS, WORDS, Axis
from manyheads.scaling.trained.trajectories import follow_networks
from manyheads.scaling.trained.transformers import Recipe
from manyheads.statistics import Interval
from manyheads.studies.scaling.shared.convergence import (
    SizeDistances,
    distances_to_largest,
    effective_sizes,
    fall_of_mean,
    fall_of_scatter,
    power_of_drift,
    show_distance,
)
from manyheads.studies.scaling.shared.curves import geometric_curve
from manyheads.studies.scaling.shared.parametrizations import CONSISTENT, LABELS, Plan, bordelon, choose_sizes, task_of
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.transformer.shape import Shape

BATCHES = {"digits": 16, "text": 8}
QUANTITIES = {"loss": "loss curve", "kernel": "kernel of the stream", "pattern": "attention pattern"}
WHEN = {0: "before training", -1: "after training"}
DRIFT = "at these sizes a drift like log {0} would have this power, and one like a power of {0} a higher one"
ROOT, HALF_WAY = -0.5, 0.25  # independent parts average out; half way from there to no fall at all
FLAT = {("half-logit", "key_dim"): "pattern", ("half-depth", "depth"): "kernel"}
"""Quantities that stay random in the limit: logits of every head at the logit exponent 1/2, the stream at the depth
exponent 1/2, where it adds up random blocks like a Brownian motion."""


@dataclass(frozen=True)
class Approach(Study):
    """Distance of loss curves and kernels to those of the largest N, H and L, of means and of single networks.

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``.
    axes, parametrizations
        Which axes, and which of the parametrizations: limits, half-logit, half-depth, mup, mup-half-logit, standard.
    base
        N, H, L at which all parametrizations are one; initial logits at exponent 1 have size (N of the base / N)^(1/2).
    key_dims, heads_counts, depths
        Sizes along each axis; the others are compared with the last one.
    steps, learning_rate
        Updates of Adam, and its learning rate at the base.
    networks
        Networks of a replicate, on the same batches.
    """

    name: ClassVar[str] = "limits/approach"
    claim: ClassVar[str] = "Loss curves and kernels converge as N, H, L grow, except under standard scaling"
    source: ClassVar[Source] = bordelon("figures 6 to 12: training converges as N, H, L grow; powers are derived here")
    unread_prediction: ClassVar[str] = "the limit has no closed form: distances are to the largest network"

    revision: ClassVar[int] = 2

    task: str = "digits"
    axes: tuple[str, ...] = ("key_dim", "heads", "depth")
    parametrizations: tuple[str, ...] = ("limits", "half-logit", "half-depth", "standard")
    base: tuple[int, int, int] = (2, 4, 2)
    key_dims: tuple[int, ...] = (4, 8, 16, 32)
    heads_counts: tuple[int, ...] = (4, 8, 16, 32)
    depths: tuple[int, ...] = (2, 4, 8, 16)
    steps: int = 40
    learning_rate: float = 0.003
    networks: int = 8

    def __post_init__(self) -> None:
        if not self.learning_rate > 0 or self.steps < 2:
            raise UsageError(
                f"learning_rate={self.learning_rate}, steps={self.steps}"
                ": expected a positive learning rate and two steps or more"
            )
        if self.networks < 2:
            raise UsageError(f"networks={self.networks}: a mean and a scatter need at least two")
        task_of(self.task, 1)
        if any(len(sizes) < 3 for _, sizes in self.plan().sizes):
            raise UsageError("a power of the distance to the largest size needs two sizes below it: give three or more")

    @classmethod
    def full(cls) -> Approach:
        """Return the study with sizes twice as large and four times the networks."""
        sizes, depths = (4, 8, 16, 32, 64), (2, 4, 8, 16, 32)
        return cls(key_dims=sizes, heads_counts=sizes, depths=depths, steps=80, networks=32)

    @classmethod
    def small(cls) -> Approach:
        """Return the smallest configuration in which every claim can change."""
        # Heads and replicates enough that distances stand out from the noise, and claims can change.
        return cls(
            axes=("key_dim",),
            parametrizations=("limits", "standard"),
            base=(2, 8, 1),
            key_dims=(1, 2, 4),
            steps=3,
            networks=2,
        )

    def plan(self) -> Plan:
        """Return the networks."""
        sizes = choose_sizes(self.axes, self.key_dims, self.heads_counts, self.depths)
        return Plan(Shape(*self.base), sizes, self.parametrizations, "adam")

    def cells(self) -> tuple[Cell, ...]:
        """Return every network once."""
        return self.plan().cells()

    @property
    def records(self) -> tuple[int, ...]:
        """Numbers of updates after which kernels are recorded."""
        return tuple(sorted({0, self.steps // 4, self.steps}))

    def predict(self, key: jax.Array) -> xr.Dataset:
        r"""Return the powers of the size: -1 for means, -1/2 for single networks, and what a drift without end shows.

        A network of size n computes averages over n independent parts (entries of a head, heads, blocks). They
        fluctuate by :math:`n^{-1/2}`, and so does everything computed of them; the mean over networks keeps what is of
        second order, :math:`n^{-1}`. Where the limit itself is random (`FLAT`) single networks do not converge.
        """
        pairs = list(self.plan().pairs())
        sizes = dict(self.plan().sizes)
        mean = [-1.0 if name in CONSISTENT else power_of_drift(sizes[axis]) for name, axis in pairs]
        single = [
            [ROOT if name in CONSISTENT and FLAT.get((name, axis)) != q else 0.0 for q in QUANTITIES]
            for name, axis in pairs
        ]
        places = [f"{name} along {LETTERS[axis]}" for name, axis in pairs]
        return dataset(
            {
                "mean": ("parametrization", mean, "power of the size in a distance of means"),
                "scatter": (("parametrization", "quantity"), single, "power of a scatter"),
            },
            {"parametrization": places, "quantity": list(QUANTITIES)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train some networks on the same batches, and keep their loss curves and their kernels at the records."""
        parametrization, shape = self.plan().train_with(cell)
        task, recipe = task_of(self.task, BATCHES[self.task]), Recipe(self.steps)
        found = follow_networks(
            task, parametrization, shape, recipe, self.learning_rate, self.records, networks=self.networks, key=key
        )
        dims = {
            "loss": ("network", "step"),
            "kernel": ("network", "record", "token", "token_too"),
            "pattern": ("network", "record", "token", "place"),
            "logits": ("network", "record"),
        }
        names = QUANTITIES | {"logits": "root mean square of the attention logits"}
        return xr.Dataset(
            {
                name: (dims[name], value, {"long_name": names[name], "units": "nat" if name == "loss" else "1"})
                for name, value in zip(dims, found, strict=True)
            },
            coords={
                "step": ("step", np.arange(self.steps), {"long_name": "updates", "units": "1"}),
                "record": ("record", np.asarray(self.records), {"long_name": "updates", "units": "1"}),
            },
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test the exponents of means and of single networks, and that the standard parametrization has no limit."""
        claims: list[Claim] = []
        for name, axis in self.plan().pairs():
            if name in CONSISTENT:
                claims += self._means(name, axis)
                claims += self._scatters(name, axis)
            elif name == "standard":
                claims += self._divergence(axis)
        return tuple(claims)

    def distances(self, trained: xr.Dataset, name: str, axis: Axis, quantity: str, place: int = -1) -> SizeDistances:
        """Return the distances of one quantity, at one of the records unless it is the loss curve."""
        values = self.plan().along(trained, quantity, name, axis)  # (replicates, sizes, networks, ...)
        return distances_to_largest(values if quantity == "loss" else values[:, :, :, place])

    def _means(self, name: str, axis: Axis) -> list[Claim]:
        sizes, letter = dict(self.plan().sizes)[axis], LETTERS[axis]
        drift, who = power_of_drift(sizes), f"{LABELS[name]} parametrization"

        def measure(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return fall_of_mean(sizes, self.distances(trained, name, axis, "loss").mean).measured

        return [
            Claim(
                f"{who}: the mean loss curve converges as {letter} grows (exponent of its distance)",
                measure,
                quantity="exponent of the size",
                target=drift,
                tolerance=(math.inf, 0.0),
                basis=DRIFT.format(letter),
            ),
            Claim(
                f"{who}: the distance of the mean loss curve to its limit scales as {letter}^-1",
                measure,
                quantity="exponent of the size",
                target=-1.0,
                tolerance=(1 + drift) / 2,
                basis=f"half way from {letter}^-1 to a drift like log {letter}, which has no limit",
            ),
        ]

    def _scatters(self, name: str, axis: Axis) -> list[Claim]:
        sizes, letter = dict(self.plan().sizes)[axis], LETTERS[axis]
        flat = FLAT.get((name, axis))

        def measure(quantity: str, place: int) -> Measure:
            return lambda predicted, trained: (
                fall_of_scatter(sizes, self.distances(trained, name, axis, quantity, place).scatter).measured
            )

        return [
            Claim(
                f"{LABELS[name]} parametrization: the std over networks of the {QUANTITIES[quantity]}"
                f"{'' if quantity == 'loss' else ' ' + when} "
                + (f"is independent of {letter}" if flat else f"scales as {letter}^-1/2"),
                measure(quantity, place),
                quantity="exponent of the size",
                target=0.0 if flat else ROOT,
                tolerance=HALF_WAY,
                basis="half way between parts that average out, -1/2, and parts that do not, 0",
            )
            for quantity in ((flat,) if flat else QUANTITIES)
            for place, when in WHEN.items()
            if not (quantity == "loss" and place == 0)
        ]

    def _divergence(self, axis: Axis) -> list[Claim]:
        sizes, letter = dict(self.plan().sizes)[axis], LETTERS[axis]
        # L blocks add a variance of order one each to the stream, before any training; N and H matter through Adam.
        place = 0 if axis == "depth" else -1

        def kernel(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return fall_of_mean(sizes, self.distances(trained, "standard", axis, "kernel", place).mean).measured

        def farther(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            last = [self.distances(trained, name, axis, "loss").mean[:, -1] for name in ("standard", "limits")]
            gap = last[0] - last[1]
            return gap if np.isfinite(gap).all() else (0.0, Interval(-math.inf, math.inf))  # where training diverged

        claims = [
            Claim(
                f"standard parametrization: the mean kernel of the stream {WHEN[place]} converges as {letter} grows "
                "(exponent of its distance)",
                kernel,
                quantity="exponent of the size",
                target=power_of_drift(sizes),
                tolerance=(math.inf, 0.0),
                basis=DRIFT.format(letter),
                expected="refuted",
            )
        ]
        if "limits" in self.parametrizations:
            claims.append(
                Claim(
                    f"From {letter}={sizes[-2]} to {sizes[-1]} the mean loss curve changes more under standard scaling",
                    farther,
                    quantity="difference of squared distances",
                    target=0.0,
                    tolerance=(0.0, math.inf),
                    basis="positive where the first distance is the larger one, both free of the noise of the means",
                )
            )
        return claims

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show loss curves by size, distances against size, and all exponents."""
        plan = self.plan()
        distances = [_distances(self, trained, axis) for axis, _ in plan.sizes]
        scatters = [_scatters(self, trained, axis) for axis, _ in plan.sizes]
        return _loss_curves(self, trained), *distances, *scatters, _powers(self, trained), _logits(self, trained)


def _loss_curves(study: Approach, trained: xr.Dataset) -> Panel:
    plan, steps = study.plan(), tuple(map(float, range(study.steps)))

    def plot(name: str, axis: Axis) -> tuple[Curve, ...]:
        mean = plan.along(trained, "loss", name, axis).mean((0, 2))  # (sizes, steps)
        names = [f"size {place + 1} of {len(mean)}" for place in range(len(mean))]
        return tuple(spread_curve(steps, row, names[place], group=place) for place, row in enumerate(mean))

    return plan.multiples(
        "Mean loss curves by size",
        "updates",
        "loss on the batch [nat]",
        plot,
        "Means over all networks of all replicates, on the same batches in every plot.",
    )


def _distances(study: Approach, trained: xr.Dataset, axis: Axis) -> Panel:
    plan = study.plan()
    sizes, letter = dict(plan.sizes)[axis], LETTERS[axis]
    x = tuple(map(float, sizes[:-1]))
    curves = []
    for name in [name for name, other in plan.pairs() if other == axis]:
        found = study.distances(trained, name, axis, "loss")
        middle = found.mean.mean(0)
        error = found.mean.std(0, ddof=1) / math.sqrt(len(found.mean)) if len(found.mean) > 1 else 0 * middle
        seen = (middle > 0) & np.isfinite(middle)
        low, high = middle - error, middle + error
        group = list(LABELS).index(name)
        ends = [np.sqrt(np.where(seen, np.maximum(v, 0.01 * np.abs(middle)), np.nan)) for v in (middle, low, high)]
        y, below, above = (tuple(v.tolist()) for v in ends)
        curves.append(Curve(x, y, LABELS[name], group=group, low=below, high=above))
        if name == "limits":
            floor = np.sqrt(found.scatter.mean(0) / (study.networks * len(found.scatter)))
            curves.append(spread_curve(x, floor, "subtracted noise", "predicted", group))
            guide = 1 / effective_sizes(sizes)
            guide = guide * (math.sqrt(middle[0]) if middle[0] > 0 else 1.0) / guide[0]
            curves.append(spread_curve(x, guide, f"1/{letter} - 1/{sizes[-1]}", "reference"))
    return Lines(
        f"Distance of the mean loss curve to that of {letter}={sizes[-1]}",
        WORDS[axis],
        "root mean square over updates [nat]",
        tuple(curves),
        log_x=True,
        log_y=True,
        note="The noise of the means is subtracted from the squares; bands are one standard error over replicates; "
        "squares below zero are not shown.",
        shows=(f"mean loss curve converges as {letter}",),
    )


def _scatters(study: Approach, trained: xr.Dataset, axis: Axis) -> Panel:
    plan = study.plan()
    sizes, letter = dict(plan.sizes)[axis], LETTERS[axis]
    curves: list[Curve] = []
    for name in [name for name, other in plan.pairs() if other == axis and name in CONSISTENT]:
        for quantity, text in QUANTITIES.items():
            scatter = np.sqrt(study.distances(trained, name, axis, quantity).scatter)  # (replicates, sizes - 1)
            label = f"{text}, {LABELS[name]}"
            curves.append(geometric_curve(sizes[:-1], scatter / scatter[:, :1], label, len(curves)))
    effective = effective_sizes(sizes, scatter=True)
    for power, label in ((ROOT, f"(1/{letter} + 1/{sizes[-1]})^(1/2)"), (0.0, "")):
        curves.append(spread_curve(sizes[:-1], (effective / effective[0]) ** power, label, "reference"))
    return Lines(
        f"Std over networks along {letter}, after training",
        WORDS[axis],
        f"relative to {letter}={sizes[0]}",
        tuple(curves),
        log_x=True,
        log_y=True,
        note=f"Of the difference between a network and the one of {letter}={sizes[-1]} with the same seed. "
        "Geometric means over replicates; bands range over all.",
        shows=(f"is independent of {letter}", f"scales as {letter}^-1/2"),
    )


def _powers(study: Approach, trained: xr.Dataset) -> Panel:
    rows = []
    for name, axis in study.plan().pairs():
        sizes = dict(study.plan().sizes)[axis]
        for quantity, place in [(q, p) for q in QUANTITIES for p in ((-1,) if q == "loss" else WHEN)]:
            found = study.distances(trained, name, axis, quantity, place)
            when = "" if quantity == "loss" else f", {WHEN[place]}"
            distances = ", ".join(show_distance(column) for column in found.mean.T)
            singles = ", ".join(f"{value:.3g}" for value in np.sqrt(found.scatter.mean(0)))
            mean, scatter = fall_of_mean(sizes, found.mean), fall_of_scatter(sizes, found.scatter)
            who = (LABELS[name], LETTERS[axis], f"{QUANTITIES[quantity]}{when}")
            rows.append((*who, distances, str(mean), singles, str(scatter)))
    return Listing(
        "Powers of the size",
        ("scaling", "axis", "quantity", "distances of means", "power", "std over networks", "power "),
        tuple(rows),
        note="Distances to the largest size m, by size n, root mean squares over entries, and the power of the "
        "effective size with its 99% interval: (1/n - 1/m)^-1 for means, (1/n + 1/m)^-1 for single networks. "
        "A dash: not distinguishable from the noise.",
    )


def _logits(study: Approach, trained: xr.Dataset) -> Panel:
    plan = study.plan()
    rows = []
    for name, axis in plan.pairs():
        logits = plan.along(trained, "logits", name, axis).mean((0, 2))  # (sizes, looks)
        losses = plan.along(trained, "loss", name, axis)[..., -max(study.steps // 4, 1) :].mean((0, 2, 3))
        texts = [", ".join(f"{v:.2f}" for v in column) for column in (logits[:, 0], logits[:, -1], losses)]
        rows.append((LABELS[name], LETTERS[axis], *texts))
    return Listing(
        "Attention logits and losses",
        ("scaling", "axis", "logits before, by size", "logits after", "loss of the last quarter [nat]"),
        tuple(rows),
        note="Root mean squares of the attention logits, and the mean loss.",
    )
