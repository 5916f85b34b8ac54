"""Updates of modules along the axes of a plan: exponents beyond what is prescribed, small multiples, a table."""

from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.errors import UsageError
from manyheads.scaling.axes import LETTERS, Axis
from manyheads.scaling.checks.coordinate_check import Growth
from manyheads.statistics import Interval, fit_exponent
from manyheads.statistics.exponents import ExponentFit
from manyheads.studies.scaling.shared.parametrizations import NAMES, PLOT_GROUPS, Plan
from manyheads.study.panels import Multiples, spread_curve

DIVERGED = 99.0  # the exponent that stands for a training that diverged


def update_exponent(plan: Plan, trained: xr.Dataset, quantity: str, name: str, axis: Axis, place: int) -> ExponentFit:
    """Return the fitted exponent of an update along an axis at a checkpoint."""
    values = plan.along(trained, quantity, name, axis).isel(step=place)
    return fit_exponent(values[axis].values.tolist(), values.values)


def fitted(growth: Growth) -> tuple[float, Interval]:
    """Return an exponent and its interval, where training diverged a number beyond all exponents."""
    if growth.fit is None:
        return DIVERGED, Interval(DIVERGED, DIVERGED)
    return growth.fit.exponent, growth.fit.interval


def beyond(growth: Growth) -> tuple[float, Interval]:
    """Return how far an exponent lies above what is required, or (negative) below the least that is right."""

    def excess(exponent: float) -> float:
        return max(exponent - growth.required, 0.0) + min(exponent - growth.least, 0.0)

    exponent, interval = fitted(growth)
    return excess(exponent), Interval(excess(interval.low), excess(interval.high), interval.level)


def worst_of(growths: Sequence[Growth]) -> Growth:
    """Return the growth whose interval reaches farthest from what is prescribed."""
    return max(growths, key=lambda growth: max(abs(beyond(growth)[1].low), abs(beyond(growth)[1].high)))


def updates_picture(
    plan: Plan, trained: xr.Dataset, rows: Mapping[str, str], note: str, shows: tuple[str, ...]
) -> st.Panel:
    """Draw every quantity at the last checkpoint, relative to the base (or the smallest size), against the size."""
    pairs = list(plan.pairs())

    def plot(quantity: str, axis: Axis) -> tuple[st.Curve, ...]:
        curves, sizes = [], dict(plan.sizes)[axis]
        base = getattr(plan.base, axis)
        place = sizes.index(base) if base in sizes else 0
        x = np.log2(np.asarray(sizes) / sizes[place])
        for name in (name for name in plan.parametrizations if (name, axis) in pairs):
            values = plan.along(trained, quantity, name, axis).isel(step=-1).values  # (replicates, sizes)
            relative = np.log2(values / values[:, place : place + 1])
            curves.append(spread_curve(x, relative, NAMES[name], group=PLOT_GROUPS[name]))
        return tuple(curves)

    return Multiples(
        f"Updates after {trained['step'].values[-1]} steps, relative to the base",
        "doublings of the size",
        "doublings of the update",
        tuple(tuple(plot(quantity, axis) for axis, _ in plan.sizes) for quantity in rows),
        row_labels=tuple(rows.values()),
        column_labels=tuple(f"along {LETTERS[axis]}" for axis, _ in plan.sizes),
        note="In brackets the exponents of logits and of depth. Means over replicates; bands range over all. " + note,
        shows=shows,
    )


def exponents_table(plan: Plan, trained: xr.Dataset, columns: Mapping[str, str]) -> st.Panel:
    """Tabulate the exponents of all quantities at every checkpoint."""

    def entry(*at: object) -> str:
        try:
            fit = update_exponent(plan, trained, *at)  # type: ignore[arg-type]
        except UsageError:
            return "diverged"
        return f"{fit.exponent:+.2f} ± {fit.interval.width / 2:.2f}"

    return st.table(
        "Exponents, with the half-width of their 99% intervals",
        (
            {"scaling": NAMES[name], "axis": LETTERS[axis], "steps": str(step)}
            | {words: entry(quantity, name, axis, place) for quantity, words in columns.items()}
            for name, axis in plan.pairs()
            for place, step in enumerate(trained["step"].values)
        ),
        "In brackets the exponents of logits and of depth.",
    )
